"""How few cuts a problem: tiles, warps, and over how many programs a group's heads are spread."""

import functools
from typing import NamedTuple

from kernels.ssd.launching import filled_up


class Plan(NamedTuple):
    """What the launches are told. Registers of a thread at most, or 0: as many as there are."""

    rows: int  # tokens of a block; a chunk has two
    columns: int  # of x, at a time
    width: int  # columns of B and C, at a time
    state_columns: int  # of a state, of a program
    exact: str  # how float32 is multiplied; 16-bit factors are as they are
    places: int  # multiprocessors
    runs: int  # over which the heads of a group are spread: inside of chunks, and from beyond them
    inter_runs: int
    warps: int  # inside of chunks
    stages: int
    registers: int
    inter_warps: int
    inter_stages: int
    state_warps: int
    state_stages: int


@functools.lru_cache(maxsize=1024)
def plan(batch, seqlen, nheads, headdim, ngroups, dstate, dtype, places, **chosen):
    """The Plan; places: multiprocessors. chosen: what is to be as it says, by name."""
    narrow = dtype.itemsize == 2
    most = dict(rows=64, columns=64, width=128) if narrow else dict(rows=32, columns=32, width=64)
    rows = chosen.get("rows", most["rows"])
    columns = min(most["columns"], filled_up(headdim))
    width = min(most["width"], filled_up(dstate))
    chunks = batch * -(-seqlen // (2 * rows)) * ngroups
    lines = nheads // ngroups * -(-headdim // columns)
    state_columns, walks = width, 2 * batch * nheads * -(-headdim // columns)
    while state_columns > 32 and walks * -(-dstate // state_columns) < places:
        state_columns //= 2
    found = Plan(
        rows, columns, width, state_columns, "tf32x3", places,
        runs=spread(2 * chunks, lines, 2 * places), inter_runs=spread(2 * chunks * -(-dstate // width), lines, places),
        warps=4 if narrow else 2, stages=2 if narrow else 1, registers=0,
        inter_warps=8 if narrow else 4, inter_stages=3 if narrow else 1,
        state_warps=4 if narrow else 2, state_stages=2 if narrow else 1,
    )  # fmt: skip
    return found._replace(**chosen)


def spread(blocks, lines, places):
    """Over how many runs `lines` heads are best spread, when `places` programs run at a time. A program's beginning and
    end, and what of its sums must be added up, cost as much as 3 heads."""

    def cost(runs):
        waves = -(-blocks * runs // places)
        return waves * (-(-lines // runs) + 3), runs

    return min((runs for runs in range(1, lines + 1) if (lines + runs - 1) // runs * (runs - 1) < lines), key=cost)
