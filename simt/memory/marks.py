"""Marks: who has touched each byte of a memory (simt/memory/aside.py); and which words of an array an access means."""

import numpy as np

SEVERAL = 255  # a mark: of threads that are not told apart
MOST_CLEARED = 1 << 24  # bytes whose marks a barrier takes away
MOST_LATER = 64  # accesses that are not marked yet


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


class Layout:
    """How a memory's bytes lie in one array: those of a buffer in global memory, or of all blocks' shared memory."""

    def __init__(self, space):
        self.origin = space.origin % 16  # where the memory begins in it
        self.base = space.origin - self.origin
        self.steps = space.steps  # from one block's copy to the next
        self.rows = space.shape[0] if space.steps[0] else 1
        held = self.rows * space.steps[0] or self.origin + space.size
        self.length = -(-held // 16) * 16
        self.space = space

    def within(self, array, span):
        """Of an array that has items for all bytes those of a span, in all rows."""
        each = self.length // len(array)
        low, high = max(span.low - self.base, 0) // each, -(-(span.high - self.base) // each)
        return array.reshape(self.rows, -1)[:, low : max(high, low)]

    def words(self, piece, width, units=(1, 1, 1)):
        """(shape, which of it, words to be `picked`) of a piece: words of `width` bytes, as many as each lane touches.

        units: a shape that the lanes are spread to, too.
        """
        key = width, units
        found = piece.words.get(key)
        if found is None:
            shape = spread(piece, (self.rows, 1, 1), units)
            which = ... if piece.mask is None else np.broadcast_to(piece.mask, shape)
            found = piece.words[key] = shape, which, []
            for extra in range(0, piece.size, width):
                found[2].append(self.word(piece, width, extra - self.base, shape, which))
        return found

    def word(self, piece, width, extra, shape, which):
        pattern = piece.pattern
        aligned = piece.whole and width <= piece.size
        if aligned and pattern.strides is not None:
            first = int(pattern.array[0, 0, 0]) + piece.shift + extra
            return first, tuple(s + step for s, step in zip(pattern.strides, self.steps)), which
        if aligned:
            where = pattern.index(width, self.space) + (piece.low + extra) // width
        else:
            own = np.arange(self.rows).reshape(-1, 1, 1) * self.steps[0]
            where = (pattern.array.astype(np.int64) + own + (piece.shift + extra)) // width
        return np.broadcast_to(where, shape)[which]


def spread(piece, *shapes):
    """The shape of a piece's lanes, together with these."""
    mask = () if piece.mask is None else (piece.mask.shape,)
    return np.broadcast_shapes(piece.pattern.array.shape, *mask, *shapes)


def picked(array, shape, word):
    """(an array, which of its items): those of `array` that one of Layout.words names."""
    if type(word) is np.ndarray:
        return array, word
    first, strides, which = word
    return np.ndarray(shape, array.dtype, array, first, strides), which


def others(kind):
    """Whom an access of this kind could race with."""
    return ("store",) if kind == "load" else ("store", "load")


class Marked:
    """The marks of both kinds of access. They are set when somebody else comes near: most are settled before."""

    def __init__(self, layout):
        self.of = {kind: Marks(layout) for kind in ("load", "store")}
        self.spans = {kind: Span() for kind in self.of}  # of all that has been marked, or will be
        self.later = {}  # (kind, Piece.again) -> Piece: those that will
        self.set_span = Span()  # of those that have been
        self.ways = {}  # Piece.way -> (its number, an array that stays, so that its name in the way does)
        self.free = list(range(SEVERAL - 1, 0, -1))  # numbers that nobody has

    def mark(self, kind, piece):
        """Mark the bytes of an access, unless others could hurt it."""
        if any(self.spans[other].meets(piece.low, piece.high) for other in others(kind)):
            self.set_later()
            mine, _ = self.ways.get(piece.way, (0, None))
            if any(self.of[other].of_others(piece, mine) for other in others(kind)):
                return False
        self.later[kind, piece.again] = piece
        self.spans[kind].add(piece.low, piece.high)
        if len(self.later) > MOST_LATER:
            self.set_later()
        return True

    def set_later(self):
        for (kind, _), piece in self.later.items():
            self.set(kind, piece)
        self.later.clear()

    def set(self, kind, piece):
        mark = SEVERAL
        if piece.way is not None:
            if piece.way not in self.ways:
                if len(self.ways) == SEVERAL - 1:
                    self.merge()
                self.ways[piece.way] = self.free.pop(), piece.pattern.array
            mark, _ = self.ways[piece.way]
        self.of[kind].set(piece, mark, kind == "store")
        self.has_set(kind, piece.low, piece.high)

    def has_set(self, kind, low, high):
        self.spans[kind].add(low, high)
        self.set_span.add(low, high)

    def merge(self):
        """There are no numbers left: those given first become one."""
        old = list(self.ways)[: SEVERAL // 2]
        table = np.arange(SEVERAL + 1, dtype=np.uint8)
        numbers = [self.ways.pop(way)[0] for way in old]
        table[numbers] = SEVERAL
        self.free += numbers
        for marks in self.of.values():
            marks.bytes[:] = table[marks.bytes]

    def fill(self, kind, span):
        """Mark all between as of several."""
        self.of[kind].fill(span)
        self.has_set(kind, span.low, span.high)

    def fill_words(self, kind, which):
        """The same of words of 4 bytes, by their numbers."""
        if len(which):
            base = self.of[kind].fill_words(which)
            self.has_set(kind, base + 4 * int(which[0]), base + 4 * int(which[-1]) + 4)

    def blot(self, kind, addresses, places, size):
        self.of[kind].blot(places, size)
        self.has_set(kind, int(addresses.min()), int(addresses.max()) + size)

    def clear(self):
        """All is settled."""
        span = self.set_span
        if span.high > span.low + MOST_CLEARED:
            return
        for kind, marks in self.of.items():
            marks.fill(span, 0)
            self.spans[kind].clear()
        span.clear()
        self.later.clear()


class Marks:
    """For each byte of a memory who has touched it. 0: nobody; else the number of a way, or SEVERAL."""

    def __init__(self, layout):
        self.layout = layout
        self.bytes = np.zeros(layout.length, np.uint8)

    def parts(self, piece):
        """[(an array of words, which of them)] that together are the bytes of a piece."""
        width = min(piece.size, 8)
        shape, _, found = self.layout.words(piece, width)
        words = self.bytes.view(f"u{width}")
        return [picked(words, shape, word) for word in found]

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
        self.layout.within(self.bytes, span)[...] = mark

    def fill_words(self, which):
        words = self.bytes.view(np.uint32)
        words[which] = spelled(SEVERAL, words.dtype)
        return self.layout.base

    def blot(self, places, size):
        width = min(size, 8)
        words = self.bytes.view(f"u{width}")
        for k in range(0, size, width):
            words[(places + k) // width] = spelled(SEVERAL, words.dtype)


def spelled(mark, dtype):
    """A mark in each byte of a word."""
    return dtype.type(int.from_bytes(bytes([mark]) * dtype.itemsize, "little"))
