"""Accesses put aside: for speed, what cannot be a race yet is not looked at byte by byte (simt/memory/races.py).

Most accesses of most kernels meet nobody: they read what nothing writes, or write, between two barriers, where nobody
else is. For each memory two spans are known, of what has been read and of what has been written; an access outside the
one that could hurt it is kept as a whole, with its time. So is one by which each thread touches the very bytes that it
alone has touched before (y[i] += x[i]). If a later one comes near, it is noted after all, with the time it had.

Where spans of a global buffer overlap, though the accesses do not (the columns of a transpose), each of its bytes is
marked with who has read and written it: with a number for each way in which threads and bytes belong together.

A barrier of all blocks settles what was put aside in their shared memory: nobody can race with it now, but those who
have left. In global memory it settles what each block has to itself (simt/memory/owners.py): marks from before the
barrier go, and the accesses stay aside, for another block that may come there. When one comes, all are noted, one after
the other as they happened.
"""

import numpy as np

from simt.memory.owners import Owners, others

MOST = 20_000  # accesses put aside, and bytes of their arrays, before they are noted
MOST_BYTES = 1 << 28
MOST_MARKED = 1 << 28  # bytes of a buffer that is marked
MOST_CLEARED = 1 << 24  # bytes whose marks a barrier takes away
MOST_CLAIMED = 1024  # accesses put aside, before it is not asked any more which block has which words
LOOKED_AT = 64  # accesses near another one, before it is marks that are compared
NEVER = 1 << 62  # when what is never settled was done
SEVERAL = 255  # a mark: of threads that are not told apart


