"""Kernel 3 of five: what each chunk adds to the state, by its end.

    L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate

    state (batch, chunks, H, P, N):  sum over tokens j of the chunk of  2**(cum_last - cum_j) dt_j x_j B_j^T

A product of matrices: x^T, with each token scaled by what is left of it at the chunk's end, times B. The factors are
rounded to the dtype of x, sums are float32. One program a head and chunk; programs of the same chunk stand next to each
other in the grid, so that B comes from the cache for all of its heads but the first.

Reads x once, 2 P bytes a token and head in 16 bit, and writes P N / Q states for each.

varlen_states does the same for sequences laid end to end, which end anywhere in a chunk.
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.arguments import DTYPES, expect_sizes, expect_step
from kernels.ssd.launching import filled_up, launch


@triton.jit
def _times_b(acc, xt, bt, j, there, dt, cum, last):
    """acc + (x, scaled by what is left of each token at the end) times B. xt (P, SPAN), bt (SPAN, N)."""
    scale = tl.exp2(last - tl.load(cum + j, there, other=0)) * tl.load(dt + j, there, other=0)
    scaled = tl.where(there[None, :], xt * scale[None, :], 0).to(bt.dtype)
    return tl.dot(scaled, bt, acc, input_precision="bf16x3")  # float32 as three products of bfloat16 parts


@triton.jit
def _not_finite(tile):
    """1 if anything in the tile is not finite, else 0."""
    return tl.max(tl.max(tl.where(tile - tile == 0, 0, 1), 1), 0)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def state_kernel(
    x, B, dt, cum, seq_idx, states, strange, seqlen, nheads, nchunks, heads_a_group,
    x_batch, x_token, x_head, b_batch, b_token, b_group,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """grid (H * chunks, tiles of a state, batch). P and N: a tile of the state; SPAN: tokens at a time."""
    chunk, h = (tl.program_id(0) // nheads).to(tl.int64), (tl.program_id(0) % nheads).to(tl.int64)
    b, tiles = tl.program_id(2).to(tl.int64), (DSTATE + N - 1) // N
    p = tl.program_id(1) // tiles * P + tl.arange(0, P)
    n = tl.program_id(1) % tiles * N + tl.arange(0, N)
    start = chunk * Q
    end = tl.minimum(seqlen - start, Q).to(tl.int32)
    row, state = ((b * nheads + h) * nchunks + chunk) * Q, (b * nchunks + chunk) * nheads + h
    x += b * x_batch + h * x_head
    B += b * b_batch + (h // heads_a_group) * b_group
    last = tl.load(cum + row + Q - 1)
    acc = tl.full((P, N), 0, tl.float32)
    if seq_idx is not None:
        seq_idx += b * seqlen + start
        sequence, others = tl.load(seq_idx + end - 1), tl.full((P, SPAN), 0, tl.int32)
    for at in range(0, end, SPAN):
        s = tl.arange(0, SPAN)
        j = at + s
        there = j < end
        xs = x + (start + at) * x_token + s[None, :] * x_token + p[:, None]
        xt = tl.load(xs, there[None, :] & (p < HEADDIM)[:, None], other=0)
        if seq_idx is not None:  # only the sequence that the chunk ends in; of others not even a 0, as 0 * NaN is NaN
            others = tl.where(xt - xt == 0, others, 1)
            there = there & (tl.load(seq_idx + j, there, other=0) == sequence)
        bs = B + (start + at) * b_token + s[:, None] * b_token + n[None, :]
        bt = tl.load(bs, there[:, None] & (n < DSTATE)[None, :], other=0)
        acc = _times_b(acc, xt, bt, j, there, dt + row, cum + row, last)
    unlike = _not_finite(acc)  # 0 * NaN is NaN: no NaN of x is missing in the sum
    if seq_idx is not None:
        unlike += tl.max(tl.max(others, 1), 0)
    tl.store(strange + state * tl.num_programs(1) + tl.program_id(1), unlike)
    to = states + state * HEADDIM * DSTATE + p[:, None] * DSTATE + n[None, :]
    tl.store(to, acc, (p < HEADDIM)[:, None] & (n < DSTATE)[None, :])


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def varlen_kernel(
    x, B, dt, cum, cu_seqlens, starts, states, seqlen, nheads, nchunks, heads_a_group, x_token, x_head, b_token,
    b_group,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """grid (H * sequences, tiles of a state, 1). starts: the states at chunk starts. Of a sequence what lies in the row
    counts, whatever cu_seqlens holds: on a card nobody has looked."""
    sequence, h = (tl.program_id(0) // nheads).to(tl.int64), (tl.program_id(0) % nheads).to(tl.int64)
    tiles: tl.constexpr = (DSTATE + N - 1) // N
    p = tl.program_id(1) // tiles * P + tl.arange(0, P)
    n = tl.program_id(1) % tiles * N + tl.arange(0, N)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    begin, end = tl.maximum(begin, 0), tl.minimum(end, seqlen)
    there = (p < HEADDIM)[:, None] & (n < DSTATE)[None, :]
    cell = p[:, None] * DSTATE + n[None, :]
    acc = tl.full((P, N), 0, tl.float32)
    if end > begin:
        chunk = (end - 1) // Q
        start = chunk * Q
        row = (h * nchunks + chunk) * Q
        last = tl.load(cum + row + end - 1 - start)
        for at in range(tl.maximum(begin - start, 0).to(tl.int32), (end - start).to(tl.int32), SPAN):
            j = at + tl.arange(0, SPAN)
            inside = j < end - start
            xs = x + h * x_head + (start + j)[None, :] * x_token + p[:, None]
            xt = tl.load(xs, inside[None, :] & (p < HEADDIM)[:, None], other=0)
            bs = B + (h // heads_a_group) * b_group + (start + j)[:, None] * b_token + n[None, :]
            bt = tl.load(bs, inside[:, None] & (n < DSTATE)[None, :], other=0)
            acc = _times_b(acc, xt, bt, j, inside, dt + row, cum + row, last)
        if (begin < start) | (begin == 0):  # token 0 comes after the initial state
            before = tl.load(starts + (chunk * nheads + h) * HEADDIM * DSTATE + cell, there, other=0)
            acc += before.to(tl.float32) * tl.exp2(last)
    tl.store(states + (sequence * nheads + h) * HEADDIM * DSTATE + cell, acc, there)


def chunk_state(x, B, dt, cum, *, seq_idx=None, state_dtype=torch.float32):
    """What each chunk adds to the state by its end: (batch, chunks, H, P, N) of state_dtype. And `strange`.

    x (batch, L, H, P), B (batch, L, G, N); dt and cum (batch, H, chunks, Q), as chunk_cumsum gives them. Of a chunk in
    which several sequences meet, as seq_idx (batch, L) has it, the last one counts. strange (batch, chunks, H, tiles
    of a state) int32: not 0 where x has NaN or infinity, or a sum is not finite. chunk_scan must know.
    """
    expect_step("chunk_state", x, x=(x, ("batch", "seqlen", "nheads", "headdim"), DTYPES))
    batch, seqlen, nheads, headdim = x.shape
    expect_step(
        "chunk_state", x,
        B=(B, (batch, seqlen, "ngroups", "dstate"), (x.dtype,)),
        dt=(dt, (batch, nheads, "nchunks", "chunk_size"), (torch.float32,)),
        cum=(cum, tuple(dt.shape), (torch.float32,)),
        seq_idx=(seq_idx, (batch, seqlen), (torch.int32,)),
    )  # fmt: skip
    (ngroups, dstate), (nchunks, chunk_size) = B.shape[2:], dt.shape[2:]
    expect_sizes(
        "chunk_state", batch=batch, seqlen=seqlen, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate,
        nchunks=nchunks, chunk_size=chunk_size,
    )  # fmt: skip
    if state_dtype not in (torch.float32, x.dtype):
        raise TypeError(f"chunk_state: state_dtype must be torch.float32 or {x.dtype}, got {state_dtype}")
    return run(x, B, dt, cum, seq_idx, state_dtype)


def run(x, B, dt, cum, seq_idx, state_dtype, **chosen):
    """As chunk_state, on tensors that have been looked at. chosen: what `tiling` takes by name."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    nchunks, chunk_size = dt.shape[2:]
    states = x.new_empty((batch, nchunks, nheads, headdim, dstate), dtype=state_dtype)
    if seq_idx is None and x.element_size() == 2 and x.is_cuda:  # with seq_idx, or in float32, they would spill
        chosen = {"maxnreg": 128} | chosen  # 4 programs fit on a multiprocessor, not 3
    P, N, SPAN, options = tiling(x, dstate, chunk_size, **chosen)
    grid = nheads * nchunks, -(-headdim // P) * -(-dstate // N), batch
    strange = x.new_empty((batch, nchunks, nheads, grid[1]), dtype=torch.int32)
    numbers = seqlen, nheads, nchunks, nheads // ngroups, *x.stride()[:3], *B.stride()[:3]
    constants = headdim, dstate, chunk_size, P, N, SPAN
    launch(state_kernel, grid, (x, B, dt, cum, seq_idx, states, strange), numbers, constants, **options)
    return states, strange


def varlen_states(x, B, dt, cum, cu_seqlens, starts):
    """The state at the end of each sequence of a row of them: (sequences, H, P, N) float32. An empty one's is 0.

    As chunk_state takes them, with a batch of 1; cum began anew at each sequence. cu_seqlens (sequences + 1,), of which
    what is out of range is clamped; starts (1, chunks, H, P, N), as state_passing gives them.
    """
    _, seqlen, nheads, headdim = x.shape
    ngroups, dstate = B.shape[2:]
    nchunks, chunk_size = dt.shape[2:]
    sequences = cu_seqlens.shape[0] - 1
    states = x.new_empty((sequences, nheads, headdim, dstate), dtype=torch.float32)
    P, N, SPAN, options = tiling(x, dstate, chunk_size)
    grid = nheads * sequences, -(-headdim // P) * -(-dstate // N), 1
    numbers = seqlen, nheads, nchunks, nheads // ngroups, *x.stride()[1:3], *B.stride()[1:3]
    constants = headdim, dstate, chunk_size, P, N, SPAN
    launch(varlen_kernel, grid, (x, B, dt, cum, cu_seqlens, starts, states), numbers, constants, **options)
    return states


def tiling(x, dstate, chunk_size, span=64, num_warps=4, num_stages=None, **options):
    """(P, N, SPAN, options of the launch): the tile of a state that a program has, and how many tokens it takes."""
    P = min(64, filled_up(x.shape[3]))
    N = min(128, filled_up(dstate))
    num_stages = num_stages or (2 if x.element_size() == 2 else 1)
    return P, N, min(span, chunk_size), {"num_warps": num_warps, "num_stages": num_stages} | options


def work(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, size=2, state_size=4):
    """(bytes, flops) of a call: x and B once, dt and cum once, and a state for each chunk and head."""
    nchunks = -(-seqlen // chunk_size)
    moved = size * batch * seqlen * (nheads * headdim + ngroups * dstate) + 8 * batch * nheads * nchunks * chunk_size
    moved += state_size * batch * nchunks * nheads * headdim * dstate
    return moved, 2 * batch * seqlen * nheads * headdim * dstate
