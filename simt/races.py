"""Races: two threads at the same byte, at least one of them writing, with nothing that orders the two.

    races = Races()
    races.shared("store", offsets, 4, blocks, threads, line=7, values=values)      the lanes of one instruction
    races.barrier(blocks)                                                          they passed __syncthreads()
    races.shared("load", ...)                                                      raises RaceError at a race

Every event has a time, its number in the machine's order. For every few bytes of memory the last write and the last
two readers are kept, each as (thread, time). An access is checked against them. What comes first is ordered before a
later access if

  * it is the same thread's, or a barrier of the block (or of the lanes of a warp) lies between, or
  * it was published and acquired. A thread publishes by a strong or atomic store after a fence: what its block
    did before the barrier that came before the fence, what lanes of its warp did before a __syncwarp with it, and
    what the thread itself did before the fence. A fence by the other threads before a barrier counts for their own
    stores. Who loads that place by a strong or atomic load acquires it, for itself, and for its block at the next
    barrier (its warp at the next __syncwarp).

Two atomic or strong accesses are no race. Lanes of one warp are not ordered by running together: without a __syncwarp
between them they are two threads like others. Threads that write the same value by the same line are let pass.

mbarriers order like that: an arrival publishes, a wait that sees the phase complete acquires.

What it does not see: a race that this run's order and inputs did not bring about; a reader hidden behind two later
ones; a missing fence on the acquiring side; the scopes of fences and atomics; that a barrier for a part of the block
orders that part only; what bulk copies do to global memory; order by volatile flags in shared memory; blocks of a very
large grid whose shared memory is no longer remembered (REMEMBERED).
"""

import numpy as np

from simt.errors import SimtError

WIDTH = 1024  # threads a block may have: thread number = block * WIDTH + thread
REMEMBERED = 1 << 22  # places in the blocks' shared memory, together
NOBODY = -1


class RaceError(SimtError):
    """Two accesses to the same byte that nothing orders.

    space           "shared" or "global"; buffer: its name, for global memory, else None
    offset          the byte, counted from the beginning of the buffer or of the block's shared memory
    first, second   (kind, line, block, thread): kind is "load", "store" or "atomic"
    need            what is missing, where it is not plain order
    """

    def __init__(self, space, buffer, offset, first, second, message=None, need=""):
        self.need = need
        super().__init__(message or describe(space, buffer, offset, first, second, need))
        self.space, self.buffer, self.offset, self.first, self.second = space, buffer, offset, first, second


def describe(space, buffer, offset, first, second, need=""):
    verbs = {"load": "reads", "store": "writes", "atomic": "updates"}
    where = f"byte {offset} of shared memory" if space == "shared" else f"byte {offset} of {buffer}"

    def who(access):
        kind, line, block, thread = access
        return f"thread {thread} of block {block} {verbs[kind]} it in line {line}"

    if need:
        need = need[0].upper() + need[1:] + "."
    elif first[2] != second[2]:
        need = "They are of different blocks: it takes a fence and a flag, or atomics, to order them."
    elif first[3] // 32 != second[3] // 32:
        need = "There is no __syncthreads() between them."
    else:
        need = "There is no __syncwarp() or __syncthreads() between them, though they are of one warp."
    return f"race on {where}: {who(first)}, and {who(second)}. {need}"


