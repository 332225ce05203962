"""float32, kernel 2 of five: C B^T of each chunk; and B, C and C B^T cut into the parts that are multiplied later.

    L seqlen   Q chunk_size   G ngroups   N dstate   W: N filled up to a tile   TILE: tokens a side of a tile

    CB     (batch, chunks, G, Q, Q) float32: CB_ij = C_i . B_j, for j <= i
    cut_CB (batch, chunks, G, Q, 2, Q): the parts of it, of tiles under the diagonal
    cut_B, cut_C (batch, G, chunks * Q, 2, W): the parts of B and C, 0 past the end and beyond N

A float32 has 24 bits, a factor of a tensor core's bfloat16 product 8. So each factor is cut in two: `high` is the
factor rounded to 8 bits, `low` what is missing, rounded too. Three products of parts are added. low x low is left out,
and what low has lost of either factor: three times 2**-16 of a product at most. Over factors of any digits a rounding
to 8 bits is off by 0.42 2**-8 in the root of the mean square, what is left out by that squared, three times: 4.8e-6 of
a product, and of a sum of many whose errors are independent. A row of parts is a row of high, then one of low, in as
many bytes as the float32 had.

All heads of a group multiply by the same B, C and C B^T, 80 of them in the 2.7B model: so these are cut here, once. The
scores themselves, of which there are few, are made of three tf32 products, with parts of 11 bits.

Kernels 3 and 5 multiply by Hopper's wgmma, which Triton takes for four warps, where that was faster (see `either`);
but where ptxas makes of it what is not to be trusted (machine_code.py), and elsewhere, by mma.sync, with two warps, as
here. Triton does not put the fence.proxy.async that PTX asks for between a copy by cp.async and a wgmma that reads it:
so with wgmma, what is loaded ahead waits in registers. mma.sync, whose factors are registers, needs no fence.
"""

import torch
import triton
import triton.language as tl

from kernels.ssd import machine_code
from kernels.ssd.launching import filled_up, launch

TILE = 64  # tokens a side of float32_scan.py's tiles, at most
SIDE, DEPTH = 32, 32  # tokens a side of a tile here; of the state's axis, at a time
_sync = set()  # kinds of launches whose wgmma was not to be trusted


@triton.jit
def cut(value, PART: tl.constexpr):
    """(high, low) of float32. On the CPU PART is float32, where nothing is left for low: 0."""
    high = value.to(PART)
    return high, (value - high.to(tl.float32)).to(PART)


@triton.jit
def three_products(a_high, a_low, b_high, b_low, acc):
    """acc + a b, from their parts; the small products first."""
    acc = tl.dot(a_low, b_high, acc)
    acc = tl.dot(a_high, b_low, acc)
    return tl.dot(a_high, b_high, acc)


@triton.jit
def _store_cut(to, value, WIDTH: tl.constexpr):
    high, low = cut(value, to.dtype.element_ty)
    tl.store(to, high)
    tl.store(to + WIDTH, low)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "ngroups"])
def scores_kernel(
    B, C, CB, cut_CB, cut_B, cut_C, seqlen, nchunks, ngroups, b_batch, b_token, b_group, c_batch, c_token, c_group,
    DSTATE: tl.constexpr, W: tl.constexpr, DEPTH: tl.constexpr, Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grid (chunks * tiles of a chunk, groups, batch). Programs on the diagonal cut the rows of B and C."""
    across: tl.constexpr = Q // TILE
    chunk, tile = (tl.program_id(0) // (across * across)).to(tl.int64), tl.program_id(0) % (across * across)
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, column = tile // across, tile % across
    if column <= row:
        r, d = tl.arange(0, TILE), tl.arange(0, DEPTH)
        i, j = chunk * Q + row * TILE + r, chunk * Q + column * TILE + r
        c_rows = C + b * c_batch + group * c_group + i[:, None] * c_token
        b_rows = B + b * b_batch + group * b_group + j[None, :] * b_token
        to_c = cut_C + ((b * ngroups + group) * nchunks * Q + i)[:, None] * (2 * W)
        to_b = cut_B + ((b * ngroups + group) * nchunks * Q + j)[None, :] * (2 * W)
        product = tl.full((TILE, TILE), 0, tl.float32)
        for first in range(0, W, DEPTH):
            n = first + d
            c = tl.load(c_rows + n[None, :], (i < seqlen)[:, None] & (n < DSTATE)[None, :], other=0)
            bt = tl.load(b_rows + n[:, None], (j < seqlen)[None, :] & (n < DSTATE)[:, None], other=0)
            product = tl.dot(c, bt, product, input_precision="tf32x3")
            if row == column:
                _store_cut(to_c + n[None, :], c, W)
                _store_cut(to_b + n[:, None], bt, W)
        tile_row = (((b * nchunks + chunk) * ngroups + group) * Q + row * TILE + r)[:, None]
        tl.store(CB + tile_row * Q + (column * TILE + r)[None, :], product)
        if row != column:
            _store_cut(cut_CB + tile_row * (2 * Q) + (column * TILE + r)[None, :], product, Q)


def either(launched, kind, x, W, tile, wgmma, sync, most):
    """launched(wgmma) where that was faster on an H200, x lies on a card that has it, and its machine code is sound;
    else launched(sync). kind: what the machine code depends on; tile: tokens a side; most: of headdim.

    Measured at headdims of 32, where it was slower, 64, 80 and 128, and dstates of 16, 64, 128 and 256, where it was
    not faster. At a dstate of 16 it gains most, a fifth."""
    faster = 32 < x.shape[3] <= most and W <= 128 and tile == TILE
    if faster and x.is_cuda and kind not in _sync and machine_code.hopper(x.device.index):
        try:
            return launched(wgmma)
        except machine_code.Unsound:
            _sync.add(kind)
    return launched(sync)


def part_type(x):
    """Of parts: bfloat16; but float32 on the CPU, where Triton's interpreter would multiply the bits of a bfloat16."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def run(B, C, chunk_size, tile=SIDE, depth=DEPTH, num_warps=2):
    """(CB, cut_CB, cut_B, cut_C) of tensors that have been looked at. Above the diagonal there may be anything."""
    batch, seqlen, ngroups, dstate = B.shape
    nchunks, tile, W = -(-seqlen // chunk_size), min(tile, chunk_size), filled_up(dstate)
    CB = B.new_empty((batch, nchunks, ngroups, chunk_size, chunk_size))
    cut_CB = B.new_empty((batch, nchunks, ngroups, chunk_size, 2, chunk_size), dtype=part_type(B))
    cut_B, cut_C = B.new_empty((2, batch, ngroups, nchunks * chunk_size, 2, W), dtype=part_type(B)).unbind()
    numbers = seqlen, nchunks, ngroups, *B.stride()[:3], *C.stride()[:3]
    constants = dstate, W, min(depth, W), chunk_size, tile
    grid = nchunks * (chunk_size // tile) ** 2, ngroups, batch
    launch(scores_kernel, grid, (B, C, CB, cut_CB, cut_B, cut_C), numbers, constants, num_warps=num_warps, num_stages=1)
    return CB, cut_CB, cut_B, cut_C
