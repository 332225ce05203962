"""Asynchronous copies (cp.async): the bytes arrive when they are waited for, so that a missing wait shows."""

import numpy as np

from simt.arithmetic.lazy import unpack

FIRST_BYTES = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], np.uint32)


class Copies:
    """The part of a Memory (accesses.py) that copies from global to shared memory, later."""

    def __init__(self, shape):
        self.copies, self.commits = [], 0  # those under way; how often they were committed
        self.issued, self.promises = 0, []  # how many there were; those that an mbarrier counts, see `promise`
        self.counted = np.zeros(shape, np.int64)  # which of them it counts already, for races.py

    def copy(self, site, target, target_offset, source, source_offset, size, given, mask):
        """cp.async: `given` bytes (None: all `size`) from global memory, the rest zeros, to shared memory."""
        words = size // 4
        reading = mask
        if given is not None:
            present = unpack(given, 32) > 0
            reading = present if mask is None else mask & present
            if present.all():
                reading = mask
        if reading is not None and not reading.any():
            values = [np.zeros((1, 1, 1), np.uint32)] * words
        else:
            values = self.load(site, "global", source, source_offset, np.dtype(np.uint32), words, reading)
            values = values if words > 1 else [values]
        if given is not None:
            left = np.asarray(unpack(given, 32), np.int64)
            kept = [np.clip(left - 4 * k, 0, 4) for k in range(words)]  # bytes of each word
            values = [v & FIRST_BYTES[n] for v, n in zip(values, kept)]
        memory, pattern, shift, low, whole = self.place("shared", target, target_offset, size, mask, site)
        lanes, flat = self.active_addresses("shared", memory, pattern, shift, size, mask, site)
        for buffer, _, where in self.parts(memory, lanes, flat):
            buffer.written.bytes[where[:, None] + np.arange(size)] = 0
        memory.generation += 1
        self.issued += 1
        if self.races is not None:
            self.note_race("store", memory, pattern, shift, size, mask, (site, "issue"), size, flat=flat)
            self.note_source(site, source, source_offset, size, reading)
        self.copies.append((site, target, target_offset, values, mask, self.commits, self.issued))

    def commit(self, mask):
        if mask is None and type(self.commits) is int:
            self.commits += 1
        else:
            self.commits = self.commits + (np.ones(self.shape, int) if mask is None else mask.astype(int))

    def wait(self, left, mask):
        """cp.async.wait_group: complete all but the `left` groups that were committed last."""
        self.complete(lambda group, number: group < self.commits - left, mask)

    def promise(self, address, phases, lanes):
        """cp.async.mbarrier.arrive: all that these lanes have issued counts at an mbarrier, for its phase by block."""
        self.promises.append((address, phases, lanes, self.issued))
        if self.races is not None:
            for site, target, offset, values, own, _, number in self.copies:
                fresh = lanes & (number > self.counted) & (True if own is None else own)
                if fresh.any():  # the mbarrier's arrival comes behind what they write
                    size = 4 * len(values)
                    memory, pattern, shift, _, _ = self.place("shared", target, offset, size, fresh, site)
                    _, flat = self.active_addresses("shared", memory, pattern, shift, size, fresh, site)
                    self.note_race("store", memory, pattern, shift, size, fresh, (site, "arrive"), 4, values, flat)
            self.counted = np.where(lanes, self.issued, self.counted)

    def land(self, address, blocks, phases):
        """Somebody has seen the phases of the mbarrier at `address` complete: what counted there has arrived."""
        rest = []
        for promise in self.promises:
            there, before, lanes, issued = promise
            if there == address:
                seen = np.zeros(self.shape[0], bool)
                seen[blocks] = before[blocks] < phases[blocks]
                now = lanes & seen.reshape(-1, 1, 1)
                races, self.races = self.races, None  # they have been noted
                self.complete(lambda group, number: np.broadcast_to(number <= issued, self.shape), now)  # noqa: B023
                self.races = races
                promise = (there, before, lanes & ~now, issued)
            if promise[2].any():
                rest.append(promise)
        self.promises = rest

    def complete(self, ready, mask):
        """The copies of these lanes arrive that `ready(group, number)` names."""
        remaining = []
        for site, target, offset, values, lanes, group, number in self.copies:
            done = np.asarray(ready(group, number))
            if mask is None and done.ndim == 0 and done:
                self.arrive(site, target, offset, values, lanes, number)
                continue
            if done.ndim == 0 and not done:
                remaining.append((site, target, offset, values, lanes, group, number))
                continue
            everyone = np.ones(self.shape, bool)
            now = everyone & done & (True if mask is None else mask) & (True if lanes is None else lanes)
            later = ~now if lanes is None else ~now & lanes
            if np.count_nonzero(now):
                self.arrive(site, target, offset, values, now, number)
            if np.count_nonzero(later):
                remaining.append((site, target, offset, values, later, group, number))
        self.copies = remaining

    def arrive(self, site, target, offset, values, mask, number):
        if self.describe.launch.races is not None:
            self.read_source(self.describe.launch.races.sources, number, mask)
        site = None if self.races is None else (site, "arrive")
        self.store(site, "shared", target, offset, values, np.dtype(np.uint32), mask)

    # An asynchronous copy reads until its thread has waited for it: nobody may write there before.

    def note_source(self, site, source, offset, size, mask):
        memory, pattern, shift, _, _ = self.place("global", source, offset, size, mask, site)
        lanes, flat = self.active_addresses("global", memory, pattern, shift, size, mask, site)
        if lanes.size:
            line = self.describe.race_facts(site)[0]
            self.races.sources[id(self), self.issued] = (line, size, lanes, flat, *self.describe.who(lanes))

    def read_source(self, sources, number, mask):
        found = sources.pop((id(self), number), None)
        if found is not None and mask is not None:
            line, size, lanes, *more = found
            left = ~np.broadcast_to(mask, self.shape).reshape(-1)[lanes]
            if left.any():
                sources[id(self), number] = (line, size, lanes[left], *(a[left] for a in more))

    def check_sources(self, kind, pattern, shift, size, mask, site):
        """A store or atomic to global memory: does an asynchronous copy still read there?"""
        low, high = (n + shift for n in pattern.known.range(True))
        for line, width, _, flat, blocks, threads in self.races.sources.values():
            if low < flat.max() + width and flat.min() < high + size:
                lanes = np.flatnonzero(np.broadcast_to(True if mask is None else mask, self.shape))
                places = np.broadcast_to(pattern.array, self.shape).astype(np.int64).reshape(-1)[lanes] + shift
                words = [(a[:, None] + np.arange(0, n, 4)) // 4 for a, n in ((flat, width), (places, size))]
                hit = np.isin(words[1], words[0]).any(axis=1)
                if hit.any():
                    at = int(np.argmax(hit))
                    source = int(np.argmax(np.isin(words[0], words[1][at]).any(axis=1)))
                    self.describe.race_with_copy(
                        kind, int(places[at]), int(lanes[at]), site, (line, int(blocks[source]), int(threads[source]))
                    )
