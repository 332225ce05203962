"""Accesses put aside: for speed, what cannot be a race yet is not looked at byte by byte (simt/memory/races.py).

Most accesses of most kernels meet nobody: they read what nothing writes, or write, between two barriers, where nobody
else is. For each memory two spans are known, of what has been read and of what has been written; an access outside the
one that could hurt it is kept as a whole, with its time. So is one by which each thread touches the very bytes that it
alone has touched before (y[i] += x[i]). If a later one comes near, it is noted after all, with the time it had.

Where spans overlap, though the accesses do not (the columns of a transpose), each byte is marked with who has read and
written it (simt/memory/marks.py): with a number for each way in which threads and bytes belong together.

A barrier of all blocks settles what was put aside in their shared memory: nobody can race with it now, but those who
have left. In global memory it settles what each block has to itself, and in both __syncwarp settles what each warp has
(simt/memory/settled.py): marks from before the barrier go, and the accesses stay aside, for another one that may come
there. When one comes, all are noted, one after the other as they happened.
"""

import numpy as np

from simt.memory.marks import Layout, Marked, Span, others
from simt.memory.settled import Latest, Settled

MOST = 20_000  # accesses put aside, and bytes of their arrays, before they are noted
MOST_BYTES = 1 << 28
MOST_MARKED = 1 << 28  # bytes of a buffer that is marked
MOST_CLAIMED = 1024  # accesses put aside, before it is not asked any more which block has which words
LOOKED_AT = 64  # accesses near another one, before it is marks that are compared
MOST_FAILED = 3  # so often it is tried to give the warps of a block words to themselves


class Piece:
    """The bytes that the lanes of one instruction touch: pattern.array + shift, `size` bytes each.

    low, high   all lie from `low` to before `high`
    way         which thread has which bytes, if no two have the same: equal for two pieces if that is
    again       equal for two pieces if the same threads touch the same bytes
    whole       the lanes that are not in the mask touch nothing else either
    warps       which warps have lanes in the mask, (blocks, warps) truth values; None: all
    event       its time; note() notes it
    words       see Layout (simt/memory/marks.py)
    """

    __slots__ = (
        "pattern", "shift", "size", "mask", "low", "high", "whole", "part", "way", "again", "warps", "event", "note",
        "words",
    )  # fmt: skip

    def __init__(self, pattern, shift, size, mask, low, high, whole, part, alone, alone_here):
        """part: the Memory of the threads; alone: no two of them share a byte; alone_here: no two of the mask do."""
        self.pattern, self.shift, self.size, self.mask = pattern, shift, size, mask
        self.low, self.high, self.whole, self.part = low, high, whole, part
        where = (id(pattern.array), shift)
        if pattern.strides is not None:
            where = (pattern.strides, pattern.array.shape, int(pattern.array[0, 0, 0]) + shift)
        where = (int(part.numbers[0]), size, *where)
        self.again, self.warps, self.words = where, None, {}
        if mask is not None:
            bits = np.packbits(mask)
            self.again = (*where, mask.shape, bits.tobytes())
            if mask.shape == part.shape:
                self.warps = bits.view(np.uint32).reshape(part.shape[:2]) != 0
            else:
                self.warps = np.broadcast_to(mask.any(axis=2), part.shape[:2])
        self.way = where if alone else self.again if alone_here else None
        self.event = self.note = None


