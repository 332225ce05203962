"""Launch 3 of few: C_i.B_j inside of chunks, for all heads of a group, as the next launch multiplies by them.

    N dstate   Q tokens of a block, two blocks a chunk

    own     (j, i), both of one block, where i >= j; else 0     of the first block, then of the second
    second  (j, i), j of the first block, i of the second
    first   (i, j), its transpose

Reads B and C once or twice, writes 8 Q numbers for a token and group, in the dtype of x. Of more than WN columns of B
and C each WN have their own: what is made of them is added up later.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch
from kernels.ssd_backward.states import tile


@triton.jit(do_not_specialize=["seqlen", "nchunks"])
def scores_kernel(
    B, C, seq_idx, scores, seqlen, nchunks, B_b, B_g, C_b, C_g, B_l: tl.constexpr, C_l: tl.constexpr,
    N: tl.constexpr, WN: tl.constexpr, Q: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """grid (4 * chunks, G * tiles of N, batch). scores (tiles of N, batch, chunks, G, 4, Q, Q)"""
    tiles_n: tl.constexpr = (N + WN - 1) // WN
    FULL: tl.constexpr = N % WN == 0
    which, chunk = tl.program_id(0) % 4, (tl.program_id(0) // 4).to(tl.int64)
    group, b = (tl.program_id(1) // tiles_n).to(tl.int64), tl.program_id(2).to(tl.int64)
    groups = tl.num_programs(1) // tiles_n
    first_tile = tl.program_id(1) % tiles_n
    t, n = tl.arange(0, Q), first_tile * WN + tl.arange(0, WN)
    j_start = chunk * 2 * Q + tl.where(which == 1, Q, 0)
    i_start = chunk * 2 * Q + tl.where(which == 0, 0, Q)
    bs = tile(B + b * B_b + group * B_g, j_start, B_l, t, n, N, seqlen, FULL)  # (Q, WN)
    cs = tile(C + b * C_b + group * C_g, i_start, C_l, t, n, N, seqlen, FULL)
    found = tl.dot(bs, tl.trans(cs), input_precision=EXACT)  # (j, i)
    if which < 2:
        found = tl.where(t[:, None] <= t[None, :], found, 0)
        if seq_idx is not None:  # nothing crosses from one sequence to the next
            seq_idx += b * seqlen
            of_j = tl.load(seq_idx + j_start + t, j_start + t < seqlen, other=-1)
            of_i = tl.load(seq_idx + i_start + t, i_start + t < seqlen, other=-2)
            found = tl.where(of_j[:, None] == of_i[None, :], found, 0)
    to = scores + ((((first_tile * tl.num_programs(2) + b) * nchunks + chunk) * groups + group) * 4 + which) * (Q * Q)
    found = found.to(scores.dtype.element_ty)
    if which == 3:
        tl.store(to + t[None, :] * Q + t[:, None], found)
    else:
        tl.store(to + t[:, None] * Q + t[None, :], found)


def run(problem, B, C, seq_idx, nchunks, plan):
    """The scores, (tiles of N, batch, chunks, G, 4, Q, Q)."""
    tiles = -(-problem.dstate // plan.width)
    scores = B.new_empty((tiles, problem.batch, nchunks, problem.ngroups, 4, plan.rows, plan.rows))
    numbers = problem.seqlen, nchunks, *(t.stride(axis) for t in (B, C) for axis in (0, 2))
    constants = B.stride(1), C.stride(1), problem.dstate, plan.width, plan.rows, plan.exact
    grid = 4 * nchunks, problem.ngroups * tiles, problem.batch
    launch(scores_kernel, grid, (B, C, seq_idx, scores), numbers, constants, num_warps=plan.warps, num_stages=1)
    return scores
