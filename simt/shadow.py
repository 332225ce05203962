"""What a memory remembers for each few bytes (an item): its last ordinary store, all who have read it since, and the
strong accesses since then.

Who is a thread number, when an event's number (races.py). An ordinary store is in order with all that was there before,
or it is a race: so what comes behind it need only be compared with it. Strong accesses need no order among themselves,
none makes another be forgotten: they are kept in a log, which is sorted when somebody has to look at it.

Readers of an item are a list of nodes (thread, event, next), the latest first. A thread that reads again takes its own
node's place, so that a loop makes no list grow.
"""

import numpy as np

NOBODY = -1
MOST_NODES = 1 << 23  # then the lists are cut to their latest readers
MOST_LOGGED = 1 << 22  # accesses in a log, before those are dropped that others stand for
MOST_PAIRS = 1 << 22  # accesses of a log that one instruction is compared with: of each item the latest
ALIKE = 8  # so many of the log's last instructions may come again


class Shadow:
    FIELDS = {"writer": NOBODY, "write_event": 0, "value": 0, "head": NOBODY, "strong": 0}  # and what nothing is

    def __init__(self, item):
        self.item, self.length = item, 0
        for name in self.FIELDS:
            setattr(self, name, np.zeros(0, np.int8 if name == "strong" else np.int64))
        self.nodes = 0
        self.reader, self.event, self.next, self.top = (np.zeros(0, np.int64) for _ in range(4))
        self.log = Log()

    def items_of(self, places, size):
        """(items, lane of each) of accesses of `size` bytes at `places`. Items shrink to what accesses need."""
        low = int(np.bitwise_or.reduce(places)) | size
        need = min(low & -low, self.item)
        if need < self.item:
            for name in self.FIELDS:  # the parts of an item share its list
                setattr(self, name, np.repeat(getattr(self, name), self.item // need))
            self.length *= self.item // need
            self.log.index, self.item = None, need
        each = size // self.item
        if each == 1:
            at, lane = places // self.item, np.arange(len(places))
        else:
            at = ((places // self.item)[:, None] + np.arange(each)).reshape(-1)
            lane = np.repeat(np.arange(len(places)), each)
        self.reserve(int(at.max()) + 1)
        return at, lane

    def reserve(self, length):
        if length > self.length:
            length = max(length, 2 * self.length)
            for name, nothing in self.FIELDS.items():
                old = getattr(self, name)
                new = np.full(length, nothing, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
            self.length = length

    def note_readers(self, at, threads, event, stale):
        """These items are read. stale(threads, events): which readers need not be remembered any more."""
        head = self.head[at]
        known = np.flatnonzero(head != NOBODY)
        follow = head.copy()  # what the new nodes stand before
        events = np.full(len(at), event)
        tops = events.copy()  # the last event of a whole list
        if len(known):
            node = head[known]
            again = self.reader[node] == threads[known]
            follow[known[again]] = self.next[node[again]]
            events[known[again]] = np.maximum(event, self.event[node[again]])  # this one may come late
            tops[known] = np.maximum(event, self.top[node])
            rest = known[~again]
            if len(rest):
                gone = rest[stale(self.reader[head[rest]], self.top[head[rest]])]
                follow[gone], tops[gone] = NOBODY, event
        # Of several lanes at one item only one can be its head: the others stand behind it, one after another.
        many = len(at)
        start = self.nodes
        self.grow(start + many)
        new = np.arange(start, start + many)
        self.reader[new], self.event[new], self.next[new], self.top[new] = threads, events, follow, tops
        order = np.argsort(at, kind="stable")
        meet = at[order][1:] == at[order][:-1]
        if meet.any():
            behind, before = new[order[:-1][meet]], new[order[1:][meet]]
            self.next[before] = behind
        last = np.r_[~meet, True]
        self.head[at[order[last]]] = new[order[last]]
        self.nodes = start + many
        if self.nodes > MOST_NODES:
            self.cut()

    def grow(self, length):
        if length > len(self.reader):
            for name in ("reader", "event", "next", "top"):
                old = getattr(self, name)
                new = np.zeros(max(length, 2 * len(old), 1024), np.int64)
                new[: len(old)] = old
                setattr(self, name, new)

    def cut(self):
        """Keep the latest reader of each item only."""
        at = np.flatnonzero(self.head != NOBODY)
        nodes = self.head[at]
        self.reader, self.event, self.top = self.reader[nodes].copy(), self.event[nodes].copy(), self.top[nodes].copy()
        self.next = np.full(len(nodes), NOBODY, np.int64)
        self.head[at] = np.arange(len(nodes))
        self.nodes = len(nodes)

    def readers(self, at):
        """Yields (positions in `at`, readers, events): first the latest reader of each item, then the one before."""
        which = np.flatnonzero(self.head[at] != NOBODY)
        node = self.head[at[which]]
        while len(which):
            yield which, self.reader[node], self.event[node]
            node = self.next[node]
            on = node != NOBODY
            which, node = which[on], node[on]

    def note_writer(self, at, threads, event, values):
        self.writer[at], self.write_event[at] = threads, event
        self.head[at] = NOBODY
        self.value[at] = 0 if values is None else values

    def note_strong(self, at, places, threads, size, event, kind, stale):
        """A strong access. kind: (does it write, its scope, its size, its line)."""
        self.strong[at] = 1
        self.log.note(places, threads, size, event, kind)
        if self.log.logged > self.log.most:
            self.log.sort(self, stale)
            self.log.most = max(MOST_LOGGED, 2 * self.log.logged)

    def strong_ones(self, at, stale):
        """(positions in `at`, threads, events, do they write) of the strong accesses since the last ordinary store."""
        which = np.flatnonzero(self.strong[at])
        if not len(which):
            return which, which, which, which != 0
        if self.log.index is None:
            self.log.sort(self, stale)
        found, threads, events, writes = self.log.at(at[which])
        fresh = events > self.write_event[at[which[found]]]
        return which[found[fresh]], threads[fresh], events[fresh], writes[fresh]

    def forget(self, place, size):
        part = slice(place // self.item, (place + size) // self.item)
        self.writer[part] = self.head[part] = NOBODY
        self.strong[part] = 0
        self.log.change(keep=lambda places: (places < place) | (places >= place + size))

    def lengthen_rows(self, old, new):
        """Rows of `old` bytes become rows of `new`."""
        rows = -(-self.length * self.item // old)
        for name, empty in self.FIELDS.items():
            was = getattr(self, name)
            wide = np.full((rows, new // self.item), empty, was.dtype)
            padded = np.full(rows * old // self.item, empty, was.dtype)
            padded[: len(was)] = was
            wide[:, : old // self.item] = padded.reshape(rows, -1)
            setattr(self, name, wide.reshape(-1))
        self.length = rows * new // self.item
        self.log.change(move=lambda places: places // old * new + places % old)


class Log:
    """Strong accesses to one memory: as they came, and sorted by items where somebody had to look at them."""

    def __init__(self):
        self.kinds = []  # (does it write, scope, size, line) of the accesses
        self.batches = []  # [places, threads, size, event, number of the kind]; of the sorted ones all are arrays
        self.index = None  # (items, threads, events, kinds) of all, sorted by items, then events
        self.logged, self.most = 0, MOST_LOGGED

    def note(self, places, threads, size, event, kind):
        if kind not in self.kinds:
            self.kinds.append(kind)
        kind, self.index = self.kinds.index(kind), None
        for batch in self.batches[-ALIKE:]:  # a loop that looks at a flag
            if batch[2] == size and type(batch[4]) is int and batch[4] == kind and len(batch[0]) == len(places):
                if np.array_equal(batch[0], places) and np.array_equal(batch[1], threads):
                    batch[3] = event
                    return
        self.batches.append([places, threads, size, event, kind])
        self.logged += len(places)

    def only(self, scope, size):
        """Do all of them reach as far as `scope`, and are they of this size?"""
        return all(s >= scope and n == size for _, s, n, _ in self.kinds)

    def sort(self, shadow, stale):
        """Forgotten are those before an ordinary store and, of each thread's of one kind, all but the last."""
        parts = []
        for places, threads, size, *facts in self.batches:
            each = size // shadow.item
            items = ((places // shadow.item)[:, None] + np.arange(each)).reshape(-1)
            facts = [np.repeat(np.broadcast_to(fact, places.shape), each) for fact in facts]
            parts.append((items, np.repeat(threads, each), *facts))
        found = [np.concatenate([part[k] for part in parts]) for k in range(4)]
        items, threads, events, _ = found
        keep = (events > shadow.write_event[items]) & ~stale(threads, events)
        items, threads, events, kinds = (a[keep] for a in found)
        order = np.lexsort((events, kinds, threads, items))
        found = [a[order] for a in (items, threads, events, kinds)]
        keep = np.ones(len(items), bool)
        keep[:-1] = np.any([a[1:] != a[:-1] for a in (found[0], found[1], found[3])], axis=0)
        found = [a[keep] for a in found]
        order = np.lexsort((found[2], found[0]))
        self.index = items, threads, events, kinds = tuple(a[order] for a in found)
        self.batches, self.logged = [[items * shadow.item, threads, shadow.item, events, kinds]], len(items)
        shadow.strong[:] = 0
        shadow.strong[items] = 1

    def at(self, wanted):
        """(positions in `wanted`, threads, events, do they write) of what is at these items."""
        items, threads, events, kinds = self.index
        left, right = np.searchsorted(items, wanted, "left"), np.searchsorted(items, wanted, "right")
        counts = right - left
        if counts.sum() > MOST_PAIRS:
            counts = np.minimum(counts, MOST_PAIRS // len(wanted) + 1)
            left = right - counts
        found = np.repeat(np.arange(len(wanted)), counts)
        at = np.arange(len(found)) + np.repeat(left - (np.cumsum(counts) - counts), counts)
        return found, threads[at], events[at], np.array([kind[0] for kind in self.kinds])[kinds[at]]

    def change(self, keep=None, move=None):
        """Forget those whose places are not to `keep`, or `move` all places."""
        self.index = None
        for batch in self.batches:
            if keep is not None:
                stay = keep(batch[0])
                batch[:] = [a[stay] if isinstance(a, np.ndarray) else a for a in batch]
            else:
                batch[0] = move(batch[0])
