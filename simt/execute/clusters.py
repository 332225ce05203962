"""Clusters: blocks that run at the same time and reach each other's mbarriers (PTX ISA, "Cluster of Cooperative Thread
Arrays"). All blocks of a cluster are in one Part.

A place in the shared memory of another block is what mapa gives: its address there, and above that the block's rank
plus one. Arrivals at mbarriers, multicast copies and stores (st.shared::cluster) go there; loads and atomics do not (no
such address lies in the block's own memory, so they are errors).

A block must not end while another may still arrive there, or copy to it. With check_races=True that is an error in
whatever order they run: of each thread that has been at another block's memory, a thread there must know by then.
"""

import numpy as np

from simt.arithmetic.lazy import pack, unpack
from simt.errors import AsyncFault, LaneFault, MemoryFault, Unsupported
from simt.memory.clocks import WIDTH, together

RANK = 24  # the bit of an address of 32 from which on the rank stands
FAR = np.iinfo(np.int64).max


class Clusters:
    """The part of a Part (scheduler.py) for clusters. mates[block, rank]: its blocks, as numbers in this part."""

    def begin_clusters(self, size):
        self.cluster_size = size
        self.mates = np.arange(len(self.numbers)).reshape(-1, 1)
        if size > 1:
            place = {number: at for at, number in enumerate(self.numbers.tolist())}
            first = self.numbers // size * size
            self.mates = np.array([[place[n + rank] for rank in range(size)] for n in first.tolist()])
        # how often each thread has come to barrier.cluster.arrive, and gone past .wait; what its cluster knows by it
        self.cluster_arrivals = self.cluster_waits = None
        self.cluster_clocks = {}
        self.visitors = {}  # block -> {thread of another that was there: (when last, line)}, if races are looked for

    def ranks(self):
        return (self.numbers % self.cluster_size).astype(np.uint32).reshape(-1, 1, 1)

    # Addresses.

    def mapa(self, address, rank, width, mask, line):
        """mapa: a place in the shared memory of the cluster's block of this rank."""
        ranks = np.broadcast_to(unpack(rank, 32), self.shape)
        if (ranks[self.whole(self.exist if mask is None else mask)] >= self.cluster_size).any():
            lane = int(self.lanes_of(mask)[0])
            many = "1 block" if self.cluster_size == 1 else f"{self.cluster_size} blocks"
            raise LaneFault(
                self.trap_text(line, lane, f"mapa names a block that the cluster, of {many}, does not have")
            )
        if self.cluster_size == 1:
            return address
        if width != 32:
            raise Unsupported("mapa", "generic addresses in clusters of more than one block", line)
        return pack(unpack(address, 32) + (unpack(rank, 32) + np.uint32(1) << np.uint32(RANK)))

    def targets(self, addresses, lanes, line, what):
        """Of addresses that mapa may have made: (those in the block's own memory, the blocks they lie in)."""
        own = lanes // (self.shape[1] * 32)
        ranks = addresses >> RANK
        if self.cluster_size == 1 or not ranks.any():
            return addresses, own
        blocks = np.where(ranks > 0, self.mates[own, np.minimum(ranks, self.cluster_size) - 1], own)
        self.visit(blocks, lanes, line, what)
        return addresses & (1 << RANK) - 1, blocks

    def named_blocks(self, bits, lane, line):
        """The blocks that a multicast copy of this thread goes to."""
        own = lane // (self.shape[1] * 32)
        ranks = [rank for rank in range(16) if bits >> rank & 1]
        if not ranks or ranks[-1] >= self.cluster_size:
            what = f"a multicast copy to the ranks {ranks} of a cluster of {self.cluster_size}"
            raise AsyncFault(self.trap_text(line, lane, what))
        found = self.mates[own, ranks]
        self.visit(found, np.full(len(ranks), lane), line, "a multicast copy")
        return found.tolist()

    def visit(self, blocks, lanes, line, what):
        """These threads do something to other blocks' memory; none of those may be gone."""
        gone = ~self.whole(self.alive).any(axis=(1, 2))[blocks]
        if gone.any():
            where = self.block_text(int(blocks[np.argmax(gone)]))
            text = f"{what} in block {where} of the cluster, which has ended: a barrier of the cluster is missing"
            raise AsyncFault(self.trap_text(line, int(lanes[np.argmax(gone)]), text))
        if self.launch.races is not None:
            own, threads = self.who(lanes)
            now = self.launch.races.event()
            for block, one, thread in zip(blocks.tolist(), own.tolist(), threads.tolist()):
                if one != self.race_numbers[block]:
                    self.visitors.setdefault(block, {})[one * WIDTH + thread] = now, line

    def check_visitors(self):
        """Threads have left: a block that is gone must have known of all who were there."""
        if not self.visitors:
            return
        alive = self.whole(self.alive).any(axis=(1, 2))
        for block in [b for b in self.visitors if not alive[b]]:
            visitors = self.visitors.pop(block)
            own = int(self.race_numbers[block]) * WIDTH + np.arange(self.launch.threads)
            for visitor, (when, line) in visitors.items():
                many = len(own)
                known = self.launch.races.knowledge.ordered(np.full(many, visitor), np.full(many, when), own)
                if not known.any():
                    what = (
                        "the block ends, and does not know that another of its cluster has done this to its memory: a "
                    )
                    first = block * self.shape[1] * 32
                    raise AsyncFault(self.trap_text(line, first, f"{what}barrier of the cluster is missing"))

    def store_in_cluster(self, where, values, dtype, mask, line):
        """st.shared::cluster of `values`, arrays of `dtype`, to neighbouring elements. Its cost is not counted."""
        addresses, lanes = self.shared_lanes(where, mask, line, "a store")
        if not lanes.size:
            return
        addresses, blocks = self.targets(addresses, lanes, line, "a store")
        self.expect_begun(blocks, lanes, line)
        size, shared = dtype.itemsize * len(values), self.memory.shared
        bad = (addresses % size != 0) | (addresses < 0) | (addresses + size > shared.size)
        if bad.any():
            at = int(np.argmax(bad))
            what = f"a store of {size} bytes to byte {int(addresses[at])} of a block's {shared.size} of shared memory"
            raise MemoryFault(self.trap_text(line, int(lanes[at]), f"{what}; it takes a multiple of {size}"))
        self.memory.version += 1
        if self.launch.races is not None:
            self.memory.aside.look_at("store", int(addresses.min()), int(addresses.max()) + size)
            numbers, threads = self.who(lanes)
            there = self.race_numbers[blocks]
            self.tell(lambda races: races.shared("store", addresses, size, numbers, threads, line, there=there))
        places = blocks * shared.steps[0] + addresses
        for k, value in enumerate(values):
            picked = np.broadcast_to(value, self.shape).reshape(-1)[lanes]
            shared.view(dtype)[places // dtype.itemsize + k] = picked
        shared.written.bytes[places[:, None] + np.arange(size)] = 1

    def expect_begun(self, blocks, lanes, line):
        """Who stores to another block must know that it has begun: from a barrier of the cluster."""
        far = blocks != lanes // (self.shape[1] * 32)
        if far.any() and (self.cluster_waits is None or (self.cluster_waits.reshape(-1)[lanes[far]] == 0).any()):
            what = "a store to another block of the cluster, which may not have begun"
            what += ": a barrier of the cluster is missing"
            raise AsyncFault(self.trap_text(line, int(lanes[np.argmax(far)]), what))

    # barrier.cluster

    def cluster_arrive(self, mask, line, releases):
        """releases: what these threads have done is known to those who wait; .relaxed does not."""
        here = self.those(mask)
        if self.cluster_arrivals is None:
            self.cluster_arrivals, self.cluster_waits = np.zeros((2, *self.shape), np.int64)
        twice = here & (self.cluster_arrivals > self.cluster_waits)
        if twice.any():
            lane = int(np.flatnonzero(twice)[0])
            raise AsyncFault(self.trap_text(line, lane, "barrier.cluster.arrive again, without a wait in between"))
        self.cluster_arrivals[here] += 1
        self.memory.version += 1
        if releases and self.launch.races is not None:
            for block in np.flatnonzero(here.any(axis=(1, 2))).tolist():
                number, threads = self.who(np.flatnonzero(here[block]) + block * self.shape[1] * 32)
                name = int(self.mates[block, 0])
                clock = self.launch.races.released(number[0], threads)
                self.cluster_clocks[name] = together(self.cluster_clocks.get(name), clock)
        self.release("cluster")

    def cluster_wait(self, mask, line):
        """These threads go on: all of their clusters have come."""
        here = self.those(mask)
        if self.cluster_arrivals is None or (here & (self.cluster_arrivals == self.cluster_waits)).any():
            lane = int(self.lanes_of(mask)[0])
            raise AsyncFault(self.trap_text(line, lane, "barrier.cluster.wait without an arrive before it"))
        self.cluster_waits[here] += 1
        if self.launch.races is not None:
            for block in np.flatnonzero(here.any(axis=(1, 2))).tolist():
                number, threads = self.who(np.flatnonzero(here[block]) + block * self.shape[1] * 32)
                clock = self.cluster_clocks.get(int(self.mates[block, 0]))
                if clock is not None:  # None: all have arrived with .relaxed
                    self.launch.races.acquired_by(number[0], threads, clock)

    def release_clusters(self, entries):
        """Let those go on whose clusters have come as a whole. Returns the entries that still wait."""
        if self.cluster_arrivals is None:
            for entry in entries:
                self.cluster_wait(entry[2], entry[-1])  # which says what is wrong
        fewest = np.where(self.whole(self.alive), self.cluster_arrivals, FAR).min(axis=(1, 2))
        come = fewest[self.mates].min(axis=1).reshape(-1, 1, 1)
        rest = []
        for kind, after, mask, *more, line in entries:
            ready = mask & (come > self.cluster_waits)
            if ready.any():
                self.cluster_wait(ready, line)
                self.go(after, self.narrowed(ready), None)
            if (mask & ~ready).any():
                rest.append((kind, after, mask & ~ready, *more, line))
        return rest