class Aside:
    """Of one memory: a buffer (space), or, if each block has its own, the shared memory of a part of the grid.

    space None: shared memory that others than threads come to, asynchronous copies or an mbarrier.
    """

    def __init__(self, space, own=False):
        self.own = own
        self.entries = {"store": {}, "load": {}}  # Piece.again -> Piece; stores are noted first: readers come behind
        self.spans = {"load": Span(), "store": Span()}  # of the entries
        self.noted = {"load": Span(), "store": Span()}
        self.left = {"load": Span(), "store": Span()}  # of what threads have done that have left
        self.arrays, self.held = {}, 0  # what entries keep alive: id -> array
        self.layout = None if space is None or space.size > MOST_MARKED else Layout(space)
        self.settled = None  # until an access has to be noted; False: blocks share words that one of them writes
        self.failed = 0  # how often that was found out
        self.start_again()

    def start_again(self):
        """Nothing is marked, nothing is known to be settled."""
        self.marks = None
        self.had_marks = False  # before it was known what barriers settle
        self.latest = Latest()
        self.put = self.lost = 0  # since it is: accesses put aside; those of them that had to be noted after all

    def take(self, kind, piece, make):
        """Put an access aside. False if it must be looked at: then all that is near has been noted.

        make() gives its time, and what notes it, later.
        """
        before = self.entries[kind].get(piece.again)
        if before is not None:
            piece.words = before.words
        if self.settled:
            self.settled.forget(piece.part, self.marks)
            if not self.settled.claim(self.marks, kind, piece, before):
                self.give_up()
        if not self.clear(kind, piece) and not (self.settled is None and self.keep(kind, piece)):
            self.look_at(kind, piece.low, piece.high)
            return False
        if self.settled and kind == "store" and self.store_size() not in (None, piece.size):
            self.note_all()  # a byte stored over a word: what the word was is known only now
        if self.held > MOST_BYTES or len(self.entries[kind]) >= MOST:
            self.note_all()
        if piece.again not in self.entries[kind]:
            for array in (piece.pattern.array, piece.mask):
                if array is not None and array.size > 1024 and id(array) not in self.arrays:
                    self.arrays[id(array)] = array
                    self.held += array.nbytes
        piece.event, piece.note = make()
        self.put += 1
        if self.layout is not None and self.settled is not False:
            self.latest.touched(piece.part, piece.event, piece.warps)
        self.entries[kind].pop(piece.again, None)
        self.entries[kind][piece.again] = piece
        self.spans[kind].add(piece.low, piece.high)
        return True

    def clear(self, kind, piece):
        """Can the access hurt nobody that is known?"""
        if self.marks is None:
            low, high = piece.low, piece.high
            if self.noted["store"].meets(low, high) or (kind == "store" and self.noted["load"].meets(low, high)):
                return False
            if not self.near(kind, piece):
                return True
            if self.layout is None or not piece.whole:
                return False
            self.start_marks()
        return self.marks.mark(kind, piece)

    def near(self, kind, piece):
        """Is anybody else put aside near it?"""
        low, high, way = piece.low, piece.high, piece.way
        for other in others(kind):
            if self.spans[other].meets(low, high):
                if self.layout is not None and len(self.entries[other]) > LOOKED_AT:
                    return True
                for entry in self.entries[other].values():
                    if entry.low < high and low < entry.high and (way is None or entry.way != way):
                        return True
        return False

    def look_at(self, kind, low, high):
        """An access of this kind ("atomic" too) will be noted: note what is near it."""
        if self.settled and self.overlaps(kind, low, high):
            self.lost += sum(map(len, self.entries.values()))
            self.note_all()  # they may overlap each other, too: one after the other
            if 2 * self.lost > self.put:
                self.give_up()  # it does not pay
        for other in others(kind):
            if self.spans[other].meets(low, high):
                rest = {}
                self.spans[other].clear()
                for name, entry in self.entries[other].items():
                    if entry.low < high and low < entry.high:
                        self.note(other, entry)
                    else:
                        rest[name] = entry
                        self.spans[other].add(entry.low, entry.high)
                self.entries[other] = rest
        self.noted["load" if kind == "load" else "store"].add(low, high)

    def overlaps(self, kind, low, high):
        """Has anything been put aside here that such an access could race with?"""
        return any(
            self.spans[other].meets(low, high)
            and any(e.low < high and low < e.high for e in self.entries[other].values())
            for other in others(kind)
        )

    def note(self, kind, entry):
        entry.note()
        self.noted[kind].add(entry.low, entry.high)

    def note_all(self):
        """One after the other as they happened."""
        for kind, entry in sorted(self.all_entries(), key=lambda pair: pair[1].event):
            self.note(kind, entry)
        self.drop()

    def drop(self):
        for kind in self.entries:
            self.entries[kind] = {}
            self.spans[kind].clear()
        self.arrays, self.held = {}, 0

    def settle(self, blocks, copying):
        """A barrier of all threads of these blocks (truth values). copying: asynchronous copies are under way."""
        if not blocks.all():
            self.settle_some(~blocks.reshape(-1, 1, 1))
            return
        if self.entries["load"] or self.entries["store"]:
            self.drop()
        if self.marks is not None or self.latest.of:
            self.start_again()
        if self.failed < MOST_FAILED:
            self.settled = None
        for kind, span in self.noted.items():
            if kind == "load" or not copying:  # what they write is not settled
                span.clear()
            span.add(self.left[kind].low, self.left[kind].high)

    def settle_some(self, rest):
        """The same where the `rest` has not come: what has been put aside of nobody there."""
        for kind, entries in self.entries.items():
            if 0 < len(entries) <= LOOKED_AT:
                self.spans[kind].clear()
                for name, entry in list(entries.items()):
                    if entry.mask is None or (entry.mask & rest).any():
                        self.spans[kind].add(entry.low, entry.high)
                    else:
                        del entries[name]

    def leave(self, lanes):
        """These threads have left (truth values): what they have done since the last barrier, none behind settles."""
        if self.settled:
            self.note_all()  # they may overlap each other
        for kind, entries in self.entries.items():
            for name, entry in list(entries.items()):
                if entry.mask is None or (entry.mask & lanes).any():
                    self.note(kind, entries.pop(name))
        for kind, span in self.noted.items():
            self.left[kind].add(span.low, span.high)

    # What barriers settle.

    def store_size(self):
        """The size of the stores that have been put aside, all of one."""
        return next((entry.size for entry in self.entries["store"].values()), None)

    def keep(self, kind, piece):
        """Put an access aside because all that is near has been settled by barriers."""
        self.start_settling(piece.part, piece.low, piece.high, lambda settled: settled.claim(None, kind, piece))
        return self.settled and self.marks.mark(kind, piece)

    def start_settling(self, part, low, high, claim):
        """See, when an access has to be noted for the first time, whether each block has words to itself so far.

        low, high: it lies from `low` to before `high`; claim(settled): what it claims.
        """
        warps = part.warps_have_met()
        if self.layout is None or (self.own and not warps):
            return  # in shared memory, blocks have all to themselves
        self.settled = False
        found = self.all_entries()
        sizes = {entry.size for entry in self.entries["store"].values()}
        if self.noted_any() or len(found) > MOST_CLAIMED or len(sizes) > 1:
            return
        found.sort(key=lambda pair: pair[1].low >= high or low >= pair[1].high)  # if blocks meet, then most likely here
        settled = Settled(self.layout, self.own, self.latest)
        if claim(settled) and all(settled.claim(None, kind, entry) for kind, entry in found):
            if (warps and settled.warps_are_apart()) or not self.own:
                self.had_marks = self.marks is not None
                self.settled, self.put, self.lost = settled, len(found), 0
                self.start_marks()
                return
        self.failed += 1

    def noted_any(self):
        return any(span.high >= 0 for span in self.noted.values())

    def all_entries(self):
        return [(kind, entry) for kind, entries in self.entries.items() for entry in entries.values()]

    def meet(self, part, event, mask, kind, addresses, where, lanes, size):
        """An access by these lanes of a part will be noted. where: its bytes' numbers in the memory."""
        if self.layout is None or self.settled is False:
            return

        def claim(settled):
            return settled.claim_some(self.marks, kind, part, addresses, where + self.layout.origin, lanes, size)

        if self.settled is None:
            self.start_settling(part, int(addresses.min()), int(addresses.max()) + size, claim)
        else:
            self.settled.forget(part, self.marks)
            if not claim(self.settled):
                self.give_up()
        self.latest.touched(part, event, None if mask is None else np.broadcast_to(mask, part.shape).any(axis=2))

    def give_up(self):
        """Ask no more who has which words."""
        self.note_all()
        if self.had_marks:
            self.settled.give_up(self.marks)
        else:
            self.marks = None
        self.settled = False
        self.failed += 1

    def fewer(self, part, lanes):
        """These threads have left."""
        self.latest.fewer(part, lanes)

    # Marks.

    def start_marks(self):
        self.marks = Marked(self.layout)
        for kind, span in self.noted.items():
            self.marks.fill(kind, span)
        for kind, entry in self.all_entries():
            if not (self.settled and self.settled.is_settled(entry)):
                self.marks.set(kind, entry)

    def blot(self, kind, addresses, where, size):
        """Accesses at these addresses have been noted. where: their bytes' numbers in the memory."""
        if self.marks is not None:
            self.marks.blot("load" if kind == "load" else "store", addresses, where + self.layout.origin, size)


