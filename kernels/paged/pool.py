"""Who has which pages: the part of a paged cache that the processor keeps. No tensors.

A request has a slot, a length and a list of pages; a page has a count of the requests that share it. What changes is
returned as `Changes`, for whoever has it on a card as well.
"""

import itertools
from dataclasses import dataclass, field

from lab.arguments import expect_count

_generations = itertools.count(1)  # of all pools: a request of another pool is not mistaken for one of this


class PoolFull(RuntimeError):
    """A pool has no room. lacking: pages, or 0 where a slot lacks."""

    def __init__(self, message, lacking):
        super().__init__(message)
        self.lacking = lacking


@dataclass(frozen=True)
class Request:
    """A request of a cache: its slot, a row of `table` and `lens`; and a number that is never given again, by which one
    that was freed is recognised."""

    slot: int
    generation: int


@dataclass
class Changes:
    """What a step changed: lengths {slot: tokens}; pages [(slot, number in the request, page)]; copies [(from, to)] of
    pages, to be made before anything is written."""

    lens: dict = field(default_factory=dict)
    pages: list = field(default_factory=list)
    copies: list = field(default_factory=list)


class Pool:
    """n_pages pages of page_size tokens for max_requests requests, each of max_len tokens at most."""

    def __init__(self, n_pages, page_size, max_requests, max_len):
        self.n_pages, self.page_size, self.max_requests, self.max_len = n_pages, page_size, max_requests, max_len
        self.lens = [0] * max_requests
        self.pages = [[] for _ in range(max_requests)]  # of each slot
        self.shared = [0] * n_pages  # requests that have this page
        self.generations = [0] * max_requests  # of who has the slot; 0: nobody
        self.free_pages = list(range(n_pages - 1, -1, -1))  # the last one is taken first
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.version = 0  # another one whenever requests may share other pages than before

    def expect(self, where, requests):
        """The slots of these requests, each of which must be one of this pool, there once, and not freed."""
        if isinstance(requests, Request):
            raise TypeError(f"{where}: requests must be a sequence of requests, got one: write [request]")
        slots, generations = [], self.generations
        for n, one in enumerate(requests):
            if type(one) is not Request:
                raise TypeError(
                    f"{where}: requests[{n}] must be a request that the cache gave, got {type(one).__name__}"
                )
            if not (-1 < one.slot < self.max_requests and 0 != one.generation == generations[one.slot]):
                raise ValueError(f"{where}: requests[{n}] must be alive, got one that was freed, or is another cache's")
            slots.append(one.slot)
        return slots

    def new(self):
        """(request, Changes): one without tokens."""
        if not self.free_slots:
            raise PoolFull(f"new: all {self.max_requests} slots are taken; free a request, or ask for max_requests", 0)
        slot = self.free_slots.pop()
        self.generations[slot] = next(_generations)
        return Request(slot, self.generations[slot]), Changes(lens={slot: 0})

    def reserve(self, where, requests, new):
        """Room for so many new tokens of each of these requests: Changes. Their last page becomes their own.

        PoolFull, with nothing changed, where the pool has not enough pages.
        """
        slots = self.expect(where, requests)
        if len(set(slots)) < len(slots):
            raise ValueError(f"{where}: requests must all be different, got one twice")
        expect_count(where, "new", new, low=1)
        changes, needed = Changes(), 0
        for n, slot in enumerate(slots):
            if self.lens[slot] + new > self.max_len:
                raise ValueError(
                    f"{where}: a request has at most {self.max_len} tokens, max_len: requests[{n}] has "
                    f"{self.lens[slot]}, and {new} more were asked for"
                )
            needed += -(-(self.lens[slot] + new) // self.page_size) - len(self.pages[slot]) + self._copies(slot)
        needed -= self._given_up(slots)
        if needed > len(self.free_pages):
            lacking, free = needed - len(self.free_pages), len(self.free_pages)
            pages = "1 page" if lacking == 1 else f"{lacking} pages"
            raise PoolFull(f"{where}: the pool lacks {pages}: {needed} needed, {free} free", lacking)
        for slot in slots:
            self._reserve(slot, new, changes)
        return changes

    def fork(self, request):
        """(request, Changes): a second one with all tokens of the first, on the same pages."""
        (slot,) = self.expect("fork", [request])
        found, changes = self.new()
        self.version += 1
        self.lens[found.slot], self.pages[found.slot] = self.lens[slot], list(self.pages[slot])
        for page in self.pages[slot]:
            self.shared[page] += 1
        changes.lens[found.slot] = self.lens[slot]
        changes.pages = [(found.slot, n, page) for n, page in enumerate(self.pages[slot])]
        return found, changes

    def free(self, request):
        """Changes: the request is no more, and its pages are free, but for those that others share."""
        (slot,) = self.expect("free", [request])
        for page in reversed(self.pages[slot]):
            self._let_go(page)
        self.lens[slot], self.pages[slot], self.generations[slot] = 0, [], 0
        self.version += 1
        self.free_slots.append(slot)
        return Changes(lens={slot: 0})

    def _copies(self, slot):
        """1 if the request's last page is partly filled, and shared: it must be copied before it is written to."""
        return int(self.lens[slot] % self.page_size > 0 and self.shared[self.pages[slot][-1]] > 1)

    def _given_up(self, slots):
        """Copies that are not needed after all: of requests that share a last page, the last one left may keep it."""
        sharing = {}
        for slot in slots:
            if self._copies(slot):
                page = self.pages[slot][-1]
                sharing[page] = sharing.get(page, 0) + 1
        return sum(count == self.shared[page] for page, count in sharing.items())

    def _reserve(self, slot, new, changes):
        pages = self.pages[slot]
        if self._copies(slot):
            page = self._take()
            changes.copies.append((pages[-1], page))
            self._let_go(pages[-1])
            pages[-1] = page
            changes.pages.append((slot, len(pages) - 1, page))
        self.lens[slot] += new
        while len(pages) * self.page_size < self.lens[slot]:
            pages.append(self._take())
            changes.pages.append((slot, len(pages) - 1, pages[-1]))
        changes.lens[slot] = self.lens[slot]

    def _take(self):
        page = self.free_pages.pop()
        self.shared[page] = 1
        return page

    def _let_go(self, page):
        self.shared[page] -= 1
        if self.shared[page] == 0:
            self.free_pages.append(page)
