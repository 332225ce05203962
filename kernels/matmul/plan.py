"""How planned.cu is launched: the tile, the ring, the order of tiles, and where they are cut along k.

A rule of cycles. A step along k of a tile takes what its products take on tensor cores, or what its bytes take from L2
or, where a matrix is read once, from memory, if that is more. A unit of work takes its steps and what nothing overlaps
with, its last stores and first copies; and all multiprocessors wait for the one that has most units. The fastest of all
tiles and cuts is taken.

The numbers are fitted to what `sweep` measured on an H200, 98 launches of 18 shapes: the rule's times are 4 % off (root
mean square), and its choice is within half a percent of the fastest that was measured. They are those of a card at its
limit of power, whose clock then lies below 1,755 MHz: the shares in TILES hold that, too.
"""

import functools
import math
from typing import NamedTuple

STEP = 64  # numbers of k in a stage
PRODUCTS = 2048  # multiply-adds of a multiprocessor's tensor cores in a cycle
FROM_L2, FROM_MEMORY = 69, 15.8  # bytes that reach a multiprocessor in a cycle, where all of them ask
ALONE = 65  # ... where few do
LAUNCH, PAIRED = 1300, 1500  # cycles of a launch; more where blocks begin in clusters
FIXED = 1000  # cycles of a unit that no others overlap with
MERGE = 8800  # cycles to launch merge.cu
BOX, BUFFERS = 64 * 128, 2  # bytes of a box of y on its way out; a consumer's
BAND = 16  # rows of tiles in a band
MOST_SPLITS, MOST_STAGES = 16, 8


class Tile(NamedTuple):
    """A shape of tiles that planned.cu is compiled for."""

    rows: int
    columns: int
    consumers: int
    cluster: tuple  # blocks one below the other, which share W's rows, and side by side, which share x's
    speed: float  # share of the tensor cores' rate at 1,755 MHz that its products reach


TILES = (
    Tile(128, 256, 2, (2, 1), 0.794),
    Tile(128, 256, 2, (1, 1), 0.787),
    Tile(128, 128, 2, (1, 1), 0.765),
    Tile(64, 256, 2, (1, 1), 0.705),
    Tile(64, 128, 1, (1, 1), 0.683),
)


class Plan(NamedTuple):
    """One launch; names as in shape.cuh."""

    rows: int
    columns: int
    consumers: int
    stages: int
    group: int
    cluster: tuple  # rows and columns of blocks
    splits: int
    units: int  # tiles, or parts of tiles
    blocks: int

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def together(self):
        """Blocks of a cluster."""
        return math.prod(self.cluster)

    @property
    def x_box(self):
        """What a block asks for of x at a step."""
        return self.rows // self.cluster[1], STEP

    @property
    def w_box(self):
        return self.columns // self.cluster[0], STEP

    @property
    def shared(self):
        """Bytes of dynamic shared memory: Shared in shape.cuh."""
        return shared_bytes(self.rows, self.columns, self.consumers, self.stages)

    def shape(self, dtype, output):
        """The Shape that planned.cu is compiled with."""
        sizes = self.rows, self.columns, self.consumers, self.stages, self.group, *self.cluster
        return f"Shape<{dtype}, {', '.join(map(str, sizes))}, {output}>"


