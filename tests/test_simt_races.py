"""The race detector: patterns that are right pass, and the same without what orders them are found."""

import time

import numpy as np
import pytest

from simt.memory.clocks import CTA, GPU
from simt.memory.races import RELAXED, RaceError, Races, Strong

T = 64  # threads of a block
ALL = np.arange(T)


class Machine:
    """Runs events for Races the way a launch does. Threads are given as arrays, blocks one by one."""

    def __init__(self):
        self.races = Races()

    def shared(self, kind, offsets, threads=ALL, block=0, line=1, size=4, values=None):
        self.races.shared(kind, np.asarray(offsets), size, np.full(len(threads), block), threads, line, values)

    def memory(self, kind, offsets, threads=ALL, block=0, line=1, buffer="x", values=None, strong=None, size=4):
        blocks = np.full(len(threads), block)
        offsets = np.broadcast_to(offsets, len(threads))
        self.races.global_(kind, buffer, offsets, size, blocks, threads, line, values, strong=strong)

    def sync(self, block=0):
        self.races.barrier(np.array([block]))

    def syncwarp(self, mask=0xFFFFFFFF, warp=0, block=0):
        self.races.warp_barrier(np.array([block]), np.array([warp]), np.array([mask]))

    def fence(self, threads=ALL, block=0, scope=GPU):
        self.races.fence(np.full(len(threads), block), np.asarray(threads), scope)


ONE = np.array([0])
ACQUIRE, RELEASE = Strong(GPU, acquire=True), Strong(GPU, release=True)


@pytest.fixture
def m():
    return Machine()


# Within a block.


def test_a_neighbours_word_needs_a_barrier(m):
    m.shared("store", ALL * 4, line=5)
    with pytest.raises(RaceError) as caught:
        m.shared("load", (ALL + 1) % T * 4, line=7)
    error = caught.value
    assert (error.space, error.buffer) == ("shared", None)
    kind, line, block, thread = error.first
    assert (kind, line, block) == ("store", 5, 0) and error.offset == 4 * thread
    assert error.second == ("load", 7, 0, thread - 1)
    assert f"byte {error.offset} of shared memory" in str(error) and "line 5" in str(error) and "line 7" in str(error)


def test_with_the_barrier_it_passes_and_the_next_store_needs_one_too(m):
    m.shared("store", ALL * 4)
    m.sync()
    m.shared("load", (ALL + 1) % T * 4)
    with pytest.raises(RaceError, match="reads it"):
        m.shared("store", ALL * 4)


def test_a_barrier_of_another_block_orders_nothing_here(m):
    m.shared("store", ALL * 4)
    m.sync(block=1)
    with pytest.raises(RaceError):
        m.shared("load", ALL[::-1] * 4)


def test_blocks_have_shared_memory_of_their_own(m):
    for block in range(3):
        m.shared("store", ALL * 4, block=block)
    m.races.shared("load", np.tile(ALL * 4, 3), 4, np.repeat([0, 1, 2], T), np.tile(ALL, 3), 1)
    m.shared("store", (ALL + 100) * 64, block=1)  # rows get longer: what is in them stays
    with pytest.raises(RaceError) as caught:
        m.shared("load", [4 * 9], threads=np.array([50]), block=2)
    assert caught.value.first[2:] == (2, 9)


def test_a_warp_needs_syncwarp(m):
    lanes = np.arange(32)
    m.shared("store", lanes * 4, lanes)
    m.syncwarp()
    m.shared("load", (lanes ^ 1) * 4, lanes)
    m.syncwarp(mask=0xFFFF)  # of the lower half only
    half = np.arange(16)
    m.shared("store", half * 4, half)
    with pytest.raises(RaceError, match="both are in one warp"):
        m.shared("store", (half + 16) * 4, half + 16)


def test_syncwarp_does_not_order_other_warps(m):
    m.shared("store", ALL * 4)
    m.syncwarp(warp=0)
    m.syncwarp(warp=1)
    m.shared("load", (ALL ^ 1) * 4)
    with pytest.raises(RaceError, match="__syncthreads"):
        m.shared("load", (ALL ^ 32) * 4)


def test_order_in_a_warp_is_transitive(m):
    m.shared("store", [0], np.array([1]))
    m.syncwarp(mask=0b0110)
    m.syncwarp(mask=0b1100)
    m.shared("load", [0], np.array([3]))
    with pytest.raises(RaceError):
        m.shared("load", [0], np.array([4]))


