"""How decode.cu is launched over a quantised cache, with attention/merge.cu behind it.

The figures that decided were measured on an H200. One block stands on each multiprocessor. All tiles are cut into equal
shares, each of a team of a block's warps, which wait for each other at the end of a row and join what they have found:
of all its warps or, where a block would have several rows, of fewer. Integers of 4 bits need most instructions for a
byte, so long shares of them get more warps. Where rows are short and all of them fit on the card side by side, the
merge is what takes long: then a share is a row.
"""

import functools
from typing import NamedTuple

TILE, HALF_TILE, HEAD_TILE = 32, 16, 16  # tokens that a warp takes at a time; query heads side by side, at most
WARPS, WARPS_4 = 8, 12  # of a block, where 8 bits are read, or 4 in both caches
STAGES, STAGES_DEEP = 2, 3  # tiles in a warp's ring, at most; the second where shares of 4 bits are deep, or a warp's
SHORT, TINY = 4, 2  # tiles of a share, up to which half as many warps are better; up to which tiles are, half as long
SEVERAL = 1.5  # rows for a multiprocessor, from which on shares are of smaller teams
FEW = 0.9  # likewise where lengths differ and more than 8 heads are joined
ALONE, TEAM = 1, 4  # warps of such a team, where they join up to 8 heads, and more
LONG, DEEP = 48, 192  # tiles of a share, from which on more warps pay for 4 bits, and from which on a longer ring does
SEGMENT = 6  # tiles that a block reads in the time that a second segment takes it
WHOLE_MOST = 256  # tiles of a row, up to which it saves the merge if each block has one row
ABREAST, ABREAST_EVEN, ABREAST_TOKENS = (2, 4, 8), 0.9, 1024  # rows of a block, each of a team; see _abreast
ABREAST_WARPS, ABREAST_WARPS_4, ABREAST_STAGES, ABREAST_STAGES_4 = 8, 16, 3, 2  # with 8 bits, and with 4 in both caches
MERGE_THREADS, MERGE_DEPTH = 1024, 5  # threads of a block of merge.cu, at most, and segments that one loads at once


