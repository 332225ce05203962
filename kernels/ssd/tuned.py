"""Rung 5: rung 4 after a look at its machine code, at what it counts and at what it waits for.

What is new is in the two loops, and in their order.

Once. A thread of rung 4 runs 2,100 instructions for a chunk. Nearly 900 are softplus: dt is needed along the
rows of a tile and along its columns, and Triton would rather make it anew for each layout, 16 tokens a thread, than
move it. `chunk_decay_once` sends dt through the scan, unchanged; what comes out of a scan is moved. 1,270 remain.
(Counted in the machine code of Triton 3.6 for the 2.7B model's layer, but for the slow way where x is not finite: 2,127
in rung 4, and 1,267 in trials.py's copy of it with this change alone.)

Ahead. A loop's loads fly ahead of it (cp.async) where Triton can tell that they feed a product and nothing else: B and
C, but not x and dt, which a program waited for from device memory in each chunk. Here they are loaded a chunk ahead,
into 17 registers of each of 128 threads: 16 for the 64 × 64 halves of x, one for dt. And what needs only dt comes
before B and C, while these are on their way.

All else is rung 4's, and is imported from there. Moved, launched and ordered as rung 4.
"""

import triton
import triton.language as tl

from kernels.ssd.calls import prepare
from kernels.ssd.registers import through_chunk
from kernels.ssd.segments import (
    STOP,
    chunks_of,
    chunks_that_count,
    look_back,
    publish,
    run_segments,
    settle,
    take_ticket,
)
from kernels.ssd.tiles import EXACT, chunk_decay_once, dt_tile, of_head, rates, rows, state_input, state_tile


@triton.jit
def tuned(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, added, decays, counters, batch, seqlen, ngroups, low,
    high, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h, cuts,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr, STOP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Takes what kernels.ssd.segments.walk takes."""
    lines = batch * nheads
    ticket, epoch = take_ticket(counters, cuts * lines)
    line, segment = ticket % lines, ticket // lines
    finished, flags = counters + 1 + line, counters + 1 + lines + line
    b, head = (line // nheads).to(tl.int64), (line % nheads).to(tl.int64)
    group, nchunks = head // (nheads // ngroups), tl.cdiv(seqlen, Q)
    first, last = chunks_of(segment, cuts, nchunks)
    rate, bias = rates(A, dt_bias, head)
    x, dt, B, C = of_head(x, dt, B, C, b, head, group, x_b, x_h, dt_b, B_b, B_g, C_b, C_g)
    y += (b * seqlen * nheads + head) * P
    z = z if z is None else z + (b * z_b + head * z_h)
    D = D if D is None else D + head * (P if D_ROWS else 1)
    at, here = state_tile(line.to(tl.int64) * P, P, N, WP, WN)  # in initial and final
    place, _ = state_tile(line.to(tl.int64) * WP, WP, WN, WP, WN)  # in added, of the first segment
    step = lines.to(tl.int64) * WP * WN

    cut = False
    if segment < cuts - 1:  # pass 1
        count = last - first
        if STOP > 0:
            count = chunks_that_count(dt, first, last, dt_l, seqlen, rate, bias, low, high, SOFTPLUS, Q, SPAN, STOP)
            cut = count < last - first
        state, left = tl.zeros((WP, WN), tl.float32), 0.0
        start = (last - count) * Q
        next_x, next_raw = rows(x, start, x_l, seqlen, P, Q, WP), dt_tile(dt, start, dt_l, seqlen, Q)
        for chunk in range(last - count, last):
            start = chunk * Q
            x_tile, raw = next_x, next_raw  # (Q, P) and (Q,)
            next_x, next_raw = rows(x, start + Q, x_l, seqlen, P, Q, WP), dt_tile(dt, start + Q, dt_l, seqlen, Q)
            d, cum, total = chunk_decay_once(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
            gain = state_input(x_tile, d, cum, total)
            b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
            state = tl.dot(gain, b_tile, state * tl.exp2(total), input_precision=EXACT)  # 3, 4: (P, N)
            left += total
        publish(state, cut, left, epoch, added + segment * step + place, decays, ticket, flags, segment * lines)

    state = look_back(segment, added, decays + line, flags, initial, epoch, lines, step, place, at, here, WP, WN)

    turn = 1
    while turn > 0:
        next_x, next_raw = rows(x, first * Q, x_l, seqlen, P, Q, WP), dt_tile(dt, first * Q, dt_l, seqlen, Q)
        for chunk in range(first, last):  # pass 2
            start = chunk * Q
            x_tile, raw = next_x, next_raw  # (Q, P) and (Q,)
            next_x, next_raw = rows(x, start + Q, x_l, seqlen, P, Q, WP), dt_tile(dt, start + Q, dt_l, seqlen, Q)
            d, cum, total = chunk_decay_once(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
            c_tile = rows(C, start, C_l, seqlen, N, Q, WN)  # (Q, N)
            b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
            state = through_chunk(
                state, c_tile, b_tile, x_tile, d, cum, total, y, D, z, start, seqlen, nheads * P, z_l, D_ROWS, P, Q, WP
            )
        if final is not None:
            if last == nchunks:
                tl.store(final + at, state, here)
        if STOP > 0:
            turn, first, last, state = settle(
                turn, first, last, state, cut, added + segment * step, place, finished, cuts, nchunks,
                initial, at, here, WP, WN,
            )  # fmt: skip
        else:
            turn = 0


def fused_tuned(
    x, dt, A, B, C, *, chunk_size=None, segments=None, stop=STOP, warps=None, stages=None, **options
):  # fmt: skip
    """Rung 5. Arguments and results: kernels.ssd.calls and kernels.ssd.segments.fused_segments."""
    call = prepare("fused_tuned", x, dt, A, B, C, chunk_size, **options)
    return run_segments("fused_tuned", tuned, call, segments, stop, warps, stages)
