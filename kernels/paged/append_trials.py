"""What append.cu owes to each of its ideas, on a card.

python -m kernels.paged.append_trials [text ...]    cells whose titles hold one of these; peers: with others
"""

import functools
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import paged
from kernels.paged import appending
from kernels.paged.appending import append_tensors, shared_tensors
from lab import cuda, cuda_timing
from lab.card import multiprocessors
from lab.source import inlined
from lab.tensors import DTYPES

DEVICE = "cuda"
N_HEADS, N_KV_HEADS = 32, 8
CHANGES = {
    "": (),
    "registers 216, 72": (("MULTIPLY_REGISTERS = 208", "MULTIPLY_REGISTERS = 216"),),
    "no softmax (wrong)": (("const bool rises = sums.online_softmax(scores, to_log2);", "const bool rises = false;"),),
    **{
        f"costs {a}, {b}": (("SHARED ? 3 : 1, COST_APART = 1", f"SHARED ? {a} : 1, COST_APART = {b}"),)
        for a, b in ((2, 1), (4, 1), (5, 2))
    },
}
WHOLE, LINE = {"whole": True}, {"whole": False}
BASIC = {
    "as planned": {},
    "whole, alone": WHOLE | {"team": 1},
    "line, alone": LINE | {"team": 1},
    "line, teams": LINE | {"team": 2},
}
FULL = BASIC | {what: {"extra": what} for what in ("registers 216, 72", "no softmax (wrong)")}
APPENDS = {  # requests, tokens before, new ones, variants, sizes
    "append 512 on 0": (1, 0, 512, BASIC, {}),
    "append 512 on 4K": (1, 4096, 512, BASIC, {}),
    "append 512 on 32K": (1, 32768, 512, FULL, {}),
    "append 512 on 8 x 4K": (8, 4096, 512, FULL, {}),
    "append 8192 on 0": (1, 0, 8192, BASIC, {}),
    "append 8192 on 8K": (1, 8192, 8192, BASIC, {}),
    "append 64 on 16K": (1, 16384, 64, BASIC, {}),
    "append 128 on 16 x 2K": (16, 2048, 128, BASIC, {}),
    "append 2048 on 4 x 0": (4, 0, 2048, BASIC, {}),
    "append 256 on 16 of 0 to 8K": (16, 8192, 256, BASIC, {}),
    "append 512 on 32K, head_dim 64": (1, 32768, 512, BASIC, {"head_dim": 64}),
    "append 512 on 32K, pages of 64": (1, 32768, 512, BASIC, {"page_size": 64}),
    "append 512 on 32K, pages of 8": (1, 32768, 512, BASIC, {"page_size": 8}),
}
SHARED_VARIANTS = {
    "as planned": {},
    "rows 64, alone": {"rows": 64, "team": 1},
    "rows 128, alone": {"rows": 128, "team": 1},
    "rows 128, teams": {"rows": 128, "team": 2},
} | {what: {"rows": 128, "team": 2, "extra": what} for what in CHANGES if what.startswith("costs")}
SHARED = {f"prefix 32K shared by {n}": n for n in (16, 64, 128)}


@functools.cache
def kernels(dtype, head_dim, group, page_size, use, rows, stages, team, extra=""):
    """In place of appending._kernels: with changes to the text."""
    shape = ", ".join(map(str, (dtype, head_dim, group, page_size, use, rows, stages, team)))
    text = inlined("kernels/paged/append.cu")
    for old, new in CHANGES[extra]:
        if text.count(old) != 1:
            raise RuntimeError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    append = cuda.compile(text, (f"-DSHAPE=AppendShape<{shape}>",), name="append.cu", arch="sm_90a")
    return append.append, cuda.load(appending.HERE / "append_merge.cu", (f"-DSHAPE=AppendShape<{shape}>",)).merge


def compile_all(cells):
    """All kernels of these cells, by many threads. cells: (use, n_items, queries, variants, head_dim, page_size)."""
    begin, shapes = time.perf_counter(), set()
    for use, n_items, queries, variants, head_dim, page_size in cells:
        for chosen in variants.values():
            sizes = n_items, queries, N_HEADS // N_KV_HEADS, N_KV_HEADS, multiprocessors(torch.device(DEVICE))
            p = appending.plan(use, *sizes, **chosen)
            shape = head_dim, sizes[2], page_size, use, p.rows, p.stages, p.team, p.extra
            shapes.add((DTYPES[torch.bfloat16], *shape))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [kernel for pair in pool.map(lambda shape: kernels(*shape), shapes) for kernel in pair]
        list(pool.map(lambda kernel: kernel.module.cubin(), made))
    print(f"{len(shapes)} shapes in {time.perf_counter() - begin:.1f} s", flush=True)


