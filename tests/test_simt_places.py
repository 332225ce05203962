"""Room and order on the SIMT machine: blocks that wait for blocks which have not begun."""

import re
import sys

import numpy as np
import pytest

import simt
from lab import cuda

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
I32 = np.int32

# Each block waits for its predecessor, adds its number, and passes the sum on.
CHAIN = r"""
__device__ void pass_on(int ticket, volatile int* sums, volatile int* flags) {
  if (threadIdx.x == 0) {
    int before = 0;
    if (ticket > 0) {
      while (flags[ticket - 1] == 0) { }
      __threadfence();
      before = sums[ticket - 1];
    }
    sums[ticket] = before + ticket;
    __threadfence();
    flags[ticket] = 1;
  }
}
extern "C" __global__ void by_number(int* sums, int* flags, int* counter) { pass_on(blockIdx.x, sums, flags); }
extern "C" __global__ void by_counter(int* sums, int* flags, int* counter) {
  __shared__ int ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(counter, 1);
  __syncthreads();
  pass_on(ticket, sums, flags);
}
extern "C" __global__ void all_meet(int* sums, int* flags, int* counter) {
  if (threadIdx.x == 0) {
    atomicAdd(counter, 1);
    while (*(volatile int*)counter < gridDim.x) { }
    sums[blockIdx.x] = 1;
  }
}"""


def chain(name, blocks=16, **how):
    sums, flags, counter = (np.zeros(n, I32) for n in (blocks, blocks, 1))
    simt.compile(CHAIN)[name](blocks, 64, sums, flags, counter, **how)
    return sums


@pytest.mark.parametrize(
    "how",
    [{}, {"places": 4}, {"places": 1}, {"order": "reverse"}, {"order": 3}, {"places": 16, "order": "reverse"},
     {"places": 99, "order": 5}],
    ids=str,
)  # fmt: skip
def test_a_chain_by_block_number_ends_while_predecessors_have_begun(how):
    assert (chain("by_number", **how) == np.cumsum(np.arange(16))).all()


@pytest.mark.parametrize("how", [{"places": 4, "order": "reverse"}, {"places": 1, "order": 3}, {"places": 3}], ids=str)
def test_tickets_from_a_counter_end_in_any_order(how):
    assert (chain("by_counter", **how) == np.cumsum(np.arange(16))).all()
    assert (chain("by_counter", **how, check_races=True) == np.cumsum(np.arange(16))).all()


def test_a_chain_by_block_number_hangs_where_the_first_block_finds_no_room():
    with pytest.raises(simt.Deadlock) as caught:
        chain("by_number", places=4, order="reverse")
    text = str(caught.value)
    line = CHAIN.splitlines().index("      while (flags[ticket - 1] == 0) { }") + 1
    assert f"kernel by_number, line {line} `while" in text
    for block in (15, 14, 13):
        assert f"block ({block}, 0, 0), thread (0, 0, 0) waits at line {line} for flags[{block - 1}]" in text
    assert "and 1 more block like them" in text
    assert "blocks 0 to 11 of 16 have not begun: 4 fit at a time" in text


def test_blocks_that_have_not_begun_are_listed_in_runs():
    with pytest.raises(simt.Deadlock, match=r"; block 0 of 5 has not begun: 4 fit at a time"):
        chain("by_number", 5, places=4, order="reverse")
    with pytest.raises(simt.Deadlock, match=r"1 fits at a time") as caught:
        chain("by_number", 40, places=1, order=1)
    begun = int(np.random.default_rng(1).permutation(40)[0])
    assert f"blocks 0 to {begun - 1} and {begun + 1} to 39 of 40 have not begun" in str(caught.value)
    with pytest.raises(
        simt.Deadlock, match=r"blocks (\d+( to \d+)?, ){4}\d+( to \d+)? and \d+ more of 60 have"
    ) as caught:
        chain("by_number", 60, places=12, order=2)
    runs, more = re.search(r"blocks ([\d, to]+) and (\d+) more", str(caught.value)).groups()
    ends = [[int(n) for n in run.split(" to ")] for run in runs.split(", ")]
    assert sum(run[-1] - run[0] + 1 for run in ends) + int(more) == 48


def test_blocks_that_end_make_room_for_others():
    """The first hundred blocks in reverse need nobody; the wait comes at the end, for a block that has ended."""
    flags = np.zeros(100, I32)
    source = r"""extern "C" __global__ void k(volatile int* flags) {
      if (blockIdx.x == 0) while (flags[99] == 0) { }
      flags[blockIdx.x] = 1; }"""
    simt.compile(source)["k"](100, 32, flags, places=1, order="reverse")
    assert flags.all()
    flags[:] = 0
    with pytest.raises(simt.Deadlock, match=r"block \(0, 0, 0\), thread \(0, 0, 0\) waits at line 2 for flags\[99\]"):
        simt.compile(source)["k"](100, 32, flags, places=1)
    flags[:] = 0
    simt.compile(source)["k"](100, 32, flags, places=2)
    assert flags.all()


