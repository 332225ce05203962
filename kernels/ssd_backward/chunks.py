"""Launch 3 of few: all that is left in a chunk, when the states at its ends are known.

    H nheads   P headdim   N dstate   t token of a block (Q of them)   p column of x   n column of B and C

A chunk has two blocks of Q tokens. A program takes one of them, its `own`, and walks the heads of a group, or a run of
them. L_ij is the decay from token j to token i; h the state before the chunk, dh the gradient of the one after it, w_j
the decay from j to the chunk's end, e_i that from its beginning through i.

    dx_j  = dt_j (sum_i (C_i.B_j) L_ij dy_i  +  w_j dh B_j)  +  D dy_j
    S_ij  = (dy_i.x_j) L_ij dt_j,  summed over the heads before it meets B and C: one product for all of them
    dC_i  = sum_j S_ij B_j  +  sum over heads of e_i h^T dy_i
    dB_j  = sum_i S_ij C_i  +  sum over heads of dt_j w_j dh^T x_j

S, dB and dC of the run stay in registers while it walks. i >= j: what lies on the diagonal is the own block with itself
(kept with rows j and columns i), and the other is the second block with the first. This one both of the chunk's
programs need, one for j, the other for i: each of them makes it with its own tokens as rows. So which tensors and signs
are meant depends on `second`, but not what is computed.

For dt and A it leaves sums, in float32, for each token (finish.py adds them up):

    direct_j  x_j . (dx_j without D, over dt_j)                            sums[0]
    gone_j    w_j x_j.(dh B_j), which is what of it leaves the chunk       sums[1]
    rise_i    dy_i . (y_i without D), in two parts                         sums[2], sums[3]
    crossing  <dh, h>, one for each program, the same in both
    skip      sum_t x_t dy_t, for D

Columns of x beyond WP are further `lines` of the walk, as if they were a head: all is linear in them. So it is in the
columns of B and C: where there are more than WN, the launch is repeated for the next WN, and adds.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch
from kernels.ssd_backward.states import tile


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _pair(first, second, is_second):
    """Which of two scalars, pointers or strides."""
    return second if is_second else first


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group", "runs", "lines_a_run", "n_first"])
def chunks_kernel(
    x, dy, B, C, D, dts, cum, seq_idx, h, dh, dx, so_far, dB, dC, sums, crossing, skip,
    seqlen, nchunks, nheads, heads_a_group, runs, lines_a_run, n_first,
    x_b, x_l, x_h, dy_b, dy_l, dy_h, B_b, B_l, B_g, C_b, C_l, C_g, sums_l,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr, EXACT: tl.constexpr,
    FULL_N: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, D_ROWS: tl.constexpr,
):  # fmt: skip
    """grid (2 * chunks, G * runs, batch). ADD: to what an earlier launch left, of other columns of B and C; LAST: no
    further one follows."""
    tiles_p: tl.constexpr = (P + WP - 1) // WP
    second = tl.program_id(0) % 2 == 1
    chunk, b = (tl.program_id(0) // 2).to(tl.int64), tl.program_id(2).to(tl.int64)
    group, run = (tl.program_id(1) // runs).to(tl.int64), tl.program_id(1) % runs
    half = tl.where(second, Q, 0)
    start, other = chunk * 2 * Q + half, chunk * 2 * Q + Q - half
    t, q, n = tl.arange(0, Q), tl.arange(0, WP), n_first + tl.arange(0, WN)
    there, there_other = start + t < seqlen, other + t < seqlen
    B += b * B_b + group * B_g
    C += b * C_b + group * C_g
    x += b * x_b
    dy += b * dy_b
    b_own = tile(B, start, B_l, t, n, N, seqlen, FULL_N)  # (Q, WN)
    c_own = tile(C, start, C_l, t, n, N, seqlen, FULL_N)
    bc_other = tile(_pair(C, B, second), other, _pair(C_l, B_l, second), t, n, N, seqlen, FULL_N)
    cb = tl.dot(b_own, tl.trans(c_own), input_precision=EXACT)  # (j, i), both own
    cb = tl.where(t[:, None] <= t[None, :], cb, 0)
    bc_own = tl.where(second, c_own, b_own)
    cb_other = tl.dot(bc_own, tl.trans(bc_other), input_precision=EXACT)  # (own, other)
    if seq_idx is not None:  # nothing crosses from one sequence to the next
        number = tl.load(seq_idx + b * seqlen + start + t, there, other=-1)
        number_other = tl.load(seq_idx + b * seqlen + other + t, there_other, other=-2)
        found = tl.load(seq_idx + b * seqlen + tl.maximum(chunk * 2 * Q - 1, 0))
        left = tl.load(seq_idx + b * seqlen + tl.minimum((chunk + 1) * 2 * Q, seqlen) - 1)
        meets = number[:, None] == number[None, :]
        meets_other = number[:, None] == number_other[None, :]
        cb = tl.where(meets, cb, 0)
        cb_other = tl.where(meets_other, cb_other, 0)
        old, leaves = number == found, number == left
    sign = tl.where(second, 1.0, -1.0)
    takes = tl.where(second, 0.0, 1.0)  # whether the own tokens are the j of the other block

    s = tl.zeros((Q, Q), tl.float32)  # (j, i)
    s_other = tl.zeros((Q, Q), tl.float32)  # (own, other)
    db, dc = tl.zeros((Q, WN), tl.float32), tl.zeros((Q, WN), tl.float32)
    first = run * lines_a_run
    for line in range(first, tl.minimum(first + lines_a_run, heads_a_group * tiles_p)):
        head = group * heads_a_group + line // tiles_p
        p = line % tiles_p * WP + q
        x_own = tile(x + head * x_h, start, x_l, t, p, P, seqlen, P % WP == 0)  # (Q, WP)
        dy_own = tile(dy + head * dy_h, start, dy_l, t, p, P, seqlen, P % WP == 0)
        u_other = tile(
            _pair(dy + head * dy_h, x + head * x_h, second), other, _pair(dy_l, x_l, second), t, p, P, seqlen,
            P % WP == 0,
        )  # fmt: skip
        state = ((b * nchunks + chunk) * nheads + head) * (P * N) + p[:, None] * N + n[None, :]
        if FULL_N and P % WP == 0:
            h_tile, dh_tile = tl.load(h + state), tl.load(dh + state)  # (WP, WN)
        else:
            inside = (p < P)[:, None] & (n < N)[None, :]
            h_tile, dh_tile = tl.load(h + state, inside, other=0), tl.load(dh + state, inside, other=0)
        row = ((b * nheads + head) * nchunks + chunk) * (2 * Q)
        cum_own, cum_other = tl.load(cum + row + half + t), tl.load(cum + row + Q - half + t)
        dt_own, dt_other = tl.load(dts + row + half + t), tl.load(dts + row + Q - half + t)
        last = tl.load(cum + row + 2 * Q - 1)
        into, out = tl.exp2(cum_own), tl.exp2(last - cum_own)
        if seq_idx is not None:
            into, out = tl.where(old, into, 0), tl.where(leaves, out, 0)

        # The own block with itself: rows j, columns i.
        decay = tl.exp2(tl.where(t[:, None] <= t[None, :], cum_own[None, :] - cum_own[:, None], 0))
        g = tl.dot(x_own, tl.trans(dy_own), input_precision=EXACT) * decay
        if seq_idx is not None:
            g = tl.where(meets, g, 0)
        s += tl.where(t[:, None] <= t[None, :], g * dt_own[:, None], 0)
        w = g * cb
        m = (decay * cb).to(x_own.dtype)

        # The second block with the first: own tokens as rows.
        decay_other = tl.exp2(sign * (cum_own[:, None] - cum_other[None, :])) * tl.where(second, dt_other, 1.0)[None, :]
        u_own = tl.where(second, dy_own, x_own)
        g_other = tl.dot(u_own, tl.trans(u_other), input_precision=EXACT) * decay_other
        if seq_idx is not None:
            g_other = tl.where(meets_other, g_other, 0)
        s_other += g_other * tl.where(second, 1.0, dt_own)[:, None]
        w_other = g_other * cb_other
        m_other = (decay_other * cb_other).to(x_own.dtype)

        # With the states.
        x_wide, dy_wide = x_own.to(tl.float32), dy_own.to(tl.float32)
        from_end = tl.dot(b_own, tl.trans(dh_tile), input_precision=EXACT) * out[:, None]  # (j, p)
        from_start = tl.dot(c_own, tl.trans(h_tile), input_precision=EXACT) * into[:, None]  # (i, p)
        db = tl.dot((x_wide * (out * dt_own)[:, None]).to(x_own.dtype), dh_tile, db, input_precision=EXACT)
        dc = tl.dot((dy_wide * into[:, None]).to(x_own.dtype), h_tile, dc, input_precision=EXACT)
        left_over, risen = from_end * x_wide, from_start * dy_wide
        acc = from_end + takes * tl.dot(m_other, u_other, input_precision=EXACT)
        acc = tl.dot(m, dy_own, acc, input_precision=EXACT)

        # What dt, A and D want to know.
        direct, rise = w + takes * w_other, (1 - takes) * w_other
        if WP == Q:
            direct, gone, rise = tl.reduce((direct + left_over, left_over, rise + risen), 1, _add3)
        else:
            gone = tl.sum(left_over, 1)
            direct, rise = tl.sum(direct, 1) + gone, tl.sum(rise, 1) + tl.sum(risen, 1)
        rise_too = tl.sum(w * dt_own[:, None], 0)
        to = sums + ((b * nheads * tiles_p + head * tiles_p + line % tiles_p) * nchunks + chunk) * (2 * Q) + half + t
        if ADD:
            direct += tl.load(to)
            gone += tl.load(to + sums_l)
            rise += tl.load(to + 2 * sums_l)
            rise_too += tl.load(to + 3 * sums_l)
        tl.store(to, direct)
        tl.store(to + sums_l, gone)
        tl.store(to + 2 * sums_l, rise)
        tl.store(to + 3 * sums_l, rise_too)
        crossed = tl.sum(tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 1), 0)
        spot = ((b * nheads + head) * tiles_p + line % tiles_p) * nchunks * 2 + chunk * 2 + tl.program_id(0) % 2
        if ADD:
            crossed += tl.load(crossing + spot)
        tl.store(crossing + spot, crossed)

        # dx; before the last launch, what is known of it.
        acc *= dt_own[:, None]
        at = ((b * seqlen + start) * nheads + head) * P + t[:, None].to(tl.int64) * (nheads * P) + p[None, :]
        inside = there[:, None] & (p < P)[None, :]
        if ADD:
            acc += tl.load(so_far + at, inside, other=0)
        if LAST:
            if D is not None:
                if D_ROWS:
                    acc += dy_wide * tl.load(D + head * P + p, p < P, other=0).to(tl.float32)[None, :]
                else:
                    acc += dy_wide * tl.load(D + head).to(tl.float32)
                tl.store(
                    skip + ((b * nchunks * 2 + tl.program_id(0)) * nheads + head) * P + p, tl.sum(x_wide * dy_wide, 0),
                    p < P,
                )  # fmt: skip
            tl.store(dx + at, acc.to(dx.dtype.element_ty), inside)
        else:
            tl.store(so_far + at, acc, inside)

    # S meets B and C.
    kind = b_own.dtype
    narrow = s.to(kind)
    db = tl.dot(narrow, c_own, db, input_precision=EXACT)
    dc = tl.dot(tl.trans(narrow), b_own, dc, input_precision=EXACT)
    more = tl.dot(s_other.to(kind), bc_other, input_precision=EXACT)
    db += takes * more
    dc += (1 - takes) * more
    groups = nheads // heads_a_group
    at = ((run * tl.num_programs(2) + b) * seqlen + start) * groups + group
    at = at * N + t[:, None].to(tl.int64) * (groups * N) + n[None, :]
    inside = there[:, None] & (n < N)[None, :]
    tl.store(dB + at, db.to(dB.dtype.element_ty), inside)
    tl.store(dC + at, dc.to(dC.dtype.element_ty), inside)


def run(problem, x, dy, B, C, D, dts, cum, seq_idx, h, dh, dx, dB, dC, plan):
    """(sums, crossing, skip) for finish.py; dx is written, and dB and dC, (runs, batch, L, G, N)."""
    batch, seqlen, nheads, headdim, ngroups, dstate = problem[:6]
    nchunks, tiles = cum.shape[2], -(-headdim // plan.columns)
    sums = cum.new_empty((4, batch, nheads, tiles, nchunks, 2 * plan.rows))
    crossing = cum.new_empty((batch, nheads, tiles, nchunks, 2))
    skip = None if D is None else cum.new_empty((batch, nchunks, 2, nheads, headdim))
    passes = range(0, dstate, plan.width)
    so_far = None if len(passes) == 1 else cum.new_empty(x.shape)
    lines = nheads // ngroups * tiles
    strides = *x.stride()[:3], *dy.stride()[:3], *B.stride()[:3], *C.stride()[:3], sums[0].numel()
    tensors = x, dy, B, C, D, dts, cum, seq_idx, h, dh, dx, so_far, dB, dC, sums, crossing, skip
    options = dict(num_warps=plan.warps, num_stages=plan.stages)
    if plan.registers and x.is_cuda:
        options["maxnreg"] = plan.registers
    for first in passes:
        numbers = seqlen, nchunks, nheads, nheads // ngroups, plan.runs, -(-lines // plan.runs), first, *strides
        constants = (
            headdim, dstate, plan.columns, plan.width, plan.rows, plan.exact, dstate % plan.width == 0, first > 0,
            first == passes[-1], D is not None and D.ndim == 2,
        )  # fmt: skip
        launch(chunks_kernel, (2 * nchunks, ngroups * plan.runs, batch), tensors, numbers, constants, **options)
    return sums, crossing, skip
