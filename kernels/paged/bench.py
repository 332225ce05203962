"""Measure chapter 10 on a GPU: attention over the pages of many requests, 32 query heads, 8 KV heads, head_dim 128.

Batches of equal lengths, of few long requests beside many short ones, and of lengths between two. Pages of 16 tokens
lie in the pool in random order. Beside each our own decode over a contiguous cache with kv_lens, which is what pages
must not cost more than, and FlashInfer in all its ways (peers.py). Every call finds its pages cold. What a way costs on
the processor, its plan and its run, is a table of its own.
"""

import copy
import functools
import math

import numpy as np
import torch

from kernels import attention, paged, running
from kernels.benching import Row, empty, ladder_of, our_row, peer_rows, reading
from kernels.paged import append_bench, decoding, peers
from kernels.paged.bench_problems import HEAD_DIM, N_HEADS, N_KV_HEADS, PAGE, gathered, live_in, truth
from lab import as_called, cuda_timing
from lab.table import Table

DEVICE = "cuda"
CELLS = {  # lengths of the requests
    "16 × 4K": [4096] * 16,
    "64 × 4K": [4096] * 64,
    "1 × 128K and 63 × 1K": [131072] + [1024] * 63,
    "64 of 64K/i": [65536 // i for i in range(1, 65)],
    "64 of 512 to 1024": np.random.default_rng(64).integers(512, 1025, 64).tolist(),
}
PAGES = "64 × 4K"  # the cell that is also measured with pages of other sizes
PAGE_SIZES = (1, 4, 16, 64)
TOLERANCE = 4e-3  # ‖out − ref‖ / ‖ref‖
SOURCES = decoding.SOURCES


def ladders(seconds=0.1):
    """Check, then time, every cell. Returns the Ladders."""
    cuda_timing.expect_gpu("the ladders of paged attention")
    found = [_cell(cell, seconds) for cell in CELLS if running.wants(title_of(cell))]
    found += [_sizes(seconds)] if running.wants(sizes_title()) else []
    from kernels.paged import code_bench  # which stands on this module

    return found + append_bench.ladders(seconds) + code_bench.ladders(seconds)


def further(roof, versions):
    """What a step costs the processor, and the trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("paged", roof, versions)


def title_of(cell):
    return f"paged decode bf16, {cell}"


def _cell(cell, seconds):
    empty()
    caches, requests, q, facts = problem(CELLS[cell])
    rows = paged_rows(caches, requests, q, facts)
    rows += contiguous_rows(caches[0], requests, q, facts)
    rows += gathered_rows(caches, requests, q, facts) if cell == PAGES else []
    families = peers.sixteen_bit(q, caches, requests)
    rows += peer_rows(families, 2 * torch.finfo(q.dtype).eps, ladder=title_of(cell), **facts)
    rows.append(reading([cache.home for cache in caches], facts["bytes"], facts["flops"]))
    return ladder_of(title_of(cell), rows, seconds)


def sizes_title():
    return f"paged decode bf16, {PAGES}, by the tokens of a page"


def _sizes(seconds):
    """The best rung by the size of a page."""
    rows = []
    empty()
    for size in PAGE_SIZES:
        caches, requests, q, facts = problem(CELLS[PAGES], size)
        rows += paged_rows(caches, requests, q, facts, f"pages of {size}", ways=[{"pdl": True}])
    rows.append(contiguous_rows(caches[0], requests, q, facts)[-1])
    return ladder_of(sizes_title(), rows, seconds)


def problem(lens, page_size=PAGE, dtype=torch.bfloat16, n_heads=N_HEADS, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM):
    """Requests of these lengths in a pool that they fill, their pages in random order, and NaN behind each.

    Returns (caches, the same but for their place in memory, with 1 GB or more in all; requests; q; {"wanted", "bytes",
    "flops"}).
    """
    n_pages = sum(-(-n // page_size) for n in lens)
    cache = paged.PagedCache(
        n_pages, page_size, n_kv_heads, head_dim, dtype=dtype, device=DEVICE, max_requests=len(lens), max_len=max(lens)
    )
    np.random.default_rng(10).shuffle(cache.pool.free_pages)
    requests = [cache.new() for _ in lens]
    for request, tokens in zip(requests, lens):
        cache.reserve([request], tokens)
    live_in(cache, torch.randn(2, *cache.k_pages.shape, device=DEVICE, dtype=dtype))
    for slot, tokens in enumerate(lens):
        if tokens % page_size:
            last = cache.pool.pages[slot][-1]
            cache.k_pages[last, :, tokens % page_size :] = torch.nan
            cache.v_pages[last, :, tokens % page_size :] = torch.nan
    q = torch.randn(len(lens), n_heads, head_dim, device=DEVICE).to(dtype)
    moved = 2 * (2 * sum(lens) * n_kv_heads * head_dim + 2 * q.numel())
    facts = {"wanted": truth(q, cache), "bytes": moved, "flops": 4 * sum(lens) * n_heads * head_dim}
    return copies(cache), requests, q, facts


def copies(cache):
    """A cache and copies of it, one for each call, with tables and lengths in common."""
    return [cache, *(live_in(copy.copy(cache), home) for home in cuda_timing.cold_copies(cache.home)[1:])]


WAYS = {"decode": {}, "decode, PDL": {"pdl": True}, "decode, invariant, PDL": {"pdl": True, "invariant": True}}


def paged_rows(caches, requests, q, facts, title=None, ways=None):
    """Our decode over pages, in several ways."""
    slots, rows = caches[0].slots(requests), []
    for name, how in WAYS.items() if ways is None else ((title, how) for how in ways):
        function = functools.partial(_run, how)
        rows.append(our_row(
            name, function, [(q, cache, slots) for cache in caches], q, verdict=None, sources=SOURCES,
            tolerance=TOLERANCE, **facts,
        ))  # fmt: skip
    return rows


def _run(how, q, cache, slots, *, out):
    return paged.decode(q, cache, slots, out=out, **how)


def contiguous_rows(cache, requests, q, facts):
    """Our decode over a contiguous cache with kv_lens, plain and under programmatic dependent launch: one copy where
    most of its memory is behind the lengths, and no row where the card has no room for it."""
    lens, longest = cache.lengths(requests), max(cache.lengths(requests))
    shape = len(lens), longest, *cache.k_pages.shape[1::2]
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 4 * math.prod(shape) > 0.95 * free:
        print(f"contiguous caches of {4 * math.prod(shape) / 1e9:.0f} GB do not fit: their rows are left out")
        return []
    k, v = (torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    for b, tokens in enumerate(lens):
        k[b, :tokens], v[b, :tokens] = gathered(cache.k_pages, cache, b), gathered(cache.v_pages, cache, b)
    kv_lens, rows = torch.tensor(lens, dtype=torch.int32, device=q.device), []
    used = 4 * sum(lens) * math.prod(shape[2:])
    inputs = [(q, k, v)]
    for _ in range(math.ceil(cuda_timing.COLD / used) - 1 if used > 0.5 * 4 * math.prod(shape) else 0):
        inputs.append((q, k.clone(), v.clone()))
    for name, pdl in (("contiguous, kv_lens", False), ("contiguous, kv_lens, PDL", True)):
        function = functools.partial(attention.decode, kv_lens=kv_lens, pdl=pdl)
        rows.append(our_row(
            name, function, inputs, q, verdict=None, sources=("kernels/attention/decode.cu",
            "kernels/attention/merge.cu", "kernels/attention/plan.py"), tolerance=TOLERANCE, **facts,
        ))  # fmt: skip
    return rows


def gathered_rows(caches, requests, q, facts):
    """What comes to mind first, for requests of one length, whole pages: bring all into one piece, and decode that."""
    slots, tokens = caches[0].slots(requests), caches[0].lengths(requests)[0]
    row = our_row(
        "gathered into one piece, then decode", functools.partial(_gather_and_decode, tokens),
        [(q, cache, slots) for cache in caches], q, verdict=None, sources=("kernels/attention/decode.cu",
        "kernels/attention/merge.cu", "kernels/attention/plan.py"), tolerance=TOLERANCE, **facts,
    )  # fmt: skip
    return [row]


def _gather_and_decode(tokens, q, cache, slots, *, out):
    pages = cache.table[slots.long(), : tokens // cache.page_size].long()
    whole = (  # picked: (n_requests, pages, n_kv_heads, page_size, head_dim); then once more, tokens before heads
        of[pages].transpose(2, 3).reshape(len(q), tokens, of.shape[1], of.shape[3])
        for of in (cache.k_pages, cache.v_pages)
    )
    return attention.decode(q, *whole, out=out)


def host_table(cell):
    """µs of the processor for a step as it is called: FlashInfer's plan and run, and ours, which has no plan."""
    empty()
    caches, requests, q, _ = problem(CELLS[cell])
    slots, out = caches[0].slots(requests), torch.empty_like(q)
    calls = {
        "ours, slots": lambda: paged.decode(q, caches[0], slots, out=out, pdl=True),
        "ours, a list of requests": lambda: paged.decode(q, caches[0], requests, out=out, pdl=True),
    }
    calls |= peers.steps(q, caches[0], requests)
    taken = as_called.host(calls)
    rows = {name: {"µs of the processor": round(1e6 * timing.median, 1)} for name, timing in taken.items()}
    return Table(f"a step as it is called, {cell}", rows, (*SOURCES, "kernels/paged/decoding.py"))


__all__ = ["Row", "further", "host_table", "ladders"]
