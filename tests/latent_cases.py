"""Latent caches in one piece and in pages, with NaN wherever no token is, and decode in float64, for the tests of
kernels/latent."""

import math

import torch

WIDTH, LATENT, PAGE = 576, 512, 64


def caches(lens, dtype, device, seed, paged):
    """(cache or pages, table or None, kv_lens) of sequences of these lengths: pages in random order, and out of the
    pool behind a sequence's last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(n, WIDTH, generator=generator).to(dtype) for n in lens]
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    if not paged:
        cache = torch.full((len(lens), max(lens) + 3, WIDTH), math.nan, dtype=dtype)
        for row, mine in zip(cache, tokens):
            row[: len(mine)] = mine
        return cache.to(device), None, kv_lens.to(device)
    need = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(need) + 2, generator=generator).tolist()
    pages = torch.full((len(order), PAGE, WIDTH), math.nan, dtype=dtype)
    table = torch.full((len(lens), max(need) + 1), 2**30, dtype=torch.int32)
    for b, mine in enumerate(tokens):
        for number, part in enumerate(mine.split(PAGE) if len(mine) else ()):
            page = table[b, number] = order.pop()
            pages[page, : len(part)] = part
    return pages.to(device), table.to(device), kv_lens.to(device)


def tokens_of(cache, table, kv_lens, b):
    n = int(kv_lens[b])
    return cache[b, :n] if table is None else cache[table[b, : -(-n // PAGE)].long()].reshape(-1, WIDTH)[:n]


def wanted(q, cache, table, kv_lens, scale):
    """In float64."""
    found = torch.zeros(*q.shape[:2], LATENT, dtype=torch.float64, device=q.device)
    for b in range(len(q)):
        rows = tokens_of(cache, table, kv_lens, b).double()
        if len(rows):
            found[b] = torch.softmax(scale * q[b].double() @ rows.T, -1) @ rows[:, :LATENT]
    return found


def error(got, want):
    """The largest relative error of a sequence, by norms; infinity where something is not written."""
    distance = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp_min(1e-30)
    worst = float(distance.max())
    return worst if math.isfinite(worst) else math.inf
