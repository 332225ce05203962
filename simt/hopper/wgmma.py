"""wgmma: four warps multiply matrices that lie in shared memory (PTX ISA, "Asynchronous Warpgroup Level MMA").

    D (64 x N) = A (64 x K) B (K x N) + D        K: 32 bytes, 16 elements of f16 and bf16, 8 of tf32

A and B are found by descriptors of 64 bits. Their rows (of A, and columns of B) are read in pieces of 16 bytes; where
piece (i, k) lies is `pieces`. A may come from registers instead, in the fragments of mma.m16n8k16, one row of
fragments a warp. D: warp w holds rows 16 w to 16 w + 15, in the fragments of mma's C, 8 columns after 8.

The operands are read, and the sum is made, when the instruction is issued; the registers show it when a wait_group has
completed its group. Until then they hold NaNs, and an instruction other than mov and wgmma that reads them is a fault.
Bulk copies to what a wgmma under way reads are faults as well, and plain stores are with check_races=True. Not seen:
registers of A that change before the wait; a wgmma.fence that is missing behind the first one; a warp of the four that
does not come to a commit or a wait (one that comes in part is).
"""

import functools
import re

import numpy as np

from simt.arithmetic.lazy import unpack
from simt.arithmetic.merging import merge_float
from simt.arithmetic.mma import LOWEST, _numbers, accumulate
from simt.arithmetic.rounding import F32, U16, U32, encode
from simt.errors import AsyncFault, LaneFault, MemoryFault, Unsupported
from simt.hopper.tensor_map import swizzled

MODES = {0: 0, 1: 128, 2: 64, 3: 32}  # bits 62-63 of a descriptor -> bytes of the swizzle
PIECE = np.dtype(np.complex128)  # 16 bytes
POISON = F32(np.nan)
FORM = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16)\.(f16|bf16|tf32)\.(f16|bf16|tf32)$")


def form(opcode):
    """(N, type of D, type of A and B) of an instruction that is covered, else None."""
    found = FORM.match(opcode)
    if not found:
        return None
    n, k, d, a, b = int(found[1]), int(found[2]), *found.groups()[2:]
    if n % 8 or not 8 <= n <= 256 or a != b or k != (8 if a == "tf32" else 16) or (d == "f16" and a != "f16"):
        return None
    return n, d, a


class Descriptor:
    """A matrix descriptor without its start: two strides in bytes, the base offset, the bytes of the swizzle."""

    def __init__(self, bits):
        self.leading = (bits >> 16 & 0x3FFF) << 4
        self.stride = (bits >> 32 & 0x3FFF) << 4
        self.base = bits >> 49 & 7
        self.swizzle = MODES[bits >> 62 & 3]


