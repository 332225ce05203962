"""How decode.cu and merge.cu over pages are launched.

Warps, tiles and rings are those of kernels.attention.plan for a batch with lengths of its own; how long requests are is
not known beforehand, so that the plan holds while they change: they are taken to fill the pool. A share for each
multiprocessor, and blocks of a merge that are small enough to wait beside the shares: on an H200, 128 threads instead
of 512 brought 64 requests of 4K tokens from 248 to 242 µs, and 64 short ones from 58 to 50.
"""

import functools
from typing import NamedTuple

from kernels.attention import plan as contiguous
from kernels.attention.plan import card
from kernels.attention.plan import options as _options

LEAST_CHUNK, MOST_CHUNKS = 8, 128  # of requests.cuh: tiles of a chunk, chunks of a row
MERGE_THREADS = 128  # of a block of merge.cu, whose warps take a row each
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
    merge_blocks: int
    floats: int  # that all segments may need of scratch memory: sums and their two numbers
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(n_requests, n_rows, n_kv_heads, head_dim, n_pages, page_size, max_pages, processors, room, pdl=False,
         invariant=False, *, threads=None, merge_blocks=None, beside=False, **chosen):  # fmt: skip
    """The plan for n_rows rows of each kv head. What is given by name is taken as it is, for measurements: threads and
    merge_blocks (at most so many) of merge.cu; beside: no more shared memory than needed, so that two launches' blocks
    may share a multiprocessor; and what kernels.attention.plan.plan takes."""
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

    threads = threads or MERGE_THREADS
    merge_blocks = min(merge_blocks or 1 << 30, -(-n_requests * n_kv_heads * n_rows // (threads // 32)))
    shared = p.shared
    if beside:  # as much as they need, so that the next launch's blocks may be here already
        rings = warps // min(side, head_tiles)
        queries, sums = 2 * warps * heads * (head_dim + 8), 4 * warps * heads * (head_dim + 10)
        shared = p.stages * rings * 4 * tile * head_dim + queries + (sums if side < warps else 0)
    chunks = -(-most_tiles // LEAST_CHUNK)
    segments = n_requests * p.rows * min(chunks, MOST_CHUNKS) if invariant else shares + n_requests * p.rows
    sums_at = segments * side * heads * head_dim
    return Plan(
        p.shape, p.schedule, warps, p.stages, p.rows, shares, shared, threads, merge_blocks,
        sums_at + 2 * segments * side * heads, sums_at,
    )  # fmt: skip


def options(dtype, p, page_size, new, invariant):
    """What both kernels are compiled with."""
    pages = f"-DPAGES=Pages<{page_size}, {new}, {'true' if invariant else 'false'}>"
    return *_options(dtype, p.shape, p.schedule), pages


__all__ = ["MOST_ROWS", "Plan", "card", "options", "plan"]
