"""append.cu and append_merge.cu: attention over pages where arithmetic is the limit, on Hopper's tensor cores.

For long pieces of a prompt, and for tokens that many requests share. On cards of compute capability 9.0 (H100, H200,
GH200) and on the SIMT machine.
"""

import functools
import math
from pathlib import Path

import torch

from kernels.attention.arguments import expect_scale
from kernels.paged.arguments import expect_attention, expect_pool
from lab import cuda, cuda_driver
from lab.card import multiprocessors
from lab.prepared import scratch
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES, expect, expect_apart, expect_no_gradient

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/paged/{name}" for name in ("append.cu", "append_merge.cu", "appending.py"))
LOG2_E = math.log2(math.e)
TOKENS, THREADS, PIECES = 128, 384, 8  # of a step; of a block; of a row tile, in the merge
CUT = 7  # words of a Cut
PAGE_SIZES, HEAD_DIMS = (8, 16, 32, 64), (64, 128)


def why_not(q, k_pages, scale=None):
    """Why append.cu does not take such tensors, in a few words; "" where it does. Decode.cu takes all."""
    page_size, head_dim = k_pages.shape[2:]
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be {' or '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if page_size not in PAGE_SIZES:
        return f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size}"
    if q.is_cuda and cuda_driver.capability(q.device.index) != (9, 0):
        return "the card must have compute capability 9.0, for wgmma"
    if scale is not None and not scale > 0:
        return f"scale must be positive, got {scale}"
    if q.data_ptr() % 16:
        return f"q must start at an address divisible by 16, got {q.data_ptr():#x}"
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31 - k_pages.shape[1]:
        return f"the pool must have fewer than 2**31 pages of a kv head, got {k_pages.shape[0] * k_pages.shape[1]}"
    return ""


def append_tensors(q, k_pages, v_pages, table, lens, slots, scale=None, *, out=None, pdl=False, chosen=None, **options):
    """softmax(scale · q Kᵀ) V, causal, for the `new` newest tokens of each request, which are in their pages already.

    q        (n_requests, new, n_heads, head_dim). Query i sees the first length - new + i + 1 tokens; one that sees
             none, and who is nobody, gets zeros. The values of the newest tokens must be finite: an earlier query
             weighs them by 0
    k_pages, v_pages, table, lens, slots, scale, out, pdl   as for kernels.paged.decoding.decode_tensors
    chosen   for measurements: what `plan` takes by name; options: as for a launch of lab.cuda

    4 · head_dim flops for each query, head and token that it sees. Keys and values are read once for each 128 rows of a
    kv head, new tokens times heads of its group.
    """
    where = "append_attention"
    factor, result = expect_attention(where, q, k_pages, v_pages, table, lens, slots, scale, out, "new")
    if why := why_not(q, k_pages, factor):
        raise ValueError(f"{where}: {why}")
    _launch("APPEND", q, k_pages, v_pages, table, lens, slots, None, factor, (result, None, None), pdl, chosen, options)
    return result


