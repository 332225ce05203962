"""Who reads what: ways to deal the tiles of many caches to the blocks of a card, and how long each way takes.

tiles     whole numbers, one for each request: tiles (of 16 tokens, say) of its cache; 0: it has no tokens
heads     kv heads: a request has a row of its tiles for each of them
blocks    how many share the work
plan      [Work(block, request, head, first, tiles), ...]: a block walks its works in the plan's order

A row that is cut gives a partial result for each of its works, and these are merged by (out, lse): ref.attention.merge.

    whole_rows       each row to the block that is free first, uncut: the longest row decides
    longest_first    FlashInfer's scheduler (Zihao Ye and others, MLSys 2025, arXiv 2501.01005, algorithm 1)
    equal_line       this course's kernels: all tiles are a line, and each block has an equal share of it
"""

import heapq
from typing import NamedTuple

import numpy as np


class Work(NamedTuple):
    """A run of tiles of one row, for one block."""

    block: int
    request: int
    head: int
    first: int
    tiles: int


class Costs(NamedTuple):
    """What a block's time goes to, in µs: a tile; to begin a work; a partial result that is merged."""

    tile: float
    start: float
    merge: float


# A tile of 16 tokens of a kv head of 128 numbers in 16 bits, on an H200, where each of 132 blocks has its part of 4.68
# TB/s, whoever else reads. The other two are round numbers.
H200 = Costs(tile=0.23, start=1.0, merge=0.1)


def whole_rows(tiles, heads, blocks):
    """A row is never cut. In order, each goes to the block that is free first."""
    tiles = _arguments(tiles, heads, blocks)
    rows = [Work(0, request, head, 0, many) for request, head, many in _rows(tiles, heads)]
    return _to_the_least_loaded(rows, blocks)


