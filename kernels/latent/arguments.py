"""Look at a call of latent attention before anything is launched. TypeError or ValueError names the argument, what was
expected and what came."""

from typing import NamedTuple

import torch

from kernels.attention.arguments import expect_scale
from lab.tensors import expect, expect_first, output

DTYPES = (torch.float16, torch.bfloat16)
LATENT, ROPE = 512, 64  # of a token: what values are made of, and the rotated part of keys
WIDTH = LATENT + ROPE
PAGE = 64  # tokens
MOST_HEADS = 128


class LatentPages(NamedTuple):
    """A cache in pages of one pool.

    pages  (n_pages, 64, 576): a page's tokens lie one behind another
    table  int32 (batch, max_pages): the page of the pool that holds each page of a sequence
    """

    pages: torch.Tensor
    table: torch.Tensor


def tensors_of(where, cache):
    """(cache or pages, table or None) of what a caller gave as cache."""
    if type(cache) is LatentPages:
        return cache.pages, cache.table
    if isinstance(cache, torch.Tensor):
        return cache, None
    raise TypeError(f"{where}: cache must be a torch tensor or LatentPages, got {type(cache).__name__}")


def expect_decode(where, q, cache, table, kv_lens, scale, out):
    """Check a call. Returns (scale as a float, the tensor to write to).

    q        (batch, n_heads, 576), n_heads from 1 to 128
    cache    (batch, kv_len, 576), or, with a table, pages (n_pages, 64, 576)
    table    None, or int32 (batch, max_pages)
    kv_lens  int32 (batch,), from 0 to kv_len; None, without a table: all tokens
    out      None (a new tensor) or (batch, n_heads, 512), apart from all inputs

    On the CPU what kv_lens and table say is looked at; on a card kernels clamp.
    """
    expect_first(where, "q", q, ("batch", "n_heads", "latent + rope"), DTYPES)
    batch, n_heads, width = q.shape
    if width != WIDTH:
        raise ValueError(f"{where}: q must have {LATENT} latent and {ROPE} rope dimensions, {WIDTH}, got {width}")
    if n_heads > MOST_HEADS:
        raise ValueError(f"{where}: q must have at most {MOST_HEADS} heads, got {n_heads}")
    if table is None:
        expect(where, "cache", cache, q, (batch, "kv_len", WIDTH))
        longest = cache.shape[1]
    else:
        expect(where, "pages", cache, q, ("n_pages", PAGE, WIDTH))
        expect(where, "table", table, q, (batch, "max_pages"), (torch.int32,))
        longest = table.shape[1] * PAGE
        if kv_lens is None:
            raise ValueError(f"{where}: kv_lens must be given where the cache is in pages, got None")
    for name, value in (("q", q), ("cache" if table is None else "pages", cache)):
        if value.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must start at an address divisible by 16, got {value.data_ptr():#x}")
    if kv_lens is not None:
        expect(where, "kv_lens", kv_lens, q, (batch,), (torch.int32,))
    if scale is None:
        raise TypeError(f"{where}: scale must be a number, as it is that of heads before absorption, got None")
    scale = expect_scale(where, scale, None)
    if q.is_cpu and q.data_ptr() and kv_lens is not None:  # what stands for a tensor while code is traced has none
        expect_tables(where, cache, table, kv_lens, longest)
    shape = batch, n_heads, LATENT
    result = output(where, out, q, shape, q=q, cache=cache, table=table, kv_lens=kv_lens)
    if out is not None and out.data_ptr() % 16:
        raise ValueError(f"{where}: out must start at an address divisible by 16, got {out.data_ptr():#x}")
    return scale, result


def expect_tables(where, pages, table, kv_lens, longest):
    """Raise unless lengths are not beyond the cache, and each page that they need lies in the pool."""
    lens = kv_lens.numpy()
    if len(bad := lens[(lens < 0) | (lens > longest)]):
        limit = "kv_len" if table is None else "what a row of table has room for"
        raise ValueError(f"{where}: kv_lens must be from 0 to {longest}, {limit}, got {bad[0]}")
    if table is None:
        return
    for b, row in enumerate(table.numpy()):
        used = row[: -(-int(lens[b]) // PAGE)]
        if len(bad := used[(used < 0) | (used >= len(pages))]):
            raise ValueError(f"{where}: table must name pages from 0 to {len(pages) - 1}, got {bad[0]} in sequence {b}")