def pool_of(lens, head_dim, page_size, dtype=torch.bfloat16):
    """(cache, requests): pages in random order."""
    n_pages = sum(-(-n // page_size) for n in lens) + 5
    cache = paged.PagedCache(
        n_pages, page_size, N_KV_HEADS, head_dim, dtype=dtype, device=DEVICE, max_requests=len(lens) + 2,
        max_len=max(lens) + 1024,
    )  # fmt: skip
    np.random.default_rng(0).shuffle(cache.pool.free_pages)
    cache.k_pages.normal_(), cache.v_pages.normal_()
    requests = [cache.new() for _ in lens]
    for request, n in zip(requests, lens):
        cache.reserve([request], n)
    return cache, requests


def time_of(call):
    return float(np.median(cuda_timing.Graph([call]).turn())) * 1e6


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def show(name, us, flops, note=""):
    print(f"  {name:46s} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s  {note}", flush=True)


def time_append(title, peers):
    n, context, new, variants, sizes = APPENDS[title]
    head_dim, page_size = sizes.get("head_dim", 128), sizes.get("page_size", 16)
    ragged = np.random.default_rng(0).integers(0, context + 1, n) if "to" in title else [context] * n
    lens = [int(before) + new for before in ragged]
    cache, requests = pool_of(lens, head_dim, page_size)
    q = torch.randn(n, new, N_HEADS, head_dim, device=DEVICE).to(cache.dtype)
    out, slots = torch.empty_like(q), cache.slots(requests)
    flops = 4 * head_dim * N_HEADS * sum(new * (length - new) + new * (new + 1) // 2 for length in lens)
    print(f"\n{title}  ({flops / 1e9:.1f} GFLOP)", flush=True)
    tensors, first = (cache.k_pages, cache.v_pages, cache.table, cache.lens, slots), None
    for name, chosen in variants.items():
        out.fill_(math.nan)
        us = time_of(functools.partial(append_tensors, q, *tensors, out=out, chosen=chosen))
        first = out.clone() if first is None else first
        show(name, us, flops, f"far from the first: {distance(out, first):.1e}")
    show("as planned, PDL", time_of(functools.partial(append_tensors, q, *tensors, out=out, pdl=True)), flops)
    if peers and len(set(lens)) == 1:
        for name, us in append_peers(q, cache, requests, context):
            show(name, us, flops)


def append_peers(q, cache, requests, context):
    """SDPA on contiguous tensors, causal where there is no context, else all queries see all keys; and FlashInfer."""
    n, new, n_heads, head_dim = q.shape
    page_size, length = cache.page_size, cache.lengths(requests)[0]
    pages = [torch.tensor(cache.pool.pages[one.slot], device=DEVICE) for one in requests]
    kk, vv = (
        torch.stack([p[mine].transpose(1, 2).reshape(-1, N_KV_HEADS, head_dim)[:length] for mine in pages])
        for p in (cache.k_pages, cache.v_pages)
    )
    qq, kk, vv = (t.transpose(1, 2) for t in (q, kk, vv))
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def call(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qq, kk, vv, is_causal=context == 0, enable_gqa=True)

        try:
            yield f"SDPA {name}{'' if context == 0 else ', no mask'}", time_of(call)
        except Exception as error:  # noqa: BLE001
            print(f"  SDPA {name}: {str(error)[:100]}")
    try:
        import flashinfer

        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3")
        starts = functools.partial(torch.arange, n + 1, dtype=torch.int32, device=DEVICE)
        last = torch.full((n,), (length - 1) % page_size + 1, dtype=torch.int32, device=DEVICE)
        sizes = n_heads, N_KV_HEADS, head_dim, page_size
        numbers = torch.cat(pages).to(torch.int32)
        wrapper.plan(starts() * new, starts() * len(pages[0]), numbers, last, *sizes, causal=True, q_data_type=q.dtype)
        flat = q.view(-1, n_heads, head_dim)
        yield "FlashInfer fa3", time_of(lambda: wrapper.run(flat, (cache.k_pages, cache.v_pages)))
    except Exception as error:  # noqa: BLE001
        print(f"  FlashInfer: {str(error)[:200]}")


def time_shared(title, prefix=32768, head_dim=128, page_size=16):
    """A prefix, and suffixes of 256 to 1024 tokens: in one launch, and what its two parts take alone."""
    n = SHARED[title]
    suffixes = np.random.default_rng(n).integers(256, 1025, n).tolist()
    n_pages = prefix // page_size + sum(-(-k // page_size) for k in suffixes) + 5
    cache = paged.PagedCache(n_pages, page_size, N_KV_HEADS, head_dim, dtype=torch.bfloat16, device=DEVICE,
                             max_requests=n + 2, max_len=prefix + 1024)  # fmt: skip
    np.random.default_rng(0).shuffle(cache.pool.free_pages)
    cache.k_pages.normal_(), cache.v_pages.normal_()
    root = cache.new()
    cache.reserve([root], prefix)
    requests = [cache.fork(root) for _ in suffixes]
    for request, k in zip(requests, suffixes):
        cache.reserve([request], k)
    q = torch.randn(n, N_HEADS, head_dim, device=DEVICE).to(cache.dtype)
    out = torch.empty_like(q)
    flops = 4 * head_dim * N_HEADS * (n * prefix + sum(suffixes))
    moved = 4 * head_dim * N_KV_HEADS * (prefix + sum(suffixes))
    print(f"\n{title}  ({flops / 1e9:.1f} GFLOP; {moved / 1e6:.0f} MB: {moved / 4.5e6:.0f} us at 4.5 TB/s)", flush=True)
    want, prefixes = paged.decode(q, cache, requests), cache.shared_prefixes(requests)
    pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
    for name, chosen in SHARED_VARIANTS.items():
        for pdl in (False, True):
            listed = prefixes.items, prefixes.count, prefixes.rows, prefixes.levels
            call = functools.partial(shared_tensors, q, *pool, *listed, out=out, pdl=pdl, chosen=chosen)
            out.fill_(math.nan)
            us = time_of(call)
            show(name + ", PDL" * pdl, us, flops, f"far from decode: {distance(out, want):.1e}")
    call = functools.partial(paged.decode, q, cache, requests, out=out, pdl=True, prefixes=prefixes)
    show("decode(prefixes=...), PDL", time_of(call), flops)
    alone = cache.shared_prefixes(requests)
    alone.count.fill_(1), alone.levels[:, 1:].fill_(-1)
    listed = alone.items, alone.count, alone.rows, alone.levels
    call = functools.partial(shared_tensors, q, *pool, *listed, out=out, pdl=True)
    show("prefix alone, PDL", time_of(call), 4 * head_dim * N_HEADS * n * prefix)
    short, ends = pool_of(suffixes, head_dim, page_size)
    call = functools.partial(paged.decode, q, short, short.slots(ends), out=out, pdl=True)
    show("suffixes alone, by decode.cu, PDL", time_of(call), 4 * head_dim * N_HEADS * sum(suffixes))
    only = short.shared_prefixes(ends)
    listed = only.items, only.count, only.rows, only.levels
    tensors = short.k_pages, short.v_pages, short.table, short.lens
    call = functools.partial(shared_tensors, q, *tensors, *listed, out=out, pdl=True)
    show("suffixes alone, by append.cu, PDL", time_of(call), 4 * head_dim * N_HEADS * sum(suffixes))
    call = functools.partial(paged.decode, q, cache, cache.slots(requests), out=out, pdl=True)
    show("no prefixes, by decode.cu, PDL", time_of(call), flops)


def main(wanted):
    print(torch.cuda.get_device_name(), flush=True)
    appending._kernels = kernels
    peers, wanted = "peers" in wanted, [text for text in wanted if text != "peers"]
    chosen = [title for title in (*APPENDS, *SHARED) if not wanted or any(text in title for text in wanted)]
    cells = []
    for title in chosen:
        if title in SHARED:
            cells.append(("SHARED", 2 * SHARED[title], SHARED[title], SHARED_VARIANTS, 128, 16))
        else:
            n, _, new, variants, sizes = APPENDS[title]
            cells.append(("APPEND", n, new, variants, sizes.get("head_dim", 128), sizes.get("page_size", 16)))
    compile_all(cells)
    for title in chosen:
        time_shared(title) if title in SHARED else time_append(title, peers)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
