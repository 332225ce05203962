"""How planned.cu is launched: the tile, the ring, the order of tiles, and where they are cut along k.

A rule of cycles. A step along k of a tile takes what its products take on tensor cores, or what its bytes take from L2
or, where a matrix is read once, from memory, if that is more; a unit of work takes its steps and what nothing overlaps
with, its last stores and first copies; and all multiprocessors wait for the one that has most units. The fastest of all
tiles and cuts is taken.
"""

import functools
import math
from typing import NamedTuple

STEP = 64  # numbers of k in a stage
PRODUCTS = 2048  # multiply-adds of a multiprocessor's tensor cores in a cycle
FROM_L2, FROM_MEMORY = 56, 20  # bytes that reach a multiprocessor in a cycle, where all of them ask
FIXED = 1500  # cycles of a unit that no others overlap with
LAUNCH = 4000  # of merge.cu, cycles
BOX, BUFFERS = 64 * 128, 2  # bytes of a box of y on its way out; a consumer's
MOST_SPLITS = 16


class Tile(NamedTuple):
    """A shape of tiles that planned.cu is compiled for."""

    rows: int
    columns: int
    consumers: int
    speed: float  # share of the tensor cores' rate that its products reach


TILES = (Tile(128, 256, 2, 0.95), Tile(128, 128, 2, 0.85), Tile(64, 256, 2, 0.80), Tile(64, 128, 2, 0.65))


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


def shared_bytes(rows, columns, consumers, stages):
    used = stages * (rows + columns) * 128 + consumers * BUFFERS * BOX + 16 * stages
    return -(-used // 1024) * 1024


@functools.lru_cache(maxsize=1024)
def plan(m, n, k, multiprocessors, room, *, tile=None, stages=None, group=None, cluster=None, splits=None):
    """The Plan for y (m, n) = x (m, k) W (n, k)^T. What is given by name is taken as it is.

    multiprocessors  of the card
    room             bytes of shared memory that a block may have
    tile             a Tile, or the first numbers of one
    """
    tiles = TILES if tile is None else (Tile(*tile, *TILES[0][len(tile) :]),)
    cuts = range(1, MOST_SPLITS + 1) if splits is None else (splits,)
    steps = math.ceil(k / STEP)
    found = [(cycles(m, n, k, t, cut, cluster or 1, multiprocessors), cut, t) for t in tiles for cut in cuts
             if cut <= steps]  # fmt: skip
    _, splits, tile = min(found, key=lambda item: item[:2])
    rows, columns, consumers = tile[:3]
    if stages is None:
        stages = max(s for s in range(1, 9) if shared_bytes(rows, columns, consumers, s) <= room)
    cluster = cluster or 1
    units = math.ceil(m / (rows * cluster)) * math.ceil(n / columns) * splits * cluster
    blocks = min(units, multiprocessors // cluster * cluster)
    return Plan(rows, columns, consumers, stages, group or GROUP // cluster, cluster, splits, units, blocks)


GROUP = 16  # rows of tiles in a band


def cycles(m, n, k, tile, splits, cluster, multiprocessors):
    """What the rule expects of a launch, in cycles of a multiprocessor."""
    row_tiles, column_tiles = math.ceil(m / (tile.rows * cluster)) * cluster, math.ceil(n / tile.columns)
    units = row_tiles * column_tiles * splits
    rounds = math.ceil(units / multiprocessors)
    steps = math.ceil(math.ceil(k / STEP) / splits)
    products = tile.rows * tile.columns * STEP / PRODUCTS / tile.speed
    copies = 2 * STEP * (tile.rows + tile.columns / cluster) / FROM_L2
    once = 2 * k * (m + n) / multiprocessors / FROM_MEMORY  # all of x and W, by all multiprocessors
    merge = LAUNCH + 8 * splits * m * n / multiprocessors / FROM_MEMORY if splits > 1 else 0
    return max(rounds * (steps * max(products, copies) + FIXED), once) + merge
