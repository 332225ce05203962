"""decode: attention of one new token per sequence over its quantised cache."""

import functools
import math
from pathlib import Path

import torch

from kernels import attention
from kernels.attention.arguments import expect_first, expect_kv_lens, expect_scale, output
from kernels.attention.plan import options
from kernels.kv_cache.layout import TILE
from kernels.kv_cache.plan import plan
from kernels.kv_cache.quantization import QuantizedKV, lift
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.prepared import Calls, changing, scratch
from lab.tensors import expect_memory

HERE = Path(__file__).resolve().parent
FORMATS = {8: "Int8", 4: "Int4", "fp8": "Fp8"}  # the names of their decoders in codes.cuh
LOG2_E = math.log2(math.e)
CALLS = Calls("kv_cache.decode", numbers=1)  # kv_len
RESCALE_ABOVE = 8  # log2 of how far a weight may pass 1: see softmax.cuh
SOURCES = (
    "kernels/kv_cache/decode.cu",
    "kernels/kv_cache/plan.py",
    "kernels/kv_cache/quantization.py",
    "kernels/kv_cache/layout.py",
    "kernels/kv_cache/rounding.py",
    "kernels/attention/merge.cu",
)


def decode(q, k, v, scale=None, *, kv_lens=None, out=None, pdl=False):
    """softmax(scale · q kᵀ) v for one new token of each sequence, over a quantised cache.

    q        (batch, n_heads, head_dim) float16 or bfloat16; the result is like it
    k, v     QuantizedKV of one shape, (batch, kv_len, n_kv_heads, head_dim), on q's device; bits may differ. v has
             axis="token". Or two plain tensors: then it is kernels.attention.decode
    scale    None: head_dim**-0.5
    kv_lens  None, or int32 (batch,) from 1 to kv_len: how many tokens of each sequence count. On a card they are
             not looked at beforehand: a length outside is taken as the nearest of 0 and kv_len, one of 0 gives zeros
    out      a tensor like q to write to, apart from all others, at an address divisible by 4
    pdl      True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), and,
             where that was launched so too, before the one ahead of that, and so on. They may write q, out, and what
             appending to the newest group of tokens of each sequence changes; never older groups or kv_lens

    Moves the bytes of k and v once. Against attention over the dequantised cache the error is about that of rounding
    the result and the weights, 2e-3 where both are float16 and 4e-3 where the result is bfloat16; up to 1e-2 where all
    values are below 1e-5, too small for their scales, which are float16.

    At its first call with a cache of axis="token" as k it lays that out for keys, in place (QuantizedKV.lay_out), and
    as values again when it is next taken as v; a graph capture refuses that with a RuntimeError: call decode once
    before, or quantise with role="keys". A captured graph keeps kv_len, the addresses of the codes and the powers of
    two that go with the largest scale: after `append` or `lay_out`, capture anew.

    TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
    """
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return attention.decode(q, k, v, scale, kv_lens=kv_lens, out=out, pdl=pdl)
    if type(k) is type(v) is QuantizedKV:
        shape = k.shape
        if shape == v.shape and len(shape) == 4:
            options = _kind(shape, scale, pdl, k.form, k.lift, v.form, v.lift)
            done = CALLS.run(options, out, q, k.packed, k.scale, v.packed, v.scale, kv_lens, shape[1])
            if done is not None:
                return done
    factor, result = _expect_all(q, k, v, scale, kv_lens, out)
    if k.role != "keys" or v.role != "values":
        _lay_out(k, "keys"), _lay_out(v, "values")
    others = q, k.packed, k.scale, v.packed, v.scale, kv_lens
    options = _kind(k.shape, scale, pdl, k.form, k.lift, v.form, v.lift)
    with CALLS.preparing(options, (out,), (result,), others):
        _launch(q, k, v, factor, kv_lens, result, bool(pdl))
    return result


def counters(q, k, v, scale=None, *, kv_lens=None, check_races=False, **chosen):
    """Run decode on the SIMT machine, on CPU tensors: the reports (simt.report) of its two launches; where the plan
    does without the second, None is in its place. chosen: what `plan` takes by name."""
    scale, out = _expect_all(q, k, v, scale, kv_lens, None)
    if q.device.type != "cpu":
        raise ValueError(f"counters: q must be on the CPU, got a tensor on {q.device}")
    return _launch(q, k, v, scale, kv_lens, out, False, chosen, check_races=check_races)


