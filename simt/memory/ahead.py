"""Programmatic dependent launch: what the launch ahead may still be at.

    kernel(grid, block, *args, ahead=simt.Ahead(writes=(x,), reads=(y,)))

Such a kernel may start before the launch ahead of it has ended, and griddepcontrol.wait waits for that. Until then it
must not read what that launch writes, nor write what that launch reads or writes. A thread knows that another one has
waited by a barrier of their block (__syncthreads, a named one, an mbarrier) or of their warp, too.

While some thread has not waited, a Guard stands before the accesses of a part of the grid. What a kernel writes is
noted (Notes) if it lets the next one start early (griddepcontrol.launch_dependents): `report.ahead` is the Ahead for
the launch behind it. Other launches do without both, and pay nothing.
"""

from dataclasses import dataclass

import numpy as np

from simt.arithmetic.lazy import unpack
from simt.errors import AsyncFault
from simt.memory.spaces import REGION


@dataclass(slots=True, frozen=True, eq=False)
class Piece:
    """`size` bytes from an address of this process on; some: which of them, as truth values (None: all)."""

    start: int
    size: int
    written: bool  # else only read
    some: np.ndarray | None = None

    def holds(self, starts, size):
        """Is a byte of these places, `size` bytes each, in the piece? Truth values."""
        starts = starts - self.start
        inside = (starts < self.size) & (starts + size > 0)
        if self.some is None or not inside.any():
            return inside
        each = np.clip(starts[:, None] + np.arange(size), 0, self.size - 1)
        return inside & self.some[each].any(axis=1)


class Ahead:
    """What the launch ahead writes, and what else it reads: NumPy arrays, whose memory the next launch may share.

    pieces   the same as Pieces
    beyond   those of launches further ahead, for which the launch ahead has not waited either
    """

    def __init__(self, writes=(), reads=(), beyond=()):
        for name, arrays in ("writes", writes), ("reads", reads):
            if isinstance(arrays, np.ndarray) or not all(isinstance(a, np.ndarray) for a in arrays):
                raise TypeError(f"{name}: expected a tuple of NumPy arrays")
        self.pieces = [of_array(a, True) for a in writes] + [of_array(a, False) for a in reads]
        self.beyond = list(beyond)

    def touches(self, arrays):
        """The Ahead of the pieces that share memory with one of these arrays; None if there are none."""
        ends = [np.lib.array_utils.byte_bounds(a) for a in arrays if a.size]

        def shared(p):
            return any(low < p.start + p.size and p.start < high for low, high in ends)

        out = Ahead(beyond=filter(shared, self.beyond))
        out.pieces = list(filter(shared, self.pieces))
        return out if out.pieces or out.beyond else None


def of_array(array, written):
    """A Piece of just the bytes of an array's elements."""
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
    if high - low == array.nbytes:
        return Piece(low, high - low, written)
    some = np.zeros(high - low, bool)
    mark(some, low, array)
    return Piece(low, high - low, written, some)


def mark(some, start, array):
    """Set the truth values, one a byte from address `start` on, of an array's elements."""
    strides = (*array.strides, 1)
    np.ndarray((*array.shape, array.itemsize), bool, some, address_of(array) - start, strides)[...] = True


def address_of(array):
    return array.__array_interface__["data"][0]


class Watch:
    """Stands at the accesses of a Part (simt/execute/scheduler.py) to global memory."""

    def __init__(self, part):
        self.part, self.replaced = part, []
        self.put(part.memory, "load", self.at_load)
        self.put(part.memory, "store", self.at_store)
        self.put(part.memory, "atomic", self.at_atomic)
        self.put(part.bulk, "global_place", self.at_bulk)
        self.put(part.bulk, "map", self.at_box)

    def put(self, owner, name, around):
        access = getattr(owner, name)
        self.replaced.append((owner, name, access))
        setattr(owner, name, around(access))

    def lift(self):
        for owner, name, access in self.replaced:
            setattr(owner, name, access)

    def at_load(self, access):
        def watched(site, space, address, offset, dtype, count, mask):
            if space in ("global", "generic"):
                self.see(site, False, address, offset, dtype.itemsize * count, mask)
            return access(site, space, address, offset, dtype, count, mask)

        return watched

    def at_store(self, access):
        def watched(site, space, address, offset, values, dtype, mask):
            if space in ("global", "generic"):
                self.see(site, True, address, offset, dtype.itemsize * len(values), mask)
            return access(site, space, address, offset, values, dtype, mask)

        return watched

    def at_atomic(self, access):
        def watched(site, space, address, offset, dtype, update, values, mask, wanted):
            if space in ("global", "generic"):
                self.see(site, True, address, offset, dtype.itemsize, mask)
            return access(site, space, address, offset, dtype, update, values, mask, wanted)

        return watched

    def at_bulk(self, access):
        def watched(other, lane, size, line, verb):
            buffer, at, address = access(other, lane, size, line, verb)
            self.see_bulk(verb == "writes", buffer, at, size, lane, line)
            return buffer, at, address

        return watched

    def at_box(self, access):
        def watched(other, coordinates, lane, line, verb):
            map, at = access(other, coordinates, lane, line, verb)
            inside, _ = map.place(at)
            self.see_box(verb == "writes", map.array, map.array[inside], lane, line)
            return map, at

        return watched

    def places(self, address, offset, lanes):
        """Addresses on the machine."""
        return np.broadcast_to(unpack(address, 64), self.part.shape).reshape(-1)[lanes].view(np.int64) + offset

    def by_buffer(self, addresses):
        """[(Space, which of the addresses, offsets in its bytes)]"""
        regions = addresses >> REGION
        for region in np.unique(regions).tolist():
            buffer = self.part.launch.buffers.get(region)
            if buffer is not None:
                which = np.flatnonzero(regions == region)
                yield buffer, which, addresses[which] - buffer.origin


