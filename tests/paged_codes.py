"""Requests in pages of 8 or 4 bits between NaNs, and what attention over them must give: as paged_problems.py."""

import numpy as np
import torch
from guarded_tensors import FENCE, between
from paged_problems import Problem

from kernels import kv_cache, paged
from ref import kv_cache as ref


class CodeProblem(Problem):
    """`said` holds what is kept of the tokens, by ref/kv_cache.py. What is behind a length, in pages that are left over
    and around the pool, has NaN for scales and, in fp8, for codes. pieces: tokens that come at a time."""

    def __init__(self, bits, lens, page_size, n_heads, n_kv_heads, head_dim, *, new=None, dtype=torch.float16,
                 device="cpu", pieces=1000, seed=0):  # fmt: skip
        rng = torch.Generator(device).manual_seed(seed + sum(lens))
        n_pages = sum(-(-n // page_size) for n in lens) + 3
        self.cache = cache = paged.PagedCache(
            n_pages, page_size, n_kv_heads, head_dim, dtype=dtype, device=device, bits=bits,
            max_requests=len(lens) + 2, max_len=max(*lens, 1) + 5,
        )  # fmt: skip
        poison(cache)
        draw = np.random.default_rng(seed)
        draw.shuffle(cache.pool.free_pages), draw.shuffle(cache.pool.free_slots)
        self.requests, self.said = [cache.new() for _ in lens], []
        for request, tokens in zip(self.requests, lens):
            x = torch.randn(2, 1, tokens, n_kv_heads, head_dim, generator=rng, device=device)
            x = (x * torch.tensor([1, 0.05], device=device).view(2, 1, 1, 1, 1)).to(dtype)
            for begin in range(0, tokens, pieces):
                cache.append([request], *x[:, :, begin : begin + pieces].contiguous())
            self.said.append(torch.stack([kept(part, bits) for part in x]))
        shape = (len(lens), *([new] if new else []), n_heads, head_dim)
        self.q = between(torch.randn(shape, generator=rng, device=device).to(dtype))
        self.out = between(torch.full(shape, torch.nan, dtype=dtype, device=device), FENCE)
        if device != "cpu":
            torch.cuda.synchronize()  # a dependent launch may read at once


def poison(cache):
    cache.k_pages, cache.v_pages = (between(torch.full_like(p, 255), 255) for p in (cache.k_pages, cache.v_pages))
    cache.scales = between(torch.full_like(cache.scales, torch.nan))


def kept(x, bits):
    """What a cache keeps of x (1, tokens, n_kv_heads, head_dim), float64; on a card by kernels.kv_cache, sooner."""
    if not x.shape[1]:
        return x.double()
    if x.is_cuda:
        return kv_cache.quantize(x.contiguous(), bits).dequantize(torch.float32).double()
    return torch.from_numpy(ref.dequantize(ref.quantize(x.float().numpy(), bits))).double()
