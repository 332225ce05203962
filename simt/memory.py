"""Memory: where an address points, and reading and writing it for many threads at once.

Global buffers are the arrays that a kernel was given, each at an address of its own, far apart, so that a stray access
is noticed and can be named. Shared memory has one copy a block, local memory one a thread.

An access comes as a register (an int, or array + offset: see integers.py), a constant, a type, and the mask of the
threads that take part (None: all). What is worked out about the array is kept with it (`Pattern`), so that a pointer
that moves through a loop costs one lookup: are its elements evenly spaced, which element is each, how many sectors.
"""

import numpy as np

from simt import banks, coalesce
from simt.aside import Aside, Piece, one_each
from simt.errors import MemoryFault
from simt.integers import Known, unpack
from simt.report import REQUESTS, SHARED
from simt.rounding import flush
from simt.types import broadcast

REGION = 36  # each buffer owns 2**36 bytes of addresses
SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61  # generic addresses of shared and local memory
KEPT = 64


class Pattern:
    """How the elements of a Known lie: signed addresses, even spacing along (block, warp, lane) or None."""

    __slots__ = ("known", "array", "strides", "residues", "indexes", "counts", "verified")

    def __init__(self, known):
        self.known = known
        self.array = known.array.view(np.int64 if known.width == 64 else np.int32)
        self.strides = spacing(self.array)
        self.residues, self.indexes, self.counts, self.verified = {}, {}, {}, set()

    def residue(self, size):
        """What all elements leave when divided by `size`, or None if they differ."""
        found = self.residues.get(size, -1)
        if found == -1:
            first = int(self.array[0, 0, 0]) % size
            if self.strides is not None:
                same = not any(s % size for s in self.strides)
            else:
                same = not ((self.array - first) & (size - 1)).any()
            found = self.residues[size] = first if same else None
        return found

    def index(self, size, space):
        """Element numbers, counted from the lowest address, in a memory that has a copy per block or thread."""
        key = (size, space.steps)
        found = self.indexes.get(key)
        if found is None:
            low = self.known.range(True)[0]
            found = (self.array.astype(np.int64) - low) // size
            for axis, (step, length) in enumerate(zip(space.steps, space.shape)):
                if step:
                    along = [1, 1, 1]
                    along[axis] = length
                    found = found + (np.arange(length) * (step // size)).reshape(along)
            self.indexes[key] = found
        return found


def spacing(a):
    """Strides (block, warp, lane) in bytes if a[i, j, k] = a[0, 0, 0] + i s0 + j s1 + k s2, else None."""
    first = a[0, 0, 0]
    steps = [a[1, 0, 0] - first, 0, 0] if a.shape[0] > 1 else [0, 0, 0]
    if a.shape[1] > 1:
        steps[1] = a[0, 1, 0] - first
    if a.shape[2] > 1:
        steps[2] = a[0, 0, 1] - first
    corner = sum(int(s) * (n - 1) for s, n in zip(steps, a.shape))
    if a[-1, -1, -1] - first != corner:
        return None
    i, j, k = (np.arange(n).reshape(shape) for n, shape in zip(a.shape, ((-1, 1, 1), (1, -1, 1), (1, 1, -1))))
    if ((i * steps[0] + j * steps[1] + k * steps[2]) == a - first).all():
        return tuple(int(s) for s in steps)
    return None


def pattern_of(known):
    found = known.patterns.get(0)
    if found is None:
        found = known.patterns[0] = Pattern(known)
    return found


class Space:
    """Some bytes of memory. `steps` are bytes from one block's, warp's, lane's copy to the next (0: the same copy)."""

    def __init__(self, name, data, origin, size, steps=(0, 0, 0), shape=(1, 1, 1), writable=True, dtype=None):
        self.name, self.bytes, self.origin, self.size = name, data, origin, size
        self.steps, self.shape, self.writable, self.dtype = steps, shape, writable, dtype
        self.views = {}
        self.written = None  # per byte, whether something was stored there (shared and local memory)
        self.generation = 0

    def view(self, dtype):
        """The bytes from the first aligned address on as elements of `dtype`; a rest too short for one is left out."""
        found = self.views.get(dtype)
        if found is None:
            item = np.dtype(dtype).itemsize
            aligned = self.bytes[-self.origin % item :]
            found = self.views[dtype] = aligned[: aligned.size // item * item].view(dtype)
        return found

    def watch(self):
        """Start to remember which bytes have been written."""
        self.written = Space(self.name, np.zeros(self.bytes.size, np.uint8), 0, self.size, self.steps, self.shape)
        return self


class Memory:
    """All memory of one launch, and the counters of its accesses. `sites` counts by memory instruction."""

    def __init__(self, buffers, shape, shared_size, local_size, sites, describe, races=None):
        self.buffers = buffers  # Space by region number
        self.shape = shape  # (blocks, warps, 32) of this part of the grid
        blocks, warps, lanes = shape
        self.describe, self.races = describe, races
        self.sites = sites
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
        self.arriving = {}  # for simt/bulk.py: loads that nobody has seen arrive
        self.copies, self.commits = [], 0  # asynchronous copies under way; how often they were committed
        self.issued, self.promises = 0, []  # how many there were; those that an mbarrier counts, see `promise`
        self.counted = np.zeros(shape, np.int64)  # which of them it counts already, for simt/races.py
        self.aside = Aside()  # of shared memory, for simt/races.py

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
        lanes = np.flatnonzero(np.broadcast_to(True if active is None else active, self.shape))
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
                self.note_race("load", memory, pattern, shift, size, mask, site, dtype.itemsize, whole=False)
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
            if good.all():
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
            self.note_race("store", memory, pattern, shift, size, mask, site, dtype.itemsize, values, whole)
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
            self.note_race("atomic", memory, pattern, shift, size, mask, site, size, written, whole=False)
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

    # Asynchronous copies: the bytes arrive when they are waited for, so that a missing wait shows.

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
            left = unpack(given, 32)
            values = [np.where(left > 4 * k, v, np.uint32(0)) for k, v in enumerate(values)]
        memory, pattern, shift, low, whole = self.place("shared", target, target_offset, size, mask, site)
        lanes, flat = self.active_addresses("shared", memory, pattern, shift, size, mask, site)
        for buffer, _, where in self.parts(memory, lanes, flat):
            buffer.written.bytes[where[:, None] + np.arange(size)] = 0
        memory.generation += 1
        self.issued += 1
        if self.races is not None:
            self.note_race("store", memory, pattern, shift, size, mask, (site, "issue"), size, whole=False)
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
                    self.note_race("store", memory, pattern, shift, size, fresh, (site, "arrive"), 4, values, False)
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
            done = np.broadcast_to(done, self.shape) if done.ndim else done
            if mask is None and done.ndim == 0:
                if done:
                    self.arrive(site, target, offset, values, lanes, number)
                    continue
                remaining.append((site, target, offset, values, lanes, group, number))
                continue
            everyone = np.ones(self.shape, bool)
            now = everyone & done & (everyone if mask is None else mask) & (everyone if lanes is None else lanes)
            later = everyone & ~now & (everyone if lanes is None else lanes)
            if now.any():
                self.arrive(site, target, offset, values, now, number)
            if later.any():
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

    # Counting.

    def count(self, site, memory, pattern, shift, size, mask):
        """Add what an access costs to its instruction's counters: requests and sectors, or wavefronts."""
        if site is None or type(site) is tuple:
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
        if self.describe.launch.by_warp is not None:
            self.count_by_warp(counter.kind, shared, mask)

    def count_by_warp(self, kind, shared, mask):
        """Note which warps made this request."""
        if shared:
            kind = "atom" if kind == "red" else kind
        name = (SHARED if shared else REQUESTS).format("ld" if kind == "ldmatrix" else kind)
        launch = self.describe.launch
        made = launch.by_warp.setdefault(name, np.zeros((launch.blocks, launch.warps), np.int64))
        made[self.describe.numbers] += np.broadcast_to(True if mask is None else mask, self.shape).any(axis=2)

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
            each = coalesce.atomic_sectors_per_warp(addresses, size, mask)
        else:
            each = coalesce.sectors_per_warp(addresses, size, mask)
        return self.total(each > 0), self.total(each), 0

    def shared_cost(self, counter, addresses, size, mask):
        store = counter.kind != "ld"
        size = counter.joined // 8 or size
        each, ideal = banks.wavefronts_and_ideal(addresses, size, mask, store=store)
        return self.total(each > 0), self.total(each), self.total(ideal)

    def total(self, each):
        """The sum over all warps of something known per (block, warp), axes of length 1 standing for all."""
        each = np.asarray(each)
        return int(each.sum()) * (self.shape[0] * self.shape[1]) // each.size

    def note_race(self, kind, memory, pattern, shift, size, mask, site, item, values=None, whole=True):
        """Tell the race detector of an access by every lane in `mask`; `item`: the bytes of one element.

        Of a store, before it happens. values: what is stored; of an atomic: where it writes. whole: see `place`.
        """
        if memory is self.local:
            return
        if kind != "load" and self.races.sources and memory is not self.shared:
            self.check_sources(kind, pattern, shift, size, mask, site)
        if whole:
            aside = self.aside_of(memory)
            low, high = (n + shift for n in pattern.known.range(True))
            if self.set_aside(aside, kind, memory, pattern, shift, low, high + size, mask, site, item):
                return
            aside.look_at(kind, low, high + size)
        self.note_now(kind, memory, pattern, shift, size, mask, site, item, values, whole)

    def aside_of(self, memory):
        if memory is self.shared:
            return self.aside
        found = self.races.aside.get(memory.origin)
        if found is None:
            found = self.races.aside[memory.origin] = Aside(memory)
        return found

    def set_aside(self, aside, kind, memory, pattern, shift, low, high, mask, site, item):
        """Put an access aside, if that can be done."""
        line, strong = self.describe.race_facts(site)
        shared = memory is self.shared
        size = high - pattern.known.range(True)[1] - shift
        if kind == "atomic" or strong.scope:
            return False
        if shared and kind == "store" and self.describe.program.asynchronous:
            return False
        alone = one_each(pattern, size, self.shape, shared, None)
        alone_here = alone or (mask is not None and one_each(pattern, size, self.shape, shared, mask))
        if kind == "store" and not alone_here:
            return False

        def make():
            event = self.races.event(kind, line, 0, size)
            return lambda: self.note_now(kind, memory, pattern, shift, size, mask, site, item, None, True, event)

        piece = Piece(pattern, shift, size, mask, low, high, id(self), alone, alone_here)
        return aside.take(kind, piece, make)

    def note_now(self, kind, memory, pattern, shift, size, mask, site, item, values, whole, event=None):
        """event: given if it comes late; then memory still holds what was stored."""
        lanes = np.flatnonzero(np.broadcast_to(True if mask is None else mask, self.shape))
        if not lanes.size:
            return
        flat = np.broadcast_to(pattern.array, self.shape).astype(np.int64).reshape(-1)[lanes] + shift
        for buffer, chosen, where in self.parts(memory, lanes, flat):
            addresses = flat if buffer is self.shared else where + buffer.origin
            if buffer is not self.shared:
                aside = self.aside_of(buffer)
                if not whole:
                    aside.look_at(kind, int(addresses.min()), int(addresses.max()) + size)
                if event is None:
                    aside.blot(kind, addresses, size)
            elif not whole:
                self.aside.look_at(kind, int(addresses.min()), int(addresses.max()) + size)
            held = None
            if values is not None:
                held = np.stack([np.broadcast_to(v, self.shape).reshape(-1)[chosen] for v in values], axis=1)
            elif event is not None and kind == "store":
                view = buffer.bytes[where[:, None] + np.arange(size)]
                held = view.view(f"u{item}")
            self.describe.race(kind, buffer, addresses, size, chosen, site, item, held, event)


MARKS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
ONES = {n: MARKS[n].type(int("01" * n, 16)) for n in MARKS}
ONES_ARRAY = {n: np.full((1, 1, 1), ONES[n]) for n in MARKS}


def full_strides(memory, pattern):
    """Shape and strides of an evenly spaced access, with the copies per block or thread; axes all alike stay 1."""
    shape, strides = [], []
    for n, s, step, length in zip(pattern.array.shape, pattern.strides, memory.steps, memory.shape):
        if step:
            shape.append(length)
            strides.append(s + step)
        elif s == 0:
            shape.append(1)
            strides.append(0)
        else:
            shape.append(n)
            strides.append(s)
    return shape, strides


def gather(memory, pattern, shift, low, dtype, extra):
    """The elements that a pattern points to, `extra` bytes on."""
    if pattern.strides is not None:
        shape, strides = full_strides(memory, pattern)
        first = int(pattern.array[0, 0, 0]) + shift + extra - memory.origin
        return np.ndarray(shape, dtype, memory.bytes, first, strides).copy()
    item = dtype.itemsize
    start = (low + extra - memory.origin) // item
    return memory.view(dtype)[start:].take(pattern.index(item, memory))


def scatter(memory, pattern, shift, low, dtype, extra, value, mask):
    """Write `value` to the elements; where threads share one, the last one's stays, as the hardware may choose."""
    if pattern.strides is not None:
        shape, strides = full_strides(memory, pattern)
        first = int(pattern.array[0, 0, 0]) + shift + extra - memory.origin
        target = np.ndarray(shape, dtype, memory.bytes, first, strides)
        if mask is not None:
            np.copyto(target, value, where=mask)
        else:
            target[...] = last(value, shape)
        return
    item = dtype.itemsize
    index = pattern.index(item, memory)
    view = memory.view(dtype)[(low + extra - memory.origin) // item :]
    view[index] = last(value, index.shape)


def last(value, shape):
    """`value` cut to `shape`: along an axis of length 1 the last element."""
    if any(n == 1 < m for n, m in zip(shape, value.shape)):
        value = value[tuple(slice(-1, None) if n == 1 else slice(None) for n in shape)]
    return value


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
