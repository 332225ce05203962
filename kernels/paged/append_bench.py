"""Measure append.cu on a GPU: new tokens of long requests, and prefixes that requests share. Part of bench.py.

32 query heads, 8 KV heads, head_dim 128, bfloat16, pages of 16 tokens in random order. New tokens are 512, behind
nothing, 4K and 32K tokens; a prefix is of 32K tokens, and each request has 256 to 1024 of its own behind it.
"""

import copy
import functools
import math

import numpy as np
import torch

from kernels import benching, paged, running
from kernels.benching import empty, ladder_of, our_row, peer_rows
from kernels.paged import append_peers, appending, decoding, peers
from kernels.paged.bench_problems import HEAD_DIM, N_HEADS, N_KV_HEADS, PAGE, gathered, live_in, truth
from lab import cuda_timing
from lab.card import multiprocessors
from lab.tensors import DTYPES

DEVICE = "cuda"
DTYPE, NEW, PREFIX = torch.bfloat16, 512, 32768
APPENDS = {"512 on 0": (1, 0), "512 on 4K": (1, 4096), "512 on 32K": (1, 32768), "512 on 8 × 4K": (8, 4096)}
PREFIXES = (16, 64, 128)  # requests
TOLERANCE = 8e-3  # ‖out − ref‖ / ‖ref‖: weights are rounded to bfloat16, as those of all peers
MOST_COPIES = 8  # of a cache: more than enough for none of it to be in L2 when its turn comes again


def ladders(seconds=0.1):
    """Check, then time, every cell. Returns the Ladders."""
    appends = [cell for cell in APPENDS if running.wants(append_title(cell))]
    prefixes = [n for n in PREFIXES if running.wants(prefix_title(n))]
    if appends or prefixes:
        compile_ahead(appends, prefixes)
    return [_append(cell, seconds) for cell in appends] + [_prefix(n, seconds) for n in prefixes]


def append_title(cell):
    return f"paged append bf16, {cell}"


def prefix_title(n):
    return f"paged decode bf16, {n} behind a prefix of {benching.short(PREFIX)}"


def compile_ahead(appends, prefixes):
    """Our kernels and FlashInfer's, on all cores."""
    plans = {("APPEND", APPENDS[cell][0], NEW) for cell in appends}
    plans |= {("SHARED", 2 * n, n) for n in prefixes}  # as many items as there may be are more, which changes nothing
    calls = [functools.partial(_compile, *sizes) for sizes in plans]
    caches, requests, q, _ = append_problem(1, 0, 128)
    for name, modes in append_peers.appends(q, caches, requests, lambda: []):
        calls += modes.values() if name == "FlashInfer" else ()  # to plan is to compile
    benching.ahead(calls)


def _compile(use, n_items, queries):
    group = N_HEADS // N_KV_HEADS
    p = appending.plan(use, n_items, queries, group, N_KV_HEADS, multiprocessors(torch.device(DEVICE)))
    shape = DTYPES[DTYPE], HEAD_DIM, group, PAGE, use, p.rows, p.stages, p.team
    for kernel in appending._kernels(*shape):
        kernel.module.cubin()


def filled(lens, prefix=0):
    """(caches, the same but for their place in memory; requests) whose tokens are random numbers. The first `prefix`
    tokens, whole pages, are on the same pages for all."""
    n_pages = prefix // PAGE + sum(-(-(n - prefix) // PAGE) for n in lens)
    cache = paged.PagedCache(n_pages, PAGE, N_KV_HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE,
                             max_requests=len(lens), max_len=max(lens))  # fmt: skip
    np.random.default_rng(10).shuffle(cache.pool.free_pages)
    requests = [cache.new()]
    if prefix:
        cache.reserve(requests, prefix)
        requests += [cache.fork(requests[0]) for _ in lens[1:]]
    else:
        requests += [cache.new() for _ in lens[1:]]
    for request, tokens in zip(requests, lens):
        cache.reserve([request], tokens - prefix)
    live_in(cache, torch.randn(2, *cache.k_pages.shape, device=DEVICE, dtype=DTYPE))
    count = min(MOST_COPIES, math.ceil(cuda_timing.COLD / cache.home.nbytes))
    return [cache, *(live_in(copy.copy(cache), cache.home.clone()) for _ in range(count - 1))], requests


