"""The reference of paged attention: its allocator against lists of tokens, and its attention, in pieces and whole,
against ref.attention over one long cache."""

import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ref import attention, paged

HEADS, KV_HEADS, DIM = 6, 2, 5


def tokens(rng, count, n=1):
    return rng.standard_normal((2, n, count, KV_HEADS, DIM))


class Appending(RuleBasedStateMachine):
    """Any order of new, append, fork and free: each request keeps its own tokens, and no page is lost."""

    def __init__(self):
        super().__init__()
        self.cache, self.rng, self.said = paged.PagedCache(9, 3, KV_HEADS, DIM), np.random.default_rng(0), {}

    def some_of(self, data):
        return data.draw(some.lists(some.sampled_from(list(self.said)), min_size=1, max_size=3, unique=True))

    @rule()
    def new(self):
        self.said[self.cache.new()] = np.zeros((2, 0, KV_HEADS, DIM))

    @precondition(lambda self: self.said)
    @rule(data=some.data(), count=some.integers(1, 7))
    def append(self, data, count):
        requests, before = self.some_of(data), sorted(self.cache.free_pages)
        k, v = tokens(self.rng, count, len(requests))
        try:
            self.cache.append(requests, k, v)
        except ValueError as error:
            assert re.search(r"the pool lacks (1 page|\d+ pages)$", str(error))
            assert sorted(self.cache.free_pages) == before
            return
        for request, keys, values in zip(requests, k, v):
            self.said[request] = np.concatenate([self.said[request], [keys, values]], axis=1)

    @precondition(lambda self: self.said)
    @rule(data=some.data())
    def fork(self, data):
        request = data.draw(some.sampled_from(list(self.said)))
        self.said[self.cache.fork(request)] = self.said[request]

    @precondition(lambda self: self.said)
    @rule(data=some.data())
    def free(self, data):
        request = data.draw(some.sampled_from(list(self.said)))
        self.cache.free(request)
        del self.said[request]
        with pytest.raises(ValueError, match="not freed"):
            self.cache.fork(request)

    @invariant()
    def all_is_there(self):
        for request, said in self.said.items():
            assert np.array_equal(self.cache.gather(request), said)
            assert self.cache.lengths([request]) == [said.shape[1]]
        used = [page for table in self.cache.tables.values() for page in table]
        assert sorted({*used, *self.cache.free_pages}) == list(range(9))
        assert len(self.cache.free_pages) == 9 - len(set(used)) == (self.cache.shared == 0).sum()


Appending.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestAppending = Appending.TestCase


def problem(lens, page_size, new=1, seed=0):
    """A cache whose freed pages were full of other tokens, its requests, and q."""
    rng = np.random.default_rng(seed)
    cache = paged.PagedCache(sum(-(-n // page_size) for n in lens) + 4, page_size, KV_HEADS, DIM)
    other = cache.new()
    cache.append([other], *np.full((2, 1, 3 * page_size, KV_HEADS, DIM), np.nan))
    requests = [cache.new() for _ in lens]
    for request, length in zip(requests, lens):
        for part in (length // 2, length - length // 2):
            if part:
                cache.append([request], *tokens(rng, part))
    cache.free(other)
    return cache, requests, rng.standard_normal((len(lens), new, HEADS, DIM))


def whole(q, cache, request, scale=None):
    """Attention of each new token over what is before it, as one cache."""
    k, v = cache.gather(request)
    found = np.zeros(q.shape)
    for i in range(len(q)):
        sees = len(k) - len(q) + i + 1
        if sees > 0:
            found[i] = attention.decode_attention(q[i : i + 1], k[None, :sees], v[None, :sees], scale)[0]
    return found


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_attention_over_pages_is_attention(page_size):
    for new in (1, 3):
        cache, requests, q = problem([7, 1, 0, 16, 17], page_size, new)
        found = paged.append_attention(q, cache, requests, 0.3)
        wanted = [whole(one, cache, request, 0.3) for one, request in zip(q, requests)]
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)
        if new == 1:
            assert np.array_equal(paged.decode(q[:, 0], cache, requests, 0.3), found[:, 0])
            assert (found[2] == 0).all()


def test_prefixes_change_nothing_but_how_often_pages_are_read():
    """A system prompt of all, a document of some, and requests that end where their prefix ends."""
    rng, cache = np.random.default_rng(1), paged.PagedCache(40, 4, KV_HEADS, DIM)
    first = cache.new()
    cache.append([first], *tokens(rng, 8))
    others = [cache.fork(first) for _ in range(4)]
    cache.append([others[0]], *tokens(rng, 12))
    others.append(cache.fork(others[0]))
    for request, count in zip(others, (3, 9, 1, 2, 6)):
        cache.append([request], *tokens(rng, count))
    requests, q = [first, *others], rng.standard_normal((6, 2, HEADS, DIM))
    wanted = paged.append_attention(q, cache, requests)
    for prefixes in ([(range(6), 8)], [(range(6), 8), ((1, 5), 20)], [((1, 5), 16), ((2, 3, 4), 4), ((2, 4), 8)]):
        np.testing.assert_allclose(paged.append_attention(q, cache, requests, prefixes=prefixes), wanted, rtol=1e-10)
        rows = [
            row for row, begin, end in paged.pieces(cache, requests, prefixes) for row in row for _ in range(begin, end)
        ]
        assert np.bincount(rows).tolist() == cache.lengths(requests)  # each token once
    for prefixes, words in (
        ([((0, 1), 12)], "that all of"),
        ([((1, 2), 12)], "do not have their first 12 tokens on the same pages"),
        ([((0, 1), 6)], "whole pages of 4"),
        ([((0, 9), 4)], "rows must be different numbers from 0 to 5"),
        ([((1, 1), 4)], "rows must be different"),
        ([((1, 2), 4), ((2, 3), 8)], "across another one"),
    ):
        with pytest.raises(ValueError, match=words):
            paged.decode(q[:, 0], cache, requests, prefixes=prefixes)


def test_tables_as_a_block_sparse_matrix():
    indptr, indices, last = paged.block_sparse([[5, 2], [], [7, 0, 1]], [7, 0, 9], 4)
    assert indptr.tolist() == [0, 2, 2, 5] and indices.tolist() == [5, 2, 7, 0, 1] and last.tolist() == [3, 0, 1]


def test_errors():
    cache, requests, q = problem([7, 5], 4)
    for call, words in (
        (lambda: paged.PagedCache(0, 4, 1, 1), "n_pages must be at least 1"),
        (lambda: cache.append([requests[0]] * 2, *np.zeros((2, 2, 1, KV_HEADS, DIM))), "got one twice"),
        (lambda: cache.append(requests, *np.zeros((2, 1, 1, KV_HEADS, DIM))), "k and v must have shape"),
        (lambda: cache.append(requests, *np.zeros((2, 2, 99, KV_HEADS, DIM))), "the pool lacks 45 pages"),
        (lambda: paged.decode(q, cache, requests), "q must have shape"),
        (lambda: paged.append_attention(q[:1], cache, requests), "q must have shape"),
        (lambda: paged.gather(cache.k_pages, [0, 99], 8), "pages from 0 to 7, got 99"),
        (lambda: paged.gather(cache.k_pages, [0], 8), "tokens must be at most 4"),
        (lambda: paged.gather(cache.k_pages, [3, 3], 8), "once in a request"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
