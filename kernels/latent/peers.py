"""What our latent attention is measured beside, each called as suits it best.

    FlashInfer    BatchMLAPagedAttentionWrapper, its kernels fa2 and fa3; planned beforehand, on the processor. It takes
                  latent vectors and turned keys apart: here, as views of the same pages
    FlashMLA      DeepSeek's own for Hopper, with what it needs to know of lengths made beforehand
    torch         two products and a softmax, over a cache that was brought into one piece beforehand

    sixteen_bit(q, caches, kv_lens)    yields (name, {mode: make}); make() returns a call for each of the LatentPages

A peer that is not installed, or refuses a case, is left out with a printed sentence.
"""

import functools

import torch

from kernels.attention.peers import _first, _flashinfer, _workspace
from kernels.latent.arguments import LATENT, PAGE, ROPE, WIDTH
from kernels.latent.bench_problems import SCALE

BACKENDS = ("fa2", "fa3")
MOST_IN_ONE_PIECE = 1 << 30  # bytes of a cache that torch is given


def sixteen_bit(q, caches, kv_lens):
    """The names and modes of all peers that are here."""
    if _flashinfer() is not None:
        yield "FlashInfer", {backend: functools.partial(_wrapper, q, caches, kv_lens, backend) for backend in BACKENDS}
    if _flash_mla() is not None:
        yield "FlashMLA", {"with metadata": functools.partial(_flash, q, caches, kv_lens)}
    lens = kv_lens.tolist()
    if 2 * WIDTH * len(lens) * max(lens) <= MOST_IN_ONE_PIECE:
        yield "torch", {"two products": functools.partial(_torch, q, caches, lens)}


def _wrapper(q, caches, kv_lens, backend):
    wrapper = _flashinfer().mla.BatchMLAPagedAttentionWrapper(_workspace("latent", q.device), backend=backend)
    counts = (kv_lens + PAGE - 1) // PAGE
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0).to(torch.int32)])
    numbers = torch.cat([row[:n] for row, n in zip(caches[0].table, counts.tolist())])
    sequences = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    sizes = q.shape[1], LATENT, ROPE, PAGE, False, SCALE
    wrapper.plan(sequences, ends, numbers, kv_lens, *sizes, q.dtype, q.dtype)
    queries, out = (q[..., :LATENT], q[..., LATENT:]), q.new_empty(*q.shape[:2], LATENT)
    return [
        functools.partial(wrapper.run, *queries, cache.pages[..., :LATENT], cache.pages[..., LATENT:], out=out)
        for cache in caches
    ]


@functools.cache
def _flash_mla():
    """The module, or None with a sentence, said once."""
    try:
        import flash_mla
    except ImportError as error:
        print(f"FlashMLA cannot be imported ({error}): its rows are left out")
        return None
    return flash_mla


def _flash(q, caches, kv_lens):
    module = _flash_mla()
    try:  # since 2026 it takes no arguments, and the first call finds out
        metadata, splits = module.get_mla_metadata(kv_lens, q.shape[1], 1)
    except TypeError:
        metadata, splits = module.get_mla_metadata()
    how = {"softmax_scale": SCALE, "causal": False}
    run = module.flash_mla_with_kvcache
    return [
        functools.partial(
            _first, functools.partial(run, **how), q[:, None], cache.pages[:, :, None], cache.table, kv_lens, LATENT,
            metadata, splits,
        )
        for cache in caches
    ]  # fmt: skip


def _torch(q, caches, lens):
    longest, device = max(lens), q.device
    behind = torch.arange(longest, device=device) >= torch.tensor(lens, device=device)[:, None, None]
    bias = torch.zeros(behind.shape, dtype=q.dtype, device=device).masked_fill(behind, -torch.inf)
    return [functools.partial(_two_products, q, _in_one_piece(cache, longest), bias) for cache in caches]


def _in_one_piece(cache, longest):
    """(batch, longest, 576): behind a sequence's length stands what its last page holds, or another page."""
    pages = cache.table[:, : -(-longest // PAGE)].long()
    return cache.pages[pages].view(len(pages), -1, WIDTH)[:, :longest]


def _two_products(q, cache, bias):
    scores = torch.baddbmm(bias, q, cache.transpose(1, 2), alpha=SCALE)
    return torch.softmax(scores, dim=-1) @ cache[..., :LATENT]
