"""How decode.cu and merge.cu are launched: warps, tiles, and into how many shares the cache is cut.

The card reads at one rate whatever the blocks, once each multiprocessor has enough on its way. So an equal share for
each multiprocessor is read in the least time. But a share that ends within a row has its cost: a segment more, and,
unless all shares are of whole rows, a second launch that merges segments, 4 · (head_dim + 2) bytes for each query head
and segment. So shares end where rows do if they are nearly equal then: if the largest has hardly more bytes than the
mean. How many more are worth it was measured on an H200.
"""

import functools
from typing import NamedTuple

from kernels.attention.arguments import DTYPES
from lab.card import multiprocessors, shared_memory

TILE = 16  # tokens
HEAD_TILE = 16  # query heads of an mma, at most
MERGE, MERGE_PDL = 440 << 10, 176 << 10  # bytes that a share may have above the mean, if that saves the second launch
BUSY, BUSY_ALL = 0.7, 0.95  # of the multiprocessors, then, at least; and where nothing else is saved
SEGMENT = 64 << 10  # ... if each share has one segment then
NARROW, NARROW_MANY = 768 << 10, 256 << 10  # bytes of a share from which that pays; with more than 8 heads of a kv head
DEEP, ABREAST = 4 << 20, 4  # of heads that are not grouped: bytes of such a share, of so many heads side by side
RUN = 256  # bytes of a token that a block should read in one piece
LONG, LONG_PDL = 12, 96  # tiles of a share, of eight kv heads each, from which eight warps are better than four
RING_TILES = 24  # of all rings of a block: more of them bring nothing
TEAM_WARPS, TEAM_STAGES = 12, 4  # of a block in which several warps share a ring, at most
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
    each: int  # tiles of a share, where all sequences are of the same length; if whole, rows
    rest: int  # shares that have one more
    shared: int  # bytes
    threads: int  # of merge.cu
    together: int  # heads of one of its blocks
    whole: bool  # shares are of whole rows: no merge
    floats: int  # that all segments may need of scratch memory: sums and their two numbers
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(batch, n_heads, n_kv_heads, head_dim, kv_len, processors, room, pdl=False, lens=False, *, warps=None,
         tile=None, side=None, stages=None, shares=None, threads=None, whole=None):  # fmt: skip
    """The plan for tensors of these sizes, on a card of so many multiprocessors and bytes of shared memory for a block.
    What is given by name is taken as it is, for measurements."""
    group = n_heads // n_kv_heads
    head_tiles = -(-group // HEAD_TILE)
    heads, all_tiles = -(-group // head_tiles), n_kv_heads * head_tiles
    if whole and lens:
        raise ValueError(f"plan: whole takes no lengths, got lens={lens}")
    sides = [s for s in range(TEAM_WARPS, 0, -1) if _fits(s, all_tiles, head_tiles)]  # head tiles side by side
    pieces = 0  # shares of a row, where they end where it does
    if side:
        sides = [side]
    elif not (lens or warps or shares):
        rows, row = batch * n_kv_heads, 4 * head_dim * kv_len  # of one kv head, and their bytes
        tokens = -(-kv_len // TILE)
        if group == 1 and _deep(rows, row, n_kv_heads, tokens, processors) and not whole:
            pieces, shares, sides = ABREAST, rows, [ABREAST]
        elif whole is None and (best := _whole(rows, row, head_dim, head_tiles, sides, processors, pdl)):
            whole, sides = True, [best, *sides]
        elif not whole and (pieces := _pieces(batch, rows, row, heads, head_tiles, processors)):
            shares, sides = rows * pieces, [head_tiles, *sides]
    whole = bool(whole)

    # Eight warps copy faster; four leave registers to merge.cu, which then starts early, and fewer segments.
    share = batch * all_tiles * -(-kv_len // TILE) / processors / 8
    eight = batch > 1 and share >= (LONG_PDL if pdl else LONG)
    if pieces:  # one head's rows: for four warps, if a token has as many bytes
        eight = head_dim <= 64 or sides[0] == ABREAST
    ladder = (8, 4, 2, 1) if whole or eight else (4, 2, 1)
    if head_tiles > 1:
        most = TEAM_WARPS if head_dim <= 64 else 8
        ladder = tuple(w for n in (4, 3, 2, 1) if (w := n * head_tiles) <= most) + ladder
    tile = tile or (2 * TILE if head_tiles > 1 or head_dim <= 64 and (whole or pieces) else TILE)
    for w, s in ((w, s) for w in ((warps,) if warps else ladder) for s in sides if w % s == 0):
        rings = w // min(s, head_tiles)
        slot = rings * 2 * tile * head_dim * 2
        fixed = w * heads * (head_dim + 8) * 2 + (4 * w * heads * (head_dim + 10) if s < w else 0)
        fit = (room - fixed) // slot
        if fit >= 2:  # the first that leaves room for two tiles in each ring
            break
    warps, side, rows = w, s, all_tiles // s
    tiles = batch * rows * -(-kv_len // tile)
    units = batch * rows if whole else tiles
    shares = min(units, shares or (-(-units // -(-units // processors)) if whole else processors))

    each = -(-tiles // shares) * side // warps  # tiles of a warp
    # A short share may stand beside the next kernel's. With a long one two of those may meet on one multiprocessor.
    deep = TEAM_STAGES if side >= head_tiles > 1 else RING_TILES // rings
    stages = stages or max(1, min(fit, 3 if each <= 4 else deep))
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
        (head_dim, group), (warps, tile, side, lens, whole),
        warps, stages, rows, shares, units // shares, units % shares, shared,
        threads or -(-columns * teams // 32) * 32, together, whole, sums_at + 2 * segments * side * heads, sums_at,
    )  # fmt: skip


def _fits(side, all_tiles, head_tiles):
    """Whether a block may take so many of a sequence's head tiles: those of whole kv heads, or a part of one's."""
    return all_tiles % side == 0 and (side % head_tiles == 0 or head_tiles % side == 0)


def _whole(rows, row, head_dim, head_tiles, sides, processors, pdl):
    """How many head tiles a block should take side by side if each is to have whole rows; None where that is too
    uneven. rows, row: how many there are of one kv head, and their bytes."""
    best = None
    for heads in (s // head_tiles for s in sides if s % head_tiles == 0 and rows * head_tiles % s == 0):
        each = -(-rows // heads // processors)  # rows of a block
        above = each * heads * row - rows * row / processors
        if above > (MERGE_PDL if pdl else MERGE) or rows // heads < BUSY * each * processors:
            continue
        if best is None or each <= 2 and 2 * head_dim * heads >= RUN:  # two of them are better than one twice as wide
            best = heads * head_tiles
    return best


def _deep(rows, row, n_kv_heads, tokens, processors):
    """Whether ABREAST heads that are not grouped should be read side by side, by as many shares as they are."""
    even = BUSY_ALL * processors <= rows <= processors and n_kv_heads % ABREAST == 0 == tokens % ABREAST
    return even and row >= DEEP


def _pieces(batch, rows, row, heads, head_tiles, processors):
    """Into how many shares each row of a single kv head should be cut; 0 where shares should not end where rows do."""
    pieces, mean = processors // rows, rows * row / processors
    few = head_tiles == 1 and (mean < NARROW_MANY if heads > 8 else mean < NARROW or batch == 1)
    return 0 if few or pieces < 2 or row / pieces - mean > SEGMENT else pieces


def options(dtype, shape, schedule):
    """What both kernels are compiled with, for a plan's shape and schedule."""
    head_dim, group = shape
    numbers = ", ".join(str(int(number)) for number in schedule)
    return f"-DSHAPE=Shape<{DTYPES[dtype]}, {head_dim}, {group}>", f"-DSCHEDULE=Schedule<{numbers}>"


@functools.cache
def card(device):
    """(multiprocessors, bytes of shared memory that a block may have)"""
    return multiprocessors(device), shared_memory(device)
