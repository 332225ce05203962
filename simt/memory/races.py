"""Races: two accesses to the same byte, at least one of them writing, with nothing that orders the two.

    races = Races()
    races.shared("store", offsets, 4, blocks, threads, line=7, values=values)      the lanes of one instruction
    races.barrier(blocks)                                                          they passed __syncthreads()
    races.shared("load", ...)                                                      raises RaceError at a race

What order is, is said in clocks.py: PTX's causality order. Every access is an event; for every few bytes of memory
its last ordinary write, all reads since and all strong accesses since are remembered (shadow.py), and an access is
checked against them. Two strong accesses (volatile, relaxed, acquire, release, atomics) are no race if each one's scope
reaches the other's thread and they are of one size. Lanes of one warp are not ordered by running together: without a
__syncwarp between them they are two threads like others. Threads that write the same value by the same line are let
pass.

An asynchronous copy (cp.async) writes from its issue on, until its thread has waited for it. mbarriers order: an
arrival releases, a wait that sees the phase complete acquires, within the block. A fence.sc is a fence like any other:
the order that such fences have among themselves differs from run to run, and orders nothing here.

What it does not see: a race that this run's order and inputs did not bring about; order by control alone; what bulk
copies do to global memory; blocks of a very large grid whose shared memory is no longer remembered (REMEMBERED).
"""

from dataclasses import dataclass

import numpy as np

from simt.errors import SimtError
from simt.memory.clocks import CTA, GPU, NO_RELEASE, SYS, WARP, WARPS, WIDTH, Grown, Knowledge
from simt.memory.shadow import Shadow

REMEMBERED = 1 << 22  # places in the blocks' shared memory, together
LISTS = 32  # readers of an item that are compared at once
NEVER = 1 << 62  # when an asynchronous copy is done that nobody has waited for
ORDINARY = (
    "one of the two is an ordinary access, the other is not: a flag is set and read by atomics, or through volatile"
)
TOO_NARROW = "one of the two has the scope of a block (.cta) only, and they are in different blocks"
NOT_SYSTEM = (
    "they are on different devices, and one of the two has the scope of one device (.gpu) or less: between devices it "
    "takes .sys"
)
NOT_WAITED = "the first is an asynchronous copy that nothing has waited for: it writes until cp.async.wait_group"
KINDS = [None, "load", "store", "atomic"]


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

    need = need or lacking(first, second)
    return f"race on {where}: {who(first)}, and {who(second)}. {need[0].upper()}{need[1:]}."


def lacking(first, second):
    """What two accesses (kind, line, block, thread) would take to be in order."""
    if first[2] != second[2]:
        return "they are in different blocks: only atomics, or a fence and a flag, put them in order"
    if first[3] // WARP != second[3] // WARP:
        return "there is no __syncthreads() between the two"
    return "there is no __syncwarp() or __syncthreads() between the two, though both are in one warp"


@dataclass(frozen=True, slots=True)
class Strong:
    """How strong an access is: its scope (0: not at all), and whether it acquires or releases."""

    scope: int = 0
    acquire: bool = False
    release: bool = False


WEAK, RELAXED = Strong(), Strong(GPU)


@dataclass(slots=True)
class Access:
    """What the lanes of one instruction do together.

    strong    Strong; None: an atomic of scope gpu, or an ordinary access
    values    of a store: one for each lane, or (lanes, elements); of an atomic: has it written (a compare-and-swap
              that fails has not)? None: yes
    pending   the store of an asynchronous copy that has been issued and not waited for
    arriving  the same store once more: it has been waited for
    ends      an mbarrier ends: of a warp that was there, one lane speaks for all (cuda::pipeline's destructor orders
              them by __match_any_sync, which orders nothing else)
    item      the bytes of one element, if the access is to several
    event     what it has been given already, if it comes late (simt/memory/aside.py)
    """

    kind: str
    size: int
    line: int
    values: object = None
    strong: Strong = None
    pending: bool = False
    arriving: bool = False
    ends: bool = False
    item: int = None
    event: int = None

    def __post_init__(self):
        if self.kind not in ("load", "store", "atomic"):
            raise ValueError(f"kind: expected 'load', 'store' or 'atomic'; got {self.kind!r}")
        self.strong = self.strong or (RELAXED if self.kind == "atomic" else WEAK)
        self.item = self.item or self.size


