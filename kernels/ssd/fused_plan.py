"""How fused.cu is launched: stretches, tickets, and the memory between blocks.

The chunks of all pairs of heads stand in one line, which is cut into one share of equal cost for each multiprocessor,
so all are busy to the end. A share that ends within a pair walks its last piece twice, for half of the cost of once;
with decays as they are, a few chunks of it. In a long sequence blocks would stand far apart, and B and C come from
memory for each pair anew: so from PIECES chunks on all pairs are cut at about the same places, and after STRETCH chunks
of each sequence the line ends, and a next one begins.
"""

import functools
from typing import NamedTuple

CHUNK, WIDTH = 64, 64  # tokens; columns of a row of heads
STRETCH = 8192  # chunks of a sequence, at most
PIECES = 2048  # chunks of a stretch from which pairs are cut at about the same places
SORT = 12  # chunks of a share from which rows are sorted: it takes about a microsecond
MOST_TICKETS, MOST_ROWS = 159, 512  # as in fused.cuh


class Plan(NamedTuple):
    """The sizes of a launch; names as in fused.cu."""

    rows: int
    pairs_of_group: int
    pairs: int
    chunks: int
    stretch: int
    stretches: int
    tickets: int  # of a stretch
    blocks: int
    scratch: int  # floats: states at the ends of pass 1 and of stretches
    flags: int  # two for each ticket and for each pair at the end of a stretch, one for each pair
    pieces_of_pair: int
    sort: int  # whether to put rows of heads in order of their decay


@functools.lru_cache(maxsize=1024)
def plan(
    batch, seqlen, nheads, headdim, ngroups, dstate, processors, *, stretch=None, tickets=None, sort=None, pieces=None
):  # fmt: skip
    """The plan on a card of so many multiprocessors. What is given by name is taken as it is, for measurements."""
    rows = nheads // ngroups * (headdim // WIDTH)
    pairs_of_group = -(-rows // 2)
    pairs = batch * ngroups * pairs_of_group
    chunks = -(-seqlen // CHUNK)
    stretches = -(-chunks // (stretch or STRETCH))
    stretch = -(-chunks // stretches)
    stretches = -(-chunks // stretch)
    shortest = chunks - stretch * (stretches - 1)  # the last one
    tickets = min(tickets or processors, pairs * shortest, MOST_TICKETS)
    state = WIDTH * dstate
    if sort is None:
        sort = pairs * stretch >= SORT * tickets
    sort = int(bool(sort) and rows * ngroups <= MOST_ROWS and pairs < 1 << 16)
    if pieces is None:
        pieces = stretch >= PIECES
    return Plan(
        rows, pairs_of_group, pairs, chunks, stretch, stretches, tickets, min(processors, tickets * stretches),
        2 * tickets * stretches * (state + 1) + 2 * (stretches - 1) * pairs * state,
        2 * (tickets * stretches + (stretches - 1) * pairs) + pairs, tickets // pairs if sort and pieces else 0, sort,
    )  # fmt: skip


def shared_bytes(dstate, z, stages):
    """Of dynamic shared memory: struct Shared in fused.cuh."""
    tiles = stages * (2 + 2 * dstate // 64 + 2 * z) + 4
    decays = 4 * (3 * CHUNK + 80 + (CHUNK - 16) + 8) + 2 * CHUNK
    rest = 4096 + 6 * (MOST_TICKETS + 1) + 2 * MOST_ROWS + 32 * stages + 8 * (4 * stages + 4) + 16
    return tiles * 8192 + (0 if z else 2048 * 1) + stages * 2 * decays + rest + 64
