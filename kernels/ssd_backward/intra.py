"""Launch 4 of few: inside of a chunk, when the gradient of the state after it is known: dx, and a part of dB and dC.

    H nheads   P headdim   N dstate   Q tokens of a block, two blocks a chunk   p column of x   n column of B and C

A program has the tokens j of one block, and walks the heads of a group, or a run of them. i >= j are the tokens that j
reaches: of its own block, and of the second one, if its own is the first. L_ij is the decay from j to i, out_j the one
from j to the chunk's end, and dh the gradient of the state there.

    dx_j  = dt_j (sum_i (C_i.B_j) L_ij dy_i  +  out_j dh B_j)  +  D dy_j
    S_ij  = (dy_i.x_j) L_ij dt_j                            summed over heads, in registers
    dB_j += sum_i S_ij C_i,  dC_i += sum_j S_ij B_j         once, at the end: one product for all heads

For dt and A it leaves sums, in float32, for each token (finish.py adds them up):

    direct_j  x_j . (dx_j without D, over dt_j)                            sums[0]
    gone_j    out_j x_j.(dh B_j), which is what of it leaves the chunk     sums[1]
    rise_i    dy_i . (what y_i has of its own block), and of the first     sums[2], sums[3]
    skip_j    x_j . dy_j, for D of a number a head                         sums[4]

Columns of x beyond WP are further `lines` of the walk, as if they were a head: all is linear in them. So it is in the
columns of B and C: where there are more than WN, the launch is repeated for the next WN, and adds.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch
from kernels.ssd_backward.states import tile


@triton.jit
def walk(
    x, dy, B, C, D, dts, cum, seq_idx, dh, dx, so_far, dB, dC, dC_second, sums, skip,
    b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, x_h, dy_h, sums_l,
    x_l: tl.constexpr, dy_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, nheads: tl.constexpr,
    FIRST: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    EXACT: tl.constexpr, N_FIRST: tl.constexpr, LAST: tl.constexpr, D_ROWS: tl.constexpr,
):  # fmt: skip
    """One program. FIRST: of the chunk's first block, which reaches into the second."""
    tiles_p: tl.constexpr = (P + WP - 1) // WP
    FULL_N: tl.constexpr = N % WN == 0
    FULL_P: tl.constexpr = P % WP == 0
    half: tl.constexpr = 0 if FIRST else Q
    start = chunk * 2 * Q + half
    t, q, n = tl.arange(0, Q), tl.arange(0, WP), N_FIRST + tl.arange(0, WN)
    there = start + t < seqlen
    reaches = t[:, None] <= t[None, :]  # (j, i)
    if seq_idx is not None:  # nothing crosses from one sequence to the next
        seq_idx += b * seqlen
        number = tl.load(seq_idx + start + t, there, other=-1)
        reaches = reaches & (number[:, None] == tl.load(seq_idx + start + t, there, other=-2)[None, :])
        leaves = number == tl.load(seq_idx + tl.minimum((chunk + 1) * 2 * Q, seqlen) - 1)
    b_own = tile(B, start, B_l, t, n, N, seqlen, FULL_N)  # (Q, WN)
    kind = b_own.dtype
    cb = tl.dot(b_own, tl.trans(tile(C, start, C_l, t, n, N, seqlen, FULL_N)), input_precision=EXACT)
    cb = tl.where(reaches, cb, 0)  # (j, i)
    s = tl.zeros((Q, Q), tl.float32)  # (j, i)
    if FIRST:
        cb_second = tl.dot(b_own, tl.trans(tile(C, start + Q, C_l, t, n, N, seqlen, FULL_N)), input_precision=EXACT)
        if seq_idx is not None:
            second = tl.load(seq_idx + start + Q + t, start + Q + t < seqlen, other=-2)
            reaches_second = number[:, None] == second[None, :]
            cb_second = tl.where(reaches_second, cb_second, 0)
        s_second = tl.zeros((Q, Q), tl.float32)

    begin = run * lines_a_run
    for line in range(begin, tl.minimum(begin + lines_a_run, heads_a_group * tiles_p)):
        head = group * heads_a_group + line // tiles_p
        p = line % tiles_p * WP + q
        x_own = tile(x + head * x_h, start, x_l, t, p, P, seqlen, FULL_P)  # (Q, WP)
        dy_own = tile(dy + head * dy_h, start, dy_l, t, p, P, seqlen, FULL_P)
        row = ((b * nheads + head) * nchunks + chunk) * (2 * Q)
        to = sums + ((b * nheads * tiles_p + head * tiles_p + line % tiles_p) * nchunks + chunk) * (2 * Q) + half + t
        cum_own, dt_own = tl.load(cum + row + half + t), tl.load(dts + row + half + t)

        # With the state after the chunk: first, so that x is not needed any more as anything but a factor.
        at = ((b * nchunks + chunk) * nheads + head) * (P * N) + p[:, None] * N + n[None, :]
        if FULL_N and FULL_P:
            state = tl.load(dh + at)  # (WP, WN)
        else:
            state = tl.load(dh + at, (p < P)[:, None] & (n < N)[None, :], other=0)
        out = tl.exp2(tl.load(cum + row + 2 * Q - 1) - cum_own)
        if seq_idx is not None:
            out = tl.where(leaves, out, 0)
        acc = tl.dot(b_own, tl.trans(state), input_precision=EXACT) * out[:, None]  # (j, p)
        direct = tl.sum(acc * x_own, 1)
        if N_FIRST > 0:
            tl.store(to + sums_l, direct + tl.load(to + sums_l))
        else:
            tl.store(to + sums_l, direct)

        # The own block with itself.
        decay = tl.exp2(tl.minimum(cum_own[None, :] - cum_own[:, None], 0.0))
        g = tl.dot(x_own, tl.trans(dy_own), input_precision=EXACT) * decay
        s += g * dt_own[:, None]
        if D is not None and not D_ROWS and LAST:
            tl.store(to + 4 * sums_l, tl.sum(tl.where(t[:, None] == t[None, :], g, 0), 1))
        g *= cb
        direct += tl.sum(g, 1)
        rise = tl.sum(g * dt_own[:, None], 0)
        acc = tl.dot((decay * cb).to(kind), dy_own, acc, input_precision=EXACT)
        if N_FIRST > 0:
            rise += tl.load(to + 2 * sums_l)
        tl.store(to + 2 * sums_l, rise)

        if FIRST:
            dy_second = tile(dy + head * dy_h, start + Q, dy_l, t, p, P, seqlen, FULL_P)
            decay = tl.exp2(tl.minimum(tl.load(cum + row + Q + t)[None, :] - cum_own[:, None], 0.0))
            g = tl.dot(x_own, tl.trans(dy_second), input_precision=EXACT) * decay
            s_second += g * dt_own[:, None]
            g *= cb_second
            direct += tl.sum(g, 1)
            rise = tl.sum(g * dt_own[:, None], 0)
            acc = tl.dot((decay * cb_second).to(kind), dy_second, acc, input_precision=EXACT)
            if N_FIRST > 0:
                rise += tl.load(to + Q + 3 * sums_l)
            tl.store(to + Q + 3 * sums_l, rise)

        if N_FIRST > 0:
            direct += tl.load(to)
        tl.store(to, direct)
        acc *= dt_own[:, None]
        at = ((b * seqlen + start) * nheads + head) * P + t[:, None].to(tl.int64) * (nheads * P) + p[None, :]
        inside = there[:, None] & (p < P)[None, :]
        if N_FIRST > 0:
            acc += tl.load(so_far + at, inside, other=0)
        if LAST:
            if D is not None:
                # Read again, as registers are few.
                dy_wide = tile(dy + head * dy_h, start, dy_l, t, p, P, seqlen, FULL_P).to(tl.float32)
                if D_ROWS:
                    acc += dy_wide * tl.load(D + head * P + p, p < P, other=0).to(tl.float32)[None, :]
                    x_wide = tile(x + head * x_h, start, x_l, t, p, P, seqlen, FULL_P).to(tl.float32)
                    part = skip + ((b * nchunks * 2 + chunk * 2 + half // Q) * nheads + head) * P + p
                    tl.store(part, tl.sum(x_wide * dy_wide, 0), p < P)
                else:
                    acc += dy_wide * tl.load(D + head).to(tl.float32)
            tl.store(dx + at, acc.to(dx.dtype.element_ty), inside)
        else:
            tl.store(so_far + at, acc, inside)

    # S meets B and C.
    groups = nheads // heads_a_group
    at = ((run * tl.num_programs(2) + b) * seqlen + start) * groups + group
    at = at * N + t[:, None].to(tl.int64) * (groups * N) + n[None, :]
    inside = there[:, None] & (n < N)[None, :]
    s = tl.where(reaches, s, 0).to(kind)
    db = tl.dot(s, tile(C, start, C_l, t, n, N, seqlen, FULL_N), input_precision=EXACT)
    if FIRST:
        if seq_idx is not None:
            s_second = tl.where(reaches_second, s_second, 0)
        s_second = s_second.to(kind)
        db = tl.dot(s_second, tile(C, start + Q, C_l, t, n, N, seqlen, FULL_N), db, input_precision=EXACT)
    tl.store(dB + at, db, inside)
    tl.store(dC + at, tl.dot(tl.trans(s), b_own, input_precision=EXACT), inside)
    if FIRST:
        inside = (start + Q + t < seqlen)[:, None] & (n < N)[None, :]
        dc = tl.dot(tl.trans(s_second), b_own, input_precision=EXACT)
        tl.store(dC_second + at + Q * groups * N, dc, inside)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "heads_a_group", "runs", "lines_a_run", "places"])