def test_a_barrier_of_the_grid_needs_room_for_all():
    assert chain("all_meet", places=16).all()
    with pytest.raises(simt.Deadlock, match=r"waits at line \d+ for counter\[0\].*block 15 of 16 has not begun"):
        chain("all_meet", places=15)


def test_parts_of_the_grid_are_filled_as_places_come_free(monkeypatch):
    """Blocks run together in parts; a part is smaller here than the places, and than the grid."""
    monkeypatch.setattr(simt.execute.scheduler, "PART", 128)  # two blocks of 64 threads
    for how in ({"places": 5}, {"places": 5, "order": 4}, {"order": "reverse"}, {"places": 1, "order": "reverse"}):
        assert (chain("by_counter", 20, **how) == np.cumsum(np.arange(20))).all()
    assert (chain("by_number", 20, places=5) == np.cumsum(np.arange(20))).all()
    with pytest.raises(simt.Deadlock, match="blocks 0 to 14 of 20 have not begun"):
        chain("by_number", 20, places=5, order="reverse")


def test_an_ordinary_kernel_gives_and_costs_the_same_in_any_order():
    source = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
      __shared__ float tile[64];
      int at = (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * blockDim.x + threadIdx.x;
      tile[threadIdx.x] = at < n ? x[at] : 0.f;
      __syncthreads();
      if (at < n) y[at] = 2 * tile[63 - threadIdx.x] + blockIdx.y; }"""
    x = np.random.default_rng(0).standard_normal(64 * 60 - 5).astype(np.float32)
    first = None
    for how in ({}, {"order": "reverse"}, {"order": 0}, {"order": 9, "places": 7}, {"places": 1}):
        y = np.zeros_like(x)
        report = simt.compile(source)["k"]((5, 4, 3), 64, x, y, I32(x.size), **how)
        first = first or (y.tobytes(), report.counters, report.lines)
        assert (y.tobytes(), report.counters, report.lines) == first, how


def test_a_seed_always_gives_the_same_order():
    source = 'extern "C" __global__ void k(int* y, int* c) { y[atomicAdd(c, 1)] = blockIdx.x; }'

    def started(**how):
        y = np.zeros(50, I32)
        simt.compile(source)["k"](50, 1, y, np.zeros(1, I32), **how)
        return y.tolist()

    assert started() == sorted(started()) and started(order="reverse") == started()[::-1]
    assert started(order=8) == started(order=np.int64(8), places=3) != started(order=9)
    assert sorted(started(order=8)) == started()


def test_some_blocks_alone():
    source = 'extern "C" __global__ void k(int* y, int* c) { y[blockIdx.x + 100 * blockIdx.y] = atomicAdd(c, 1) + 1; }'
    y = np.zeros(1000, I32)
    report = simt.compile(source)["k"]((100, 10), 1, y, np.zeros(1, I32), only=[999, 0, 123], places=2)
    assert {int(n): int(y[n]) for n in np.flatnonzero(y)} == {999: 1, 0: 2, 123: 3}
    assert report.counters["smsp__inst_executed.sum"] > 0
    with pytest.raises(simt.Deadlock, match="waits at line .* for flags.3."):
        chain("by_number", only=range(4, 8))
    for bad in ([], [16], [-1], [0, 0], [True], [1.0], 3, "01", {1, 2}):
        with pytest.raises(simt.LaunchError, match="only: expected different numbers of blocks from 0 to 15"):
            chain("by_number", only=bad)
    with pytest.raises(simt.LaunchError, match='only: expected order="forward" beside it'):
        chain("by_number", only=[3], order=3)


@pytest.mark.parametrize(
    "how, text",
    [
        ({"places": 0}, "places: expected a whole number of blocks from 1 on, or None for all of them; got 0"),
        ({"places": -2}, "places: .*got -2"),
        ({"places": True}, "places: .*got bool True"),
        ({"places": 2.0}, "places: .*got float 2.0"),
        ({"order": "backward"}, 'order: expected "forward", "reverse" or a whole number.*got .backward'),
        ({"order": False}, "order: .*got bool False"),
        ({"order": 1.5}, "order: .*got float 1.5"),
        ({"order": "7"}, "order: .*got '7'"),
        ({"order": None}, "order: .*got NoneType None"),
        ({"order": -1}, "order: .*0 or more; got -1"),
    ],
    ids=str,
)
def test_places_and_orders_that_cannot_be(how, text):
    with pytest.raises(simt.LaunchError, match=text):
        chain("by_number", **how)


def test_a_launch_with_tensors_takes_places_and_order():
    torch = pytest.importorskip("torch")
    module = cuda.compile(CHAIN)
    sums, flags, counter = (torch.zeros(n, dtype=torch.int32) for n in (16, 16, 1))
    with pytest.raises(simt.Deadlock, match="blocks 0 to 11 of 16 have not begun"):
        module.by_number(16, 64, sums, flags, counter, places=4, order="reverse")
    with pytest.raises(simt.LaunchError, match="order: "):
        module.by_counter(16, 64, sums, flags, counter, order=None)
    flags.zero_()
    module.by_counter(16, 64, sums, flags, counter, places=4, order="reverse")
    assert sums.tolist() == np.cumsum(np.arange(16)).tolist()