def append_problem(n, context, new):
    """(caches, requests, q, facts)"""
    caches, requests = filled([context + new] * n)
    q = torch.randn(n, new, N_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    pairs = n * (new * context + new * (new + 1) // 2)
    moved = 2 * (2 * n * (context + new) * N_KV_HEADS * HEAD_DIM + 2 * q.numel())
    return caches, requests, q, {"bytes": moved, "flops": 4 * pairs * N_HEADS * HEAD_DIM}


def contiguous(caches, requests):
    """(k, v) of each cache, each (n, n_kv_heads, tokens, head_dim), the tokens of a head not behind one another."""
    return [
        tuple(torch.stack([gathered(p, cache, one.slot) for one in requests]).transpose(1, 2)
              for p in (cache.k_pages, cache.v_pages)) for cache in caches
    ]  # fmt: skip


def _append(cell, seconds):
    empty()
    caches, requests, q, facts = append_problem(*APPENDS[cell], NEW)
    facts["wanted"] = truth(q, caches[0], NEW)
    slots, rows = caches[0].slots(requests), []
    for name, pdl in (("append_attention", False), ("append_attention, PDL", True)):
        function = functools.partial(_run_append, pdl)
        inputs = [(q, cache, slots) for cache in caches]
        rows.append(our_row(
            name, function, inputs, q, verdict=None, sources=appending.SOURCES, tolerance=TOLERANCE, **facts,
        ))  # fmt: skip
    families = append_peers.appends(q, caches, requests, functools.partial(contiguous, caches, requests))
    rows += peer_rows(families, 2 * torch.finfo(q.dtype).eps, ladder=append_title(cell), **facts)
    return ladder_of(append_title(cell), rows, seconds, bound="flops")


def _run_append(pdl, q, cache, slots, *, out):
    return paged.append_attention(q, cache, slots, out=out, pdl=pdl)


def _prefix(n, seconds):
    empty()
    own = np.random.default_rng(n).integers(256, 1025, n).tolist()
    caches, requests = filled([PREFIX + tokens for tokens in own], PREFIX)
    q = torch.randn(n, N_HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    facts = {
        "wanted": truth(q, caches[0]),
        "bytes": 2 * (2 * (PREFIX + sum(own)) * N_KV_HEADS * HEAD_DIM + 2 * q.numel()),
        "flops": 4 * (n * PREFIX + sum(own)) * N_HEADS * HEAD_DIM,
    }
    slots, rows = caches[0].slots(requests), []
    inputs = [(q, cache, slots, cache.shared_prefixes(requests)) for cache in caches]
    for name, sources, shared, pdl in (
        ("decode, prefixes", appending.SOURCES, True, False), ("decode, prefixes, PDL", appending.SOURCES, True, True),
        ("decode, PDL", decoding.SOURCES, False, True),
    ):  # fmt: skip
        function = functools.partial(_run_prefix, shared, pdl)
        rows.append(our_row(name, function, inputs, q, verdict=None, sources=sources, tolerance=TOLERANCE, **facts))
    for families in (append_peers.cascades(q, caches, requests, PREFIX), peers.sixteen_bit(q, caches, requests)):
        rows += peer_rows(families, 2 * torch.finfo(q.dtype).eps, ladder=prefix_title(n), **facts)
    return ladder_of(prefix_title(n), rows, seconds, bound="read" if n <= 16 else "flops")


def _run_prefix(shared, pdl, q, cache, slots, prefixes, *, out):
    return paged.decode(q, cache, slots, out=out, pdl=pdl, prefixes=prefixes if shared else None)
