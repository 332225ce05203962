"""The second launch, merge.cu, which every rung that leaves partial results may take: how they lie, line.cuh says."""

import functools
from pathlib import Path

import torch

from lab import cuda
from lab.prepared import scratch

HERE = Path(__file__).resolve().parent
DEPTH = 8  # segments that a thread of merge.cu has on their way at once
MOST_TEAMS = 4


def partial_results(q, shares):
    """Scratch memory: (partial_out (segments, n_heads, 512), max_and_sum (segments, n_heads, 2)), as one-dimensional
    float32."""
    rows = (shares + q.shape[0]) * q.shape[1]
    memory = scratch(q, rows * 514, torch.float32)
    return memory, memory[512 * rows :]


def sizes_of(q, cache, table):
    """(kv_len, batch, n_heads, n_pages, max_pages): what kernels are told of the tensors' shapes."""
    if table is None:
        return cache.shape[1], *q.shape[:2], 0, 0
    return table.shape[1] * cache.shape[1], *q.shape[:2], cache.shape[0], table.shape[1]


def merge(shape, partial, sums, kv_lens, out, kv_len, shares, *, teams=None, **options):
    """Launch merge.cu behind a rung that was compiled with this SHAPE and has left its segments of so many shares. It
    starts early, and waits. teams: threads for the same columns, that take every teams-th segment."""
    batch, n_heads, _ = out.shape
    if teams is None:
        segments = -(-shares // batch) + 1  # of a sequence, if all are of one length
        teams = max(1, min(MOST_TEAMS, -(-segments // DEPTH)))
    kernel = _kernel(shape, teams)
    args = partial, sums, kv_lens, out, kv_len, batch, n_heads, shares
    return kernel.unchecked((batch * n_heads,), 128 * teams, *args, pdl=True, **options)


@functools.cache
def _kernel(shape, teams):
    return cuda.load(HERE / "merge.cu", (f"-DSHAPE={shape}", f"-DTEAMS={teams}")).merge
