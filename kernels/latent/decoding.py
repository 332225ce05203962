"""decode, and its rungs by name: softmax(scale · q cacheᵀ) times the first 512 numbers of the cache's rows.

A rung is a launch(q, cache, table, kv_lens, scale, out, pdl, **options) of tensors that were looked at: table None for
a cache in one piece, scale already times log2(e). It returns what its kernels report.
"""

import math

import torch

from kernels.latent import hopper, splitting
from kernels.latent.arguments import expect_decode, tensors_of
from lab.prepared import Calls

LOG2_E = math.log2(math.e)
CALLS = Calls("latent.decode")
RUNGS = {
    "split": splitting.launch,
    "last": splitting.launch_last,
    "in_place": splitting.launch_in_place,
    "hopper": hopper.launch,
}
TRIALS = {"amla": splitting.launch_amla}  # which is not right for all values


def best(q, scale):
    """The name of the rung that decode takes."""
    return "split" if hopper.why_not(q, scale) else "hopper"


def decode(q, cache, *, kv_lens=None, scale, out=None, pdl=False):
    """Latent attention of one new token for each sequence, absorbed: the best rung that the card has.

    q        (batch, n_heads, 576), float16 or bfloat16; n_heads from 1 to 128
    cache    (batch, kv_len, 576), or LatentPages(pages, table), like q in dtype and device
    kv_lens  int32 (batch,): only so many first tokens of each sequence count, whatever stands behind them, NaN too;
             a sequence of 0 gets zeros. From 0 to kv_len, or to what a row of the table has room for; on a card, where
             they are not looked at beforehand, the nearest of these is taken, and of a page number out of the pool the
             last page's. Pages need them; without, all tokens count
    scale    of scores, which has no usual value: heads before absorption have 128 + 64 dimensions in the models that
             have this attention, so theirs is 192**-0.5, at times more
    out      (batch, n_heads, 512) to write into, apart from all others
    pdl      True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), for
             which it waits before it reads anything but lengths and the table: no kernel ahead may write these

    Moves 1152 bytes a token, and does 2 · (576 + 512) flops for each token and head. The same from run to run, bit for
    bit; the order of sums depends on the shapes, and on the lengths of all sequences. Scores and sums are float32; a
    weight is rounded to the dtype of q for the product with values. A head whose scores are all -inf
    gives zeros, as one without tokens.

    TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
    """
    return decode_tensors(q, *_in_order(cache, scale, "decode"), kv_lens, out=out, pdl=pdl)


def split(q, cache, *, kv_lens=None, scale, out=None, pdl=False):
    """decode by split.cu and merge.cu: tensor cores a warp at a time, for compute capability 8.0 and later."""
    return decode_tensors(q, *_in_order(cache, scale, "split"), kv_lens, out=out, pdl=pdl, rung="split")


def last(q, cache, *, kv_lens=None, scale, out=None, pdl=False):
    """decode in one launch, last.cu: as `split`, and a sequence's last block merges."""
    return decode_tensors(q, *_in_order(cache, scale, "last"), kv_lens, out=out, pdl=pdl, rung="last")


def in_place(q, cache, *, kv_lens=None, scale, out=None, pdl=False):
    """decode in one launch, in_place.cu: as `split`, and a sequence's blocks add up in one place. The last bits differ
    from run to run. Blocks wait for each other: all of the card must be theirs, or become so."""
    return decode_tensors(q, *_in_order(cache, scale, "in_place"), kv_lens, out=out, pdl=pdl, rung="in_place")


def _in_order(cache, scale, where):
    """(cache or pages, scale, table or None)"""
    tokens, table = tensors_of(where, cache)
    return tokens, scale, table


def decode_tensors(q, cache, scale, table=None, kv_lens=None, *, out=None, pdl=False, rung=None):
    """decode, given tensors."""
    if (done := CALLS.run((rung, scale, bool(pdl)), out, q, cache, table, kv_lens)) is not None:
        return done
    factor, result = expect_decode(rung or "decode", q, cache, table, kv_lens, scale, out)
    with CALLS.preparing((rung, scale, bool(pdl)), (out,), (result,), (q, cache, table, kv_lens)):
        RUNGS[rung or best(q, factor)](q, cache, table, kv_lens, factor * LOG2_E, result, bool(pdl))
    return result


def counters(q, cache, *, kv_lens=None, scale, rung=None, out=None, check_races=False, **chosen):
    """Run a rung, the best one unless named, on the SIMT machine, on CPU tensors: its kernels' reports (simt.report).
    chosen: what its plan takes by name."""
    if isinstance(q, torch.Tensor) and not q.is_cpu:
        raise ValueError(f"counters: q must be on the CPU, got a tensor on {q.device}")
    if rung is not None and rung not in RUNGS | TRIALS:
        raise ValueError(f"counters: rung must be one of {', '.join(RUNGS | TRIALS)}, got {rung!r}")
    cache, table = tensors_of("counters", cache)
    scale, out = expect_decode("counters", q, cache, table, kv_lens, scale, out)
    how = {"chosen": chosen, "check_races": check_races}
    return (RUNGS | TRIALS)[rung or best(q, scale)](q, cache, table, kv_lens, scale * LOG2_E, out, False, **how)