def one_each(pattern, size, shape, own, mask, close=False):
    """Do all threads of the mask store to bytes of their own? own: each block has a copy of the memory.

    shape: (blocks, warps, 32). False where it is not plain to see; close: look closely.
    """
    array = pattern.array
    close = close and mask is not None
    if own and array.shape[0] > 1:
        return close and differ_here(array, size, own, np.broadcast_to(mask, shape))
    axes = [(array.shape[k], shape[k]) for k in (1, 2)] if own else list(zip(array.shape, shape))
    if any(given == 1 < there for given, there in axes):  # some share an address
        if mask is None:
            return False
        mask = np.broadcast_to(mask, shape)
        return bool((mask.sum(axis=(1, 2)) if own else mask.sum()).max() <= 1)
    if pattern.strides is None:
        found = pattern.counts.get(("apart", size))
        if found is None:
            found = pattern.residue(size) is not None and all_differ((array.reshape(-1) - int(array.min())) // size)
            pattern.counts["apart", size] = found
        return found or (close and differ_here(array, size, own, np.broadcast_to(mask, shape)))
    reach = size
    for stride, length in sorted((abs(s), n) for s, n in zip(pattern.strides, array.shape) if n > 1):
        if stride < reach:
            return False
        reach = stride * (length - 1) + reach
    return True


def differ_here(array, size, own, mask):
    """Are the addresses of the lanes in the mask `size` bytes apart, or in different blocks if those are their own?"""
    if own and array.shape[0] > 1:
        rows = np.arange(len(array)).reshape(-1, 1, 1)
        array = array.astype(np.int64) + rows * (-(-(int(array.max()) - int(array.min()) + 1) // size) * size)
    elif own:
        mask = mask.any(axis=0, keepdims=True)
    some = np.broadcast_to(array, mask.shape)[mask]
    return not some.size or all_differ((some - int(some.min())) // size)


def all_differ(numbers):
    """Is each of these numbers, all 0 or more, there once?"""
    most = int(numbers.max())
    if most < 256 * len(numbers):  # ticking them off takes less than sorting them, where they are this close
        seen = np.zeros(most + 1, bool)
        seen[numbers] = True
        return np.count_nonzero(seen) == len(numbers)
    numbers = np.sort(numbers)
    return bool((numbers[1:] != numbers[:-1]).all())
