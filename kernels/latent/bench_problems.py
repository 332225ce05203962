"""What bench.py and trials.py have in common: caches in pages, and what latent attention over them must give."""

import numpy as np
import torch

from kernels.latent.arguments import LATENT, PAGE, WIDTH, LatentPages
from lab import cuda_timing

SCALE = (128 + 64) ** -0.5  # of heads before absorption, in the models that have this attention


def problem(lens, n_heads, device, dtype=torch.bfloat16):
    """Sequences of these lengths in a pool that they fill, their pages in random order.

    Returns (q, caches, the same LatentPages but for their pages' place in memory, with 1 GB or more in all; kv_lens;
    {"wanted", "bytes", "flops"}).
    """
    counts = [-(-n // PAGE) for n in lens]
    numbers = np.random.default_rng(16).permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(lens), max(counts)), np.int32)
    for row, mine in zip(table, np.split(numbers, np.cumsum(counts)[:-1])):
        row[: len(mine)] = mine
    pages = torch.randn(sum(counts), PAGE, WIDTH, device=device, dtype=dtype)
    q = torch.randn(len(lens), n_heads, WIDTH, device=device).to(dtype)
    table, kv_lens = torch.from_numpy(table).to(device), torch.tensor(lens, dtype=torch.int32, device=device)
    caches = [LatentPages(copy, table) for copy in cuda_timing.cold_copies(pages)]
    facts = {
        "wanted": truth(q, caches[0], lens),
        "bytes": 2 * (WIDTH * sum(lens) + len(lens) * n_heads * (WIDTH + LATENT)),
        "flops": 2 * (WIDTH + LATENT) * n_heads * sum(lens),
    }
    return q, caches, kv_lens, facts


def tokens_of(cache, lens, b):
    """What a sequence has, (tokens, 576)."""
    return cache.pages[cache.table[b, : -(-lens[b] // PAGE)].long()].reshape(-1, WIDTH)[: lens[b]]


def truth(q, cache, lens):
    """In float64, sequence by sequence, for want of room."""
    out = torch.zeros(*q.shape[:2], LATENT, dtype=torch.float64, device=q.device)
    for b in range(len(q)):
        rows = tokens_of(cache, lens, b).double()
        out[b] = torch.softmax(SCALE * (q[b].double() @ rows.T), dim=-1) @ rows[:, :LATENT]
    return out