def _launch(q, k, v, scale, kv_lens, out, pdl, chosen=None, **options):
    if k.role != "keys" or v.role != "values":
        _lay_out(k, "keys"), _lay_out(v, "values")
    formats = k.bits, k.axis, k.group, v.bits, v.group
    batch, kv_len, n_kv_heads, _ = k.shape
    tiles, lens = -(-kv_len // TILE), kv_lens is not None
    p, split, merge, blocks = _prepared(
        q.shape, tiles, n_kv_heads, formats, q.dtype, lens, *_card(q.device), **(chosen or {})
    )
    # Powers of two that keep the operands in float16's range: q times the scales of keys, weights times those of values
    q_lift, v_lift = k.lift if k.axis == "channel" else 15, v.lift - RESCALE_ABOVE
    sizes = (*changing(kv_len), batch, p.rows, p.each, p.rest)
    rooms = k.packed.shape[2] * TILE // p.tile, v.packed.shape[2] * TILE // p.tile
    if p.whole:  # one launch; no scratch memory
        results = out, None, None
    else:
        partial = scratch(q, p.floats, torch.float32)
        sums = partial[p.sums_at :]
        results = None, partial, sums
    args = (q, k.packed, v.packed, k.scale, v.scale, kv_lens, *results, *sizes, *rooms)  # looked at, or made here
    args += (scale * LOG2_E, q_lift, v_lift, int(pdl))
    first = split.unchecked(p.blocks, 32 * p.warps, *args, shared=p.shared, pdl=pdl, **options)
    if p.whole:
        return first, None
    args = (partial, sums, kv_lens, out, *sizes, p.shares)
    return first, merge.unchecked(blocks, p.threads, *args, pdl=True, **options)


@functools.lru_cache(maxsize=1024)
def _prepared(q_shape, tiles, n_kv_heads, formats, dtype, lens, *card, **chosen):
    """What all calls with such tensors share, for which tiles of 16 tokens decide: (plan, the two kernels, blocks of
    merge)."""
    batch, n_heads, head_dim = q_shape
    k_bits, k_axis, k_group, v_bits, v_group = formats
    low = k_bits == v_bits == 4
    p = plan(batch, n_heads, n_kv_heads, head_dim, tiles * TILE, _held(formats, head_dim), low, *card, lens, **chosen)
    threads = () if p.whole else (p.threads, p.together)
    split, merge = _kernels(options(dtype, p.shape, p.schedule), formats, p.stages, p.room, p.team, *threads)
    return p, split, merge, batch * n_heads // p.together


def run_parts(
    q, shape, k_codes, k_scale, k_format, k_peak, v_codes, v_scale, v_format, v_peak, scale=None, kv_lens=None,
    out=None, pdl=False,
):  # fmt: skip
    """decode of two caches by their parts, if a call of its kind has been prepared; else None. Whatever could be wrong
    with them, but for the peaks, is part of the kind."""
    if len(shape) == 4 and 0 <= k_peak < math.inf and 0 <= v_peak < math.inf:
        options = _kind(shape, scale, pdl, k_format, lift(k_peak), v_format, lift(v_peak))
        return CALLS.run(options, out, q, k_codes, k_scale, v_codes, v_scale, kv_lens, shape[1])
    return None


def _kind(shape, scale, pdl, *how):
    """All that decides how caches of one shape are launched, beside the tensors and the exact kv_len."""
    batch, kv_len, n_kv_heads, head_dim = shape
    return scale, True if pdl else False, (batch, -(-kv_len // TILE), n_kv_heads, head_dim), *how


def _lay_out(cache, role):
    if cache.role != role:
        if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"decode: a cache must lie as {role} before a capture, got one that lies as {cache.role}: call decode "
                f"once before, or quantize(..., role={role!r})"
            )
        cache.lay_out(role)


def _held(formats, head_dim):
    """(bytes of a token of keys and one of values, with their own scales; those of the scales that channels have)"""
    k_bits, k_axis, k_group, v_bits, v_group = formats
    codes = sum(head_dim * (4 if bits == 4 else 8) // 8 for bits in (k_bits, v_bits))
    if k_axis == "channel":
        return codes + 2 * (head_dim // v_group), 2 * head_dim
    return codes + 2 * (head_dim // v_group + head_dim // k_group), 0


@functools.cache
def _kernels(options, formats, stages, room, team, threads=0, together=0):
    """decode.cu, and merge.cu if it has threads."""
    k_bits, k_axis, k_group, v_bits, v_group = formats
    tokens, channels = (k_group, 0) if k_axis == "channel" else (0, k_group)
    cache = f"Cache<{FORMATS[k_bits]}, {FORMATS[v_bits]}, {tokens}, {channels}, {v_group}>"
    own = f"-DCACHE={cache}", f"-DRING_STAGES={stages}", f"-DBLOCKS={room}", f"-DTEAM_WARPS={team}"
    split, merge = cuda.load(HERE / "decode.cu", (*options, *own)).decode, None
    if threads:
        both = *options, f"-DTHREADS={threads}", f"-DTOGETHER={together}"
        merge = cuda.load(HERE.parent / "attention" / "merge.cu", both).merge
    return split, merge


@functools.cache
def _card(device):
    return multiprocessors(device), shared_memory(device)


def _expect_all(q, k, v, scale, kv_lens, out):
    """Raise unless decode can be called so. Returns (scale, the tensor to write to)."""
    if not _all_well(q, k, v):
        expect_fit(q, k, v)
    if kv_lens is not None:
        expect_kv_lens("decode", kv_lens, q, *k.shape[:2])
    inputs = {"q": q, "kv_lens": kv_lens, "k": k.packed, "k.scale": k.scale, "v": v.packed, "v.scale": v.scale}
    for name, tensor in inputs.items():
        if tensor is not None:
            expect_memory("decode", name, tensor)
    scale, out = expect_scale("decode", scale, q.shape[2]), output("decode", out, q, q.shape, **inputs)
    if out.data_ptr() % 4:  # merge.cu writes two numbers at a time
        raise ValueError(f"decode: out must start at an address divisible by 4, got {out.data_ptr():#x}")
    return scale, out


def _all_well(q, k, v):
    """What expect_fit looks for, without the words: quick, at every call."""
    return (
        type(q) is torch.Tensor
        and type(k) is type(v) is QuantizedKV
        and k is not v
        and (q.dtype is torch.float16 or q.dtype is torch.bfloat16)
        and (q.is_cuda or q.is_cpu)
        and q.device == k.device == v.device
        and q.layout is torch.strided
        and q.is_contiguous()
        and v.axis == "token"
        and _go_together(q.shape, k.shape, v.shape)
        and not q.data_ptr() % 16
    )


@functools.lru_cache(maxsize=1024)
def _go_together(q, k, v):
    """Whether q, k and v can have these shapes."""
    return len(q) == 3 and k == v and (q[0], q[2]) == (k[0], k[3]) and 0 not in q and q[1] % k[2] == 0


def expect_caches(k, v):
    """Raise unless these are two QuantizedKV."""
    for name, cache in (("k", k), ("v", v)):
        if not isinstance(cache, QuantizedKV):
            raise TypeError(
                f"decode: k and v must be two QuantizedKV or two tensors, got {type(cache).__name__} as {name}"
            )
    if k is v:
        raise ValueError("decode: k and v must be two caches, got one for both: keys and values lie differently")


def expect_fit(q, k, v):
    """What _all_well looks for, and in words what is wrong: raise unless q and these caches go together."""
    expect_first("decode", "q", q, ("batch", "n_heads", "head_dim"), (torch.float16, torch.bfloat16))
    expect_caches(k, v)
    batch, n_heads, head_dim = q.shape
    for name, cache in (("k", k), ("v", v)):
        wanted = (batch, "kv_len", "n_kv_heads", head_dim) if name == "k" else tuple(k.shape)
        if len(cache.shape) != 4 or any(n != m and not isinstance(m, str) for n, m in zip(cache.shape, wanted)):
            listed = ", ".join(map(str, wanted))
            raise ValueError(f"decode: {name} must have shape ({listed}), got {tuple(cache.shape)}")
        if cache.device != q.device:
            raise ValueError(f"decode: {name} must be on {q.device}, like q, got one on {cache.device}")
    if v.axis != "token":
        raise ValueError(f"decode: v must be quantised with axis='token', got {v.axis!r}")
    n_kv_heads = k.shape[2]
    if n_heads % n_kv_heads:
        raise ValueError(
            f"decode: n_heads must be a multiple of n_kv_heads, got {n_heads} query heads and {n_kv_heads} kv heads"
        )
    if q.data_ptr() % 16:
        raise ValueError(f"decode: q must start at an address divisible by 16, got {q.data_ptr():#x}")
