"""Launch 3 of few: what dB and dC have from beyond the chunk, by the states at its ends.

    H nheads   P headdim   N dstate   T tokens of a chunk   p column of x   n column of B and C

    dB_j += sum over heads of  dt_j out_j  dh^T x_j        dh: the gradient of the state after the chunk
    dC_i += sum over heads of  in_i  h^T dy_i              h: the state before it

out_j is the decay from j to the chunk's end, in_i that from its beginning through i. A program has all tokens of one
chunk, one of the two, and a run of heads: one product of matrices, in effect, over heads and columns of x.

Those for dC also leave, for dt and A: rise_i, in_i dy_i.(h C_i), and `crossing`, <dh, h> of the chunk.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch
from kernels.ssd_backward.states import tile


@triton.jit
def _state(of, at, p, n, P: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr):
    if FULL:
        return tl.load(of + at)
    return tl.load(of + at, (p < P)[:, None] & (n < N)[None, :], other=0)


@triton.jit
def walk(
    u, V, state, twin, dV, dts, cum, seq_idx, rises, crossing, first_tile,
    b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, u_h,
    u_l: tl.constexpr, V_l: tl.constexpr, nheads: tl.constexpr,
    COLUMNS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, T: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One program. u, state, dV: x, dh, dB (COLUMNS), or dy, h, dC; V and twin: C and dh, for the latter."""
    tiles_p: tl.constexpr = (P + WP - 1) // WP
    tiles_n: tl.constexpr = (N + WN - 1) // WN
    FULL: tl.constexpr = P % WP == 0 and N % WN == 0
    start = chunk * T
    t, q, n = tl.arange(0, T), tl.arange(0, WP), first_tile * WN + tl.arange(0, WN)
    there = start + t < seqlen
    if seq_idx is not None:
        seq_idx += b * seqlen
        border = tl.minimum((chunk + 1) * T, seqlen) - 1 if COLUMNS else tl.maximum(start - 1, 0)
        crosses = tl.load(seq_idx + start + t, there, other=-1) == tl.load(seq_idx + border)
    if not COLUMNS:
        V_own = tile(V, start, V_l, t, n, N, seqlen, N % WN == 0)
    dv = tl.zeros((T, WN), tl.float32)
    begin = run * lines_a_run
    for line in range(begin, tl.minimum(begin + lines_a_run, heads_a_group * tiles_p)):
        head = group * heads_a_group + line // tiles_p
        p = line % tiles_p * WP + q
        us = tile(u + head * u_h, start, u_l, t, p, P, seqlen, P % WP == 0)  # (T, WP)
        at = ((b * nchunks + chunk) * nheads + head) * (P * N) + p[:, None] * N + n[None, :]
        state_tile = _state(state, at, p, n, P, N, FULL)  # (WP, WN)
        row = ((b * nheads + head) * nchunks + chunk) * T
        weight = tl.load(cum + row + t)
        if COLUMNS:
            weight = tl.exp2(tl.load(cum + row + T - 1) - weight) * tl.load(dts + row + t)
        else:
            weight = tl.exp2(weight)
        if seq_idx is not None:
            weight = tl.where(crosses, weight, 0)
        wide = us.to(tl.float32) * weight[:, None]
        if not COLUMNS:
            risen = tl.sum(tl.dot(V_own, tl.trans(state_tile), input_precision=EXACT) * wide, 1)
            spot = ((b * nheads + head) * tiles_p + line % tiles_p) * tiles_n + first_tile
            tl.store(rises + (spot * nchunks + chunk) * T + t, risen)
            other = _state(twin, at, p, n, P, N, FULL)
            crossed = tl.sum(tl.sum(state_tile.to(tl.float32) * other.to(tl.float32), 1), 0)
            tl.store(crossing + spot * nchunks + chunk, crossed)
        dv = tl.dot(wide.to(us.dtype), state_tile, dv, input_precision=EXACT)
    groups = nheads // heads_a_group
    at = ((run * tl.num_programs(2) + b) * seqlen + start) * groups + group
    at = at * N + t[:, None].to(tl.int64) * (groups * N) + n[None, :]
    tl.store(dV + at, dv, there[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["seqlen", "nchunks", "heads_a_group", "runs", "lines_a_run"])
def inter_kernel(
    x, dy, C, dts, cum, seq_idx, h, dh, dB, dC, rises, crossing,
    seqlen, nchunks, heads_a_group, runs, lines_a_run, x_b, x_h, dy_b, dy_h, C_b, C_g,
    x_l: tl.constexpr, dy_l: tl.constexpr, C_l: tl.constexpr, nheads: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """grid (2 * chunks, tiles of N * G * runs, batch): dC, then dB."""
    tiles_n: tl.constexpr = (N + WN - 1) // WN
    chunk, b = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_tile, line = tl.program_id(1) % tiles_n, tl.program_id(1) // tiles_n
    group, run = (line // runs).to(tl.int64), line % runs
    if tl.program_id(0) % 2 == 0:
        walk(
            dy + b * dy_b, C + b * C_b + group * C_g, h, dh, dC, dts, cum, seq_idx, rises, crossing, first_tile,
            b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, dy_h, dy_l, C_l, nheads,
            False, P, N, WP, WN, T, EXACT,
        )  # fmt: skip
    else:
        walk(
            x + b * x_b, None, dh, None, dB, dts, cum, seq_idx, None, None, first_tile,
            b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, x_h, x_l, 0, nheads,
            True, P, N, WP, WN, T, EXACT,
        )  # fmt: skip


def run(problem, x, dy, C, dts, cum, seq_idx, h, dh, dB, dC, plan):
    """(rises, crossing) for finish.py, of each tile of P and of N; dB and dC, (runs, batch, L, G, N) float32, are
    written."""
    batch, seqlen, nheads, headdim, ngroups, dstate = problem[:6]
    nchunks, tiles_p, tiles_n = cum.shape[2], -(-headdim // plan.columns), -(-dstate // plan.width)
    rises = cum.new_empty((batch, nheads, tiles_p * tiles_n, nchunks, 2 * plan.rows))
    crossing = cum.new_empty(rises.shape[:4])
    lines = nheads // ngroups * tiles_p
    numbers = (
        seqlen, nchunks, nheads // ngroups, plan.inter_runs, -(-lines // plan.inter_runs),
        *(t.stride(axis) for t in (x, dy, C) for axis in (0, 2)),
    )  # fmt: skip
    of_token = *(t.stride(1) for t in (x, dy, C)), nheads  # compiled in, so that rows need no registers
    constants = *of_token, headdim, dstate, plan.columns, plan.width, 2 * plan.rows, plan.exact
    tensors = x, dy, C, dts, cum, seq_idx, h, dh, dB, dC, rises, crossing
    options = dict(num_warps=plan.inter_warps, num_stages=plan.inter_stages)
    grid = 2 * nchunks, tiles_n * ngroups * plan.inter_runs, batch
    launch(inter_kernel, grid, tensors, numbers, constants, **options)
    return rises, crossing
