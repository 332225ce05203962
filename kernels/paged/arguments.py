"""Look at a paged call's arguments before anything is launched. TypeError or ValueError names the argument, what was
expected and what came."""

import numpy as np
import torch

from kernels.attention.arguments import expect_scale
from lab.tensors import expect, expect_apart, expect_first, expect_no_gradient, output

DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens
HEAD_DIMS = range(16, 257, 16)
MOST_LEN = 1 << 30  # tokens of a request: kernels count them, and some behind, in 32 bits


def expect_page_size(where, page_size):
    if isinstance(page_size, (bool, float)) or page_size not in PAGE_SIZES:
        raise ValueError(f"{where}: page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size!r}")


def expect_head_dim(where, head_dim):
    if isinstance(head_dim, (bool, float)) or head_dim not in HEAD_DIMS:
        raise ValueError(f"{where}: head_dim must be a multiple of 16 and at most 256, got {head_dim}")


def expect_pool(where, k_pages, v_pages, table, lens):
    """Raise unless these are a pool of pages and the tables of its requests."""
    expect_first(where, "k_pages", k_pages, ("n_pages", "n_kv_heads", "page_size", "head_dim"), DTYPES)
    expect(where, "v_pages", v_pages, k_pages, tuple(k_pages.shape))
    expect_page_size(where, k_pages.shape[2])
    expect_head_dim(where, k_pages.shape[3])
    expect(where, "table", table, k_pages, ("max_requests", "max_pages"), (torch.int32,))
    expect(where, "lens", lens, k_pages, (table.shape[0],), (torch.int32,))
    if table.shape[1] * k_pages.shape[2] > MOST_LEN:
        raise ValueError(
            f"{where}: table must have room for at most {MOST_LEN} tokens of a request, got {table.shape[1]} pages of "
            f"{k_pages.shape[2]}"
        )
    for name, value in (("k_pages", k_pages), ("v_pages", v_pages)):
        if value.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must start at an address divisible by 16, got {value.data_ptr():#x}")


def expect_attention(where, q, k_pages, v_pages, table, lens, slots, scale, out, new=None):
    """Check a call of attention over pages. Returns (scale as a float, the tensor to write to).

    q       (n_requests, n_heads, head_dim), or, with `new` a name, (n_requests, new, n_heads, head_dim)
    slots   int32 (n_requests,): rows of table and lens; -1: nobody
    out     None (a new tensor) or a tensor like q, apart from all inputs

    On the CPU what slots, lens and table say is looked at; on a card kernels clamp.
    """
    expect_pool(where, k_pages, v_pages, table, lens)
    n_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    expect(where, "q", q, k_pages, ("n_requests", *([new] if new else []), "n_heads", head_dim))
    if q.shape[-2] % n_kv_heads:
        raise ValueError(
            f"{where}: n_heads must be a multiple of n_kv_heads, got {q.shape[-2]} query heads and {n_kv_heads} kv "
            "heads"
        )
    if q.data_ptr() % 16:
        raise ValueError(f"{where}: q must start at an address divisible by 16, got {q.data_ptr():#x}")
    expect(where, "slots", slots, k_pages, (q.shape[0],), (torch.int32,))
    scale = expect_scale(where, scale, head_dim)
    if q.is_cpu and q.data_ptr():  # what stands for a tensor while code is traced has no numbers
        expect_tables(where, *k_pages.shape[::2], table, lens, slots)
    result = output(where, out, q, q.shape, q=q, k_pages=k_pages, v_pages=v_pages, table=table, lens=lens, slots=slots)
    if out is not None and out.data_ptr() % 8:
        raise ValueError(f"{where}: out must start at an address divisible by 8, got {out.data_ptr():#x}")
    return scale, result


def expect_write(where, slots, k, v, k_pages, v_pages, table, lens):
    """Check new tokens k and v, (n_requests, new, n_kv_heads, head_dim), and the pool that they go into."""
    expect_pool(where, k_pages, v_pages, table, lens)
    n_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    expect(where, "k", k, k_pages, ("n_requests", "new", n_kv_heads, head_dim))
    expect(where, "v", v, k_pages, tuple(k.shape))
    expect(where, "slots", slots, k_pages, (k.shape[0],), (torch.int32,))
    expect_writable(where, k, v, k_pages, v_pages, table=table, lens=lens, slots=slots)
    if k.is_cpu and k.data_ptr():
        expect_tables(where, *k_pages.shape[::2], table, lens, slots)
        short = [int(n) for n in lens[slots[slots >= 0].long()] if n < k.shape[1]]
        if short:
            raise ValueError(f"{where}: k must have no more new tokens than a request has in all, got {short[0]} of "
                             f"{k.shape[1]}: reserve comes first")  # fmt: skip


def expect_writable(where, k, v, k_pages, v_pages, **others):
    """Raise unless words of 16 bytes can go from k and v to pages, which must lie apart from all that is read."""
    for name, value in (("k", k), ("v", v)):
        if value.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must start at an address divisible by 16, got {value.data_ptr():#x}")
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        expect_no_gradient(where, pages, name)
        expect_apart(where, name, pages, k=k, v=v, **others)


def expect_tables(where, n_pages, page_size, table, lens, slots):
    """Raise unless slots are rows of the table, lengths are not beyond it, and each page lies in the pool, and once in
    a request."""
    max_requests, max_pages = table.shape
    slots, lens, table = (t.numpy() for t in (slots, lens, table))
    if len(bad := slots[(slots < -1) | (slots >= max_requests)]):
        raise ValueError(f"{where}: slots must be from -1 (nobody) to {max_requests - 1}, got {bad[0]}")
    for slot in np.unique(slots[slots >= 0]):
        if not 0 <= lens[slot] <= max_pages * page_size:
            raise ValueError(
                f"{where}: lens must be from 0 to {max_pages * page_size}, what a row of table has room for, got "
                f"{lens[slot]} of slot {slot}"
            )
        pages = table[slot, : -(-lens[slot] // page_size)]
        if len(bad := pages[(pages < 0) | (pages >= n_pages)]):
            raise ValueError(f"{where}: table must name pages from 0 to {n_pages - 1}, got {bad[0]} in slot {slot}")
        if len(np.unique(pages)) < len(pages):
            found, times = np.unique(pages, return_counts=True)
            raise ValueError(
                f"{where}: table must name a page once in a request, got page {found[times > 1][0]} twice in slot "
                f"{slot}"
            )
