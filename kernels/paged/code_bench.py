"""Measure decode over pages of e4m3 on a GPU. Part of bench.py, whose shapes these are.

Beside it our decode over contiguous caches of the same codes, and FlashInfer over pages of e4m3 without scales: numbers
rounded as they are, where ours are divided by scales first. Truth is attention over what the codes stand for.

    python -m kernels.paged.code_bench [WORD ...]    other plans too, in little time, printed and not stored: cells by a
                                                     word of their names
"""

import copy
import functools
import math
import sys

import numpy as np
import torch

from kernels import kv_cache, paged, running
from kernels.benching import empty, ladder_of, our_row, peer_rows, reading
from kernels.kv_cache.bench import FP8_PRODUCTS
from kernels.paged import code_decoding, code_pages, peers
from kernels.paged.bench_problems import CELLS as BATCHES
from kernels.paged.bench_problems import (
    HEAD_DIM,
    N_HEADS,
    N_KV_HEADS,
    PAGE,
    TOLERANCE,
    attention_truth,
    run_decode,
    truth,
)
from lab import cuda_timing

DEVICE = "cuda"
CELLS = "16 × 4K", "64 × 4K", "1 × 128K and 63 × 1K", "64 of 512 to 1024"  # of the shapes in 16 bits
BITS = "fp8"
READ = 4096  # numbers of 4 bytes: what the read probe takes at once
CHOICES = [  # what `plan` takes by name
    {},
    {"team": 1},
    {"team": 2},
    {"team": 4},
    {"team": 8},
    {"team": 1, "stages": 2},
    {"warps": 4, "team": 1, "stages": 4},
    {"warps": 12, "team": 1, "stages": 2},
    {"threads": 64},
    {"threads": 256},
    {"merge_blocks": 264},
]
WAYS = {"decode": {}, "decode, PDL": {"pdl": True}, "decode, invariant, PDL": {"pdl": True, "invariant": True}}


def ladders(seconds=0.1):
    """Check, then time, every cell. Returns the Ladders."""
    return [_cell(cell, seconds) for cell in CELLS if running.wants(title_of(cell))]


def title_of(cell):
    return f"paged decode {BITS}, {cell}"


def _cell(cell, seconds):
    empty()
    caches, requests, q, said, facts = problem(BATCHES[cell])
    rows = paged_rows(caches, requests, q, facts)
    rows += contiguous_rows(caches[0], requests, q, said, facts)
    rows += _peers(title_of(cell), caches[0], requests, q, said, facts)
    homes = [cache.home.view(torch.int32) for cache in caches]
    whole = len(homes[0]) // READ * READ  # but for less than 16 KB of hundreds of MB
    rows.append(reading([home[:whole] for home in homes], facts["bytes"], facts["flops"]))
    return ladder_of(title_of(cell), rows, seconds)


