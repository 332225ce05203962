"""decode, the best rung: attention of one new token for each sequence, at the speed at which its cache can be read.

Two launches, decode.cu and merge.cu. The second starts early and waits for the first, whether pdl is asked for or not.
Where the plan gives each block whole rows (many sequences, or about as many rows as multiprocessors), decode.cu alone.
"""

import functools
import math
from pathlib import Path

import torch

from kernels.attention.arguments import expect_decode
from kernels.attention.plan import card, options, plan
from lab import cuda
from lab.prepared import Calls, scratch

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/attention/{name}" for name in ("decode.cu", "merge.cu", "plan.py"))
LOG2_E = math.log2(math.e)
CALLS = Calls("decode")


def decode(q, k, v, scale=None, *, kv_lens=None, out=None, pdl=False):
    """softmax(scale · q Kᵀ) V for one token a sequence: the best rung.

    q        (batch, n_heads, head_dim), float16 or bfloat16
    k, v     (batch, kv_len, n_kv_heads, head_dim), like q; n_heads is a multiple of n_kv_heads
    scale    head_dim**-0.5 unless given
    kv_lens  int32 (batch,): only so many first tokens of each sequence count, whatever stands behind them, NaN too.
             From 1 to kv_len; on a card, where they are not looked at beforehand, a length outside is taken as the
             nearest of 0 and kv_len, and one of 0 gives zeros
    out      a tensor like q to write into, apart from all others
    pdl      True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), and,
             where that was launched so too, before the one ahead of that, and so on. They may write q, out, and of k
             and v the newest token of each sequence (number kv_lens[b] - 1); never older tokens or kv_lens, which are
             read at once

    Moves 4 · kv_len · head_dim bytes for each sequence and kv head, and little else, with up to 128 query heads of a kv
    head; with more, once for each part of them that a block takes side by side. The same from run to run, bit for bit;
    the order of sums depends on the shapes, on the lengths of all sequences, and on pdl.

    Scores and sums are float32. A weight is rounded to the dtype of q, for the sum that divides as for the values: so
    a mean of values near 65504 is finite in float16, too. There, weights below 2**-25 of the largest may be lost. A
    head whose scores are all -inf gives NaN, as softmax does.

    float32, a head_dim that is no multiple of 16, and addresses that are no multiples of 16 bytes are left to the rung
    `split`, which may not start early. Errors as in kernels/attention/__init__.py.
    """
    if (done := CALLS.run((scale, bool(pdl)), out, q, k, v, kv_lens)) is not None:
        return done
    factor, result = expect_decode("decode", q, k, v, scale, kv_lens, out, alignment=1)
    if _left_to_split(q, k, v, result):
        from kernels.attention.rungs import split  # which is one of the ladder, as decode is

        return split(q, k, v, factor, kv_lens=kv_lens, out=result)
    with CALLS.preparing((scale, bool(pdl)), (out,), (result,), (q, k, v, kv_lens)):
        _launch(q, k, v, factor, kv_lens, result, pdl)
    return result


def decode_in_shares(q, k, v, shares, *, out=None):
    """decode with the cache cut into so many shares instead of the plan's, one for each multiprocessor: to see why."""
    scale, out = expect_decode("decode_in_shares", q, k, v, None, None, out)
    if _left_to_split(q, k, v, out):
        raise ValueError("decode_in_shares: decode leaves these tensors to the rung split")
    if isinstance(shares, bool) or not isinstance(shares, int):
        raise TypeError(f"decode_in_shares: shares must be a whole number, got {type(shares).__name__}")
    if shares < 1:
        raise ValueError(f"decode_in_shares: shares must be at least 1, got {shares}")
    _launch(q, k, v, scale, None, out, False, {"shares": shares})
    return out


def counters(q, k, v, scale=None, *, kv_lens=None, check_races=False, **chosen):
    """Run decode's two kernels on the SIMT machine, whatever the device. Returns their two reports (simt.report).

    Where the plan does without the second, None is in its place. Tensors are copied to the CPU first. check_races: also
    look for races. chosen: what `plan` takes by name.
    """
    scale, _ = expect_decode("counters", q, k, v, scale, kv_lens, alignment=1)
    if _left_to_split(q, k, v, q):
        raise ValueError(
            "counters: decode leaves these tensors to the rung split; see kernels.attention.rungs.counters"
        )
    q, k, v, kv_lens = (None if t is None else t.detach().cpu() for t in (q, k, v, kv_lens))
    return _launch(q, k, v, scale, kv_lens, torch.empty_like(q), False, chosen, check_races=check_races)


def _left_to_split(q, k, v, out):
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    return q.dtype == torch.float32 or q.shape[2] % 16 or addresses % 16


def _launch(q, k, v, scale, kv_lens, out, pdl, chosen=None, **options):
    pdl = bool(pdl)
    p, split, merge, sizes, blocks = _prepared(
        q.shape, k.shape, q.dtype, q.device, kv_lens is not None, pdl, **(chosen or {})
    )
    if p.whole:  # one launch; no scratch memory
        args = (q, k, v, None, out, None, None, *sizes, scale * LOG2_E, int(pdl))
        return split.unchecked(p.shares, 32 * p.warps, *args, shared=p.shared, pdl=pdl, **options), None
    partial = scratch(q, p.floats, torch.float32)
    sums = partial[p.sums_at :]
    # looked at, or made here: unchecked
    args = (q, k, v, kv_lens, None, partial, sums, *sizes, scale * LOG2_E, int(pdl))
    first = split.unchecked(p.shares, 32 * p.warps, *args, shared=p.shared, pdl=pdl, **options)
    args = (partial, sums, kv_lens, out, *sizes, p.shares)
    return first, merge.unchecked(blocks, p.threads, *args, pdl=True, **options)


@functools.lru_cache(maxsize=1024)
def _prepared(q_shape, k_shape, dtype, device, lens, pdl, **chosen):
    """What all calls with such tensors share: (plan, the two kernels, sizes that both take, blocks of merge)."""
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q_shape, k_shape
    p = plan(batch, n_heads, n_kv_heads, head_dim, kv_len, *card(device), pdl, lens, **chosen)
    threads = () if p.whole else (p.threads, p.together)
    split, merge = _kernels(options(dtype, p.shape, p.schedule), p.stages, *threads)
    return p, split, merge, (kv_len, batch, p.rows, p.each, p.rest), batch * n_heads // p.together


@functools.cache
def _kernels(options, stages, threads=0, together=0):
    """decode.cu, and merge.cu if it has threads."""
    split, merge = cuda.load(HERE / "decode.cu", (*options, f"-DRING_STAGES={stages}")).decode, None
    if threads:
        merge = cuda.load(HERE / "merge.cu", (*options, f"-DTHREADS={threads}", f"-DTOGETHER={together}")).merge
    return split, merge
