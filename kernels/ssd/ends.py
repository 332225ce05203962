"""The states at the ends of sequences that stand in a row: what fused.cu leaves to do.

    P headdim   G ngroups   H nheads   N dstate

fused.cu leaves for each sequence the state before the chunk of 64 tokens in which the next one begins. Here come its
last tokens, those of that chunk: state 2**(sum of log2(e) A dt) + sum over its tokens j of 2**(what is left) dt_j x_j
B_j^T. A program takes a part of one head's state of one sequence. A sequence that began in that chunk has no state
before; the last sequence's is the final state; an empty one's is 0.

Reads at most 63 tokens of x, B and dt for each sequence, and reads and writes the states.
"""

import math

import torch
import triton
import triton.language as tl

from kernels.ssd.launching import filled_up, launch
from kernels.ssd.tiles import log_decay, step_sizes

CHUNK = 64  # of fused.cu
LOG2_E = math.log2(math.e)


@triton.jit(do_not_specialize=["seqlen", "nheads", "heads_a_group"])
def ends_kernel(
    states, final, x, dt, A, B, cu_seqlens, dt_bias, seqlen, nheads, heads_a_group, x_token, x_head, dt_token, dt_head,
    b_token, b_group, low, high, log2_e,
    SOFTPLUS: tl.constexpr, HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """grid (H * sequences, tiles of a state, 1). P and N: a tile of the state."""
    sequence, h = (tl.program_id(0) // nheads).to(tl.int64), (tl.program_id(0) % nheads).to(tl.int64)
    tiles: tl.constexpr = (DSTATE + N - 1) // N
    p = tl.program_id(1) // tiles * P + tl.arange(0, P)
    n = tl.program_id(1) % tiles * N + tl.arange(0, N)
    there = (p < HEADDIM)[:, None] & (n < DSTATE)[None, :]
    cell = h * HEADDIM * DSTATE + p[:, None] * DSTATE + n[None, :]
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    to = states + sequence * nheads * HEADDIM * DSTATE + cell
    start = end // CHUNK * CHUNK
    if end == begin:
        tl.store(to, tl.full((P, N), 0, tl.float32), there)
    elif end >= seqlen:
        tl.store(to, tl.load(final + cell, there, other=0), there)
    elif end > start:  # else all of it is there
        j = start + tl.arange(0, CHUNK)
        own = (j >= begin) & (j < end)
        bias = 0.0
        if dt_bias is not None:
            bias += tl.load(dt_bias + h).to(tl.float32)
        step = step_sizes(tl.load(dt + j * dt_token + h * dt_head, own, other=0), own, bias, low, high, SOFTPLUS)
        log = tl.where(own, log_decay(tl.load(A + h) * log2_e, step), 0)
        behind = tl.cumsum(log, 0, reverse=True) - log  # tokens behind each, to the end
        xt = tl.load(x + h * x_head + j[None, :] * x_token + p[:, None], own[None, :] & (p < HEADDIM)[:, None], other=0)
        bs = B + (h // heads_a_group) * b_group + j[:, None] * b_token + n[None, :]
        bt = tl.load(bs, own[:, None] & (n < DSTATE)[None, :], other=0)
        scaled = tl.where(own[None, :], xt * (tl.exp2(behind) * step)[None, :], 0).to(bt.dtype)
        state = tl.dot(scaled, bt, input_precision="tf32x3")
        if (begin < start) | (begin == 0):  # before token 0 comes the initial state
            state += tl.load(to, there, other=0) * tl.exp2(tl.sum(log, 0))
        tl.store(to, state, there)


def finish(states, final, x, dt, A, B, cu_seqlens, dt_bias, dt_softplus, dt_limit):
    """The states at the ends of sequences, in place, of what fused.cu has left there: (sequences, H, P, N) float32.

    final is (1, H, P, N) float32; all others are as `five` takes them, with a batch of 1.
    """
    if x.is_cpu and x.dtype is torch.bfloat16:  # of which Triton's interpreter would multiply the bits
        x, B = x.float(), B.float()
    _, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    P, N = min(64, filled_up(headdim)), min(128, filled_up(dstate))
    grid = nheads * states.shape[0], -(-headdim // P) * -(-dstate // N), 1
    low, high = map(float, dt_limit)
    numbers = (
        seqlen, nheads, nheads // ngroups, *x.stride()[1:3], *dt.stride()[1:], *B.stride()[1:3], low, high, LOG2_E,
    )  # fmt: skip
    constants = bool(dt_softplus), headdim, dstate, CHUNK, P, N
    launch(ends_kernel, grid, (states, final, x, dt, A, B, cu_seqlens, dt_bias), numbers, constants, num_warps=4)
