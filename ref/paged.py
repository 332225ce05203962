"""Attention over pages: a pool, tables that say who has which page, and the same attention as over one long cache.

k_pages, v_pages  (n_pages, n_kv_heads, page_size, head_dim)   the pool: a page of one kv head lies in one piece
k_scales, v_scales  (n_pages, n_kv_heads, page_size, groups)  with 8 or 4 bits, when pages hold codes (ref.kv_cache)
table             a list of pages for each request: token t lies in page table[t // page_size], at t % page_size
q                 (n_requests, n_heads, head_dim)              the newest token of each request
                  (n_requests, new, n_heads, head_dim)         the `new` newest ones, causal
lse               log of the sum of exp(score): -inf where there is no token

Pieces of a request are put together by (out, lse): see `merge` in ref.attention. All sums are in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ref import kv_cache
from ref.attention import merge, partial


@dataclass(frozen=True, eq=False)
class Request:
    """Who it is, is all there is to it: no two are equal."""


@dataclass(frozen=True)
class Variant:
    """What a variant of attention changes: functions of arrays that broadcast.

    score(s, request, head, token, position)   the new score, from a scaled one
    keep(request, head, token, position)       whether the query at a position sees a token; never a later one
    angle(token, pair)                         by how much dimensions pair and pair + head_dim / 2 of a key, and of a
                                               query at that position, are turned in their plane
    """

    score: Callable | None = None
    keep: Callable | None = None
    angle: Callable | None = None


class PagedCache:
    """Keys and values of many requests in pages of one pool, which holds NaN wherever nothing was put.

    bits: 16 (as they are), 8, 4 or "fp8": then each token has codes, and scales of its own (axis="token" in
    ref.kv_cache), so that a token that comes changes nothing of the others.
    """

    def __init__(self, n_pages, page_size, n_kv_heads, head_dim, bits=16):
        for name, value in (("n_pages", n_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.page_size, shape = page_size, (n_pages, n_kv_heads, page_size, head_dim)
        self.bits, scales = bits, (*shape[:3], 0)
        if bits != 16:
            self.group = kv_cache.default_group(bits, "token", head_dim)
            scales = *shape[:3], head_dim // self.group
        self.k_pages, self.v_pages = np.full(shape, np.nan), np.full(shape, np.nan)
        self.k_scales, self.v_scales = np.full(scales, np.nan), np.full(scales, np.nan)
        self.free_pages = list(range(n_pages))
        self.shared = np.zeros(n_pages, int)  # how many requests have this page
        self.tables, self.lens = {}, {}  # of each request

    def new(self):
        """A request without tokens."""
        request = Request()
        self.tables[request], self.lens[request] = [], 0
        return request

    def append(self, requests, k, v):
        """Put new tokens behind those of each request. k, v (n_requests, new, n_kv_heads, head_dim)

        1. room        pages for the last token; ValueError, with nothing changed, where the pool has too few
        2. own page    the last page, partly filled and shared: copy it, and share it with nobody
        3. new pages   until there is one for each page_size tokens
        4. write       token t into page table[t // page_size], at t % page_size: itself, or its codes and scales
        """
        k, v = np.asarray(k, np.float64), np.asarray(v, np.float64)
        self._expect(requests)
        if len(set(requests)) < len(requests):
            raise ValueError("requests must all be different, got one twice")
        shape = (len(requests), k.shape[1] if k.ndim == 4 else 0, *self.k_pages.shape[1::2])
        if k.shape != shape or v.shape != shape or 0 in shape:
            raise ValueError(f"k and v must have shape {shape}, at least one new token, got {k.shape} and {v.shape}")
        (k, k_scales), (v, v_scales) = self._stored(k), self._stored(v)
        lacking = self._pages_needed(requests, shape[1]) - len(self.free_pages)
        if lacking > 0:  # 1
            raise ValueError(f"the pool lacks {lacking} page{'s' if lacking > 1 else ''}")
        for n, request in enumerate(requests):
            table, begin = self.tables[request], self.lens[request]
            if self._must_copy(request):  # 2
                page = self._take()
                for pages in (self.k_pages, self.v_pages, self.k_scales, self.v_scales):
                    pages[page] = pages[table[-1]]
                self.shared[table[-1]] -= 1
                table[-1] = page
            self.lens[request] += shape[1]
            while len(table) * self.page_size < self.lens[request]:  # 3
                table.append(self._take())
            for i in range(shape[1]):  # 4
                page, at = table[(begin + i) // self.page_size], (begin + i) % self.page_size
                self.k_pages[page, :, at], self.v_pages[page, :, at] = k[n, i], v[n, i]
                self.k_scales[page, :, at], self.v_scales[page, :, at] = k_scales[n, i], v_scales[n, i]

    def fork(self, request):
        """A second request with all tokens of the first, on the same pages."""
        self._expect([request])
        other = self.new()
        self.tables[other], self.lens[other] = list(self.tables[request]), self.lens[request]
        self.shared[self.tables[request]] += 1
        return other

    def free(self, request):
        """The request is no more. Pages that no other shares are free, and keep what they hold."""
        self._expect([request])
        for page in self.tables.pop(request):
            self.shared[page] -= 1
            if not self.shared[page]:
                self.free_pages.append(page)
        del self.lens[request]

    def lengths(self, requests):
        self._expect(requests)
        return [self.lens[request] for request in requests]

    def gather(self, request):
        """(k, v) of a request as one cache: each (tokens, n_kv_heads, head_dim), code · scale where there are codes."""
        self._expect([request])
        both, table, tokens = [], self.tables[request], self.lens[request]
        for pages, scales in ((self.k_pages, self.k_scales), (self.v_pages, self.v_scales)):
            found = gather(pages, table, tokens)
            if self.bits != 16:
                found = found * np.repeat(gather(scales, table, tokens), self.group, axis=2)
            both.append(found)
        return both

    def _stored(self, x):
        """(what stands in pages for new tokens, their scales)"""
        if self.bits == 16:
            return x, np.zeros((*x.shape[:3], 0))
        found = kv_cache.quantize(x.astype(np.float32), self.bits)
        codes = kv_cache.E4M3[found.codes] if self.bits == "fp8" else found.codes  # of e4m3 the number that it says
        return codes, found.scale

    def _must_copy(self, request):
        return self.lens[request] % self.page_size > 0 and self.shared[self.tables[request][-1]] > 1

    def _pages_needed(self, requests, new):
        """New ones, and copies: of requests that share their last page, the last one left needs none if there is no
        other."""
        needed, sharing = 0, {}
        for request in requests:
            needed += -(-(self.lens[request] + new) // self.page_size) - len(self.tables[request])
            if self._must_copy(request):
                sharing.setdefault(self.tables[request][-1], []).append(request)
        return needed + sum(len(some) - (len(some) == self.shared[page]) for page, some in sharing.items())

    def _take(self):
        page = self.free_pages.pop()
        self.shared[page] = 1
        return page

    def _expect(self, requests):
        for request in requests:
            if request not in self.tables:
                raise ValueError("a request must be one of this cache, and not freed")


def gather(pages, table, tokens):
    """The first so many tokens of a request: (tokens, n_kv_heads, head_dim).

    1. pages       the request's, one after another     (its pages, n_kv_heads, page_size, head_dim)
    2. tokens      the page_size tokens of each          (its pages · page_size, n_kv_heads, head_dim)
    3. cut         what stands behind the last token is nobody's
    """
    n_pages, n_kv_heads, page_size, head_dim = pages.shape
    table = np.asarray(table, int)[: -(-tokens // page_size)]
    if len(table) * page_size < tokens:
        raise ValueError(f"tokens must be at most {len(table) * page_size}, what the table has pages for, got {tokens}")
    if len(bad := table[(table < 0) | (table >= n_pages)]):
        raise ValueError(f"table must name pages from 0 to {n_pages - 1}, got {bad[0]}")
    if len(set(table)) < len(table):
        raise ValueError(f"table must name a page once in a request, got {list(table)}")
    found = pages[table]  # 1
    return found.transpose(0, 2, 1, 3).reshape(-1, n_kv_heads, head_dim)[:tokens]  # 2, 3


def block_sparse(tables, lens, page_size):
    """The tables as a matrix of requests by pages of the pool, in which a block that is there is a page to be read:
    (indptr, indices, last), rows as in a sparse matrix (CSR).

    The pages of request i are indices[indptr[i]:indptr[i + 1]], and its last page holds last[i] tokens (0: it has no
    page).
    """
    counts = [-(-tokens // page_size) for tokens in lens]
    indices = [page for table, count in zip(tables, counts) for page in table[:count]]
    last = [(tokens - 1) % page_size + 1 if tokens else 0 for tokens in lens]
    return np.concatenate([[0], np.cumsum(counts)]).astype(int), np.array(indices, int), np.array(last, int)


def decode(q, cache, requests, scale=None, *, prefixes=(), variant=None):
    """Attention of each request's newest token over all of it. (n_requests, n_heads, head_dim); no token: zeros."""
    q = np.asarray(q)
    if q.ndim != 3:
        raise ValueError(f"q must have shape (n_requests, n_heads, head_dim), got {q.shape}")
    return append_attention(q[:, None], cache, requests, scale, prefixes=prefixes, variant=variant)[:, 0]


def append_attention(q, cache, requests, scale=None, *, prefixes=(), variant=None):
    """Causal attention of each request's `new` newest tokens. q and result (n_requests, new, n_heads, head_dim)

    prefixes: see `pieces`. Without, each request is one piece. variant: a Variant, see `varied`.

    1. piece       begin to end of the tokens, and the requests that have them on the same pages
    2. gather      its keys and values, once for all of these requests
    3. attend      query i of `new` sees the first length - new + i + 1 tokens: of the piece, what is before that
    4. merge       the pieces of each query, by (out, lse)
    """
    q = np.asarray(q)
    cache._expect(requests)
    if q.ndim != 4 or len(q) != len(requests) or 0 in q.shape:
        raise ValueError(f"q must have shape ({len(requests)}, new, n_heads, head_dim), none of it 0, got {q.shape}")
    new, lens = q.shape[1], np.array(cache.lengths(requests))
    found = [([np.zeros(q.shape[1:])], [np.full(q.shape[1:3], -np.inf)]) for _ in requests]  # nothing, at first
    for rows, begin, end in pieces(cache, requests, prefixes):  # 1
        k, v = (x[begin:end] for x in cache.gather(requests[rows[0]]))  # 2
        for row in rows:
            if variant is not None:
                positions = lens[row] - new + np.arange(new)
                out, lse = varied(q[row], k, v, scale, variant, row, begin, positions)
                found[row][0].append(out), found[row][1].append(lse)
                continue
            sees = np.clip(lens[row] - new + np.arange(new) + 1 - begin, 0, end - begin)  # 3
            keys, values = (np.broadcast_to(x, (new, *x.shape)) for x in (k, v))
            out, lse = partial(q[row], keys, values, scale, kv_lens=sees)
            found[row][0].append(out), found[row][1].append(lse)
    return np.stack([merge(*of_row)[0] for of_row in found])  # 4


def varied(q, k, v, scale, variant, request, begin, positions):
    """A variant of attention, of queries at positions, over tokens from `begin` on. → (out, lse)

    q (new, n_heads, head_dim); k and v (tokens, n_kv_heads, head_dim)

    1. turn        keys by their positions, queries by theirs
    2. score       s = scale · q · k, and what the variant makes of it
    3. keep        -inf for what is later than the query, or what the variant hides
    4. weights     p = exp(s - m), with m the largest s of a query and head
    5. mix         out = p · v / sum of p; lse = m + log(sum of p). No token: zeros, -inf
    """
    new, n_heads, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    tokens, heads = begin + np.arange(len(k)), np.arange(n_heads)[:, None]
    if variant.angle:  # 1
        q, k = turned(q, variant.angle, positions), turned(k, variant.angle, tokens)
    k, v = (np.repeat(x, n_heads // k.shape[1], axis=1) for x in (k, v))
    s = scale * np.einsum("nhd,thd->nht", q, k)  # 2
    at = request, heads, tokens, np.asarray(positions)[:, None, None]
    if variant.score:
        s = variant.score(s, *at)
    sees = (tokens <= at[3]) & (variant.keep(*at) if variant.keep else True)  # 3
    s = np.where(sees, s, -np.inf)
    m = s.max(axis=-1, initial=-np.inf)  # 4
    nothing = m == -np.inf
    p = np.exp(s - np.where(nothing, 0, m)[..., None])
    total = np.where(nothing, 1, p.sum(axis=-1))
    return np.einsum("nht,thd->nhd", p, v) / total[..., None], m + np.log(total)  # 5


def turned(x, angle, positions):
    """x (n, heads, head_dim), with dimensions i and i + head_dim / 2 of each turned by angle(position, i)."""
    half = x.shape[-1] // 2
    angles = angle(np.asarray(positions)[:, None, None], np.arange(half))
    near, far, cosine, sine = x[..., :half], x[..., half:], np.cos(angles), np.sin(angles)
    return np.concatenate([near * cosine - far * sine, far * cosine + near * sine], axis=-1)


def pieces(cache, requests, prefixes=()):
    """The pieces that the requests' tokens are cut into: (rows, begin, end), with rows the numbers of the requests that
    share tokens begin to end.

    prefixes  (rows, tokens) each: these requests have their first so many tokens, whole pages, on the same pages.
              Groups may lie in each other, the inner ones longer: a system prompt, then a document
    """
    groups = sorted(((tuple(rows), int(tokens)) for rows, tokens in prefixes), key=lambda group: group[1])
    done, found = [0] * len(requests), []  # tokens of each request that are in pieces
    for rows, tokens in groups:
        if not rows or len(set(rows)) < len(rows) or not all(0 <= row < len(requests) for row in rows):
            raise ValueError(f"prefixes: rows must be different numbers from 0 to {len(requests) - 1}, got {rows}")
        if tokens < 1 or tokens % cache.page_size or tokens > min(cache.lengths([requests[row] for row in rows])):
            raise ValueError(
                f"prefixes: tokens must be whole pages of {cache.page_size} that all of {rows} have, got {tokens}"
            )
        begins, pages = {done[row] for row in rows}, tokens // cache.page_size
        if len({tuple(cache.tables[requests[row]][:pages]) for row in rows}) > 1:
            raise ValueError(f"prefixes: {rows} do not have their first {tokens} tokens on the same pages")
        if len(begins) > 1:
            raise ValueError(f"prefixes: groups must lie in each other or apart, got {rows} across another one")
        (begin,) = begins
        if tokens > begin:
            found.append((rows, begin, tokens))
        for row in rows:
            done[row] = tokens
    lens = cache.lengths(requests)
    return found + [((row,), done[row], lens[row]) for row in range(len(requests)) if lens[row] > done[row]]
