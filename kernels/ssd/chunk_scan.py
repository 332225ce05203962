"""Kernel 5 of five: y, from the tokens of its own chunk and from the state at the chunk's start.

    L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate

    y_i = sum over j <= i of  CB_ij 2**(cum_i - cum_j) dt_j x_j  +  2**cum_i  C_i state^T  +  D x_i,  times silu(z_i)

Two products of matrices: the block's lower triangle times x, and C times the state. A program has one head and one
chunk, or half a chunk where there are few: it reads the state once, and goes down its rows, ROWS at a time. Programs of
all heads for the same chunk stand next to each other in the grid, so that CB and C come from the cache for all but the
first. Tiles above the diagonal are passed over; on it, what lies above counts 0. Factors are rounded to the dtype of x,
sums are float32.

0 times NaN is NaN: a NaN in x_j would reach tokens before j of the same tile through the zeros above the diagonal. So
where chunk_state has seen that, which is rare, a program takes one token at a time, without these zeros.

Reads x and a state for each chunk and head, writes y: 4 P bytes a token and head in 16 bit, and P N / Q states. (The
second half of a chunk reads the state again, and x of the first half: from the cache.)
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.arguments import DTYPES, expect_apart, expect_sizes, expect_step
from kernels.ssd.launching import filled_up, launch
from kernels.ssd.state_passing import STATES

CAREFUL_ROWS = tl.constexpr(16)  # at a time, where x is not finite
FEW = 1024  # programs: up to here they do not fill an H200 (4 fit on each of 132 multiprocessors) twice


@triton.jit
def _rows_one_by_one(
    x, x_token, C, c_token, CB, dt, cum, states, seq_idx, start, first_row, p, there_p, end,
    DSTATE: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """ROWS rows where x is not finite: one token at a time, and no product with what does not reach a row. (ROWS, P)"""
    i = first_row + tl.arange(0, ROWS)
    cum_i = tl.load(cum + i)
    acc = tl.full((ROWS, P), 0, tl.float32)
    for n in range(0, DSTATE):
        c = tl.load(C + (start + i) * c_token + n, i < end, other=0)
        state = tl.load(states + p * DSTATE + n, there_p, other=0).to(c.dtype)
        acc += c.to(tl.float32)[:, None] * state.to(tl.float32)[None, :]
    acc *= tl.exp2(cum_i)[:, None]
    if seq_idx is not None:
        sequence_i = tl.load(seq_idx + start + i, i < end, other=-1)
        acc = tl.where((sequence_i == tl.load(seq_idx + tl.maximum(start - 1, 0)))[:, None], acc, 0)
    for j in range(0, tl.minimum(first_row + ROWS, end)):
        reaches = i >= j
        if seq_idx is not None:
            reaches = reaches & (sequence_i == tl.load(seq_idx + start + j))
        xj = tl.load(x + (start + j) * x_token, there_p, other=0)
        weight = tl.load(CB + i * Q + j, reaches, other=0) * (tl.exp2(cum_i - tl.load(cum + j)) * tl.load(dt + j))
        added = weight.to(xj.dtype).to(tl.float32)[:, None] * xj.to(tl.float32)[None, :]
        acc += tl.where(reaches[:, None], added, 0)
    return acc


@triton.jit
def _finish(
    acc, x, x_token, D, h, z, z_token, y, nheads, start, first_row, p, end,
    HEADDIM: tl.constexpr, D_ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add D x, multiply by silu(z), and write to y: all at token 0 and at column p of a head."""
    r, token = tl.arange(0, ROWS), start + first_row
    there = (first_row + r < end)[:, None] & (p < HEADDIM)[None, :]
    if D is not None:
        skip = tl.load(D + h * (HEADDIM if D_ROW else 1) + p * D_ROW, p < HEADDIM, other=0).to(tl.float32)
        xs = x[None, :] + token * x_token + r[:, None] * x_token
        acc += skip[None, :] * tl.load(xs, there, other=0).to(tl.float32)
    if z is not None:
        gate = tl.load(z[None, :] + token * z_token + r[:, None] * z_token, there, other=0).to(tl.float32)
        acc *= gate / (1 + tl.exp(-gate))
    tl.store(y[None, :] + token * nheads * HEADDIM + r[:, None] * (nheads * HEADDIM), acc, there)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def scan_kernel(
    x, C, CB, dt, cum, states, strange, D, z, seq_idx, y, seqlen, nheads, nchunks, heads_a_group,
    x_batch, x_token, x_head, c_batch, c_token, c_group, z_batch, z_token, z_head,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, D_ROW: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STATE_TILES: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """grid (H * chunks * Q / SHARE, tiles of P, batch). D_ROW: 1 if D is (H, P), 0 if it is (H,). N: of a state, at a
    time. SHARE: rows of a chunk that a program has; the last ones, which have the most to do, go first."""
    chunk, h = (tl.program_id(0) // nheads).to(tl.int64) % nchunks, (tl.program_id(0) % nheads).to(tl.int64)
    b, group = tl.program_id(2).to(tl.int64), h // heads_a_group
    p, n = tl.program_id(1) * P + tl.arange(0, P), tl.arange(0, N)
    there_p = p < HEADDIM
    start = chunk * Q
    end = tl.minimum(seqlen - start, Q).to(tl.int32)
    begin = Q - SHARE - tl.program_id(0) // (nheads * nchunks) * SHARE
    stop = tl.minimum(end, begin + SHARE)
    row, state = ((b * nheads + h) * nchunks + chunk) * Q, (b * nchunks + chunk) * nheads + h
    x += b * x_batch + h * x_head + p
    C += b * c_batch + group * c_group
    CB += ((b * nchunks + chunk) * (nheads // heads_a_group) + group) * Q * Q
    dt += row
    cum += row
    y += (b * seqlen * nheads + h) * HEADDIM + p
    if z is not None:
        z += b * z_batch + h * z_head + p
    if seq_idx is not None:
        seq_idx += b * seqlen
    before = states + state * HEADDIM * DSTATE + p[None, :] * DSTATE + n[:, None]  # (N, P): the state's transpose
    if tl.max(tl.load(strange + state * STATE_TILES + tl.arange(0, STATE_TILES)), 0) == 0:
        first_part = tl.load(before, (n < DSTATE)[:, None] & there_p[None, :], other=0).to(C.dtype.element_ty)
        for first_row in range(begin, stop, ROWS):
            r = tl.arange(0, ROWS)
            i = first_row + r
            cum_i = tl.load(cum + i)
            cs = C + (start + first_row) * c_token + r[:, None] * c_token + n[None, :]
            c = tl.load(cs, (i < end)[:, None] & (n < DSTATE)[None, :], other=0)
            acc = tl.dot(c, first_part, input_precision="bf16x3")
            for first in tl.static_range(N, DSTATE, N):
                c = tl.load(cs + first, (i < end)[:, None] & (first + n < DSTATE)[None, :], other=0)
                part = tl.load(before + first, (first + n < DSTATE)[:, None] & there_p[None, :], other=0).to(c.dtype)
                acc = tl.dot(c, part, acc, input_precision="bf16x3")
            acc *= tl.exp2(cum_i)[:, None]
            if seq_idx is not None:  # that state belongs to the sequence of the token before the chunk, or of token 0
                sequence_i = tl.load(seq_idx + start + i, i < end, other=-1)
                acc = tl.where((sequence_i == tl.load(seq_idx + tl.maximum(start - 1, 0)))[:, None], acc, 0)
            for first in range(0, tl.minimum(first_row + ROWS, end), COLUMNS):  # the chunk's own tokens
                k = tl.arange(0, COLUMNS)
                j = first + k
                weight = tl.load(CB + i[:, None] * Q + j[None, :])
                xs = x[None, :] + (start + first) * x_token + k[:, None] * x_token
                xj = tl.load(xs, (j < end)[:, None] & there_p[None, :], other=0)
                weight *= tl.exp2(cum_i[:, None] - tl.load(cum + j)[None, :]) * tl.load(dt + j)[None, :]
                if (first + COLUMNS > first_row) | (seq_idx is not None):  # a tile on the diagonal, or any
                    # Numbers within the tile stay 32 bits wide. What rows past the end get is not stored.
                    reaches = (r + (first_row - first))[:, None] >= k[None, :]
                    if seq_idx is not None:
                        sequence_j = tl.load(seq_idx + start + j, j < end, other=-2)
                        reaches = reaches & (sequence_i[:, None] == sequence_j[None, :])
                    weight = tl.where(reaches, weight, 0)
                acc = tl.dot(weight.to(xj.dtype), xj, acc, input_precision="bf16x3")
            _finish(acc, x, x_token, D, h, z, z_token, y, nheads, start, first_row, p, end, HEADDIM, D_ROW, ROWS)
    else:
        for first_row in range(begin, stop, CAREFUL_ROWS):
            acc = _rows_one_by_one(
                x, x_token, C, c_token, CB, dt, cum, states + state * HEADDIM * DSTATE, seq_idx, start, first_row, p,
                there_p, end, DSTATE, Q, CAREFUL_ROWS, P,
            )  # fmt: skip
            _finish(
                acc, x, x_token, D, h, z, z_token, y, nheads, start, first_row, p, end, HEADDIM, D_ROW, CAREFUL_ROWS
            )  # fmt: skip


def chunk_scan(x, C, CB, dt, cum, states, strange, *, D=None, z=None, seq_idx=None, out=None):
    """y (batch, L, H, P), like x.

    x, z (batch, L, H, P), C (batch, L, G, N), D (H,) or (H, P), seq_idx (batch, L) int32; CB, dt, cum, strange and
    the states at chunk starts as the other four give them. out: a tensor like x to write to, apart from all others.
    """
    expect_step("chunk_scan", x, x=(x, ("batch", "seqlen", "nheads", "headdim"), DTYPES))
    batch, seqlen, nheads, headdim = x.shape
    expect_step(
        "chunk_scan", x,
        C=(C, (batch, seqlen, "ngroups", "dstate"), (x.dtype,)),
        dt=(dt, (batch, nheads, "nchunks", "chunk_size"), (torch.float32,)),
        cum=(cum, tuple(dt.shape), (torch.float32,)),
        D=(D, (nheads,) if D is None or D.ndim == 1 else (nheads, headdim), DTYPES),
        z=(z, tuple(x.shape), (x.dtype,)),
        seq_idx=(seq_idx, (batch, seqlen), (torch.int32,)),
        out=(out, tuple(x.shape), (x.dtype,)),
    )  # fmt: skip
    (ngroups, dstate), (nchunks, chunk_size) = C.shape[2:], dt.shape[2:]
    expect_step(
        "chunk_scan", x,
        CB=(CB, (batch, nchunks, ngroups, chunk_size, chunk_size), (torch.float32,)),
        states=(states, (batch, nchunks, nheads, headdim, dstate), STATES),
        strange=(strange, (batch, nchunks, nheads, "tiles"), (torch.int32,)),
    )  # fmt: skip
    expect_sizes(
        "chunk_scan", batch=batch, seqlen=seqlen, nheads=nheads, headdim=headdim, ngroups=ngroups, dstate=dstate,
        nchunks=nchunks, chunk_size=chunk_size,
    )  # fmt: skip
    if out is not None:
        expect_apart("chunk_scan", out, x=x, C=C, CB=CB, dt=dt, cum=cum, states=states, D=D, z=z)
    out = x.new_empty(x.shape) if out is None else out
    return run(x, C, CB, dt, cum, states, strange, D, z, seq_idx, out)


def run(x, C, CB, dt, cum, states, strange, D, z, seq_idx, y, share=None, **chosen):
    """As chunk_scan, on tensors that have been looked at. chosen: what `tiling` takes by name.

    share  rows of a chunk for a program, ROWS times a power of two; unless given all, or half where programs are few
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, dstate = C.shape[2:]
    nchunks, chunk_size = dt.shape[2:]
    P, N, rows, columns, options = tiling(x, dstate, chunk_size, **chosen)
    strides = *x.stride()[:3], *C.stride()[:3], *((0, 0, 0) if z is None else z.stride()[:3])
    numbers = seqlen, nheads, nchunks, nheads // ngroups, *strides
    by_row = int(D is not None and D.ndim == 2)
    tiles = -(-headdim // P)
    few = nheads * nchunks * tiles * batch <= FEW
    share = share or max(rows, chunk_size // 2 if few else chunk_size)
    assert chunk_size % share == 0 and share % rows == 0
    constants = headdim, dstate, by_row, chunk_size, P, N, rows, columns, strange.shape[3], share
    grid = nheads * nchunks * (chunk_size // share), tiles, batch
    launch(scan_kernel, grid, (x, C, CB, dt, cum, states, strange, D, z, seq_idx, y), numbers, constants, **options)
    return y


def tiling(x, dstate, chunk_size, rows=64, columns=32, **options):
    """(P, N, ROWS, COLUMNS, options of the launch) for a tensor like x.

    No loads ahead of their use (num_stages 1), and at most 128 registers, so that four programs fit on a
    multiprocessor: on an H200 that hid more of the waiting than loads ahead did. With D, z or seq_idx a few spill.
    """
    P, narrow = min(64, filled_up(x.shape[3])), x.element_size() == 2
    N = min(128, filled_up(dstate))
    rows = min(rows, chunk_size)
    few = {"maxnreg": 128} if narrow and x.is_cuda else {}
    return P, N, rows, min(columns, rows), {"num_warps": 4, "num_stages": 1} | few | options


def work(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, size=2, state_size=4, extra=0):
    """(bytes, flops) of a call: x once, y once, C, CB's lower triangle, dt, cum and a state for each chunk and head.

    extra: 1 if there is a z.  Flops are those of the triangle, and of C times the state.
    """
    nchunks, tokens = -(-seqlen // chunk_size), batch * seqlen
    moved = size * tokens * ((2 + extra) * nheads * headdim + ngroups * dstate)
    moved += 2 * tokens * ngroups * (chunk_size + 1) + 8 * batch * nheads * nchunks * chunk_size  # CB; dt and cum
    moved += state_size * batch * nchunks * nheads * headdim * dstate
    return moved, 2 * tokens * nheads * headdim * ((chunk_size + 1) // 2 + dstate)
