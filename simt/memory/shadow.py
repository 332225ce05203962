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
MOST_BEHIND = 4096  # accesses behind the sorted ones, or as many as these, before all are sorted together
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
            self.log.forget_items()
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

    def strong_ones(self, at, stale, asked):
        """(positions in `at`, threads, events) of the strong accesses since the last ordinary store, of those kinds
        (does it write, scope, size, line) that are asked for."""
        which = np.flatnonzero(self.strong[at])
        if not len(which):
            return which, which, which
        if self.log.index is None or self.log.behind > max(MOST_BEHIND, self.log.logged - self.log.behind):
            self.log.sort(self, stale)
        found, threads, events = self.log.at(at[which], self, asked)
        fresh = events > self.write_event[at[which[found]]]
        return which[found[fresh]], threads[fresh], events[fresh]

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
    """Strong accesses to one memory: as they came, and sorted by items where somebody had to look at them.

    `index` has those that were there when all were sorted; those behind it are looked through one by one while they are
    few: `late` has them by items, as far as somebody has looked.
    """

    def __init__(self):
        self.kinds = []  # (does it write, scope, size, line) of the accesses
        self.batches = []  # Batch; the first one is what the index has
        self.index = None  # (items, threads, events, kinds) sorted by items, then events
        self.parts = {}  # those of them that somebody has asked for: {which kinds, as bytes: the same of these}
        self.logged, self.behind, self.most = 0, 0, MOST_LOGGED
        self.forget_items()

    def forget_items(self):
        """Items are others now, or begin anew."""
        self.late, self.filled = np.zeros((4, 0), np.int64), 0
        self.read = 1  # so many batches are in it, or in the index
        for batch in self.batches:
            batch.part = None

    def note(self, places, threads, size, event, kind):
        if kind not in self.kinds:
            self.kinds.append(kind)
        kind = self.kinds.index(kind)
        for batch in self.batches[-ALIKE:]:  # a loop that looks at a flag
            if type(batch.kind) is int and (batch.size, batch.kind) == (size, kind):
                if np.array_equal(batch.places, places) and np.array_equal(batch.threads, threads):
                    batch.event = event
                    if batch.part is not None:
                        self.late[2, batch.part] = event
                    return
        self.batches.append(Batch(places, threads, size, event, kind))
        self.logged += len(places)
        self.behind += len(places)

    def only(self, scope, size):
        """Do all of them reach as far as `scope`, and are they of this size?"""
        return all(s >= scope and n == size for _, s, n, _ in self.kinds)

    def read_on(self, item):
        """Put into `late` what has come since somebody looked."""
        for batch in self.batches[self.read :]:
            items, threads, event, kind = batch.of_items(item)
            end = self.filled + len(items)
            if end > self.late.shape[1]:
                self.late = np.concatenate([self.late, np.zeros((4, end), np.int64)], axis=1)
            batch.part = slice(self.filled, end)
            for row, fact in zip(self.late, (items, threads, event, kind)):
                row[batch.part] = fact
            self.filled = end
        self.read = len(self.batches)

    def sort(self, shadow, stale):
        """Forgotten are those before an ordinary store and, of each thread's of one kind, all but the last."""
        facts = [batch.of_items(shadow.item) for batch in self.batches]
        facts = [[np.broadcast_to(fact, part[0].shape) for fact in part] for part in facts]
        found = [np.concatenate(parts) for parts in zip(*facts)]
        items, threads, events, _ = found
        keep = (events > shadow.write_event[items]) & ~stale(threads, events)
        self.index, self.parts = latest(*(a[keep] for a in found)), {}
        items, threads, events, kinds = self.index
        self.batches, self.logged = [Batch(items * shadow.item, threads, shadow.item, events, kinds)], len(items)
        self.behind = 0
        self.forget_items()
        shadow.strong[:] = 0
        shadow.strong[items] = 1

    def at(self, wanted, shadow, asked):
        """(positions in `wanted`, threads, events) of what is at these items, of the kinds that are asked for."""
        kinds = np.array([asked(kind) for kind in self.kinds])
        found = self.look(self.part(kinds), wanted)
        if self.behind and kinds.any():
            self.read_on(shadow.item)
            at = np.zeros(shadow.length, bool)
            at[wanted] = True
            late = self.late[:, : self.filled]
            late = late[:, at[late[0]] & kinds[late[3]]]
            if late.size:
                late = self.look(by_item(*late), wanted)
                found = [np.concatenate(both) for both in zip(found, late)]
        return found[:3]

    def part(self, kinds):
        """The index of some kinds."""
        if kinds.all():
            return self.index
        key = kinds.tobytes()
        if key not in self.parts:
            keep = kinds[self.index[3]]
            self.parts[key] = tuple(a[keep] for a in self.index)
        return self.parts[key]

    @staticmethod
    def look(index, wanted):
        """(positions in `wanted`, threads, events, kinds) of what an index has at these items."""
        items, threads, events, kinds = index
        left, right = np.searchsorted(items, wanted, "left"), np.searchsorted(items, wanted, "right")
        counts = right - left
        if counts.sum() > MOST_PAIRS:
            counts = np.minimum(counts, MOST_PAIRS // len(wanted) + 1)
            left = right - counts
        found = np.repeat(np.arange(len(wanted)), counts)
        at = np.arange(len(found)) + np.repeat(left - (np.cumsum(counts) - counts), counts)
        return found, threads[at], events[at], kinds[at]

    def change(self, keep=None, move=None):
        """Forget those whose places are not to `keep`, or `move` all places."""
        self.index = None
        self.forget_items()
        for batch in self.batches:
            if keep is not None:
                batch.keep(keep(batch.places))
            else:
                batch.places = move(batch.places)


class Batch:
    """Accesses of one instruction, all of one event and kind, or sorted ones: then these, too, are arrays."""

    __slots__ = ("places", "threads", "size", "event", "kind", "part")

    def __init__(self, places, threads, size, event, kind):
        self.places, self.threads, self.size, self.event, self.kind = places, threads, size, event, kind
        self.part = None  # where it is in Log.late

    def of_items(self, item):
        """(items, threads, events, kinds), one for each item; of one event and kind just a number."""
        each = self.size // item
        facts = self.threads, self.event, self.kind
        if each == 1:
            return self.places // item, *facts
        items = ((self.places // item)[:, None] + np.arange(each)).reshape(-1)
        return items, *(np.repeat(fact, each) if isinstance(fact, np.ndarray) else fact for fact in facts)

    def keep(self, stay):
        for name in ("places", "threads", "event", "kind"):
            if isinstance(fact := getattr(self, name), np.ndarray):
                setattr(self, name, fact[stay])


def by_item(items, *facts):
    """All sorted by items, then events, which are the second of the facts."""
    order = np.lexsort((facts[1], items))
    return tuple(a[order] for a in (items, *facts))


def latest(items, threads, events, kinds):
    """Of each thread's accesses of one kind to an item the last; sorted by items, then events."""
    order = np.lexsort((events, kinds, threads, items))
    found = [a[order] for a in (items, threads, events, kinds)]
    keep = np.ones(len(items), bool)
    keep[:-1] = np.any([found[k][1:] != found[k][:-1] for k in (0, 1, 3)], axis=0)
    return by_item(*(a[keep] for a in found))
