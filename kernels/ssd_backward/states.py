"""Launch 2 of few: the states before each chunk, and the gradients of those after each chunk.

    H nheads   P headdim   N dstate   T tokens of a chunk   a_t = exp(A dt_t)

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


@triton.jit
def walk(
    u, v, dts, cum, seq_idx, first, to, final, b, head, p, n, seqlen, nchunks,
    BACK: tl.constexpr, u_l: tl.constexpr, v_l: tl.constexpr, nheads: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    WP: tl.constexpr, WN: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One walk: of x and B from `first`, or BACK, of dy and C. to: the states; final: where it ends, if wanted."""
    t = tl.arange(0, T)
    here, at = (p < P)[:, None] & (n < N)[None, :], p[:, None] * N + n[None, :]
    own = (b * nheads + head) * (P * N)
    state = tl.zeros((WP, WN), tl.float32)
    if first is not None:
        state += tl.load(first + own + at, here, other=0).to(tl.float32)
    if seq_idx is not None:
        seq_idx += b * seqlen
    for step in range(nchunks):
        chunk = nchunks - 1 - step if BACK else step + 0 * nchunks
        start = chunk * T
        tl.store(to + ((b * nchunks + chunk) * nheads + head) * (P * N) + at, state.to(to.dtype.element_ty), here)
        row = ((b * nheads + head) * nchunks + chunk) * T
        last = tl.load(cum + row + T - 1)
        weight = tl.load(cum + row + t)
        if BACK:
            weight = tl.exp2(weight)
        else:
            weight = tl.exp2(last - weight) * tl.load(dts + row + t)
        kept = tl.exp2(last)
        if seq_idx is not None:  # of the sequence that goes over the border, and of no other
            found = tl.load(seq_idx + tl.maximum(start - 1, 0))
            left = tl.load(seq_idx + tl.minimum(start + T, seqlen) - 1)
            number = tl.load(seq_idx + start + t, start + t < seqlen, other=-1)
            weight = tl.where(number == (found if BACK else left), weight, 0)
            kept = tl.where(found == left, kept, 0)
        us = tile(u, start, u_l, t, p, P, seqlen, P % WP == 0)  # (T, WP)
        vs = tile(v, start, v_l, t, n, N, seqlen, N % WN == 0)  # (T, WN)
        exact = us.to(tl.float32) * weight[:, None]
        weighted = exact.to(vs.dtype)
        state = tl.dot(tl.trans(weighted), vs, state * kept, input_precision=EXACT)
        if vs.dtype != tl.float32:
            rest = (exact - weighted.to(tl.float32)).to(vs.dtype)
            state = tl.dot(tl.trans(rest), vs, state, input_precision=EXACT)
    if final is not None:
        tl.store(final + own + at, state.to(final.dtype.element_ty), here)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "heads_a_group"])
def states_kernel(
    x, dy, B, C, dts, cum, seq_idx, initial, dfinal, h, dh, dinitial, seqlen, nchunks, heads_a_group,
    x_b, x_h, dy_b, dy_h, B_b, B_g, C_b, C_g,
    x_l: tl.constexpr, dy_l: tl.constexpr, B_l: tl.constexpr, C_l: tl.constexpr, nheads: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """grid (tiles of N * H * tiles of P, 2, batch): a walk forwards, and one backwards."""
    tiles_n: tl.constexpr = (N + WN - 1) // WN
    tiles_p: tl.constexpr = (P + WP - 1) // WP
    b, line = tl.program_id(2).to(tl.int64), tl.program_id(0) // tiles_n
    head = (line // tiles_p).to(tl.int64)
    group = head // heads_a_group
    p = line % tiles_p * WP + tl.arange(0, WP)
    n = tl.program_id(0) % tiles_n * WN + tl.arange(0, WN)
    if tl.program_id(1) == 0:
        walk(
            x + b * x_b + head * x_h, B + b * B_b + group * B_g, dts, cum, seq_idx, initial, h, None,
            b, head, p, n, seqlen, nchunks, False, x_l, B_l, nheads, P, N, WP, WN, T, EXACT,
        )  # fmt: skip
    else:
        walk(
            dy + b * dy_b + head * dy_h, C + b * C_b + group * C_g, dts, cum, seq_idx, dfinal, dh, dinitial,
            b, head, p, n, seqlen, nchunks, True, dy_l, C_l, nheads, P, N, WP, WN, T, EXACT,
        )  # fmt: skip


def run(problem, x, dy, B, C, dts, cum, seq_idx, initial, dfinal, dinitial, plan):
    """(h, dh): each (batch, chunks, H, P, N) in the dtype of x. dinitial, or None: is written."""
    shape = problem.batch, cum.shape[2], problem.nheads, problem.headdim, problem.dstate
    h, dh = x.new_empty(shape), x.new_empty(shape)
    tiles = -(-shape[4] // plan.state_columns) * -(-shape[3] // plan.columns)
    strides = (t.stride(axis) for t in (x, dy, B, C) for axis in (0, 2))
    numbers = problem.seqlen, shape[1], shape[2] // problem.ngroups, *strides
    of_token = *(t.stride(1) for t in (x, dy, B, C)), shape[2]  # compiled in, so that rows need no registers
    constants = *of_token, *shape[3:], plan.columns, plan.state_columns, 2 * plan.rows, plan.exact
    tensors = x, dy, B, C, dts, cum, seq_idx, initial, dfinal, h, dh, dinitial
    options = dict(num_warps=plan.state_warps, num_stages=plan.state_stages)
    launch(states_kernel, (tiles * shape[2], 2, shape[0]), tensors, numbers, constants, **options)
    return h, dh
