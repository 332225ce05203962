"""float32, kernel 5 of five: y, from the tokens of its own chunk and from the state at the chunk's start.

    L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate   W: N filled up to a tile

    y_i = sum over j <= i of  CB_ij 2**(cum_i - cum_j) dt_j x_j  +  2**cum_i  C_i state^T  +  D x_i,  times silu(z_i)

A program has one head and one chunk, and goes down its rows, TILE at a time. What comes before these rows needs no
decay for each pair of tokens. The decay from token j to token i is that from j to the end of j's tile, times that from
there to i: a factor of x_j, and one of row i. So C and the tiles of CB under the diagonal are multiplied as they were
cut, once for all heads (float32_scores.py), and what is summed decays from tile to tile:

    sum = C state^T;   for each tile before these rows:  sum = sum 2**(cum at its end - cum before)  +  CB x',
                       x'_j = 2**(cum at its end - cum_j) dt_j x_j;   sum = sum 2**(cum_i - cum at the last one's end)

Only on the diagonal tile, where this would overflow, is CB weighted by pairs.

0 times NaN is NaN: a NaN in x_j would reach tokens before j of the same tile. So where float32_state.py has seen that,
which is rare, a program takes one token at a time.
"""

import triton
import triton.language as tl

from kernels.ssd.chunk_scan import _finish
from kernels.ssd.float32_scores import TILE, cut, three_products
from kernels.ssd.launching import filled_up, launch


@triton.jit
def _one_by_one(acc, x, x_token, start, CB, dt, cum, skip, first_row, end, there_p, Q: tl.constexpr,
    TILE: tl.constexpr):  # fmt: skip
    """acc, decayed to its rows, and what their own chunk adds, token by token: no product with what does not reach a
    row."""
    i = first_row + tl.arange(0, TILE)
    cum_i = tl.load(cum + i)
    acc *= tl.exp2(cum_i)[:, None]
    for j in range(0, tl.minimum(first_row + TILE, end)):
        xj = tl.load(x + (start + j) * x_token, there_p, other=0)
        weight = tl.load(CB + i * Q + j, i >= j, other=0) * tl.exp2(cum_i - tl.load(cum + j)) * tl.load(dt + j)
        acc += tl.where((i >= j)[:, None], tl.where(i == j, weight + skip, weight)[:, None] * xj[None, :], 0)
    return acc


@triton.jit
def _earlier(acc, xj, c_high, c_low, cum, dt, first, since, TILE: tl.constexpr):
    """What the tile of tokens from `first` on adds, and what was there before, both decayed to its end; and cum there."""
    j = first + tl.arange(0, TILE)
    until = tl.load(cum + first + TILE - 1)
    left = tl.exp2(until - tl.load(cum + j)) * tl.load(dt + j)
    x_high, x_low = cut(xj * left[:, None], c_high.dtype)
    return three_products(c_high, c_low, x_high, x_low, acc * tl.exp2(until - since)), until


@triton.jit
def _own(acc, xi, CB, cum, dt, first_row, since, skip, PART: tl.constexpr, TILE: tl.constexpr):
    t = tl.arange(0, TILE)
    cum_i = tl.load(cum + first_row + t)
    acc *= tl.exp2(cum_i - since)[:, None]
    weight = CB * (tl.exp2(cum_i[:, None] - cum_i[None, :]) * tl.load(dt + first_row + t)[None, :])
    weight = tl.where(t[:, None] == t[None, :], weight + skip, tl.where(t[:, None] > t[None, :], weight, 0))
    w_high, w_low = cut(weight, PART)
    x_high, x_low = cut(xi, PART)
    return three_products(w_high, w_low, x_high, x_low, acc)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group", "pairs"])
