"""float32, kernel 5 of five: y, from the tokens of its own chunk and from the state at the chunk's start.

    L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate   W: N filled up to a tile

    y_i = sum over j <= i of  CB_ij 2**(cum_i - cum_j) dt_j x_j  +  2**cum_i  C_i state^T  +  D x_i,  times silu(z_i)

A program has TILE rows of one head. What comes before them needs no decay for each pair of tokens, and is taken COLUMNS
tokens at a time: the decay from token j to token i is that from j to the end of these, times that from there to i. One
is a factor of x_j, the other of row i. So C and the tiles of CB under the diagonal are multiplied as they were cut,
once for all heads (float32_scores.py), and what is summed decays on its way:

    sum = C state^T;   for COLUMNS tokens before these rows:  sum = sum 2**(cum at their end - cum before)  +  CB x',
                       x'_j = 2**(cum at their end - cum_j) dt_j x_j;   sum = sum 2**(cum_i - cum at the last ones' end)

Only on the diagonal tile, where this would overflow, is CB weighted by pairs.

0 times NaN is NaN: a NaN in x_j would reach tokens before j of the same tile. So where float32_state.py has seen that,
which is rare, a program takes one token at a time.
"""

import triton
import triton.language as tl

from kernels.ssd import machine_code
from kernels.ssd.chunk_scan import _finish
from kernels.ssd.float32_scores import TILE, cut, either, three_products
from kernels.ssd.launching import filled_up, launch

# As in float32_state.py.
SYNC = {"width": 64, "columns": 16, "depth": 32, "stages": 3, "ahead": 0, "num_warps": 2}
WGMMA = {"width": 64, "columns": 16, "depth": 32, "stages": 1, "ahead": 1, "num_warps": 4}


