"""How fused.cu is launched: tickets, and the memory between blocks.

The chunks of all pairs of heads stand in one line, which is cut into one share of about equal cost for each
multiprocessor, so all are busy to the end. In long sequences pairs are bundled, as shares.cuh says. A share that ends
within a pair walks its last piece twice, the first time for about half of the cost (cost_in_pass_1 in shares.cuh); with
decays as they are, a few chunks of it.
"""

import functools
import math
from typing import NamedTuple

CHUNK, WIDTH = 64, 64  # tokens; columns of a row of heads
SORT = 12  # chunks of a share from which rows are sorted: no tile is asked for before they are
LONG = 768  # chunks of a sequence beyond which pairs are bundled
MOST_TOGETHER, BUNDLES = 4, 4  # pairs of a bundle at most; bundles of a group at least, as their pairs are cut alike
STAGES, MOST_TICKETS, MOST_ROWS = 3, 159, 512  # as in shape.cuh


class Plan(NamedTuple):
    """The sizes of a launch; names as in fused.cu."""

    rows: int
    pairs_of_group: int
    pairs: int
    chunks: int
    tickets: int
    blocks: int
    scratch: int  # floats: states at the ends of pass 1, and their decays
    flags: int  # two for each ticket, one for each pair
    sort: int  # whether to put rows of heads in order of their decay
    side_by_side: int  # log2 of the pairs of a bundle, which are cut at the same places


def halves(dstate):
    """Whether a block has one row, and two warpgroups half of its state each; else a pair of rows (halves.cuh)."""
    return dstate > 128


def padded(dstate):
    """dstate, filled up to whole tiles, and four of them if there are halves."""
    return 256 if halves(dstate) else -(-dstate // WIDTH) * WIDTH


@functools.lru_cache(maxsize=1024)
def plan(
    batch, seqlen, nheads, headdim, ngroups, dstate, processors, *, tickets=None, sort=None, together=None
):  # fmt: skip
    """The plan on a card of so many multiprocessors. tickets and sort that are given are taken as they are,
    for measurements; together: pairs of a bundle at most, if rows are sorted."""
    rows = nheads // ngroups * -(-headdim // WIDTH)
    pairs_of_group = rows if halves(dstate) else -(-rows // 2)
    pairs = batch * ngroups * pairs_of_group
    chunks = -(-seqlen // CHUNK)
    tickets = min(tickets or processors, pairs * chunks, MOST_TICKETS)
    if sort is None:
        sort = pairs * chunks >= SORT * tickets
    sort = int(bool(sort) and rows * ngroups <= MOST_ROWS and pairs < 1 << 16)
    if together is None:
        together = min(MOST_TOGETHER, max(1, pairs_of_group // BUNDLES)) if chunks > LONG else 1
    together = math.gcd(1 << together.bit_length() - 1, pairs_of_group, tickets) if sort else 1
    part = padded(dstate) // 2 if halves(dstate) else padded(dstate)  # of a state, that a warpgroup has
    scratch, flags = 2 * tickets * (WIDTH * part + 1), 2 * tickets + pairs
    blocks, side_by_side = min(processors, tickets), together.bit_length() - 1
    return Plan(rows, pairs_of_group, pairs, chunks, tickets, blocks, scratch, flags, sort, side_by_side)


def shared_bytes(dstate, z, sequences=False):
    """Of dynamic shared memory: struct Shared in shared.cuh."""
    rows, group_stages = (1, 2) if halves(dstate) else (2, STAGES)
    tiles = STAGES * rows + group_stages * 2 * padded(dstate) // 64 + 2 * rows
    decays = 4 * (3 * CHUNK + 80 + (CHUNK - 16) + 8) + 2 * CHUNK
    rest = 2048 * rows + 4 * (MOST_TICKETS + 1) + 2 * MOST_ROWS + 32 * STAGES + 8 * (4 * STAGES + 12) + 16
    handed = 16 * (16 * (128 if halves(dstate) else 1) + 8)
    begins = (STAGES if sequences else 1) * CHUNK
    return tiles * 8192 + 2 * rows * (8192 if z else 16) + STAGES * rows * decays + rest + handed + begins + 64