@functools.lru_cache(maxsize=256)
def pieces(rows, leading, stride, swizzle, along_k):
    """Where the 16-byte pieces of an operand lie, in bytes behind its start and before the exchange of the swizzle.

    along_k (K-major): (rows, 2); a piece is 16 bytes of K of one row. In groups of 8 rows, `stride` bytes apart:
        no swizzle: rows 16 bytes apart, the second half of K `leading` bytes behind the first;
        else: rows as far apart as the swizzle is wide, the second half of K right behind the first.
    else (M- or N-major): (rows / 8, 16); a piece is 8 rows of one k. In groups of 8 k:
        no swizzle: k 16 bytes apart, groups of k `leading` bytes, groups of 8 rows `stride` bytes apart;
        else: k as far apart as the swizzle is wide, groups of k `stride` bytes apart; the swizzle's width of rows lies
        side by side, the next so many rows `leading` bytes behind.
    """
    wide = swizzle or 16
    if along_k:
        i, k = np.arange(rows)[:, None], np.arange(2)
        return i // 8 * stride + i % 8 * wide + k * (16 if swizzle else leading)
    i, k = np.arange(rows // 8)[:, None], np.arange(16)
    if not swizzle:
        return i * stride + k % 8 * 16 + k // 8 * leading
    across = wide // 16
    return i // across * leading + i % across * 16 + k % 8 * wide + k // 8 * stride


class Flight:
    """Some wgmma of one group under way. open: (blocks, warps), who has not waited yet; group: its number, likewise."""

    __slots__ = ("open", "group", "reads", "targets", "line", "number")

    def __init__(self, open_, group, reads, line, number):
        self.open, self.group, self.reads, self.line, self.number = open_, group, reads, line, number
        self.targets = []  # (array of a register, its values to be, lanes): filled in at the wait


class Warpgroups:
    """The wgmma of a Part (simt/execute/scheduler.py)."""

    def __init__(self, part):
        self.part, self.memory = part, part.memory
        self.groups = part.shape[1] // 4  # whole warpgroups of a block
        self.flights, self.issued = [], 0
        self.flying = {}  # id of a register's array -> (the array, [(Flight, values, lanes)])
        self.commits = np.zeros(part.shape[:2], np.int64)
        self.fenced = np.zeros(part.shape[:2], bool)

    # What generated code calls.

    def fence(self, mask, line):
        self.fenced |= self.warps(mask, "wgmma.fence", line)

    def commit(self, mask, line):
        self.commits += self.warps(mask, "wgmma.commit_group", line)

    def wait(self, left, mask, line):
        """wgmma.wait_group: all but the `left` groups that these warps committed last are complete."""
        here = self.warps(mask, "wgmma.wait_group", line)
        for flight in self.flights:
            done = flight.open & here & (flight.group < self.commits - left)
            if not done.any():
                continue
            for array, values, lanes in flight.targets:
                np.copyto(array, values, where=lanes & done[:, :, None])
            flight.open &= ~done
            if self.part.launch.races is not None:
                self.tell_waited(flight, done)
            if not flight.open.any():
                flight.targets = []
        self.flights = [f for f in self.flights if f.open.any()]
        if not self.flights:
            self.flying.clear()

    def tell_waited(self, flight, done):
        """To simt/memory/races.py: these warps know that the wgmma has read its operands."""
        for name, (blocks, groups, pieces) in enumerate(flight.reads):
            for block, group, where in zip(blocks.tolist(), groups.tolist(), pieces):
                for warp in range(4 * group, 4 * group + 4):
                    if done[block, warp]:
                        reader = "wgmma", flight.number, name, group
                        lanes = range(32 * warp, 32 * warp + 32)
                        self.part.launch.races.waited(
                            reader, where, int(self.part.race_numbers[block]), lanes, flight.line
                        )

    def multiply(self, what, d, a, b, accumulates, signs, trans, deferred, mask, line):
        """One wgmma.mma_async. d: registers; a: a descriptor, or registers; b: a descriptor. -> registers."""
        n, kind_d, kind = what
        part = self.part
        whole = self.complete(mask, line)  # (blocks, groups)
        chosen = np.flatnonzero(whole)
        warps = np.zeros(part.shape[:2], bool)
        warps[:, : 4 * self.groups] = np.repeat(whole, 4, axis=1)
        if not (self.fenced | ~warps).all():
            self.fault(line, warps, "a wgmma before the first wgmma.fence: it may not find its registers as they are")
        reads = []
        if type(a) is list:
            left = self.from_registers(kind, a, chosen)
        else:
            left = self.operand(a, 64, kind, not trans[0], chosen, line, "A", reads)
        right = self.operand(b, n, kind, not trans[1], chosen, line, "B", reads)
        if signs[0] != signs[1]:
            left = -left
        given = [self.values_of(r) for r in d] if deferred else d
        c = self.spread(given, kind_d, chosen)
        if accumulates is not True:
            p = np.broadcast_to(accumulates, part.shape)[:, : 4 * self.groups : 4, 0].reshape(-1)[chosen]
            c = np.where(p[:, None, None], c, 0.0)
        result = accumulate(left, right, c, LOWEST[kind], half=kind_d == "f16")
        part.program.tally(line, "simt__wgmma.sum", chosen.size)
        flight = Flight(warps.copy(), np.where(warps, self.commits, 0), reads, line, self.issued)
        self.issued += 1
        self.flights.append(flight)
        registers = self.collect(result, kind_d, chosen)
        lanes = warps[:, :, None]
        if not deferred:
            return [np.where(lanes, new, old) for new, old in zip(registers, d)]
        others = {}  # of the lanes that earlier wgmmas fill in, those that this one does not
        return [self.take_off(flight, new, old, lanes, others) for new, old in zip(registers, d)]

    def take_off(self, flight, values, old, lanes, others):
        """The register that will be `values` in these lanes; NaN until then."""
        array = np.empty(values.shape, values.dtype)
        np.copyto(array, old)
        np.copyto(array, POISON, where=lanes)
        entries = []
        for f, v, m in self.entries(old):
            if id(m) not in others:
                left = m & ~lanes
                others[id(m)] = left if left.any() else None, m  # m too, lest another get its id
            if others[id(m)][0] is not None:
                entries.append((f, v, others[id(m)][0]))
        entries.append((flight, values, lanes))
        for f, v, m in entries:
            f.targets.append((array, v, m))
        self.flying[id(array)] = (array, entries)
        return array

    def entries(self, array):
        found = self.flying.get(id(array))
        return found[1] if found is not None else []

    def values_of(self, array):
        """A register with what the wgmma under way will put there: what the next wgmma adds to."""
        for flight, values, lanes in self.entries(array):
            array = np.where(lanes & flight.open[:, :, None], values, array)
        return array

    def merge(self, old, new, mask):
        """merge_float for registers that a wgmma under way may still fill in."""
        out = merge_float(old, new, mask)
        if self.flying and out is not new and out is not old:
            entries = [(f, v, m & mask) for f, v, m in self.entries(new)]
            entries += [(f, v, m & ~mask) for f, v, m in self.entries(old)]
            entries = [e for e in entries if (e[2] & e[0].open[:, :, None]).any()]
            for f, v, m in entries:
                f.targets.append((out, v, m))
            if entries:
                self.flying[id(out)] = (out, entries)
        return out

    def landed(self, array, mask, line):
        """An ordinary instruction reads this register: no wgmma may be about to write it."""
        for flight, _, lanes in self.entries(array) if self.flying else ():
            early = lanes & flight.open[:, :, None] & (True if mask is None else mask)
            if early.any():
                lane = int(np.flatnonzero(np.broadcast_to(early, self.part.shape))[0])
                what = (
                    f"reads a register that the wgmma of line {flight.line} still writes: no wgmma.wait_group has "
                    "completed its group"
                )
                raise AsyncFault(self.part.trap_text(line, lane, what))

    def reader(self, block, chunks):
        """Which wgmma under way reads one of these 16-byte pieces of the block's shared memory, in words."""
        for flight in self.flights:
            if flight.open[block].any():
                for blocks, groups, where in flight.reads:
                    for row in np.flatnonzero(blocks == block):
                        if flight.open[block, 4 * groups[row]] and np.isin(where[row], chunks).any():
                            return f"the wgmma of line {flight.line}"
        return None

    # Who takes part.

    def warps(self, mask, what, line):
        """(blocks, warps): those that execute, with all their lanes."""
        here, part = self.part.whole(mask), self.part
        warps = here.any(axis=2)
        apart = warps & (part.whole(part.alive) & ~here).any(axis=2)
        if apart.any():
            block, warp = np.argwhere(apart)[0]
            raise LaneFault(
                f"kernel {part.program.name}, line {line}{part.quote(line)}: {what} is for all threads of a warpgroup "
                f"together; block {part.block_text(int(block))}, warp {int(warp)} has {int(here[block, warp].sum())} "
                "lanes here"
            )
        return warps

    def missing(self, mask):
        """Warps of a warpgroup that has not come as a whole, as a mask of all their lanes that are here, else None."""
        here, absent = self.by_group(mask), self.by_group(self.part.alive) & ~self.by_group(mask)
        some = here.any(axis=2) & absent.any(axis=2)
        return np.repeat(some, 4, axis=1)[:, : self.part.shape[1], None] & mask if some.any() else None

    def by_group(self, mask):
        """A mask as (blocks, warpgroups, 128); the last warpgroup may lack warps."""
        blocks, warps, _ = self.part.shape
        padded = np.zeros((blocks, -(-warps // 4) * 4, 32), bool)
        padded[:, :warps] = self.part.whole(mask)
        return padded.reshape(blocks, -1, 128)

    def complete(self, mask, line):
        """(blocks, warpgroups): those that execute; all of them with all their 128 threads."""
        part = self.part
        padded = self.by_group(part.exist if mask is None else mask)
        whole = padded.all(axis=2)
        bad = padded.any(axis=2) & ~whole
        if bad.any():
            block, group = np.argwhere(bad)[0]
            raise LaneFault(
                f"kernel {part.program.name}, line {line}{part.quote(line)}: wgmma is for whole warpgroups, 128 "
                f"threads from a multiple of 128 on; block {part.block_text(int(block))}, warpgroup {int(group)} has "
                f"{int(padded[block, group].sum())} here"
            )
        return whole[:, : self.groups]

    def fault(self, line, warps, what, kind=AsyncFault):
        lane = int(np.flatnonzero(np.broadcast_to(warps[:, :, None], self.part.shape))[0])
        raise kind(self.part.trap_text(line, lane, what))

    # Operands in shared memory.

    def operand(self, descriptor, rows, kind, along_k, chosen, line, name, reads):
        """A, or B with its columns as rows, of each warpgroup: (chosen, rows, K) float64."""
        part, shared = self.part, self.memory.shared
        groups = self.groups
        blocks = chosen // groups
        bits = np.broadcast_to(unpack(descriptor, 64), part.shape)[:, : 4 * groups]
        own = bits[:, ::4, 0].reshape(-1)[chosen]
        if type(descriptor) is not int:
            spread = bits.reshape(part.shape[0], groups, 128).reshape(-1, 128)[chosen]
            if (spread != own[:, None]).any():
                at = chosen[int(np.argmax((spread != own[:, None]).any(axis=1)))]
                self.fault_at(line, at, f"the threads of a warpgroup have different descriptors of {name}")
        offsets = np.empty((chosen.size, *((rows, 2) if along_k else (rows // 8, 16))), np.int64)
        for one in np.unique(own & ~np.uint64(0x3FFF)):
            same = (own & ~np.uint64(0x3FFF)) == one
            d = Descriptor(int(one))
            if d.base and d.swizzle:
                raise Unsupported("wgmma", f"a descriptor of {name} with a base offset ({d.base})", line)
            starts = (own[same] & np.uint64(0x3FFF)).astype(np.int64) << 4
            where = pieces(rows, d.leading, d.stride, d.swizzle, along_k)
            offsets[same] = swizzled(starts[:, None, None] + where, d.swizzle)
        outside = offsets + 16 > shared.size
        if outside.any():
            at, far = int(np.argmax(outside.any(axis=(1, 2)))), int(offsets.max())
            self.fault_at(line, chosen[at], f"the descriptor of {name} leads to byte {far} of shared memory, but a "
                          f"block has {shared.size} bytes of it", MemoryFault)  # fmt: skip
        index = (offsets + (blocks * shared.steps[0])[:, None, None]) // 16
        written = shared.written.view(PIECE).take(index).view(np.uint8).reshape(*index.shape, 16)
        if not written.all():
            at, i, k, byte = (int(v) for v in np.argwhere(written == 0)[0])
            first = int(offsets[at, i, k]) + byte
            come = ", or where a bulk copy has not been seen to arrive" if part.bulk.pending(int(blocks[at])) else ""
            self.fault_at(line, chosen[at], f"wgmma reads byte {first} of shared memory"
                          f"{part.program.variable_at('shared', first)} for {name}, to which nothing has been written"
                          f"{come}", MemoryFault)  # fmt: skip
        reads.append((blocks, chosen % groups, (offsets // 16).reshape(chosen.size, -1)))
        if part.launch.races is not None:
            for row, group in enumerate(chosen.tolist()):
                lanes = self.first_lane(group) + np.arange(128)
                part.race_async("load", int(blocks[row]), np.unique(offsets[row]), 16, lanes, line)
        words = shared.view(PIECE).take(index).view(U32).reshape(*index.shape, 4)
        if along_k:
            return _numbers(kind, words.reshape(chosen.size, rows, 8))
        if kind == "tf32":
            raise Unsupported("wgmma", "tf32 operands that are not K-major", line)
        numbers = _numbers(kind, words)  # (chosen, rows / 8, k, 8 rows)
        return numbers.swapaxes(-1, -2).reshape(chosen.size, rows, 16)

    def fault_at(self, line, group, what, kind=AsyncFault):
        raise kind(self.part.trap_text(line, self.first_lane(int(group)), what))

    def first_lane(self, group):
        """The number, in this part of the grid, of the first thread of a warpgroup."""
        block, own = divmod(group, self.groups)
        return (block * self.part.shape[1] + own * 4) * 32

    # Registers.

    def together(self, registers):
        """Registers -> (register, warpgroups of all blocks, warp, row of a fragment, place in it)."""
        shape, warps = self.part.shape, 4 * self.groups
        out = np.empty((len(registers), shape[0], warps, 32), registers[0].dtype)
        for place, register in zip(out, registers):
            place[...] = register if register.shape[1] == 1 else register[:, :warps]
        return out.reshape(len(registers), -1, 4, 8, 4)

    def from_registers(self, kind, a, chosen):
        """A's four registers: rows g and g + 8, then the same of the second half of K."""
        words = self.together(a).reshape(2, 2, -1, 4, 8, 4)  # half of K, half of the rows, group, warp, row, word
        words = words[:, :, chosen].transpose(2, 3, 1, 4, 0, 5)
        return _numbers(kind, np.ascontiguousarray(words).reshape(chosen.size, 64, 8))

    def spread(self, registers, kind, chosen):
        """D's registers -> (chosen, 64, N) float64."""
        pairs = 2 if kind == "f32" else 1
        parts = self.together(registers).reshape(-1, 2, pairs, self.part.shape[0] * self.groups, 4, 8, 4)
        parts = parts[:, :, :, chosen].transpose(3, 4, 1, 5, 0, 6, 2)  # group, warp, half, row, 8 columns, place, pair
        parts = np.ascontiguousarray(parts)
        numbers = parts.view(U16).view(np.float16) if kind == "f16" else parts
        return numbers.reshape(chosen.size, 64, -1).astype(np.float64)

    def collect(self, matrix, kind, chosen):
        """(chosen, 64, N) -> D's registers, whole; 0 for the other warpgroups."""
        blocks, warps, _ = self.part.shape
        words = matrix if kind == "f32" else encode("f16", matrix).view(U32)
        pairs = 2 if kind == "f32" else 1
        parts = words.reshape(chosen.size, 4, 2, 8, -1, 4, pairs).transpose(4, 2, 6, 0, 1, 3, 5)
        out = np.zeros((*parts.shape[:3], blocks * self.groups, 4, 8, 4), words.dtype)
        out[:, :, :, chosen] = parts
        registers = np.zeros((parts.shape[0] * 2 * pairs, blocks, warps, 32), words.dtype)
        registers[:, :, : 4 * self.groups] = out.reshape(-1, blocks, 4 * self.groups, 32)
        return list(registers)
