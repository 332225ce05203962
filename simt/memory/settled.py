"""What barriers settle of the accesses that have been put aside (simt/memory/aside.py).

A barrier of a block says nothing to other blocks, so it settles nothing in global memory; but what one block alone has
touched until then, it settles for that block. So does __syncwarp for what one warp alone has touched since the last
barrier of its block. Which warp has which words is not asked before there is a __syncwarp that settles them.
"""

import numpy as np

from simt.memory.owners import Owners

NEVER = 1 << 62  # when what is never settled was done
MOST_ASKED = 1024  # accesses put aside, before it is not asked any more which warp has which words
MOST_NOTED = 16  # accesses that were not put aside, for the same
MOST_BYTES = 1 << 28  # of arrays that are kept for that


class Latest:
    """When threads of each warp have last come to a memory, and whether a barrier has settled that since."""

    def __init__(self):
        self.of = {}  # part -> (blocks, warps) times

    def touched(self, part, event, warps):
        """Warps of a part (truth values; None: all) have come."""
        if part not in self.of:  # parts that have ended need not be known
            self.of = {p: last for p, last in self.of.items() if p.going()}
            self.of[part] = np.zeros(part.shape[:2], np.int64)
        last = self.of[part]
        np.maximum(last, event, out=last, where=True if warps is None else warps)

    def fewer(self, part, lanes):
        """These threads have left: no barrier behind settles what they have done since the last one of their block."""
        last = self.of.get(part)
        if last is not None:
            last[lanes.any(axis=2) & (last > part.met_until(False))] = NEVER

    def settled(self, entry, of_warps):
        """Is it settled for all units that have made this access (aside.py: Piece)?"""
        part = entry.part
        if not part.going():
            return True
        late = (self.of[part] == NEVER) | (part.met_until(of_warps) < entry.event)
        return not (late if entry.warps is None else late & entry.warps).any()

    def all_settled(self, of_warps):
        return all((last <= part.met_until(of_warps)).all() for part, last in self.of.items() if part.going())


class Settled:
    """Which of the marks of a memory (marks.py) may go. own: it is the blocks' shared memory, each has a copy."""

    def __init__(self, layout, own, latest):
        self.latest, self.asked = latest, 0  # asked: until which barrier it was asked what is settled
        self.blocks, self.warps = None if own else Owners(layout, False), Owners(layout, True)
        self.start_again()

    def start_again(self):
        """All blocks were at a barrier behind all they did."""
        self.apart = True  # warps have words to themselves
        self.trusted = False  # marks have been taken away because of that
        self.claimed, self.since = {}, {}  # what warps have claimed; what they have not yet: (Piece, its claim)
        self.held = self.noted = 0  # bytes that `claimed` keeps alive; accesses that were not put aside

    def claim(self, marks, kind, piece, before=None):
        """The units of an access come to its words. False if they are another block's. before: the same access."""
        if before is None and self.blocks is not None and not self.blocks.claim(kind, piece):
            return False
        if self.apart and (kind, piece.again) not in self.claimed:
            self.claim_by_warps(marks, (kind, piece.again), piece, lambda: self.warps.claim(kind, piece))
        return True

    def claim_some(self, marks, kind, part, *where):
        """The same of an access that is noted: see Owners."""
        if self.blocks is not None and not self.blocks.claim_some(kind, part, *where):
            return False
        if self.apart:
            self.noted += 1
            self.claim_by_warps(marks, self.noted, None, lambda: self.warps.claim_some(kind, part, *where))
        return True

    def claim_by_warps(self, marks, name, piece, claim):
        """piece: None of what is noted."""
        if not self.trusted:
            self.since[name] = piece, claim
            self.apart = self.noted <= MOST_NOTED and len(self.since) <= MOST_ASKED
        elif not self.claim_now(name, piece, claim):
            self.apart = False
            self.mark_again(marks, self.warps)

    def claim_now(self, name, piece, claim):
        if piece is not None:
            self.claimed[name] = piece.pattern.array  # it stays, so that its name does
            self.held += piece.pattern.array.nbytes
        return claim() and self.held <= MOST_BYTES

    def warps_are_apart(self):
        """Has each warp the words to itself that it has come to since the last barrier?"""
        self.apart = self.apart and all(self.claim_now(name, *found) for name, found in self.since.items())
        self.since = {}
        self.trusted |= self.apart
        return self.apart

    def mark_again(self, marks, owners):
        """Mark what may not have been settled after all."""
        for kind in owners.of:
            marks.fill_words(kind, owners.owned(kind))

    def forget(self, part, marks):
        """Take the marks away if barriers have settled all of which they are."""
        last = part.races.knowledge.last_barrier
        if self.asked < last:
            self.asked = last
            if self.latest.all_settled(False):
                marks.clear()
                if self.warps.clear():
                    self.start_again()
            elif self.apart and self.latest.all_settled(True) and self.warps_are_apart():
                marks.clear()

    def is_settled(self, entry):
        return self.latest.settled(entry, self.trusted and self.apart)

    def give_up(self, marks):
        for owners in (self.blocks, self.warps):
            if owners is not None:
                self.mark_again(marks, owners)
