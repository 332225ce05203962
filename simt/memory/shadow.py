"""What a memory remembers for each few bytes (an item): its last ordinary store, all who have read it since, and the
strong accesses since then.

Who is a thread number, when an event's number (races.py). An ordinary store is in order with all that was there before,
or it is a race: so what comes behind it need only be compared with it. Strong accesses need no order among themselves,
none makes another be forgotten: they are kept in a log, which is sorted when somebody has to look at it.

Readers of an item are a list of nodes (thread, event, next), the latest first. Where the latest reads again its node
stays and gets the new event, so that a loop makes no list grow.
"""

import numpy as np

NOBODY = 0  # where the list of an item's readers ends
FEW_NODES = 1 << 20  # so many may be there before those are given up that are in no list any more
MOST_NODES = 1 << 23  # then the lists are cut to their latest readers
MOST_STEPS = 64  # so many readers of one item are followed for that
MOST_LOGGED = 1 << 22  # accesses in a log, before those are dropped that others stand for
MOST_PAIRS = 1 << 22  # accesses of a log that one instruction is compared with: of each item the latest
ALIKE = 8  # so many of the log's last instructions may come again


class Shadow:
    FIELDS = "writer", "write_event", "value", "head", "strong"  # 0 until set: pages that nobody touches cost nothing

    def __init__(self, item):
        self.item, self.length = item, 0
        for name in self.FIELDS:
            setattr(self, name, np.zeros(0, np.int8 if name == "strong" else np.int64))
        self.nodes, self.most = 1, FEW_NODES  # the first is nobody's
        self.shared = 0  # nodes before this one may be in the lists of several items
        self.reader, self.event, self.next, self.top = (np.zeros(1, np.int64) for _ in range(4))
        self.log = Log()

    def items_of(self, places, size):
        """(items, lane of each) of accesses of `size` bytes at `places`. Items shrink to what accesses need."""
        low = int(np.bitwise_or.reduce(places)) | size
        need = min(low & -low, self.item)
        if need < self.item:
            for name in self.FIELDS:
                setattr(self, name, np.repeat(getattr(self, name), self.item // need))
            self.shared = self.nodes
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
            length = max(length, 4 * self.length)
            for name in self.FIELDS:
                old = getattr(self, name)
                new = np.zeros(length, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
            self.length = length

    def note_readers(self, at, threads, event, stale):
        """These items are read. stale(threads, events): which readers need not be remembered any more."""
        node = self.head[at]
        again = (node >= max(self.shared, NOBODY + 1)) & (self.reader[node] == threads)
        if again.any():
            mine = node[again]
            self.event[mine] = np.maximum(self.event[mine], event)  # this one may come late
            self.top[mine] = np.maximum(self.top[mine], event)
            rest = ~again
            at, threads, node = at[rest], threads[rest], node[rest]
            if not len(at):
                return
        start, end = self.nodes, self.nodes + len(at)
        self.grow(end)
        tops = event  # the last event of a whole list
        if node.any():
            tops = np.maximum(self.top[node], event)
            gone = stale(self.reader[node], self.top[node])
            if gone.any():
                node[gone], tops[gone] = NOBODY, event
        self.reader[start:end], self.event[start:end], self.top[start:end] = threads, event, tops
        self.next[start:end] = node
        new = np.arange(start, end)
        self.head[at] = new
        if (self.head[at] != new).any():  # of several lanes at one item one is its head, the others stand behind it
            order = np.argsort(at, kind="stable")
            meet = at[order][1:] == at[order][:-1]
            self.next[new[order[1:][meet]]] = new[order[:-1][meet]]
            last = np.r_[~meet, True]
            self.head[at[order[last]]] = new[order[last]]
        self.nodes = end
        if end > self.most:
            self.compact()

    def grow(self, length):
        if length > len(self.reader):
            for name in ("reader", "event", "next", "top"):
                old = getattr(self, name)
                new = np.zeros(max(length, 4 * len(old), 1024), np.int64)
                new[: len(old)] = old
                setattr(self, name, new)

    def compact(self):
        """Give up the nodes that are in no list any more; of too many, or of long lists, keep the latest readers."""
        at = np.flatnonzero(self.head)
        steps, which = [], np.arange(len(at))
        node = self.head[at]
        while len(node) and len(steps) < MOST_STEPS:
            steps.append((which, node))
            node = self.next[node]
            on = node != NOBODY
            which, node = which[on], node[on]
        if len(node) and self.nodes < MOST_NODES:
            self.most = 2 * self.nodes
            return
        if len(node) or sum(len(node) for _, node in steps) > MOST_NODES // 2:
            steps = steps[:1]
        kept, follow, end = [[NOBODY]], [[NOBODY]], 1
        head = np.zeros(len(at), np.int64)
        for which, node in reversed(steps):  # a list that several items share becomes one for each
            kept.append(node)
            follow.append(head[which])
            head[which] = np.arange(end, end + len(node))
            end += len(node)
        self.grow(end)
        kept, self.head[at] = np.concatenate(kept), head
        self.next[:end] = np.concatenate(follow)
        for of_node in (self.reader, self.event, self.top):
            of_node[:end] = of_node[kept]
        self.nodes, self.most, self.shared = end, max(FEW_NODES, 2 * end), 0

    def readers(self, at):
        """Yields (positions in `at`, readers, events): first the latest reader of each item, then the one before."""
        head = self.head[at]
        which = np.flatnonzero(head)
        node = head[which]
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
        self.write_event[part] = self.head[part] = self.strong[part] = 0
        self.log.change(keep=lambda places: (places < place) | (places >= place + size))

    def lengthen_rows(self, old, new):
        """Rows of `old` bytes become rows of `new`."""
        rows = -(-self.length * self.item // old)
        for name in self.FIELDS:
            was = getattr(self, name)
            wide = np.zeros((rows, new // self.item), was.dtype)
            padded = np.zeros(rows * old // self.item, was.dtype)
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
