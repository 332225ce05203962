"""kernels.paged.PagedCache on the CPU: any order of appends, forks and frees leaves what the reference leaves, in
tables that kernels can trust; and errors that change nothing."""

import re
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import between

import ref.paged
from kernels import paged
from kernels.paged import cache as module

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

KV_HEADS, DIM = 2, 16


def tokens(rng, n_requests, new):
    return torch.randn(2, n_requests, new, KV_HEADS, DIM, generator=rng).half()


def tables(cache, requests):
    """The pages of each request, as kernels see them, and all that must hold of them. requests: all there are"""
    slots, lens = cache.slots(requests).tolist(), cache.lengths(requests)
    assert [int(cache.lens[slot]) for slot in slots] == lens
    found = [cache.table[slot, : -(-n // cache.page_size)].tolist() for slot, n in zip(slots, lens)]
    used = [page for pages in found for page in pages]
    assert sorted({*used, *cache.pool.free_pages}) == list(range(len(cache.k_pages)))
    assert cache.free_pages == len(cache.k_pages) - len(set(used))
    return found


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_any_order_leaves_what_the_reference_leaves(page_size):
    """The same steps in both; then each request's tokens bit for bit, and as many pages shared."""
    draw, rng = np.random.default_rng(page_size), torch.Generator().manual_seed(page_size)
    n_pages = 60 // page_size + 4
    cache = paged.PagedCache(
        n_pages, page_size, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=7, max_len=60
    )
    same, pairs, full = ref.paged.PagedCache(n_pages, page_size, KV_HEADS, DIM), [], 0
    for _ in range(50):
        step = draw.choice(["new", "append", "append", "append", "fork", "free"])
        if (step == "new" or not pairs) and len(pairs) < 7:
            pairs.append((cache.new(), same.new()))
        elif step == "append" and pairs:
            some = [pairs[n] for n in draw.permutation(len(pairs))[: draw.integers(1, 4)]]
            new = int(draw.integers(1, 7))
            if max(cache.lengths([ours for ours, _ in some])) + new > 60:
                continue
            k, v = tokens(rng, len(some), new)
            before = tables(cache, [ours for ours, _ in pairs]), cache.free_pages
            try:
                same.append([theirs for _, theirs in some], k.double().numpy(), v.double().numpy())
            except ValueError as error:
                lacking, full = int(re.search(r"\d+", str(error))[0]), full + 1
                words = f"append: the pool lacks {lacking} page{'s' * (lacking > 1)}: "
                with pytest.raises(paged.PoolFull, match=words) as caught:
                    cache.append([ours for ours, _ in some], k, v)
                assert caught.value.lacking == lacking
                assert before == (tables(cache, [ours for ours, _ in pairs]), cache.free_pages)
            else:
                cache.append([ours for ours, _ in some], k, v)
        elif step == "fork" and pairs and len(pairs) < 7:
            ours, theirs = pairs[draw.integers(len(pairs))]
            pairs.append((cache.fork(ours), same.fork(theirs)))
        elif step == "free" and len(pairs) > 2:
            ours, theirs = pairs.pop(draw.integers(len(pairs)))
            cache.free(ours), same.free(theirs)
            with pytest.raises(ValueError, match="must be alive"):
                cache.lengths([ours])
        if pairs:
            tables(cache, [ours for ours, _ in pairs])
    assert cache.free_pages == len(same.free_pages) and full
    found = tables(cache, [ours for ours, _ in pairs])
    for pages, (ours, theirs) in zip(found, pairs):
        assert cache.lengths([ours]) == same.lengths([theirs])
        for mine, wanted in zip((cache.k_pages, cache.v_pages), same.gather(theirs)):
            got = ref.paged.gather(mine.double().numpy(), pages, len(wanted))
            assert np.array_equal(got, wanted)


def test_a_fork_copies_its_last_page_once_either_appends():
    """A full last page stays shared; a partly filled one is copied, and by the last of those who share it, kept."""
    rng = torch.Generator().manual_seed(0)
    cache = paged.PagedCache(9, 4, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=4)
    first = cache.new()
    k, v = tokens(rng, 1, 6)
    cache.append([first], k, v)
    second = cache.fork(first)
    assert tables(cache, [first])[0] == tables(cache, [second])[0] and cache.free_pages == 7
    cache.append([first, second], *tokens(rng, 2, 1))
    (a, b), (c, d) = tables(cache, [first, second])
    assert a == c and b != d and cache.free_pages == 6  # three pages, not four
    for page in (b, d):
        assert torch.equal(cache.k_pages[page, :, :2], k[0, 4:].transpose(0, 1))
    third = cache.fork(first)
    cache.append([first], *tokens(rng, 1, 1))  # to the end of a page
    full = cache.fork(first)
    before = cache.free_pages
    cache.append([full], *tokens(rng, 1, 1))
    _, whole, _, longer = tables(cache, [second, first, third, full])
    assert cache.free_pages == before - 1 and longer[:2] == whole and len(longer) == 3
    cache.free(full)
    assert cache.free_pages == before


def test_a_request_of_before_is_recognised():
    cache = paged.PagedCache(4, 4, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=2)
    first = cache.new()
    cache.free(first)
    again = cache.new()
    assert again.slot == first.slot and again != first
    for call in (cache.free, cache.fork, lambda one: cache.lengths([one]), lambda one: cache.reserve([one], 1)):
        with pytest.raises(ValueError, match="must be alive, got one that was freed, or is another cache's"):
            call(first)
    other = paged.PagedCache(4, 4, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=2).new()
    with pytest.raises(ValueError, match="must be alive"):
        cache.fork(other)
    many = paged.PagedCache(4, 4, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=9)
    far = [many.new() for _ in range(9)][-1]  # its slot is none of this cache
    for stranger in (far, paged.Request(-1, again.generation), paged.Request(1, 0)):  # 0: nobody has slot 1
        with pytest.raises(ValueError, match=r"requests\[0\] must be alive"):
            cache.free(stranger)
    cache.new()
    with pytest.raises(paged.PoolFull, match="new: all 2 slots are taken"):
        cache.new()


def test_tokens_of_nobody_go_nowhere():
    """A slot of -1, a request with fewer tokens than come, page numbers and lengths out of range: as on a card, where
    nobody has looked."""
    cache = paged.PagedCache(3, 4, KV_HEADS, DIM, dtype=torch.float16, device="cpu", max_requests=5, max_len=8)
    pools = between(cache.k_pages, torch.nan), between(cache.v_pages, torch.nan)
    k, v = tokens(torch.Generator().manual_seed(0), 6, 2)
    table = torch.tensor([[0, 1], [7, 7], [-1, -1], [2, 1], [2, 0]], dtype=torch.int32)
    lens = torch.tensor([5, 5, 5, 1, 99], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32)
    module.launch_write(slots, k, v, *pools, table, lens, check_races=True)
    for pool, new in zip(pools, (k, v)):
        wanted = torch.zeros_like(pool)
        wanted[0, :, 3], wanted[1, :, 0], wanted[2, :, 0] = new[0, 0], new[0, 1], new[3, 1]
        assert torch.equal(pool, wanted)


def made(**changes):
    how = {"n_pages": 4, "page_size": 4, "n_kv_heads": 2, "head_dim": 16, "dtype": torch.float16, "device": "cpu"}
    return paged.PagedCache(**how | changes)


BAD = [
    ({"n_pages": 0}, "n_pages must be"),
    ({"page_size": 3}, "page_size must be one of 1, 2, 4, 8, 16, 32, 64, got 3"),
    ({"page_size": True}, "page_size must be one of"),
    ({"head_dim": 24}, "head_dim must be a multiple of 16 and at most 256, got 24"),
    ({"dtype": torch.float32}, "dtype must be torch.float16 or torch.bfloat16, got torch.float32"),
    ({"bits": 2}, "bits must be 16, 8, 4 or 'fp8', got 2"),
    ({"max_len": 0}, "max_len must be"),
    ({"max_len": 2**30 + 1}, "max_len must be between 1 and 1073741824, got 1073741825"),
    ({"page_size": 16.0}, "page_size must be"),
    ({"head_dim": 64.0}, "head_dim must be"),
    ({"max_requests": 0}, "max_requests must be"),
]


@pytest.mark.parametrize("changes, words", BAD, ids=str)
def test_a_cache_that_cannot_be(changes, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"PagedCache: {words}")):
        made(**changes)


def test_errors_change_nothing():
    cache = made(max_len=12)
    one, two = cache.new(), cache.new()
    k, v = tokens(torch.Generator().manual_seed(0), 2, 3)
    cache.append([one, two], k, v)
    odd = torch.zeros(k.numel() + 4, dtype=k.dtype)[4:].view(k.shape)
    within = cache.k_pages.view(-1)[: k.numel()].view(k.shape)
    before = cache.k_pages.clone(), cache.v_pages.clone(), cache.table.clone(), cache.lens.clone(), cache.free_pages
    for call, kind, words in (
        (lambda: cache.append([one], k, v), ValueError, "append: k must have shape (1, new, 2, 16)"),
        (lambda: cache.append([one, two], k.float(), v), TypeError, "append: k must be of torch.float16"),
        (lambda: cache.append([one, two], k, v[:, :1]), ValueError, "append: v must have shape (2, 3, 2, 16)"),
        (lambda: cache.append([one, two], odd, v), ValueError, "append: k must start at an address divisible by 16"),
        (lambda: cache.append([one, two], k, within), ValueError, "append: k_pages must not share memory with v"),
        (lambda: cache.append([one, one], k, v), ValueError, "append: requests must all be different, got one twice"),
        (lambda: cache.append(one, k, v), TypeError, "append: requests must be a sequence of requests, got Request"),
        (lambda: cache.append([one, 1], k, v), TypeError, "append: requests[1] must be a request that the cache gave"),
        (
            lambda: cache.reserve([one], 10),
            ValueError,
            "reserve: a request has at most 12 tokens, max_len: requests[0]",
        ),
        (lambda: cache.reserve([one, two], 9), paged.PoolFull, "reserve: the pool lacks 2 pages: 4 needed, 2 free"),
        (lambda: cache.reserve([one], 0), ValueError, "reserve: new must be"),
        (lambda: cache.slots([]), ValueError, "slots: requests must hold at least one request"),
        (lambda: cache.write(cache.slots([one]), k, v), ValueError, "write: slots must have shape (2,)"),
        (
            lambda: cache.write(cache.slots([one, two]), *tokens(torch.Generator(), 2, 4)),
            ValueError,
            "write: k must have no more new tokens than a request has in all, got 3 of 4",
        ),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            call()
    for was, now in zip(before, (cache.k_pages, cache.v_pages, cache.table, cache.lens)):
        assert torch.equal(was, now)
    assert cache.free_pages == before[-1] and cache.lengths([one, two]) == [3, 3]