class Races:
    """What all threads of a launch have done to memory so far. See the file's head."""

    def __init__(self, warp_size=32):
        self.warp_size = warp_size
        self.now = 0
        self.kinds, self.lines, self.strong = [None], Grown(), Grown(bool)  # by time; strong: or atomic
        self.memory = {}  # buffer -> Shadow; None: shared memory
        self.rows, self.row_bytes = {}, 0  # block -> its row in the shadow of shared memory
        self.barriers = Grown()  # block -> time of its last barrier
        self.warps, self.known = {}, Grown(shape=(warp_size, warp_size))  # [warp's number, lane, other lane] -> time
        self.fences, self.fence_base = Grown(), Grown()  # thread -> time of its last fence, and of the barrier before
        self.stored = Grown()  # thread -> time of its last store to global memory
        self.proxy = Grown()  # thread -> time of its last fence.proxy.async
        self.read = {}  # block -> {reader: (16-byte pieces, line, {its first thread: (its threads, time of the wait)})}
        self.copied = set()  # times of what bulk copies have written
        self.fenced = {}  # block -> Clock of what fences before its last barrier cover
        self.fenced_now = set()  # blocks with a fence since their last barrier
        self.published = {}  # (buffer, offset) -> Clock
        self.block_clocks, self.thread_clocks = {}, {}  # block -> Clock; block -> {thread number: Clock}

    # What orders.

    def barrier(self, blocks):
        """All threads of these blocks have reached __syncthreads() and go on."""
        self.now = self.tick()
        blocks = np.unique(np.asarray(blocks, np.int64))
        for block in self.fenced_now.intersection(blocks.tolist()):
            self.cover_fenced(block)
        for block in self.read.keys() & set(blocks.tolist()):
            del self.read[block]
        self.barriers.set(blocks, self.now)
        for block in self.thread_clocks.keys() & set(blocks.tolist()):
            for clock in self.thread_clocks.pop(block).values():
                self.block_clocks.setdefault(block, Clock()).join(clock)

    def warp_barrier(self, blocks, warps, lanes_mask):
        """__syncwarp: in each of these warps, the lanes of its mask (bit n for lane n) have met."""
        self.now = self.tick()
        numbers = np.asarray(blocks, np.int64) * (WIDTH // self.warp_size) + np.asarray(warps, np.int64)
        masks = np.broadcast_to(np.asarray(lanes_mask).astype(np.int64), numbers.shape)
        for number, mask in zip(numbers.tolist(), masks.tolist()):
            slot = self.warps.setdefault(number, len(self.warps))
            self.known.reserve(slot + 1)
            lanes = [n for n in range(self.warp_size) if mask >> n & 1]
            known = self.known.items[slot]
            known[lanes, lanes] = self.now
            known[lanes] = known[lanes].max(axis=0)
            self.share_in_warp(number, lanes)

    def share_in_warp(self, number, lanes):
        """What some lanes have acquired, all of them have acquired."""
        first = number * self.warp_size
        clocks = self.thread_clocks.get(first // WIDTH)
        held = [clocks[first + n] for n in lanes if first + n in clocks] if clocks else []
        if held:
            shared = Clock()
            for clock in held:
                shared.join(clock)
            for n in lanes:
                clocks[first + n] = shared.copy()

    def fence(self, blocks, threads):
        """These threads have executed __threadfence()."""
        self.now = self.tick()
        blocks = np.asarray(blocks, np.int64)
        numbers = blocks * WIDTH + np.asarray(threads, np.int64)
        self.fences.set(numbers, self.now)
        self.fence_base.set(numbers, self.barriers.get(blocks))
        self.fenced_now.update(np.unique(blocks).tolist())

    def cover_fenced(self, block):
        """At a barrier: what each thread fenced is from here on the block's to publish."""
        self.fenced_now.discard(block)
        numbers = block * WIDTH + np.arange(WIDTH)
        fences, stored = self.fences.get(numbers), self.stored.get(numbers)
        clock = self.fenced.setdefault(block, Clock())
        if (stored <= fences).all():
            clock.raise_base(block, self.now)
        else:
            some = (fences > 0) & (stored <= fences)
            clock.raise_threads(dict(zip(numbers[some].tolist(), fences[some].tolist())))

    # What runs beside the threads: mbarriers order, bulk copies and wgmma read and write.

    def clock(self):
        return Clock()

    def released(self, block, thread):
        """The Clock of all that this thread has done or acquired until now."""
        self.now = self.tick()
        return self.to_publish(int(block), int(block) * WIDTH + int(thread), 0, True)

    def acquired_by(self, block, thread, clock):
        self.acquire(int(block), int(block) * WIDTH + int(thread), clock)

    def proxy_fence(self, blocks, threads):
        """fence.proxy.async by these threads."""
        self.now = self.tick()
        self.proxy.set(np.asarray(blocks, np.int64) * WIDTH + np.asarray(threads, np.int64), self.now)

    def asynchronous(self, kind, offsets, size, block, threads, line):
        """A bulk copy ("store": by one thread) or a wgmma's or bulk store's reading ("load") of shared memory.

        A load is ordered behind a store if in every warp that issues it some lane is; ordinary stores need a
        fence.proxy.async by the thread that stored, or by one that issues. Loads are remembered when they have been
        waited for (`waited`); until then the machine itself lets nobody write there.
        """
        offsets, threads = np.asarray(offsets, np.int64), np.asarray(threads, np.int64)
        if kind == "store":
            many = len(offsets)
            self.overwritten(offsets, size, np.full(many, block), np.full(many, threads[0]), line, every=False)
            self.shared("store", offsets, size, np.full(many, block), np.full(many, threads[0]), line)
            self.copied.add(self.now)
            return
        places = self.rows_of(np.array([block]), int(offsets.max()) + size)[0] * self.row_bytes + offsets
        self.now = self.tick("load", line)
        shadow = self.memory.setdefault(None, Shadow(size))
        at, lane = shadow.items_of(places, size)
        writers, times = shadow.writer[at], shadow.write_time[at]
        numbers = block * WIDTH + threads
        fenced = int(self.proxy.get(numbers).max())
        known = np.flatnonzero(writers != NOBODY)
        _, first = np.unique(np.stack([writers[known], times[known]]), axis=1, return_index=True)
        for n in known[first].tolist():
            one, when = int(writers[n]), int(times[n])
            was = self.kinds[when], int(self.lines.items[when]), one
            for warp in np.unique(numbers // self.warp_size):
                lanes = numbers[numbers // self.warp_size == warp]
                if not any(self.in_order(one, when, int(other)) for other in lanes):
                    self.report(None, offsets[lane[n]], was, ("load", line, int(lanes[0])))
            if when not in self.copied and max(fenced, int(self.proxy.get(np.array([one]))[0])) < when:
                need = (
                    "a fence.proxy.async is missing after the store: without it bulk copies and wgmma may not see "
                    "what ordinary stores have written"
                )
                self.report(None, offsets[lane[n]], was, ("load", line, int(numbers[0])), need)

    def waited(self, reader, pieces, block, threads, line):
        """These threads of a block know by a wait that `reader` (any name) has read these 16-byte pieces."""
        self.now = self.tick("load", line)
        known = self.read.setdefault(block, {}).setdefault(reader, (np.unique(pieces), line, {}))[2]
        numbers = [block * WIDTH + int(t) for t in threads]
        known[numbers[0]] = numbers, self.now

    def overwritten(self, offsets, size, blocks, threads, line, every=True):
        """A store to shared memory: what read there before must be known to be done.

        Known by all who have waited (`every`), as ordinary stores need it; for a bulk copy one of them is enough, since
        it is common to let one thread of a warpgroup speak for all.
        """
        for block in self.read.keys() & set(blocks.tolist()):
            here = blocks == block
            ends = (offsets[here][:, None] + np.array([0, size - 1])) // 16
            for reader, (pieces, was, known) in list(self.read[block].items()):
                hit = np.isin(ends, pieces).any(axis=1)
                at, who = offsets[here][hit], threads[here][hit]
                for n in np.unique(who // self.warp_size, return_index=True)[1].tolist():
                    now = block * WIDTH + int(who[n])
                    late = [
                        first for first, (numbers, time) in known.items()
                        if not any(self.in_order(number, time, now) for number in numbers)
                    ]  # fmt: skip
                    if late and (every or len(late) == len(known)):
                        self.report(None, at[n], ("load", was, late[0]), ("store", line, now))
                if hit.any() and not every:
                    del self.read[block][reader]

    def in_order(self, before, time, now):
        """Is what `before` did at `time` known to thread `now`?"""
        if before == now or (before // WIDTH == now // WIDTH and time < self.barriers.get(np.array([now // WIDTH]))[0]):
            return True
        if self.warps and self.ordered_in_warp(*(np.array([n]) for n in (before, time, now)))[0]:
            return True
        return self.acquired(now, before, time)

    # Accesses: arrays over the active lanes of one instruction.

    def shared(self, kind, offsets, size, blocks, threads, line, values=None):
        """An access to the blocks' shared memory: byte offsets, block numbers, thread numbers in the block."""
        offsets, blocks = np.asarray(offsets, np.int64), np.asarray(blocks, np.int64)
        if len(offsets):
            places = self.rows_of(blocks, int(offsets.max()) + size) * self.row_bytes + offsets
            self.access(None, kind, places, offsets, size, blocks, threads, line, values, kind == "atomic")
            if kind == "atomic":
                numbers = blocks * WIDTH + np.asarray(threads, np.int64)
                self.synchronise(None, kind, blocks << 32 | offsets, blocks, numbers, False)

    def global_(self, kind, buffer, offsets, size, blocks, threads, line, values=None, strong=False):
        """An access to a buffer in global memory.

        strong   True: a volatile, relaxed or acquire access. "release": it publishes without a fence before it.
        """
        offsets, blocks = np.asarray(offsets, np.int64), np.asarray(blocks, np.int64)
        if not len(offsets):
            return
        ordered = bool(strong) or kind == "atomic"
        self.access(buffer, kind, offsets, offsets, size, blocks, threads, line, values, ordered)
        numbers = blocks * WIDTH + np.asarray(threads, np.int64)
        if ordered:
            self.synchronise(buffer, kind, offsets, blocks, numbers, strong == "release")
        if kind != "load":
            self.stored.set(numbers, self.now)

    def tick(self, kind=None, line=0, strong=False):
        """Time goes on: the number of this event."""
        self.kinds.append(kind)
        now = len(self.kinds) - 1
        self.lines.reserve(now + 1)
        self.strong.reserve(now + 1)
        self.lines.items[now], self.strong.items[now] = line, strong
        return now

    def rows_of(self, blocks, end):
        """The row of each block in the shadow of shared memory; `end` is what a row must hold."""
        if end > self.row_bytes:  # make all rows longer
            old, self.row_bytes = self.row_bytes, max(256, 1 << (end - 1).bit_length())
            if self.rows:
                self.memory[None].lengthen_rows(old, self.row_bytes)
        most = max(1, 4 * REMEMBERED // self.row_bytes)
        found = {}
        for block in np.unique(blocks).tolist():
            row = self.rows.pop(block, None)
            if row is None:
                row = len(self.rows)
                if row >= most and (oldest := next(iter(self.rows))) not in found:
                    row = self.rows.pop(oldest)
                    self.memory[None].forget(row * self.row_bytes, self.row_bytes)
            self.rows[block] = found[block] = row
        names = np.array(sorted(found))
        return np.array([found[b] for b in names.tolist()])[np.searchsorted(names, blocks)]

    def access(self, buffer, kind, places, offsets, size, blocks, threads, line, values, strong):
        if kind not in ("load", "store", "atomic"):
            raise ValueError(f"kind: expected 'load', 'store' or 'atomic'; got {kind!r}")
        numbers = blocks * WIDTH + np.asarray(threads, np.int64)
        self.now = self.tick(kind, line, strong)
        shadow = self.memory.setdefault(buffer, Shadow(size))
        at, lane = shadow.items_of(places, size)
        values = None if values is None else bits_of(values)[lane]
        numbers = numbers[lane]
        if kind == "store":
            self.check_one_store(buffer, at, lane, offsets, numbers, values, shadow, line)
        earlier = [(shadow.writer, shadow.write_time)]
        if kind != "load":
            earlier += [(shadow.reader, shadow.read_time), (shadow.other_reader, shadow.other_time)]
        for threads_before, times in earlier:
            before, time = threads_before[at], times[at]
            open_ = (before != NOBODY) & (before != numbers)
            if strong:
                open_ &= ~self.strong.get(time)
            if kind == "store" and threads_before is shadow.writer and values is not None and open_.any():
                open_ &= (shadow.value[at] != values) | (self.lines.get(time) != line)
            if open_.any():
                self.check_ordered(buffer, kind, np.flatnonzero(open_), before, time, numbers, lane, offsets, line)
        if kind == "load":
            shadow.note_readers(at, numbers, self.now)
        else:
            shadow.note_writer(at, numbers, self.now, values)

    def check_one_store(self, buffer, at, lane, offsets, numbers, values, shadow, line):
        """Two lanes of one store at one place: a race, unless they write the same."""
        order = np.argsort(at, kind="stable")
        meet = at[order][1:] == at[order][:-1]
        if meet.any():
            left, right = order[:-1][meet], order[1:][meet]
            differ = numbers[left] != numbers[right]
            if values is not None:
                differ &= values[left] != values[right]
            if differ.any():
                i, j = left[differ][0], right[differ][0]
                self.report(buffer, offsets[lane[j]], ("store", line, numbers[i]), ("store", line, numbers[j]))

    def check_ordered(self, buffer, kind, which, before, time, numbers, lane, offsets, line):
        """Raise if one of the pairs before[which] -> numbers[which] is not ordered."""
        before_, time_, now_ = before[which], time[which], numbers[which]
        block, block_now = before_ // WIDTH, now_ // WIDTH
        ordered = (block == block_now) & (time_ < self.barriers.get(block))
        which, before_, time_, now_ = (a[~ordered] for a in (which, before_, time_, now_))
        if len(which) and self.warps:
            ordered = self.ordered_in_warp(before_, time_, now_)
            which, before_, time_, now_ = (a[~ordered] for a in (which, before_, time_, now_))
        for i, one, when, other in zip(which.tolist(), before_.tolist(), time_.tolist(), now_.tolist()):
            if not self.acquired(other, one, when):
                was = self.kinds[when], int(self.lines.items[when]), one
                self.report(buffer, offsets[lane[i]], was, (kind, line, other))

    def ordered_in_warp(self, before, time, now):
        warp = now // self.warp_size
        same = before // self.warp_size == warp
        slot = np.array([self.warps.get(w, -1) for w in warp.tolist()])
        same &= slot >= 0
        known = np.zeros(len(now), np.int64)
        inside = slot[same], now[same] % self.warp_size, before[same] % self.warp_size
        known[same] = self.known.items[inside]
        return same & (time < known)

    def acquired(self, thread, before, time):
        """Has `thread` acquired what `before` did at `time`?"""
        block = thread // WIDTH
        if (clock := self.block_clocks.get(block)) and clock.covers(before, time):
            return True
        clock = self.thread_clocks.get(block, {}).get(thread)
        return clock is not None and clock.covers(before, time)

    # Publishing and acquiring, place by place.

    def synchronise(self, buffer, kind, offsets, blocks, numbers, release):
        fences = self.fences.get(numbers)
        if not (release or self.published or self.fenced or fences.any()):
            return
        for offset, block, number, fence in zip(
            offsets.tolist(), blocks.tolist(), numbers.tolist(), fences.tolist(), strict=True
        ):
            place = (buffer, offset)
            held = self.published.get(place)
            if kind != "store" and held is not None:
                self.acquire(block, number, held)
            if kind == "load":
                continue
            new = self.to_publish(block, number, fence, release)
            if kind == "atomic" and new is None:  # an update leaves what is published there, or adds to it
                new = held
            if new is None:
                self.published.pop(place, None)
            else:
                self.published[place] = new

    def to_publish(self, block, number, fence, release):
        """The Clock that a store by this thread publishes, or None."""
        fenced = self.fenced.get(block)
        if not (release or fence or fenced):
            return None
        clock = Clock()
        if fenced:
            clock.join(fenced)
        if release or fence:
            one = np.array([block])
            base = self.barriers.get(one)[0] if release else self.fence_base.get(np.array([number]))[0]
            clock.raise_base(block, int(base))
            clock.raise_threads({number: self.now if release else fence})
            clock.raise_threads(self.mates(number, self.now if release else fence))
        for held in self.block_clocks.get(block), self.thread_clocks.get(block, {}).get(number):
            if held is not None:
                clock.join(held)
        return clock

    def mates(self, number, until):
        """What this thread knew at that time of its warp by __syncwarp: {thread number: time}."""
        slot, lane = self.warps.get(number // self.warp_size), number % self.warp_size
        known = self.known.items[slot][lane].tolist() if slot is not None else []
        return {number - lane + n: time for n, time in enumerate(known) if 0 < time <= until and n != lane}

    def acquire(self, block, number, clock):
        mine = self.thread_clocks.setdefault(block, {}).setdefault(number, Clock())
        if mine.last is not clock:
            mine.join(clock)
            mine.last = clock

    def report(self, buffer, offset, first, second, need=""):
        def full(access):
            kind, line, number = access
            return kind, line, int(number) // WIDTH, int(number) % WIDTH

        space = "shared" if buffer is None else "global"
        raise RaceError(space, buffer, int(offset), full(first), full(second), None, need)


class Shadow:
    """Who wrote and read each item of a memory last: (thread number, time) each. An item is a few bytes."""

    FIELDS = ("writer", "write_time", "reader", "read_time", "other_reader", "other_time", "value")

    def __init__(self, item):
        self.item, self.length = item, 0
        for name in self.FIELDS:
            setattr(self, name, np.zeros(0, np.int64))

    def items_of(self, places, size):
        """(items, lane of each) of accesses of `size` bytes at `places`. Items shrink to what accesses need."""
        low = int(np.bitwise_or.reduce(places)) | size
        need = min(low & -low, self.item)
        if need < self.item:
            for name in self.FIELDS:
                setattr(self, name, np.repeat(getattr(self, name), self.item // need))
            self.item, self.length = need, self.length * (self.item // need)
        each = size // self.item
        at = (places // self.item)[:, None] + np.arange(each)
        self.reserve(int(at.max()) + 1)
        return at.reshape(-1), np.repeat(np.arange(len(places)), each)

    def reserve(self, length):
        if length > self.length:
            length = max(length, 2 * self.length)
            for name in self.FIELDS:
                old = getattr(self, name)
                new = np.full(length, NOBODY if name in ("writer", "reader", "other_reader") else 0, np.int64)
                new[: len(old)] = old
                setattr(self, name, new)
            self.length = length

    def note_readers(self, at, numbers, now):
        old, time = self.reader[at], self.read_time[at]
        new = (old != numbers) & (old != NOBODY)
        self.other_reader[at[new]], self.other_time[at[new]] = old[new], time[new]
        self.reader[at], self.read_time[at] = numbers, now
        more = self.reader[at] != numbers  # other lanes of this instruction
        self.other_reader[at[more]], self.other_time[at[more]] = numbers[more], now

    def note_writer(self, at, numbers, now, values):
        self.writer[at], self.write_time[at] = numbers, now
        self.reader[at] = self.other_reader[at] = NOBODY
        self.value[at] = 0 if values is None else values

    def forget(self, place, size):
        part = slice(place // self.item, (place + size) // self.item)
        self.writer[part] = self.reader[part] = self.other_reader[part] = NOBODY

    def lengthen_rows(self, old, new):
        """Rows of `old` bytes become rows of `new`."""
        rows = -(-self.length * self.item // old)
        for name in self.FIELDS:
            was = getattr(self, name)
            empty = NOBODY if name in ("writer", "reader", "other_reader") else 0
            wide = np.full((rows, new // self.item), empty, np.int64)
            padded = np.full(rows * old // self.item, empty, np.int64)
            padded[: len(was)] = was
            wide[:, : old // self.item] = padded.reshape(rows, -1)
            setattr(self, name, wide.reshape(-1))
        self.length = rows * new // self.item


class Clock:
    """What is known to have happened: of each block all up to a time, of some threads more."""

    def __init__(self):
        self.base, self.threads = np.zeros(0, np.int64), {}
        self.last = None

    def copy(self):
        new = Clock()
        new.base, new.threads = self.base.copy(), dict(self.threads)
        return new

    def covers(self, thread, time):
        block = thread // WIDTH
        return (block < len(self.base) and time <= self.base[block]) or time <= self.threads.get(thread, -1)

    def raise_base(self, block, time):
        self.lengthen(block + 1)
        self.base[block] = max(self.base[block], time)

    def raise_threads(self, times):
        for thread, time in times.items():
            if time > self.threads.get(thread, 0):
                self.threads[thread] = time

    def lengthen(self, length):
        if length > len(self.base):
            self.base = np.concatenate([self.base, np.zeros(length - len(self.base), np.int64)])

    def join(self, other):
        self.lengthen(len(other.base))
        part = self.base[: len(other.base)]
        np.maximum(part, other.base, out=part)
        self.raise_threads(other.threads)
        return self


class Grown:
    """An array over numbers that are not known beforehand: 0 until set."""

    def __init__(self, dtype=np.int64, shape=()):
        self.items = np.zeros((0, *shape), dtype)

    def reserve(self, length):
        if length > len(self.items):
            new = np.zeros((max(length, 2 * len(self.items), 64), *self.items.shape[1:]), self.items.dtype)
            new[: len(self.items)] = self.items
            self.items = new

    def set(self, numbers, value):
        if len(numbers):
            self.reserve(int(numbers.max()) + 1)
            self.items[numbers] = value

    def get(self, numbers):
        if len(numbers):
            self.reserve(int(numbers.max()) + 1)
        return self.items[numbers]


def bits_of(values):
    """Values of any type as integers that are equal where their bits are."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind not in "iub":
        values = values.view(f"u{values.dtype.itemsize}")
    return values.astype(np.int64)
