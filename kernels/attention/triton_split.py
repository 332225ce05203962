"""Rung 4: split-KV in Triton, with the query heads of a KV head packed into one tile.

A program works on tiles, (ROWS, D) of queries against (TOKENS, D) of keys, and Triton deals them out to threads. The
ROWS are the query heads of one KV head, filled up to 16, which is what a tensor core takes: K and V are read once for
all of them. Partial results are those of split.cu, whose `merge` ends both.
"""

import contextlib

import torch
import triton
import triton.language as tl

from lab.card import shared_memory
from lab.interpreter import interpreter

LOWEST = tl.constexpr(-3.402823466e38)  # below every score; -infinity - -infinity would be NaN


@triton.jit(do_not_specialize=["kv_len"])
def partials(
    q, k, v, kv_lens, partial, lse, kv_len, n_kv_heads, scale,  # scale holds log2(e) as well
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """grid (n_kv_heads, splits, batch). GROUP query heads a KV head.

    ROWS and D: GROUP and HEAD_DIM, filled up.
    """
    kv_head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits, n_heads, length = tl.num_programs(1), n_kv_heads * GROUP, kv_len.to(tl.int64)
    if kv_lens is not None:
        length = tl.minimum(tl.maximum(tl.load(kv_lens + b).to(tl.int64), 0), length)
    first, last = length * split // splits, length * (split + 1) // splits

    r, c, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TOKENS)
    heads, channels = kv_head * GROUP + r, c < HEAD_DIM
    mine = (r < GROUP)[:, None] & channels[None, :]
    query = tl.load(q + (b * n_heads + heads)[:, None] * HEAD_DIM + c[None, :], mine, other=0)  # (ROWS, D)
    if WIDEN:
        query = query.to(tl.float32)
    m, total = tl.full((ROWS,), LOWEST, tl.float32), tl.full((ROWS,), 0, tl.float32)
    acc = tl.full((ROWS, D), 0, tl.float32)
    for start in range(first, last, TOKENS):
        there = (start + t < last)[:, None] & channels[None, :]
        at = ((b * kv_len + start + t) * n_kv_heads + kv_head)[:, None] * HEAD_DIM + c[None, :]
        key, value = tl.load(k + at, there, other=0), tl.load(v + at, there, other=0)  # (TOKENS, D)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # 1: (ROWS, TOKENS)
        s = tl.where((start + t < last)[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))  # 2
        correction, p = tl.exp2(m - m_new), tl.exp2(s - m_new[:, None])  # 3, 4
        total = correction * total + tl.sum(p, 1)  # 5
        acc = tl.dot(p.to(value.dtype), value, correction[:, None] * acc, input_precision="ieee")  # 6
        m = m_new

    to = (b * splits + split) * n_heads + heads
    empty = total == 0  # no token
    total = tl.where(empty, 1, total)
    tl.store(partial + to[:, None] * HEAD_DIM + c[None, :], acc / total[:, None], mine)  # 7
    tl.store(lse + to, tl.where(empty, -float("inf"), m + tl.log2(total)), r < GROUP)


def filled_up(n):
    """Of heads or channels: the size of a tile, a power of two and at least 16."""
    return max(16, triton.next_power_of_2(n))


def launch(q, k, v, kv_lens, partial, lse, scale, tokens):
    """Run `partials`: on a card as compiled by Triton, on the CPU in its interpreter."""
    (batch, n_heads, head_dim), n_kv_heads, splits = q.shape, k.shape[2], partial.shape[1]
    group = n_heads // n_kv_heads
    rows, columns = filled_up(group), filled_up(head_dim)
    on_card = q.device.type == "cuda"
    # On the CPU a bfloat16 is widened: there tl.dot would take its bits for a whole number.
    widen = q.dtype == torch.bfloat16 and not on_card
    stages = 3 if shared_memory(q.device) > 160 * 1024 else 2  # tiles of K and of V in shared memory
    sizes = (group, rows, head_dim, columns, tokens, widen)
    args = (q, k, v, kv_lens, partial, lse, k.shape[1], n_kv_heads, scale, *sizes)
    with contextlib.nullcontext(partials) if on_card else interpreter(partials) as kernel:
        kernel[n_kv_heads, splits, batch](*args, num_stages=stages)