@functools.lru_cache(maxsize=1024)
def plan(m, n, k, multiprocessors, room, *, tile=None, stages=None, group=None, cluster=None, splits=None):
    """The Plan for y (m, n) = x (m, k) W (n, k)^T. What is given by name is taken as it is.

    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    tile             (rows, columns, consumers)
    cluster          (rows, columns) of blocks, or rows alone
    splits           parts of k, each of one step of 64 or more

    ValueError for what planned.cu cannot be.
    """
    cluster = (cluster, 1) if isinstance(cluster, int) else cluster
    if tile is not None and not (tile[0] % 64 == tile[1] % 64 == 0 and tile[1] <= 256 and tile[2] in (1, 2)):
        wanted = "multiples of 64, at most 256 columns, and 1 or 2 consumers"
        raise ValueError(f"plan: tile must have {wanted}, got {tile}")
    if cluster is not None and not (min(cluster) >= 1 and math.prod(cluster) <= min(8, multiprocessors)):
        wanted = f"1 to {min(8, multiprocessors)} blocks, as many as there are multiprocessors"
        raise ValueError(f"plan: cluster must have {wanted}, got {cluster}")
    if splits is not None and not 1 <= splits <= math.ceil(k / STEP):
        raise ValueError(f"plan: splits must be 1 to {math.ceil(k / STEP)}, the steps of {STEP} of k, got {splits}")
    tiles = [t for t in TILES if math.prod(t.cluster) <= multiprocessors]
    if tile is not None:
        tiles = [Tile(*tile, cluster or (1, 1), 1.0)]
    elif cluster is not None:
        tiles = [t for t in tiles if t.cluster == cluster] or [TILES[0]._replace(cluster=cluster)]
    steps = math.ceil(k / STEP)
    cuts = [splits] if splits else range(1, min(MOST_SPLITS, steps) + 1)
    ways = [(cycles(m, n, k, t, cut, multiprocessors), t.rows * t.columns, cut, t) for t in tiles for cut in cuts]
    *_, splits, chosen = min(ways, key=lambda way: way[:3])
    rows, columns, consumers, cluster, _ = chosen
    if stages is None:
        stages = max(s for s in range(1, MOST_STAGES + 1) if shared_bytes(rows, columns, consumers, s) <= room)
    units = tiles_of(m, n, chosen) * splits
    blocks = min(units, room_for(cluster, multiprocessors))
    return Plan(rows, columns, consumers, stages, group or BAND // cluster[0], cluster, splits, units, blocks)


def shared_bytes(rows, columns, consumers, stages):
    used = stages * (rows + columns) * 128 + consumers * BUFFERS * BOX + 16 * stages
    return -(-used // 1024) * 1024


def tiles_of(m, n, tile):
    """How many tiles there are; a cluster has all of its own, be they outside of y."""
    down, across = tile.cluster
    return math.ceil(m / (tile.rows * down)) * math.ceil(n / (tile.columns * across)) * down * across


def room_for(cluster, multiprocessors):
    """How many blocks run at a time, one on a multiprocessor. A cluster lies in one of the card's parts. An H200 with
    132 multiprocessors has room for 66 clusters of two, 30 of four and 15 of eight (cuOccupancyMaxActiveClusters); one
    cluster more would wait for all others to end."""
    blocks = math.prod(cluster)
    room = multiprocessors if blocks <= 2 else max(blocks, multiprocessors * 120 // 132)
    return room // blocks * blocks


def cycles(m, n, k, tile, splits, multiprocessors):
    """What the rule expects of a launch, in cycles of a multiprocessor."""
    units = tiles_of(m, n, tile) * splits
    room = room_for(tile.cluster, multiprocessors)
    rounds, busy = math.ceil(units / room), min(units, room)
    steps = math.ceil(math.ceil(k / STEP) / splits)
    products = tile.rows * tile.columns * STEP / PRODUCTS / tile.speed
    from_l2, from_memory = (min(ALONE, rate * multiprocessors / busy) for rate in (FROM_L2, FROM_MEMORY))
    copies = 2 * STEP * (tile.rows / tile.cluster[1] + tile.columns / tile.cluster[0]) / from_l2
    inside = math.ceil(m / tile.rows) * math.ceil(n / tile.columns) * splits  # units that have a part of y
    once = rounds * 2 * k * (m + n) / inside / from_memory  # all of x and W, by those that are at work
    merge = MERGE + 8 * splits * m * n / multiprocessors / FROM_MEMORY if splits > 1 else 0
    begin = LAUNCH + (PAIRED if math.prod(tile.cluster) > 1 else 0)
    return begin + max(rounds * (steps * max(products, copies) + FIXED), once) + merge
