"""Rung 3: the state stays in registers. One program walks a head's whole sequence.

What is new: no hop. The state never goes through memory, nobody waits, there is no ticket and no flag. And loads of the
next chunks are in flight (cp.async, `stages`) while one is computed, as the walk is a loop.

What it costs: there are batch * nheads programs, 80 for one sequence of the 2.7B model, on a card with room for
hundreds. `blocks` programs a head, with headdim / blocks columns of x each, are more: the state's columns do not know
of each other. But each of them makes C B^T and the exponentials anew.

Moved: x, z, y, dt, B, C once; nothing else. Launch: (nheads, batch, blocks).
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.calls import prepare, run
from kernels.ssd.launching import filled_up
from kernels.ssd.tiles import (
    EXACT,
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
def through_chunk(state, c_tile, b_tile, x_tile, d, cum, total, y, D, z, start, seqlen, y_l: tl.constexpr,
                  z_l: tl.constexpr, D_ROWS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Steps 2 to 5: write a chunk's y, and return the state at its end."""
    acc = tl.dot(c_tile, tl.trans(state.to(c_tile.dtype)), input_precision=EXACT) * tl.exp2(cum)[:, None]
    cb = tl.dot(c_tile, tl.trans(b_tile), input_precision=EXACT)  # 2: (Q, Q)
    acc = product(triangle(cb, d, cum, Q), x_tile, acc, Q)  # 5: (Q, P)
    gain = state_input(x_tile, d, cum, total)
    state = tl.dot(gain, b_tile, state * tl.exp2(total), input_precision=EXACT)  # 3, 4: (P, N)
    finish(y, acc, x_tile, D, z, start, seqlen, y_l, z_l, D_ROWS, P, Q, WIDTH)
    return state


@triton.jit
def walk_chunks(
    state, first, last, x, dt, B, C, D, z, y, seqlen, rate, bias, low, high,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, y_l: tl.constexpr, z_l: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr, SOFTPLUS: tl.constexpr,
    D_ROWS: tl.constexpr,
):  # fmt: skip
    """All of chunks `first` up to `last`, which is not walked any more. Returns the state at their end."""
    for chunk in range(first, last):
        start = chunk * Q
        c_tile = rows(C, start, C_l, seqlen, N, Q, WN)  # (Q, N)
        b_tile = rows(B, start, B_l, seqlen, N, Q, WN)  # (Q, N)
        x_tile = rows(x, start, x_l, seqlen, P, Q, WP)  # (Q, P)
        raw = dt_tile(dt, start, dt_l, seqlen, Q)
        d, cum, total = chunk_decay(raw, start, seqlen, rate, bias, low, high, SOFTPLUS, Q)  # 1
        state = through_chunk(
            state, c_tile, b_tile, x_tile, d, cum, total, y, D, z, start, seqlen, y_l, z_l, D_ROWS, P, Q, WP
        )
    return state


@triton.jit
def registers(
    x, dt, A, B, C, D, z, dt_bias, initial, y, final, batch, seqlen, ngroups, low, high,
    x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h,
    x_l: tl.constexpr, dt_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, z_l: tl.constexpr,
    nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr,
    SOFTPLUS: tl.constexpr, D_ROWS: tl.constexpr, BLOCK: tl.constexpr, WB: tl.constexpr,
):  # fmt: skip
    """BLOCK: the columns of a program; WB and WN: BLOCK and N, filled up to powers of two."""
    head, b, column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK
    group = head // (nheads // ngroups)
    rate, bias = rates(A, dt_bias, head)
    x, dt, B, C = of_head(x, dt, B, C, b, head, group, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, column)
    y += (b * seqlen * nheads + head) * P + column
    z = z if z is None else z + (b * z_b + head * z_h + column)
    D = D if D is None else D + (head * P + column if D_ROWS else head)

    at, here = state_tile((b * nheads + head) * P + column, BLOCK, N, WB, WN)
    state = first_state(initial, at, here, WB, WN)
    state = walk_chunks(
        state, 0, tl.cdiv(seqlen, Q), x, dt, B, C, D, z, y, seqlen, rate, bias, low, high,
        x_l, dt_l, B_l, C_l, nheads * P, z_l, BLOCK, N, WB, WN, Q, SOFTPLUS, D_ROWS,
    )  # fmt: skip
    if final is not None:
        tl.store(final + at, state, here)


def fused_registers(x, dt, A, B, C, *, chunk_size=None, blocks=1, warps=None, stages=None, **options):
    """Rung 3, one program walks a sequence. Arguments and results: kernels.ssd.calls; chunks of 64 unless given.

    blocks  programs of a head; headdim is a multiple of it
    """
    call = prepare("fused_registers", x, dt, A, B, C, chunk_size, **options)
    batch, _, nheads, headdim = call.problem[:4]
    if blocks not in range(1, headdim + 1) or headdim % blocks:
        raise ValueError(
            f"fused_registers: blocks must be from 1 to {headdim} and divide headdim, {headdim}, got {blocks}"
        )
    block = headdim // blocks
    stages = stages or (1 if x.dtype is torch.float32 else 2)
    return run(call, registers, (nheads, batch, blocks), (), (), (block, filled_up(block)), warps=warps, stages=stages)
