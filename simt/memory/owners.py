"""Which block has which words of a buffer in global memory to itself (simt/memory/aside.py).

A barrier of a block says nothing to other blocks, so it settles nothing in global memory; but what one block alone has
touched until then, it settles for that block.
"""

import numpy as np

WORD = 4  # bytes that have one owner
SHARED = -1  # several blocks have read a word


class Owners:
    """For each word of a buffer the block that has read it and the one that has written it: its number + 1, or 0."""

    def __init__(self, space):
        self.base = space.origin - space.origin % 16
        words = -(-(space.origin + space.size - self.base) // 16) * 16 // WORD
        self.of = {kind: np.zeros(words, np.int32) for kind in ("load", "store")}

    def claim(self, kind, addresses, blocks, size):
        """Accesses of `size` bytes by these blocks. False if a word that one writes is another's too.

        addresses, blocks: arrays that fit together. kind: "atomic" too.
        """
        mine = (blocks + 1).astype(np.int32)
        for extra in range(0, size, WORD):
            at = (addresses + (extra - self.base)) // WORD
            for other in others(kind):
                there = self.of[other][at]
                if ((there != 0) & (there != mine)).any():
                    return False
            words = self.of["load" if kind == "load" else "store"]
            new = mine
            if kind == "load":
                there = words[at]
                new = np.where((there == 0) | (there == mine), mine, SHARED)
            words[at] = new
            lost = words[at] != new  # blocks that have met in this very access
            if lost.any():
                if kind != "load":
                    return False
                words[at[lost]] = SHARED
        return True


def others(kind):
    """Whom an access of this kind could race with."""
    return ("store",) if kind == "load" else ("store", "load")
