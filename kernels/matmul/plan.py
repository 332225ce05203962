"""How planned.cu is launched: the tile, the ring, the order of tiles, and where they are cut along k.

A rule of cycles. A step along k of a tile takes what its products take on tensor cores, or what its bytes take from L2
or, where a matrix is read once, from memory, if that is more. A unit of work takes its steps and what nothing overlaps
with, its last stores and first copies; and all multiprocessors wait for the one that has most units. The fastest of all
tiles and cuts is taken. The shares in TILES and the cycles below are estimates, to be set by what `sweep` measures.
"""

import functools
import math
from typing import NamedTuple

STEP = 64  # numbers of k in a stage
PRODUCTS = 2048  # multiply-adds of a multiprocessor's tensor cores in a cycle
FROM_L2, FROM_MEMORY = 56, 20  # bytes that reach a multiprocessor in a cycle, where all of them ask
FIXED = 1500  # cycles of a unit that no others overlap with
MERGE = 4000  # cycles to launch merge.cu
BOX, BUFFERS = 64 * 128, 2  # bytes of a box of y on its way out; a consumer's
BAND = 16  # rows of tiles in a band
MOST_SPLITS, MOST_STAGES = 16, 8


class Tile(NamedTuple):
    """A shape of tiles that planned.cu is compiled for."""

    rows: int
    columns: int
    consumers: int
    cluster: int  # blocks that share W's rows
    speed: float  # share of the tensor cores' rate that its products reach


TILES = (
    Tile(128, 256, 2, 2, 0.95),
    Tile(128, 256, 2, 1, 0.92),
    Tile(128, 128, 2, 1, 0.85),
    Tile(64, 256, 2, 1, 0.80),
    Tile(64, 128, 2, 1, 0.65),
)


class Plan(NamedTuple):
    """One launch; names as in shape.cuh."""

    rows: int
    columns: int
    consumers: int
    stages: int
    group: int
    cluster: int
    splits: int
    units: int  # tiles, or parts of tiles
    blocks: int

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def shared(self):
        """Bytes of dynamic shared memory: Shared in shape.cuh."""
        return shared_bytes(self.rows, self.columns, self.consumers, self.stages)

    def shape(self, dtype, output):
        """The Shape that planned.cu is compiled with."""
        sizes = self.rows, self.columns, self.consumers, self.stages, self.group, self.cluster
        return f"Shape<{dtype}, {', '.join(map(str, sizes))}, {output}>"


@functools.lru_cache(maxsize=1024)
def plan(m, n, k, multiprocessors, room, *, tile=None, stages=None, group=None, cluster=None, splits=None):
    """The Plan for y (m, n) = x (m, k) W (n, k)^T. What is given by name is taken as it is.

    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    tile             (rows, columns, consumers)
    """
    tiles = [t for t in TILES if t.cluster <= multiprocessors]
    if tile is not None:
        tiles = [Tile(*tile, cluster or 1, 1.0)]
    elif cluster is not None:
        tiles = [t for t in tiles if t.cluster == cluster] or [TILES[0]._replace(cluster=cluster)]
    steps = math.ceil(k / STEP)
    cuts = [splits] if splits else range(1, min(MOST_SPLITS, steps) + 1)
    ways = [(cycles(m, n, k, t, cut, multiprocessors), cut, t) for t in tiles for cut in cuts]
    _, splits, chosen = min(ways, key=lambda way: way[:2])
    rows, columns, consumers, cluster, _ = chosen
    if stages is None:
        stages = max(s for s in range(1, MOST_STAGES + 1) if shared_bytes(rows, columns, consumers, s) <= room)
    units = row_tiles(m, chosen) * math.ceil(n / columns) * splits
    blocks = min(units, multiprocessors // cluster * cluster)
    return Plan(rows, columns, consumers, stages, group or BAND // cluster, cluster, splits, units, blocks)


def shared_bytes(rows, columns, consumers, stages):
    used = stages * (rows + columns) * 128 + consumers * BUFFERS * BOX + 16 * stages
    return -(-used // 1024) * 1024


def row_tiles(m, tile):
    """Tiles one below the other; a cluster has all of its own, be they outside of y."""
    return math.ceil(m / (tile.rows * tile.cluster)) * tile.cluster


def cycles(m, n, k, tile, splits, multiprocessors):
    """What the rule expects of a launch, in cycles of a multiprocessor."""
    units = row_tiles(m, tile) * math.ceil(n / tile.columns) * splits
    rounds = math.ceil(units / (multiprocessors // tile.cluster * tile.cluster))
    steps = math.ceil(math.ceil(k / STEP) / splits)
    products = tile.rows * tile.columns * STEP / PRODUCTS / tile.speed
    copies = 2 * STEP * (tile.rows + tile.columns / tile.cluster) / FROM_L2
    once = rounds * 2 * k * (m + n) / units / FROM_MEMORY  # all of x and W, by those that are at work
    merge = MERGE + 8 * splits * m * n / multiprocessors / FROM_MEMORY if splits > 1 else 0
    return max(rounds * (steps * max(products, copies) + FIXED), once) + merge
