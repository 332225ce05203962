"""PagedCache: a pool of pages on a device, and who has which of them."""

import functools
from pathlib import Path

import numpy as np
import torch

from kernels.paged import code_pages
from kernels.paged.arguments import (
    DTYPES,
    MOST_LEN,
    expect_head_dim,
    expect_page_size,
    expect_pool,
    expect_writable,
    expect_write,
)
from kernels.paged.pool import Pool, PoolFull, Request
from kernels.paged.prefixes import Prefixes
from lab import cuda
from lab.arguments import expect_count
from lab.prepared import Calls
from lab.tensors import expect

HERE = Path(__file__).resolve().parent
THREADS = 256  # of a block of write.cu and set.cu
MAX_LEN = 1 << 17  # tokens of a request, unless asked for: its row of the table has room for as many
WRITES = Calls("paged.write", outs=2)
KEPT = 64  # lists of requests whose slots are kept as tensors


class PagedCache:
    """Keys and values of many requests in pages of one pool.

    n_pages       pages of the pool, of page_size tokens each: 1, 2, 4, 8, 16, 32 or 64
    n_kv_heads    and head_dim, a multiple of 16 up to 256
    dtype         float16 or bfloat16
    device        a CUDA device, or the CPU, where kernels run on the SIMT machine
    max_requests  that live at the same time
    max_len       tokens of a request, at most; unless given, those of the pool, and at most 131,072. The table takes 4
                  bytes for each page of it and each request
    bits          16; or 8 (int8), 4 (int4) or "fp8" (e4m3): tokens are quantised as they come, each with scales of its
                  own, and take bits / 8 bytes a number and 2 a scale (code_pages.py). For pages of 16, 32 or 64 tokens

    What kernels see, on the device:

        k_pages, v_pages  (n_pages, n_kv_heads, page_size, head_dim): a page of one kv head lies in one piece
                          (code_pages.py says what they are with fewer bits, when there are `scales`, too)
        table             int32 (max_requests, max_pages): the page of the pool for each page of a request
        lens              int32 (max_requests,): tokens

    A request's `slot` is its row of both. All work goes on the current stream, one step after another: who uses several
    streams orders them. Requests and their pages are kept by the processor, so no call waits for the card.
    """

    def __init__(self, n_pages, page_size, n_kv_heads, head_dim, *, dtype, device, bits=16, max_requests=256,
                 max_len=None):  # fmt: skip
        where = "PagedCache"
        for name, value in (("n_pages", n_pages), ("n_kv_heads", n_kv_heads), ("max_requests", max_requests)):
            expect_count(where, name, value, low=1)
        expect_page_size(where, page_size)
        expect_head_dim(where, head_dim)
        if dtype not in DTYPES:
            raise TypeError(f"{where}: dtype must be {' or '.join(map(str, DTYPES))}, got {dtype!r}")
        code_pages.expect_bits(where, bits, page_size)
        if max_len is None:
            max_len = min(n_pages * page_size, MAX_LEN)
        expect_count(where, "max_len", max_len, low=1, high=MOST_LEN)
        self.page_size, self.bits, self.pool = page_size, bits, Pool(n_pages, page_size, max_requests, max_len)
        self.n_kv_heads, self.head_dim, self.dtype, self.scales = n_kv_heads, head_dim, dtype, None
        shape = n_pages, n_kv_heads, page_size, head_dim
        if bits == 16:
            self.k_pages, self.v_pages = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        else:
            self.k_pages, self.v_pages, self.scales = code_pages.make(*shape, bits, device)
        # one tensor, so that what a step changes goes over in one piece
        room = -(-max_requests // 4) * 4  # the table, too, begins at a multiple of 16 bytes
        max_pages = -(-max_len // page_size)
        self._words = torch.zeros(room + max_requests * max_pages, dtype=torch.int32, device=self.k_pages.device)
        self.lens, self.table = self._words[:max_requests], self._words[room:].view(max_requests, max_pages)
        self._table_at = room
        self._slots, self._prefixes = {}, {}
        self._in_graphs = {}  # of these, what a captured graph reads: kept as long as the cache

    @property
    def device(self):
        return self.k_pages.device

    @property
    def free_pages(self):
        """Pages that no request has."""
        return len(self.pool.free_pages)

    def __repr__(self):
        numbers = self.dtype if self.bits == 16 else f"bits={self.bits!r} of {self.dtype}"
        return (
            f"PagedCache({len(self.k_pages)} pages of {self.page_size} tokens, {self.free_pages} free, "
            f"{self.n_kv_heads} kv heads of {self.head_dim}, {numbers}, {self.device})"
        )

    def new(self):
        """A request without tokens. PoolFull where all slots are taken."""
        self._expect_no_capture("new")
        request, changes = self.pool.new()
        self._apply(changes)
        return request

    def append(self, requests, k, v):
        """Put new tokens behind those of each request: k, v (n_requests, new, n_kv_heads, head_dim), of the pool's
        dtype.

        With fewer than 16 bits they are quantised, with the codes that kernels.kv_cache.quantize gives a token, by at
        most half a step of its scale, or 1/16 of a number in fp8. NaN, infinity, and what is too large for a scale of
        float16 cannot be stored: on the CPU a ValueError names the first; a card is not waited for, and the result for
        the request is then no number, or a wrong one. decode stays in float16's range for scales below 64: numbers
        below 8,128 in 8 bits, 512 in 4, 28,672 in fp8.

        PoolFull says how many pages lack; nothing has changed then.
        """
        requests = self._listed("append", requests)
        expect("append", "k", k, self.lens, (len(requests), "new", self.n_kv_heads, self.head_dim), (self.dtype,))
        expect("append", "v", v, self.lens, tuple(k.shape), (self.dtype,))
        if self.bits == 16:
            expect_pool("append", self.k_pages, self.v_pages, self.table, self.lens)
            expect_writable("append", k, v, self.k_pages, self.v_pages, table=self.table, lens=self.lens)
        else:
            code_pages.expect_new("append", self, k, v)
        self.reserve(requests, k.shape[1], _where="append")
        self.write(self.slots(requests), k, v)

    def reserve(self, requests, new, *, _where="reserve"):
        """The host's part of `append`: pages for so many new tokens of each request, a copy of a page that others
        share, and on the device new lengths and tables. What the owner of a graph calls before a replay: the tokens
        themselves then come by `write` in the graph.

        PoolFull says how many pages lack; nothing has changed then.
        """
        self._expect_no_capture(_where)
        self._apply(self.pool.reserve(_where, self._listed(_where, requests), new))

    def write(self, slots, k, v, *, pdl=False):
        """The device's part of `append`: k, v (n_requests, new, n_kv_heads, head_dim) become the last `new` tokens that
        `reserve` made room for. May be captured in a graph: lengths and tables are read by the card.

        slots  int32 (n_requests,); -1: nobody, whose tokens go nowhere
        pdl    True: may start before the kernel ahead of it ends, for which it waits at once
        """
        if self.bits != 16:
            return code_pages.write(self, slots, k, v, pdl)
        pool = self.k_pages, self.v_pages, self.table, self.lens
        if WRITES.run((bool(pdl),), *pool[:2], k, v, *pool[2:], slots) is not None:
            return
        expect_write("write", slots, k, v, *pool)
        with WRITES.preparing((bool(pdl),), pool[:2], pool[:2], (k, v, *pool[2:], slots)):
            launch_write(slots, k, v, *pool, pdl=bool(pdl))

    def fork(self, request):
        """A second request with all tokens of this one. They share its pages; the last one, if partly filled, is copied
        when either of them appends."""
        self._expect_no_capture("fork")
        found, changes = self.pool.fork(request)
        self._apply(changes)
        return found

    def free(self, request):
        """The request is no more: its pages, but for those that others share, are free, whatever they hold."""
        self._expect_no_capture("free")
        self._apply(self.pool.free(request))

    def lengths(self, requests):
        """The tokens of each request, as a list of numbers. Nothing is asked of the device."""
        return [self.pool.lens[slot] for slot in self.pool.expect("lengths", self._listed("lengths", requests))]

    def slots(self, requests):
        """int32 (n_requests,) on the device: what kernels are told. The same tensor for the same requests: do not write
        to it, clone it."""
        slots = tuple(self.pool.expect("slots", self._listed("slots", requests)))
        found = self._slots.get(slots)
        if found is None:
            if not slots:
                raise ValueError("slots: requests must hold at least one request, got none")
            self._expect_no_capture("slots")
            if len(self._slots) >= KEPT:
                self._slots.clear()
            found = self._slots[slots] = self._sent(np.array(slots, np.int32))
        return self._kept_for_graph(found)

    def shared_prefixes(self, requests, groups=None, **options):
        """Which tokens these requests share, as Prefixes: what `decode` takes as `prefixes`, and what a graph's owner
        tells anew by its `update`. groups: [(requests, tokens)], instead of looking for them."""
        return Prefixes(self, self._listed("shared_prefixes", requests), groups, **options)

    def _listed(self, where, requests):
        if isinstance(requests, (list, tuple)):
            return requests
        if isinstance(requests, (torch.Tensor, Request)) or not hasattr(requests, "__iter__"):
            raise TypeError(f"{where}: requests must be a sequence of requests, got {type(requests).__name__}")
        return list(requests)

    def _capturing(self):
        return self.k_pages.is_cuda and torch.cuda.is_current_stream_capturing()

    def _kept_for_graph(self, found):
        """What was found, of this cache: a graph that is captured now reads it in each replay."""
        if self._capturing():
            self._in_graphs[id(found)] = found
        return found

    def _expect_no_capture(self, where):
        if self._capturing():
            raise RuntimeError(f"{where}: must not be captured in a graph: call it before each replay")

    def _sent(self, array):
        """A NumPy array as a tensor on the device; the card is not waited for."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.k_pages.is_cuda else tensor

    def _apply(self, changes):
        """Pages are copied, then lengths and tables set."""
        if changes.copies:
            source, target = (self._sent(np.array(numbers, np.int64)) for numbers in zip(*changes.copies))
            for pages in (self.k_pages, self.v_pages, *([] if self.scales is None else [self.scales])):
                pages.index_copy_(0, target, pages.index_select(0, source))
        max_pages = self.table.shape[1]
        words = {self._table_at + slot * max_pages + number: page for slot, number, page in changes.pages}
        words.update(changes.lens)
        if not words:
            return
        where, values = np.fromiter(words, np.int64, len(words)), np.fromiter(words.values(), np.int32, len(words))
        if self.k_pages.is_cuda:
            launch_set(self._words, self._sent(np.concatenate([where, values.astype(np.int64)])), len(words))
        else:
            self._words.numpy()[where] = values


def launch_write(slots, k, v, k_pages, v_pages, table, lens, *, pdl=False, **options):
    """write.cu on tensors that were looked at."""
    (n_requests, new, n_kv_heads, head_dim), (n_pages, _, page_size, _) = k.shape, k_pages.shape
    words = head_dim // 8  # of 16 bytes
    blocks = -(-n_requests * new * n_kv_heads * words // THREADS)
    sizes = n_requests, new, n_kv_heads, words, *table.shape, n_pages, page_size
    args = k, v, k_pages, v_pages, slots, lens, table, *sizes
    return _module("write").write.unchecked(blocks, THREADS, *args, pdl=pdl, **options)


def launch_set(words, pairs, count, **options):
    """set.cu: words[pairs[i]] = pairs[count + i]."""
    blocks = -(-count // THREADS)  # a module's own .set fills its constants
    return _module("set")["set"].unchecked(blocks, THREADS, words, pairs, count, **options)


@functools.cache
def _module(name):
    return cuda.load(HERE / f"{name}.cu")


__all__ = ["PagedCache", "PoolFull", "Request", "launch_set", "launch_write"]
