"""decode and append_attention over pages of 8 or 4 bits, by decode_codes.cu and merge.cu.

Warps, teams and rings are those of kernels.kv_cache.plan for a batch with lengths of its own; how long requests are is
not known beforehand, so they are taken to fill the pool, as in plan.py. A share is a team's, and never a whole row: the
merge is always there.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.attention.arguments import expect_scale
from kernels.attention.plan import card
from kernels.kv_cache import plan as contiguous
from kernels.kv_cache.decoding import FORMATS, RESCALE_ABOVE, _held
from kernels.kv_cache.rounding import default_group
from kernels.paged import code_pages
from kernels.paged.arguments import expect_tables
from kernels.paged.plan import LEAST_CHUNK, MERGE_THREADS, MOST_CHUNKS, USUAL, options
from lab import cuda
from lab.prepared import Calls, scratch
from lab.tensors import expect, output

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/paged/decode_codes.cu", "kernels/paged/merge.cu", "kernels/paged/code_decoding.py")
SOURCES += ("kernels/kv_cache/plan.py", "kernels/kv_cache/layout.py")
LOG2_E = math.log2(math.e)
MOST_ROWS = 64  # of a kv head in one launch: new tokens times heads of a group
DECODES = Calls("paged.decode, codes")


class Plan(NamedTuple):
    """The constants that the two kernels are compiled with, and the sizes of their launches."""

    shape: tuple  # head_dim, rows of a kv head: see Shape in ../attention/shape.cuh
    schedule: tuple  # warps, tokens of a tile, head tiles of a block, lengths, whole: see Schedule
    warps: int
    team: int  # of them that have a share together
    stages: int
    rows: int  # of a request: its head tiles
    blocks: int  # of decode_codes.cu, with as many shares each as it has teams
    shared: int  # bytes
    threads: int  # of merge.cu
    merge_blocks: int
    floats: int  # that all segments may need of scratch memory: sums and their two numbers
    sums_at: int  # where the numbers begin


@functools.lru_cache(maxsize=1024)
def plan(n_requests, n_rows, n_kv_heads, head_dim, bits, n_pages, page_size, max_pages, processors, room,
         invariant=False, *, threads=None, merge_blocks=None, **chosen):  # fmt: skip
    """The plan for n_rows rows of each kv head. What is given by name is taken as it is, for measurements: threads and
    merge_blocks (at most so many) of merge.cu, and of what kernels.kv_cache.plan.plan takes tile, warps, team, stages
    and shares (here blocks)."""
    max_len = max_pages * page_size
    usual = min(max_len, max(1, n_pages * page_size // n_requests))
    requests, tokens = USUAL if invariant else (n_requests, usual)
    group = default_group(bits, "token", head_dim)
    held = _held((bits, "token", group, bits, group), head_dim)
    sizes = requests, n_rows * n_kv_heads, n_kv_heads, head_dim, tokens, held, bits == 4, processors, room, True
    p = contiguous.plan(*sizes, whole=False, **chosen)
    teams, most_tiles = p.warps // p.team, -(-max_len // p.tile)
    blocks = max(1, min(chosen.get("shares") or processors, -(-n_requests * p.rows * most_tiles // teams)))

    threads = threads or MERGE_THREADS
    merge_blocks = min(merge_blocks or 1 << 30, -(-n_requests * n_kv_heads * n_rows // (threads // 32)))
    chunks = min(-(-most_tiles // LEAST_CHUNK), MOST_CHUNKS)
    segments = n_requests * p.rows * chunks if invariant else blocks * teams + n_requests * p.rows
    heads = -(-n_rows // (p.rows // n_kv_heads))
    sums_at = segments * heads * head_dim
    return Plan(
        p.shape, p.schedule, p.warps, p.team, p.stages, p.rows, blocks, p.shared, threads, merge_blocks,
        sums_at + 2 * segments * heads, sums_at,
    )  # fmt: skip


def decode(q, cache, slots, scale, out, pdl, invariant):
    """decoding.decode for a cache of codes."""
    return _attention("decode", q, cache, slots, scale, out, pdl, invariant, None)


def append_attention(q, cache, slots, scale, out, pdl, invariant):
    """decoding.append_attention for a cache of codes: in pieces of MOST_ROWS rows of a kv head, one after another."""
    return _attention("append_attention", q, cache, slots, scale, out, pdl, invariant, "new")


def _attention(where, q, cache, slots, scale, out, pdl, invariant, new):
    pool = cache.k_pages, cache.v_pages, cache.scales, cache.table, cache.lens
    kind = where, scale, bool(pdl), bool(invariant), cache.bits
    if (done := DECODES.run(kind, out, q, *pool, slots)) is not None:
        return done
    factor, result = expect_attention(where, q, cache, slots, scale, out, new)
    count = q.shape[1] if new else 1
    piece = max(1, MOST_ROWS // (q.shape[-2] // cache.n_kv_heads))
    if count <= piece:
        with DECODES.preparing(kind, (out,), (result,), (q, *pool, slots)):
            launch(q, cache, slots, factor, result, count, pdl, invariant)
        return result
    for begin in range(0, count, piece):
        part = q[:, begin : begin + piece].contiguous()
        into, newer = torch.empty_like(part), count - begin - part.shape[1]
        launch(part, cache, slots, factor, into, part.shape[1], False, invariant, newer)
        result[:, begin : begin + piece] = into
    return result


def expect_attention(where, q, cache, slots, scale, out, new=None):
    """As arguments.expect_attention, for a cache of codes. Returns (scale as a float, the tensor to write to)."""
    n_kv_heads, head_dim = cache.n_kv_heads, cache.head_dim
    expect(where, "q", q, cache.lens, ("n_requests", *([new] if new else []), "n_heads", head_dim), (cache.dtype,))
    code_pages.expect_pool(where, cache, q)
    if q.shape[-2] % n_kv_heads:
        raise ValueError(
            f"{where}: n_heads must be a multiple of n_kv_heads, got {q.shape[-2]} query heads and {n_kv_heads} kv "
            "heads"
        )
    if q.data_ptr() % 16:
        raise ValueError(f"{where}: q must start at an address divisible by 16, got {q.data_ptr():#x}")
    expect(where, "slots", slots, q, (q.shape[0],), (torch.int32,))
    scale = expect_scale(where, scale, head_dim)
    if q.is_cpu and q.data_ptr():
        expect_tables(where, len(cache.k_pages), cache.page_size, cache.table, cache.lens, slots)
    names = "k_pages", "v_pages", "scales", "table", "lens"
    result = output(where, out, q, q.shape, q=q, slots=slots, **{name: getattr(cache, name) for name in names})
    if out is not None and out.data_ptr() % 8:
        raise ValueError(f"{where}: out must start at an address divisible by 8, got {out.data_ptr():#x}")
    return scale, result


def launch(q, cache, slots, scale, out, new, pdl, invariant, newer=0, chosen=None, **options):
    """The two launches, on tensors that were looked at. newer: tokens behind the last one that asks."""
    n_pages, max_requests, max_pages = len(cache.k_pages), *cache.table.shape
    sizes = q.shape[0], q.shape[-2] // cache.n_kv_heads * new, cache.n_kv_heads, cache.head_dim, cache.bits, n_pages
    sizes += cache.page_size, max_pages
    p, split, merge = _prepared(q.dtype, q.device, new, bool(invariant), *sizes, **(chosen or {}))
    partial = scratch(q, p.floats, torch.float32)
    sums, n_requests = partial[p.sums_at :], q.shape[0]
    args = q, cache.k_pages, cache.v_pages, cache.scales, slots, cache.lens, cache.table, partial, sums
    args += n_requests, p.rows, max_requests, max_pages, n_pages, newer
    args += scale * LOG2_E, code_pages.LIFT - RESCALE_ABOVE, int(bool(pdl))
    first = split.unchecked(p.blocks, 32 * p.warps, *args, shared=p.shared, pdl=bool(pdl), **options)
    args = partial, sums, slots, cache.lens, out, n_requests, p.rows, max_requests, max_pages * cache.page_size, newer
    args += (p.blocks * (p.warps // p.team),)
    return first, merge.unchecked(p.merge_blocks, p.threads, *args, pdl=True, **options)


@functools.lru_cache(maxsize=1024)
def _prepared(dtype, device, new, invariant, *sizes, **chosen):
    """What all calls with such tensors share: (plan, the two kernels)."""
    _, _, _, head_dim, bits, _, page_size, _ = sizes
    p = plan(*sizes, *card(device), invariant, **chosen)
    return p, *_kernels(options(dtype, p, page_size, new, invariant), bits, head_dim, p.stages, p.team, p.threads)


@functools.cache
def _kernels(options, bits, head_dim, stages, team, threads):
    """decode_codes.cu and merge.cu."""
    name, group = FORMATS[bits], default_group(bits, "token", head_dim)
    own = f"-DCACHE=Cache<{name}, {name}, 0, {group}, {group}>", f"-DRING_STAGES={stages}", f"-DTEAM_WARPS={team}"
    split = cuda.load(HERE / "decode_codes.cu", (*options, *own)).decode
    return split, cuda.load(HERE / "merge.cu", (*options, f"-DTHREADS={threads}")).merge


def counters(q, cache, slots, scale, invariant, check_races, chosen):
    """decoding.counters for a cache of codes."""
    scale, out = expect_attention("counters", q, cache, slots, scale, None, "new" if q.ndim == 4 else None)
    new = q.shape[1] if q.ndim == 4 else 1
    return launch(q, cache, slots, scale, out, new, False, invariant, chosen=chosen, check_races=check_races)
