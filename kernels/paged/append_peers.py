"""What append_attention, and decode with prefixes, are measured beside: see append_bench.py.

    SDPA flash, SDPA cuDNN   torch's, over contiguous keys and values; grouped heads through enable_gqa, and new tokens
                             behind a context by causal_lower_right, which flash alone takes
    FlashInfer: fa3, fa2     BatchPrefillWithPagedKVCacheWrapper, over the same pages
    FlashInfer, cascade      MultiLevelCascadeAttentionWrapper: one kernel for the prefix, one for what follows, and a
                             merge. As it comes it chooses its kernels itself; it can also be told

FlashInfer is planned beforehand, on the processor. A way that is not installed, or refuses a case, is left out with a
printed sentence.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.peers import _flashinfer, _workspace
from kernels.paged.peers import LAYOUT, _ends, _indices, _pages

BACKENDS = ("fa3", "fa2")
CASCADES = {"as it comes": (None, None), "prefix by fa2": ("fa2", None), "fa2": ("fa2", "fa2")}  # prefix; what follows


def appends(q, caches, requests, contiguous):
    """(name, {mode: make}) for new tokens q. contiguous(): for each cache (k, v), each (n, n_kv_heads, tokens,
    head_dim)."""
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        yield f"SDPA {name}", {"enable_gqa": functools.partial(_sdpa_calls, backend, q, contiguous)}
    if _flashinfer() is None:
        return
    for pdl in (False, True):
        modes = {one: functools.partial(append_calls, q, caches, requests, pdl, one) for one in BACKENDS}
        yield "FlashInfer, PDL" if pdl else "FlashInfer", modes


def cascades(q, caches, requests, prefix):
    """(name, {mode: make}) for requests that share the first `prefix` tokens, whole pages."""
    if _flashinfer() is not None:
        modes = {mode: functools.partial(cascade_calls, q, caches, requests, prefix, *how)
                 for mode, how in CASCADES.items()}  # fmt: skip
        yield "FlashInfer, cascade", modes


def _sdpa_calls(backend, q, contiguous):
    queries = q.transpose(1, 2)
    return [functools.partial(_sdpa, backend, queries, k, v) for k, v in contiguous()]


def _sdpa(backend, q, k, v):
    from torch.nn.attention.bias import causal_lower_right

    how = {"is_causal": True} if k.shape[2] == q.shape[2] else {}
    mask = None if how else causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **how).transpose(1, 2)


def _prefill(q, backend, purpose):
    make = _flashinfer().BatchPrefillWithPagedKVCacheWrapper
    return make(_workspace(purpose, q.device), LAYOUT, **({"backend": backend} if backend else {}))


def _last(lengths, size):
    return torch.tensor([(n - 1) % size + 1 for n in lengths], dtype=torch.int32)


def append_calls(q, caches, requests, pdl, backend):
    n, new, n_heads, head_dim = q.shape
    cache, wrapper = caches[0], _prefill(q, backend, f"append {backend}")
    (counts, numbers), size = _indices(cache, requests), cache.page_size
    wrapper.plan(
        _ends([new] * n).to(q.device), _ends(counts).to(q.device), numbers,
        _last(cache.lengths(requests), size).to(q.device), n_heads, cache.k_pages.shape[1], head_dim, size, causal=True,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    flat = q.view(-1, n_heads, head_dim)
    return [functools.partial(_append, wrapper.run, flat, _pages(cache), q.shape, pdl) for cache in caches]


def _append(run, q, pages, shape, pdl):
    return run(q, pages, enable_pdl=pdl).view(shape)


def cascade_calls(q, caches, requests, prefix, first, second):
    cache, device = caches[0], q.device
    n, n_heads, head_dim = q.shape
    size, shared = cache.page_size, prefix // cache.page_size
    wrapper = _flashinfer().MultiLevelCascadeAttentionWrapper(2, _workspace("cascade", device), LAYOUT)
    for level, backend in enumerate((first, second)):
        if backend:
            wrapper._batch_prefill_wrappers[level] = _prefill(q, backend, "cascade")
    pages = [cache.pool.pages[one.slot] for one in requests]
    as_int = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    wrapper.plan(
        [_ends([n]).to(device), _ends([1] * n).to(device)],
        [_ends([shared]).to(device), _ends([len(mine) - shared for mine in pages]).to(device)],
        [as_int(pages[0][:shared]), as_int([page for mine in pages for page in mine[shared:]])],
        [as_int([size]), _last(cache.lengths(requests), size).to(device)],
        n_heads, cache.k_pages.shape[1], head_dim, size, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return [functools.partial(wrapper.run, q, _pages(cache)) for cache in caches]
