"""decode, and its rungs by name: softmax(scale · q cacheᵀ) times the first 512 numbers of the cache's rows.

A rung is a launch(q, cache, table, kv_lens, scale, out, pdl, **options) of tensors that were looked at: table None for
a cache in one piece, scale already times log2(e). It returns what its kernels report.
"""

import math

import torch

from kernels.latent import splitting
from kernels.latent.arguments import expect_decode, tensors_of
from lab.prepared import Calls

LOG2_E = math.log2(math.e)
CALLS = Calls("latent.decode")
RUNGS = {"split": splitting.launch, "last": splitting.launch_last, "in_place": splitting.launch_in_place}
TRIALS = {"amla": splitting.launch_amla}  # which is not right for all values


def best(q):
    """The name of the rung that decode takes for a tensor like this."""
    hopper = not q.is_cuda or torch.cuda.get_device_capability(q.device) == (9, 0)
    return "hopper" if hopper and "hopper" in RUNGS else "split"


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
    weight is rounded to the dtype of q, for the sum that divides as for the values. A head whose scores are all -inf
    gives zeros, as one without tokens.

    TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
    """
    return _decode("decode", None, q, *tensors_of("decode", cache), kv_lens, scale, out, pdl)


def split(q, cache, *, kv_lens=None, scale, out=None, pdl=False):
    """decode by split.cu and merge.cu: tensor cores a warp at a time, for compute capability 8.0 and later."""
    return _decode("split", "split", q, *tensors_of("split", cache), kv_lens, scale, out, pdl)


def _decode(where, rung, q, cache, table, kv_lens, scale, out, pdl):
    if (done := CALLS.run((rung, scale, bool(pdl)), out, q, cache, table, kv_lens)) is not None:
        return done
    factor, result = expect_decode(where, q, cache, table, kv_lens, scale, out)
    with CALLS.preparing((rung, scale, bool(pdl)), (out,), (result,), (q, cache, table, kv_lens)):
        RUNGS[rung or best(q)](q, cache, table, kv_lens, factor * LOG2_E, result, bool(pdl))
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
    return (RUNGS | TRIALS)[rung or best(q)](q, cache, table, kv_lens, scale * LOG2_E, out, False, **how)
