"""Attention for serving: many requests at once, whose keys and values lie in pages of one pool.

    cache = PagedCache(n_pages, page_size, n_kv_heads, head_dim, dtype=..., device=...)
    request = cache.new();  cache.append([request, ...], k, v);  other = cache.fork(request);  cache.free(request)
    decode(q, cache, requests, scale=None, *, out=None, pdl=False, invariant=False, prefixes=None, variant=None)
    append_attention(q, cache, requests, scale=None, *, ...)

    decode            q (n_requests, n_heads, head_dim): the newest token of each request looks back at all of it
                      prefixes: what requests share is read once for all, see cache.shared_prefixes
    append_attention  q (n_requests, new, n_heads, head_dim): several new tokens of each, causal
    variants          what a line of CUDA C++ changes: windows, caps, slopes, masks, turned keys
    PagedCache(..., bits=8)  or 4 or "fp8": codes as kernels.kv_cache has them, for both functions, without the last two

A table says which pages a request has. Work is shared out on the card, so that nothing is planned beforehand, and a
captured graph follows tables, lengths and requests when it is replayed. Query head h reads kv head
h // (n_heads // n_kv_heads). CUDA tensors run on their card, CPU tensors on the SIMT machine. Gradients are not
tracked. TypeError or ValueError names the argument, what was expected and what came, PoolFull what lacks; nothing has
been written by then. torch.compile takes each function as an operator, torch.ops.matmul_to_mamba.paged_decode and so
on, of a cache's tensors.
"""

from kernels.paged import variants
from kernels.paged.cache import PagedCache
from kernels.paged.decoding import counters
from kernels.paged.operators import append_attention, decode
from kernels.paged.pool import PoolFull, Request
from kernels.paged.prefixes import Prefixes
from kernels.paged.variants import Variant

__all__ = [
    "PagedCache",
    "PoolFull",
    "Prefixes",
    "Request",
    "Variant",
    "append_attention",
    "counters",
    "decode",
    "variants",
]
