"""Rung 4: segments. A few programs walk a head, each a part of its sequence, in two passes.

What is new: the sequence is cut into `segments`, and a program walks one with the state in registers. The state at its
start is not waited for along the sequence: every program but a head's last first finds what its own segment adds to the
state (pass 1: steps 1 and 3, no C, no y), and publishes it with the segment's whole decay. Then it looks back: its
start is  added[s-1] + decay[s-1] (added[s-2] + decay[s-2] (...)),  all of which are made at the same time. Pass 2 is
the walk of `registers`. So a chain of one hop for each chunk has become one wait.

Stop early. What lies so far back that the decay from there to the segment's end is below 2^-STOP adds nothing that
float32 could show, unless it is far larger than all that came after it, infinite or NaN. So pass 1 begins as late as
that, and publishes that it has: a look-back ends there. Pass 2 walks the whole segment and so knows the true end. If
any element of it differs from what was published by more than half a unit in its last place (2^-24 of it), the head is
marked, and the last of its programs to finish walks its whole sequence anew. What stays differs by less than float32's
own rounding, for any input. STOP=0 turns all this off.

Order. A ticket from an atomic counter is a program's place: segments of all heads one after another, so that whoever
waits waits for a program that started earlier. Flags hold the launch's number (epoch): nothing is zeroed, a CUDA graph
may replay the launch. The one who takes the last ticket opens the next epoch. A workspace serves one launch at a
time, so each stream has its own, and so has each launch that a graph has captured: `kernels.ssd.workspace`.

Moved: x, z, y, dt, B, C once, x, B, dt again as far as pass 1 goes; the states, 4 P N bytes for a segment, written once
and read once or a few times. Launch: batch * nheads * segments programs.
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.calls import prepare, run
from kernels.ssd.registers import walk_chunks
from kernels.ssd.tiles import (
    EXACT,
    chunk_decay,
    dt_tile,
    first_state,
    of_head,
    rates,
    rows,
    state_input,
    state_tile,
    step_sizes,
)
from kernels.ssd.workspace import claim
from lab.card import multiprocessors

STOP = 64
ROOM = 2  # programs that a multiprocessor has room for
MOST = 4096  # segments


@triton.jit
def chunks_that_count(dt, first, last, stride, seqlen, rate, bias, low, high, SOFTPLUS: tl.constexpr, Q: tl.constexpr,
                      SPAN: tl.constexpr, STOP: tl.constexpr):  # fmt: skip
    """How many chunks before `last` the state at its end still shows. Reads dt backwards, SPAN chunks at a time."""
    k, t = tl.arange(0, SPAN), tl.arange(0, Q)
    count, seen, left = 0, 0, 0.0  # left: log2 of the decay over what was seen
    while (count == seen) & (seen < last - first):
        chunk = last - seen - SPAN + k
        token = chunk[:, None] * Q + t[None, :]
        there = (chunk >= first)[:, None] & (token < seqlen)
        raw = tl.load(dt + token.to(tl.int64) * stride, there, other=0)
        a = tl.sum(rate * step_sizes(raw, there, bias, low, high, SOFTPLUS), 1)  # (SPAN,)
        after = left + (tl.cumsum(a, 0, reverse=True) - a)  # from each chunk's end to that of the segment
        counts = (chunk >= first) & ((after <= -STOP) == 0)  # so a NaN counts
        count += tl.sum(counts.to(tl.int32), 0)
        left += tl.sum(a, 0)
        seen = tl.minimum(seen + SPAN, last - first)
    return count


@triton.jit
def far_apart(true, used):
    """1 where any element is not what was used in its place, within half a unit in the last place; else 0."""
    near = (tl.abs(true - used) <= tl.abs(true) * 5.9604645e-8) & (tl.abs(true) < float("inf"))
    same = near | (true == used) | ((true != true) & (used != used))
    return tl.max(tl.max((same == 0).to(tl.int32), 1), 0)


@triton.jit
def take_ticket(counters, tickets):
    """(ticket, epoch). The one who takes the last ticket opens the next epoch."""
    taken = tl.atomic_add(counters, 1, sem="relaxed")
    ticket, epoch = (taken & 0xFFFFFFFF).to(tl.int32), (taken >> 32) + 1
    if ticket == tickets - 1:  # nobody else takes one in this launch
        tl.atomic_xchg(counters, epoch << 32, sem="relaxed")
    return ticket, epoch


@triton.jit
def chunks_of(segment, cuts, nchunks):
    """The first chunk of a segment, and the one behind its last."""
    first = (nchunks.to(tl.int64) * segment // cuts).to(tl.int32)
    last = (nchunks.to(tl.int64) * (segment + 1) // cuts).to(tl.int32)
    return first, last


@triton.jit
def publish(state, cut, left, epoch, added, decays, ticket, flags, own):
    """For later segments: what this one adds to the state, and its decay (left: log2 of it); then its own flag."""
    tl.store(added, state)
    tl.store(decays + ticket, tl.where(cut, -1.0, tl.exp2(left)))
    tl.debug_barrier()  # all threads' stores before one thread's release
    tl.atomic_xchg(flags + own, epoch, sem="release")


@triton.jit
def look_back(segment, added, decays, flags, initial, epoch, lines, step, place, at, here, WP: tl.constexpr,
              WN: tl.constexpr):  # fmt: skip
    """The state at the start of a segment: (WP, WN). decays and flags: of the line's first segment."""
    state, weight, before = tl.zeros((WP, WN), tl.float32), 1.0, segment - 1
    while before >= 0:
        while tl.atomic_add(flags + before * lines, 0, sem="acquire") != epoch:
            pass
        state += weight * tl.load(added + before * step + place)
        decay = tl.load(decays + before * lines)
        weight *= decay
        before = tl.where(decay == -1, -2, before - 1)  # nothing in front of a cut shows
    if initial is not None:
        if before == -1:
            state += weight * tl.load(initial + at, here, other=0).to(tl.float32)
    return state


