"""Which blocks of code tell that a thread has left out a barrier.

A barrier in an `if` that part of a warp takes is a mistake; one behind an early return is none. Both stop some threads
of a warp and not the others, and in both the others may leave the kernel in the end. What tells them apart is where
they come past: code behind the `if` is for the waiting threads too, that behind an early return is not.

So: a block of code that every thread will come to once it is past the barrier (it postdominates the barrier), though it
can be reached in more than one way, and in no loop that does not also hold the barrier. A thread that has been there
more often than a thread of its warp that waits at the barrier has left that barrier out.
"""

import numpy as np

from simt.errors import BarrierFault
from simt.execute.words import spans


def aligned(i):
    """Must whole warps come to this barrier together? (PTX ISA: bar is barrier.aligned.)"""
    return i.parts[0] in ("bar", "barrier") and "warp" not in i.parts and (i.parts[0] == "bar" or "aligned" in i.parts)


def tells(blocks):
    """{barrier: {block of code that tells}}, as numbers of flow.Blocks; a barrier is the block that it ends."""
    barriers = [b.number for b in blocks if aligned(b.instructions[-1])]
    if not barriers or not any(i.parts[0] in ("bra", "brx") for b in blocks for i in b.instructions):
        return {}
    count = len(blocks)
    after = [[t for t in (*b.targets, *([b.number + 1] if b.falls else [])) if t < count] for b in blocks]
    before = [[] for _ in blocks]
    for n, targets in enumerate(after):
        for t in set(targets):
            before[t].append(n)
    ends = [n for n in range(count) if not after[n] and blocks[n].instructions[-1].parts[0] != "trap"]
    later = on_every_way(after, ends, before)
    loops = all_loops(after, before, on_every_way(before, [0], after))
    meets = [
        n for n, b in enumerate(blocks)
        if len(before[n]) > 1 and not all(i.parts[0] in ("ret", "exit") for i in b.instructions)
    ]  # fmt: skip
    found = {}
    for barrier in barriers:
        told = {
            n for n in meets
            if n != barrier and later[barrier] >> n & 1 and all(body >> barrier & 1 for body in loops if body >> n & 1)
        }  # fmt: skip
        if told:
            found[barrier] = told
    return found


def on_every_way(towards, ends, away):
    """For each block, as bits, the blocks on every way from it along `towards` to an end; its own bit included."""
    count = len(towards)
    everything = (1 << count) - 1
    found = [everything] * count
    for n in ends:
        found[n] = 1 << n
    todo = [m for n in ends for m in away[n]]
    while todo:
        n = todo.pop()
        new = everything
        for m in towards[n]:
            new &= found[m]
        new |= 1 << n
        if n not in ends and new != found[n]:
            found[n] = new
            todo += away[n]
    return found


def all_loops(after, before, dominators):
    """The bodies of the natural loops, as bits."""
    loops = []
    for tail, targets in enumerate(after):
        for head in targets:
            if dominators[tail] >> head & 1:
                body, todo = 1 << head, [tail]
                while todo:
                    n = todo.pop()
                    if not body >> n & 1:
                        body |= 1 << n
                        todo += before[n]
                loops.append(body)
    return loops


