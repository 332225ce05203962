"""Rung 1: five kernels in one launch, as the published fused kernel does it.

What is new: programs take tickets, and wait for each other through flags in memory. A ticket is a place in this order:
for each chunk of all sequences, first its products C B^T, one program a group, then its heads, one program each. So
whoever waits waits for a program that has started, and no residency is assumed.

    C B^T     step 2, to memory; then the flag `ready` of the chunk and group
    head      steps 1 and 3; waits for the head's previous chunk (`passed`) and hands the state on (step 4); waits for
              C B^T; step 5

A release orders what the releasing thread wrote, and no more: between the stores of a whole program and the release by
one of its threads there must be a barrier. BARRIER=False leaves it out, as the published kernel did.

Moved: x, z, y, dt, B, C once (B and C of a group by all its heads, from L2); C B^T, 4 Q^2 bytes for a chunk and group,
written once and read by each head; the state, 4 P N bytes, read and written by each chunk.
Launch: batch * nchunks * (ngroups + nheads) programs; `counters` zeroed before: 1 ticket, then passed (batch, nheads),
then ready (batch, nchunks, ngroups).
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.calls import prepare, run
from kernels.ssd.tiles import (
    EXACT,
    await_value,
    chunk_decay,
    dt_tile,
    finish,
    first_state,
    of_head,
    product,
    rates,
    rows,
    state_input,
    state_tile,
    triangle,
)


@triton.jit
def hand_on(added, total, passed, chunk, initial, final, row, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr,
            WN: tl.constexpr, BARRIER: tl.constexpr):  # fmt: skip
    """Step 4: wait for the state before this chunk, (P, N) from `row` on, and hand on the one behind it. Returns the
    one before."""
    at, here = state_tile(row, P, N, WP, WN)
    await_value(passed, chunk)
    if chunk == 0:
        state = first_state(initial, at, here, WP, WN)
    else:
        state = tl.load(final + at, here, other=0)
    tl.store(final + at, state * tl.exp2(total) + added, here)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(passed, chunk + 1, sem="release")
    return state


@triton.jit
def published(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, cb, counters, batch, seqlen, ngroups, low, high,
    x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """WP and WN: P and N, filled up to powers of two."""
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    units, nchunks = ngroups + nheads, tl.cdiv(seqlen, Q)
    unit, b, chunk = ticket % units, (ticket // units % batch).to(tl.int64), ticket // units // batch
    start = chunk * Q
    head = tl.maximum(unit - ngroups, 0).to(tl.int64)
    group = tl.where(unit < ngroups, unit.to(tl.int64), head // (nheads // ngroups))
    passed = counters + 1 + b * nheads + head
    ready = counters + 1 + batch * nheads + (b * nchunks + chunk) * ngroups + group
    t = tl.arange(0, Q)
    cb += ((b * nchunks + chunk) * ngroups + group) * Q * Q + t[:, None] * Q + t[None, :]
    x, dt, B, C = of_head(x, dt, B, C, b, head, group, x_b, x_h, dt_b, B_b, B_g, C_b, C_g)

    c_tile = rows(C, start, C_l, seqlen, N, Q, WN)  # (Q, N)
    b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
    if unit < ngroups:
        tl.store(cb, tl.dot(c_tile, tl.trans(b_tile), input_precision=EXACT))  # 2
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_xchg(ready, 1, sem="release")
    else:
        rate, bias = rates(A, dt_bias, head)
        raw = dt_tile(dt, start, dt_l, seqlen, Q)
        d, cum, total = chunk_decay(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
        x_tile = rows(x, start, x_l, seqlen, P, Q, WP)  # (Q, P)
        added = tl.dot(state_input(x_tile, d, cum, total), b_tile, input_precision=EXACT)  # 3: (P, N)

        row = (b * nheads + head) * P
        state = hand_on(added, total, passed, chunk, initial, final, row, P, N, WP, WN, BARRIER)  # 4

        acc = tl.dot(c_tile, tl.trans(state.to(c_tile.dtype)), input_precision=EXACT) * tl.exp2(cum)[:, None]
        await_value(ready, 1)
        acc = product(triangle(tl.load(cb), d, cum, Q), x_tile, acc, Q)  # 5: (Q, P)
        y += (b * seqlen * nheads + head) * P
        finish(
            y, acc, x_tile, D if D is None else D + head * (P if D_ROWS else 1),
            z if z is None else z + b * z_b + head * z_h, start, seqlen, nheads * P, z_l, D_ROWS, P, Q, WP,
        )  # fmt: skip


def fused_published(x, dt, A, B, C, *, chunk_size=None, barrier=True, warps=None, **options):
    """Rung 1, the published design. Arguments and results: kernels.ssd.calls; chunks of 128 tokens unless given.

    barrier  False leaves out the barriers before the releases: a race.
    """
    call = prepare("fused_published", x, dt, A, B, C, chunk_size, most_chunk=128, keep_final=True, **options)
    batch, _, nheads, _, ngroups, _, q, nchunks = call.problem
    cb = x.new_empty(batch, nchunks, ngroups, q, q, dtype=torch.float32)
    # A second launch, for the zeros.
    counters = torch.zeros(1 + batch * (nheads + nchunks * ngroups), dtype=torch.int32, device=x.device)
    grid = batch * nchunks * (ngroups + nheads), 1, 1
    return run(call, published, grid, (cb, counters), (), (barrier,), warps=warps or (8 if q > 64 else None))
