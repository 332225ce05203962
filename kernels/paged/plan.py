"""How decode.cu and merge.cu over pages are launched.

Warps, tiles and rings are those of kernels.attention.plan for a batch with lengths of its own; how long requests are is
not known beforehand, so that the plan holds while they change: they are taken to fill the pool. A share for each
multiprocessor, and a merge that is good for one long request beside many short ones.
"""

import functools
from typing import NamedTuple

from kernels.attention import plan as contiguous
from kernels.attention.plan import MERGE_THREADS, card
from kernels.attention.plan import options as _options

LEAST_CHUNK, MOST_CHUNKS = 8, 128  # of requests.cuh: tiles of a chunk, chunks of a row
DEPTH = 6  # segments that a thread of merge.cu loads at once
WIDTH = 512  # numbers of the rows that a block of merge.cu takes together, at most: four teams of 128 threads
MOST_ROWS = 64  # rows of a kv head that decode.cu takes at once, new tokens times heads of a group
USUAL = 16, 4096  # requests and tokens that an invariant plan is made for, whatever comes


class Plan(NamedTuple):
    """The constants that the two kernels are compiled with, and the sizes of their launches."""

    shape: tuple  # head_dim, rows of a kv head: see Shape in ../attention/shape.cuh
    schedule: tuple  # warps, tokens of a tile, head tiles of a block, lengths, whole: see Schedule
    warps: int
    stages: int
    rows: int  # of a request: its head tiles, so many of a block at a time
    shares: int  # blocks of decode.cu
    shared: int  # bytes
    threads: int  # of merge.cu
    together: int  # rows of a kv head that one of its blocks takes
    floats: int  # that all segments may need of scratch memory: sums and their two numbers
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(n_requests, n_rows, n_kv_heads, head_dim, n_pages, page_size, max_pages, processors, room, pdl=False,
         invariant=False, *, threads=None, **chosen):  # fmt: skip
    """The plan for n_rows rows of each kv head. What is given by name is taken as it is, for measurements: threads, and
    what kernels.attention.plan.plan takes."""
    max_len = max_pages * page_size
    usual = min(max_len, max(1, n_pages * page_size // n_requests))
    requests, tokens, early = (*USUAL, False) if invariant else (n_requests, usual, pdl)
    p = contiguous.plan(
        requests, n_rows * n_kv_heads, n_kv_heads, head_dim, tokens, processors, room, early, True, **chosen
    )
    warps, tile, side = p.schedule[:3]
    head_tiles = -(-n_rows // contiguous.HEAD_TILE)
    heads, most_tiles = -(-n_rows // head_tiles), -(-max_len // tile)
    shares = min(chosen.get("shares") or processors, n_requests * p.rows * most_tiles)

    even = heads * head_tiles == n_rows  # all head tiles of a kv head have as many rows
    together = max(n for n in range(1, heads + 1) if n == 1 or even and heads % n == 0 and n * head_dim <= WIDTH)
    if not invariant and p.together == 1:  # few blocks: as many as there are rows
        together = 1
    columns = together * head_dim // 4
    most_segments = MOST_CHUNKS if invariant else -(-shares // p.rows) + 1  # of a row
    teams = min(-(-most_segments // DEPTH), max(1, MERGE_THREADS // columns))
    chunks = -(-most_tiles // LEAST_CHUNK)
    segments = n_requests * p.rows * min(chunks, MOST_CHUNKS) if invariant else shares + n_requests * p.rows
    sums_at = segments * side * heads * head_dim
    return Plan(
        p.shape, p.schedule, warps, p.stages, p.rows, shares, p.shared, threads or -(-columns * teams // 32) * 32,
        together, sums_at + 2 * segments * side * heads, sums_at,
    )  # fmt: skip


def options(dtype, p, page_size, new, invariant):
    """What both kernels are compiled with."""
    pages = f"-DPAGES=Pages<{page_size}, {new}, {'true' if invariant else 'false'}>"
    return *_options(dtype, p.shape, p.schedule), pages


__all__ = ["MOST_ROWS", "Plan", "card", "options", "plan"]
