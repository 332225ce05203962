"""What a memory remembers for each few bytes (an item): who wrote it last, and all who have read it since.

Who is a thread number, when an event's number (races.py). Readers of an item are a list of nodes (thread, event, next),
the latest first. A thread that reads again takes its own node's place, so that a loop that looks at a flag makes no
list grow.
"""

import numpy as np

NOBODY = -1
MOST_NODES = 1 << 23  # then the lists are cut to their latest readers


class Shadow:
    FIELDS = ("writer", "write_event", "value", "head")

    def __init__(self, item):
        self.item, self.length = item, 0
        for name in self.FIELDS:
            setattr(self, name, np.zeros(0, np.int64))
        self.nodes = 0
        self.reader, self.event, self.next = (np.zeros(0, np.int64) for _ in range(3))

    def items_of(self, places, size):
        """(items, lane of each) of accesses of `size` bytes at `places`. Items shrink to what accesses need."""
        low = int(np.bitwise_or.reduce(places)) | size
        need = min(low & -low, self.item)
        if need < self.item:
            for name in self.FIELDS:  # the parts of an item share its list
                setattr(self, name, np.repeat(getattr(self, name), self.item // need))
            self.item, self.length = need, self.length * (self.item // need)
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
            for name in self.FIELDS:
                old = getattr(self, name)
                new = np.full(length, NOBODY if name in ("writer", "head") else 0, np.int64)
                new[: len(old)] = old
                setattr(self, name, new)
            self.length = length

    def note_readers(self, at, threads, event, stale):
        """These items are read. stale(threads, events): which readers need not be remembered any more."""
        head = self.head[at]
        known = np.flatnonzero(head != NOBODY)
        follow = head.copy()  # what the new nodes stand before
        events = np.full(len(at), event)
        if len(known):
            node = head[known]
            again = self.reader[node] == threads[known]
            follow[known[again]] = self.next[node[again]]
            events[known[again]] = np.maximum(event, self.event[node[again]])  # this one may come late
            rest = known[~again]
            if len(rest):
                gone = stale(self.reader[head[rest]], self.event[head[rest]])
                follow[rest[gone]] = NOBODY
        # Of several lanes at one item only one can be its head: the others stand behind it, one after another.
        many = len(at)
        start = self.nodes
        self.grow(start + many)
        new = np.arange(start, start + many)
        self.reader[new], self.event[new], self.next[new] = threads, events, follow
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
            for name in ("reader", "event", "next"):
                old = getattr(self, name)
                new = np.zeros(max(length, 2 * len(old), 1024), np.int64)
                new[: len(old)] = old
                setattr(self, name, new)

    def cut(self):
        """Keep the latest reader of each item only."""
        at = np.flatnonzero(self.head != NOBODY)
        nodes = self.head[at]
        self.reader, self.event = self.reader[nodes].copy(), self.event[nodes].copy()
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

    def forget(self, place, size):
        part = slice(place // self.item, (place + size) // self.item)
        self.writer[part] = self.head[part] = NOBODY

    def lengthen_rows(self, old, new):
        """Rows of `old` bytes become rows of `new`."""
        rows = -(-self.length * self.item // old)
        for name in self.FIELDS:
            was = getattr(self, name)
            empty = NOBODY if name in ("writer", "head") else 0
            wide = np.full((rows, new // self.item), empty, np.int64)
            padded = np.full(rows * old // self.item, empty, np.int64)
            padded[: len(was)] = was
            wide[:, : old // self.item] = padded.reshape(rows, -1)
            setattr(self, name, wide.reshape(-1))
        self.length = rows * new // self.item