def test_a_tree_reduction_and_the_same_without_its_barrier():
    def reduce(barrier):
        m = Machine()
        m.shared("store", ALL * 4)
        m.sync()
        d = T // 2
        while d:
            on = np.arange(d)
            m.shared("load", on * 4, on)
            m.shared("load", (on + d) * 4, on)
            m.shared("store", on * 4, on)
            if barrier or d != 8:
                m.sync()
            d //= 2

    reduce(True)
    with pytest.raises(RaceError):
        reduce(False)


def test_two_lanes_of_one_store(m):
    m.shared("store", ALL // 2 * 4, values=ALL // 2)
    with pytest.raises(RaceError) as caught:
        m.shared("store", 1024 + ALL // 2 * 4, values=np.float32(ALL), line=3)
    assert caught.value.first[:2] == caught.value.second[:2] == ("store", 3)
    with pytest.raises(RaceError):
        m.shared("store", 4096 + ALL * 0)  # what they write is not known


def test_the_same_value_by_the_same_line_passes_whoever_comes_first(m):
    m.memory("store", 0, ONE, line=9, values=np.array([1]))
    m.memory("store", 0, ONE + 40, line=9, values=np.array([1]))
    with pytest.raises(RaceError):
        m.memory("store", 0, ONE + 41, line=9, values=np.array([2]))


def test_atomics_do_not_race_with_atomics_but_with_plain_accesses(m):
    m.shared("atomic", ALL * 0)
    m.shared("atomic", ALL * 0)
    with pytest.raises(RaceError, match="updates it"):
        m.shared("load", [0], ONE)


def test_two_readers_are_remembered(m):
    m.shared("load", ALL * 0)
    with pytest.raises(RaceError):
        m.shared("store", [0], np.array([T - 1]))
    for reader in 5, 6:
        m.shared("load", [100], np.array([reader]))
    with pytest.raises(RaceError) as caught:
        m.shared("store", [100], np.array([6]))
    assert caught.value.first[3] == 5


@pytest.mark.parametrize("wide, narrow", [(16, 4), (8, 1), (4, 2), (2, 16)])
def test_accesses_of_different_widths_meet_on_bytes(m, wide, narrow):
    m.shared("store", ALL * wide, size=wide)
    m.shared("store", 2048 + ALL * narrow, size=narrow)
    reader = np.array([3])
    m.shared("load", 3 * wide + np.array([0]), reader, size=min(wide, narrow))  # its own bytes
    with pytest.raises(RaceError) as caught:
        m.shared("load", np.array([4 * wide // narrow * narrow]), reader, size=narrow)
    assert caught.value.offset == 4 * wide // narrow * narrow


# Between blocks.


def test_blocks_that_write_apart_and_blocks_that_meet(m):
    for block in range(4):
        m.memory("store", (block * T + ALL) * 4, block=block)
        m.memory("load", ALL * 4, block=block, buffer="input")
    with pytest.raises(RaceError, match="byte 4 of x.*different blocks") as caught:
        m.memory("load", [4], ONE, block=3)
    assert caught.value.space == "global" and caught.value.buffer == "x" and caught.value.first[2:] == (0, 1)


def test_a_barrier_does_not_order_blocks(m):
    m.memory("store", ALL * 4)
    m.races.barrier(np.arange(2))
    with pytest.raises(RaceError):
        m.memory("load", ALL * 4, block=1)


def last_block_done(fence=True, barrier=True, fence_by=ONE, acquire=True, barrier_after=True, all_fence=False):
    """Every block stores T partial sums and takes a ticket; the last one reads them all."""
    m, blocks = Machine(), 5
    for block in range(blocks):
        m.memory("store", (block * T + ALL) * 4, block=block, line=2)
        if all_fence:
            m.fence(ALL, block)
        if barrier:
            m.sync(block)
        if fence:
            m.fence(fence_by, block)
        m.memory("atomic", 0, ONE, block=block, buffer="tickets")
    if acquire:
        m.fence(ONE, blocks - 1)
    if barrier_after:
        m.sync(blocks - 1)
    for i in range(blocks):
        m.memory("load", (i * T + ALL) * 4, block=blocks - 1, line=9)


def test_the_last_block_done():
    last_block_done()


@pytest.mark.parametrize(
    "without",
    [
        {"fence": False}, {"barrier": False}, {"barrier_after": False}, {"fence_by": np.array([7])}, {"acquire": False},
        {"fence": False, "all_fence": True},  # thread 0's fence came before the barrier: it speaks for itself alone
    ],
)  # fmt: skip
def test_the_last_block_done_without_what_orders_it(without):
    with pytest.raises(RaceError):
        last_block_done(**without)


def test_a_fence_covers_what_came_before_it(m):
    m.fence(ONE)
    m.memory("store", ALL * 4)
    m.sync()
    m.memory("atomic", 0, ONE, buffer="count")
    m.memory("atomic", 0, ONE, block=1, buffer="count")
    m.fence(ONE, 1)
    with pytest.raises(RaceError, match="thread 0 of block 0 writes it"):
        m.memory("load", ALL * 4, block=1, threads=ALL)


def test_a_fence_before_the_barrier_covers_the_stores_of_its_own_thread(m):
    m.memory("store", ALL * 4)
    m.fence(ALL)
    m.sync()
    m.memory("store", 0, ONE + 20, buffer="flag", strong=RELAXED)
    m.memory("load", 0, ONE, block=1, buffer="flag", strong=ACQUIRE)
    m.memory("load", 20 * 4, ONE, block=1)
    with pytest.raises(RaceError, match="thread 15 of block 0.*No release covers it"):
        m.memory("load", 15 * 4, ONE, block=1)


def chained_scan(fence=True, barrier=True, acquire=True, strong=RELAXED, blocks=6, own=False):
    """Block b waits for flag b - 1, reads the carry, and stores its own carry and flag."""
    m = Machine()
    for block in range(blocks):
        if block:
            m.memory("load", block * 4 - 4, ONE, block=block, buffer="flags", strong=strong)
            if acquire:
                m.fence(ONE, block)
            m.memory("load", block * 4 - 4, ONE, block=block, buffer="carry")
            m.sync(block)
            m.memory("load", (block * T - T + ALL) * 4, block=block)  # and what the threads of that block wrote
        m.memory("store", (block * T + ALL) * 4, block=block)
        if barrier:
            m.sync(block)
        m.memory("store", block * 4, ONE, block=block, buffer="carry")
        if fence:
            m.fence(ONE, block)
        m.memory("store", block * 4, ONE, block=block, buffer="flags", strong=strong)
    if own:  # what is passed on from block to block is known at the end of the chain
        m.memory("load", ALL * 4, block=blocks - 1)


def test_a_chained_scan():
    chained_scan(own=True)


@pytest.mark.parametrize("without", [{"fence": False}, {"barrier": False}, {"acquire": False}, {"strong": None}])
def test_a_chained_scan_without_what_orders_it(without):
    with pytest.raises(RaceError):
        chained_scan(**without)


def look_back(fence=True, read=ACQUIRE, blocks=40):
    """Decoupled look-back: lanes of a warp poll the states of the blocks before, and read their sums themselves."""
    m = Machine()
    for block in range(blocks):
        m.memory("atomic", 0, ONE, block=block, buffer="tickets")
        m.sync(block)
        for state in 1, 2:
            m.memory("store", block * 8 + (state - 1) * 4, ONE, block=block, buffer="sums")
            if fence:
                m.fence(ONE, block)
            m.memory("store", block * 4, ONE, block=block, buffer="states", strong=RELAXED)
            if state == 1 and block:
                lanes = np.arange(min(block, 32))
                m.memory("load", (block - 1 - lanes) * 4, lanes, block=block, buffer="states", strong=read)
                m.memory("load", (block - 1 - lanes) * 8, lanes, block=block, buffer="sums")
                m.memory("load", (block - 1 - lanes) * 8 + 4, lanes, block=block, buffer="sums")


def test_decoupled_look_back():
    look_back()
    with pytest.raises(RaceError, match="of sums"):
        look_back(fence=False)
    with pytest.raises(RaceError, match="It has read the flag in line 1, but there is no acquire"):
        look_back(read=RELAXED)


def grid_barrier(fence=True, barrier=True, wait=ACQUIRE):
    m, blocks = Machine(), 4
    for step in range(3):
        for block in range(blocks):
            m.memory("store", (block * T + ALL) * 4, block=block)
            if barrier:
                m.sync(block)
            if fence:
                m.fence(ONE, block)
            m.memory("atomic", step * 4, ONE, block=block, buffer="count")
        for block in range(blocks):
            if wait:
                m.memory("load", step * 4, ONE, block=block, buffer="count", strong=wait)
            m.sync(block)
            m.memory("load", ((block + 1) % blocks * T + ALL) * 4, block=block)
        for block in range(blocks):  # so that nobody stores before all have read
            m.sync(block)
            m.fence(ONE, block)
            m.memory("atomic", 100 + step * 4, ONE, block=block, buffer="count")
        for block in range(blocks):
            m.memory("load", 100 + step * 4, ONE, block=block, buffer="count", strong=ACQUIRE)
            m.sync(block)


def test_a_grid_barrier():
    grid_barrier()


@pytest.mark.parametrize("without", [{"fence": False}, {"barrier": False}, {"wait": None}, {"wait": RELAXED}])
def test_a_grid_barrier_without_what_orders_it(without):
    with pytest.raises(RaceError):
        grid_barrier(**without)


def test_a_flag_for_each_thread(m):
    m.memory("store", ALL * 4)
    m.fence(ALL)
    m.memory("store", ALL * 4, buffer="flags", strong=RELAXED)
    m.memory("load", ALL * 4, block=1, buffer="flags", strong=ACQUIRE)
    m.memory("load", ALL * 4, block=1)
    with pytest.raises(RaceError):
        m.memory("load", ALL[::-1] * 4, block=1)  # thread 0 has not looked at the flag of thread 63


def test_what_a_lane_acquired_its_warp_knows_after_syncwarp(m):
    m.memory("store", [0], ONE)
    m.fence(ONE)
    m.memory("store", 0, ONE, buffer="flag", strong=RELAXED)
    m.memory("load", 0, ONE, block=1, buffer="flag", strong=ACQUIRE)
    m.syncwarp(block=1)
    m.memory("load", 0, np.arange(32), block=1)
    with pytest.raises(RaceError):
        m.memory("load", 0, np.array([40]), block=1)


def test_a_lane_publishes_what_its_warp_did_before_a_syncwarp(m):
    lanes, reader = np.arange(32), np.array([40])
    m.memory("store", lanes * 4, lanes, line=1)
    m.syncwarp()
    m.memory("store", [4096], np.array([7]), line=2)  # after the __syncwarp
    m.fence(ONE)
    m.memory("store", [2048], ONE, line=3, strong=RELAXED)
    m.memory("load", [2048], reader, line=4, strong=ACQUIRE)
    for lane in (0, 5, 31):
        m.memory("load", [4 * lane], reader, line=5)
    with pytest.raises(RaceError):
        m.memory("load", [4096], reader, line=6)


def test_without_the_fence_a_lane_publishes_nothing_of_its_warp(m):
    lanes, reader = np.arange(32), np.array([40])
    m.memory("store", lanes * 4, lanes, line=1)
    m.syncwarp()
    m.memory("store", [2048], ONE, line=3, strong=RELAXED)
    m.memory("load", [2048], reader, line=4, strong=ACQUIRE)
    with pytest.raises(RaceError):
        m.memory("load", [20], reader, line=5)


def test_a_release_store_needs_no_fence(m):
    m.memory("store", ALL * 4)
    m.sync()
    m.memory("store", 0, ONE, buffer="flag", strong=RELEASE)
    m.memory("load", 0, ONE, block=1, buffer="flag", strong=ACQUIRE)
    m.sync(1)
    m.memory("load", ALL * 4, block=1)


def test_a_flag_that_was_overwritten_publishes_no_more(m):
    m.memory("store", [0], ONE)
    m.fence(ONE)
    m.memory("store", 0, ONE, buffer="flag", strong=RELAXED)
    m.memory("store", 0, ONE, block=2, buffer="flag", strong=RELAXED)
    m.memory("load", 0, ONE, block=1, buffer="flag", strong=ACQUIRE)
    with pytest.raises(RaceError):
        m.memory("load", 0, ONE, block=1)


@pytest.mark.parametrize("acquire", [True, False])
@pytest.mark.parametrize("release", [True, False])
def test_locks_in_shared_memory_and_their_lack(m, acquire, release):
    for thread in 0, 33, 5:
        on = np.array([thread])
        m.shared("atomic", [0], on)  # atomicCAS
        if acquire:
            m.fence(on, scope=CTA)
        if thread and not (acquire and release):
            with pytest.raises(RaceError):
                m.shared("load", [64], on)
            break
        m.shared("load", [64], on)
        m.shared("store", [64], on)
        if release:
            m.fence(on, scope=CTA)
        m.shared("atomic", [0], on)  # atomicExch


def test_arguments():
    m = Machine()
    with pytest.raises(ValueError, match="kind: expected 'load', 'store' or 'atomic'; got 'ld'"):
        m.shared("ld", ALL * 4)
    m.shared("load", np.zeros(0, int), np.zeros(0, int))
    m.memory("load", np.zeros(0, int), np.zeros(0, int))


def test_it_keeps_up():
    """100 000 accesses a second of its own at least: here 64 blocks of 256 threads transpose through shared memory."""
    races, lanes = Races(), 64 * 256
    blocks, threads = np.divmod(np.arange(lanes), 256)
    start = time.process_time()
    for _ in range(5):
        races.shared("store", threads * 4, 4, blocks, threads, 1, threads)
        races.barrier(np.arange(64))
        races.shared("load", (255 - threads) * 4, 4, blocks, threads, 2)
        races.global_("store", "y", np.arange(lanes) * 4, 4, blocks, threads, 3, threads)
        races.barrier(np.arange(64))
    assert 15 * lanes / (time.process_time() - start) > 100_000
