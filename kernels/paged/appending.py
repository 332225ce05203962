"""append.cu and append_merge.cu: attention over pages where arithmetic is the limit, on Hopper's tensor cores.

For long pieces of a prompt, and for tokens that many requests share. On cards of compute capability 9.0 (H100, H200,
GH200) and on the SIMT machine.
"""

import contextlib
import functools
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.attention.arguments import expect_scale
from kernels.paged.arguments import expect_attention, expect_pool
from kernels.paged.prefixes import prefixes_of
from lab import cuda
from lab.card import capability, multiprocessors
from lab.prepared import Calls, scratch
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES, expect, output

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/paged/{name}" for name in ("append.cu", "append_merge.cu", "appending.py"))
LOG2_E = math.log2(math.e)
SHARED = Calls("paged.decode, prefixes")
TOKENS, THREADS, MERGE_THREADS = 128, 384, 256  # of a step; of a block; of a block of the merge
SEGMENT, PLACES = 12, 3  # words of a Segment; places for parts that a block has
EVEN = 0.85  # of the time that the last turn ends at, if units are shared out whole
PAGE_SIZES, HEAD_DIMS = (8, 16, 32, 64), (64, 128)


def why_not(q, k_pages, scale=None, out=None):
    """Why append.cu does not take such tensors, in a few words; "" where it does. Decode.cu takes all.
    out: of APPEND."""
    page_size, head_dim = k_pages.shape[2:]
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be {' or '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if page_size not in PAGE_SIZES:
        return f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size}"
    if capability(q.device) != (9, 0):
        return "the card must have compute capability 9.0, for wgmma"
    if scale is not None and not scale > 0:
        return f"scale must be positive, got {scale}"
    if q.data_ptr() % 16:
        return f"q must start at an address divisible by 16, got {q.data_ptr():#x}"
    if out is not None and out.data_ptr() % 16:
        return f"out must start at an address divisible by 16, got {out.data_ptr():#x}"
    if k_pages.shape[0] * k_pages.shape[1] >= 2**31 - k_pages.shape[1]:
        return f"the pool must have fewer than 2**31 pages of a kv head, got {k_pages.shape[0] * k_pages.shape[1]}"
    return ""


def append_tensors(q, k_pages, v_pages, table, lens, slots, scale=None, *, out=None, pdl=False, chosen=None, **options):
    """decoding.append_tensors by append.cu, whatever its shape. chosen: for measurements, what `plan` takes by name;
    options: as for a launch of lab.cuda."""
    where, pool = "append_attention", (k_pages, v_pages, table, lens)
    factor, result = expect_attention(where, q, *pool, slots, scale, out, "new")
    if why := why_not(q, k_pages, factor, result):
        raise ValueError(f"{where}: {why}")
    launch("APPEND", q, pool, (slots,), factor, result, pdl, chosen, **options)
    return result


def shared_tensors(q, k_pages, v_pages, table, lens, items, count, rows, levels, scale=None, *, out=None, pdl=False,
                   chosen=None, **options):  # fmt: skip
    """softmax(scale · q Kᵀ) V where queries look at runs of tokens: at some together with others, at some alone.

    q        (n_queries, n_heads, head_dim)
    items    int32 (n_items, 5): slot, first token (a multiple of page_size; else that of its page counts), tokens; the
             first of its rows, and how many it has. No two have the same rows. All queries see all tokens; a run that
             goes beyond the request's end ends there. Those of more than one row tile should come first
    count    int32 (1,): how many of the items are there
    rows     int32 (n_rows,): rows of q. What is out of range, here and in items, is clamped
    levels   int32 (n_queries, n_levels): which of the rows are those of a query, each of them an item's; -1: none

    A query without tokens gets zeros. The rest as for `decode`; a card reads items, rows, levels, lengths and tables
    anew at each replay of a graph. chosen, options: as for append_tensors.
    """
    pool, listed, kind = (k_pages, v_pages, table, lens), (items, count, rows, levels), (scale, bool(pdl))
    if not chosen and not options and (done := SHARED.run(kind, out, q, *pool, *listed)) is not None:
        return done
    factor, result = expect_shared(q, *pool, *listed, scale, out)
    with SHARED.preparing(kind, (out,), (result,), (q, *pool, *listed)) if not chosen else contextlib.nullcontext():
        launch("SHARED", q, pool, listed, factor, result, pdl, chosen, **options)
    return result


def expect_shared(q, k_pages, v_pages, table, lens, items, count, rows, levels, scale, out):
    """Check a call of shared_tensors. Returns (scale as a float, the tensor to write to)."""
    where = "decode"
    expect_pool(where, k_pages, v_pages, table, lens)
    n_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    expect(where, "q", q, k_pages, ("n_queries", "n_heads", head_dim))
    if q.shape[1] % n_kv_heads:
        raise ValueError(f"{where}: n_heads must be a multiple of n_kv_heads, got {q.shape[1]} and {n_kv_heads}")
    for name, tensor, shape in (("items", items, ("n_items", 5)), ("count", count, (1,)), ("rows", rows, ("n_rows",)),
                                ("levels", levels, (len(q), "n_levels"))):  # fmt: skip
        expect(where, name, tensor, k_pages, shape, (torch.int32,))
    factor = expect_scale(where, scale, head_dim)
    if why := why_not(q, k_pages, factor):
        raise ValueError(f"{where}: {why}")
    others = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "table": table,
        "lens": lens,
        "items": items,
        "count": count,
        "rows": rows,
    }
    return factor, output(where, out, q, q.shape, **others, levels=levels)


