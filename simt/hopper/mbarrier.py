"""mbarriers: what threads and bulk copies arrive at, and threads wait at, in shared memory (PTX ISA, "mbarrier").

A phase of an mbarrier is complete when as many threads have arrived as it was initialised for and all bytes that were
announced (expect_tx) have come; then the next phase begins. A wait names a phase, by its parity or by the token that
an arrival gave. A wait that finds its phase incomplete gives False and does not stop the thread: the loop around it
yields (flow.waits), and if all that is left yields, the deadlock names the mbarrier and what it lacks.

A bulk copy counts as arrived at once; its bytes appear when somebody has seen the phase complete (simt/hopper/tma.py).
"""

import numpy as np

from simt.arithmetic.lazy import pack
from simt.errors import AsyncFault
from simt.memory.clocks import together
from simt.ptx.types import broadcast

MOST = (1 << 20) - 1  # arrivals, and bytes to come
FIELDS = ("live", "count", "left", "bytes", "phase", "waited")


class Barrier:
    """The mbarriers at one address, of all blocks: arrays (blocks,).

    live: initialised at this line, 0 if not; count: arrivals of a phase; left: those still to come; bytes: announced
    and not yet come; phase: how many are complete; waited: line of a wait that failed, 0 if none did.
    """

    def __init__(self, blocks):
        for name in FIELDS:
            setattr(self, name, np.zeros(blocks, np.int64))
        self.clocks = {}  # block -> [Clock of the complete phases, of the current one], or None: for races.py

    def finish(self, blocks):
        """Go on to the next phase where nothing is left; True if any did."""
        done = blocks[(self.left[blocks] == 0) & (self.bytes[blocks] == 0)]
        self.phase[done] += 1
        self.left[done] = self.count[done]
        for block in done.tolist():
            if block in self.clocks:
                old, new = self.clocks[block]
                self.clocks[block] = [together(old, new), None]
        return done.size > 0


