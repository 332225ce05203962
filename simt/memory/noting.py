"""What the race detector hears of accesses (simt/memory/races.py): put aside as a whole, or lane by lane."""

import math

import numpy as np

from simt.memory.aside import Aside, Piece, one_each
from simt.memory.spaces import REGION
from simt.ptx.types import broadcast


class Noting:
    """The part of a Memory (accesses.py) that tells of accesses, if races are looked for."""

    def going(self):
        """Are there threads that have not left?"""
        return self.shared is not None

    def met_until(self, of_warps):
        """Until when threads of each block, or of each of its warps, know each other: times (blocks, 1 or warps)."""
        until = self.races.knowledge.barriers.get(self.numbers).reshape(-1, 1)
        return np.maximum(until, self.races.knowledge.met.get(self.warp_numbers)) if of_warps else until

    def warps_have_met(self):
        """Has any warp been at a __syncwarp of all its lanes since its block was at a barrier?"""
        if not self.races.knowledge.last_of_warps:
            return False
        return bool((self.met_until(True) > self.met_until(False)).any())

    def note_race(self, kind, memory, pattern, shift, size, mask, site, item, values=None, flat=None):
        """Tell the race detector of an access by every lane in `mask`; `item`: the bytes of one element.

        Of a store, before it happens. values: what is stored; of an atomic: where it writes. flat: the addresses, if
        the access is valid for those lanes only that take part.
        """
        if memory is self.local:
            return
        if kind != "load" and self.races.sources and memory is not self.shared:
            self.check_sources(kind, pattern, shift, size, mask, site)
        if flat is not None and not flat.size:
            return
        whole = flat is None
        low, high = (n + shift for n in pattern.known.range(True)) if whole else (int(flat.min()), int(flat.max()))
        if memory is not self.shared and not whole:
            memory = self.buffers[low >> REGION] if low >> REGION == high >> REGION else None
        if memory is not None and (whole or memory is not self.shared or self.aside.layout is not None):
            aside, span = self.aside_of(memory), (low, high + size)
            if self.set_aside(aside, kind, memory, pattern, shift, size, span, whole, mask, site, item):
                return
        self.note_now(kind, memory, pattern, shift, size, mask, site, item, values)

    def aside_of(self, memory):
        if memory is self.shared:
            return self.aside
        found = self.races.aside.get(memory)
        if found is None:
            found = self.races.aside[memory] = Aside(memory)
        return found

    def set_aside(self, aside, kind, memory, pattern, shift, size, span, whole, mask, site, item):
        """Put an access aside, if that can be done."""
        line, strong = self.describe.race_facts(site)
        shared = memory is self.shared
        if kind == "atomic" or strong.scope or (not whole and aside.settled is False):
            return False
        if shared and kind == "store" and self.describe.program.asynchronous:
            return False
        alone = one_each(pattern, size, self.shape, shared, None)
        close = aside.settled is not False
        alone_here = alone or (mask is not None and one_each(pattern, size, self.shape, shared, mask, close))
        if kind == "store" and not alone_here:
            return False

        def make():
            event = self.races.event(kind, line, 0, size)
            return event, lambda: self.note_now(kind, memory, pattern, shift, size, mask, site, item, None, event)

        piece = Piece(pattern, shift, size, mask, *span, whole, self, alone, alone_here)
        return aside.take(kind, piece, make)

    def note_now(self, kind, memory, pattern, shift, size, mask, site, item, values, event=None):
        """event: given if it comes late; then memory still holds what was stored."""
        lanes = np.flatnonzero(broadcast(mask, self.shape)) if mask is not None else np.arange(math.prod(self.shape))
        if not lanes.size:
            return
        flat = broadcast(pattern.array, self.shape).astype(np.int64).reshape(-1)[lanes] + shift
        for buffer, chosen, where in self.parts(memory, lanes, flat):
            addresses = flat if buffer is self.shared else where + buffer.origin
            if event is None:
                aside = self.aside_of(buffer)
                aside.meet(self, self.races.now + 1, mask, kind, addresses, where, chosen, size)
                aside.look_at(kind, int(addresses.min()), int(addresses.max()) + size)
                aside.blot(kind, addresses, where, size)
            held = None
            if values is not None:
                held = np.stack([broadcast(v, self.shape).reshape(-1)[chosen] for v in values], axis=1)
            elif event is not None and kind == "store":
                view = buffer.bytes[where[:, None] + np.arange(size)]
                held = view.view(f"u{item}")
            self.describe.race(kind, buffer, addresses, size, chosen, site, item, held, event)
