"""What a running kernel says: printf, failed assertions, and the sentences of errors, with line, block and thread."""

import numpy as np

from simt.arithmetic.lazy import unpack
from simt.errors import ScopeFault, Trap, UnsetRegister
from simt.execute.clusters import RANK
from simt.execute.declarations import variables
from simt.execute.printf import formatted
from simt.memory.clocks import SYS
from simt.memory.races import RaceError, lacking, strength
from simt.memory.spaces import LOCAL_WINDOW, REGION
from simt.ptx.types import broadcast
from simt.ptx.unset import names_nan


class Words:
    """The part of a Part (scheduler.py) that speaks."""

    # printf, assert, trap.

    def printf(self, text, values, mask, line):
        """Each thread's line, in the order of the threads."""
        for lane in np.flatnonzero(self.whole(self.exist if mask is None else mask)):
            form = self.string(self.lane_value(text, 64, lane))
            self.launch.printed.append(
                formatted(form, lambda at, kind, lane=lane: self.local_value(values, lane, at, kind), self.string)
            )

    def lane_value(self, x, width, lane):
        return int(broadcast(unpack(x, width), self.shape).reshape(-1)[lane])

    def string(self, address):
        """A string of the module, up to its zero byte."""
        space = self.launch.buffers[address >> REGION]
        data = space.bytes[address - space.origin :].tobytes()
        return data[: data.index(b"\0")].decode("utf-8", "replace")

    def local_value(self, pointer, lane, at, dtype):
        start = self.lane_value(pointer, 64, lane) - LOCAL_WINDOW + at
        own = int(lane) * self.memory.local.steps[2] + start
        return self.memory.local.bytes[own : own + np.dtype(dtype).itemsize].view(dtype)[0]

    def assert_failed(self, text, mask, line):
        lane = int(np.flatnonzero(self.whole(self.exist if mask is None else mask))[0])
        said = self.string(self.lane_value(text, 64, lane))
        raise Trap(self.trap_text(line, lane, f"assertion failed: {said}"))

    def trap(self, mask, line):
        lane = int(np.flatnonzero(self.whole(self.exist if mask is None else mask))[0])
        raise Trap(self.trap_text(line, lane, "the kernel stopped itself (__trap)"))

    def trap_text(self, line, lane, what):
        per = self.shape[1] * 32
        return (
            f"kernel {self.program.name}, line {line}{self.quote(line)}: {what}; block "
            f"{self.block_text(lane // per)}, thread {self.thread_text(lane % per)}"
        )

    # Registers that nothing has set.

    def check_set(self, number, mask, guard, *marks):
        """Instruction `number` needs values that are set, in the lanes of `mask` and `guard`."""
        for mark in (part for whole in marks for part in (whole if type(whole) is tuple else (whole,))):
            if type(mark) is int and not mark:
                continue
            unset = self.whole(self.exist if mask is None else mask) & (mark != 0)
            unset = unset if guard is None else unset & guard
            if np.count_nonzero(unset):
                lane = int(np.flatnonzero(unset)[0])
                raise UnsetRegister(self.unset_text(number, int(self.whole(mark).reshape(-1)[lane]), lane))

    def unset_text(self, number, mark, lane):
        """The sentence of an UnsetRegister: where the value was read first, and what it matters for."""
        code = self.program.flow.function.instructions
        first, last = code[mark - 1] if mark > 0 else code[number], code[number]
        first = first if first.line else last  # code of a header that the compiler has moved
        names = variables("\n".join(self.program.source), first.line)
        what = f"{' or '.join(f'`{n}`' for n in names) or 'a variable'} is read before it is set"
        if names_nan(first):
            what += " (the compiler has put a NaN in its place)"
        if last.line != first.line:
            does = {"st": "goes into the store", "bra": "decides the branch", "ld": "is the address"}
            does = does.get(last.parts[0], "is needed")
            what += f"; what was computed with it {does} at line {last.line}{self.quote(last.line)}"
        return self.trap_text(first.line, lane, what)

    # Words for errors.

    def line_now(self):
        block = self.program.blocks[self.here] if self.here < len(self.program.blocks) else None
        line = next((i.line for i in block.instructions if i.line), 0) if block else 0
        return f"{line}{self.quote(line)}"

    def quote(self, line):
        return self.program.quote(line)

    def block_text(self, block):
        """Block number within this part -> (x, y, z)."""
        return self.grid_text(self.numbers[block])

    def grid_text(self, n):
        """Block number within the grid -> (x, y, z)."""
        return along(n, self.launch.grid)

    def first_text(self, mask):
        """The first thread of a mask, in words."""
        block, thread = divmod(int(np.flatnonzero(self.whole(mask))[0]), self.shape[1] * 32)
        return f"block {self.block_text(block)}, thread {self.thread_text(thread)}"

    def thread_text(self, thread):
        return along(thread, self.launch.block)

    def access(self, memory, kind, space, address, size, lane, site):
        """The sentence of a MemoryFault."""
        program = self.program
        number = site[0] if type(site) is tuple else site
        counter = program.counters[number]
        line, instruction = counter.line, program.flow.function.instructions[number]
        verb = {"ld": "reads", "st": "writes"}.get(instruction.parts[0], "accesses")
        if instruction.parts[0] == "cp":
            verb = "copies"
        per = self.shape[1] * 32
        head = f"kernel {program.name}, line {line}{self.quote(line)}"
        thread = f"block {self.block_text(lane // per)}, thread {self.thread_text(lane % per)}"
        what, owner = self.place_text(space, address, size)
        problem = {
            "outside": f"{verb} {what}, {owner}",
            "misaligned": f"{verb} {what}: {size} bytes at once must start at a multiple of {size} bytes",
            "unwritten": f"{verb} {what}, to which nothing has been written",
            "pending": f"{verb} {what}, where an asynchronous copy may not have arrived: nothing has waited for it",
            "read-only": f"{verb} {what}, which is read-only",
        }[kind]
        return f"{head}: {problem}; {thread}"

    def looks_ahead(self, site):
        """Whether this instruction may read what nothing has written: its code does not use it (simt/ptx/reader.py)."""
        return self.program.flow.function.instructions[site[0] if type(site) is tuple else site].looks_ahead

    def place_text(self, space, address, size):
        """(what is touched, why it may not be) in words."""
        if space != "global":
            total = (self.memory.shared if space == "shared" else self.memory.local).size
            if space == "shared" and address >> RANK and self.cluster_size > 1:
                what = f"{size} bytes in the shared memory of another block of its cluster"
                return what, "where this machine knows stores and arrivals, but no loads and no atomics"
            what = f"{size} bytes at byte {address} of {space} memory{self.program.variable_at(space, address)}"
            return what, f"but a {'block' if space == 'shared' else 'thread'} has {total} bytes of it"
        region = (address + (1 << REGION - 1)) >> REGION
        buffer = self.launch.buffers.get(region)
        if buffer is None:
            null = " (a null pointer?)" if address < 1 << REGION else ""
            return f"{size} bytes at address {address:#x}", f"which no argument owns{null}"
        at, item = address - buffer.origin, 1 if buffer.dtype is None else buffer.dtype.itemsize
        many = "" if buffer.size == item else "s"
        kind = f"byte{many}" if buffer.dtype is None else f"element{many} of {buffer.dtype}"
        what = f"{buffer.name}[{at // item}]" if at % item == 0 else f"byte {at} of {buffer.name}"
        if size != item:
            what = f"{size} bytes from {what} on"
        return what, f"but {buffer.name} has {buffer.size // item} {kind}"

    def race_facts(self, site):
        """(line, Strong) of a memory instruction."""
        number = site[0] if type(site) is tuple else site
        found = self.program.race_facts.get(number)
        if found is None:
            parts = self.program.flow.function.instructions[number].parts
            found = self.program.race_facts[number] = self.program.counters[number].line, strength(parts)
        return found

    def check_scope(self, site, memory):
        """An access to another device's memory: one that is to order something must reach that device."""
        if site is None:
            return
        line, strong = self.race_facts(site)
        if 0 < strong.scope < SYS:
            number = site[0] if type(site) is tuple else site
            name = ".".join(self.program.flow.function.instructions[number].parts)
            raise ScopeFault(
                f"kernel {self.program.name}, line {line}{self.quote(line)}: {name} orders threads of one device, and "
                f"{memory.name} is memory of device {memory.owner}; this thread is on device {self.launch.device}: "
                "between devices it takes the scope .sys (atomicAdd_system, __threadfence_system)"
            )

    def race(self, kind, space, flat, size, lanes, site, item, values, event):
        """Hand an access to one memory to the race detector. item: bytes of one element; event: given if it is late."""
        line, strong = self.race_facts(site)
        blocks, threads = self.who(lanes)
        if space is self.memory.shared and kind != "load" and (self.bulk.stores or self.warpgroups.flights):
            self.check_readers(flat, size, lanes // (self.shape[1] * 32), threads, line)
        more = {"strong": strong, "item": item, "event": event}
        if type(site) is tuple and site[1] in ("issue", "arrive"):
            more["pending" if site[1] == "issue" else "arriving"] = True
        self.tell(lambda races: self.hand_over(races, kind, space, flat, size, blocks, threads, line, values, more))

    def race_with_copy(self, kind, address, lane, site, reader):
        """An asynchronous copy under way, (line, block, thread), reads what a thread writes."""
        buffer = self.launch.buffers[address >> REGION]
        block, thread = self.who(lane)
        first, second = ("load", *reader), (kind, self.race_facts(site)[0], int(block), int(thread))
        need = "the first is an asynchronous copy that nothing has waited for: it reads until cp.async.wait_group"

        def found(races):
            raise RaceError("global", buffer.name, address - buffer.origin, first, second, None, need)

        self.tell(found)

    def tell(self, access):
        """Make an access known to the race detector; the error it raises gets this part's words."""
        try:
            access(self.launch.races)
        except RaceError as e:
            raise RaceError(e.space, e.buffer, e.offset, e.first, e.second, self.race_text(e), e.need) from None

    def check_readers(self, flat, size, blocks, threads, line):
        """A store to shared memory that a wgmma or a bulk store under way still reads is a race."""
        for block in np.unique(blocks).tolist():
            here = blocks == block
            pieces = np.unique((flat[here][:, None] + np.array([0, size - 1])) // 16)
            reader = self.bulk.reader(block, pieces)
            if reader:
                at, thread = int(flat[here][0]), int(threads[here][0])
                access = "store", line, int(self.race_numbers[block]), thread
                raise RaceError(
                    "shared", None, at, access, access,
                    f"kernel {self.program.name}: race on shared memory{self.program.variable_at('shared', at)}: "
                    f"thread {self.thread_text(thread)} of block {self.block_text(block)} writes it at line {line}"
                    f"{self.quote(line)}, while {reader} still reads it: nothing has waited for it",
                )  # fmt: skip

    def hand_over(self, races, kind, space, flat, size, blocks, threads, line, values, more):
        if space is self.memory.shared:
            if kind != "load" and races.read:
                races.overwritten(flat, size, blocks, threads, line)
            races.shared(kind, flat, size, blocks, threads, line, values, **more)
        else:
            races.global_(kind, space.name, flat - space.origin, size, blocks, threads, line, values, **more)

    def race_text(self, race):
        """The two accesses in words."""
        if race.space == "shared":
            where = f"byte {race.offset} of shared memory{self.program.variable_at('shared', race.offset)}"
        else:
            dtype = next(b.dtype for b in self.launch.buffers.values() if b.name == race.buffer)
            item = 1 if dtype is None else dtype.itemsize
            where = f"{race.buffer}[{race.offset // item}]"
        verbs = {"load": "reads", "store": "writes", "atomic": "updates"}
        who, launches = [], [self.launch.of_block(access[2]) for access in (race.first, race.second)]
        for launch, (kind, line, block, thread) in zip(launches, (race.first, race.second)):
            thread, block = along(thread, launch.block), along(block - launch.race_base, launch.grid)
            quoted = launch.program.quote(line)
            who.append(f"thread {thread} of block {block}{launch.on} {verbs[kind]} it at line {line}{quoted}")
        need = self.launch.lacking(race, *launches) or race.need or lacking(race.first, race.second)
        return f"kernel {self.program.name}: race on {where}: {who[0]}; {who[1]}; {need}"


def along(n, sizes):
    """A number as (x, y, z), in words."""
    x, y, _ = sizes
    return f"({n % x}, {n // x % y}, {n // (x * y)})"


def spans(numbers):
    """[0, 1, 2, 5] -> "0-2, 5"."""
    out, start = [], None
    for n, after in zip(numbers, [*numbers[1:], None]):
        start = n if start is None else start
        if after != n + 1:
            out.append(str(n) if start == n else f"{start}-{n}")
            start = None
    return ", ".join(out)