@triton.jit
def settle(turn, first, last, state, cut, used, place, finished, cuts, nchunks, initial, at, here, WP: tl.constexpr,
           WN: tl.constexpr):  # fmt: skip
    """After a walk: (turn, first, last, state) of the one to come. There is one, of the whole line, for the program
    that finishes last, if the end state of any of them is not what was used in its place. If not, turn is 0."""
    again = 0
    if (turn == 1) & (cuts > 1):
        wrong = 0
        if cut:
            wrong = far_apart(state, tl.load(used + place))
        tl.debug_barrier()
        others = tl.atomic_add(finished, 1 + wrong * 65536, sem="acq_rel").to(tl.int32)
        if others % 65536 == cuts - 1:  # the last of this line
            tl.atomic_xchg(finished, 0, sem="relaxed")
            if others // 65536 + wrong > 0:
                again, last = 2, nchunks
                first = 0
                state = first_state(initial, at, here, WP, WN)
    return again, first, last, state


@triton.jit
def walk(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, added, decays, counters, batch, seqlen, ngroups, low,
    high, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h, cuts,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr, STOP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """cuts: segments of a sequence. A line is one head of one sequence. counters (64-bit words): epoch and ticket in
    one; then for each line how many of its programs have finished; then the flags (segment, line)."""
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
        for chunk in range(last - count, last):
            start = chunk * Q
            b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
            x_tile = rows(x, start, x_l, seqlen, P, Q, WP)  # (Q, P)
            raw = dt_tile(dt, start, dt_l, seqlen, Q)
            d, cum, total = chunk_decay(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
            gain = state_input(x_tile, d, cum, total)
            state = tl.dot(gain, b_tile, state * tl.exp2(total), input_precision=EXACT)  # 3, 4: (P, N)
            left += total
        publish(state, cut, left, epoch, added + segment * step + place, decays, ticket, flags, segment * lines)

    state = look_back(segment, added, decays + line, flags, initial, epoch, lines, step, place, at, here, WP, WN)

    turn = 1
    while turn > 0:
        state = walk_chunks(  # pass 2
            state, first, last, x, dt, B, C, D, z, y, seqlen, rate, bias, low, high,
            x_l, dt_l, B_l, C_l, nheads * P, z_l, P, N, WP, WN, Q, SOFTPLUS, D_ROWS,
        )  # fmt: skip
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


def fused_segments(
    x, dt, A, B, C, *, chunk_size=None, segments=None, stop=STOP, warps=None, stages=None, **options
):  # fmt: skip
    """Rung 4, two-pass segments. Arguments and results: kernels.ssd.calls; chunks of 64 tokens unless given.

    segments  of a sequence, if not as many as `segment_count` says
    stop      log2 of the decay behind which pass 1 does not look (see above); 0: it looks at all
    """
    call = prepare("fused_segments", x, dt, A, B, C, chunk_size, **options)
    return run_segments("fused_segments", walk, call, segments, stop, warps, stages)


def run_segments(where, kernel, call, segments, stop, warps, stages):
    """Make the workspace of this rung and the next, and launch."""
    batch, _, nheads, _, _, _, q, nchunks = call.problem
    x, lines = call.tensors[0], batch * nheads
    cuts = segment_count(lines, nchunks, multiprocessors(x.device)) if segments is None else segments
    if isinstance(cuts, bool) or not isinstance(cuts, int):
        raise TypeError(f"{where}: segments must be a whole number or None, got {segments!r}")
    if not 1 <= cuts <= min(MOST, nchunks):
        raise ValueError(f"{where}: segments must be from 1 to {min(MOST, nchunks)}, got {cuts}")
    if isinstance(stop, bool) or not isinstance(stop, int) or stop < 0:
        raise ValueError(f"{where}: stop must be a whole number of at least 0, got {stop!r}")
    added = x.new_empty(cuts - 1, lines, *call.tile, dtype=torch.float32)
    decays = x.new_empty(cuts - 1, lines, dtype=torch.float32)
    workspace = added, decays, claim(x.device, 1 + lines * (1 + cuts))
    stages = stages or (1 if x.dtype is torch.float32 else 2)
    constants = stop, max(1, 1024 // q)
    return run(call, kernel, (lines * cuts, 1, 1), workspace, (cuts,), constants, warps=warps, stages=stages)


def segment_count(lines, nchunks, multiprocessors):
    """How many segments: enough for all places on the card; for long sequences several rounds of them, which end more
    evenly. At least 4 chunks each."""
    rounds = 1 if nchunks <= 128 else 2 if nchunks <= 512 else 4
    return max(1, min(ROOM * multiprocessors * rounds // lines, nchunks // 4, MOST))
