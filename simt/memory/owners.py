"""Which block, or which warp, has which words of a memory to itself (simt/memory/settled.py)."""

import numpy as np

from simt.memory.clocks import WARP
from simt.memory.marks import MOST_CLEARED, Span, others, picked

WORD = 4  # bytes that have one owner
SHARED = -1  # several units have read a word
MOST_WARPS = 1 << 30  # that have numbers of their own


class Owners:
    """For each word of a memory the unit that has read it and the one that has written it: its number, or 0.

    A unit is a block or, with `of_warps`, a warp. Numbers begin with 1; those of warps may come again in very large
    grids, where their blocks differ.
    """

    def __init__(self, layout, of_warps):
        self.layout, self.of_warps, self.span = layout, of_warps, Span()  # span: of all that has an owner
        self.of = {kind: np.zeros(layout.length // WORD, np.int32) for kind in ("load", "store")}

    def owned(self, kind):
        """The numbers of the words that have an owner."""
        found = self.layout.within(self.of[kind], self.span)
        row, word = np.nonzero(found)
        first = max(self.span.low - self.layout.base, 0) // WORD
        return row * (len(self.of[kind]) // self.layout.rows) + first + word

    def clear(self):
        """Nobody owns anything. False if that would take too long."""
        if self.span.high > self.span.low + MOST_CLEARED:
            return False
        for words in self.of.values():
            self.layout.within(words, self.span)[...] = 0
        self.span.clear()
        return True

    def units(self, part):
        """The numbers of a part's units, (blocks, 1 or warps, 1)."""
        if self.of_warps:
            return (part.warp_numbers % MOST_WARPS + 1).astype(np.int32)[:, :, None]
        return (part.numbers + 1).astype(np.int32).reshape(-1, 1, 1)

    def claim(self, kind, piece):
        """False if a word of a piece, one of which somebody writes, is another unit's too. kind: "atomic" too."""
        units = self.units(piece.part)
        self.span.add(piece.low, piece.high)
        shape, which, words = self.layout.words(piece, WORD, units.shape)
        mine = np.broadcast_to(units, shape)[which]
        return all(self.take(kind, shape, word, mine) for word in words)

    def claim_some(self, kind, part, addresses, places, lanes, size):
        """The same of accesses by single threads of a part: lanes, their numbers; places: where in the layout."""
        self.span.add(int(addresses.min()), int(addresses.max()) + size)
        warps = lanes // WARP
        mine = self.units(part).reshape(-1)[warps if self.of_warps else warps // part.shape[1]]
        return all(self.take(kind, None, (places + extra) // WORD, mine) for extra in range(0, size, WORD))

    def take(self, kind, shape, word, mine):
        for other in others(kind):
            words, where = picked(self.of[other], shape, word)
            there = words[where]
            if ((there != 0) & (there != mine)).any():
                return False
        words, where = picked(self.of["load" if kind == "load" else "store"], shape, word)
        new = mine
        if kind == "load":
            there = words[where]
            new = np.where((there == 0) | (there == mine), mine, SHARED)
        words[where] = new
        lost = words[where] != new  # units that have met in this very access
        if lost.any():
            if kind != "load":
                return False
            if type(word) is np.ndarray:
                words[where[lost]] = SHARED
            else:  # the same word may stand there several times, in one of which nothing is lost
                at = np.zeros(words.shape, bool)
                at[where] = lost
                np.copyto(words, SHARED, where=at)
        return True