def longest_first(tiles, heads, blocks, limit=None, start=2):
    """FlashInfer's scheduler: works of bounded cost, the longest first, each to the least loaded block.

    1. limit    the most tiles of a work: a block's fair part of all, rounded up, unless given (see `least_limit`)
    2. cut      each row into works of `limit` tiles, and one of what is left
    3. sort     the longest first; equal ones stay in order
    4. deal     each to the block with the least cost so far, the first of equal ones: a heap. A work costs its tiles
                and `start` more (FlashInfer: two tokens for each row of its 16 queries)
    """
    tiles = _arguments(tiles, heads, blocks)
    if limit is None:
        limit = max(1, -(-sum(tiles) * heads // blocks))  # 1
    _expect_count("limit", limit)
    works = []
    for request, head, many in _rows(tiles, heads):  # 2
        works += [Work(0, request, head, first, min(limit, many - first)) for first in range(0, many, limit)]
    works.sort(key=lambda work: -work.tiles)  # 3
    return _to_the_least_loaded(works, blocks, start)  # 4


def least_limit(tiles, heads, most):
    """The smallest limit with which `longest_first` makes at most so many works: a buffer of partial results has an
    end, and a CUDA graph cannot make it larger. By bisection: a larger limit never makes more works.

    ValueError where even whole rows are more than `most`.
    """
    tiles = _arguments(tiles, heads, 1)
    _expect_count("most", most)

    def works(limit):
        return heads * sum(-(-many // limit) for many in tiles)

    low, high = 1, max([1, *tiles])
    if works(high) > most:
        raise ValueError(f"most must be at least {works(high)}, the rows that have tiles, got {most}")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) <= most else (middle + 1, high)
    return low


def equal_line(tiles, heads, blocks):
    """All rows, one behind the other, are a line of tiles that is cut into equal shares: kernels/attention/tiles.cuh.

    1. share    total // blocks tiles for each block, and one more for the first total % blocks
    2. segment  where a share and a row meet: a work

    A block can find its share alone, from the lengths, so nothing is planned before the launch.
    """
    tiles = _arguments(tiles, heads, blocks)
    each, more = divmod(sum(tiles) * heads, blocks)
    ends = [share * each + min(share, more) for share in range(1, blocks + 1)]  # 1
    plan, block, at = [], 0, 0
    for request, head, many in _rows(tiles, heads):
        first = 0
        while first < many:
            while at == ends[block]:
                block += 1
            run = min(many - first, ends[block] - at)  # 2
            plan.append(Work(block, request, head, first, run))
            first, at = first + run, at + run
    return plan


PLANNERS = {"a block for each row": whole_rows, "longest first": longest_first, "equal line": equal_line}


def expect_each_once(plan, tiles, heads, blocks):
    """ValueError, which names the first fault, unless every tile of every row is in exactly one work of a block that
    is there."""
    tiles = _arguments(tiles, heads, blocks)
    seen = [np.zeros((heads, many), np.int64) for many in tiles]
    for work in plan:
        if not 0 <= work.block < blocks:
            raise ValueError(f"plan: there are {blocks} blocks, got {work}")
        if not (0 <= work.request < len(tiles) and 0 <= work.head < heads):
            raise ValueError(f"plan: there are {len(tiles)} requests of {heads} heads, got {work}")
        if work.tiles < 1 or work.first < 0 or work.first + work.tiles > tiles[work.request]:
            raise ValueError(f"plan: request {work.request} has {tiles[work.request]} tiles, got {work}")
        seen[work.request][work.head, work.first : work.first + work.tiles] += 1
    for request, counts in enumerate(seen):
        for head, tile in np.argwhere(counts != 1)[:1]:
            times = counts[head, tile]
            raise ValueError(f"plan: tile {tile} of request {request}, head {head}, is read {times} times, not once")


def merge_map(plan):
    """{(request, head): [number in the plan, ...]} of the rows with several works, in the order of their tokens. It
    follows from the plan alone, so the sum of a merge has the same order in each run."""
    rows = {}
    for number in sorted(range(len(plan)), key=lambda n: plan[n][1:]):
        rows.setdefault((plan[number].request, plan[number].head), []).append(number)
    return {row: numbers for row, numbers in rows.items() if len(numbers) > 1}


def loads(plan, blocks, costs=H200):
    """When each block is done reading, in µs: (blocks,)."""
    found = np.zeros(blocks)
    for work in plan:
        found[work.block] += costs.start + work.tiles * costs.tile
    return found


def makespan(plan, blocks, costs=H200):
    """When the last block is done, in µs: reading, then merging. Rows are merged side by side, the parts of one row
    one after another: each row goes to the block that is free first."""
    merging = [0.0] * blocks
    for numbers in merge_map(plan).values():
        heapq.heapreplace(merging, merging[0] + costs.merge * len(numbers))
    return float(loads(plan, blocks, costs).max(initial=0) + max(merging))


def traces(seed=64, tile=16):
    """{name: tiles of each request}: the batches on which the plans are compared.

    Equal lengths; one long request among short ones; lengths by Zipf's law (the i-th longest has an i-th of the
    longest); lengths from 512 to 1024 tokens, drawn. The names are those of kernels/paged/bench.py.
    """
    lens = {
        "16 × 4K": [4096] * 16,
        "64 × 4K": [4096] * 64,
        "1 × 128K and 63 × 1K": [131072] + [1024] * 63,
        "64 of 64K/i": [65536 // i for i in range(1, 65)],
        "64 of 512 to 1024": np.random.default_rng(seed).integers(512, 1025, 64).tolist(),
    }
    return {name: [-(-n // tile) for n in of] for name, of in lens.items()}


def _rows(tiles, heads):
    """(request, head, tiles) of every row that has some."""
    return [(request, head, many) for request, many in enumerate(tiles) for head in range(heads) if many]


def _to_the_least_loaded(works, blocks, start=0):
    """The works in order, each to the block that costs least so far, the first of equal ones: tiles, and `start` for
    each work."""
    heap, plan = [(0, block) for block in range(blocks)], []
    for work in works:
        load, block = heap[0]
        heapq.heapreplace(heap, (load + work.tiles + start, block))
        plan.append(work._replace(block=block))
    return plan


def _arguments(tiles, heads, blocks):
    """tiles as a list of numbers, or ValueError."""
    _expect_count("heads", heads)
    _expect_count("blocks", blocks)
    found = np.asarray(tiles if len(tiles) else np.zeros(0, np.int64))
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found < 0).any():
        raise ValueError(f"tiles must be whole numbers of at least 0, one for each request, got {tiles!r}")
    return found.tolist()


def _expect_count(name, value):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
