"""What bench.py and append_bench.py have in common: sizes, and what attention over pages must give."""

import torch

N_HEADS, N_KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def live_in(cache, home):
    """Have the cache's keys and values in this tensor."""
    cache.home, cache.k_pages, cache.v_pages = home, home[0], home[1]
    return cache


def gathered(pages, cache, slot):
    """What a request has in pages, as (tokens, n_kv_heads, head_dim)."""
    found = pages[torch.tensor(cache.pool.pages[slot], device=pages.device)].transpose(1, 2)
    return found.reshape(-1, pages.shape[1], pages.shape[3])[: cache.pool.lens[slot]]


def truth(q, cache, new=None):
    """What attention must give, in float64, request by request and KV head by KV head, for want of room. q (n_requests,
    n_heads, head_dim), or, with `new` tokens of each, (n_requests, new, n_heads, head_dim)."""
    asked = q if new else q[:, None]
    out, group = (
        torch.zeros(asked.shape, dtype=torch.float64, device=q.device),
        asked.shape[2] // cache.k_pages.shape[1],
    )
    for slot in range(len(q)):
        if not cache.pool.lens[slot]:
            continue
        k, v = (gathered(pages, cache, slot) for pages in (cache.k_pages, cache.v_pages))
        for h in range(k.shape[1]):
            heads = slice(h * group, (h + 1) * group)
            scores = asked[slot, :, heads].double() @ k[:, h].double().T * q.shape[-1] ** -0.5  # (new, group, tokens)
            last = len(k) - asked.shape[1] + torch.arange(asked.shape[1], device=q.device)
            hidden = torch.arange(len(k), device=q.device) > last[:, None, None]
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).nan_to_num()
            out[slot, :, heads] = weights @ v[:, h].double()
    return out if new else out[:, 0]


def attention_truth(q, k, v):
    """What rows of q (new, n_heads, head_dim) must give, each of which sees all of k and v (tokens, n_kv_heads,
    head_dim): in float64, KV head by KV head."""
    out, group = torch.zeros(q.shape, dtype=torch.float64, device=q.device), q.shape[1] // k.shape[1]
    for h in range(k.shape[1]):
        heads = slice(h * group, (h + 1) * group)
        scores = q[:, heads].double() @ k[:, h].double().T * q.shape[-1] ** -0.5
        out[:, heads] = torch.softmax(scores, dim=-1) @ v[:, h].double()
    return out