@triton.jit
def _one_by_one(
    acc, x, x_token, start, CB, dt, cum, skip, first_row, end, there_p, Q: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
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
def _tokens(xs, x_token, start, first, k, end, there_p):
    """x of tokens first + k of the chunk, which begins at token `start`; 0 past the chunk's end."""
    at = xs + (start + first) * x_token + k[:, None] * x_token
    return tl.load(at, (first + k < end)[:, None] & there_p[None, :], other=0)


@triton.jit
def _depth(cs, of_state, n, there_p, DSTATE: tl.constexpr, W: tl.constexpr):
    """Both parts of C and of the state's transpose, n of the state's axis."""
    c, s, there = cs + n[None, :], of_state + n[:, None], (n < DSTATE)[:, None] & there_p[None, :]
    return tl.load(c), tl.load(c + W), tl.load(s, there, other=0), tl.load(s + DSTATE, there, other=0)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def scan_kernel(
    x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y, seqlen, nheads, nchunks, heads_a_group,
    x_batch, x_token, x_head, z_batch, z_token, z_head,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, D_ROW: tl.constexpr, Q: tl.constexpr, P: tl.constexpr,
    W: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr, STATE_TILES: tl.constexpr,
    COLUMNS: tl.constexpr, FILLED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """grid (H * chunks * Q / TILE, tiles of P, batch). D_ROW: 1 if D is (H, P), 0 if it is (H,). DEPTH: of a state at a
    time, its loads STAGES deep; COLUMNS: tokens at a time; AHEAD: whether loads go one step ahead, in registers;
    FILLED: STATE_TILES filled up to a power of two."""
    tile, h = tl.program_id(0) // nheads, (tl.program_id(0) % nheads).to(tl.int64)
    chunk, first_row = (tile // (Q // TILE)).to(tl.int64), tile % (Q // TILE) * TILE
    b, groups, group = tl.program_id(2).to(tl.int64), nheads // heads_a_group, h // heads_a_group
    p, t = tl.program_id(1) * P + tl.arange(0, P), tl.arange(0, TILE)
    there_p, start = p < HEADDIM, chunk * Q
    end = tl.minimum(seqlen - start, Q).to(tl.int32)
    row, state = ((b * nheads + h) * nchunks + chunk) * Q, (b * nchunks + chunk) * nheads + h
    x += b * x_batch + h * x_head
    cut_C += ((b * groups + group) * nchunks * Q + start) * (2 * W)
    CB += ((b * nchunks + chunk) * groups + group) * Q * Q
    cut_CB += ((b * nchunks + chunk) * groups + group) * Q * (2 * Q)
    dt += row
    cum += row
    y += (b * seqlen * nheads + h) * HEADDIM + p
    if z is not None:
        z += b * z_batch + h * z_head + p
    skip = 0.0  # D of a head is added to the diagonal of CB, D of (H, P) in _finish
    if D is not None and not D_ROW:
        skip = tl.load(D + h).to(tl.float32)
    every = tl.arange(0, FILLED)
    fine = tl.max(tl.load(strange + state * STATE_TILES + every, every < STATE_TILES, other=0), 0) == 0
    of_state = starts + state * HEADDIM * 2 * DSTATE + p[None, :] * (2 * DSTATE)
    if first_row < end:
        i = first_row + t
        acc = tl.full((TILE, P), 0, tl.float32)
        k, d = tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
        xs = x + p[None, :]
        cs = cut_C + i[:, None] * (2 * W)
        if AHEAD:
            x_next = _tokens(xs, x_token, start, 0, k, end, there_p)
            c_high, c_low, s_high, s_low = _depth(cs, of_state, d, there_p, DSTATE, W)
        for first in tl.range(0, W, DEPTH, num_stages=STAGES):  # C times the state's transpose
            if AHEAD:
                ch, cl, sh, sl, n = c_high, c_low, s_high, s_low, tl.minimum(first + DEPTH, W - DEPTH) + d
                c_high, c_low, s_high, s_low = _depth(cs, of_state, n, there_p, DSTATE, W)
            else:
                ch, cl, sh, sl = _depth(cs, of_state, first + d, there_p, DSTATE, W)
            acc = three_products(ch, cl, sh, sl, acc)
        if fine:
            since = 0.0
            for first in range(0, first_row, COLUMNS):  # tokens before these rows
                j = first + k
                until = tl.load(cum + first + COLUMNS - 1)
                left = tl.exp2(until - tl.load(cum + j)) * tl.load(dt + j)
                if AHEAD:
                    xj = x_next
                    x_next = _tokens(xs, x_token, start, first + COLUMNS, k, end, there_p)
                else:
                    xj = _tokens(xs, x_token, start, first, k, end, there_p)
                x_high, x_low = cut(xj * left[:, None], cut_C.dtype.element_ty)
                scores = cut_CB + i[:, None] * (2 * Q) + j[None, :]
                acc *= tl.exp2(until - since)
                acc = three_products(tl.load(scores), tl.load(scores + Q), x_high, x_low, acc)
                since = until
            cum_i = tl.load(cum + i)
            acc *= tl.exp2(cum_i - since)[:, None]
            for first in range(first_row, first_row + TILE, COLUMNS):
                j = first + k
                if AHEAD:
                    xj = x_next
                    after = tl.minimum(first + COLUMNS, first_row + TILE - COLUMNS)
                    x_next = _tokens(xs, x_token, start, after, k, end, there_p)
                else:
                    xj = _tokens(xs, x_token, start, first, k, end, there_p)
                weight = tl.load(CB + i[:, None] * Q + j[None, :])
                weight *= tl.exp2(cum_i[:, None] - tl.load(cum + j)[None, :]) * tl.load(dt + j)[None, :]
                weight = tl.where(i[:, None] == j[None, :], weight + skip, weight)
                w_high, w_low = cut(tl.where(i[:, None] >= j[None, :], weight, 0), cut_C.dtype.element_ty)
                x_high, x_low = cut(xj, cut_C.dtype.element_ty)
                acc = three_products(w_high, w_low, x_high, x_low, acc)
        else:
            acc = _one_by_one(acc, x + p, x_token, start, CB, dt, cum, skip, first_row, end, there_p, Q, TILE)
        _finish(
            acc, x + p, x_token, D if D_ROW else None, h, z, z_token, y, nheads, start, first_row, p, end,
            HEADDIM, D_ROW, TILE,
        )  # fmt: skip


def run(x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y, **chosen):
    """y, of tensors that have been looked at. chosen: other than WGMMA or SYNC says."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, W = cut_C.shape[1], cut_C.shape[4]
    nchunks, chunk_size = dt.shape[2:]
    dstate, state_tiles = starts.shape[5], strange.shape[3]
    tile, by_row = min(TILE, chunk_size), int(D is not None and D.ndim == 2)
    strides = *x.stride()[:3], *((0, 0, 0) if z is None else z.stride()[:3])
    numbers = seqlen, nheads, nchunks, nheads // ngroups, *strides
    tensors = x, cut_C, CB, cut_CB, dt, cum, starts, strange, D, z, y

    def launched(way):
        kernel, P, columns, depth, options = tiling(headdim, W, tile, **way)
        constants = headdim, dstate, by_row, chunk_size, P, W, depth, way["stages"], tile, state_tiles, columns
        constants += 1 << (state_tiles - 1).bit_length(), way["ahead"]
        grid = nheads * nchunks * (chunk_size // tile), -(-headdim // P), batch
        launch(kernel, grid, tensors, numbers, constants, **options)
        return y

    kind = "scan", headdim, dstate, chunk_size, by_row, D is None, z is None, state_tiles
    return either(launched, kind, x, W, tile, WGMMA | chosen, SYNC | chosen, most=128)


def tiling(headdim, W, tile, width, columns, depth, num_warps, **_):
    """(the kernel, P, COLUMNS, DEPTH, options of its launch)"""
    kernel = machine_code.checked(scan_kernel) if num_warps >= 4 else scan_kernel
    options = {"num_warps": num_warps, "num_stages": 1}
    return kernel, min(width, filled_up(headdim)), min(columns, tile), min(depth, W), options
