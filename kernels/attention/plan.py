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
EVEN, WHOLE_MOST = 0.95, 512  # of multiprocessors, the least share that must be busy; tiles of 16 tokens of a row
LONG, LONG_PDL = 24, 96  # tiles of a share, of eight kv heads each, from which eight warps are better than four
ON_THE_WAY = 192 << 10  # bytes that a multiprocessor asks for ahead: more of them bring nothing
TEAM_WARPS = 12  # of a block in which several warps share a ring, at most
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
    sides = [s for s in range(max(8, TEAM_WARPS), 0, -1) if _fits(s, all_tiles, head_tiles)]
    even = [s for s in sides if s <= 8 and s % head_tiles == 0 and _even(batch * all_tiles // s, processors)]
    if whole is None:
        whole = bool(even) and not (lens or warps or side or shares) and -(-kv_len // TILE) * even[0] <= WHOLE_MOST
    if whole and lens:
        raise ValueError(f"plan: whole takes no lengths, got lens={lens}")
    tile = tile or (32 if head_dim <= 64 else TILE)
    tokens = -(-kv_len // tile)  # in tiles

    # Eight warps copy faster; four leave registers to merge.cu, which then starts early, and fewer segments.
    share = batch * all_tiles * tokens / processors / 8
    ladder = (8, 4, 2, 1) if whole or batch > 1 and share >= (LONG_PDL if pdl else LONG) else (4, 2, 1)
    if head_tiles > 1:
        ladder = tuple(w for n in (4, 3, 2, 1) if (w := n * head_tiles) <= TEAM_WARPS) + ladder
    if side:
        sides = (side,)
    elif whole and even:
        sides = even
    for w, s in ((w, s) for w in ((warps,) if warps else ladder) for s in sides if w % s == 0):
        slot = w // min(s, head_tiles) * 2 * tile * head_dim * 2
        fixed = w * heads * (head_dim + 8) * 2 + (4 * w * heads * (head_dim + 10) if s < w else 0)
        fit = (room - fixed) // slot
        if fit >= 2:  # the first that leaves room for two tiles in each ring
            break
    warps, side, rows = w, s, all_tiles // s
    tiles = batch * rows * tokens
    if whole:
        units = batch * rows
        shares = min(units, shares or -(-units // -(-units // processors)))
    else:
        units = tiles
        shares = min(tiles, shares or processors)

    each = -(-tiles // shares) * side // warps  # tiles of a warp
    # A short share may stand beside the next kernel's. With a long one two of those may meet on one multiprocessor.
    stages = stages or max(1, min(fit, 3 if each <= 4 else ON_THE_WAY // slot))
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


def _even(rows, processors):
    """Whether hardly a multiprocessor is idle when each takes as many of these rows."""
    return rows >= EVEN * processors * -(-rows // processors)


def options(dtype, shape, schedule):
    """What both kernels are compiled with, for a plan's shape and schedule."""
    head_dim, group = shape
    numbers = ", ".join(str(int(number)) for number in schedule)
    return f"-DSHAPE=Shape<{DTYPES[dtype]}, {head_dim}, {group}>", f"-DSCHEDULE=Schedule<{numbers}>"


@functools.cache
def card(device):
    """(multiprocessors, bytes of shared memory that a block may have)"""
    return multiprocessors(device), shared_memory(device)
