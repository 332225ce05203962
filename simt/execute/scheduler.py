"""The scheduler: which threads run next, who waits for whom, and when to give up.

The grid runs in parts of some tens of thousands of threads (`Part`), whole blocks each, so that arrays stay in cache.
Within a part, threads that stand at the same place of the program form a group, {block of code: mask}; the group that
is furthest behind always runs next. So threads that parted at an `if` meet again behind it, in every warp as early as
on the card, and counts per warp are right. When all threads of the part are in one group there is no mask (None).

Some threads wait: at barriers for their block, at __syncwarp for their warp, at a shuffle for the lanes it names. A
loop that waits for a store of another thread *yields* when it jumps back: everybody else runs first. If all that is
left yields, the next part of the grid starts; if another look at memory changes neither it nor what any thread knows,
it is a deadlock.

Blocks start in the order that the launch asks for, and only so many that `places` hold them: a block that waits keeps
its place, so one that waits for a block that has not begun may wait for ever, as on a card that has no room.
"""

import time

import numpy as np

from simt.arithmetic.lazy import Lazy, unpack
from simt.errors import Deadlock, LaneFault, SimtError, StepLimit, Unsupported
from simt.execute.clusters import Clusters
from simt.execute.divergence import Company
from simt.execute.threads import Threads
from simt.execute.waiting import not_begun, what_blocks_wait_for
from simt.execute.words import Words, spans
from simt.hopper.mbarrier import Barriers
from simt.hopper.tma import Bulk
from simt.hopper.wgmma import Warpgroups
from simt.memory.accesses import Memory
from simt.memory.ahead import Guard, Notes
from simt.ptx.types import broadcast
from simt.ptx.unset import MARK

PART = 32768  # threads that run together
EXIT = -1
STEP_LIMIT, PATIENCE = 100_000, 10  # steps of a part, and seconds of processor time: beyond both a loop is endless
FEW_STEPS, LONG = 10_000, 15  # ... and beyond both of these, where each step takes long
WORK_PER_STEP = 40_000  # instructions of single threads that an average step may have, for the limit of steps
ROOM = 1 << 28  # bytes of shared and local memory that a part may have, if it is more than one block


