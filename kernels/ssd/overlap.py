"""Rung 2: what a chunk needs no state for is done before the wait.

What is new: the order. In `published` a program waits for the head's state with most of its work before it: while one
chunk's program adds and hands on, the next ones stand still. Here C B^T, its product with x (most of step 5) and the
chunk's own state are ready when the state comes. Between the wait and the release there is one load, one multiply-add
and one store; after it only C times the state.

C B^T is made by each head for itself: for Q of 64 and N of 128 that is two fifths more arithmetic in whole tiles, and
one wait and 8 Q^2 bytes of traffic less. So all tickets are alike: for each chunk of all sequences its heads.

Launch: batch * nchunks * nheads programs; `counters` zeroed before: 1 ticket, then passed (batch, nheads).
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.calls import prepare, run
from kernels.ssd.published import hand_on
from kernels.ssd.tiles import EXACT, chunk_decay, dt_tile, finish, of_head, product, rates, rows, state_input, triangle


@triton.jit
def overlap(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, counters, batch, seqlen, ngroups, low, high,
    x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr,
):  # fmt: skip
    """WP and WN: P and N, filled up to powers of two."""
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    head, b, chunk = ticket % nheads, (ticket // nheads % batch).to(tl.int64), ticket // nheads // batch
    start, group = chunk * Q, (head // (nheads // ngroups)).to(tl.int64)
    passed = counters + 1 + b * nheads + head
    rate, bias = rates(A, dt_bias, head)
    head = head.to(tl.int64)
    x, dt, B, C = of_head(x, dt, B, C, b, head, group, x_b, x_h, dt_b, B_b, B_g, C_b, C_g)

    c_tile = rows(C, start, C_l, seqlen, N, Q, WN)  # (Q, N)
    b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
    x_tile = rows(x, start, x_l, seqlen, P, Q, WP)  # (Q, P)
    raw = dt_tile(dt, start, dt_l, seqlen, Q)
    d, cum, total = chunk_decay(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
    cb = tl.dot(c_tile, tl.trans(b_tile), input_precision=EXACT)  # 2: (Q, Q)
    acc = product(triangle(cb, d, cum, Q), x_tile, tl.zeros((Q, WP), tl.float32), Q)  # 5, the block's triangle: (Q, P)
    added = tl.dot(state_input(x_tile, d, cum, total), b_tile, input_precision=EXACT)  # 3: (P, N)

    row = (b * nheads + head) * P
    state = hand_on(added, total, passed, chunk, initial, final, row, P, N, WP, WN, True)  # 4

    before = tl.dot(c_tile, tl.trans(state.to(c_tile.dtype)), input_precision=EXACT)
    acc += before * tl.exp2(cum)[:, None]  # 5, the state before the chunk
    y += (b * seqlen * nheads + head) * P
    z = z if z is None else z + (b * z_b + head * z_h)
    D = D if D is None else D + head * (P if D_ROWS else 1)
    finish(y, acc, x_tile, D, z, start, seqlen, nheads * P, z_l, D_ROWS, P, Q, WP)


def fused_overlap(x, dt, A, B, C, *, chunk_size=None, warps=None, **options):
    """Rung 2, work before the wait. Arguments and results: kernels.ssd.calls; chunks of 64 tokens unless given."""
    chunk_size = 64 if chunk_size is None else chunk_size
    call = prepare("fused_overlap", x, dt, A, B, C, chunk_size, most_chunk=128, keep_final=True, **options)
    batch, _, nheads, _, _, _, q, nchunks = call.problem
    counters = torch.zeros(1 + batch * nheads, dtype=torch.int32, device=x.device)  # a second launch
    grid = batch * nchunks * nheads, 1, 1
    return run(call, overlap, grid, (counters,), warps=warps or (8 if q > 64 else None))
