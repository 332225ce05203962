"""Measure chapter 16 on a GPU: latent attention, bfloat16, in pages of 64 tokens that lie in random order.

128 heads, and 16, as when eight cards share them. Batches of equal lengths, and one of lengths between 512 and 16K. The
rungs, and the peers that are installed (peers.py). Every call finds its pages cold. What limits 128 heads is not
reading but the tensor cores: shares are of the flops that torch.matmul reaches here.
"""

import functools

import numpy as np
import torch

from kernels import benching, latent, running
from kernels.benching import Row, empty, ladder_of, our_row, peer_rows
from kernels.latent import hopper, peers, splitting
from kernels.latent.arguments import LATENT, LatentPages
from kernels.latent.bench_problems import SCALE, problem, tokens_of
from lab import cuda_timing

DEVICE = "cuda"
RAGGED = np.random.default_rng(16).integers(512, 16385, 32).tolist()
CELLS = {  # heads, lengths
    f"{heads} heads, {batch} × {benching.short(tokens)}": (heads, [tokens] * batch)
    for heads, batch, tokens in (
        (128, 1, 4096), (128, 1, 32768), (128, 16, 4096), (128, 16, 32768), (128, 64, 4096), (128, 64, 32768),
        (16, 1, 4096), (16, 16, 4096),
    )
} | {"128 heads, 32 of 512 to 16K": (128, RAGGED)}  # fmt: skip
FEW_HEADS = 64  # with no more, reading is what limits
TOLERANCE = 8e-3  # ‖out − ref‖ / ‖ref‖: weights are rounded to bfloat16, as those of all peers, and so is the result
FURTHER = ("kernels/latent/decoding.py", "kernels/latent/merging.py")
WAYS = {  # {row: (function, how it is called, sources)}
    "split": (latent.split, {}, splitting.SOURCES),
    "split, PDL": (latent.split, {"pdl": True}, splitting.SOURCES),
    "last, PDL": (latent.last, {"pdl": True}, ("kernels/latent/last.cu", "kernels/latent/splitting.py")),
    "in_place, PDL": (latent.in_place, {"pdl": True}, ("kernels/latent/in_place.cu", "kernels/latent/splitting.py")),
    "decode": (latent.decode, {}, hopper.SOURCES),
    "decode, PDL": (latent.decode, {"pdl": True}, hopper.SOURCES),
}
CONTIGUOUS = "128 heads, 16 × 4K"  # the cell that is also measured in one piece


def ladders(seconds=0.1):
    """Check, then time, every cell. Returns the Ladders."""
    cuda_timing.expect_gpu("the ladders of latent attention")
    cells = [cell for cell in CELLS if running.wants(title_of(cell))]
    if cells:
        compile_ahead(cells)
    return [_cell(cell, seconds) for cell in cells]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("latent", roof, versions)


def title_of(cell):
    return f"latent decode bf16, {cell}"


def compile_ahead(cells):
    """Our kernels and FlashInfer's, on all cores: those of cells with as many heads, on as many sequences."""
    calls, seen = [], set()
    for cell in cells:
        n_heads, lens = CELLS[cell]
        if (n_heads, len(lens)) in seen:
            continue
        seen.add((n_heads, len(lens)))
        q = torch.zeros(len(lens), n_heads, 576, device=DEVICE, dtype=torch.bfloat16)
        pages = torch.zeros(1, 64, 576, device=DEVICE, dtype=torch.bfloat16)
        cache = LatentPages(pages, torch.zeros(len(lens), 1, dtype=torch.int32, device=DEVICE))
        kv_lens = torch.full((len(lens),), 64, dtype=torch.int32, device=DEVICE)
        for function, how, _ in WAYS.values():
            calls.append(functools.partial(function, q, cache, kv_lens=kv_lens, scale=SCALE, **how))
    if peers._flashinfer() is not None and not running.only_called():
        calls += [functools.partial(peers._wrapper, q, [cache], kv_lens, backend) for backend in peers.BACKENDS]
    benching.ahead(calls)


def _cell(cell, seconds):
    empty()
    n_heads, lens = CELLS[cell]
    q, caches, kv_lens, facts = problem(lens, n_heads, DEVICE)
    rows = our_rows(q, caches, kv_lens, facts)
    rows += contiguous_rows(q, caches, lens, facts) if cell == CONTIGUOUS else []
    # theirs may round a weight or a result once more than ours
    rows += peer_rows(peers.sixteen_bit(q, caches, kv_lens), 2 * TOLERANCE, ladder=title_of(cell), **facts)
    if n_heads <= FEW_HEADS:
        rows.append(benching.reading([cache.pages for cache in caches], facts["bytes"], facts["flops"]))
        return ladder_of(title_of(cell), rows, seconds)
    return ladder_of(title_of(cell), rows, seconds, bound="flops")


def our_rows(q, caches, kv_lens, facts, ways=None):
    """A row for each of these ways."""
    rows, like = [], q.new_empty(*q.shape[:2], LATENT)
    for name, (function, how, sources) in (ways or WAYS).items():
        run = functools.partial(_run, function, kv_lens, how)
        rows.append(our_row(
            name, run, [(q, cache) for cache in caches], like, verdict=None, sources=(*sources, *FURTHER),
            tolerance=TOLERANCE, **facts,
        ))  # fmt: skip
    return rows


def _run(function, kv_lens, how, q, cache, *, out):
    return function(q, cache, kv_lens=kv_lens, scale=SCALE, out=out, **how)


def contiguous_rows(q, caches, lens, facts):
    """decode over caches in one piece, of sequences of one length."""
    pieces = [torch.stack([tokens_of(cache, lens, b) for b in range(len(lens))]) for cache in caches]
    function, how, sources = WAYS["decode, PDL"]
    return our_rows(q, pieces, None, facts, {"decode, in one piece, PDL": (function, how, sources)})


__all__ = ["Row", "further", "ladders"]