class Guard(Watch):
    """No thread touches what the launch ahead may be at before it has waited."""

    def __init__(self, part, ahead):
        super().__init__(part)
        self.ahead = ahead
        self.passed = np.logical_not(part.those(None), order="C")  # who has waited; threads that are none need not
        self.told = np.zeros((part.shape[0], 1, 1), bool)  # blocks with one that has, and has arrived at a barrier

    # Who has waited.

    def wait(self, mask):
        self.passed |= self.part.those(mask)
        self.done()

    def arrive(self, mask):
        """These threads arrive where others of their blocks wait."""
        self.told |= (self.passed & self.part.those(mask)).any(axis=(1, 2), keepdims=True)

    def meet(self, mask, axes=(1, 2)):
        """These threads have met, in each block, or (axes=2) in each warp."""
        here = self.part.those(mask)
        know = (self.passed & here).any(axis=axes, keepdims=True)
        self.passed |= here & (know if axes == 2 else know | self.told)
        self.done()

    def hear(self, lanes, blocks):
        """These threads have seen the phase of an mbarrier complete."""
        self.passed.reshape(-1)[lanes[self.told[blocks, 0, 0]]] = True
        self.done()

    def done(self):
        if self.passed.all() and not self.ahead.beyond:
            self.lift()
            self.part.guard = None

    # What they touch.

    def see(self, site, writes, address, offset, size, mask):
        lanes = np.flatnonzero(self.part.those(mask))
        addresses = self.places(address, offset, lanes)
        for buffer, which, offsets in self.by_buffer(addresses):
            found = self.too_early(writes, address_of(buffer.bytes) + offsets, size, lanes[which])
            if found is not None:
                n, why = found
                what, _ = self.part.place_text("global", int(addresses[which[n]]), size)
                counter = self.part.program.counters[site[0] if type(site) is tuple else site]
                self.fault(counter.line, int(lanes[which[n]]), f"{'writes' if writes else 'reads'} {what}", why)

    def see_bulk(self, writes, buffer, at, size, lane, line):
        found = self.too_early(writes, np.array([address_of(buffer.bytes) + at]), size, np.array([lane]))
        if found is not None:
            what, _ = self.part.place_text("global", buffer.origin + at, size)
            self.fault(line, lane, f"a bulk copy {'writes' if writes else 'reads'} {what}", found[1])

    def see_box(self, writes, array, box, lane, line):
        low, high = np.lib.array_utils.byte_bounds(box) if box.size else (0, 0)
        found = self.too_early(writes, np.array([low]), high - low, np.array([lane]))
        if found is not None:
            self.fault(line, lane, f"a bulk copy {'writes' if writes else 'reads'} a box of a tensor map", found[1])

    def too_early(self, writes, starts, size, lanes):
        """(which access, why) of one that comes too early; None if there is none."""
        late = ~self.passed.reshape(-1)[lanes]
        for pieces, beyond in ((self.ahead.pieces, False), (self.ahead.beyond, True)):
            if not beyond and not late.any():
                continue
            for piece in pieces:
                if writes or piece.written:
                    found = piece.holds(starts, size)
                    found = found if beyond else found & late
                    if found.any():
                        at = "write" if not writes else "read or write" if piece.written else "read"
                        return int(np.argmax(found)), (at, beyond)
        return None

    def fault(self, line, lane, what, why):
        at, beyond = why
        if beyond:
            text = f"which a launch further ahead may still {at}: the launch ahead has not waited for it"
        else:
            text = f"which the launch ahead may still {at}: this thread has not waited for it"
        raise AsyncFault(self.part.trap_text(line, lane, f"{what}, {text} (griddepcontrol.wait)"))


class Notes(Watch):
    """What a launch writes: for the Guard of the launch behind it."""

    def __init__(self, part, written):
        super().__init__(part)
        self.written = written  # {address of a buffer's bytes: truth values, one a byte}

    def see(self, site, writes, address, offset, size, mask):
        if writes:
            lanes = np.flatnonzero(self.part.those(mask))
            for buffer, _, offsets in self.by_buffer(self.places(address, offset, lanes)):
                inside = offsets[(offsets >= 0) & (offsets + size <= buffer.size)]  # the access itself says the rest
                self.of(buffer.bytes)[inside[:, None] + np.arange(size)] = True

    def see_bulk(self, writes, buffer, at, size, lane, line):
        if writes:
            self.of(buffer.bytes)[at : at + size] = True

    def see_box(self, writes, array, box, lane, line):
        if writes and box.size:
            mark(self.of(array), address_of(array), box)

    def of(self, array):
        """The truth values of an array's bytes, from its first on: no strides are negative here."""
        start, (low, high) = address_of(array), np.lib.array_utils.byte_bounds(array)
        some = self.written.get(start, np.zeros(0, bool))
        if some.size < high - low:
            some = self.written[start] = np.r_[some, np.zeros(high - low - some.size, bool)]
        return some


def after(written, arrays):
    """The Ahead for the launch behind one that has written so (see Notes), of all that it was given."""
    out = Ahead(reads=arrays)
    out.pieces[:0] = [Piece(start, some.size, True, some) for start, some in written.items()]
    return out
