"""How decode.cu and merge.cu are launched: warps, tiles, and into how many shares the cache is cut.

The cost, in two parts. Reading: the card reads at one rate whatever the blocks, once each multiprocessor has enough on
its way, so the time is that of the largest share, and with one equal share for each multiprocessor it is least: with
fewer some of them idle, with more some must take a second one. Merging: each share leaves at least one segment, 4 ·
(head_dim + 2) bytes for each query head that are written and read again; at one share a multiprocessor it counts only
below some ten thousand tokens.
"""

import functools
from typing import NamedTuple

from kernels.attention.arguments import DTYPES
from lab.card import multiprocessors, shared_memory

TILE = 16  # tokens
HEAD_TILE = 16  # query heads of an mma, at most
WHOLE_LEAST, WHOLE_MOST = 0.95, 512  # multiprocessors that must get a row, of all; tiles of a row, at most
LONG, LONG_PDL = 24, 96  # tiles of a share, of eight kv heads each, from which eight warps are better than four
DEPTH = 5  # segments that a thread of merge.cu loads at once
MERGE_THREADS = 512  # of a block of merge.cu, at most


class Plan(NamedTuple):
    """The constants that the two kernels are compiled with, and the sizes of their launches."""

    shape: tuple  # head_dim, query heads of a kv head: see Shape in shape.cuh
    schedule: tuple  # warps, tokens of a tile, head tiles of a block, lengths, whole: see Schedule
    warps: int
    stages: int
    rows: int  # of a sequence: its head tiles, so many of a block at a time
    shares: int  # blocks of decode.cu
    each: int  # tiles of a share, where all sequences are of the same length
    rest: int  # shares that have one more
    shared: int  # bytes
    threads: int  # of merge.cu
    together: int  # heads of one of its blocks
    whole: bool  # a share is a row: no merge
    floats: int  # that all segments may need of scratch memory: sums and their two numbers
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(batch, n_heads, n_kv_heads, head_dim, kv_len, processors, room, pdl=False, lens=False, *, warps=None,
         side=None, stages=None, shares=None, threads=None, whole=None):  # fmt: skip
    """The plan for tensors of these sizes, on a card of so many multiprocessors and bytes of shared memory for a block.
    What is given by name is taken as it is, for measurements; with whole=True, side and shares are not."""
    group = n_heads // n_kv_heads
    head_tiles = -(-group // HEAD_TILE)
    heads = -(-group // head_tiles)
    tokens = -(-kv_len // TILE)  # in tiles
    # Where rows are almost as many as multiprocessors, a row each saves the merge and costs the others' idle time,
    # which grows with kv_len. Lengths of their own would leave the shares unequal, and head tiles of one kv head in
    # different blocks would read it twice.
    rows = batch * n_kv_heads * head_tiles
    if whole is None:
        free = not (lens or warps or side or shares) and head_tiles == 1
        whole = free and WHOLE_LEAST * processors <= rows <= processors and tokens <= WHOLE_MOST
    if whole:
        if lens or warps == 1:
            raise ValueError(f"plan: whole takes no lengths and two warps at least, got lens={lens}, warps={warps}")
        side, shares = 1, rows
    # Eight warps copy faster; four leave registers to merge.cu, which then starts early, and fewer segments.
    share = batch * n_kv_heads * head_tiles * tokens / processors / 8
    ladder = (8, 4, 2, 1) if batch > 1 and share >= (LONG_PDL if pdl else LONG) else (4, 2, 1)
    if whole:
        ladder = (8, 4, 2)
    for w in (warps,) if warps else ladder:  # the first that leaves room for two tiles of each warp
        wide = side or next(s for s in (8, 4, 2, 1) if n_kv_heads * head_tiles % s == 0 and w % s == 0)
        slot = w * 2 * TILE * head_dim * 2
        fixed = w * heads * (head_dim + 8) * 2 + (4 * w * heads * (head_dim + 10) if wide < w else 0)
        fit = (room - fixed) // slot
        if fit >= 2:
            break
    warps, side, rows = w, wide, n_kv_heads * head_tiles // wide
    tiles = batch * rows * tokens
    shares = min(tiles, shares or processors)

    each = -(-tiles // shares) * side // warps  # tiles of a warp
    # A short share may stand beside the next kernel's. With a long one two of those may meet on one multiprocessor.
    stages = stages or max(1, min(fit, 3 if each <= 4 else 24 // warps))
    shared = stages * slot + fixed
    if each > 4:
        shared = max(shared, room // 2 + 1)

    count = -(-shares // (batch * rows)) + 1  # segments of a row
    together = heads if heads * head_tiles == group and batch * n_heads >= 2 * processors else 1
    columns = together * head_dim // 4
    teams = min(-(-count // DEPTH), max(1, MERGE_THREADS // columns))
    segments = shares + batch * rows
    sums_at = segments * side * heads * head_dim
    return Plan(
        (head_dim, group), (warps, TILE, side, lens, whole),
        warps, stages, rows, shares, tiles // shares, tiles % shares, shared,
        threads or -(-columns * teams // 32) * 32, together, whole, sums_at + 2 * segments * side * heads, sums_at,
    )  # fmt: skip


def options(dtype, shape, schedule):
    """What both kernels are compiled with, for a plan's shape and schedule."""
    head_dim, group = shape
    numbers = ", ".join(str(int(number)) for number in schedule)
    return f"-DSHAPE=Shape<{DTYPES[dtype]}, {head_dim}, {group}>", f"-DSCHEDULE=Schedule<{numbers}>"


@functools.cache
def card(device):
    """(multiprocessors, bytes of shared memory that a block may have)"""
    return multiprocessors(device), shared_memory(device)
