"""FlashInfer over pages, in all its ways, each called as suits it best: what our paged attention is measured beside.

    batch, tensor cores    BatchDecodeWithPagedKVCacheWrapper
    batch, CUDA cores      the same, without
    XQA                    the kernel that it took over from TensorRT-LLM
    BatchAttention         shares out requests of any lengths; it knows no PDL

All read the same pages, which lie as its layout "HND" says. The first two are planned beforehand, on the processor, and
so is BatchAttention: `steps` counts that. A way that is not installed, or refuses a case, is left out with a printed
sentence.

    sixteen_bit(q, caches, requests)    yields (name, {mode: make}); make() returns a call for each cache
    eight_bit(q, caches, requests)      the same over pages of e4m3 without scales, which BatchAttention does not take
    steps(q, cache, requests)           {name: plan and run, as they are called at each step}
"""

import functools

import torch

from kernels.attention.peers import IN_FP8, _first, _flashinfer, _workspace

LAYOUT = "HND"
BATCH = {"batch, tensor cores": True, "batch, CUDA cores": False}


def sixteen_bit(q, caches, requests):
    """FlashInfer, plain and with programmatic dependent launch."""
    if _flashinfer() is None:
        return
    for pdl in (False, True):
        modes = {mode: functools.partial(_batch, q, caches, requests, pdl, cores) for mode, cores in BATCH.items()}
        modes["XQA"] = functools.partial(_xqa, q, caches, requests, pdl)
        if not pdl:
            modes["BatchAttention"] = functools.partial(_batch_attention, q, caches, requests)
        yield "FlashInfer, PDL" if pdl else "FlashInfer", modes


def eight_bit(q, caches, requests):
    """FlashInfer over pages of e4m3. XQA rounds q and the weights to e4m3, too: it is less exact."""
    if _flashinfer() is None:
        return
    for pdl in (False, True):
        also = ", PDL" if pdl else ""
        modes = {mode: functools.partial(_batch, q, caches, requests, pdl, cores) for mode, cores in BATCH.items()}
        yield f"FlashInfer{also}", modes
        yield f"FlashInfer, {IN_FP8}{also}", {"XQA": functools.partial(_xqa, q, caches, requests, pdl)}


def steps(q, cache, requests):
    """What a server calls at each step, whose requests have grown since."""
    if _flashinfer() is None:
        return {}
    found = {}
    for mode, cores in BATCH.items():
        wrapper, plan = _batch_wrapper(q, cache, requests, cores)
        found[f"FlashInfer, {mode}: plan and run"] = functools.partial(_step, plan, wrapper.run, q, _pages(cache))
    wrapper, plan = _batch_attention_wrapper(q, cache, requests)
    found["FlashInfer, BatchAttention: plan and run"] = functools.partial(_step, plan, wrapper.run, q, _pages(cache))
    found["FlashInfer, XQA: run"] = _xqa(q, [cache], requests, True)[0]
    return found


def _step(plan, run, *arguments):
    plan()
    return run(*arguments)


def _pages(cache):
    return cache.k_pages, cache.v_pages


def _ends(counts):
    """0, and where each of these counts ends: int32."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def _indices(cache, requests):
    """(how many pages each request has, all their numbers)"""
    pages = [cache.pool.pages[one.slot] for one in requests]
    numbers = torch.tensor([page for of_one in pages for page in of_one], dtype=torch.int32, device=cache.device)
    return [len(of_one) for of_one in pages], numbers


def _batch_wrapper(q, cache, requests, tensor_cores):
    """(wrapper, its plan as a function)"""
    make = _flashinfer().BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(_workspace("batch", q.device), LAYOUT, use_tensor_cores=tensor_cores)
    (counts, numbers), size = _indices(cache, requests), cache.page_size
    last = torch.tensor([(n - 1) % size + 1 for n in cache.lengths(requests)], dtype=torch.int32)
    _, n_kv_heads, _, head_dim = cache.k_pages.shape
    types = {"q_data_type": q.dtype, "kv_data_type": cache.dtype}
    plan = functools.partial(
        wrapper.plan, _ends(counts), numbers, last, q.shape[1], n_kv_heads, head_dim, size, **types
    )
    return wrapper, plan


def _batch(q, caches, requests, pdl, tensor_cores):
    wrapper, plan = _batch_wrapper(q, caches[0], requests, tensor_cores)
    plan()
    return [functools.partial(wrapper.run, q, _pages(cache), enable_pdl=pdl) for cache in caches]


def _batch_attention_wrapper(q, cache, requests):
    wrapper = _flashinfer().BatchAttention(kv_layout=LAYOUT, device=str(q.device))
    (counts, numbers), lens = _indices(cache, requests), cache.lens[cache.slots(requests).long()]
    ends = [t.to(q.device) for t in (_ends([1] * len(requests)), _ends(counts))]
    _, n_kv_heads, size, head_dim = cache.k_pages.shape
    sizes, types = (n_kv_heads, head_dim, head_dim, size), {"q_data_type": q.dtype, "kv_data_type": cache.dtype}
    return wrapper, functools.partial(wrapper.plan, *ends, numbers, lens, q.shape[1], *sizes, **types)


def _batch_attention(q, caches, requests):
    wrapper, plan = _batch_attention_wrapper(q, caches[0], requests)
    plan()
    return [functools.partial(_first, wrapper.run, q, _pages(cache)) for cache in caches]


def _xqa(q, caches, requests, pdl):
    slots, lens = caches[0].slots(requests).long(), caches[0].lengths(requests)
    table, lengths = caches[0].table[slots], torch.tensor(lens, device=q.device).to(torch.uint32)
    rest = _workspace("XQA", q.device), table, lengths, max(lens), q.shape[2] ** -0.5, 1.0
    run, how = _flashinfer().decode.xqa_batch_decode_with_kv_cache, {"kv_layout": LAYOUT, "enable_pdl": pdl}
    return [functools.partial(run, q, _pages(cache), *rest, **how) for cache in caches]
