"""How decode.cu is launched over a quantised cache, with attention/merge.cu behind it.

The figures that decided were measured on an H200. One block stands on each multiprocessor, with an equal share of all
tiles. Integers of 4 bits need most instructions for a byte, so long shares of them get more warps.
"""

import functools
from typing import NamedTuple

TILE, HEAD_TILE = 32, 16  # tokens that a warp takes at a time; query heads side by side, at most
WARPS, WARPS_4 = 8, 12  # of a block, where 8 bits are read, or 4 in both caches
STAGES, STAGES_4 = 2, 3  # tiles in a warp's ring, at most; the second where shares of 4 bits are deep
LONG, DEEP = 48, 192  # tiles of a share, from which on more warps pay for 4 bits, and from which on a longer ring does
SEGMENT = 6  # tiles that a block reads in the time that a second segment takes it
WHOLE_MOST = 256  # tiles of a row, up to which it saves the merge if each block has one row
MERGE_THREADS, MERGE_DEPTH = 256, 5  # threads of a block of merge.cu, at most, and segments that one loads at once


class Plan(NamedTuple):
    shape: tuple  # head_dim, query heads of a kv head: see Shape in ../attention/shape.cuh
    schedule: tuple  # warps, tokens of a tile, head tiles of a block, lengths, whole: see Schedule
    stages: int
    blocks: int  # that a multiprocessor has room for
    warps: int
    rows: int  # of a sequence: its head tiles
    shares: int  # blocks of decode.cu
    each: int  # tiles of a share, where all sequences are of the same length
    rest: int  # shares that have one more
    shared: int  # bytes of a block
    whole: bool  # a share is a row: no merge
    threads: int  # of a block of merge.cu
    together: int  # heads of it
    floats: int  # of scratch memory: the sums of all segments, and two numbers for each
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(
    batch,
    n_heads,
    n_kv_heads,
    head_dim,
    kv_len,
    slot,
    low,
    multiprocessors,
    room,
    lens=False,
    *,
    warps=None,
    stages=None,
    blocks=1,
    aligned=None,
    whole=None,
    threads=None,
):
    """The plan for tensors of these sizes.

    slot             bytes of a tile of keys, one of values, and the scales that come with them
    low              whether both caches have 4 bits
    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    lens             whether sequences have lengths of their own
    What is given by name is taken as it is, for measurements. aligned: whether shares end where rows do. whole: whether
    each block has one row, and no merge follows.
    """
    group = n_heads // n_kv_heads
    head_tiles = -(-group // HEAD_TILE)
    heads = -(-group // head_tiles)
    rows = n_kv_heads * head_tiles
    tiles = batch * rows * -(-kv_len // TILE)
    shares = min(multiprocessors, tiles)
    # Shares that end where rows do have one segment, the others two. It may be worth some idle multiprocessors.
    even = multiprocessors // (batch * rows) * batch * rows
    if aligned is None:
        aligned = 0 < even < tiles and -(-tiles // even) - -(-tiles // shares) <= SEGMENT
    if aligned:
        shares = even
    if whole is None:
        whole = shares == batch * rows and not lens and tiles <= WHOLE_MOST * shares
    if whole:
        shares = batch * rows

    slot = -(-slot // 128) * 128
    ladder = (warps,) if warps else (WARPS, 4, 2, 1)
    if low and heads <= 8 and tiles >= LONG * shares and not warps:
        ladder = (WARPS_4, *ladder)
    for w in ladder:
        fixed = 4 * w * heads * (head_dim + 10) + heads * (2 * (head_dim + 8) + 4)
        fit = (room - fixed) // (w * slot)
        if fit >= 2:
            break  # the first that leaves room for two tiles of each warp
    stages = stages or max(1, min(STAGES_4 if low and tiles >= DEEP * shares else STAGES, fit))
    shared = w * stages * slot + fixed
    if blocks == 1:
        shared = max(shared, room // 2 + 1)  # two blocks of a launch must not meet on a multiprocessor

    count = -(-shares // (batch * rows)) + 1  # segments of a row
    together = heads if heads * head_tiles == group and batch * n_heads >= 2 * multiprocessors else 1
    columns = together * head_dim // 4
    teams = min(-(-count // MERGE_DEPTH), max(1, MERGE_THREADS // columns))
    segments = shares + batch * rows
    sums_at = segments * heads * head_dim
    return Plan(
        *((head_dim, group), (w, TILE, 1, lens, whole)),
        *(stages, blocks, w, rows, shares, tiles // shares, tiles % shares, shared),
        *(whole, threads or -(-columns * teams // 32) * 32, together, sums_at + 2 * segments * heads, sums_at),
    )
