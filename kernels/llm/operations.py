"""embed and rope_append: looks at their arguments, and their launches."""

import functools
from pathlib import Path

import torch

from kernels.fusion.arguments import expect_eps
from kernels.kv_cache import QuantizedKV
from kernels.kv_cache.fixed import PEAK
from kernels.kv_cache.rounding import default_group
from lab import cuda
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_apart, expect_first, expect_no_gradient, output

HERE = Path(__file__).resolve().parent
HALVES = (torch.float16, torch.bfloat16)
EMBED = Calls("embed")
APPEND = Calls("rope_append", outs=3)  # the queries, and the cache's k and v
APPEND_QUANTIZED = Calls("rope_append", outs=5)  # the queries, and codes and scales of both caches


def embed(E, token, *, out=None, pdl=False):
    """E[token]: E (vocab, hidden) float16 or bfloat16, token (1,) int64 → (hidden,). Moves 4 · hidden bytes."""
    if (done := EMBED.run((bool(pdl),), out, E, token)) is not None:
        return done
    result = expect_embed(E, token, out)
    vocab, hidden = E.shape
    with EMBED.preparing((bool(pdl),), (out,), (result,), (E, token)):
        _kernel("embed", E.dtype).embed(-(-hidden // 256), 256, E, token, result, vocab, hidden, pdl=pdl)
    return result


def expect_embed(E, token, out=None):
    """Raise unless embed can be called so. Returns the tensor to write to."""
    expect_first("embed", "E", E, ("vocab", "hidden"), HALVES)
    expect("embed", "token", token, E, (1,), (torch.int64,))
    return output("embed", out, E, (E.shape[1],), E=E, token=token)


def rope_append(
    qkv, turns, kv_len, k, v, *, bias=None, q_norm=None, k_norm=None, eps=1e-6, out=None, pdl=False
):  # fmt: skip
    """Queries at the new token's position; its keys and values go into the cache.

    qkv      (n_heads + 2 · n_kv_heads, head_dim) float16 or bfloat16: queries, keys and values of one token
    turns    (head_dim / 2,) float64: turns per token of each pair of numbers, ref.llm.rope_frequencies / 2π
    kv_len   (1,) int32: tokens in the cache, this one among them; its position is kv_len - 1
    k, v     (capacity, n_kv_heads, head_dim), like qkv: written at that position. Or two QuantizedKV of shape (1,
             capacity, n_kv_heads, head_dim), of 8 or 4 bits as kernels.kv_cache.empty makes them, the first for keys:
             what is written is, bit for bit, what kernels.kv_cache.quantize makes of these numbers in qkv's dtype
    bias     like qkv, added first
    q_norm, k_norm   (head_dim,), like qkv: RMSNorms of each head, with eps; both or neither
    → (n_heads, head_dim)

    Moves 4 · (n_heads + 2 · n_kv_heads) · head_dim bytes; few bits are fewer.
    """
    others = qkv, turns, kv_len, bias, q_norm, k_norm
    calls, options, places = _kind(k, v, eps, pdl)
    if calls is not None and (done := calls.run(options, out, *places, *others)) is not None:
        return done[0]
    result, n_kv_heads = expect_rope_append(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, out)
    with calls.preparing(options, (out, *places), (result, *places), others):
        _launch(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, result, n_kv_heads, places, pdl)
    return result


def _kind(k, v, eps, pdl):
    """(the prepared calls for such caches, all that decides beside the tensors, the tensors that are written to); of
    what is no cache, (None, None, None)."""
    if isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV):
        caches = (*_facts(k), *_facts(v), v.peak >= PEAK)
        return APPEND_QUANTIZED, (eps, bool(pdl), *caches), (k.packed, k.scale, v.packed, v.scale)
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return APPEND, (eps, bool(pdl)), (k, v)
    return None, None, None


def _facts(cache):
    return cache.shape, cache.form, cache.dtype


def expect_rope_append(
    qkv, turns, kv_len, k, v, bias=None, q_norm=None, k_norm=None, eps=1e-6, out=None, *, memory=True
):  # fmt: skip
    """Raise unless rope_append can be called so. Returns (the tensor to write to, n_kv_heads). memory: whether the
    tensors have any, so that it can be seen whether they share it."""
    where = "rope_append"
    expect_eps(where, eps)
    expect_first(where, "qkv", qkv, ("n_heads + 2 n_kv_heads", "head_dim"), HALVES)
    heads, head_dim = qkv.shape
    if head_dim % 2 or head_dim > 512:
        raise ValueError(f"{where}: head_dim must be even and at most 512, got {head_dim}")
    expect(where, "turns", turns, qkv, (head_dim // 2,), (torch.float64,))
    expect(where, "kv_len", kv_len, qkv, (1,), (torch.int32,))
    quantised = isinstance(k, QuantizedKV) or isinstance(v, QuantizedKV)
    if quantised:
        expect_quantised(where, k, v, qkv)
        places = {"k.packed": k.packed, "k.scale": k.scale, "v.packed": v.packed, "v.scale": v.scale}
    else:
        expect(where, "k", k, qkv, ("capacity", "n_kv_heads", head_dim))
        expect(where, "v", v, qkv, tuple(k.shape))
        places = {"k": k, "v": v}
    n_kv_heads = k.shape[-2]
    n_heads = heads - 2 * n_kv_heads
    if n_heads < 1 or n_heads % n_kv_heads:
        wanted = f"n_heads + 2 · {n_kv_heads} rows, n_heads a multiple of {n_kv_heads}"
        raise ValueError(f"{where}: qkv must have {wanted}, got {heads}")
    if bias is not None:
        expect(where, "bias", bias, qkv, tuple(qkv.shape))
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{where}: q_norm and k_norm must both be given, or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            expect(where, name, weight, qkv, (head_dim,))
    inputs = {"qkv": qkv, "turns": turns, "kv_len": kv_len, "bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    for name, place in places.items():
        expect_no_gradient(where, place, name)
        others = {other: tensor for other, tensor in (places | inputs).items() if other != name}
        if memory:
            expect_apart(where, name, place, **others)
    inputs |= places
    return output(where, out, qkv, (n_heads, head_dim), **(inputs if memory else {})), n_kv_heads


def _launch(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, out, n_kv_heads, places, pdl):
    heads, head_dim = qkv.shape
    tensors = (qkv, bias, q_norm, k_norm, turns, kv_len, out, *places)
    sizes = (heads - 2 * n_kv_heads, n_kv_heads, k.shape[-3])
    if isinstance(k, QuantizedKV):
        sizes += k.packed.shape[2], v.packed.shape[2]
        kernel = _kernel("rope_append_quantized", qkv.dtype, HEAD_DIM=head_dim, BITS=k.bits, GROUP=k.group)
        kernel = kernel.rope_append_quantized
    else:
        kernel = _kernel("rope_append", qkv.dtype, HEAD_DIM=head_dim).rope_append
    kernel(-(-heads // 4), 128, *tensors, *sizes, float(eps), pdl=pdl)


def expect_quantised(where, k, v, qkv):
    """Raise unless these are two caches that rope_append_quantized.cu can write to."""
    for name, cache, role in (("k", k, "keys"), ("v", v, "values")):
        if not isinstance(cache, QuantizedKV):
            raise TypeError(
                f"{where}: k and v must be two tensors or two QuantizedKV, got {type(cache).__name__} as {name}"
            )
        capacity, n_kv_heads, head_dim = cache.shape[1:]
        if cache.shape[0] != 1 or head_dim != qkv.shape[1]:
            raise ValueError(
                f"{where}: {name} must have shape (1, capacity, n_kv_heads, {qkv.shape[1]}), got {tuple(cache.shape)}"
            )
        if cache.shape != k.shape or cache.bits != k.bits:
            raise ValueError(f"{where}: v must be like k, {k!r}, got {v!r}")
        group = default_group(cache.bits, "token", head_dim) if cache.bits in (8, 4) else None
        if group is None or (cache.axis, cache.group, cache.role) != ("token", group, role):
            wanted = f"of 8 or 4 bits, with axis='token', their default group, and role={role!r}"
            raise ValueError(f"{where}: {name} must be {wanted}, got {cache!r}")
        if role == "values" and cache.peak < PEAK:
            raise ValueError(f"{where}: v must be made for scales up to {PEAK:g}, as kernels.kv_cache.empty makes it")
        if (cache.dtype, cache.device) != (qkv.dtype, qkv.device):
            wanted, got = f"{qkv.dtype} on {qkv.device}", f"{cache.dtype} on {cache.device}"
            raise TypeError(f"{where}: {name} must be of {wanted}, like qkv, got {got}")


@functools.cache
def _kernel(name, dtype, **sizes):
    return cuda.load(HERE / f"{name}.cu", [f"-DDTYPE={DTYPES[dtype]}", *(f"-D{n}={size}" for n, size in sizes.items())])