class Plan(NamedTuple):
    shape: tuple  # head_dim, query heads of a kv head: see Shape in ../attention/shape.cuh
    schedule: tuple  # warps, tokens of a tile, head tiles of a block, lengths, whole: see Schedule
    stages: int
    room: int  # blocks that a multiprocessor has room for
    warps: int
    tile: int  # tokens
    rows: int  # of a sequence: its head tiles
    blocks: int  # of decode.cu
    team: int  # warps of it that have a share together
    shares: int  # into which the tiles are cut
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
    held,
    low,
    multiprocessors,
    room,
    lens=False,
    *,
    tile=None,
    warps=None,
    stages=None,
    blocks=1,
    shares=None,
    aligned=None,
    whole=None,
    team=None,
    threads=None,
):
    """The plan for tensors of these sizes.

    held             bytes of a token of keys and one of values with their own scales; those of scales of channels
    low              whether both caches have 4 bits
    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    lens             whether sequences have lengths of their own
    What is given by name is taken as it is, for measurements. blocks: that a multiprocessor shall have room for;
    shares: blocks of decode.cu, at most; aligned: whether shares end where rows do; whole: whether each block has one
    row, and no merge follows; team: warps that have a share together.
    """
    group = n_heads // n_kv_heads
    head_tiles = -(-group // HEAD_TILE)
    heads = -(-group // head_tiles)
    rows = n_kv_heads * head_tiles
    differ = lens and batch > 1  # the rows of one sequence are all of one length
    most = shares or multiprocessors * blocks
    abreast = 0  # rows of a block, each of a team of warps
    if whole is None and heads <= 8 and kv_len <= ABREAST_TOKENS and not (team or warps or shares):
        abreast = _abreast(batch * rows, multiprocessors)
    tile = tile or (HALF_TILE if batch * rows * -(-kv_len // TILE) <= TINY * most else TILE)
    tiles = batch * rows * -(-kv_len // tile)
    shares = min(most, tiles)
    if abreast:
        whole = True
    elif not (team or warps or whole):
        team = _team(batch * rows / multiprocessors, heads, differ)
    # Shares that end where rows do have one segment, the others two. It may be worth some idle multiprocessors.
    even = most // (batch * rows) * batch * rows
    if aligned is None:
        free = not (team or differ)
        aligned = free and 0 < even < tiles and -(-tiles // even) - -(-tiles // shares) <= SEGMENT
    if aligned:
        shares = even
    if whole is None:
        whole = not team and shares == batch * rows and not lens and tiles <= WHOLE_MOST * shares
    if whole:
        shares = batch * rows

    slot = -(-(tile * held[0] + held[1]) // 128) * 128
    ladder = (WARPS, 4, 2, 1)
    if warps:
        ladder = (warps,)
    elif abreast:
        ladder = tuple(w for w in (ABREAST_WARPS_4 if low else ABREAST_WARPS, WARPS, 4, 2) if w >= abreast)
    elif team is None and tiles <= SHORT * shares:
        ladder = ladder[1:]
    elif not (team or differ) and low and heads <= 8 and tiles >= LONG * shares:
        ladder = (WARPS_4, *ladder)
    for w in ladder:
        queries = heads * (2 * (head_dim + 8) + 4)
        together = w // abreast if abreast else min(team or w, w)
        joins = together > 1 or whole
        fixed = w // together * queries + (4 * w * heads * (head_dim + 10) if joins else 0)
        fit = (room // blocks - fixed) // (w * slot)
        if fit >= 2:
            break  # the first that leaves room for two tiles of each warp
    if abreast and fit < 2:
        sizes = batch, n_heads, n_kv_heads, head_dim, kv_len, held, low, multiprocessors, room, lens
        return plan(*sizes, tile=tile, stages=stages, blocks=blocks, aligned=aligned, whole=False, threads=threads)
    deep = team == 1 or low and tiles >= DEEP * shares
    most = (ABREAST_STAGES_4 if low else ABREAST_STAGES) if abreast else STAGES_DEEP if deep else STAGES
    stages = stages or max(1, min(most, fit))
    shared = w * stages * slot + fixed
    if blocks == 1:
        shared = max(shared, room // 2 + 1)  # two blocks of a launch must not meet on a multiprocessor
    team = together
    grid = -(-shares // (w // team)) if whole else min(shares, -(-tiles // (w // team)))
    shares = grid * (w // team)

    count = -(-shares // (batch * rows)) + 1  # segments of a row
    together = heads if heads * head_tiles == group and batch * n_heads >= 2 * multiprocessors else 1
    columns = together * head_dim // 4
    teams = min(-(-count // MERGE_DEPTH), max(1, MERGE_THREADS // columns))
    segments = shares + batch * rows
    sums_at = segments * heads * head_dim
    return Plan(
        *((head_dim, group), (w, tile, 1, lens, whole)),
        *(stages, blocks, w, tile, rows, grid, team, shares, tiles // shares, tiles % shares, shared),
        *(whole, threads or -(-columns * teams // 32) * 32, together, sums_at + 2 * segments * heads, sums_at),
    )


def _abreast(rows, multiprocessors):
    """Rows of short sequences that a block should have at a time, so that all fit into one go without a merge; 0 where
    too many teams would be without one."""
    each = -(-rows // multiprocessors)
    return each if each in ABREAST and rows >= ABREAST_EVEN * each * multiprocessors else 0


def _team(rows, heads, differ):
    """Warps that share, or None for all of a block, where a multiprocessor has so many rows of so many heads, whose
    lengths may differ.

    Each row that ends in a share costs its team a wait for the slowest. A warp alone waits for nobody, and leaves more
    segments: too many where each of them has more than 8 heads.
    """
    if heads <= 8:
        return ALONE if rows >= SEVERAL else None
    return TEAM if rows >= (FEW if differ else SEVERAL) else None
