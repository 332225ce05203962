"""Launch 2 of few: the states before each chunk, and the gradients of those after each chunk.

    H nheads   P headdim   N dstate   Q chunk, 2 blocks of rows   a_t = exp(A dt_t)

    h   before chunk 0: initial_states.   From chunk to chunk: h  <- a h  + sum_t  a_{t+1} .. a_last  dt_t x_t B_t^T
    dh  after the last: dfinal_states.    And backwards:       dh <- a dh + sum_t  a_first .. a_t  dy_t C_t^T

Two walks that do not know of each other, by the same program: what they read, the weights and the direction differ. A
program has WP rows and WN columns of one head's state, in float32 registers; what the next launch multiplies by is
written in the dtype of x, once. The gradient of initial_states is where the second walk ends.

Reads x and dy once (and once more for each further tile of columns), writes 2 P N numbers for each chunk and head.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch


@triton.jit
def tile(base, first, stride, tokens, c, LAST: tl.constexpr, seqlen, FULL: tl.constexpr):
    """Tokens first + tokens of one head or group, columns c: zeros outside. The offset takes 64 bits."""
    there = (first + tokens < seqlen)[:, None]
    if not FULL:
        there = there & (c < LAST)[None, :]
    return tl.load(base + first.to(tl.int64) * stride + tokens[:, None] * stride + c[None, :], there, other=0)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def states_kernel(
    x, dy, B, C, dts, cum, seq_idx, initial, dfinal, h, dh, dinitial, seqlen, nchunks, nheads, heads_a_group,
    x_b, x_l, x_h, dy_b, dy_l, dy_h, B_b, B_l, B_g, C_b, C_l, C_g,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """grid (tiles of N * H * tiles of P, 2, batch): a walk forwards, and one backwards."""
    tiles_n: tl.constexpr = (N + WN - 1) // WN
    tiles_p: tl.constexpr = (P + WP - 1) // WP
    b, back = tl.program_id(2).to(tl.int64), tl.program_id(1) == 1
    line = tl.program_id(0) // tiles_n
    head = (line // tiles_p).to(tl.int64)
    group = head // heads_a_group
    p = line % tiles_p * WP + tl.arange(0, WP)
    n = tl.program_id(0) % tiles_n * WN + tl.arange(0, WN)
    t = tl.arange(0, Q)
    u, v, to = x + b * x_b + head * x_h, B + b * B_b + group * B_g, h
    u_l, v_l = x_l, B_l
    if back:
        u, v, to = dy + b * dy_b + head * dy_h, C + b * C_b + group * C_g, dh
        u_l, v_l = dy_l, C_l
    here, at = (p < P)[:, None] & (n < N)[None, :], p[:, None] * N + n[None, :]
    own = (b * nheads + head) * (P * N)
    state = tl.zeros((WP, WN), tl.float32)
    if initial is not None:
        state += tl.load(initial + own + at, here & (back == 0), other=0).to(tl.float32)
    if dfinal is not None:
        state += tl.load(dfinal + own + at, here & back, other=0).to(tl.float32)
    line_of = (b * nheads + head) * nchunks
    for step in range(nchunks):
        chunk = tl.where(back, nchunks - 1 - step, step)
        start = chunk * Q
        tl.store(to + ((b * nchunks + chunk) * nheads + head) * (P * N) + at, state.to(to.dtype.element_ty), here)
        row = (line_of + chunk) * Q
        c = tl.load(cum + row + t)
        last = tl.load(cum + row + Q - 1)
        weight = tl.exp2(tl.where(back, c, last - c))
        weight *= tl.where(back, 1.0, tl.load(dts + row + t))
        kept = tl.exp2(last)
        if seq_idx is not None:  # of the sequence that goes over the border, and of no other
            found = tl.load(seq_idx + b * seqlen + tl.maximum(start - 1, 0))
            left = tl.load(seq_idx + b * seqlen + tl.minimum(start + Q, seqlen) - 1)
            number = tl.load(seq_idx + b * seqlen + start + t, start + t < seqlen, other=-1)
            weight = tl.where(number == tl.where(back, found, left), weight, 0)
            kept = tl.where(found == left, kept, 0)
        us = tile(u, start, u_l, t, p, P, seqlen, P % WP == 0)  # (Q, WP)
        vs = tile(v, start, v_l, t, n, N, seqlen, N % WN == 0)  # (Q, WN)
        weighted = tl.trans((us * weight[:, None]).to(vs.dtype))
        state = tl.dot(weighted, vs, state * kept, input_precision=EXACT)
    if dinitial is not None:
        tl.store(dinitial + own + at, state.to(dinitial.dtype.element_ty), here & back)


def run(problem, x, dy, B, C, dts, cum, seq_idx, initial, dfinal, dinitial, plan):
    """(h, dh): each (batch, chunks, H, P, N) in the dtype of x. dinitial, or None: is written."""
    shape = problem.batch, cum.shape[2], problem.nheads, problem.headdim, problem.dstate
    h, dh = x.new_empty(shape), x.new_empty(shape)
    tiles = -(-shape[4] // plan.state_columns) * -(-shape[3] // plan.columns)
    numbers = (
        problem.seqlen, shape[1], shape[2], shape[2] // problem.ngroups,
        *x.stride()[:3], *dy.stride()[:3], *B.stride()[:3], *C.stride()[:3],
    )  # fmt: skip
    constants = *shape[3:], plan.columns, plan.state_columns, 2 * plan.rows, plan.exact
    tensors = x, dy, B, C, dts, cum, seq_idx, initial, dfinal, h, dh, dinitial
    options = dict(num_warps=plan.state_warps, num_stages=plan.state_stages)
    launch(states_kernel, (tiles * shape[2], 2, shape[0]), tensors, numbers, constants, **options)
    return h, dh