def decode_shared(q, cache, requests, scale, out, pdl, invariant, prefixes):
    """decode where requests share tokens: what they share is read once. Where append.cu does not apply, every request
    reads all of its tokens, and a warning says why, once."""
    where = "decode"
    if invariant:
        raise ValueError(f"{where}: invariant must be False with prefixes: a result then depends on who shares them")
    found = prefixes_of(where, cache, requests, prefixes)
    if len(q) != len(found.slots):
        raise ValueError(f"{where}: q must have a row for each of {len(found.slots)} requests, got {len(q)}")
    factor = expect_scale(where, scale, q.shape[-1])
    if why := why_not(q, cache.k_pages, factor):
        _warn(why)
        return None
    if found.groups or found is prefixes:  # one that is given may have groups in the next replay
        pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
        listed = found.items, found.count, found.rows, found.levels
        return shared_tensors(q, *pool, *listed, scale, out=out, pdl=pdl)
    return None


@functools.cache
def _warn(why):
    warnings.warn(f"decode: each request reads what it shares with others for itself: {why}", stacklevel=4)


class Plan(NamedTuple):
    """See append_shape.cuh and append_walk.cuh."""

    rows: int  # of a tile
    team: int  # blocks side by side
    stages: int
    whole: bool  # units stay whole
    blocks: int
    extra: str  # of a measurement


def plan(use, n_items, queries, group, n_kv_heads, processors, *, rows=None, team=None, stages=2, whole=None,
         blocks=None, extra=""):  # fmt: skip
    """The Plan for so many queries: APPEND: of each item; SHARED: of all. Lengths are not known, so units stay whole
    only where they come out even if all are alike. What is given by name is taken as it is, for measurements.
    """
    rows = rows or (64 if queries * group <= 64 else 128)
    tiles = -(-queries * group // rows)
    team = team or (min(2, tiles) if use == "SHARED" else 1)
    teams, units = max(1, processors // team), n_items * n_kv_heads * -(-tiles // team)
    even = units >= EVEN * teams * -(-units // teams)
    whole = use == "APPEND" and even if whole is None else whole
    blocks = blocks or team * (min(units, teams) if whole else teams)
    return Plan(rows, team, stages, whole, blocks, extra)


def launch(use, q, pool, listed, scale, out, pdl, chosen=None, **options):
    """The launches, on tensors that were looked at. listed: APPEND: (slots,); SHARED: (items, count, rows, levels)."""
    (k_pages, v_pages, table, lens), shared = pool, use == "SHARED"
    n_pages, n_kv_heads, page_size, head_dim = k_pages.shape
    (max_requests, max_pages), n_heads = table.shape, q.shape[-2]
    group, n_queries = n_heads // n_kv_heads, q.numel() // (n_heads * head_dim)
    items, count, rows, levels = listed if shared else (*listed, None, None, None)
    queries = len(rows) if shared else q.shape[1]
    sizes = len(items), n_queries if shared else queries, group, n_kv_heads
    p = plan(use, *sizes, multiprocessors(q.device), **(chosen or {}))
    append, merge = _kernels(DTYPES[q.dtype], head_dim, group, page_size, use, p.rows, p.stages, p.team, p.extra)
    maps = [_map(pages, tokens) for tokens in (page_size, 8) for pages in (k_pages, v_pages)]
    uncut = queries * n_heads if shared else 0
    parts = uncut + (0 if p.whole else PLACES * p.blocks * p.rows)
    memory = scratch(q, 4 * uncut + parts * (head_dim + 2) + SEGMENT * p.blocks, torch.float32)
    values = memory[4 * uncut :]
    sums, lasts = values[parts * head_dim :], values[parts * (head_dim + 2) :]
    report = append.unchecked(
        p.blocks, THREADS, *maps, q, out, values, sums, memory, lasts, table, lens, items, count, rows, len(items),
        queries, n_queries, n_kv_heads, n_pages, max_pages, max_requests, int(p.whole), scale * LOG2_E, int(bool(pdl)),
        shared=shared_bytes(head_dim, p.stages), pdl=bool(pdl), **options,
    )  # fmt: skip
    if p.whole:
        return report, None
    rows_of_block = MERGE_THREADS // (head_dim // 4)
    grid = -(-n_queries * n_heads // rows_of_block) if shared else (p.blocks, p.rows // rows_of_block)
    arguments = values, sums, memory, lasts, levels, out, n_queries, n_heads, levels.shape[1] if shared else 0
    return report, merge.unchecked(grid, MERGE_THREADS, *arguments, pdl=True, **options)


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
def _kernels(dtype, head_dim, group, page_size, use, rows, stages, team, extra=""):
    """append.cu and append_merge.cu."""
    sizes = dtype, head_dim, group, page_size, use, rows, stages, team
    option = f"-DSHAPE=AppendShape<{', '.join(map(str, sizes))}>"
    append = cuda.load(HERE / "append.cu", (option,), arch="sm_90a").append
    return append, cuda.load(HERE / "append_merge.cu", (option,)).merge
