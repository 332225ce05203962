"""Who knows what: the order that barriers, fences, releases and acquires make between threads (PTX ISA, "Memory
Consistency Model").

Every event has a number, its time. What a thread knows is, for each thread, the time up to which that thread's events
have happened for it; events behind that are not ordered. Few words hold it:

  * block by block: all threads of its own block up to the last barrier of the block,
  * warp by warp: up to barriers for a part of the block,
  * lane by lane: up to __syncwarp,
  * and a Clock, for what it has acquired from others.

A release publishes what a thread knows at a place in memory; an acquire by one that has read from there takes it over.

    release   a store or atomic with .release, or a fence and behind it a strong store or atomic of the same thread
    acquire   a load or atomic with .acquire, or a strong load or atomic and behind it a fence of the same thread

Both have a scope, and each must reach the other's thread: that of a block (.cta) does not leave the block, that of a
GPU (.gpu) not the device, where there are several (simt/devices.py). So a fence by thread 0 behind a barrier speaks for
its whole block, since thread 0 knows it then; one before the barrier does not. An atomic adds what it releases to what
is held at its place; a plain strong store replaces it, but for what its own thread has released there.

A thread that has left has no part in the barriers that come: they say nothing of what it did behind its last one.
"""

import numpy as np

WIDTH = 1024  # threads a block may have: thread number = block * WIDTH + thread
WARP = 32
WARPS = WIDTH // WARP
CTA, GPU, SYS = 1, 2, 3  # scopes; 0: weak
NO_RELEASE = (
    "no release covers it: before the flag it takes a fence (__threadfence()) by the thread that sets the flag and, "
    "for what others of its block have done, a barrier before that fence (fences in front of the barrier are not "
    "enough)"
)


