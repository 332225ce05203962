"""Accesses put aside: for speed, what cannot be a race yet is not looked at byte by byte (simt/races.py).

Most accesses of most kernels meet nobody: they read what nothing writes, or write, between two barriers, where nobody
else is. For each memory two spans are known, of what has been read and of what has been written; an access outside the
one that could hurt it is kept as a whole, with its time. If a later one comes near, it is noted after all, with the
time it had. A barrier of all blocks settles what was put aside in their shared memory: nobody can race with it now.
"""

import numpy as np

MOST = 1000  # accesses put aside, and bytes of their arrays, before they are noted
MOST_BYTES = 1 << 26


class Span:
    """Some bytes, from `low` to before `high`, with whatever lies between."""

    __slots__ = ("low", "high")

    def __init__(self):
        self.clear()

    def clear(self):
        self.low, self.high = 1 << 62, -1

    def meets(self, low, high):
        return low < self.high and self.low < high

    def add(self, low, high):
        self.low, self.high = min(self.low, low), max(self.high, high)


class Aside:
    """Of one memory: a buffer, or the shared memory of a part of the grid."""

    def __init__(self):
        self.entries = {"load": [], "store": []}  # (low, high, bytes held, what notes it)
        self.spans = {"load": Span(), "store": Span()}  # of the entries
        self.noted = {"load": Span(), "store": Span()}
        self.held = 0

    def take(self, kind, low, high, held, make):
        """Put an access aside. False if it must be looked at: then all that is near has been noted.

        make() gives what notes it, later.
        """
        if self.noted["store"].meets(low, high) or (kind == "store" and self.noted["load"].meets(low, high)):
            self.look_at(kind, low, high)
            return False
        for other in ("store",) if kind == "load" else ("store", "load"):
            if self.spans[other].meets(low, high) and any(e[0] < high and low < e[1] for e in self.entries[other]):
                self.look_at(kind, low, high)
                return False
        self.held += held
        if self.held > MOST_BYTES or len(self.entries[kind]) >= MOST:
            self.note_all()
        self.entries[kind].append((low, high, held, make()))
        self.spans[kind].add(low, high)
        return True

    def look_at(self, kind, low, high):
        """An access of this kind ("atomic" too) will be noted: note what is near it."""
        for other in ("store",) if kind == "load" else ("store", "load"):
            if self.spans[other].meets(low, high):
                rest = []
                for entry in self.entries[other]:
                    if entry[0] < high and low < entry[1]:
                        self.note(other, entry)
                    else:
                        rest.append(entry)
                self.entries[other] = rest
                self.spans[other].clear()
                for entry in rest:
                    self.spans[other].add(*entry[:2])
        self.noted["load" if kind == "load" else "store"].add(low, high)

    def note(self, kind, entry):
        low, high, held, note = entry
        self.held -= held
        note()
        self.noted[kind].add(low, high)

    def note_all(self):
        for kind, entries in self.entries.items():
            for entry in entries:
                self.note(kind, entry)
            entries.clear()
            self.spans[kind].clear()

    def settle(self, copying):
        """A barrier of all who can reach this memory. copying: asynchronous copies to it are under way."""
        if self.held or self.entries["load"] or self.entries["store"]:
            for entries in self.entries.values():
                entries.clear()
            self.held = 0
        for span in (*self.spans.values(), self.noted["load"]):
            span.clear()
        if not copying:  # what they write is not settled
            self.noted["store"].clear()


def one_each(pattern, size, shape, own, mask):
    """Do all threads of the mask store to bytes of their own? own: each block has a copy of the memory.

    shape: (blocks, warps, 32). False where it is not plain to see.
    """
    array = pattern.array
    if own and array.shape[0] > 1:
        return False
    axes = [(array.shape[k], shape[k]) for k in (1, 2)] if own else list(zip(array.shape, shape))
    if any(given == 1 < there for given, there in axes):  # some share an address
        if mask is None:
            return False
        mask = np.broadcast_to(mask, shape)
        return bool((mask.sum(axis=(1, 2)) if own else mask.sum()).max() <= 1)
    if pattern.strides is None:
        found = pattern.counts.get(("apart", size))
        if found is None:
            found = pattern.residue(size) is not None and len(np.unique(array)) == array.size
            pattern.counts["apart", size] = found
        return found
    reach = size
    for stride, length in sorted((abs(s), n) for s, n in zip(pattern.strides, array.shape) if n > 1):
        if stride < reach:
            return False
        reach = stride * (length - 1) + reach
    return True
