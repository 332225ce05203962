"""What chapter 10 tries beside its ladders (`python -m kernels.trials paged`).

Other warps, head tiles side by side and stages of a ring than the plan's; the line's merge with other numbers of
threads; and what a step costs the processor. Checked and timed as kernels.paged.bench does it.

    python -m kernels.paged.trials [WORD ...]    in little time, printed and not stored: cells, or ways, by a word
    python -m kernels.paged.trials variants      what variants cost
"""

import functools
import sys
from unittest import mock

import numpy as np
import torch

from kernels import paged
from kernels.benching import ahead, empty, ladder_of
from kernels.paged import bench, decoding, variants
from lab import cuda, cuda_timing
from lab.source import inlined

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
    FOUR | {"stages": 3, "beside": True, "shares": 264},
    FOUR | {"tile": 32, "stages": 2, "beside": True},
    {"warps": 4, "side": 2},
]
FIRST = "    // 1. which tiles\n"
CHANGES = {  # of decode.cu's text: all lengths are asked for while slots are on their way, so that L1 has them then
    "lengths ahead, by prefetch": (
        (
            FIRST,
            FIRST
            + '    if (32 * lane < max_requests) asm volatile("prefetch.global.L1 [%0];" ::"l"(lens + 32 * lane));',
        ),
    ),
    "lengths ahead, by a load": (
        (FIRST, FIRST + "    const int ahead = __ldg(lens + min(32 * lane, max_requests - 1));"),
        ("    // 2. fill the ring", "    if (ahead == -7 && n_requests < 0) __trap();\n    // 2. fill the ring"),
    ),
}


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


def changed_row(what, caches, requests, q, facts):
    """A row of the best rung with another text of decode.cu."""
    (row,), slots = bench.paged_rows(caches, requests, q, facts, what, [{}]), caches[0].slots(requests)
    row.calls = [
        functools.partial(launch_changed, what, q, cache, slots, out)
        for cache, out in zip(caches, row.outs, strict=True)
    ]
    return row


def launch_changed(what, q, cache, slots, out):
    usual = decoding._kernels
    with mock.patch.object(decoding, "_kernels", functools.partial(changed_kernels, what, usual)):
        decoding._prepared.cache_clear()
        launch({}, q, cache, slots, out)
    decoding._prepared.cache_clear()
    return out


@functools.cache
def changed_kernels(what, usual, options, stages, *rest):
    text = inlined("kernels/paged/decode.cu")
    for old, new in CHANGES[what]:
        if text.count(old) != 1:
            raise RuntimeError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    return cuda.compile(text, (*options, f"-DRING_STAGES={stages}")).decode, usual(options, stages, *rest)[1]


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
        rows += [changed_row(what, caches, requests, q, facts) for what in CHANGES]
        rows += bench.contiguous_rows(caches[0], requests, q, facts)
        rows = [row for row in rows if not only or any(word in row.title for word in only)]
        ahead(row.calls[0] for row in rows if row.title not in CHANGES)  # these change what others find
        print(f"{cell}: {facts['bytes'] / 1e6:.0f} MB", flush=True)
        for row in rows:
            error = max(float((call().double() - row.wanted).norm() / row.wanted.norm()) for call in row.calls)
            if not error <= row.tolerance:
                print(f"    {row.title:<40} IS WRONG: relative error {error:.2g}", flush=True)
                continue
            graph = cuda_timing.Graph(row.calls)
            best = min(float(np.median(graph.turn())) for _ in range(3))
            print(f"    {row.title:<40} {1e6 * best:8.2f} µs   {facts['bytes'] / best / 1e12:5.2f} TB/s", flush=True)


VARIED = "64 × 4K"
TAKEN_AS_VARIANT = {  # and what half of the tokens costs, by a window
    "soft cap": lambda q: variants.soft_cap(30.0),
    "ALiBi": lambda q: variants.alibi(2.0 ** -torch.linspace(1, 8, q.shape[1], device=q.device)),
    "custom mask": lambda q: variants.custom_mask(torch.rand(len(q), 4096, device=q.device) < 0.9),
    "RoPE": lambda q: variants.rope(10_000.0, q.shape[2], q.device),
    "sliding window of 2048": lambda q: variants.sliding_window(2048),
}


def varied():
    """Print what each variant costs; whether it is right, tests/test_paged_variants_gpu.py says."""
    empty()
    caches, requests, q, _ = bench.problem(bench.CELLS[VARIED])
    slots, out = caches[0].slots(requests), torch.empty_like(q)
    for name, make in {"none": lambda q: None, **TAKEN_AS_VARIANT}.items():
        calls = [
            functools.partial(paged.decode, q, cache, slots, out=out, pdl=True, variant=made)
            for made in [make(q)]
            for cache in caches
        ]
        calls[0]()
        graph = cuda_timing.Graph(calls)
        best = min(float(np.median(graph.turn())) for _ in range(3))
        print(f"{VARIED}, variant: {name:<30} {1e6 * best:8.2f} µs", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        varied() if sys.argv[1:] == ["variants"] else quick(sys.argv[1:])