class Clock:
    """What is known to have happened: up to which time, of blocks, of warps, of threads. It never changes."""

    __slots__ = ("base", "warps", "threads")

    def __init__(self, base=(), warps=None, threads=None):
        self.base = np.asarray(base, np.int64)
        self.warps, self.threads = warps or {}, threads or {}

    def covers_many(self, threads, times, in_company):
        """Is what threads did at `times` known? Arrays. in_company: see Knowledge."""
        out = np.zeros(len(threads), bool)
        if len(self.base):
            blocks = threads // WIDTH
            inside = blocks < len(self.base)
            out[inside] = in_company(threads[inside], times[inside], self.base[blocks[inside]])
        for known, numbers in (self.warps, threads // WARP), (self.threads, threads):
            if known and not out.all():
                rest = np.flatnonzero(~out)
                until = times_of(known, numbers[rest])
                if known is self.threads:
                    out[rest] = times[rest] <= until
                else:
                    out[rest] = in_company(threads[rest], times[rest], until)
        return out

    def join(self, other):
        """All that either knows."""
        if other is None or other is self:
            return self
        a, b = self.base, other.base
        if len(a) < len(b):
            a, b = b, a
        if len(b) and (b > a[: len(b)]).any():
            a = a.copy()
            np.maximum(a[: len(b)], b, out=a[: len(b)])
        return Clock(a, later(self.warps, other.warps), later(self.threads, other.threads))


def times_of(known, numbers):
    """known[n] of each of the numbers, an array; 0 where there is none."""
    if len(numbers) < 64:
        return np.array([known.get(n, 0) for n in numbers.tolist()])
    names, times = (np.fromiter(part, np.int64, len(known)) for part in (known.keys(), known.values()))
    order = np.argsort(names)
    at = np.minimum(np.searchsorted(names, numbers, sorter=order), len(names) - 1)
    return np.where(names[order[at]] == numbers, times[order[at]], 0)


def later(a, b):
    """Two dicts of times as one, the greater of each."""
    if len(a) < len(b):
        a, b = b, a
    if all(time <= a.get(name, 0) for name, time in b.items()):
        return a
    return a | {name: max(time, a.get(name, 0)) for name, time in b.items()}


def together(*clocks):
    """All that any of them knows; None if there are none."""
    out = None
    for clock in clocks:
        if clock is not None:
            out = clock if out is None else out.join(clock)
    return out


class Held:
    """What is published at a place: `wide` for all, `near[device]` for that device where there are several,
    `own[block]` for that block. by: whose it is, -1 if of several threads."""

    __slots__ = ("wide", "near", "own", "by")

    def __init__(self):
        self.wide, self.near, self.own, self.by = None, {}, {}, -1

    def add(self, clock, block, wide, device=None):
        """device: None where what it releases does not leave the block, or there is one device."""
        self.own[block] = clock.join(self.own.get(block))
        if device is not None:
            self.near[device] = clock.join(self.near.get(device))
        if wide:
            self.wide = clock.join(self.wide)


class Pending:
    """What a thread has read and not yet acquired. line: where it read last."""

    __slots__ = ("wide", "near", "own", "line")

    def __init__(self, wide, near, own, line):
        self.wide, self.near, self.own, self.line = wide, near, own, line

    def within(self, scope, widest):
        """What an acquire of this scope takes over."""
        return together(self.own, self.near if scope >= GPU else None, self.wide if scope >= widest else None)


class Knowledge:
    """What all threads of a launch know; of several launches, where several devices have them (device: block -> its
    device, ended: block -> when its launch ended)."""

    def __init__(self, several=False):
        self.several, self.widest = several, SYS if several else GPU  # the scope that reaches everybody
        self.device, self.ended = Grown(np.int32), Grown()
        self.barriers = Grown()  # block -> time of its last barrier
        self.met = Grown()  # warp -> time of its last __syncwarp with all its lanes
        self.last_barrier = self.last_of_warps = 0  # the time of the last of both, and of the last of a warp
        self.lanes = Squares()  # warp -> [lane, other lane] -> time, where only some lanes have met
        self.parts = {}  # block -> [warp, other warp] -> time, by barriers for a part of the block
        self.arrived = {}  # (block, number of a barrier) -> [times of warps, Clock]: bar.arrive
        self.of_block, self.of_warp, self.of_thread = {}, {}, {}  # block -> Clock; block -> {warp or thread: Clock}
        self.fences = {level: Fences() for level in range(CTA, self.widest + 1)}
        self.pending = {}  # thread -> Pending
        self.held = {}  # buffer -> {place: Held}
        self.told = False  # has any block stored what another may look at, a flag?
        self.left, self.until = Grown(), Grown()  # thread -> when it left; up to when it took part in barriers
        self.fewer = set()  # blocks that some of their threads have left

    # Barriers.

    def barrier(self, blocks, now):
        """All threads of these blocks have met."""
        self.barriers.set(blocks, now)
        self.last_barrier = now
        if not (self.parts or self.of_warp or self.of_thread):
            return
        for block in np.unique(blocks).tolist():
            rows = self.parts.pop(block, None)
            if rows is not None and block in self.fewer:  # what those have told that have left
                self.parts[block] = np.tile(rows.max(axis=0), (WARPS, 1))
            some = [*self.of_warp.pop(block, {}).values(), *self.of_thread.pop(block, {}).values()]
            if some:
                self.of_block[block] = together(self.of_block.get(block), *some)

    def part_barrier(self, block, number, arriving, waiting, now):
        """Warps of one block at a barrier for a part of it; those that go on (`waiting`) know what all have known."""
        times, clock = self.arrived.pop((block, number), (np.zeros(WARPS, np.int64), None))
        times = times.copy()
        for warp in arriving:
            np.maximum(times, self.row(block, warp), out=times)
            times[warp] = now
            clock = together(clock, self.clock_of_warp(block, warp))
        if not waiting:
            self.arrived[block, number] = times, clock
            return
        known = self.parts.setdefault(block, np.zeros((WARPS, WARPS), np.int64))
        for warp in waiting:
            np.maximum(known[warp], times, out=known[warp])
            if clock is not None:
                self.acquire_warp(block, block * WARPS + warp, clock)

    def thread_barrier(self, block, number, arriving, waiting, now):
        """The same where threads come by themselves, not whole warps."""
        times, clock = self.arrived.pop((block, number), (np.zeros(WARPS, np.int64), None))
        if len(arriving):
            clock = together(clock, self.now_lanes(arriving, now))
        if not len(waiting):
            self.arrived[block, number] = times, clock
            return
        known = {block * WARPS + int(n): int(times[n]) for n in np.flatnonzero(times)}
        self.acquire_lanes(waiting, Clock((), known).join(clock))

    def leave(self, threads, now):
        blocks, warps = threads // WIDTH, threads // WARP
        until = np.maximum(self.barriers.get(blocks), self.met.get(warps))
        for n, (block, warp) in enumerate(zip(blocks.tolist(), warps.tolist())) if self.parts else ():
            until[n] = max(until[n], self.row(block, warp % WARPS)[warp % WARPS])
        self.left.set(threads, now)
        self.until.set(threads, until)
        self.fewer.update(blocks.tolist())

    def in_company(self, threads, times, known):
        """Is what threads did at `times` known, if all that took part is known up to `known`? Arrays."""
        out = times <= known
        if self.fewer:
            left = self.left.get(threads)
            there = (left == 0) | (known <= left) | (times <= self.until.get(threads))
            if self.several:  # who knows that the launch has ended knows of all its threads
                ended = self.ended.get(threads // WIDTH)
                there |= (ended > 0) & (known >= ended)
            out &= there
        return out

    def row(self, block, warp):
        """Up to when a warp knows the warps of its block by barriers for a part of it."""
        found = self.parts.get(block)
        return np.zeros(WARPS, np.int64) if found is None else found[warp]

    def clock_of_warp(self, block, warp):
        """What a warp, or any lane of it, has acquired."""
        number = block * WARPS + warp
        of_thread = self.of_thread.get(block, {})
        lanes = [c for t, c in of_thread.items() if t // WARP == number]
        return together(self.of_block.get(block), self.of_warp.get(block, {}).get(number), *lanes)

    def warp_barrier(self, warps, masks, now):
        """__syncwarp: in each of these warps the lanes of its mask have met."""
        full = masks == 0xFFFFFFFF
        self.met.set(warps[full], now)
        self.last_barrier = self.last_of_warps = now
        if self.of_thread:
            for warp in warps[full].tolist():
                self.share(warp, range(WARP), True)
        for mask in np.unique(masks[~full]).tolist():
            some, lanes = warps[masks == mask], np.array([n for n in range(WARP) if mask >> n & 1])
            known = self.lanes.of(some)
            known[:, lanes, lanes] = now
            known[:, lanes] = known[:, lanes].max(axis=1, keepdims=True)
            self.lanes.set(some, known)
            for warp in some.tolist() if self.of_thread else ():
                self.share(warp, lanes.tolist(), False)

    def share(self, warp, lanes, whole):
        """What some of these lanes have acquired, all of them have acquired."""
        block, first = warp // WARPS, warp * WARP
        clocks = self.of_thread.get(block, {})
        held = [clocks[first + n] for n in lanes if first + n in clocks] if clocks else []
        if held and whole:
            self.acquire_warp(block, warp, together(*held))
            for n in lanes:
                clocks.pop(first + n, None)
        elif held:
            for n in lanes:
                clocks[first + n] = together(*held)

    # Taking over.

    def acquire(self, thread, clock):
        clocks = self.of_thread.setdefault(thread // WIDTH, {})
        clocks[thread] = clock.join(clocks.get(thread))

    def acquire_warp(self, block, warp, clock):
        clocks = self.of_warp.setdefault(block, {})
        clocks[warp] = clock.join(clocks.get(warp))

    def acquire_lanes(self, threads, clock):
        """Some threads of one block take it over, whole warps at once."""
        block = int(threads[0]) // WIDTH
        warps, counts = np.unique(threads // WARP, return_counts=True)
        for warp, count in zip(warps.tolist(), counts.tolist()):
            if count == WARP:
                self.acquire_warp(block, warp, clock)
            else:
                for thread in threads[threads // WARP == warp].tolist():
                    self.acquire(thread, clock)

    # Giving.

    def clock_at(self, thread, time, barrier, met, more):
        """The Clock of a thread at `time`, put together."""
        block = thread // WIDTH
        base = np.zeros(block + 1, np.int64)
        base[block] = barrier
        clock = Clock(base, {thread // WARP: met} if met else {}, {thread: time})
        return clock if more is None else clock.join(more)

    def more(self, thread):
        """What a thread knows by other ways than barriers of all its block or warp: a Clock, or None."""
        block, warp = thread // WIDTH, thread // WARP
        out = together(
            self.of_block.get(block), self.of_warp.get(block, {}).get(warp), self.of_thread.get(block, {}).get(thread)
        )
        if block in self.parts:
            row = self.parts[block][warp % WARPS]
            out = Clock((), {block * WARPS + int(n): int(row[n]) for n in np.flatnonzero(row)}).join(out)
        if warp in self.lanes:
            row = self.lanes.of(np.array([warp]))[0, thread % WARP]
            out = Clock((), {}, {warp * WARP + int(n): int(row[n]) for n in np.flatnonzero(row)}).join(out)
        return out

    def now(self, thread, time):
        """The Clock of all that a thread has done until `time`, which is now, and knows."""
        block, warp = np.array([thread // WIDTH]), np.array([thread // WARP])
        return self.clock_at(
            thread, time, int(self.barriers.get(block)[0]), int(self.met.get(warp)[0]), self.more(thread)
        )

    def now_lanes(self, threads, time):
        """The same of several threads of one block together."""
        out, block = None, int(threads[0]) // WIDTH
        warps, counts = np.unique(threads // WARP, return_counts=True)
        for warp, count in zip(warps.tolist(), counts.tolist()):
            if count == WARP and warp not in self.lanes:
                base = np.zeros(block + 1, np.int64)
                base[block] = self.barriers.get(np.array([block]))[0]
                more = together(*(self.more(t) for t in self.speakers(block, warp)))
                out = Clock(base, {warp: time}).join(more).join(out)
            else:
                out = together(out, *(self.now(t, time) for t in threads[threads // WARP == warp].tolist()))
        return out

    def speakers(self, block, warp):
        """Lanes that together know what all lanes of the warp know."""
        own = [t for t in self.of_thread.get(block, {}) if t // WARP == warp]
        return own or [warp * WARP]

    # Fences, releases, acquires.

    def fence(self, threads, scope, now):
        """Threads have executed a fence: what they have read is acquired, what they know may be published."""
        if self.pending:
            for thread in threads.tolist():
                seen = self.pending.get(thread)
                if seen is None:
                    continue
                clock = seen.within(scope, self.widest)
                if clock is not None:
                    self.acquire(thread, clock)
                if scope >= self.widest:
                    del self.pending[thread]
        blocks, warps = threads // WIDTH, threads // WARP
        barriers, met = self.barriers.get(blocks), self.met.get(warps)
        more = {}
        if self.of_block or self.of_warp or self.of_thread or self.parts or len(self.lanes):
            more = {t: m for t in threads.tolist() if (m := self.more(t)) is not None}
        for level, fences in self.fences.items():
            if level <= scope:
                fences.note(threads, now, barriers, met, more)

    def strong(self, buffer, kind, places, threads, how, line, now, wrote=None):
        """A strong access to these places, one each. how: Strong; wrote: has it written (None: as its kind does)?"""
        held = self.held.get(buffer)
        self.told = self.told or (kind != "load" and how.scope >= GPU)
        if held is None:
            if kind == "load":
                return
            if not how.release and not any(f.any(threads) for f in self.fences.values()):
                return
            held = self.held[buffer] = {}
        fenced = {level: f.get(threads) for level, f in self.fences.items()}
        for n, (place, thread) in enumerate(zip(places.tolist(), threads.tolist(), strict=True)):
            there = held.get(place)
            if kind != "store" and there is not None:
                self.read(thread, there, how, line)
            if kind == "load" or (wrote is not None and not wrote[n]):
                continue
            if there is None or (kind == "store" and there.by != thread):  # a thread's own release goes on to hold
                there = Held()
                there.by = thread
            block = thread // WIDTH
            for level, (times, barriers, met) in fenced.items():
                if times[n]:
                    more = self.fences[level].more.get(thread)
                    clock = self.clock_at(thread, int(times[n]), int(barriers[n]), int(met[n]), more)
                    there.add(clock, block, level >= self.widest, self.device_within(level, block))
            if how.release:
                wide, device = how.scope >= self.widest, self.device_within(how.scope, block)
                there.add(self.now(thread, now), block, wide, device)
            if there.by != thread:
                there.by = -1
            if there.own:
                held[place] = there
            else:
                held.pop(place, None)

    def read(self, thread, there, how, line):
        """A thread has read what is held here."""
        block = thread // WIDTH
        found = Pending(there.wide, there.near.get(self.device_within(GPU, block)), there.own.get(block), line)
        if how.acquire:
            clock = found.within(how.scope, self.widest)
            if clock is not None:
                self.acquire(thread, clock)
            if how.scope >= self.widest:
                return
        seen = self.pending.get(thread)
        if seen is not None:
            found.own, found.near = together(found.own, seen.own), together(found.near, seen.near)
            found.wide = together(found.wide, seen.wide)
        if not (found.own is found.near is found.wide is None):
            self.pending[thread] = found

    def device_within(self, scope, block):
        """The device that a block is on, if there are several and a release of this scope leaves the block."""
        return int(self.device.items[block]) if self.several and scope >= GPU else None

    # Launches, one after the other on each of several devices.

    def begin_launch(self, blocks, device, clock):
        """A launch of these blocks begins. clock: what all of it knows, that of the launch ahead; None: the first."""
        self.device.set(blocks, device)
        if clock is not None:
            self.of_block.update(dict.fromkeys(blocks.tolist(), clock))

    def end_launch(self, blocks, now):
        """It has ended: the Clock of all that its threads have done and known."""
        base = np.zeros(int(blocks.max()) + 1, np.int64)
        base[blocks] = now
        self.ended.set(blocks, now)
        clocks = [Clock(base)]
        for block in blocks.tolist():
            for held in (self.of_warp.pop(block, {}), self.of_thread.pop(block, {})):
                clocks += held.values()
            clocks.append(self.of_block.get(block))
        return together(*{id(clock): clock for clock in clocks}.values())

    def weak_store(self, buffer, places):
        """An ordinary store replaces what was published there."""
        held = self.held.get(buffer)
        if held:
            for place in places.tolist():
                held.pop(place, None)

    # Asking.

    def ordered(self, before, times, now):
        """Is what thread before[n] did at times[n] known to thread now[n]? Arrays."""
        blocks_before, blocks = before // WIDTH, now // WIDTH
        same = blocks_before == blocks
        out = (before == now) | (same & self.in_company(before, times, self.barriers.get(blocks)))
        rest = np.flatnonzero(~out)
        if not len(rest):
            return out
        warps = now // WARP
        inside = rest[before[rest] // WARP == warps[rest]]
        if len(inside):
            out[inside] = self.in_company(before[inside], times[inside], self.met.get(warps[inside]))
            if len(self.lanes):
                some = inside[~out[inside]]
                out[some] = times[some] <= self.lanes.get(warps[some], now[some] % WARP, before[some] % WARP)
        if self.parts:
            for block in distinct(blocks[rest[same[rest]]]):
                if block in self.parts:
                    some = rest[same[rest] & (blocks[rest] == block)]
                    known = self.parts[block][warps[some] % WARPS, before[some] // WARP % WARPS]
                    out[some] |= self.in_company(before[some], times[some], known)
        rest = rest[~out[rest]]
        for block in distinct(blocks[rest]):
            here = rest[blocks[rest] == block]
            if (clock := self.of_block.get(block)) is not None:
                out[here] = clock.covers_many(before[here], times[here], self.in_company)
            for found, numbers in (self.of_warp, warps), (self.of_thread, now):
                if block in found:
                    here = here[~out[here]]
                    for number in distinct(numbers[here]):
                        if (clock := found[block].get(number)) is not None:
                            some = here[numbers[here] == number]
                            out[some] = clock.covers_many(before[some], times[some], self.in_company)
        return out

    def missing(self, before, time, now):
        """Why is it not known? In words; "" if nothing is known of it."""
        block = now // WIDTH

        def covers(clock):
            one = np.array([before]), np.array([time])
            return clock is not None and bool(clock.covers_many(*one, self.in_company)[0])

        for thread in sorted((t for t in self.pending if t // WIDTH == block), key=lambda t: t != now):
            seen = self.pending[thread]
            if covers(seen.wide) or covers(seen.near) or covers(seen.own):
                who = "it" if thread == now else f"thread {thread % WIDTH} of its block"
                return (
                    f"{who} has read the flag in line {seen.line}, but there is no acquire: behind that read it takes "
                    "a fence of the same thread with a wide enough scope (__threadfence() between blocks), or a load "
                    "with .acquire"
                )
        if before // WIDTH == block:
            return ""
        for thread, clock in self.of_thread.get(block, {}).items():
            if covers(clock):
                return (
                    f"thread {thread % WIDTH} of its block has acquired it, but there is no barrier between that and "
                    "this access"
                )
        everything = [there for held in self.held.values() for there in held.values()]
        if any(covers(there.wide) for there in everything):
            return "it was released, but the other thread has not read the flag, nor met one that has"
        if any(covers(clock) for there in everything for clock in there.near.values()):
            return (
                "it was released for its own device only: between devices it takes __threadfence_system(), or a "
                "release of scope sys"
            )
        if any(covers(clock) for there in everything for clock in there.own.values()):
            return (
                "it was released for its own block only: between blocks it takes __threadfence(), or a release of "
                "scope gpu"
            )
        if self.told:
            return NO_RELEASE
        return ""


def distinct(numbers):
    """The different ones, as a sorted list. Of few numbers np.unique takes long."""
    return sorted(set(numbers.tolist())) if len(numbers) < 1000 else np.unique(numbers).tolist()


class Fences:
    """For each thread its last fence: the time, and what the thread knew then."""

    def __init__(self):
        self.times, self.barriers, self.met = Grown(), Grown(), Grown()
        self.more, self.used = {}, False

    def note(self, threads, now, barriers, met, more):
        self.used = True
        self.times.set(threads, now)
        self.barriers.set(threads, barriers)
        self.met.set(threads, met)
        for thread in self.more.keys() & set(threads.tolist()) if self.more else ():
            del self.more[thread]
        self.more |= more

    def any(self, threads):
        return self.used and bool(self.times.get(threads).any())

    def get(self, threads):
        """(times, of the block's barrier before, of the warp's) of these threads; 0 where there is none."""
        return tuple(g.get(threads) for g in (self.times, self.barriers, self.met))


class Squares:
    """For some warps, what each lane knows of each: times [lane, other lane]."""

    def __init__(self):
        self.rows = Grown()  # warp -> its place below, from 1 on
        self.times = np.zeros((1, WARP, WARP), np.int64)  # at 0: nothing

    def __len__(self):
        return len(self.times) - 1

    def __contains__(self, warp):
        return bool(self.rows.get(np.array([warp]))[0])

    def of(self, warps):
        return self.times[self.rows.get(warps)]

    def get(self, warps, lanes, others):
        return self.times[self.rows.get(warps), lanes, others]

    def set(self, warps, times):
        rows = self.rows.get(warps)
        new = np.flatnonzero(rows == 0)
        if len(new):
            rows[new] = len(self.times) + np.arange(len(new))
            self.rows.reserve(int(warps.max()) + 1)
            self.rows.items[warps] = rows
            self.times = np.concatenate([self.times, np.zeros((len(new), WARP, WARP), np.int64)])
        self.times[rows] = times


class Grown:
    """An array over numbers that are not known beforehand: 0 until set."""

    def __init__(self, dtype=np.int64):
        self.items = np.zeros(0, dtype)

    def reserve(self, length):
        if length > len(self.items):
            new = np.zeros(max(length, 2 * len(self.items), 64), self.items.dtype)
            new[: len(self.items)] = self.items
            self.items = new

    def set(self, numbers, value):
        if len(numbers):
            self.reserve(int(numbers.max()) + 1)
            self.items[numbers] = value

    def get(self, numbers):
        try:
            return self.items[numbers]
        except IndexError:
            self.reserve(int(numbers.max()) + 1)
            return self.items[numbers]
