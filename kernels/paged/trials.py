"""What chapter 10 tries beside its ladders (`python -m kernels.trials paged`).

Other warps, head tiles side by side and stages of a ring than the plan's; the line's merge with other numbers of
threads; and what a step costs the processor. Checked and timed as kernels.paged.bench does it.

    python -m kernels.paged.trials [WORD ...]    in little time, printed and not stored: cells, or ways, by a word
"""

import functools
import sys

import numpy as np
import torch

from kernels.benching import ahead, empty, ladder_of
from kernels.paged import bench, decoding
from lab import cuda_timing

EIGHT, FOUR = {"warps": 8, "side": 8}, {"warps": 4, "side": 4}
CHOICES = [  # what `plan` takes by name
    {},
    {"merge_blocks": 264},
    {"merge_blocks": 132},
    {"threads": 64},
    {"threads": 256},
    EIGHT,
    EIGHT | {"merge_blocks": 264},
    FOUR,
    FOUR | {"tile": 32},
    FOUR | {"stages": 3, "beside": True},
    FOUR | {"stages": 2, "beside": True},
    FOUR | {"tile": 32, "stages": 2, "beside": True},
    {"warps": 4, "side": 2},
]


def ladders(seconds=0.1):
    """Every choice in every cell, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of paged attention")
    found = []
    for cell in bench.CELLS:
        empty()
        caches, requests, q, facts = bench.problem(bench.CELLS[cell])
        rows = [row for choice in CHOICES for row in rows_of(choice, caches, requests, q, facts)]
        found.append(ladder_of(f"trial: {bench.title_of(cell)}", rows, seconds))
    return found


def tables():
    """What a step costs the processor."""
    return [bench.host_table(bench.PAGES)]


def rows_of(choice, caches, requests, q, facts):
    """A row of the best rung with another plan."""
    rows = bench.paged_rows(
        caches, requests, q, facts, ", ".join(f"{k} {v}" for k, v in choice.items()) or "plan", [{}]
    )
    for row, slots in zip(rows, [caches[0].slots(requests)]):
        row.calls = [
            functools.partial(launch, choice, q, cache, slots, out) for cache, out in zip(caches, row.outs, strict=True)
        ]
    return rows


def launch(choice, q, cache, slots, out):
    """decode under programmatic dependent launch with a plan of our choice."""
    pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
    decoding.launch(q, *pool, slots, q.shape[-1] ** -0.5, out, 1, True, False, chosen=choice)
    return out


def quick(words):
    """Print µs in a graph, for each cell whose title holds one of these words: of our ways over pages and over
    contiguous caches, and of other plans; with words that are none of a title, only of ways that hold one of them."""
    chosen = [cell for cell in bench.CELLS if any(word in cell for word in words)]
    only = [word for word in words if not any(word in cell for cell in bench.CELLS)]
    for cell in chosen or bench.CELLS:
        empty()
        caches, requests, q, facts = bench.problem(bench.CELLS[cell])
        rows = bench.paged_rows(caches, requests, q, facts)
        rows += [row for choice in CHOICES[1:] for row in rows_of(choice, caches, requests, q, facts)]
        rows += bench.contiguous_rows(caches[0], requests, q, facts)
        rows = [row for row in rows if not only or any(word in row.title for word in only)]
        ahead(row.calls[0] for row in rows)
        print(f"{cell}: {facts['bytes'] / 1e6:.0f} MB", flush=True)
        for row in rows:
            error = max(float((call().double() - row.wanted).norm() / row.wanted.norm()) for call in row.calls)
            if not error <= row.tolerance:
                print(f"    {row.title:<40} IS WRONG: relative error {error:.2g}", flush=True)
                continue
            graph = cuda_timing.Graph(row.calls)
            best = min(float(np.median(graph.turn())) for _ in range(3))
            print(f"    {row.title:<40} {1e6 * best:8.2f} µs   {facts['bytes'] / best / 1e12:5.2f} TB/s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        quick(sys.argv[1:])
