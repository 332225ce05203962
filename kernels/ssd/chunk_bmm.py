"""Kernel 2 of five: C B^T of each chunk, how much token i asks for what token j has put into the state.

    L seqlen   Q chunk_size   G ngroups   N dstate

    CB (batch, chunks, G, Q, Q) float32: CB_ij = C_i . B_j, for j <= i

It is the same for all heads of a group, 80 of them in the 2.7B model, so that it is computed once and read by each.
A token never looks ahead: tiles above the diagonal are neither computed nor written. float32, as in float16 a product
of large rows would be infinite.

Reads B and C once for each tile of a row or column (from the cache, but for the first time), and writes about
2 Q + 2 TILE bytes for each token and group.
"""

import torch
import triton
import triton.language as tl

from kernels.ssd.arguments import DTYPES, expect_sizes, expect_step
from kernels.ssd.launching import filled_up, launch

TILE = 64  # tokens a side, at most
DEPTH = 64  # of the state's axis, at a time


@triton.jit(do_not_specialize=["seqlen", "nchunks", "ngroups"])
def bmm_kernel(
    B, C, CB, seqlen, nchunks, ngroups, b_batch, b_token, b_group, c_batch, c_token, c_group,
    DSTATE: tl.constexpr, DEPTH: tl.constexpr, Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grid (chunks * tiles of a chunk, groups, batch). DEPTH: so much of the state's axis at a time."""
    across: tl.constexpr = Q // TILE
    chunk, tile = (tl.program_id(0) // (across * across)).to(tl.int64), tl.program_id(0) % (across * across)
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, column = tile // across, tile % across
    start = chunk * Q
    if (column <= row) & (start + row * TILE < seqlen):
        r, d = tl.arange(0, TILE), tl.arange(0, DEPTH)
        i, j = row * TILE + r, column * TILE + r
        c_rows = C + b * c_batch + group * c_group + (start + i)[:, None] * c_token
        b_rows = B + b * b_batch + group * b_group + (start + j)[None, :] * b_token
        product = tl.full((TILE, TILE), 0, tl.float32)
        for first in range(0, DSTATE, DEPTH):
            n = first + d
            c = tl.load(c_rows + n[None, :], (start + i < seqlen)[:, None] & (n < DSTATE)[None, :], other=0)
            bt = tl.load(b_rows + n[:, None], (start + j < seqlen)[None, :] & (n < DSTATE)[:, None], other=0)
            product = tl.dot(c, bt, product, input_precision="tf32x3")  # float32 as three products of tf32 parts
        to = CB + ((b * nchunks + chunk) * ngroups + group) * Q * Q
        tl.store(to + i[:, None] * Q + j[None, :], product)


def chunk_bmm(B, C, chunk_size):
    """C B^T of each chunk: (batch, chunks, G, Q, Q) float32. Of what lies above the diagonal some is not written.

    B, C  (batch, L, G, N), of one dtype
    """
    expect_step("chunk_bmm", B, B=(B, ("batch", "seqlen", "ngroups", "dstate"), DTYPES))
    expect_step("chunk_bmm", B, C=(C, tuple(B.shape), (B.dtype,)))
    expect_sizes("chunk_bmm", chunk_size=chunk_size, batch=B.shape[0], dstate=B.shape[3])
    return run(B, C, chunk_size)


def run(B, C, chunk_size):
    """As chunk_bmm, on tensors that have been looked at."""
    batch, seqlen, ngroups, dstate = B.shape
    nchunks, tile = -(-seqlen // chunk_size), min(TILE, chunk_size)
    CB = B.new_empty((batch, nchunks, ngroups, chunk_size, chunk_size), dtype=torch.float32)
    numbers = seqlen, nchunks, ngroups, *B.stride()[:3], *C.stride()[:3]
    constants = dstate, min(DEPTH, filled_up(dstate)), chunk_size, tile
    launch(bmm_kernel, (nchunks * (chunk_size // tile) ** 2, ngroups, batch), (B, C, CB), numbers, constants)
    return CB


def work(batch, seqlen, ngroups, dstate, chunk_size, size=2):
    """(bytes, flops) of a call: B and C once, and the tiles on and under the diagonal."""
    nchunks, across = -(-seqlen // chunk_size), max(1, chunk_size // TILE)
    tiles = across * (across + 1) // 2 * min(TILE, chunk_size) ** 2
    written = batch * nchunks * ngroups * tiles
    return 2 * batch * seqlen * ngroups * dstate * size + 4 * written, 2 * written * dstate
