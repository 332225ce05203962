"""Kernel 1 of five: dt as the layer uses it, and how far the state has decayed since its chunk began.

    L seqlen   Q chunk_size   H nheads

    dt   softplus(dt + dt_bias), between dt_limit: each if asked for           (batch, H, chunks, Q)
    cum  the running sum of log2(e) A dt in the chunk: a base-2 exponent, as the card has an instruction for 2**x

From token j to token i of a chunk the state decays by 2**(cum_i - cum_j), so that the other kernels multiply nothing to
get a decay, and take one exponential. Heads lie next to each other in dt and tokens in the results: a tile of 16 heads
is read along one and written along the other.

A difference of two sums is off by 1e-7 of these sums. So no step is longer than LONGEST, of which nothing is left in
float32 in any case: after one token with a huge dt the sums, and the decays between later tokens, keep their digits.

Moves 2 or 4 bytes for each token and head, and writes 8.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.ssd.arguments import DTYPES, NO_LIMIT, expect_limit, expect_sizes, expect_step
from kernels.ssd.launching import launch

HEADS = 16  # of a tile
LOG2_E = math.log2(math.e)
LONGEST = tl.constexpr(-200.0)  # step of a sum: 2**-200 is 0


@triton.jit
def _add_unless_new(sum_a, new_a, sum_b, new_b):
    """The sums of two neighbouring stretches of tokens as one; new: a sequence begins in it, and the sum with it."""
    return tl.where(new_b != 0, sum_b, sum_a + sum_b), new_a | new_b


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads"])
def cumsum_kernel(
    dt, A, dt_bias, seq_idx, dt_out, cum, seqlen, nheads, nchunks, dt_batch, dt_token, low, high, log2_e,
    SOFTPLUS: tl.constexpr, Q: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """grid (chunks, tiles of heads, batch)."""
    chunk, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    h, q = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, Q)
    token = chunk * Q + q
    there = (h < nheads)[:, None] & (token < seqlen)[None, :]
    value = tl.load(dt + b * dt_batch + token[None, :] * dt_token + h[:, None], there, other=0).to(tl.float32)
    if dt_bias is not None:
        value += tl.load(dt_bias + h, h < nheads, other=0).to(tl.float32)[:, None]
    if SOFTPLUS:
        # log(1 + e**v) = max(v, 0) + log(1 + e), e = e**-|v|. A sum 1 + e has lost the last digits of e, and most of
        # Mamba-2's dt are small; log(1 + e) = 2 artanh(s), s = e / (2 + e) <= 1/3, by its series, is not.
        e = tl.exp(-tl.abs(value))
        s = e / (2 + e)
        u = s * s
        series = 1 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7 + u * (1 / 9 + u * (1 / 11 + u * (1 / 13 + u / 15))))))
        value = tl.where(value > 0, value, 0) + 2 * s * series  # NaN: in s
    value = tl.where(value < low, low, value)  # not tl.maximum, which drops NaN
    value = tl.where(value > high, high, value)
    value = tl.where(there, value, 0)  # past the end nothing decays or is added
    step = value * (tl.load(A + h, h < nheads, other=0) * log2_e)[:, None]
    step = tl.where(there, tl.where(step < LONGEST, LONGEST, step), 0)
    if seq_idx is None:
        total = tl.cumsum(step, 1)
    else:  # a sequence's sum begins with it: what an earlier one has, NaN too, stays there
        mine = tl.load(seq_idx + b * seqlen + token, token < seqlen, other=0)
        before = tl.load(seq_idx + b * seqlen + token - 1, (token < seqlen) & (token > 0), other=0)
        new = ((mine != before) & (token < seqlen) & (q > 0)).to(tl.int32)
        total, _ = tl.associative_scan((step, tl.broadcast_to(new[None, :], (HEADS, Q))), 1, _add_unless_new)
    to = ((b * nheads + h)[:, None] * nchunks + chunk) * Q + q[None, :]
    tl.store(dt_out + to, value, (h < nheads)[:, None])
    tl.store(cum + to, total, (h < nheads)[:, None])


def chunk_cumsum(dt, A, chunk_size, *, dt_bias=None, seq_idx=None, dt_softplus=False, dt_limit=NO_LIMIT):
    """dt as it is used, and the running sum of log2(e) A dt in each chunk. Both (batch, H, chunks, Q) float32.

    dt (batch, L, H), A (H,) float32, dt_bias (H,), seq_idx (batch, L) int32: where it changes, the sum begins anew. In
    the last chunk, tokens past the end have a dt of 0.
    """
    expect_step("chunk_cumsum", dt, dt=(dt, ("batch", "seqlen", "nheads"), DTYPES))
    batch, seqlen, nheads = dt.shape
    expect_step(
        "chunk_cumsum", dt,
        A=(A, (nheads,), (torch.float32,)),
        dt_bias=(dt_bias, (nheads,), DTYPES),
        seq_idx=(seq_idx, (batch, seqlen), (torch.int32,)),
    )  # fmt: skip
    expect_sizes("chunk_cumsum", chunk_size=chunk_size, batch=batch, nheads=nheads)
    expect_limit("chunk_cumsum", dt_limit)
    return run(dt, A, chunk_size, dt_bias, seq_idx, dt_softplus, dt_limit)


def run(dt, A, chunk_size, dt_bias, seq_idx, dt_softplus, dt_limit):
    """As chunk_cumsum, on tensors that have been looked at."""
    batch, seqlen, nheads = dt.shape
    nchunks = -(-seqlen // chunk_size)
    both = dt.new_empty((2, batch, nheads, nchunks, chunk_size), dtype=torch.float32)
    low, high = map(float, dt_limit)
    grid = nchunks, -(-nheads // HEADS), batch
    tensors = dt, A, dt_bias, seq_idx, both[0], both[1]
    numbers = seqlen, nheads, nchunks, dt.stride(0), dt.stride(1), low, high, LOG2_E
    large = chunk_size > (256 if seq_idx is None else 128)  # with 4 warps registers would spill
    warps = 8 if large else 4
    launch(cumsum_kernel, grid, tensors, numbers, (bool(dt_softplus), chunk_size, HEADS), num_warps=warps)
    return both[0], both[1]


def work(batch, seqlen, nheads, chunk_size, dt_bytes=2):
    """(bytes, flops) of a call: dt once, the two results once; an addition for each (the exponentials aside)."""
    padded = -(-seqlen // chunk_size) * chunk_size
    return batch * nheads * (seqlen * dt_bytes + 8 * padded), 2 * batch * nheads * seqlen
