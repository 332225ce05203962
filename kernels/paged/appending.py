"""append.cu and append_merge.cu: how they are launched. Plain tensors; pages as kernels/paged has them."""

import functools
import math
from pathlib import Path

import torch

from lab import cuda
from lab.card import multiprocessors
from lab.prepared import scratch
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
LOG2_E = math.log2(math.e)
TOKENS, PIECES, CUT = 128, 8, 7  # of a step; of a row tile, in the merge; words of a Cut
PAGE_SIZES, HEAD_DIMS = (8, 16, 32, 64), (64, 128)


def append_attention(q, k_pages, v_pages, table, lens, slots, scale=None, *, out=None, chosen=None, **options):
    out = torch.empty_like(q) if out is None else out
    n_requests, new, n_heads, head_dim = q.shape
    _launch("APPEND", q, k_pages, v_pages, table, lens, slots, None, scale, (out, None, None), n_requests, new,
            chosen or {}, options)  # fmt: skip
    return out


def prefix_attention(q, k_pages, v_pages, table, lens, items, rows, scale=None, *, out=None, chosen=None, **options):
    _, n_heads, head_dim = q.shape
    if out is None:
        out = (q.new_empty((len(rows), n_heads, head_dim), dtype=torch.float32),
               q.new_empty((len(rows), n_heads, 2), dtype=torch.float32))  # fmt: skip
    _launch("PREFIX", q, k_pages, v_pages, table, lens, items, rows, scale, (None, *out), len(items), len(rows),
            chosen or {}, options)  # fmt: skip
    return out


def _launch(use, q, k_pages, v_pages, table, lens, items, rows, scale, outs, n_items, queries, chosen, options):
    n_pages, n_kv_heads, page_size, head_dim = k_pages.shape
    n_heads = q.shape[-2]
    group = n_heads // n_kv_heads
    tile = chosen.get("rows", 128)
    stages, turns = chosen.get("stages", 2), chosen.get("turns", True)
    whole, team = chosen.get("whole", use == "APPEND"), chosen.get("team", 1)
    blocks = chosen.get("blocks") or multiprocessors(q.device) // team * team
    shape = (DTYPES[q.dtype], head_dim, group, page_size, use, tile, stages, turns, chosen.get("extra", ()))
    append, merge = _kernels(*shape)
    maps = [_map(p, box) for box in (page_size, 8) for p in (k_pages, v_pages)]
    sums = 2 * blocks * tile
    floats = 0 if whole else sums * (head_dim + 2) + CUT * blocks
    memory = scratch(q, max(floats, 1), torch.float32)
    values, pairs, cuts = (memory, memory[sums * head_dim :], memory[sums * (head_dim + 2) :].view(torch.int32)) if floats else (None,) * 3
    scale = head_dim**-0.5 if scale is None else scale
    report = append.unchecked(
        blocks, 384, *maps, q, *outs, values, pairs, cuts, table, lens, items, rows, n_items, queries, q.numel() // (n_heads * head_dim),
        n_kv_heads, n_pages, table.shape[1], table.shape[0], team, int(whole), scale * LOG2_E,
        shared=shared_bytes(head_dim, stages), **options,
    )  # fmt: skip
    if whole:
        return report, None
    return report, merge.unchecked((blocks, PIECES), head_dim, values, pairs, cuts, *outs, n_heads, team, pdl=True,
                                   **{k: v for k, v in options.items() if k != "pdl"})  # fmt: skip


def shared_bytes(head_dim, stages):
    return (4 * 64 + 2 * stages * TOKENS) * head_dim * 2 + 1536


def _map(pages, tokens):
    """Boxes of so many tokens of a page, eight by eight, each eight half by half."""
    n_pages, n_kv_heads, page_size, head_dim = pages.shape
    halves = head_dim // 64
    eights = pages.view(n_pages * n_kv_heads, page_size // 8, 8, halves, 64).transpose(2, 3)
    return TensorMap(eights, (1, tokens // 8, halves, 8, 64), 128)


@functools.cache
def _kernels(dtype, head_dim, group, page_size, use, rows, stages, turns, extra):
    shape = ", ".join(map(str, (dtype, head_dim, group, page_size, use, rows, stages, str(turns).lower())))
    options = (f"-DSHAPE=AppendShape<{shape}>", *extra)
    append = cuda.load(HERE / "append.cu", options, arch="sm_90a").append
    return append, cuda.load(HERE / "append_merge.cu", options).merge
