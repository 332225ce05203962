"""What threads know of themselves, and what they do together: special registers, shuffles' company, votes, barriers."""

import functools
from contextlib import contextmanager

import numpy as np

from simt.arithmetic import lanes, mma
from simt.arithmetic.lazy import pack, unpack
from simt.arithmetic.merging import shuffle
from simt.errors import LaneFault, MemoryFault, Unsupported
from simt.memory import wavefronts
from simt.memory.spaces import LOCAL_WINDOW, SHARED_WINDOW
from simt.ptx.special_registers import GRID_BARRIER
from simt.ptx.types import broadcast

EVERY = 0xFFFFFFFF  # a mask that names all lanes


class Threads:
    """The part of a Part (scheduler.py) that generated code calls for special registers and for lanes together."""

    # Special registers.

    def special(self, name):
        if name not in self.specials:
            made = self.make_special(name)
            if "clock" in name or "timer" in name:
                return made
            self.specials[name] = made
        return self.specials[name]

    def make_special(self, name):
        stem, _, axis = name[1:].partition(".")
        launch = self.launch
        at = "xyz".find(axis) if axis else 0
        if stem in ("ntid", "nctaid"):
            return (launch.block if stem == "ntid" else launch.grid)[at]
        if stem == "tid":
            linear = np.arange(launch.warps * 32, dtype=np.uint32)
            x, y, _ = launch.block
            value = (linear % x, linear // x % y, linear // (x * y))[at]
            return squeeze(value.reshape(1, launch.warps, 32))
        if stem == "ctaid":
            linear = self.numbers.astype(np.uint32)
            x, y, _ = launch.grid
            value = (linear % x, linear // x % y, linear // (x * y))[at]
            return squeeze(value.astype(np.uint32).reshape(-1, 1, 1))
        lane = np.arange(32, dtype=np.uint32).reshape(1, 1, 32)
        if stem == "laneid":
            return pack(lane)
        if stem == "warpid":
            return squeeze(np.arange(launch.warps, dtype=np.uint32).reshape(1, -1, 1))
        if stem.startswith("lanemask_"):
            one = np.uint32(1) << lane
            below, relation = one - np.uint32(1), stem[9:]
            masks = {"eq": one, "lt": below, "le": below | one, "gt": ~(below | one), "ge": ~below}
            return pack(masks[relation])
        if stem in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo"):
            self.clocked = True
            return launch.steps  # grows; not a time
        if stem in GRID_BARRIER:
            return self.program.symbols["grid_barrier"] >> 32 * GRID_BARRIER.index(stem) & 0xFFFFFFFF
        if stem == "nwarpid":
            return launch.warps
        if stem == "dynamic_smem_size":
            return launch.shared_size
        if stem == "total_smem_size":
            return launch.shared_size + self.program.shared_size
        if stem in ("smid", "gridid"):
            return 0
        if stem == "nsmid":
            return 1
        if stem == "cluster_ctarank" or (stem, axis) == ("cluster_ctaid", "x"):
            return squeeze(self.ranks())
        if stem in ("cluster_nctarank", "cluster_nctaid"):
            return self.cluster_size if axis in ("", "x") else 1
        if stem == "nclusterid":
            return launch.grid[at] // (self.cluster_size if axis == "x" else 1)
        if stem == "cluster_ctaid":
            return 0
        if stem == "clusterid":
            own = unpack(self.special(f"%ctaid.{axis}"), 32)
            return pack(own // np.uint32(self.cluster_size if axis == "x" else 1))
        raise Unsupported(name, "this special register")

    # Lanes together.

    def member_lanes(self, members):
        """Is a lane named by its own mask? Truth values (.., .., 32)."""
        return lanes_named(members) if type(members) is int else bits_of_lanes(members.array())

    def named_lanes(self, members, mask):
        """The lanes that some lane of `mask` names, warp by warp: each may have a mask of its own."""
        if type(members) is not int:
            own = np.where(mask, unpack(members, 32), np.uint32(0))
            members = pack(np.bitwise_or.reduce(own, axis=2, keepdims=True))
        return self.member_lanes(members)

    def of_whole_warps(self, mask):
        """Does a mask hold all 32 lanes of each warp that it holds any of?"""
        if mask is not self.whole_mask:
            if np.count_nonzero(mask.any(axis=2) != mask.all(axis=2)):
                return False
            self.whole_mask = mask  # which goes from block to block, and is never written to
        return True

    def missing(self, members, mask):
        """Living lanes that a lane of `mask` names and that are not in it, as a mask; None if there are none."""
        if type(members) is int and members == EVERY and self.of_whole_warps(mask):
            return None
        alive = True if self.alive is None else self.alive
        absent = self.named_lanes(members, mask) & alive & ~mask & mask.any(axis=2, keepdims=True)
        return absent if np.count_nonzero(absent) else None

    def together(self, members, mask, line):
        """The lanes that execute must be named, and all that are named must be here."""
        if type(members) is int and members == EVERY and mask is not None and self.of_whole_warps(mask):
            return
        active = self.exist if mask is None else mask
        extra = ~self.member_lanes(members) & (True if active is None else active)
        if extra.any():
            at = np.argwhere(self.whole(extra))[0]
            raise LaneFault(self.lane_text(line, at, "executes this, but the mask does not name its lane"))
        absent = None if mask is None else self.missing(members, mask)
        if absent is not None:
            at = np.argwhere(self.whole(absent))[0]
            raise LaneFault(self.lane_text(line, at, "is named by the mask, but does not execute this"))

    def lane_text(self, line, at, what):
        block, warp, lane = (int(v) for v in at)
        return (
            f"kernel {self.program.name}, line {line}{self.quote(line)}: lane {lane} of warp {warp} (thread "
            f"{self.thread_text(warp * 32 + lane)}, block {self.block_text(block)}) {what}"
        )

    def lanes32(self, array):
        return array if array.shape[2] == 32 else np.broadcast_to(array, array.shape[:2] + (32,))

    def by_members(self, members, mask, function):
        """function(the lanes that work together), for each mask that lanes have."""
        active = self.exist if mask is None else mask
        active = True if active is None else active
        if type(members) is int:
            return function(self.member_lanes(members) & active)
        bits = unpack(members, 32)
        out = None
        for one in np.unique(np.broadcast_to(bits, np.broadcast_shapes(bits.shape, np.shape(active)))[...]):
            found = function(self.member_lanes(int(one)) & active)
            out = found if out is None else np.where(bits == one, found, out)
        return out

    def check_read(self, in_range, mode, lane, clamp, members, mask, guard, line):
        """A shuffle must not read a lane that does not take part: what it gets from there is undefined."""
        reads = self.exist if mask is None else mask
        if guard is None and type(members) is int and members == EVERY:
            if reads is None or self.of_whole_warps(reads):
                return
        reads = np.ones((1, 1, 32), bool) if reads is None else reads
        reads = reads if guard is None else reads & guard
        named = self.member_lanes(members)
        there, _ = shuffle(mode, alike(reads, named)[0].astype(np.uint32), lane, clamp)
        numbers = np.arange(32, dtype=np.uint32).reshape(1, 1, 32)
        source, _ = shuffle(mode, numbers, lane, clamp)
        own = unpack(members, 32) >> source & np.uint32(1)  # does the lane's own mask name the one it reads
        lost = in_range & ((there == 0) | (own == 0)) & reads
        if not lost.any():
            return
        at = np.argwhere(self.whole(lost))[0]
        read = int(self.whole(source)[tuple(at)])
        if at[1] * 32 + read >= self.launch.threads:
            why = f"which is not there: the block has {self.launch.threads} threads"
        elif not self.whole(self.alive)[at[0], at[1], read]:
            why = "which has left the kernel"
        elif not self.whole(own)[tuple(at)]:
            why = "which its mask does not name"
        else:
            why = "which does not execute it"
        raise LaneFault(self.lane_text(line, at, f"reads lane {read} in this shuffle, {why}: its value is undefined"))

    def vote(self, mode, p, members, mask):
        p = np.full((1, 1, 1), p) if type(p) is bool else p
        return self.by_members(members, mask, lambda active: lanes.vote(mode, *alike(p, active)))

    def match(self, mode, value, members, mask):
        if mode == "any":
            return self.by_members(members, mask, lambda active: lanes.match_any(*alike(value, active))), None
        both = [
            self.by_members(members, mask, lambda active: lanes.match_all(*alike(value, active))[n])  # noqa: B023
            for n in (0, 1)
        ]
        return both

    def elect(self, members, mask):
        """(the lowest lane that takes part, is it this one)"""

        def leader(active):
            return np.argmax(np.broadcast_to(active, (*active.shape[:2], 32)), axis=2, keepdims=True).astype(np.uint32)

        first = self.by_members(members, mask, leader)
        return first, np.arange(32).reshape(1, 1, 32) == first

    def redux(self, operation, value, members, mask):
        return self.by_members(members, mask, lambda active: lanes.redux(operation, *alike(value, active)))

    def ldmatrix(self, site, space, address, offset, count, trans, mask):
        """Lanes 0-7 give the rows of the first 8x8 matrix, 8-15 of the second, ..."""
        with self.count_matrices(site, address, offset, count, mask) as active:
            parts = self.memory.load(site, space, address, offset, np.dtype(np.uint32), 4, active)
        parts = [self.lanes32(p) for p in parts]
        rows = np.stack(parts, axis=-1).view(np.uint16)
        return mma.ldmatrix(rows[..., :32, :], trans, count)

    def stmatrix(self, site, space, address, offset, registers, trans, mask):
        """The opposite of ldmatrix."""
        count = len(registers)
        rows = mma.stmatrix(registers, trans)
        words = np.zeros((*rows.shape[:-2], 32, 4), np.uint32)
        words[..., : 8 * count, :] = np.ascontiguousarray(rows).view(np.uint32)
        values = [np.ascontiguousarray(words[..., k]) for k in range(4)]
        with self.count_matrices(site, address, offset, count, mask) as active:
            self.memory.store(site, space, address, offset, values, np.dtype(np.uint32), active)

    @contextmanager
    def count_matrices(self, site, address, offset, count, mask):
        """Gives the lanes whose addresses count; the access is counted as one to matrices, not as a plain one."""
        rows_of = np.arange(32).reshape(1, 1, 32) < 8 * count
        counter = self.program.counters[site]
        kind, counter.kind = counter.kind, None
        try:
            yield rows_of if mask is None else rows_of & mask
        finally:
            counter.kind = kind
        if not self.launch.counted:
            return
        value = unpack(address, 64 if type(address) is not int and address.known.width == 64 else 32)
        flat = np.broadcast_to(value, value.shape[:2] + (32,)).astype(np.int64) + offset
        each = wavefronts.ldmatrix_wavefronts(flat, count, None if mask is None else mask)
        total = self.memory.total
        counter.requests += total(np.ones_like(each) if mask is None else (each > 0))
        counter.sectors += total(each)
        counter.ideal += total(np.where(each > 0, count, 0))

    # Barriers that all threads reach together.

    def block_barrier(self, mask, line):
        if self.guard is not None:
            self.guard.meet(mask)
        if self.launch.races is not None:
            blocks = self.whole(True if mask is None else mask).any(axis=(1, 2))
            self.memory.aside.settle(blocks | ~self.whole(self.alive).any(axis=(1, 2)), bool(self.memory.copies))
            self.launch.races.barrier(self.race_numbers[blocks])

    def part_barrier(self, number, arriving, waiting):
        """A barrier for a part of the block: who comes, and who of them goes on (masks)."""
        if self.guard is not None:
            self.guard.meet(waiting)
        if self.launch.races is not None:
            alive = self.whole(self.alive)
            races = self.launch.races
            for block in np.flatnonzero(arriving.any(axis=(1, 2))).tolist():
                come, go, there = arriving[block], waiting[block], alive[block]
                block_number = int(self.race_numbers[block])
                everyone = not (there & ~go).any()
                if not everyone or races.has_come(block_number, number):
                    if any((m.any(axis=1) & (there & ~m).any(axis=1)).any() for m in (come, go)):
                        threads = [np.flatnonzero(m) for m in (come, go)]
                        races.thread_barrier(block_number, number, *threads)
                    else:
                        warps = [np.flatnonzero(m.any(axis=1)).tolist() for m in (come, go)]
                        races.part_barrier(block_number, number, *warps)
                if everyone:
                    races.barrier(np.array([block_number]))

    def warp_barrier(self, members, mask, line):
        if self.guard is not None:
            self.guard.meet(mask, axes=2)
        if self.launch.races is None:
            return
        here = self.whole(self.exist if mask is None else mask)
        named = np.broadcast_to(unpack(members, 32), self.shape)
        alive = self.whole(self.alive)
        for one in [members] if type(members) is int else np.unique(named[here]).tolist():
            lanes = here if type(members) is int else here & (named == one)
            found = np.argwhere(lanes.any(axis=2))
            if one != 0xFFFFFFFF:  # those that have left are not here
                one = lanes_as_bits(alive[found[:, 0], found[:, 1]]) & one
            self.launch.races.warp_barrier(self.race_numbers[found[:, 0]], found[:, 1], one)

    def tell_left(self, mask):
        """Threads have left. To simt/memory/races.py, if others of their blocks have not."""
        if self.launch.races is not None:
            alive = self.whole(self.alive)
            left = self.whole(mask) & alive.any(axis=(1, 2), keepdims=True)
            if left.any():
                self.memory.aside.leave(left)
                for aside in (self.memory.aside, *self.launch.races.aside.values()):
                    aside.fewer(self.memory, left)
                self.launch.races.leave(*self.who(np.flatnonzero(left)))

    def grid_wait(self, mask):
        """griddepcontrol.wait: these threads have waited for the launch ahead."""
        self.launch.waited = True
        if self.guard is not None:
            self.guard.wait(mask)

    def fence(self, mask, scope):
        if self.launch.races is not None:
            self.launch.races.fence(*self.who(self.lanes_of(mask)), scope)

    def proxy_fence(self, mask):
        """fence.proxy.async: what these threads have stored, bulk copies and wgmma may read."""
        if self.launch.races is not None:
            lanes = self.lanes_of(mask)
            self.launch.races.proxy_fence(*self.who(lanes))

    # Threads by number, for what one thread does by itself.

    def lanes_of(self, mask):
        """The numbers of the threads of a mask, in this part of the grid."""
        return np.flatnonzero(self.whole(self.exist if mask is None else mask))

    def who(self, lane):
        """(block, by the number that the race detector knows it by, thread in the block)"""
        many = self.shape[1] * 32
        block = lane // many  # np.divmod is slower
        return self.race_numbers[block], lane - block * many

    def shared_lanes(self, where, mask, line, what):
        """(addresses in shared memory, numbers of the threads) of an operand (space, address, offset)."""
        space, address, offset = where
        lanes = self.lanes_of(mask)
        if type(address) is int:
            addresses = np.full(lanes.size, address + offset, np.int64)
        else:
            array = address.array()
            array = broadcast(array, self.shape).reshape(-1)[lanes]
            addresses = array.astype(np.int64) + offset
        if space == "generic":
            addresses = addresses - SHARED_WINDOW
            outside = (addresses < 0) | (addresses >= LOCAL_WINDOW - SHARED_WINDOW)
            if outside.any():
                lane = int(lanes[np.argmax(outside)])
                raise MemoryFault(self.trap_text(line, lane, f"{what} at an address that is not one of shared memory"))
        return addresses, lanes

    # For simt/memory/races.py.

    def race_at(self, kind, blocks, address, size, lanes, line, ends=False):
        """An access by these threads to one place in the shared memory of these blocks, one for each. ends: it is the
        last to what lies there."""
        if self.launch.races is not None:
            self.memory.aside.look_at(kind, address, address + size)
            numbers, threads = self.who(lanes)
            places = np.full(len(lanes), address)
            there = self.race_numbers[blocks]
            self.tell(lambda races: races.shared(kind, places, size, numbers, threads, line, there=there, ends=ends))

    def race_async(self, kind, block, offsets, size, lanes, line):
        """A bulk copy or a wgmma, issued by these threads, reads or writes the shared memory of a block: their own, or
        another of the cluster."""
        if self.launch.races is not None:
            self.memory.aside.look_at(kind, int(offsets.min()), int(offsets.max()) + size)
            numbers, threads = self.who(np.asarray(lanes))
            there = int(self.race_numbers[block])
            self.tell(lambda races: races.asynchronous(kind, offsets, size, int(numbers[0]), threads, line, there))

    def block_vote(self, operation, p):
        """__syncthreads_count, _and, _or where all threads are together."""
        p = self.whole(p) & self.whole(self.exist)
        if operation == "popc":
            return p.sum(axis=(1, 2), keepdims=True).astype(np.uint32)
        if operation == "and":
            return (p | ~self.whole(self.exist)).all(axis=(1, 2), keepdims=True)
        return p.any(axis=(1, 2), keepdims=True)

    def barrier_vote(self, entries, red, ready):
        operation, _, _, slot = red
        total = np.zeros(self.shape, bool)
        for entry in entries:
            _, p, wanted, _ = entry[5]
            p = self.whole(p)
            total |= self.whole(entry[2]) & (p if wanted else ~p)
        if operation == "popc":
            value = total.sum(axis=(1, 2), keepdims=True).astype(np.uint32)
            old = unpack(self.registers[slot], 32)
            self.registers[slot] = pack(np.where(ready, value, old))
            return
        arrived = np.zeros(self.shape, bool)
        for entry in entries:
            arrived |= entry[2]
        value = total.any(axis=(1, 2), keepdims=True)
        if operation == "and":
            value = (total | ~arrived).all(axis=(1, 2), keepdims=True)
        self.registers[slot] = np.where(ready, value, self.registers[slot])


def bits_of_lanes(masks):
    """Words, and for each lane its own: truth values (.., .., 32) of the lanes they name."""
    return (masks >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0


@functools.cache
def lanes_named(mask):
    """The lanes that one word names, (1, 1, 32)."""
    return bits_of_lanes(unpack(mask, 32))


def lanes_as_bits(lanes):
    """Truth values (warps, 32) as a number for each warp."""
    return (lanes.astype(np.int64) << np.arange(32)).sum(axis=1)


def squeeze(a):
    """A special register without the axes along which it does not change."""
    for axis in range(3):
        if a.shape[axis] > 1 and (a == a.take([0], axis)).all():
            a = a.take([0], axis)
    return pack(np.ascontiguousarray(a))


def alike(value, active):
    """Both with all lanes spelled out."""
    shape = np.broadcast_shapes(value.shape, active.shape)
    return broadcast(value, shape), broadcast(active, shape)