def scan_kernel(
    x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y, seqlen, nheads, nchunks, heads_a_group, pairs,
    x_batch, x_token, x_head, z_batch, z_token, z_head,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, D_ROW: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, STATE_TILES: tl.constexpr, EARLY: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    groups = nheads // heads_a_group
    chunk, pair = (tl.program_id(0) // (pairs * groups)).to(tl.int64), tl.program_id(0) % (pairs * groups)
    group, b = (pair // pairs).to(tl.int64), tl.program_id(2).to(tl.int64)
    h = group * heads_a_group + pair % pairs * 2
    two = (pair % pairs * 2 + 1 < heads_a_group).to(tl.int64)
    p, n, t = tl.program_id(1) * P + tl.arange(0, P), tl.arange(0, N), tl.arange(0, TILE)
    there_p, start = p < HEADDIM, chunk * Q
    end = tl.minimum(seqlen - start, Q).to(tl.int32)
    row, state = ((b * nheads + h) * nchunks + chunk) * Q, (b * nchunks + chunk) * nheads + h
    x += b * x_batch + h * x_head
    x_b = x + two * x_head
    of_x = t[:, None] * x_token + p[None, :]  # from a tile's first token on
    cut_C += ((b * groups + group) * nchunks * Q + start) * (2 * W)
    CB += ((b * nchunks + chunk) * groups + group) * Q * Q
    cut_CB += ((b * nchunks + chunk) * groups + group) * Q * (2 * Q)
    dt += row
    cum += row
    dt_b, cum_b = dt + two * nchunks * Q, cum + two * nchunks * Q
    y += (b * seqlen * nheads + h) * HEADDIM + p
    if z is not None:
        z += b * z_batch + h * z_head + p
    z_b = z
    if z is not None:
        z_b = z + two * z_head
    skip, skip_b = 0.0, 0.0
    if D is not None and not D_ROW:
        skip, skip_b = tl.load(D + h).to(tl.float32), tl.load(D + h + two).to(tl.float32)
    tiles = strange + state * STATE_TILES + tl.arange(0, STATE_TILES)
    fine = tl.max(tl.load(tiles) + tl.load(tiles + two * STATE_TILES), 0) == 0
    before = starts + state * HEADDIM * 2 * DSTATE + (p[None, :] * (2 * DSTATE) + n[:, None])  # (N, P): its transpose
    before_b = before + two * HEADDIM * 2 * DSTATE
    there = (n < DSTATE)[:, None] & there_p[None, :]
    s_high, s_low = tl.load(before, there, other=0), tl.load(before + DSTATE, there, other=0)
    s_high_b, s_low_b = tl.load(before_b, there, other=0), tl.load(before_b + DSTATE, there, other=0)
    for first_row in tl.range(0, Q, TILE, loop_unroll_factor=UNROLL):
        if first_row < end:
            i = first_row + t
            in_x = (i < end)[:, None] & there_p[None, :]
            if EARLY:
                xi = tl.load(x + (start + first_row) * x_token + of_x, in_x, other=0)
                xi_b = tl.load(x_b + (start + first_row) * x_token + of_x, in_x, other=0)
            cs = cut_C + i[:, None] * (2 * W) + n[None, :]
            c_high, c_low = tl.load(cs), tl.load(cs + W)
            acc = three_products(c_high, c_low, s_high, s_low, tl.full((TILE, P), 0, tl.float32))
            acc_b = three_products(c_high, c_low, s_high_b, s_low_b, tl.full((TILE, P), 0, tl.float32))
            if fine:
                since, since_b = 0.0, 0.0
                for first in range(0, first_row, TILE):  # tiles before these rows
                    xj = tl.load(x + (start + first) * x_token + of_x, there_p[None, :], other=0)
                    xj_b = tl.load(x_b + (start + first) * x_token + of_x, there_p[None, :], other=0)
                    scores = cut_CB + i[:, None] * (2 * Q) + (first + t)[None, :]
                    s_h, s_l = tl.load(scores), tl.load(scores + Q)
                    acc, since = _earlier(acc, xj, s_h, s_l, cum, dt, first, since, TILE)
                    acc_b, since_b = _earlier(acc_b, xj_b, s_h, s_l, cum_b, dt_b, first, since_b, TILE)
                if not EARLY:
                    xi = tl.load(x + (start + first_row) * x_token + of_x, in_x, other=0)
                    xi_b = tl.load(x_b + (start + first_row) * x_token + of_x, in_x, other=0)
                weight = tl.load(CB + i[:, None] * Q + i[None, :])
                acc = _own(acc, xi, weight, cum, dt, first_row, since, skip, cut_C.dtype.element_ty, TILE)
                acc_b = _own(acc_b, xi_b, weight, cum_b, dt_b, first_row, since_b, skip_b, cut_C.dtype.element_ty, TILE)
            else:
                acc = _one_by_one(acc, x + p, x_token, start, CB, dt, cum, skip, first_row, end, there_p, Q, TILE)
                acc_b = _one_by_one(acc_b, x_b + p, x_token, start, CB, dt_b, cum_b, skip_b, first_row, end, there_p, Q, TILE)
            _finish(
                acc, x + p, x_token, D if D_ROW else None, h, z, z_token, y, nheads, start, first_row, p, end,
                HEADDIM, D_ROW, TILE,
            )  # fmt: skip
            if two == 1:
                _finish(
                    acc_b, x_b + p, x_token, D if D_ROW else None, h + 1, z_b, z_token, y + HEADDIM, nheads, start, first_row,
                    p, end, HEADDIM, D_ROW, TILE,
                )  # fmt: skip


def run(x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y, num_warps=4, num_stages=1, early=0, tile=TILE, unroll=0, **options):
    batch, seqlen, nheads, headdim = x.shape
    ngroups, W = cut_C.shape[1], cut_C.shape[4]
    nchunks, chunk_size = dt.shape[2:]
    P, N = min(64, filled_up(headdim)), min(128, W)
    pairs = -(-(nheads // ngroups) // 2)
    numbers = seqlen, nheads, nchunks, nheads // ngroups, pairs, *x.stride()[:3], *((0, 0, 0) if z is None else z.stride()[:3])
    by_row = int(D is not None and D.ndim == 2)
    constants = headdim, starts.shape[5], by_row, chunk_size, P, W, N, min(tile, chunk_size), strange.shape[3], early, unroll or 1
    tensors = x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y
    options = {"num_warps": num_warps, "num_stages": num_stages} | options
    launch(scan_kernel, (ngroups * pairs * nchunks, -(-headdim // P), batch), tensors, numbers, constants, **options)
    return y