class Launch:
    """One launch: what all its parts share.

    Where several devices have launches (simt/devices.py): device: which it is on; on: the same in words; race_base: its
    first block's number among those of all launches; until: after how many steps others have their turn.
    """

    device, on, race_base, until = None, "", 0, None

    def __init__(
        self, program, grid, block, parameters, buffers, shared_size, races, step_limit, maps=None, places=None,
        order="forward", by_warp=None, ahead=None, cluster=1, counted=True,
    ):  # fmt: skip
        self.program, self.grid, self.block = program, grid, block
        self.parameters, self.buffers, self.shared_size = parameters, buffers, shared_size
        self.races = races
        self.step_limit, self.patience = (STEP_LIMIT, PATIENCE) if step_limit is None else (step_limit, 0)
        self.maps = maps or {}  # address of a parameter -> TensorMap
        self.by_warp = by_warp  # {metric: requests (blocks, warps)}, where they are wanted
        self.counted = counted
        self.steps = 0
        self.quiet = False  # no block can start, and nobody has stored anything since all looked last
        self.printed = []
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // 32)
        self.blocks = grid[0] * grid[1] * grid[2]
        self.places, self.order, self.started = places, order, 0
        self.cluster = cluster  # blocks in one, which start together
        self.ahead = ahead  # what the launch ahead may still be at (simt/memory/ahead.py)
        self.waited = False  # has a thread waited for it?
        self.written = {} if program.lets_next_start else None  # see Notes
        self.sequence = None  # block numbers in the order in which they start, where that is shuffled
        if type(order) is int:
            clusters = np.random.default_rng(order).permutation(self.blocks // cluster)
            self.sequence = (clusters[:, None] * cluster + np.arange(cluster)).reshape(-1)
        elif type(order) is np.ndarray:  # some of them
            self.sequence, self.blocks = order, len(order)
        memory = program.shared_size + shared_size + program.local_size * self.warps * 32
        self.together = self.whole_clusters(min(PART // (self.warps * 32), ROOM // max(memory, 1))) or cluster
        self.waiting = []  # parts that have begun and not ended

    def run(self):
        with np.errstate(all="ignore"):
            while not self.ended():
                quiet = self.turn()
                if self.stuck() and quiet:
                    self.report_deadlock()
                self.quiet = quiet

    def ended(self):
        return self.started == self.blocks and not self.waiting

    def turn(self):
        """What has room starts, and all parts run until they wait. Has nobody stored anything, and can nobody start?"""
        waiting, room = self.waiting, self.blocks - self.started
        if self.places is not None and room:
            room = self.whole_clusters(min(room, self.places - sum(p.running() for p in waiting)))
        if room:
            waiting.append(Part(self, self.next_blocks(min(self.together, room))))
        before = {p: p.memory.version for p in waiting}
        self.waiting = [p for p in waiting if not self.go_on(p)]
        return all(p.memory.version == version for p, version in before.items()) and not self.has_room(self.waiting)

    def stuck(self):
        return bool(self.waiting) and all(p.stuck for p in self.waiting)

    def of_block(self, number):
        """The launch that a block belongs to."""
        return self

    def lacking(self, race, first, second):
        """What a race of two launches takes; "" where that says nothing more."""
        return ""

    def go_on(self, part):
        """Let a part run; whatever goes wrong is an error with its line."""
        part.began = time.thread_time() - part.seconds
        try:
            done = part.run()
            if done:
                part.memory.free()
            return done
        except (SimtError, MemoryError):
            raise
        except Exception as e:
            raise Unsupported(
                "what is done here", f"not understood ({type(e).__name__}: {e})", 0,
                f"kernel {self.program.name}, line {part.line_now()}",
            ) from e  # fmt: skip
        finally:
            part.seconds = time.thread_time() - part.began

    def whole_clusters(self, blocks):
        return max(blocks, 0) // self.cluster * self.cluster

    def next_blocks(self, count):
        """The numbers of the `count` blocks that start next."""
        start, end = self.started, self.started + count
        self.started = end
        if self.sequence is not None:
            return self.sequence[start:end]
        if self.order == "reverse":
            return np.arange(self.blocks - 1 - start, self.blocks - 1 - end, -1)
        return np.arange(start, end)

    def has_room(self, waiting):
        """Can a block start?"""
        if self.started == self.blocks:
            return False
        return self.places is None or sum(p.running() for p in waiting) + self.cluster <= self.places

    def report_deadlock(self):
        waiting, part = self.waiting, self.waiting[0]
        at, mask = min(part.yielded.items())
        line = next((i.line for i in self.program.blocks[at].instructions if i.line), 0)
        lacks = part.barriers.lacks()
        nobody = "nobody" if self.started == self.blocks else "no block that has begun"
        what = "for an mbarrier" if lacks else f"for a value that {nobody} will store"
        who = what_blocks_wait_for(waiting) or part.first_text(mask)
        left = not_begun(self.next_blocks(self.blocks - self.started), self.grid, self.places)
        raise Deadlock(
            f"kernel {self.program.name}, line {line}{part.quote(line)}: every thread that is left waits in a loop "
            f"like this one {what}; " + "; ".join(filter(None, [who, lacks, left]))
        )

    def step(self, part, mask, lanes_count, length):
        self.steps += 1
        part.steps += 1
        part.work += lanes_count * length
        beyond = part.steps > self.step_limit or part.work > self.step_limit * WORK_PER_STEP
        slow = self.patience and part.steps > FEW_STEPS and part.steps % 64 == 0
        if (beyond or slow) and time.thread_time() - part.began >= (self.patience if beyond else LONG):
            raise StepLimit(
                f"kernel {self.program.name}: stopped after {part.steps} steps without an end, at line "
                f"{part.line_now()}; {part.first_text(mask)}; an endless loop? If not, a longer run needs a larger "
                f"step_limit=... at the launch, now {self.step_limit}"
            )


class Part(Threads, Words, Company, Clusters):
    """Some blocks of the grid: `numbers` are theirs in the grid, an array."""

    def __init__(self, launch, numbers):
        self.launch, self.program, self.numbers = launch, launch.program, numbers
        self.steps = self.work = self.seconds = self.began = 0  # began, seconds: processor time
        self.race_numbers = numbers + launch.race_base
        self.shape = (len(numbers), launch.warps, 32)
        self.everyone = np.broadcast_to(True, self.shape)
        self.parameters = launch.parameters
        program = self.program
        self.memory = Memory(
            launch.buffers, self.shape, program.shared_size + launch.shared_size, program.local_size,
            program.counters, self, launch.races,
        )  # fmt: skip
        self.barriers, self.bulk, self.warpgroups = Barriers(self), Bulk(self), Warpgroups(self)
        self.begin_clusters(launch.cluster)
        self.arrivals = {}  # bar.arrive: {number: arrivals by block}
        self.registers = list(program.initial_registers)
        self.specials = {}
        thread = np.arange(launch.warps * 32).reshape(1, launch.warps, 32)
        self.exist = None if launch.threads % 32 == 0 else thread < launch.threads
        self.alive = self.exist
        self.groups = {0: self.exist}
        self.yielded, self.held, self.waiting = {}, {}, []
        self.visits = {}  # block of code that tells of barriers -> how often each thread was there, when not all were
        self.seen_version, self.seen_state = -1, None
        self.stuck = self.clocked = False
        self.here = 0
        self.whole_mask = self.counted_mask = None  # masks that were looked at last: of whole warps; how many threads
        self.counted_threads = 0
        if launch.written is not None:
            Notes(self, launch.written)
        self.guard = None if launch.ahead is None else Guard(self, launch.ahead)

    # The scheduler.

    def run(self):
        """Run until all threads have left (True) or all that are left wait for a store (False)."""
        program, registers, groups = self.program, self.registers, self.groups
        full, masked = program.full, program.masked
        launch = self.launch
        counted, everyone = launch.counted, self.shape[0] * launch.threads
        while True:
            if launch.until is not None and launch.steps >= launch.until:  # another device has its turn
                self.stuck = False
                return False
            if not groups:
                if self.yielded:
                    if self.memory.version == self.seen_version:
                        self.seen_version = -1
                        state = self.state() if launch.quiet else None
                        self.stuck = state is not None and state == self.seen_state
                        self.seen_state = state
                        return False
                    self.seen_version = self.memory.version
                    groups.update(self.yielded)
                    self.yielded.clear()
                    continue
                if self.held or self.waiting:
                    self.report_waiting()
                return True
            at = self.here = min(groups)
            mask = groups.pop(at)
            if at in self.held:
                mask = self.join(mask, self.held.pop(at))
            block = program.blocks[at] if at < len(program.blocks) else None
            if block is None:
                self.leave(mask)
                continue
            if mask is None:
                function, length, last = full[at] or program.make_full(at)
                if counted:
                    program.full_visits[at] += self.shape[0] * self.shape[1]
                    program.full_threads[at] += everyone
                launch.step(self, mask, everyone, length)
                after = function(self, registers)
            else:
                function, length, last = masked[at] or program.make_masked(at)
                threads = self.count(mask)
                launch.step(self, mask, threads, length)
                alone = not groups and not self.yielded and not self.held and not self.waiting
                after = function(self, registers, mask, alone)
                if type(after) is tuple and after[0] == "lanes":
                    mask = self.hold(at, mask, after[1])
                    if mask is None:
                        continue
                    threads = self.count(mask)
                    after = function(self, registers, mask, False)
                if at in program.telling:
                    self.come_past(at, mask)
                if counted:
                    program.masked_visits[at] += self.count_warps(mask)
                    program.masked_threads[at] += threads
            if type(after) is int:
                self.go(after, mask, last)
            elif after[0] == "split":
                self.go(after[1], after[2], last)
                self.go(after[3], after[4], last)
            elif after[0] == "many":
                for target, some in after[1]:
                    self.go(target, some, last)
            else:
                entries = self.entries(after)
                self.waiting += entries
                for entry in entries:
                    for told in program.tells.get(entry[1] - 1, ()):
                        self.check_left_out(entry, told)
                self.release(after[0])

    def go(self, target, mask, origin):
        """Lanes `mask` go from block `origin` (None: from a wait) to block `target`."""
        if target == EXIT:
            self.leave(mask)
            return
        groups = self.groups
        if origin is not None and target <= origin and self.program.blocks[origin].spins:
            groups = self.yielded
        if target in groups:
            mask = self.join(mask, groups[target])
        groups[target] = mask

    def hold(self, at, mask, absent):
        """The warps that lack lanes wait for them at block `at`. The mask of the others; None if there are none."""
        incomplete = absent.any(axis=2, keepdims=True)
        self.held[at] = mask & incomplete
        rest = mask & ~incomplete
        return rest if rest.any() else None

    def state(self):
        """All that the yielding threads know: if one more look does not change it, nothing ever will."""
        if self.clocked:
            return None
        found = [len(self.waiting), len(self.held)]
        for at, mask in sorted(self.yielded.items()):
            block = self.program.blocks[at]
            found += [at, None if mask is None else mask.tobytes()]
            known = block.reads | (block.live_out - block.writes)
            for name in sorted(name for name in known if self.program.flow.kinds[name] != MARK):
                value = self.registers[self.program.translator.slots[name]]
                value = value.array() if type(value) is Lazy else value
                found.append(value.tobytes() if isinstance(value, np.ndarray) else value)
        return found

    def join(self, a, b):
        """The union of two masks; None if these are all threads there are."""
        if a is None or b is None:
            return None
        union = a | b
        if self.exist is None and union.all():
            return None
        return union

    def leave(self, mask):
        """These threads are done."""
        if self.bulk.stores:
            self.bulk.check_left(mask)
        if mask is None:
            self.alive = np.zeros((1, 1, 1), bool)
            self.bulk.check_arrived()
            self.check_visitors()
            return
        alive = True if self.alive is None else self.alive
        self.alive = alive & ~mask
        self.tell_left(mask)
        self.bulk.check_arrived()
        self.check_visitors()
        for kind in {w[0] for w in self.waiting}:
            self.release(kind)
        for at in list(self.held):  # they may have waited for these
            self.go(at, self.held.pop(at), None)

    def running(self):
        """How many blocks have not ended."""
        return self.shape[0] if self.alive is None else int(self.whole(self.alive).any(axis=(1, 2)).sum())

    def whole(self, mask):
        return self.everyone if mask is None or mask is True else broadcast(np.asarray(mask), self.shape)

    def those(self, mask):
        """The threads of a mask, spelled out; None: all there are."""
        return self.whole(self.exist if mask is None else mask)

    def count(self, mask):
        if mask is not self.counted_mask:
            self.counted_mask = mask
            self.counted_threads = int(np.count_nonzero(mask)) * (self.shape[0] * self.shape[1] * 32 // mask.size)
        return self.counted_threads

    def count_warps(self, mask):
        warps = mask.any(axis=2)
        return int(np.count_nonzero(warps)) * (self.shape[0] * self.shape[1] // warps.size)

    # Waiting.

    def entries(self, entry):
        """A wait as it is kept: at a barrier, the mask in full, and one entry for each number of a barrier."""
        if entry[0] == "warp":
            return [entry]
        kind, after, mask, number, *rest = entry
        mask = self.whole(self.exist if mask is None else mask)
        if type(number) is int:
            return [(kind, after, mask, number, *rest)]
        numbers = unpack(number, 32)
        found = np.unique(np.broadcast_to(numbers, self.shape)[mask]).tolist()
        return [(kind, after, mask & (numbers == n), n, *rest) for n in found]

    def bar_arrive(self, number, count, mask, line):
        """bar.arrive: count as arrived at a barrier, and do not wait."""
        everyone = self.whole(self.exist if mask is None else mask)
        numbers = np.broadcast_to(unpack(number, 32), self.shape)
        for n in np.unique(numbers[everyone]).tolist():
            here = everyone & (numbers == n)
            self.arrivals[n] = self.arrivals.get(n, 0) + here.sum(axis=(1, 2))
            self.part_barrier(n, here, np.zeros_like(here))
        if self.guard is not None:
            self.guard.arrive(mask)
        self.release("block")

    def release(self, kind):
        """Let go whoever has no one left to wait for."""
        entries = [w for w in self.waiting if w[0] == kind]
        rest = [w for w in self.waiting if w[0] != kind]
        alive = self.whole(self.alive)
        if kind == "cluster":
            self.waiting = rest
            self.waiting += self.release_clusters(entries) if entries else []
            return
        if kind == "warp":
            arrived = np.zeros(self.shape, bool)
            for _, _, mask, _, _ in entries:
                arrived |= mask
            for entry in entries:
                _, after, mask, members, line = entry
                absent = self.named_lanes(members, mask) & alive & ~arrived
                ready = self.whole(mask) & ~absent.any(axis=2, keepdims=True)
                if ready.any():
                    self.warp_barrier(members, ready, line)
                    self.go(after, self.narrowed(ready), None)
                    left = self.whole(mask) & ~ready
                    if left.any():
                        rest.append((kind, after, left, members, line))
                else:
                    rest.append(entry)
            self.waiting = rest
            return
        barriers = {}
        for entry in entries:
            number = entry[3]
            if type(number) is not int or type(entry[4]) not in (int, type(None)):
                raise Unsupported("bar.sync", "a barrier whose number or count differs between threads", entry[6])
            barriers.setdefault(number, []).append(entry)
        for entries in barriers.values():
            arrived = np.zeros(self.shape, bool)
            for entry in entries:
                arrived |= entry[2]
            counts = arrived.sum(axis=(1, 2)) + self.arrivals.get(entries[0][3], 0)
            needed = alive.sum(axis=(1, 2)) if entries[0][4] is None else entries[0][4]
            done = ((counts >= needed) & arrived.any(axis=(1, 2))).reshape(-1, 1, 1)
            if not done.any():
                rest.extend(entries)
                continue
            if entries[0][3] in self.arrivals:
                self.arrivals[entries[0][3]] = np.where(done[:, 0, 0], 0, self.arrivals[entries[0][3]])
            self.check_same_barrier(entries, done)
            if entries[0][4] is None:
                self.block_barrier(arrived & done, entries[0][6])
            else:
                self.part_barrier(entries[0][3], arrived & done, arrived & done)
            for _, after, mask, number, count, red, line in entries:
                ready = self.whole(mask) & done
                if ready.any():
                    if red is not None:
                        self.barrier_vote(entries, red, ready)
                    self.go(after, self.narrowed(ready), None)
                left = self.whole(mask) & ~done
                if left.any():
                    rest.append(("block", after, left, number, count, red, line))
        self.waiting = rest

    def narrowed(self, mask):
        """None if the mask holds all threads there are."""
        return None if self.exist is None and mask.all() else mask

    def first_lane(self, mask, block):
        return int(np.flatnonzero(self.whole(mask)[block])[0])

    def report_waiting(self):
        """Nobody can run, and somebody waits."""
        self.report_barriers()
        for at, mask in self.held.items():
            block = self.program.blocks[at]
            line = next((i.line for i in block.instructions if i.line), 0)
            where = np.argwhere(self.whole(mask))[0]
            if any(i.parts[0] == "wgmma" for i in block.instructions):
                raise LaneFault(
                    f"kernel {self.program.name}, line {line}{self.quote(line)}: the four warps of a warpgroup execute "
                    f"a wgmma together, and some are elsewhere; warp {int(where[1])} of block "
                    f"{self.block_text(int(where[0]))} waits here"
                )
            active = self.whole(mask)[where[0], where[1]]
            gone = [n for n in range(32) if not active[n] and self.whole(self.alive)[where[0], where[1], n]]
            raise LaneFault(
                f"kernel {self.program.name}, line {line}{self.quote(line)}: lanes work together here, and the mask "
                f"names lanes {spans(gone)}, which are elsewhere; block {self.block_text(int(where[0]))}, warp "
                f"{int(where[1])}"
            )
        entry = self.waiting[0]
        mask, line = self.whole(entry[2]), entry[-1]
        block = int(np.argwhere(mask)[0][0])
        first = self.first_lane(mask, block)
        what = {"warp": "__syncwarp()", "cluster": "a barrier of the cluster"}.get(entry[0], "a barrier of the block")
        raise Deadlock(
            f"kernel {self.program.name}, line {line}{self.quote(line)}: thread {self.thread_text(first)} of block "
            f"{self.block_text(block)} waits at {what} for threads that never come"
        )

    # What generated code calls: control.

    def branch(self, p, wanted, mask, target, after):
        """Where the lanes go that have p (or not p): one number, or a split."""
        take = p if wanted else ~p
        if mask is None:
            count = np.count_nonzero(take)  # several times faster than any() and all()
            if count == take.size:
                return target
            if not count:
                return after
            return ("split", target, take, after, ~take)
        some, rest = take & mask, ~take & mask
        if not np.count_nonzero(some):
            return after
        if not np.count_nonzero(rest):
            return target
        return ("split", target, some, after, rest)

    def switch(self, index, mask, targets):
        if type(index) is int:
            return targets[index]
        found = index.array()
        everyone = True if mask is None else mask
        return ("many", [(t, m) for n, t in enumerate(targets) if (m := (found == n) & everyone).any()])

    def within(self, p, wanted, mask):
        """The lanes of `mask` with p (or not p): False if none, None if all of an unmasked group."""
        if type(p) is bool:
            return mask if p == wanted else False
        take = p if wanted else ~p
        if mask is not None:
            take = take & mask
        elif take.all():
            return None
        return take if np.count_nonzero(take) else False
