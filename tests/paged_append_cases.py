"""Pools of pages, and what attention over them is in float64, for the tests of kernels/paged/append.cu."""

import functools
import math

import torch

from kernels.paged.appending import append_tensors, shared_tensors


def pool(lens, n_kv_heads, head_dim, page_size, dtype, device, seed):
    """(k_pages, v_pages, table, lens, slots) of requests of these lengths; None is nobody. Pages in random order; NaN
    in every place where no token is, and pages beyond a request's are out of the pool."""
    generator = torch.Generator().manual_seed(seed)
    need = [-(-(n or 0) // page_size) for n in lens]
    n_pages = sum(need) + 2
    order = torch.randperm(n_pages, generator=generator).tolist()
    slots = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)].to(torch.int32)
    table = torch.full((len(lens) + 2, max(need) + 1), 2**30, dtype=torch.int32)
    all_lens = torch.full((len(lens) + 2,), 9, dtype=torch.int32)
    k, v = (torch.full((n_pages, n_kv_heads, page_size, head_dim), math.nan, dtype=dtype) for _ in range(2))
    for i, (n, count) in enumerate(zip(lens, need)):
        all_lens[slots[i]] = n or 0
        for number in range(count):
            page = table[slots[i], number] = order.pop()
            size = n_kv_heads, min(page_size, n - number * page_size), head_dim
            for pages in (k, v):
                pages[page, :, : size[1]] = torch.randn(size, generator=generator).to(dtype)
        if n is None:
            slots[i] = -1
    return [t.to(device) for t in (k, v, table, all_lens, slots)]


def tokens_of(pages, table, slot, n):
    """(n, n_kv_heads, head_dim) of a request."""
    mine = pages[table[slot, : -(-n // pages.shape[2])].long()]
    return mine.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])[:n]


def attend(q, k, v, limits):
    """In float64: q (rows, n_heads, head_dim), row i sees limits[i] tokens. Returns weighted values, not divided, their
    maximum in units of log 2, and the sum of weights."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("rhd,thd->rht", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5 / math.log(2)
    hidden = torch.arange(len(k), device=q.device) >= limits[:, None, None]
    scores = scores.masked_fill(hidden, -math.inf)
    high = scores.amax(-1).clamp_min(-1e30)
    weights = torch.exp2(scores - high[..., None])
    return torch.einsum("rht,thd->rhd", weights, v.repeat_interleave(group, 1)), high, weights.sum(-1)


def append_error(
    lens, new, group, n_kv_heads, head_dim, page_size, dtype, device="cpu", seed=0, options=None, **chosen
):
    """The largest relative error of a request's result, by norms; infinity where something is not written."""
    k, v, table, all_lens, slots = pool(lens, n_kv_heads, head_dim, page_size, dtype, device, seed)
    torch.manual_seed(seed + 1)
    q = torch.randn(len(lens), new, group * n_kv_heads, head_dim).to(dtype).to(device)
    out = torch.full_like(q, math.nan)
    append_tensors(q, k, v, table, all_lens, slots, out=out, chosen=chosen, **(options or {}))
    worst = 0.0
    for i, n in enumerate(lens):
        want = torch.zeros_like(q[i], dtype=torch.float64)
        if n:
            limits = n - new + 1 + torch.arange(new, device=device)
            values, _, sums = attend(q[i], *(tokens_of(p, table, slots[i], n) for p in (k, v)), limits)
            want = torch.where(limits[:, None, None] > 0, values / sums[..., None].clamp_min(1e-300), 0.0)
        worst = max(worst, error(out[i], want))
    return worst


def shared_error(lens, items, n_queries, group, n_kv_heads, head_dim, page_size, dtype, device="cpu", seed=0,
                 options=None, **chosen):  # fmt: skip
    """The same where queries look at runs of tokens. items: (request, first, tokens, queries)."""
    k, v, table, all_lens, slots = pool(lens, n_kv_heads, head_dim, page_size, dtype, device, seed)
    torch.manual_seed(seed + 1)
    q = torch.randn(n_queries, group * n_kv_heads, head_dim).to(dtype).to(device)
    listed, rows, levels = [], [], [[] for _ in range(n_queries)]
    for request, first, tokens, mine in items:
        listed.append((int(slots[request]), first, tokens, len(rows), len(mine)))
        for query in mine:
            levels[query].append(len(rows))
            rows.append(query)
    most = max(map(len, levels)) + 1
    levels = [[*mine, *[-1] * (most - len(mine))] for mine in levels]
    listed.append((0, 0, 99, 0, len(rows)))  # behind the last
    as_int = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    out = torch.full_like(q, math.nan)
    pages = q, k, v, table, all_lens
    shared_tensors(*pages, as_int(listed), as_int([len(items)]), as_int(rows), as_int(levels), out=out, chosen=chosen,
                   **(options or {}))  # fmt: skip
    worst = 0.0
    for query in range(n_queries):
        runs = [
            [tokens_of(p, table, slots[request], lens[request])[first : first + tokens] for p in (k, v)]
            for request, first, tokens, mine in items
            for _ in range(mine.count(query))
        ]
        want = torch.zeros_like(out[query], dtype=torch.float64)
        if runs:
            both = [torch.cat(run) for run in zip(*runs)]
            values, _, sums = attend(q[query][None], *both, torch.tensor([len(both[0])], device=device))
            want = (values / sums[..., None])[0]
        worst = max(worst, error(out[query], want))
    return worst


def error(got, want):
    distance = float((got.double() - want).norm()) / max(float(want.norm()), 1e-30)
    return distance if math.isfinite(distance) else math.inf
