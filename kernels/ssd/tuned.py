"""Rung 5: rung 4 after a look at its machine code, at what it counts and at what it waits for.

What is new is in the two loops, and in their order.

Once. A thread of rung 4 runs 2,100 instructions for a chunk. Nearly a thousand are softplus: dt is needed along the
rows of a tile and along its columns, and Triton would rather make it anew for each layout, 16 tokens a thread, than
move it. `chunk_decay_once` sends dt through the scan, unchanged; what comes out of a scan is moved. 1,150 remain.

Ahead. A loop's loads fly ahead of it (cp.async) where Triton can tell that they feed a product and nothing else: B and
C, but not x and dt, which a program waited for from device memory in each chunk. Here they are loaded a chunk ahead,
into 17 registers a thread. And what needs only dt comes before B and C, while these are on their way.

Moved, launched and ordered as rung 4.
"""

import triton
import triton.language as tl

from kernels.ssd.calls import prepare
from kernels.ssd.segments import STOP, chunks_that_count, far_apart, run_segments
from kernels.ssd.tiles import EXACT, LOG2_E, chunk_decay_once, dt_tile, finish, product, rows, state_input, triangle


@triton.jit
def tuned(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, added, decays, counters, batch, seqlen, ngroups, low,
    high, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h, cuts,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr, STOP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """cuts: segments of a sequence. A line is one head of one sequence. counters (64-bit words): epoch and ticket in
    one; then for each line how many of its programs have finished; then the flags (segment, line)."""
    lines = batch * nheads
    taken = tl.atomic_add(counters, 1, sem="relaxed")
    ticket, epoch = (taken & 0xFFFFFFFF).to(tl.int32), (taken >> 32) + 1
    if ticket == cuts * lines - 1:  # nobody else takes one in this launch
        tl.atomic_xchg(counters, epoch << 32, sem="relaxed")
    line, segment = ticket % lines, ticket // lines
    finished, flags = counters + 1 + line, counters + 1 + lines + line
    b, head = (line // nheads).to(tl.int64), (line % nheads).to(tl.int64)
    group, nchunks = head // (nheads // ngroups), tl.cdiv(seqlen, Q)
    first = (nchunks.to(tl.int64) * segment // cuts).to(tl.int32)
    last = (nchunks.to(tl.int64) * (segment + 1) // cuts).to(tl.int32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + head).to(tl.float32)
    rate = tl.load(A + head) * LOG2_E
    x += b * x_b + head * x_h
    dt += b * dt_b + head
    B += b * B_b + group * B_g
    C += b * C_b + group * C_g
    y += (b * seqlen * nheads + head) * P
    if z is not None:
        z += b * z_b + head * z_h
    if D is not None:
        D += head * P if D_ROWS else head
    p, n = tl.arange(0, WP), tl.arange(0, WN)
    here = (p < P)[:, None] & (n < N)[None, :]
    at = (line.to(tl.int64) * P + p)[:, None] * N + n[None, :]  # in initial and final
    place = (line.to(tl.int64) * WP + p)[:, None] * WN + n[None, :]  # in added, of the first segment
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
        tl.store(added + segment * step + place, state)
        tl.store(decays + ticket, tl.where(cut, -1.0, tl.exp2(left)))
        tl.debug_barrier()  # all threads' stores before one thread's release
        tl.atomic_xchg(flags + segment * lines, epoch, sem="release")

    state, weight, before = tl.zeros((WP, WN), tl.float32), 1.0, segment - 1
    while before >= 0:  # look back
        while tl.atomic_add(flags + before * lines, 0, sem="acquire") != epoch:
            pass
        state += weight * tl.load(added + before * step + place)
        decay = tl.load(decays + before * lines + line)
        weight *= decay
        before = tl.where(decay == -1, -2, before - 1)  # nothing in front of a cut shows
    if initial is not None:
        if before == -1:
            state += weight * tl.load(initial + at, here, other=0).to(tl.float32)

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
            acc = tl.dot(c_tile, tl.trans(state.to(c_tile.dtype)), input_precision=EXACT) * tl.exp2(cum)[:, None]
            cb = tl.dot(c_tile, tl.trans(b_tile), input_precision=EXACT)  # 2: (Q, Q)
            acc = product(triangle(cb, d, cum, Q), x_tile, acc, Q)  # 5: (Q, P)
            gain = state_input(x_tile, d, cum, total)
            state = tl.dot(gain, b_tile, state * tl.exp2(total), input_precision=EXACT)  # 3, 4: (P, N)
            finish(y, acc, x_tile, D, z, start, seqlen, nheads * P, z_l, D_ROWS, P, Q, WP)
        if final is not None:
            if last == nchunks:
                tl.store(final + at, state, here)
        again = 0
        if STOP > 0:
            if (turn == 1) & (cuts > 1):
                wrong = 0
                if cut:
                    wrong = far_apart(state, tl.load(added + segment * step + place))
                tl.debug_barrier()
                others = tl.atomic_add(finished, 1 + wrong * 65536, sem="acq_rel").to(tl.int32)
                if others % 65536 == cuts - 1:  # the last of this line
                    tl.atomic_xchg(finished, 0, sem="relaxed")
                    if others // 65536 + wrong > 0:
                        again, last = 2, nchunks
                        first = 0
                        state = tl.zeros((WP, WN), tl.float32)
                        if initial is not None:
                            state = tl.load(initial + at, here, other=0).to(tl.float32)
        turn = again


def fused_tuned(
    x, dt, A, B, C, *, chunk_size=None, segments=None, stop=STOP, warps=None, stages=None, **options
):  # fmt: skip
    """Rung 5. Arguments and results: kernels.ssd.calls and kernels.ssd.segments.fused_segments."""
    call = prepare("fused_tuned", x, dt, A, B, C, chunk_size, **options)
    return run_segments("fused_tuned", tuned, call, segments, stop, warps, stages)