SCOPES = {"cta": CTA, "cluster": CTA, "gpu": GPU, "gl": GPU, "sys": SYS}  # a cluster has one block here


def strength(parts):
    """Strong of an instruction, given the parts of its name."""
    if parts[0] not in ("ld", "st", "atom", "red"):
        return WEAK
    if "volatile" in parts:
        return Strong(SYS)
    said = {"relaxed", "acquire", "release", "acq_rel", "mmio"} & set(parts)
    if not said and parts[0] in ("ld", "st"):
        return WEAK
    scope = next((SCOPES[p] for p in parts if p in SCOPES), GPU)
    return Strong(scope, bool(said & {"acquire", "acq_rel"}), bool(said & {"release", "acq_rel"}))


def scope_of_fence(parts):
    """The scope of membar and fence."""
    return next((SCOPES[p] for p in parts if p in SCOPES), GPU)


class Races:
    """What all threads of a launch have done to memory so far. See the file's head. several: of launches on several
    devices (simt/devices.py), whose blocks have numbers of their own."""

    def __init__(self, several=False):
        self.now = 0
        self.kinds, self.lines, self.scopes, self.sizes = (Grown(np.int32) for _ in range(4))  # by event
        self.when = Grown()  # event -> its time, NEVER while an asynchronous copy is under way
        self.knowledge = Knowledge(several)
        self.memory = {}  # buffer -> Shadow; None: shared memory
        self.aside = {}  # Space of a buffer -> Aside (simt/memory/aside.py)
        self.rows, self.row_bytes = {}, 0  # block -> its row in the shadow of shared memory
        self.proxy = Grown()  # thread -> time of its last fence.proxy.async
        self.read = {}  # block -> {reader: (16-byte pieces, line, {its first thread: (its threads, time of the wait)})}
        self.copied = set()  # events of what bulk copies have written
        self.copying = False  # has there been an asynchronous copy (cp.async)?
        self.sources = {}  # what asynchronous copies under way read: see simt/memory/accesses.py

    def event(self, kind=None, line=0, scope=0, size=0, when=None):
        """Time goes on: the number of this event."""
        self.now = now = self.now + 1
        for grown, value in (
            (self.kinds, KINDS.index(kind)), (self.lines, line), (self.scopes, scope), (self.sizes, size),
            (self.when, now if when is None else when),
        ):  # fmt: skip
            grown.reserve(now + 1)
            grown.items[now] = value
        return now

    # What orders.

    def barrier(self, blocks):
        """All threads of these blocks have reached __syncthreads() and go on."""
        blocks = np.asarray(blocks, np.int64)
        self.knowledge.barrier(blocks, self.event())
        if self.read:
            for block in self.read.keys() & set(blocks.tolist()):
                del self.read[block]

    def part_barrier(self, block, number, arriving, waiting):
        """Warps of a block have come to a barrier for a part of it; those that wait go on."""
        self.knowledge.part_barrier(int(block), int(number), arriving, waiting, self.event())

    def thread_barrier(self, block, number, arriving, waiting):
        """The same where warps have not come as a whole: threads."""
        arriving, waiting = (numbered(int(block), threads) for threads in (arriving, waiting))
        self.knowledge.thread_barrier(int(block), int(number), arriving, waiting, self.event())

    def has_come(self, block, number):
        """Has anybody come to this barrier and not waited (bar.arrive)?"""
        return (int(block), int(number)) in self.knowledge.arrived

    def leave(self, blocks, threads):
        """These threads have left the kernel while others of their blocks stay: no barrier behind speaks for them."""
        self.knowledge.leave(numbered(blocks, threads), self.event())

    def warp_barrier(self, blocks, warps, lanes_mask):
        """__syncwarp: in each of these warps, the lanes of its mask (bit n for lane n) have met."""
        numbers = np.asarray(blocks, np.int64) * WARPS + np.asarray(warps, np.int64)
        masks = np.broadcast_to(np.asarray(lanes_mask).astype(np.int64), numbers.shape)
        self.knowledge.warp_barrier(numbers, masks, self.event())

    def fence(self, blocks, threads, scope=GPU):
        """These threads have executed a fence of this scope."""
        self.knowledge.fence(numbered(blocks, threads), scope, self.event())

    # What runs beside the threads: mbarriers order, bulk copies and wgmma read and write.

    def released(self, block, threads):
        """The Clock of all that these threads of a block have done or acquired until now."""
        return self.knowledge.now_lanes(numbered(int(block), threads), self.event())

    def acquired_by(self, block, threads, clock):
        self.knowledge.acquire_lanes(numbered(int(block), threads), clock)

    def proxy_fence(self, blocks, threads):
        """fence.proxy.async by these threads."""
        self.proxy.set(numbered(blocks, threads), self.event())

    def asynchronous(self, kind, offsets, size, block, threads, line, there=None):
        """A bulk copy ("store": by one thread) or a wgmma's or bulk store's reading ("load") of shared memory. The
        threads are of `block`, the memory too, or of the block `there`, another of the cluster.

        A load is ordered behind a store if in every warp that issues it some lane is; ordinary stores need a
        fence.proxy.async by the thread that stored, or by one that issues. Loads are remembered when they have been
        waited for (`waited`); until then the machine itself lets nobody write there.
        """
        offsets, threads = np.asarray(offsets, np.int64), np.asarray(threads, np.int64)
        if kind == "store":
            who, own = np.full(len(offsets), threads[0]), np.full(len(offsets), block)
            there = own if there is None else np.full(len(offsets), there)
            self.overwritten(offsets, size, there, who, line, every=False, by=own)
            self.copied.add(self.shared("store", offsets, size, own, who, line, there=there))
            return
        places = self.rows_of(np.array([block]), int(offsets.max()) + size)[0] * self.row_bytes + offsets
        self.event("load", line)
        shadow = self.memory.setdefault(None, Shadow(size))
        at, lane = shadow.items_of(places, size)
        found, strong_writers, strong_events = shadow.strong_ones(at, self.stale, lambda kind: kind[0])
        writers = np.concatenate([shadow.writer[at], strong_writers])
        events = np.concatenate([shadow.write_event[at], strong_events])
        lane = np.concatenate([lane, lane[found]])
        numbers = block * WIDTH + threads
        known = np.flatnonzero(events)
        _, first = np.unique(writers[known] * (self.now + 1) + events[known], return_index=True)
        which = known[first]
        warps, leaders = np.unique(numbers // WARP, return_index=True)
        known = self.known_by_some(writers[which], self.when.get(events[which]), numbers, leaders)
        fenced = np.maximum(self.proxy.get(numbers).max(), self.proxy.get(writers[which])).tolist()
        for n, row, known_to_all, fence in zip(which.tolist(), known, known.all(axis=1).tolist(), fenced):
            one, event = int(writers[n]), int(events[n])
            if not known_to_all:
                late = int(warps[np.argmin(row)]) * WARP
                self.report(None, offsets[lane[n]], self.access_of(event, one), ("load", line, late))
            if event not in self.copied and fence < event:
                need = (
                    "a fence.proxy.async is missing after the store: without it bulk copies and wgmma may not see "
                    "what ordinary stores have written"
                )
                self.report(None, offsets[lane[n]], self.access_of(event, one), ("load", line, int(numbers[0])), need)

    def known_by_some(self, before, times, numbers, leaders):
        """[pair, warp]: does some lane of the warp know what before[pair] did? leaders: each warp's first lane."""
        pairs = len(before)

        def ask(threads):
            return self.knowledge.ordered(
                np.repeat(before, len(threads)), np.repeat(times, len(threads)), np.tile(threads, pairs)
            ).reshape(pairs, -1)

        out = ask(numbers[leaders])
        if not out.all():
            out = np.logical_or.reduceat(ask(numbers), leaders, axis=1)
        return out

    def waited(self, reader, pieces, block, threads, line):
        """These threads of a block know by a wait that `reader` (any name) has read these 16-byte pieces."""
        known = self.read.setdefault(block, {}).setdefault(reader, (np.unique(pieces), line, {}))[2]
        numbers = numbered(block, threads)
        known[int(numbers[0])] = numbers, self.event("load", line)

    def overwritten(self, offsets, size, blocks, threads, line, every=True, by=None):
        """A store to shared memory: what read there before must be known to be done. by: the threads' blocks, where
        these are not the memory's.

        Known by all who have waited (`every`), as ordinary stores need it; for a bulk copy one of them is enough, since
        it is common to let one thread of a warpgroup speak for all.
        """
        for block in self.read.keys() & set(blocks.tolist()):
            here = blocks == block
            ends = (offsets[here][:, None] + np.array([0, size - 1])) // 16
            lowest, highest = int(ends.min()), int(ends.max())
            for reader, (pieces, was, known) in list(self.read[block].items()):
                if not len(pieces) or pieces[-1] < lowest or highest < pieces[0]:  # they are sorted: it read elsewhere
                    continue
                hit = np.isin(ends, pieces).any(axis=1)
                if not hit.any():
                    continue
                at, who, own = offsets[here][hit], threads[here][hit], (blocks if by is None else by)[here][hit]
                for n in np.unique(who // WARP, return_index=True)[1].tolist():
                    now = int(own[n]) * WIDTH + int(who[n])
                    late = [
                        first for first, (numbers, time) in known.items()
                        if not self.knowledge.ordered(
                            numbers, np.full(len(numbers), time), np.full(len(numbers), now)
                        ).any()
                    ]  # fmt: skip
                    if late and (every or len(late) == len(known)):
                        self.report(None, at[n], ("load", was, late[0]), ("store", line, now))
                if not every:
                    del self.read[block][reader]

    # Accesses: arrays over the active lanes of one instruction.

    def shared(self, kind, offsets, size, blocks, threads, line, values=None, there=None, **more):
        """An access to the blocks' shared memory, or to that of the blocks `there`: byte offsets, block and thread
        numbers. Its event. more: Access."""
        access = Access(kind, size, line, values, **more)
        offsets, blocks = np.asarray(offsets, np.int64), np.asarray(blocks, np.int64)
        if not len(offsets):
            return None
        there = blocks if there is None else there
        places = self.rows_of(there, int(offsets.max()) + size) * self.row_bytes + offsets
        return self.access(access, None, places, offsets, there << 32 | offsets, numbered(blocks, threads))

    def global_(self, kind, buffer, offsets, size, blocks, threads, line, values=None, **more):
        """An access to a buffer in global memory."""
        access = Access(kind, size, line, values, **more)
        offsets = np.asarray(offsets, np.int64)
        if not len(offsets):
            return None
        return self.access(access, buffer, offsets, offsets, offsets, numbered(blocks, threads))

    def access(self, access, buffer, places, offsets, names, numbers):
        """places: bytes in the shadow; offsets: as messages name them; names: as published places are known."""
        kind, size = access.kind, access.size
        late = access.event is not None
        event = access.event
        self.copying |= access.pending
        if not late:
            event = self.event(kind, access.line, access.strong.scope, access.item, NEVER if access.pending else None)
        shadow = self.memory.setdefault(buffer, Shadow(size))
        at, lane = shadow.items_of(places, size)
        values = None
        if kind == "store" and access.values is not None:
            values = for_items(bits_of(access.values), size // shadow.item)
        threads = numbers if len(at) == len(numbers) else numbers[lane]
        if not late:
            if kind != "load":
                self.check_together(access, buffer, at, lane, offsets, threads, values)
            self.check(access, buffer, shadow, at, lane, threads, values, offsets)
        stale = self.stale if buffer is None else nothing_stale
        if access.strong.scope:
            for k in range(0, size, access.item):
                what = kind != "load", access.strong.scope, access.item, access.line
                shadow.note_strong(at, places + k, numbers, access.item, event, what, stale)
        elif kind == "load":
            shadow.note_readers(at, threads, event, stale)
        else:
            shadow.note_writer(at, threads, event, values)
        self.synchronise(access, buffer, names, numbers, event)
        return event

    def synchronise(self, access, buffer, names, numbers, event):
        """What a strong access releases and acquires; what an ordinary store undoes."""
        size, item = access.size, access.item
        if access.strong.scope:
            for k in range(0, size, item):
                self.knowledge.strong(
                    buffer, access.kind, names + k, numbers, access.strong, access.line, event,
                    access.values if access.kind == "atomic" else None,
                )  # fmt: skip
        elif access.kind == "store" and self.knowledge.held.get(buffer):
            self.knowledge.weak_store(buffer, (names[:, None] + np.arange(0, size, min(item, 4))).reshape(-1))

    def stale(self, threads, events):
        """Accesses to shared memory before their block's last barrier: all that comes is behind them."""
        return self.knowledge.in_company(threads, events, self.knowledge.barriers.get(threads // WIDTH))

    def rows_of(self, blocks, end):
        """The row of each block in the shadow of shared memory; `end` is what a row must hold."""
        if end > self.row_bytes:  # make all rows longer
            old, self.row_bytes = self.row_bytes, max(256, 1 << (end - 1).bit_length())
            if self.rows:
                self.memory[None].lengthen_rows(old, self.row_bytes)
        most = max(1, 4 * REMEMBERED // self.row_bytes)
        found = {}
        one = (blocks == blocks[0]).all()  # as it mostly is
        names, back = (blocks[:1], np.zeros(len(blocks), np.int64)) if one else np.unique(blocks, return_inverse=True)
        for block in names.tolist():
            row = self.rows.pop(block, None)
            if row is None:
                row = len(self.rows)
                if row >= most and (oldest := next(iter(self.rows))) not in found:
                    row = self.rows.pop(oldest)
                    self.memory[None].forget(row * self.row_bytes, self.row_bytes)
            self.rows[block] = found[block] = row
        return np.array([found[b] for b in names.tolist()])[back]

    # Checks.

    def check_together(self, access, buffer, at, lane, offsets, threads, values):
        """Two lanes of one store or atomic at one place: a race, unless they write the same, or both are strong."""
        if access.strong.scope >= GPU:
            return
        order = np.argsort(at, kind="stable")
        meet = at[order][1:] == at[order][:-1]
        if meet.any():
            left, right = order[:-1][meet], order[1:][meet]
            if access.strong.scope:
                differ = threads[left] // WIDTH != threads[right] // WIDTH
            else:
                differ = threads[left] != threads[right]
            if access.kind == "store" and values is not None:
                differ &= values[left] != values[right]
            if differ.any():
                i, j = left[differ][0], right[differ][0]
                first, second = ((access.kind, access.line, threads[n]) for n in (i, j))
                self.report(buffer, offsets[lane[j]], first, second, TOO_NARROW if access.strong.scope else "")

    def check(self, access, buffer, shadow, at, lane, threads, values, offsets):
        """The access against what was there before."""

        def compare(which, before, events):
            bad = self.unordered(access, before, events, threads[which]) if len(which) else None
            if bad is not None:
                n, need = bad
                first = self.access_of(int(events[n]), int(before[n]))
                second = access.kind, access.line, int(threads[which[n]])
                self.report(buffer, offsets[lane[which[n]]], first, second, need)

        writer, written = shadow.writer[at], shadow.write_event[at]
        which = np.flatnonzero((written != 0) & (writer != threads))
        if len(which):
            events = written[which]
            if access.kind == "store" and values is not None:
                differ = (shadow.value[at[which]] != values[which]) | (self.lines.get(events) != access.line)
                which, events = which[differ], events[differ]
            compare(which, writer[which], events)
        if access.kind != "load":
            self.check_own_copies(access, buffer, shadow, at, lane, threads, offsets)
            found = []  # of several lists at once
            for which, readers, events in shadow.readers(at):
                other = readers != threads[which]
                found.append((which[other], readers[other], events[other]))
                if len(found) == LISTS:
                    compare(*map(np.concatenate, zip(*found)))
                    found = []
            if found:
                compare(*map(np.concatenate, zip(*found)))
        if shadow.log.logged and not (
            access.strong.scope and shadow.log.only(CTA if buffer is None else self.knowledge.widest, access.item)
        ):
            stale = self.stale if buffer is None else nothing_stale
            load, scope, item = access.kind == "load", access.strong.scope, access.item

            def asked(kind):
                """Not of loads to a load, and not those that need no order, wherever their threads are."""
                writes, other, size, _ = kind
                return (writes or not load) and (min(scope, other) < self.knowledge.widest or size != item)

            which, others, events = shadow.strong_ones(at, stale, asked)
            other = others != threads[which]
            compare(which[other], others[other], events[other])

    def check_own_copies(self, access, buffer, shadow, at, lane, threads, offsets):
        """Not even its own thread may write where an asynchronous copy that it has not waited for does."""
        if access.arriving or not self.copying or buffer is not None:
            return
        events = shadow.write_event[at]
        own = (shadow.writer[at] == threads) & (self.when.get(events) == NEVER)
        if own.any():
            n = int(np.argmax(own))
            first, second = self.access_of(int(events[n]), threads[n]), (access.kind, access.line, threads[n])
            self.report(buffer, offsets[lane[n]], first, second, NOT_WAITED)

    def unordered(self, access, before, events, now):
        """(n, what is missing) of the first pair before[n] -> now[n] that is a race, or None."""
        which, narrow = range(len(now)), None
        if access.strong.scope and len(now):
            scopes = self.scopes.get(events)
            near = (before // WIDTH == now // WIDTH) | ((scopes >= GPU) & (access.strong.scope >= GPU))
            if self.knowledge.several and access.strong.scope < SYS:
                near &= self.on_one_device(before, now)
            elif self.knowledge.several:
                near &= (scopes == SYS) | self.on_one_device(before, now)
            which = np.flatnonzero((scopes == 0) | ~near | (self.sizes.get(events) != access.item))
            narrow = ((scopes > 0) & ~near)[which]
            before, events, now = before[which], events[which], now[which]
        if not len(now):
            return None
        times = self.when.get(events)
        ordered = self.knowledge.ordered(before, times, now)
        if access.ends:
            for lane in range(WARP):
                ordered |= self.knowledge.ordered(before // WARP * WARP + lane, times, now)
        if ordered.all():
            return None
        n = int(np.argmin(ordered))
        time = int(times[n])
        if time == NEVER:
            need = NOT_WAITED
        elif narrow is not None and narrow[n]:
            apart = self.knowledge.several and not self.on_one_device(before[n : n + 1], now[n : n + 1])[0]
            need = NOT_SYSTEM if apart else TOO_NARROW
        else:
            need = self.knowledge.missing(int(before[n]), time, int(now[n]))
            if need == NO_RELEASE and bool(access.strong.scope) != bool(self.scopes.get(events)[n]):
                need = ORDINARY
        return int(which[n]), need

    def on_one_device(self, threads, others):
        device = self.knowledge.device
        return device.get(threads // WIDTH) == device.get(others // WIDTH)

    def access_of(self, event, thread):
        return KINDS[self.kinds.items[event]], int(self.lines.items[event]), thread

    def report(self, buffer, offset, first, second, need=""):
        def full(access):
            kind, line, number = access
            return kind, line, int(number) // WIDTH, int(number) % WIDTH

        space = "shared" if buffer is None else "global"
        raise RaceError(space, buffer, int(offset), full(first), full(second), None, need)


def numbered(blocks, threads):
    """Thread numbers in the whole grid."""
    return np.asarray(blocks, np.int64) * WIDTH + np.asarray(threads, np.int64)


def nothing_stale(threads, events):
    """Of global memory: a barrier of one block says nothing to others."""
    return np.zeros(len(threads), bool)


def for_items(values, each):
    """Values (accesses, elements) as one for each of `each` items of an access, equal where the values are."""
    values = values.reshape(len(values), -1)
    count = values.shape[1]
    if count < each:
        values = np.repeat(values, each // count, axis=1)
    elif count > each:
        parts = values.reshape(len(values), each, -1)
        values = parts[..., 0]
        for k in range(1, parts.shape[2]):
            values = values * np.int64(0x9E3779B97F4A7C1 | 1) + parts[..., k]
    return values.reshape(-1)


def bits_of(values):
    """Values of any type as integers that are equal where their bits are."""
    values = np.ascontiguousarray(values)
    if values.dtype.kind not in "iub":
        values = values.view(f"u{values.dtype.itemsize}")
    return values.astype(np.int64)