class Barriers:
    """All mbarriers of a Part (simt/execute/scheduler.py)."""

    def __init__(self, part):
        self.part, self.memory = part, part.memory
        self.known = {}  # address in shared memory -> Barrier

    # What generated code calls. `where` is (space, address, offset), `count` an operand, `mask` the threads.

    def init(self, where, count, mask, line):
        for address, lanes in self.places(where, mask, line):
            many = self.pick(count, lanes)
            blocks = self.blocks(lanes)
            barrier = self.known.setdefault(address, Barrier(self.part.shape[0]))
            if len(np.unique(blocks)) < len(blocks):
                self.fault(line, lanes[0], f"several threads of a block initialise {self.text(address)}")
            if barrier.live[blocks].any():
                at = int(np.argmax(barrier.live[blocks] > 0))
                old = int(barrier.live[blocks[at]])
                self.fault(line, lanes[at], f"{self.text(address)} is initialised anew; it has been at line {old}")
            if not ((many >= 1) & (many <= MOST)).all():
                self.fault(line, lanes[0], f"an mbarrier is for 1 to {MOST} arrivals; got {int(many[0])}")
            barrier.live[blocks], barrier.count[blocks], barrier.left[blocks] = line or 1, many, many
            barrier.bytes[blocks] = barrier.phase[blocks] = barrier.waited[blocks] = 0
            self.part.bulk.erase(blocks, address, 8)  # no plain load may read it
            self.part.race_at("store", blocks, address, 8, lanes, line)
        self.memory.version += 1

    def inval(self, where, mask, line):
        for address, lanes in self.places(where, mask, line):
            blocks = self.blocks(lanes)
            self.live(address, lanes, line).live[blocks] = 0
            self.part.race_at("store", blocks, address, 8, lanes, line, ends=True)  # nobody may still wait there
        self.memory.version += 1

    def arrive(self, where, count, expected, mask, line, drop=False):
        """Arrive, and announce `expected` bytes before it, if any. The token of the phase that it counts for."""
        tokens = np.zeros(self.part.shape, np.uint64)
        for address, lanes, blocks in self.targets(where, mask, line):
            barrier = self.live(address, lanes, line, blocks)
            tokens.reshape(-1)[lanes] = barrier.phase[blocks]
            if expected is not None:
                self.announce(barrier, address, blocks, lanes, self.pick(expected, lanes), line)
            self.part.race_at("atomic", blocks, address, 8, lanes, line)
            self.publish(barrier, blocks, lanes)
            if self.part.guard is not None:
                self.part.guard.arrive(mask)
            come = np.bincount(blocks, self.pick(count, lanes), self.part.shape[0]).astype(np.int64)
            if drop:
                barrier.count -= come
            while True:
                here = np.flatnonzero(come)
                if not here.size:
                    break
                empty = here[barrier.left[here] == 0]
                if empty.size:
                    lane = lanes[blocks == empty[0]][0]
                    self.fault(line, lane, f"more arrivals at {self.text(address)} than its phase still waits for")
                now = np.minimum(come[here], barrier.left[here])
                barrier.left[here] -= now
                come[here] -= now
                barrier.finish(here)
        self.memory.version += 1
        return pack(tokens)

    def promise(self, where, counts, mask, line):
        """cp.async.mbarrier.arrive: the phase waits for the copies that these threads have issued.

        They have come at once, and are there when somebody has seen the phase complete. `counts`: each thread's is one
        of the arrivals that the mbarrier was initialised for (.noinc).
        """
        for address, lanes in self.places(where, mask, line):
            barrier = self.live(address, lanes, line)
            chosen = np.zeros(self.part.shape, bool)
            chosen.reshape(-1)[lanes] = True
            self.memory.promise(address, barrier.phase.copy(), chosen)
            self.publish(barrier, self.blocks(lanes), lanes)
        if counts:
            self.arrive(where, 1, None, mask, line)
        self.memory.version += 1

    def expect(self, where, expected, mask, line):
        for address, lanes in self.places(where, mask, line):
            barrier, blocks = self.live(address, lanes, line), self.blocks(lanes)
            self.announce(barrier, address, blocks, lanes, self.pick(expected, lanes), line)
        self.memory.version += 1

    def wait(self, where, phase, parity, mask, line):
        """test_wait and try_wait: is the phase complete? Whoever sees it so may read what its copies brought."""
        part = self.part
        out = np.zeros(part.shape, bool)
        for address, lanes in self.places(where, mask, line):
            barrier, blocks = self.live(address, lanes, line), self.blocks(lanes)
            now, wanted = barrier.phase[blocks], self.pick(phase, lanes)
            done = (now ^ wanted) & 1 != 0 if parity else now > wanted
            out.reshape(-1)[lanes] = done
            part.race_at("atomic", blocks, address, 8, lanes, line)
            barrier.waited[blocks] = np.where(done, 0, line)
            seen = distinct(blocks[done])
            if seen.size:
                part.bulk.land(address, seen, barrier.phase)
                self.memory.land(address, seen, barrier.phase)
                self.acquire(barrier, blocks[done], lanes[done])
                if part.guard is not None:
                    part.guard.hear(lanes[done], blocks[done])
        return bool(out.flat[0]) if mask is None and (out == out.flat[0]).all() else out

    def come(self, block, address, size, lane, line):
        """A copy has brought `size` bytes. The phase that they count for."""
        barrier = self.live(address, np.array([lane]), line, np.array([block]))
        if self.part.launch.races is not None:
            if block != self.blocks(lane):  # it must have been initialised in an order that this thread knows
                self.part.race_at("atomic", np.array([block]), address, 8, np.array([lane]), line)
            self.publish(barrier, np.array([block]), np.array([lane]))
        phase = int(barrier.phase[block])
        barrier.bytes[block] -= size
        if barrier.bytes[block] < -MOST:
            self.fault(line, lane, f"more than {MOST} bytes come to {self.text(address)} that nobody has announced")
        barrier.finish(np.array([block]))
        self.memory.version += 1
        return phase

    # Inside.

    def places(self, where, mask, line):
        """[(address, lanes)] of an operand; each address is that of an mbarrier, a multiple of 8."""
        return [(address, lanes) for address, lanes, _ in self.targets(where, mask, line, far=False)]

    def targets(self, where, mask, line, far=True):
        """[(address, lanes, blocks)]: the blocks that the mbarrier lies in, the lanes' own or, if far, those of other
        ranks of their cluster."""
        part = self.part
        addresses, lanes = part.shared_lanes(where, mask, line, "an mbarrier")
        if not lanes.size:
            return []
        blocks = self.blocks(lanes)
        if far:
            addresses, blocks = part.targets(addresses, lanes, line, "an arrival")
        bad = (addresses % 8 != 0) | (addresses < 0) | (addresses + 8 > self.memory.shared.size)
        if bad.any():
            at = int(np.argmax(bad))
            self.fault(line, lanes[at], f"no mbarrier lies at byte {int(addresses[at])} of shared memory: it takes 8 "
                       f"bytes of it, at a multiple of 8")  # fmt: skip
        first = int(addresses[0])
        if (addresses == first).all():
            return [(first, lanes, blocks)]
        return [(int(a), lanes[addresses == a], blocks[addresses == a]) for a in np.unique(addresses)]

    def live(self, address, lanes, line, blocks=None):
        barrier = self.known.get(address)
        blocks = self.blocks(lanes) if blocks is None else blocks
        if barrier is None or not barrier.live[blocks].all():
            at = 0 if barrier is None else int(np.argmin(barrier.live[blocks]))
            self.fault(line, lanes[at], f"{self.text(address)} has not been initialised")
        return barrier

    def announce(self, barrier, address, blocks, lanes, expected, line):
        np.add.at(barrier.bytes, blocks, expected)
        if (barrier.bytes[blocks] > MOST).any():
            self.fault(line, lanes[0], f"{self.text(address)} would wait for more than {MOST} bytes")
        barrier.finish(blocks[barrier.left[blocks] == 0])

    def blocks(self, lanes):
        return lanes // (self.part.shape[1] * 32)

    def pick(self, x, lanes):
        """An integer operand of 32 or 64 bits, of these threads."""
        if type(x) is int:
            return np.full(lanes.size, x, np.int64)
        array = x.array()
        return broadcast(array, self.part.shape).reshape(-1)[lanes].astype(np.int64)

    def text(self, address):
        return f"the mbarrier at byte {address} of shared memory{self.part.program.variable_at('shared', address)}"

    def fault(self, line, lane, what):
        raise AsyncFault(self.part.trap_text(line, int(lane), what))

    def lacks(self):
        """What the waits that failed are waiting for, in words: for the report of a deadlock."""
        found = []
        for address, barrier in sorted(self.known.items()):
            for block in np.flatnonzero((barrier.waited > 0) & (barrier.live > 0))[:1].tolist():
                left, size = int(barrier.left[block]), int(barrier.bytes[block])
                need = [f"{left} of {int(barrier.count[block])} arrivals"] if left else []
                if size > 0:
                    need.append(f"{size} bytes")
                elif size < 0:
                    need.append(f"the announcement of {-size} bytes that have come")
                line = int(barrier.waited[block])
                found.append(
                    f"line {line}{self.part.quote(line)} waits at {self.text(address)}, whose phase "
                    f"{int(barrier.phase[block])} in block {self.part.block_text(block)} lacks {' and '.join(need)}"
                )
        return "; ".join(found[:3])

    # For simt/memory/races.py: an arrival publishes, a wait that succeeds acquires.

    def publish(self, barrier, blocks, lanes):
        races = self.part.launch.races
        if races is not None:
            own = self.blocks(lanes)  # who arrives may be another block of the cluster
            one = distinct(blocks).size == distinct(own).size == 1  # as it mostly is
            pairs = [(blocks[0], own[0])] if one else np.unique(np.stack([blocks, own], axis=1), axis=0)
            for block, of in np.asarray(pairs).tolist():
                number, threads = self.part.who(lanes[(blocks == block) & (own == of)])
                held = barrier.clocks.setdefault(block, [None, None])
                held[1] = together(held[1], races.released(number[0], threads))

    def acquire(self, barrier, blocks, lanes):
        races = self.part.launch.races
        if races is not None:
            for block in distinct(blocks).tolist():
                clock = barrier.clocks.get(block, (None, None))[0]
                if clock is not None:
                    number, threads = self.part.who(lanes[blocks == block])
                    races.acquired_by(number[0], threads, clock)


def distinct(numbers):
    """np.unique, which takes its time also where all are the same."""
    same = numbers[:1]
    return same if np.count_nonzero(numbers == same) == numbers.size else np.unique(numbers)