def intra_kernel(
    x, dy, B, C, D, dts, cum, seq_idx, dh, dx, so_far, dB, dC, dC_second, sums, skip,
    seqlen, nchunks, heads_a_group, runs, lines_a_run, places, x_b, x_h, dy_b, dy_h, B_b, B_g, C_b, C_g, sums_l,
    x_l: tl.constexpr, dy_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, nheads: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    EXACT: tl.constexpr, N_FIRST: tl.constexpr, LAST: tl.constexpr, D_ROWS: tl.constexpr,
):  # fmt: skip
    """grid (2 * chunks, G * runs, batch). N_FIRST: the first column of B and C; what an earlier launch left of those
    before is added to. LAST: no further launch follows. First blocks have more to do: with `places` multiprocessors,
    the second program of one is of the other kind than its first."""
    linear = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    chunk, b = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(2).to(tl.int64)
    group, run = (tl.program_id(1) // runs).to(tl.int64), tl.program_id(1) % runs
    x += b * x_b
    dy += b * dy_b
    B += b * B_b + group * B_g
    C += b * C_b + group * C_g
    if (tl.program_id(0) + linear // places) % 2 == 0:
        walk(
            x, dy, B, C, D, dts, cum, seq_idx, dh, dx, so_far, dB, dC, dC_second, sums, skip,
            b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, x_h, dy_h, sums_l,
            x_l, dy_l, B_l, C_l, nheads, True, P, N, WP, WN, Q, EXACT, N_FIRST, LAST, D_ROWS,
        )  # fmt: skip
    else:
        walk(
            x, dy, B, C, D, dts, cum, seq_idx, dh, dx, so_far, dB, dC, dC_second, sums, skip,
            b, chunk, group, run, seqlen, nchunks, heads_a_group, lines_a_run, x_h, dy_h, sums_l,
            x_l, dy_l, B_l, C_l, nheads, False, P, N, WP, WN, Q, EXACT, N_FIRST, LAST, D_ROWS,
        )  # fmt: skip


def run(problem, x, dy, B, C, D, dts, cum, seq_idx, dh, dx, dB, dC, dC_second, plan):
    """(sums, skip) for finish.py; dx is written, and dB and the two parts of dC, (runs, batch, L, G, N) float32."""
    batch, seqlen, nheads, headdim, ngroups, dstate = problem[:6]
    nchunks, tiles = cum.shape[2], -(-headdim // plan.columns)
    sums = cum.new_empty((5, batch, nheads, tiles, nchunks, 2 * plan.rows))
    by_column = D is not None and D.ndim == 2
    skip = cum.new_empty((batch, nchunks, 2, nheads, headdim)) if by_column else None
    passes = range(0, dstate, plan.width)
    so_far = None if len(passes) == 1 else cum.new_empty(x.shape)
    lines = nheads // ngroups * tiles
    strides = *(t.stride(axis) for t in (x, dy, B, C) for axis in (0, 2)), sums[0].numel()
    of_token = *(t.stride(1) for t in (x, dy, B, C)), nheads  # compiled in, so that rows need no registers
    tensors = x, dy, B, C, D, dts, cum, seq_idx, dh, dx, so_far, dB, dC, dC_second, sums, skip
    options = dict(num_warps=plan.warps, num_stages=plan.stages)
    if plan.registers and x.is_cuda:
        options["maxnreg"] = plan.registers
    for first in passes:
        numbers = seqlen, nchunks, nheads // ngroups, plan.runs, -(-lines // plan.runs), plan.places, *strides
        constants = (
            *of_token, headdim, dstate, plan.columns, plan.width, plan.rows, plan.exact, first, first == passes[-1],
            by_column,
        )  # fmt: skip
        launch(intra_kernel, (2 * nchunks, ngroups * plan.runs, batch), tensors, numbers, constants, **options)
    return sums, skip