def problem(lens, bits=BITS, page_size=PAGE, dtype=torch.bfloat16):
    """Requests of these lengths in a pool that they fill, their pages in random order.

    Returns (caches, the same but for their place in memory, with 1 GB or more in all; requests; q; what was put there,
    (2, tokens, n_kv_heads, head_dim) of each request; {"wanted", "bytes", "flops"}).
    """
    n_pages = sum(-(-n // page_size) for n in lens)
    cache = paged.PagedCache(
        n_pages, page_size, N_KV_HEADS, HEAD_DIM, dtype=dtype, device=DEVICE, bits=bits, max_requests=len(lens),
        max_len=max(lens),
    )  # fmt: skip
    live_in(cache, torch.zeros(sum(t.nbytes for t in parts(cache)), dtype=torch.uint8, device=DEVICE))
    np.random.default_rng(10).shuffle(cache.pool.free_pages)
    requests, said = [cache.new() for _ in lens], []
    q = torch.randn(len(lens), N_HEADS, HEAD_DIM, device=DEVICE).to(dtype)
    wanted = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    for slot, tokens in enumerate(lens):
        said.append(torch.randn(2, tokens, N_KV_HEADS, HEAD_DIM, device=DEVICE, dtype=dtype))
        cache.append(requests[slot : slot + 1], *said[-1][:, None])
        at = requests[slot].slot
        wanted[slot] = attention_truth(q[slot][None], *code_pages.dequantized(cache, cache.pool.pages[at], tokens))[0]
    moved = sum(lens) * N_KV_HEADS * code_pages.token_bytes(HEAD_DIM, bits) + 4 * q.numel()
    facts = {"wanted": wanted, "bytes": moved, "flops": 4 * sum(lens) * N_HEADS * HEAD_DIM}
    caches = [cache, *(live_in(copy.copy(cache), home) for home in cuda_timing.cold_copies(cache.home)[1:])]
    return caches, requests, q, said, facts


def parts(cache):
    return cache.k_pages, cache.v_pages, cache.scales


def live_in(cache, home):
    """Have the cache's codes and scales in this tensor of bytes."""
    pieces, shapes = home.split([t.nbytes for t in parts(cache)]), [t.shape for t in parts(cache)]
    cache.home = home
    cache.k_pages, cache.v_pages = (piece.view(shape) for piece, shape in zip(pieces[:2], shapes))
    cache.scales = pieces[2].view(torch.float16).view(shapes[2])
    return cache


def paged_rows(caches, requests, q, facts, title=None, ways=None):
    """Our decode over pages, in several ways."""
    slots, rows = caches[0].slots(requests), []
    for name, how in WAYS.items() if ways is None else ((title, how) for how in ways):
        rows.append(our_row(
            name, functools.partial(run_decode, how), [(q, cache, slots) for cache in caches], q, verdict=None,
            sources=code_decoding.SOURCES, tolerance=TOLERANCE, **facts,
        ))  # fmt: skip
    return rows


def contiguous_rows(cache, requests, q, said, facts):
    """Our decode over contiguous caches of the same codes with kv_lens; no row where the card has no room for them."""
    lens = cache.lengths(requests)
    shape = len(lens), max(lens), N_KV_HEADS, HEAD_DIM
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if 4.5 * math.prod(shape) > 0.95 * free:
        print(f"contiguous caches of {2 * math.prod(shape) / 1e9:.0f} GB do not fit: their rows are left out")
        return []
    both = []
    for which, role in enumerate(("keys", "values")):
        whole = torch.zeros(shape, dtype=q.dtype, device=q.device)
        for b, of_request in enumerate(said):
            whole[b, : lens[b]] = of_request[which]
        both.append(kv_cache.quantize(whole, BITS, role=role))
        del whole
    kv_lens, held = torch.tensor(lens, dtype=torch.int32, device=q.device), sum(one.nbytes for one in both)
    inputs, used = [(q, *both)], facts["bytes"]
    for _ in range(math.ceil(cuda_timing.COLD / used) - 1 if used > 0.4 * held else 0):
        inputs.append((q, *(_another(one) for one in both)))
    rows = []
    for name, pdl in (("contiguous, kv_lens", False), ("contiguous, kv_lens, PDL", True)):
        function = functools.partial(kv_cache.decode, kv_lens=kv_lens, pdl=pdl)
        rows.append(our_row(
            name, function, inputs, q, verdict=None, sources=kv_cache.SOURCES, tolerance=TOLERANCE, **facts
        ))  # fmt: skip
    return rows


def _another(cache):
    found = copy.copy(cache)
    found.packed, found.scale = cache.packed.clone(), cache.scale.clone()
    return found


def _peers(title, cache, requests, q, said, facts):
    """FlashInfer over pages of e4m3, in the same places."""
    shape, wanted = (len(cache.k_pages), N_KV_HEADS, cache.page_size, HEAD_DIM), torch.zeros_like(facts["wanted"])
    plain = copy.copy(cache)
    plain.k_pages, plain.v_pages = (torch.zeros(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    plain.scales, plain.bits = None, 16
    for request, tokens in zip(requests, said):
        pages = torch.tensor(cache.pool.pages[request.slot], device=q.device)
        room = len(pages) * cache.page_size - tokens.shape[1]
        whole = torch.nn.functional.pad(tokens, (0, 0, 0, 0, 0, room)).unflatten(1, (-1, cache.page_size))
        rounded = whole.transpose(2, 3).to(torch.float8_e4m3fn).to(q.dtype)
        plain.k_pages[pages], plain.v_pages[pages] = rounded
    wanted = truth(q, plain)
    homes = cuda_timing.cold_copies(torch.stack([plain.k_pages, plain.v_pages]).to(torch.float8_e4m3fn))
    caches = []
    for home in homes:
        one = copy.copy(plain)
        one.k_pages, one.v_pages, one.dtype = home[0], home[1], torch.float8_e4m3fn
        caches.append(one)
    facts = facts | {
        "wanted": wanted,
        "bytes": 2 * sum(x.shape[1] for x in said) * N_KV_HEADS * HEAD_DIM + 4 * q.numel(),
    }
    for name, modes in peers.eight_bit(q, caches, requests):
        tolerance = FP8_PRODUCTS if peers.IN_FP8 in name else 2 * torch.finfo(q.dtype).eps
        yield from peer_rows([(name, modes)], tolerance, ladder=title, **facts)


def quick(words):
    """Print µs in a graph, under programmatic dependent launch: of every plan, and over codes in one piece."""
    for cell in [cell for cell in CELLS if not words or any(word in cell for word in words)]:
        empty()
        caches, requests, q, said, facts = problem(BATCHES[cell])
        rows = contiguous_rows(caches[0], requests, q, said, facts)[1:]
        for choice in CHOICES:
            (row,) = paged_rows(caches, requests, q, facts, str(choice), [{"pdl": True}])
            slots = caches[0].slots(requests)
            row.calls = [functools.partial(_launch, choice, q, *one, slots) for one in zip(caches, row.outs)]
            rows.append(row)
        print(f"{cell}: {facts['bytes'] / 1e6:.0f} MB", flush=True)
        for row in rows:
            error = max(float((call().double() - row.wanted).norm() / row.wanted.norm()) for call in row.calls[:2])
            graph = cuda_timing.Graph(row.calls)
            best = min(float(np.median(graph.turn())) for _ in range(3))
            wrong = "" if error <= row.tolerance else f"   IS WRONG: relative error {error:.2g}"
            print(
                f"    {row.title:<45} {1e6 * best:8.2f} µs   {facts['bytes'] / best / 1e12:5.2f} TB/s{wrong}",
                flush=True,
            )


def _launch(choice, q, cache, out, slots):
    code_decoding.launch(q, cache, slots, q.shape[-1] ** -0.5, out, 1, True, False, chosen=choice)
    return out


if __name__ == "__main__":
    with torch.inference_mode():
        quick(sys.argv[1:])
