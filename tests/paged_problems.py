"""Requests in pages between NaNs, and what attention over them must give: for tests on the machine and on a card."""

import numpy as np
import torch
from guarded_tensors import FENCE, between

from kernels import paged

ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 4e-3}  # by the norm


class Problem:
    """Requests of these lengths, in a pool whose pages are in random order, with pages left over. What is behind a
    length, in pages that are left over and around the pool, is NaN."""

    def __init__(self, lens, page_size, n_heads, n_kv_heads, head_dim, *, new=None, dtype=torch.float16, device="cpu",
                 max_len=None, seed=0):  # fmt: skip
        rng = torch.Generator(device).manual_seed(seed + sum(lens))
        n_pages = sum(-(-n // page_size) for n in lens) + 3
        self.cache = cache = paged.PagedCache(
            n_pages, page_size, n_kv_heads, head_dim, dtype=dtype, device=device, max_requests=len(lens) + 2,
            max_len=max_len or max(*lens, 1) + 5,
        )  # fmt: skip
        cache.k_pages, cache.v_pages = (between(torch.full_like(p, torch.nan)) for p in (cache.k_pages, cache.v_pages))
        draw = np.random.default_rng(seed)
        draw.shuffle(cache.pool.free_pages), draw.shuffle(cache.pool.free_slots)
        self.requests, self.said = [cache.new() for _ in lens], []
        for request, tokens in zip(self.requests, lens):
            shape = 2, 1, tokens, n_kv_heads, head_dim
            self.said.append(torch.randn(shape, generator=rng, device=device).to(dtype))
            if tokens:
                cache.append([request], *self.said[-1])
        shape = (len(lens), *([new] if new else []), n_heads, head_dim)
        self.q = between(torch.randn(shape, generator=rng, device=device).to(dtype))
        self.out = between(torch.full(shape, torch.nan, dtype=dtype, device=device), FENCE)
        if device != "cpu":
            torch.cuda.synchronize()  # a dependent launch may read at once

    @property
    def slots(self):
        return self.cache.slots(self.requests)

    def grow(self, request, k, v):
        """Note tokens that came to a request."""
        at = self.requests.index(request)
        self.said[at] = torch.cat([self.said[at], torch.stack([k, v])[:, None]], dim=2)

    def wanted(self, scale=None):
        """In float64, from the tokens that were said."""
        q = self.q if self.q.ndim == 4 else self.q[:, None]
        found, (_, new, n_heads, head_dim) = torch.zeros(q.shape, dtype=torch.float64, device=q.device), q.shape
        for b, said in enumerate(self.said):
            k, v = said[:, 0].double()
            n_kv_heads = k.shape[1]
            for i in range(new):
                sees = len(k) - new + i + 1
                if sees > 0:
                    heads = q[b, i].double().view(n_kv_heads, -1, head_dim)
                    s = torch.einsum("hgd,lhd->hgl", heads, k[:sees]) * (head_dim**-0.5 if scale is None else scale)
                    found[b, i] = torch.einsum("hgl,lhd->hgd", s.softmax(-1), v[:sees]).reshape(n_heads, head_dim)
        return found.view(self.q.shape)

    def close(self, out, scale=None):
        right = self.wanted(scale)
        error = float((out.double() - right).norm() / right.norm().clamp(min=1e-30))
        assert error <= ALLOWED[out.dtype], error
        assert (out[(right == 0).all(-1)] == 0).all()  # who sees no token