def prefix_tensors(q, k_pages, v_pages, table, lens, items, rows, scale=None, *, out=None, pdl=False, chosen=None,
                   **options):  # fmt: skip
    """Attention of many queries to tokens that they share, to be merged with that to their own.

    q        (n_queries, n_heads, head_dim)
    items    int32 (n_items, 5): slot, first token (a multiple of page_size; else that of its page counts), tokens; the
             first of its rows, and how many it has: 0, and the item is not there. No two have the same rows
    rows     int32 (n_rows,): rows of q. What is out of range, here and in items, is clamped
    out      None, or (float32 (n_rows, n_heads, head_dim), float32 (n_rows, n_heads, 2)) to write into

    Returns out: of each row of the list the weighted values, not divided; and the maximum that their weights are
    relative to, in units of log 2, with the sum of weights. An item whose tokens are all gone leaves 0, the lowest
    number, and 0. All queries see all tokens. The rest as for append_tensors; a card reads items, rows, lengths and
    tables anew at each replay of a graph.
    """
    where = "prefix_attention"
    expect_pool(where, k_pages, v_pages, table, lens)
    n_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    expect(where, "q", q, k_pages, ("n_queries", "n_heads", head_dim))
    if q.shape[1] % n_kv_heads:
        raise ValueError(f"{where}: n_heads must be a multiple of n_kv_heads, got {q.shape[1]} and {n_kv_heads}")
    expect(where, "items", items, q, ("n_items", 5), (torch.int32,))
    expect(where, "rows", rows, q, ("n_rows",), (torch.int32,))
    factor = expect_scale(where, scale, head_dim)
    if why := why_not(q, k_pages, factor):
        raise ValueError(f"{where}: {why}")
    shapes = (len(rows), q.shape[1], head_dim), (len(rows), q.shape[1], 2)
    if out is None:
        out = tuple(q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    for name, one, shape in zip(("out[0]", "out[1]"), out, shapes):
        expect(where, name, one, q, shape, (torch.float32,))
        expect_no_gradient(where, one, name)
        expect_apart(where, name, one, q=q, k_pages=k_pages, v_pages=v_pages, table=table, lens=lens, items=items)
    _launch("PREFIX", q, k_pages, v_pages, table, lens, items, rows, factor, (None, *out), pdl, chosen, options)
    return out


def plan(use, n_items, queries, group, n_kv_heads, processors, *, rows=None, whole=None, team=1, stages=2, turns=True,
         blocks=None, extra=()):  # fmt: skip
    """(rows of a tile, whether units stay whole, tiles of a team, stages, turns, blocks): see append_walk.cuh.

    What is given by name is taken as it is, for measurements.
    """
    rows = rows or (64 if queries * group <= 64 else 128)
    units = n_items * n_kv_heads * -(-queries * group // rows)
    whole = use == "APPEND" and units >= processors // 2 if whole is None else whole
    blocks = blocks or (min(units, processors) if whole else processors // team * team)
    return rows, whole, team, stages, turns, blocks, extra


def _launch(use, q, k_pages, v_pages, table, lens, items, listed, scale, outs, pdl, chosen, options):
    n_pages, n_kv_heads, page_size, head_dim = k_pages.shape
    (max_requests, max_pages), n_heads = table.shape, q.shape[-2]
    group, queries = n_heads // n_kv_heads, q.shape[1] if use == "APPEND" else len(listed)
    p = plan(use, len(items), queries, group, n_kv_heads, multiprocessors(q.device), **(chosen or {}))
    rows, whole, team, stages, turns, blocks, extra = p
    append, merge = _kernels(DTYPES[q.dtype], head_dim, group, page_size, use, rows, stages, turns, extra)
    maps = [_map(pages, tokens) for tokens in (page_size, 8) for pages in (k_pages, v_pages)]
    sums = 0 if whole else 2 * blocks * rows  # rows of partial results
    memory = scratch(q, sums * (head_dim + 2) + CUT * blocks, torch.float32)
    pairs, cuts = memory[sums * head_dim :], memory[sums * (head_dim + 2) :].view(torch.int32)
    report = append.unchecked(
        blocks, THREADS, *maps, q, *outs, memory, pairs, cuts, table, lens, items, listed, len(items), queries,
        q.numel() // (n_heads * head_dim), n_kv_heads, n_pages, max_pages, max_requests, team, int(whole),
        scale * LOG2_E, shared=shared_bytes(head_dim, stages), pdl=bool(pdl), **options,
    )  # fmt: skip
    if whole:
        return report, None
    arguments = memory, pairs, cuts, *outs, n_heads, team
    return report, merge.unchecked((blocks, PIECES), head_dim, *arguments, pdl=True, **options)


def shared_bytes(head_dim, stages):
    """What Shared in append_shape.cuh takes: queries, results, rings; 1024 for what is small."""
    return (4 * 64 + 2 * stages * TOKENS) * head_dim * 2 + 1024


def _map(pages, tokens):
    """Boxes of so many tokens of a page, eight by eight, each eight half by half of its channels."""
    n_pages, n_kv_heads, page_size, head_dim = pages.shape
    halves = head_dim // 64
    eights = pages.view(n_pages * n_kv_heads, page_size // 8, 8, halves, 64).transpose(2, 3)
    return TensorMap(eights, (1, tokens // 8, halves, 8, 64), 128)


@functools.cache
def _kernels(dtype, head_dim, group, page_size, use, rows, stages, turns, extra=()):
    """append.cu and append_merge.cu."""
    sizes = dtype, head_dim, group, page_size, use, rows, stages, str(turns).lower()
    option = f"-DSHAPE=AppendShape<{', '.join(map(str, sizes))}>"
    append = cuda.load(HERE / "append.cu", (option,), arch="sm_90a").append
    return append, cuda.load(HERE / "append_merge.cu", (option,)).merge
