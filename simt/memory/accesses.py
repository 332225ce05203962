"""Reading and writing memory for many threads at once: loads, stores, atomics, and what they cost.

An access comes as a register (an int, or array + offset: see simt/arithmetic/lazy.py), a constant, a type, and the mask
of the threads that take part (None: all). Sectors and wavefronts are counted once for each pattern of addresses, and
kept with it (spaces.py).
"""

import numpy as np

from simt.arithmetic.lazy import Known
from simt.arithmetic.rounding import flush
from simt.errors import MemoryFault
from simt.memory import sectors, wavefronts
from simt.memory.aside import Aside
from simt.memory.clocks import WARPS
from simt.memory.copies import Copies
from simt.memory.noting import Noting
from simt.memory.spaces import (
    LOCAL_WINDOW,
    REGION,
    SHARED_WINDOW,
    Space,
    full_strides,
    gather,
    pattern_of,
    scatter,
)
from simt.ptx.types import broadcast
from simt.report import LINK, REQUESTS, SHARED, THREADS

KEPT = 64  # costs of a pattern
MARKS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
ONES = {n: MARKS[n].type(int("01" * n, 16)) for n in MARKS}
ONES_ARRAY = {n: np.full((1, 1, 1), ONES[n]) for n in MARKS}


class Memory(Copies, Noting):
    """All memory of one launch, and the counters of its accesses. `sites` counts by memory instruction."""

    def __init__(self, buffers, shape, shared_size, local_size, sites, describe, races=None):
        super().__init__(shape)
        self.buffers = buffers  # Space by region number
        self.shape = shape  # (blocks, warps, 32) of this part of the grid
        blocks, warps, lanes = shape
        self.describe, self.races = describe, races
        self.numbers = describe.race_numbers  # of the blocks, by which races are known
        self.sites, self.is_counted = sites, describe.launch.counted
        step = -(-shared_size // 128) * 128
        self.shared = Space(
            "shared memory", np.zeros(blocks * step, np.uint8), 0, shared_size, (step, 0, 0), shape
        ).watch()
        thread = -(-local_size // 16) * 16
        self.local = Space(
            "local memory",
            np.zeros(blocks * warps * lanes * thread, np.uint8),
            0,
            local_size,
            (warps * lanes * thread, lanes * thread, thread),
            shape,
        ).watch()
        self.one = Known(np.zeros((1, 1, 1), np.uint64))  # for addresses that all threads share
        self.version = 0  # grows with every store: how a waiting loop knows that looking again may help
        self.arriving = {}  # for simt/hopper/tma.py: loads that nobody has seen arrive
        self.aside = Aside(self.shared if describe.program.only_threads_share else None, True)  # for races.py
        self.warp_numbers = self.numbers[:, None] * WARPS + np.arange(warps)

    def free(self):
        """The threads have left: give up what was theirs alone, which may be large."""
        self.shared = self.local = None

    # Finding the place.

    def place(self, space, address, offset, size, mask, site):
        """(Space or None, Pattern, shift, lowest address, whole) of an access, or a MemoryFault.

        The address of each lane is the pattern's plus `shift`. whole: it is valid for all lanes, taking part or not.
        """
        if type(address) is int:
            low = high = address + offset
            known, shift = self.one, low
        else:
            found = address.range(True)
            if found is None:
                address = address.settled()
                found = address.range(True)
            low, high, shift = found[0] + offset, found[1] + offset, found[2] + offset
            known = address.known
        if space == "generic":
            space, low, high, shift = self.window(low, high, shift)
        if space == "global":
            memory = self.buffers.get(low >> REGION)
        elif space == "shared":
            memory = self.shared
        else:
            memory = self.local
        pattern = pattern_of(known)
        if memory is not None and low >= memory.origin and high + size <= memory.origin + memory.size:
            residue = pattern.residue(size)
            if residue is not None and (residue + shift) % size == 0:
                return memory, pattern, shift, low, True
        if mask is None:
            self.active_addresses(space, memory, pattern, shift, size, None, site)
        return memory, pattern, shift, low, False

    def windows(self, address, offset, mask):
        """[(space, address, offset, lanes)] where the lanes' generic addresses lie in different memories, else None."""
        if type(address) is int:
            return None
        found = address.range(True)
        if found is not None and self.window(found[0] + offset, 0, 0)[0] == self.window(found[1] + offset, 0, 0)[0]:
            return None
        places = address.array().view(np.int64) + offset
        apart = []
        for name, low, high in (
            ("global", -(1 << 63), SHARED_WINDOW),
            ("shared", SHARED_WINDOW, LOCAL_WINDOW),
            ("local", LOCAL_WINDOW, 1 << 62),
        ):
            lanes = (places >= low) & (places < high) & (True if mask is None else mask)
            if lanes.any():
                apart.append((name, address, offset - max(low, 0), lanes))
        return apart

    def rejoin(self, found, apart, count):
        """One result of loads made apart: each lane's own."""
        out = [np.zeros(self.shape, (found[0] if count == 1 else found[0][0]).dtype) for _ in range(count)]
        for values, part in zip(found, apart):
            for whole, value in zip(out, [values] if count == 1 else values):
                np.copyto(whole, value, where=part[3])
        return out[0] if count == 1 else out

    def window(self, low, high, shift):
        """A generic address: which space it means."""
        for name, base in (("local", LOCAL_WINDOW), ("shared", SHARED_WINDOW)):
            if low >= base:
                return name, low - base, high - base, shift - base
        return "global", low, high, shift

    def active_addresses(self, space, memory, pattern, shift, size, active, site):
        """(numbers, addresses) of the lanes that take part; a MemoryFault if one is out of bounds or misaligned."""
        addresses = broadcast(pattern.array, self.shape).astype(np.int64) + shift
        lanes = np.arange(addresses.size) if active is None else np.flatnonzero(broadcast(active, self.shape))
        flat = addresses.reshape(-1)[lanes]
        if space == "global":
            regions = flat >> REGION
            inside = np.zeros(flat.size, bool)
            for region in regions[:1] if (regions == regions[:1]).all() else np.unique(regions):
                buffer = self.buffers.get(int(region))
                if buffer is not None:
                    inside |= (
                        (regions == region) & (flat >= buffer.origin) & (flat + size <= buffer.origin + buffer.size)
                    )
        else:
            inside = (flat >= 0) & (flat + size <= memory.size)
        bad = ~inside | (flat % size != 0)
        if bad.any():
            at = int(np.argmax(bad))
            kind = "misaligned" if inside[at] else "outside"
            raise MemoryFault(self.describe.access(self, kind, space, int(flat[at]), size, int(lanes[at]), site))
        return lanes, flat

    # Loads.

    def load(self, site, space, address, offset, dtype, count, mask):
        """`count` neighbouring elements of `dtype` for every thread: one array, or a tuple of `count`."""
        if space == "generic" and (apart := self.windows(address, offset, mask)):
            found = [self.load(site, *part[:3], dtype, count, part[3]) for part in apart]
            return self.rejoin(found, apart, count)
        item = dtype.itemsize
        size = item * count
        memory, pattern, shift, low, whole = self.place(space, address, offset, size, mask, site)
        if not whole:
            return self.load_some(site, memory, space, pattern, shift, dtype, count, mask)
        if memory.written is not None:
            self.check_written(memory, pattern, shift, low, size, mask, site)
        out = [gather(memory, pattern, shift, low, dtype, k * item) for k in range(count)]
        self.count(site, memory, pattern, shift, size, mask)
        if self.races is not None:
            self.note_race("load", memory, pattern, shift, size, mask, site, item)
        return out[0] if count == 1 else out

    def load_some(self, site, memory, space, pattern, shift, dtype, count, mask):
        """A load in which some lanes that do not take part point nowhere."""
        size = dtype.itemsize * count
        out = [np.zeros(self.shape, dtype) for _ in range(count)]
        space = self.space_name(memory, space)
        lanes, flat = self.active_addresses(space, memory, pattern, shift, size, mask, site)
        if lanes.size:
            for buffer, chosen, where in self.parts(memory, lanes, flat):
                if buffer.written is not None and not buffer.written.bytes[where[:, None] + np.arange(size)].all():
                    self.unwritten(buffer, flat, lanes, where, size, site)
                for k in range(count):
                    part = buffer.view(dtype)[(where + k * dtype.itemsize) // dtype.itemsize]
                    out[k].reshape(-1)[chosen] = part
            self.count(site, memory or self.buffers[int(flat[0]) >> REGION], pattern, shift, size, mask)
            if self.races is not None:
                self.note_race("load", memory, pattern, shift, size, mask, site, dtype.itemsize, flat=flat)
        return out[0] if count == 1 else out

    def parts(self, memory, lanes, flat):
        """[(Space, lanes, byte positions in its bytes)] of accesses that are known to be inside."""
        if memory is not None and memory.steps != (0, 0, 0):
            blocks, rest = np.divmod(lanes, self.shape[1] * self.shape[2])
            warps, lane = np.divmod(rest, self.shape[2])
            own = blocks * memory.steps[0] + warps * memory.steps[1] + lane * memory.steps[2]
            return [(memory, lanes, flat + own)]
        regions = flat >> REGION
        if regions.size and (regions == regions[0]).all():
            buffer = self.buffers[int(regions[0])]
            return [(buffer, lanes, flat - buffer.origin)]
        found = []
        for region in np.unique(regions):
            here = regions == region
            buffer = self.buffers[int(region)]
            found.append((buffer, lanes[here], flat[here] - buffer.origin))
        return found

    def check_written(self, memory, pattern, shift, low, size, mask, site):
        """Shared and local memory hold nothing until something is stored: reading it before is a fault."""
        key = (memory.generation, shift, size)
        if key in pattern.verified:
            return
        marks = gather(memory.written, pattern, shift, low, MARKS[size], 0) if size <= 8 else None
        if marks is None:
            marks = gather(memory.written, pattern, shift, low, MARKS[8], 0)
            marks = np.minimum(marks, gather(memory.written, pattern, shift, low, MARKS[8], 8))
        good = marks == ONES[min(size, 8)]
        if mask is None:
            if np.count_nonzero(good) == good.size:
                if len(pattern.verified) > 4096:
                    pattern.verified.clear()
                pattern.verified.add(key)
                return
        elif (good | ~mask).all():
            return
        bad = np.broadcast_to(~good if mask is None else ~good & mask, self.shape)
        lane = int(np.flatnonzero(bad)[0])
        address = int(np.broadcast_to(pattern.array, self.shape).reshape(-1)[lane]) + shift
        self.raise_unwritten(memory, address, lane, size, site)

    def unwritten(self, memory, flat, lanes, where, size, site):
        at = int(np.argmin(memory.written.bytes[where[:, None] + np.arange(size)].all(axis=1)))
        self.raise_unwritten(memory, int(flat[at]), int(lanes[at]), size, site)

    def raise_unwritten(self, memory, address, lane, size, site):
        if self.describe.looks_ahead(site):
            return
        kind = "unwritten"
        if (self.copies or self.arriving) and memory is self.shared:
            kind = "pending"
        raise MemoryFault(self.describe.access(self, kind, memory.name.split()[0], address, size, lane, site))

    # Stores.

    def store(self, site, space, address, offset, values, dtype, mask):
        """Store `values`, a list of arrays of `dtype`, at neighbouring elements."""
        if space == "generic" and (apart := self.windows(address, offset, mask)):
            for part in apart:
                self.store(site, *part[:3], values, dtype, part[3])
            return
        self.version += 1
        item = dtype.itemsize
        size = item * len(values)
        memory, pattern, shift, low, whole = self.place(space, address, offset, size, mask, site)
        if not whole or (mask is not None and not self.fits(memory, pattern, values, mask)):
            return self.store_some(site, memory, space, pattern, shift, values, dtype, mask, whole)
        if not memory.writable:
            lanes, flat = self.active_addresses("global", memory, pattern, shift, size, mask, site)
            self.raise_read_only(flat, lanes, size, site)
        if self.races is not None:
            self.note_race("store", memory, pattern, shift, size, mask, site, item, values)
        for k, value in enumerate(values):
            scatter(memory, pattern, shift, low, dtype, k * item, value, mask)
        if memory.written is not None:
            for k in range(0, size, min(size, 8)):
                width = min(size, 8)
                scatter(memory.written, pattern, shift, low, MARKS[width], k, ONES_ARRAY[width], mask)
        self.count(site, memory, pattern, shift, size, mask)

    def store_some(self, site, memory, space, pattern, shift, values, dtype, mask, whole):
        """A store by some threads, each looked at by itself."""
        size = dtype.itemsize * len(values)
        lanes, flat = self.active_addresses(self.space_name(memory, space), memory, pattern, shift, size, mask, site)
        if not lanes.size:
            return
        parts = self.parts(memory, lanes, flat)
        for buffer, chosen, where in parts:
            if not buffer.writable:
                self.raise_read_only(where + buffer.origin, chosen, size, site)
        if self.races is not None:
            active = None if whole else flat
            self.note_race("store", memory, pattern, shift, size, mask, site, dtype.itemsize, values, active)
        for buffer, chosen, where in parts:
            for k, value in enumerate(values):
                picked = pick(value, chosen, self.shape)
                buffer.view(dtype)[(where + k * dtype.itemsize) // dtype.itemsize] = picked
            if buffer.written is not None:
                buffer.written.bytes[where[:, None] + np.arange(size)] = 1
        self.count(site, buffer, pattern, shift, size, mask)

    def raise_read_only(self, addresses, lanes, size, site):
        raise MemoryFault(
            self.describe.access(self, "read-only", "global", int(addresses[0]), size, int(lanes[0]), site)
        )

    def fits(self, memory, pattern, values, mask):
        """Can a masked store be made as one assignment: no two lanes on one address?"""
        if pattern.strides is None:
            return False
        shape, _ = full_strides(memory, pattern)
        return all(n <= m for a in (mask, *values) for n, m in zip(a.shape, shape))

    def space_name(self, memory, space):
        if memory is None or memory.steps == (0, 0, 0):
            return "global"
        return memory.name.split()[0]

    # Atomics.

    def atomic(self, site, space, address, offset, dtype, update, values, mask, wanted):
        """update(old, *values) -> new at each address, one thread after the other; the old values if `wanted`."""
        if space == "generic" and (apart := self.windows(address, offset, mask)):
            found = [self.atomic(site, *part[:3], dtype, update, values, part[3], wanted) for part in apart]
            return self.rejoin(found, apart, 1)
        size = dtype.itemsize
        memory, pattern, shift, low, whole = self.place(space, address, offset, size, mask, site)
        lanes, flat = self.active_addresses(self.space_name(memory, space), memory, pattern, shift, size, mask, site)
        out = np.zeros(self.shape, dtype)
        changed = not wanted  # a lock that is still taken is no news to those who wait
        compares, wrote = len(values) == 2, np.zeros(self.shape, bool)  # compare and swap may fail
        for buffer, chosen, where in self.parts(memory, lanes, flat):
            if not buffer.writable:
                self.raise_read_only(where + buffer.origin, chosen, size, site)
            if buffer.written is not None and not buffer.written.bytes[where].all():
                self.unwritten(buffer, flat, lanes, where, size, site)
            index = where // size
            view = buffer.view(dtype)
            given = [pick(v, chosen, self.shape) for v in values]
            before = view[index] if wanted else None
            flushed = update is np.add and dtype == np.float32 and self.space_name(memory, space) == "global"
            tiny = flushed and (is_tiny(given[0]) or is_tiny(view[index]))
            old = one_by_one(view, index, flushed_add if tiny else update, given, wanted)
            if old is not None:
                out.reshape(-1)[chosen] = old
            changed = changed or bool((view[index] != before).any())
            if compares:
                wrote.reshape(-1)[chosen] = old == given[0]
        self.version += changed
        if lanes.size:
            self.count(site, buffer, pattern, shift, size, mask)
        if self.races is not None and lanes.size:
            written = [wrote] if compares else None
            self.note_race("atomic", memory, pattern, shift, size, mask, site, size, written, flat)
        return out

    def atomics(self, site, space, address, offset, dtype, update, values, mask, wanted):
        """An atomic on a vector: one on each of its elements, which are neighbours and together aligned."""
        size = dtype.itemsize * len(values)
        memory, pattern, shift, _, whole = self.place(space, address, offset, size, mask, site)
        if not whole:
            self.active_addresses(self.space_name(memory, space), memory, pattern, shift, size, mask, site)
        sites = [site] + [(site, "next")] * (len(values) - 1)  # it is counted once: it lies in one sector
        places = range(offset, offset + size, dtype.itemsize)
        return [
            self.atomic(s, space, address, at, dtype, update, [v], mask, wanted)
            for s, at, v in zip(sites, places, values)
        ]

    # Counting.

    def count(self, site, memory, pattern, shift, size, mask):
        """Add what an access costs to its instruction's counters: requests and sectors, or wavefronts."""
        far = memory.owner is not None and memory.owner != self.describe.launch.device
        if far:
            self.describe.check_scope(site, memory)
        if site is None or type(site) is tuple or not self.is_counted:
            return
        counter = self.sites[site]
        if counter.kind is None or memory is self.local:
            return
        shared = memory is self.shared
        key = (shift % (128 if shared else 32), size, shared, counter.kind, self.shape, id(mask))
        found = pattern.counts.get(key)
        if found is None:
            if len(pattern.counts) >= KEPT:
                pattern.counts.clear()
            found = pattern.counts[key] = (*self.cost(counter, pattern, shift, size, mask, shared), mask)
        counter.requests += found[0]
        counter.sectors += found[1]
        counter.ideal += found[2]
        if far:
            self.describe.program.tally(counter.line, LINK.format(counter.kind), sectors.BYTES * found[1])
        if self.describe.launch.by_warp is not None:
            self.count_by_warp(counter.kind, shared, mask)

    def count_by_warp(self, kind, shared, mask):
        """Note which warps made this request, and with how many threads."""
        if shared:
            kind = "atom" if kind == "red" else kind
        name = (SHARED if shared else REQUESTS).format("ld" if kind == "ldmatrix" else kind)
        launch = self.describe.launch
        active = np.broadcast_to(True if mask is None else mask, self.shape)
        found = {name: active.any(axis=2)}
        if not shared:
            found[THREADS.format(kind)] = active.sum(axis=2)
        for name, each in found.items():
            made = launch.by_warp.setdefault(name, np.zeros((launch.blocks, launch.warps), np.int64))
            made[self.describe.numbers] += each

    def cost(self, counter, pattern, shift, size, mask, shared):
        """(requests, sectors or wavefronts, wavefronts without any conflict)."""
        array, period = pattern.array, 128 if shared else 32
        if mask is None and pattern.strides is not None and not any(n % period for n in pattern.strides[:2]):
            array = array[:1, :1]  # all warps lie alike in sectors and banks: one stands for all
        addresses = array.astype(np.int64) + shift
        if addresses.shape[2] == 1 and (counter.kind in ("atom", "red") or mask is not None):
            addresses = np.broadcast_to(addresses, addresses.shape[:2] + (32,))
        if counter.uniform and counter.kind in ("atom", "red") and not shared:
            each = (np.ones(addresses.shape[:2], int) if mask is None else mask.any(axis=2)).astype(int)
        elif shared:
            return self.shared_cost(counter, addresses, size, mask)
        elif counter.kind in ("atom", "red"):
            each = sectors.atomic_sectors_per_warp(addresses, size, mask)
        else:
            each = sectors.sectors_per_warp(addresses, size, mask)
        return self.total(each > 0), self.total(each), 0

    def shared_cost(self, counter, addresses, size, mask):
        store = counter.kind != "ld"
        size = counter.joined // 8 or size
        each, ideal = wavefronts.wavefronts_and_ideal(addresses, size, mask, store=store)
        return self.total(each > 0), self.total(each), self.total(ideal)

    def total(self, each):
        """The sum over all warps of something known per (block, warp), axes of length 1 standing for all."""
        each = np.asarray(each)
        return int(each.sum()) * (self.shape[0] * self.shape[1]) // each.size


def pick(value, lanes, shape):
    """The values of the given flat lanes of a register."""
    if value.size == 1:
        return np.broadcast_to(value.reshape(()), lanes.shape)
    return broadcast(value, shape).reshape(-1)[lanes]


def is_tiny(values):
    """Could sums with these float32 numbers be subnormal? Those of larger ones are 0, or 2**-125 or more."""
    return bool(((values != 0) & (np.abs(values) < np.float32(2.0**-102))).any())


def flushed_add(old, value):
    """Float atomics on global memory take subnormal numbers for 0, and give 0 instead of one; shared ones do not."""
    return flush(flush(old) + flush(value))


def one_by_one(view, index, update, given, wanted):
    """Atomics: the k-th thread on each address takes part in pass k. Returns the old values if wanted."""
    if not wanted and getattr(update, "at", None) is not None and len(given) == 1:
        update.at(view, index, given[0])
        return None
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(first)
    rank = np.arange(index.size) - np.repeat(starts, np.diff(np.r_[starts, index.size]))
    old = np.empty(index.size, view.dtype)
    if update is np.add and view.dtype.kind in "iu" and rank.max(initial=0) > 0:
        value = given[0][order]
        sums = np.cumsum(value, dtype=view.dtype)
        before = sums - value
        before -= np.repeat(before[starts], np.diff(np.r_[starts, index.size]))
        old[order] = view[ordered] + before
        np.add.at(view, index, given[0])
        return old
    by_rank = np.argsort(rank, kind="stable")
    ends = np.cumsum(np.bincount(rank))
    begin = 0
    for end in ends:
        lanes = order[by_rank[begin:end]]
        where = index[lanes]
        old[lanes] = view[where]
        view[where] = update(old[lanes], *(g[lanes] for g in given))
        begin = end
    return old
