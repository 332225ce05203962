"""Bulk copies between global and shared memory: cp.async.bulk and cp.async.bulk.tensor (TMA).

A load is issued by one thread and counts at an mbarrier. Its bytes are fetched at once; until somebody has seen the
mbarrier's phase complete, the place they go to holds nothing, and reading it is a fault: a missing wait shows. So is a
second copy to a place whose first has not been waited for, or that a wgmma or a store under way still reads.

A store is fetched from shared memory at once, too, and reaches global memory when its thread waits for its group. A
thread that leaves before is reported: the block's shared memory may be gone before the copy has read it. So is a block
that leaves with a load on its way.
"""

from dataclasses import dataclass

import numpy as np

from simt.errors import AsyncFault, MemoryFault, Unsupported
from simt.memory.spaces import REGION
from simt.report import LINK


@dataclass(slots=True)
class Copy:
    """One copy under way: `size` bytes at `start` of the shared memory of `block`, for thread number `lane`."""

    block: int
    start: int
    size: int
    lane: int
    line: int
    data: np.ndarray
    key: int  # a load: the phase it counts for; a store: the group
    finish: object = None  # a store: what puts the bytes into global memory


class Bulk:
    """The bulk copies of a Part (simt/execute/scheduler.py)."""

    def __init__(self, part):
        self.part, self.memory = part, part.memory
        self.loads, self.stores = self.memory.arriving, []  # loads: {(block, address of the mbarrier): [Copy]}
        self.commits = {}  # thread -> how often it has committed its stores

    # What generated code calls. `shared`, `barrier`: (space, address, offset); `other`: (address, offset) in global
    # memory or of a tensor map, which is what `coordinates` (a tuple, or None) are for.

    def load(self, shared, other, coordinates, size, barrier, mask, line, to=None):
        """`to`: of a multicast, the ranks of the blocks that it goes to, a bit each: to one place in all of them."""
        lanes, starts, barriers = self.lanes(shared, mask, line, barrier)
        for lane, start, counted in zip(lanes, starts, barriers):
            blocks = [lane // (self.part.shape[1] * 32)]
            if to is not None:
                blocks = self.part.named_blocks(int(self.part.lane_value(to, 32, lane)), lane, line)
            if coordinates is None:
                count = self.whole(size, lane, line)
                source, at, _ = self.global_place(other, lane, count, line, "reads")
                data = source.bytes[at : at + count].copy()
            else:
                map, at = self.map(other, coordinates, lane, line, "reads")
                data = map.read(at)
                self.check_align(start, map.align, map, lane, line)
            for block in blocks:
                self.place(block, start, data.size, lane, line)
                self.check_free(block, start, data.size, lane, line)
                self.erase([block], start, data.size)
                self.part.race_async("store", block, start + np.arange(0, data.size, 16), 16, [lane], line)
                phase = self.part.barriers.come(block, counted, data.size, lane, line)
                copy = Copy(block, start, data.size, lane, line, data, phase)
                self.loads.setdefault((block, counted), []).append(copy)
            self.part.program.tally(line, "simt__bulk_load_bytes.sum", data.size)
        self.memory.version += 1

    def store(self, shared, other, coordinates, size, mask, line):
        lanes, starts, _ = self.lanes(shared, mask, line)
        for lane, start in zip(lanes, starts):
            block = lane // (self.part.shape[1] * 32)
            if coordinates is None:
                count = self.whole(size, lane, line)
                target, at, address = self.global_place(other, lane, count, line, "writes")
                if not target.writable:
                    self.fault(line, lane, f"a bulk copy writes {target.name}, which is read-only", MemoryFault)
                finish = into(target.bytes[at : at + count])
            else:
                map, at = self.map(other, coordinates, lane, line, "writes")
                if min(at) < 0:
                    self.fault(line, lane, f"a bulk store to coordinates {shown(at)}: a store's may not be negative")
                count = map.size
                if not map.array.flags.writeable:
                    self.fault(line, lane, "a bulk copy writes to a tensor map's read-only array", MemoryFault)
                self.check_align(start, map.align, map, lane, line)
                finish = into_box(map, at)
            data = self.read(block, start, count, lane, line)
            self.part.race_async("load", block, start + np.arange(0, count, 16), 16, [lane], line)
            group = self.commits.get(lane, 0)
            self.stores.append(Copy(block, start, count, lane, line, data, group, finish))
            self.part.program.tally(line, "simt__bulk_store_bytes.sum", count)

    def commit(self, mask):
        for lane in self.part.lanes_of(mask).tolist():
            self.commits[lane] = self.commits.get(lane, 0) + 1

    def wait(self, left, mask):
        """wait_group, with or without .read: the stores of all but the `left` groups committed last are done."""
        if not self.stores:
            return
        lanes = set(self.part.lanes_of(mask).tolist())
        rest = []
        for copy in self.stores:
            if copy.lane in lanes and copy.key < self.commits.get(copy.lane, 0) - left:
                copy.finish(copy.data)
                self.memory.version += 1
                if self.part.launch.races is not None:
                    block, thread = self.part.who(copy.lane)
                    where = np.arange(copy.start // 16, (copy.start + copy.size) // 16)
                    self.part.launch.races.waited(
                        ("store", copy.lane, copy.start), where, int(block), [thread], copy.line
                    )
            else:
                rest.append(copy)
        self.stores = rest

    # Arriving.

    def land(self, address, blocks, phases):
        """Somebody has seen the phases of the mbarrier at `address` complete: the bytes of its copies are there."""
        for block in blocks.tolist():
            copies = self.loads.get((block, address))
            if not copies:
                continue
            rest = []
            for copy in copies:
                if copy.key < phases[block]:
                    at = block * self.memory.shared.steps[0] + copy.start
                    self.memory.shared.bytes[at : at + copy.size] = copy.data
                    self.memory.shared.written.bytes[at : at + copy.size] = 1
                else:
                    rest.append(copy)
            if rest:
                self.loads[block, address] = rest
            else:
                del self.loads[block, address]

    def check_left(self, mask):
        """Threads leave: none may have a store under way."""
        lanes = self.part.lanes_of(mask)
        for copy in self.stores:
            if copy.lane in lanes:
                self.fault(copy.line, copy.lane, "the thread ends and has not waited for this bulk store "
                           "(cp.async.bulk.commit_group, cp.async.bulk.wait_group)")  # fmt: skip

    def check_arrived(self):
        """Threads have left: a block that is gone may have no load on its way into its shared memory."""
        if self.loads:
            alive = self.part.whole(self.part.alive).any(axis=(1, 2))
            for (block, _), copies in self.loads.items():
                if not alive[block]:
                    what = "the block ends and nobody has waited for this bulk load"
                    self.fault(copies[0].line, copies[0].lane, what)

    def erase(self, blocks, start, size):
        """Nothing may be read there until it has been written."""
        shared = self.memory.shared
        for block in blocks:
            at = int(block) * shared.steps[0] + start
            shared.written.bytes[at : at + size] = 0
        shared.generation += 1

    def pending(self, block):
        """Is a load on its way into this block's shared memory?"""
        return any(other == block for other, _ in self.loads)

    # Checks.

    def check_free(self, block, start, size, lane, line):
        """Is nobody else at work on these bytes?"""
        end = start + size
        for (other, _), copies in self.loads.items():
            for c in copies if other == block else ():
                if c.start < end and start < c.start + c.size:
                    self.fault(line, lane, f"a bulk copy to bytes {start} to {end - 1} of shared memory, where the "
                               f"copy of line {c.line} goes too, which nobody has waited for")  # fmt: skip
        reader = self.reader(block, np.arange(start // 16, -(-end // 16)))
        if reader:
            self.fault(line, lane, f"a bulk copy to bytes {start} to {end - 1} of shared memory, which {reader} still "
                       f"reads: nothing has waited for it")  # fmt: skip

    def reader(self, block, pieces):
        """What is under way and reads one of these 16-byte pieces of the block's shared memory, in words, or None."""
        for c in self.stores:
            if c.block == block and ((pieces >= c.start // 16) & (pieces < (c.start + c.size) // 16)).any():
                return f"the bulk store of line {c.line}"
        return self.part.warpgroups.reader(block, pieces)

    def whole(self, size, lane, line):
        size = int(self.part.lane_value(size, 32, lane))
        if size <= 0 or size % 16:
            self.fault(line, lane, f"a bulk copy of {size} bytes; it must be a multiple of 16")
        return size

    def check_align(self, start, align, map, lane, line):
        if start % align:
            why = f"with a swizzle of {map.swizzle} bytes" if map.swizzle else "of a tensor map"
            self.fault(line, lane, f"a box {why} at byte {start} of shared memory; it must start at a multiple of "
                       f"{align}", MemoryFault)  # fmt: skip

    def place(self, block, start, size, lane, line):
        shared = self.memory.shared
        if start % 16:
            self.fault(line, lane, f"a bulk copy at byte {start} of shared memory; it must start at a multiple of 16",
                       MemoryFault)  # fmt: skip
        if start < 0 or start + size > shared.size:
            name = self.part.program.variable_at("shared", start)
            self.fault(line, lane, f"a bulk copy of {size} bytes at byte {start} of shared memory{name}, but a block "
                       f"has {shared.size} bytes of it", MemoryFault)  # fmt: skip
        return block * shared.steps[0] + start

    def read(self, block, start, size, lane, line):
        at = self.place(block, start, size, lane, line)
        if not self.memory.shared.written.bytes[at : at + size].all():
            first = start + int(np.argmin(self.memory.shared.written.bytes[at : at + size]))
            self.fault(line, lane, f"a bulk copy reads byte {first} of shared memory"
                       f"{self.part.program.variable_at('shared', first)}, to which nothing has been written",
                       MemoryFault)  # fmt: skip
        return self.memory.shared.bytes[at : at + size].copy()

    def global_place(self, other, lane, size, line, verb):
        """(Space, byte in it, address)"""
        address = self.part.lane_value(other[0], 64, lane) + other[1]
        buffer = self.memory.buffers.get(address >> REGION)
        if address % 16:
            self.fault(line, lane, f"a bulk copy at address {address:#x} of global memory; it must be a multiple of 16",
                       MemoryFault)  # fmt: skip
        if buffer is None or address < buffer.origin or address + size > buffer.origin + buffer.size:
            what, owner = self.part.place_text("global", address, size)
            self.fault(line, lane, f"a bulk copy {verb} {what}, {owner}", MemoryFault)
        if buffer.owner is not None and buffer.owner != self.part.launch.device:
            self.part.program.tally(line, LINK.format("st" if verb == "writes" else "ld"), size)
        return buffer, address - buffer.origin, address

    def map(self, other, coordinates, lane, line, verb):
        """(TensorMap, coordinates as ints) of one thread."""
        address = self.part.lane_value(other[0], 64, lane) + other[1]
        map = self.part.launch.maps.get(address)
        if map is None:
            raise Unsupported("cp.async.bulk.tensor", "a tensor map that is no __grid_constant__ parameter", line)
        at = [self.part.lane_value(c, 32, lane) for c in coordinates]
        if len(at) != len(map.box):
            self.fault(line, lane, f"{len(at)} coordinates for the tensor map of an array with {len(map.box)} axes")
        at = [a - (1 << 32) if a >> 31 else a for a in at]
        if at[0] * map.array.itemsize % 16:
            self.fault(line, lane, f"a box at coordinates {shown(at)} of a tensor map: the first, {at[0]} elements of "
                       f"{map.array.itemsize} bytes, must be a multiple of 16 bytes")  # fmt: skip
        return map, at

    def lanes(self, shared, mask, line, barrier=None):
        """Thread numbers, where each copies to or from, and the address of its mbarrier: lists of ints."""
        starts, lanes = self.part.shared_lanes(shared, mask, line, "a bulk copy")
        barriers = [None] * lanes.size
        if barrier is not None:
            barriers = self.part.shared_lanes(barrier, mask, line, "an mbarrier")[0].tolist()
        return lanes.tolist(), starts.tolist(), barriers

    def fault(self, line, lane, what, kind=AsyncFault):
        raise kind(self.part.trap_text(line, int(lane), what))


def shown(coordinates):
    return "{" + ", ".join(map(str, coordinates)) + "}"


def into(target):
    def finish(data):
        target[:] = data

    return finish


def into_box(map, at):
    return lambda data: map.write(at, data)