class Piece:
    """The bytes that the lanes of one instruction touch: pattern.array + shift, `size` bytes each.

    low, high   all lie from `low` to before `high`
    way         which thread has which bytes, if no two have the same: equal for two pieces if that is
    again       equal for two pieces if the same threads touch the same bytes
    whole       the lanes that are not in the mask touch nothing else either
    event       its time; note() notes it
    """

    __slots__ = ("pattern", "shift", "size", "mask", "low", "high", "whole", "part", "way", "again", "event", "note")

    def __init__(self, pattern, shift, size, mask, low, high, whole, part, alone, alone_here):
        """part: the Memory of the threads; alone: no two of them share a byte; alone_here: no two of the mask do."""
        self.pattern, self.shift, self.size, self.mask = pattern, shift, size, mask
        self.low, self.high, self.whole, self.part = low, high, whole, part
        where = (id(pattern.array), shift)
        if pattern.strides is not None:
            where = (pattern.strides, pattern.array.shape, int(pattern.array[0, 0, 0]) + shift)
        where = (id(part), size, *where)
        self.again = where if mask is None else (*where, mask.shape, np.packbits(mask).tobytes())
        self.way = where if alone else self.again if alone_here else None
        self.event = self.note = None

    def places(self):
        """(addresses, number of the block of each), arrays that fit together."""
        addresses, blocks = self.pattern.array.astype(np.int64) + self.shift, self.part.numbers.reshape(-1, 1, 1)
        addresses = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, blocks.shape))
        if self.mask is None:
            return addresses, blocks
        shape = np.broadcast_shapes(addresses.shape, self.mask.shape)
        mask = np.broadcast_to(self.mask, shape)
        return np.broadcast_to(addresses, shape)[mask], np.broadcast_to(blocks, shape)[mask]


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
    """Of one memory: a buffer (space), or the shared memory of a part of the grid (None)."""

    def __init__(self, space=None):
        self.entries = {"store": {}, "load": {}}  # Piece.again -> Piece; stores are noted first: readers come behind
        self.spans = {"load": Span(), "store": Span()}  # of the entries
        self.noted = {"load": Span(), "store": Span()}
        self.left = {"load": Span(), "store": Span()}  # of what threads have done that have left
        self.arrays, self.held = {}, 0  # what entries keep alive: id -> array
        self.space = space if space is not None and space.size <= MOST_MARKED else None
        self.marks, self.ways = None, {}  # {kind: Marks}; Piece.way -> its number
        self.free = list(range(SEVERAL - 1, 0, -1))  # numbers that nobody has
        self.owners = None  # until an access has to be noted; False: blocks share words that one of them writes
        self.had_marks = False  # before there were owners
        self.latest = {}  # part -> for each of its blocks the time of its last access to the buffer
        self.marked = Span()  # of all marks since `forget_settled`
        self.put = self.lost = 0  # with owners, accesses put aside; those of them that had to be noted after all

    def take(self, kind, piece, make):
        """Put an access aside. False if it must be looked at: then all that is near has been noted.

        make() gives its time, and what notes it, later.
        """
        if self.owners:
            self.forget_settled()
            if piece.again not in self.entries[kind]:
                self.claim(kind, *piece.places(), piece.size)
        if not self.clear(kind, piece) and not (self.owners is None and self.own(kind, piece)):
            self.look_at(kind, piece.low, piece.high)
            return False
        if self.owners and kind == "store" and self.store_size() not in (None, piece.size):
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
        if self.space is not None and self.owners is not False:
            self.touched(piece.part, piece.event, piece.mask)
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
            if self.space is None or not piece.whole:
                return False
            self.start_marks()
        return self.mark(kind, piece)

    def near(self, kind, piece):
        """Is anybody else put aside near it?"""
        low, high, way = piece.low, piece.high, piece.way
        for other in others(kind):
            if self.spans[other].meets(low, high):
                if self.space is not None and len(self.entries[other]) > LOOKED_AT:
                    return True
                for entry in self.entries[other].values():
                    if entry.low < high and low < entry.high and (way is None or entry.way != way):
                        return True
        return False

    def look_at(self, kind, low, high):
        """An access of this kind ("atomic" too) will be noted: note what is near it."""
        if self.owners and self.overlaps(kind, low, high):
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
        found = [(kind, entry) for kind, entries in self.entries.items() for entry in entries.values()]
        for kind, entry in sorted(found, key=lambda pair: pair[1].event):
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
        for kind, entries in self.entries.items():
            for name, entry in list(entries.items()):
                if entry.mask is None or (entry.mask & lanes).any():
                    self.note(kind, entries.pop(name))
        for kind, span in self.noted.items():
            self.left[kind].add(span.low, span.high)

    # Blocks that have words to themselves.

    def store_size(self):
        """The size of the stores that have been put aside, all of one."""
        return next((entry.size for entry in self.entries["store"].values()), None)

    def own(self, kind, piece):
        """Put an access aside because its blocks have what it touches to themselves, and a barrier has settled it."""
        self.start_owners(kind, *piece.places(), piece.size)
        return self.owners and self.mark(kind, piece)

    def start_owners(self, kind, addresses, blocks, size):
        """See, when the first access has to be noted, whether each block has words to itself so far."""
        self.owners = False
        low, high = int(addresses.min()), int(addresses.max()) + size
        found = [(name, entry) for name, entries in self.entries.items() for entry in entries.values()]
        sizes = {entry.size for entry in self.entries["store"].values()}
        if self.space is None or self.noted_any() or len(found) > MOST_CLAIMED or len(sizes) > 1:
            return
        found.sort(key=lambda pair: pair[1].low >= high or low >= pair[1].high)  # if blocks meet, then most likely here
        owners = Owners(self.space)
        if owners.claim(kind, addresses, blocks, size) and all(
            owners.claim(name, *entry.places(), entry.size) for name, entry in found
        ):
            self.had_marks = self.marks is not None
            self.owners, self.put, self.lost = owners, len(found), 0
            self.start_marks()

    def noted_any(self):
        return any(span.high >= 0 for span in self.noted.values())

    def meet(self, part, event, mask, kind, addresses, lanes, size):
        """An access by these lanes of a part will be noted."""
        if self.space is None or self.owners is False:
            return
        blocks = part.numbers[lanes // (part.shape[1] * part.shape[2])]
        if self.owners is None:
            self.start_owners(kind, addresses, blocks, size)
        else:
            self.forget_settled()
            self.claim(kind, addresses, blocks, size)
        self.touched(part, event, mask)

    def claim(self, kind, addresses, blocks, size):
        """An access by these blocks, which may come to what another one had to itself."""
        if not self.owners.claim(kind, addresses, blocks, size):
            self.give_up()

    def give_up(self):
        """Ask no more which block has which words."""
        self.note_all()
        for name, owner in self.owners.of.items():
            self.marks[name].fill_words(owner != 0)
        self.marks = self.marks if self.had_marks else None
        self.owners = False

    def touched(self, part, event, mask):
        """Threads of a part (None: all) have come to the buffer."""
        if part not in self.latest:  # parts that have ended need not be known
            self.latest = {p: last for p, last in self.latest.items() if p.going()}
            self.latest[part] = np.zeros(len(part.numbers), np.int64)
        last = self.latest[part]
        np.maximum(last, event, out=last, where=True if mask is None else mask.any(axis=(1, 2)))

    def fewer(self, part, lanes):
        """These threads have left: no barrier behind settles what they have done since the last one."""
        last = self.latest.get(part)
        if last is not None:
            last[lanes.any(axis=(1, 2)) & (last > part.barriers())] = NEVER

    def settled(self, entry):
        """Is it settled for all blocks that have made this access?"""
        part = entry.part
        if not part.going():
            return True
        late = (self.latest[part] == NEVER) | (part.barriers() < entry.event)
        return not (late if entry.mask is None else late & entry.mask.any(axis=(1, 2))).any()

    def forget_settled(self):
        """Take the marks away if barriers have settled all of which they are."""
        if 0 <= self.marked.high <= self.marked.low + MOST_CLEARED and all(
            (last <= part.barriers()).all() for part, last in self.latest.items() if part.going()
        ):
            for marks in self.marks.values():
                marks.fill(self.marked, 0)
            self.marked.clear()

    # Marks.

    def start_marks(self):
        self.marks = {kind: Marks(self.space) for kind in self.entries}
        for kind, span in self.noted.items():
            self.marks[kind].fill(span)
        for kind, entries in self.entries.items():
            for entry in entries.values():
                if not (self.owners and self.settled(entry)):
                    self.set_mark(kind, entry)

    def mark(self, kind, piece):
        """Mark the bytes of an access, unless others could hurt it."""
        mine = self.ways.get(piece.way, 0)
        if any(self.marks[other].of_others(piece, mine) for other in others(kind)):
            return False
        self.set_mark(kind, piece)
        return True

    def set_mark(self, kind, piece):
        mark = SEVERAL
        if piece.way is not None:
            if piece.way not in self.ways:
                if len(self.ways) == SEVERAL - 1:
                    self.merge()
                self.ways[piece.way] = self.free.pop()
            mark = self.ways[piece.way]
        self.marks[kind].set(piece, mark, kind == "store")
        self.marked.add(piece.low, piece.high)

    def merge(self):
        """There are no numbers left: those given first become one."""
        old = list(self.ways)[: SEVERAL // 2]
        table = np.arange(SEVERAL + 1, dtype=np.uint8)
        numbers = [self.ways.pop(way) for way in old]
        table[numbers] = SEVERAL
        self.free += numbers
        for marks in self.marks.values():
            marks.bytes[:] = table[marks.bytes]

    def blot(self, kind, addresses, size):
        """Accesses at these addresses have been noted."""
        if self.marks is not None:
            self.marks["load" if kind == "load" else "store"].blot(addresses, size)
            self.marked.add(int(addresses.min()), int(addresses.max()) + size)


class Marks:
    """For each byte of a buffer who has touched it. 0: nobody; else the number of a way, or SEVERAL."""

    def __init__(self, space):
        self.base = space.origin - space.origin % 16
        self.bytes = np.zeros(-(-(space.origin + space.size - self.base) // 16) * 16, np.uint8)

    def parts(self, piece):
        """[(an array of words, which of them)] that together are the bytes of a piece."""
        width, pattern = min(piece.size, 8), piece.pattern
        words = self.bytes.view(f"u{width}")
        found = []
        for extra in range(piece.shift - self.base, piece.shift - self.base + piece.size, width):
            if piece.mask is not None:
                addresses = np.broadcast_to(pattern.array, np.broadcast_shapes(pattern.array.shape, piece.mask.shape))
                where = (addresses[np.broadcast_to(piece.mask, addresses.shape)].astype(np.int64) + extra) // width
            elif pattern.strides is not None:
                first = int(pattern.array[0, 0, 0]) + extra
                view = np.ndarray(pattern.array.shape, words.dtype, self.bytes, first, pattern.strides)
                found.append((view, ...))
                continue
            else:
                where = (pattern.array.astype(np.int64) + extra) // width
            found.append((words, where))
        return found

    def of_others(self, piece, mine):
        """Does anybody else's mark lie in the piece?"""
        for words, where in self.parts(piece):
            marks = words[where]
            if ((marks != 0) & (marks != spelled(mine, words.dtype))).any():
                return True
        return False

    def set(self, piece, mark, alone):
        """alone: nobody else is there."""
        for words, where in self.parts(piece):
            mine = spelled(mark, words.dtype)
            if not alone:
                marks = words[where]
                mine = np.where((marks == 0) | (marks == mine), mine, spelled(SEVERAL, words.dtype))
            words[where] = mine

    def fill(self, span, mark=SEVERAL):
        low, high = max(span.low - self.base, 0), span.high - self.base
        if high > low:
            self.bytes[low:high] = mark

    def fill_words(self, which):
        """which: truth values, one for each 4 bytes."""
        words = self.bytes.view(np.uint32)
        words[which] = spelled(SEVERAL, words.dtype)

    def blot(self, addresses, size):
        width = min(size, 8)
        words = self.bytes.view(f"u{width}")
        for k in range(0, size, width):
            words[(addresses - self.base + k) // width] = spelled(SEVERAL, words.dtype)


def spelled(mark, dtype):
    """A mark in each byte of a word."""
    return dtype.type(int.from_bytes(bytes([mark]) * dtype.itemsize, "little"))


def one_each(pattern, size, shape, own, mask, close=False):
    """Do all threads of the mask store to bytes of their own? own: each block has a copy of the memory.

    shape: (blocks, warps, 32). False where it is not plain to see; close: look closely.
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
            found = pattern.residue(size) is not None and all_differ((array.reshape(-1) - int(array.min())) // size)
            pattern.counts["apart", size] = found
        if found or own or mask is None or not close:
            return found
        some = array[np.broadcast_to(mask, array.shape)]
        return not some.size or all_differ((some - int(some.min())) // size)
    reach = size
    for stride, length in sorted((abs(s), n) for s, n in zip(pattern.strides, array.shape) if n > 1):
        if stride < reach:
            return False
        reach = stride * (length - 1) + reach
    return True


def all_differ(numbers):
    """Is each of these numbers, all 0 or more, there once?"""
    most = int(numbers.max())
    if most < 256 * len(numbers):  # ticking them off takes less than sorting them, where they are this close
        seen = np.zeros(most + 1, bool)
        seen[numbers] = True
        return np.count_nonzero(seen) == len(numbers)
    numbers = np.sort(numbers)
    return bool((numbers[1:] != numbers[:-1]).all())