class Company:
    """The part of a Part (scheduler.py) that sees to it that threads come to barriers together."""

    def check_same_barrier(self, entries, done):
        """All threads of a block must have come to the same __syncthreads(); to one with a count, whole warps."""
        entries = [(self.whole(e[2]) & done, *e) for e in entries if self.is_aligned(e)]
        for n, (mask, _, after, _, _, count, _, line) in enumerate(entries):
            warps = mask.any(axis=2, keepdims=True)
            for other, _, elsewhere, _, _, _, _, line_there in entries[:n]:
                blocks = other.any(axis=(1, 2), keepdims=True) & mask.any(axis=(1, 2), keepdims=True)
                both = blocks if count is None else warps & other.any(axis=2, keepdims=True)
                if elsewhere != after and both.any():
                    self.two_barriers(other & both, line_there, mask & both, line)
            if count is not None:
                together = np.logical_or.reduce([other for other, *_ in entries])
                absent = warps & self.whole(self.alive) & ~together
                if absent.any():
                    self.divergent(mask, line, absent, "does not come to it")

    def two_barriers(self, first, line, second, line_there):
        block = int(np.argwhere(first)[0][0])
        raise BarrierFault(
            f"kernel {self.program.name}: divergent threads: those of block {self.block_text(block)} wait at two "
            f"different barriers, thread {self.thread_text(self.first_lane(first, block))} at line {line}"
            f"{self.quote(line)}, thread {self.thread_text(self.first_lane(second, block))} at line {line_there}"
            f"{self.quote(line_there)}; all threads of a block must come to the same __syncthreads()"
        )

    def divergent(self, waiting, line, others, where):
        """Part of a warp waits at a barrier, and `others` of the same warp, which live, are elsewhere."""
        at = np.argwhere(others)[0]
        lanes, rest = (np.flatnonzero(self.whole(mask)[at[0], at[1]]).tolist() for mask in (waiting, others))
        other = f"lane {rest[0]} (thread {self.thread_text(int(at[1]) * 32 + rest[0])})"
        raise BarrierFault(
            f"kernel {self.program.name}, line {line}{self.quote(line)}: divergent threads: of warp {int(at[1])} of "
            f"block {self.block_text(int(at[0]))}, lanes {spans(lanes)} wait at this barrier, and {other} {where}; all "
            f"threads of a warp that have not left the kernel must come to a barrier together"
        )

    def is_aligned(self, entry):
        return entry[0] == "block" and aligned(self.program.blocks[entry[1] - 1].instructions[-1])

    def come_past(self, at, mask):
        """These threads have run a block of code that tells who has left out a barrier."""
        self.visits[at] = self.visits.get(at, 0) + self.those(mask).astype(np.int32)
        for entry in self.waiting:
            if at in self.program.tells.get(entry[1] - 1, ()):
                self.check_left_out(entry, at)

    def check_left_out(self, entry, told):
        """Has a thread been at `told` more often than those of its warp that wait at a barrier?"""
        visits = self.visits.get(told)
        if visits is None or not self.is_aligned(entry):
            return
        waiting = self.whole(entry[2])
        fewest = np.where(waiting, visits, np.iinfo(np.int32).max).min(axis=2, keepdims=True)
        ahead = ~waiting & (visits > fewest)
        if ahead.any():
            behind = [i.line for i in self.program.blocks[told].instructions if i.line > entry[-1]]
            where = f", to line {behind[0]}{self.quote(behind[0])}" if behind else ""
            self.divergent(waiting, entry[-1], ahead, f"has gone past it{where}")

    def report_barriers(self):
        """Of those who wait for ever, some wait at barriers that others of their warp have not come to.

        Where those others wait for lanes in an instruction of their own branch, that is the mistake, and not reported
        here.
        """
        entries = [e for e in self.waiting if self.is_aligned(e)]
        arrived = {}
        for entry in entries:
            arrived[entry[3]] = arrived.get(entry[3], False) | self.whole(entry[2])
        for entry in entries:
            waiting = self.whole(entry[2])
            warps = waiting.any(axis=2, keepdims=True)
            for other in entries:
                if other[3] != entry[3]:  # they wait at two numbers
                    both = warps & self.whole(other[2]).any(axis=2, keepdims=True)
                    if both.any():
                        self.two_barriers(waiting & both, entry[-1], self.whole(other[2]) & both, other[-1])
            absent = warps & self.whole(self.alive) & ~arrived[entry[3]]
            for at, mask in self.held.items():
                if at not in self.program.tells.get(entry[1] - 1, ()):
                    absent = absent & ~mask
            if absent.any():
                self.divergent(waiting, entry[-1], absent, "waits elsewhere")
