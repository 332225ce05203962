"""The scheduler: which threads run next, who waits for whom, when it gives up. Truth is Python, thread by thread."""

import sys
import tracemalloc

import numpy as np
import pytest

import simt

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
I32, F32 = np.int32, np.float32


def run(body, grid, block, *args, before="", options=(), bounds="", **how):
    """Launch a kernel k whose parameters and body are given, as '(int* y) { ... }'."""
    source = f'{before}\nextern "C" __global__ void {bounds} k{body}'
    return simt.compile(source, options)["k"](grid, block, *args, **how)


def ints(n):
    return np.zeros(n, I32)


# Divergence and loops.


def test_each_lane_has_its_own_trip_count():
    y, x = ints(96), np.arange(1, 8, dtype=I32)
    body = """(int* y, const int* x) {
      int i = threadIdx.x, s = 0;
      for (;;) {                     // an exit in the middle, another at the end, and a continue
        s += x[i % 7];
        if (s > i * 3) break;
        s ^= i;
        if ((s & 31) == 7) continue;
        i = (i * 5 + 3) % 101;
        if (i == 50) break;
      }
      y[threadIdx.x] = s * 1000 + i; }"""
    run(body, 1, 96, y, x)

    def thread(i):
        s = 0
        while True:
            s += i % 7 + 1
            if s > i * 3:
                break
            s ^= i
            if s & 31 == 7:
                continue
            i = (i * 5 + 3) % 101
            if i == 50:
                break
        return s * 1000 + i

    assert y.tolist() == [thread(i) for i in range(96)]


def test_what_is_set_on_one_side_of_an_if_stays_on_the_other():
    y = ints(64)
    body = """(int* y, int n) {
      int t = threadIdx.x, a = t, b = -t; bool p = t % 3 == 0, q = t % 5 == 0;
      for (int i = 0; i < n; i++) {
        if (p) { a += b; if (q) b = a - i; else p = a > 0; } else { b += 2; q = !q; if (b % 7 == 0) p = true; }
      }
      y[t] = a * 1000 + b * 4 + p * 2 + q; }"""
    run(body, 1, 64, y, I32(9))
    wanted = []
    for t in range(64):
        a, b, p, q = t, -t, t % 3 == 0, t % 5 == 0
        for i in range(9):
            if p:
                a += b
                if q:
                    b = a - i
                else:
                    p = a > 0
            else:
                b += 2
                q = not q
                if b % 7 == 0:
                    p = True
        wanted.append(a * 1000 + b * 4 + p * 2 + q)
    assert y.tolist() == wanted


def test_warps_are_counted_as_they_run():
    """Lanes 0-15 and 16-31 take turns, and meet again behind the if."""
    body = """(int* y) {
      int t = threadIdx.x;
      if (t % 32 < 16)
        y[t] = t * t;
      else
        atomicAdd(&y[t], 5);
      y[t + 64] = 1;
    }"""
    report = run(body, 3, 64, ints(128))
    stores = report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"]
    assert stores == 2 * 6 and report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_red.sum"] == 6
    assert report.lines[5]["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] == 6
    assert report.lines[8]["smsp__thread_inst_executed_per_inst_executed.ratio"] == 32
    assert report.lines[7]["smsp__thread_inst_executed_per_inst_executed.ratio"] == 16


@pytest.mark.parametrize("block", [1, 31, 33, 100, 1024, (7, 5, 3), (2, 3, 5)])
def test_blocks_that_are_no_multiple_of_a_warp(block):
    x, y, z = (block, 1, 1) if isinstance(block, int) else block
    threads = x * y * z
    out = ints(3 * threads)
    body = """(int* y) {
      int n = blockDim.x * blockDim.y * blockDim.z;
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), s = t;
      for (int i = 0; i < t % 7; i++) s += i * threadIdx.x;
      s += __syncthreads_count(t & 1);
      y[blockIdx.x * n + t] = s; }"""
    run(body, 3, block, out)
    wanted = [t + sum(i * (t % x) for i in range(t % 7)) + threads // 2 for t in range(threads)]
    assert out.reshape(3, -1).tolist() == [wanted] * 3


def test_grids_of_two_and_three_dimensions():
    out = ints(4 * 3 * 2 * 2)
    body = """(int* y) {
      int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      y[b * blockDim.x + threadIdx.x] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x; }"""
    run(body, (4, 3, 2), 2, out)
    assert out.tolist() == [
        x + 10 * y + 100 * z + 1000 * t for z in range(2) for y in range(3) for x in range(4) for t in range(2)
    ]


def test_a_grid_larger_than_what_runs_together():
    n = 300_000
    y = ints(n)
    body = "(int* y, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = i + gridDim.x; }"
    report = run(body, -(-n // 96), 96, y, I32(n))
    assert (y == np.arange(n) + -(-n // 96)).all()
    assert report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] == n // 32


def test_values_that_all_threads_share_are_counted_for_every_block():
    """Once an address was known to be the same everywhere, what it cost was kept for launches of other sizes too."""
    for blocks in 1, 4, 2000, 8:
        report = run("(const int* x, int* y) { y[threadIdx.x] = x[0]; }", blocks, 64, ints(1), ints(64))
        assert report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 2 * blocks


def test_many_tiny_blocks():
    y = ints(200_000)
    run("(int* y) { y[blockIdx.x] = blockIdx.x; }", 200_000, 1, y)
    assert (y == np.arange(200_000)).all()
    run("() {}", 1_000_000, 1)


# Barriers.


def test_barriers_in_loops_of_warps_with_numbers_of_their_own():
    y = ints(128)
    body = """(int* y) {
      __shared__ int s[128];
      s[threadIdx.x] = threadIdx.x;
      __syncthreads();
      if (threadIdx.x < 64) {
        for (int i = 0; i < 5; i++) {
          int v = s[(threadIdx.x + 1) % 64];
          asm volatile("bar.sync 1, 64;" ::: "memory");
          s[threadIdx.x] = v;
          asm volatile("bar.sync 1, 64;" ::: "memory"); }
      } else {
        for (int i = 0; i < 3; i++) {
          int v = s[64 + (threadIdx.x + 2) % 64];
          asm volatile("bar.sync 2, 64;" ::: "memory");
          s[threadIdx.x] = v;
          asm volatile("bar.sync 2, 64;" ::: "memory"); }
      }
      __syncthreads();
      y[threadIdx.x] = s[127 - threadIdx.x]; }"""
    run(body, 3, 128, y)
    assert y[::-1].tolist() == np.r_[np.roll(np.arange(64), -5), np.roll(np.arange(64, 128), -6)].tolist()


def test_a_barrier_with_a_count_may_be_reached_at_two_places():
    y = ints(64)
    body = """(int* y) {
      __shared__ int s;
      if (threadIdx.x < 32) { s = 5; asm volatile("bar.sync 1, 64;" ::: "memory"); y[threadIdx.x] = 1; }
      else { asm volatile("bar.sync 1, 64;" ::: "memory"); y[threadIdx.x] = s; } }"""
    run(body, 2, 64, y)
    assert y.tolist() == [1] * 32 + [5] * 32


def test_threads_that_have_left_are_not_waited_for():
    y = ints(96)
    body = """(int* y) {
      __shared__ int s[96];
      s[threadIdx.x] = threadIdx.x * 2;
      if (threadIdx.x >= 40) return;
      __syncthreads();
      y[threadIdx.x] = s[39 - threadIdx.x]; }"""
    run(body, 4, 96, y)
    assert y.tolist() == [2 * (39 - t) for t in range(40)] + [0] * 56


def test_two_different_barriers_are_a_fault_with_both_lines():
    body = """(int* y) {
      if (threadIdx.x < 40) { y[0] = 1;
        __syncthreads();   // one
        y[2] = 2; } else { y[1] = 1;
        __syncthreads();   // two
        y[3] = 4; } }"""
    with pytest.raises(simt.BarrierFault, match=r"(?s)thread \(0, 0, 0\) at line 4.*one.*\(40, 0, 0\) at line 6.*two"):
        run(body, 1, 64, ints(4))


def test_syncthreads_count_and_or():
    y = ints(300)
    body = """(int* y) {
      int count = __syncthreads_count(threadIdx.x % 3 == 0);
      int all = __syncthreads_and(threadIdx.x < blockDim.x - blockIdx.x);
      int any = __syncthreads_or(threadIdx.x == blockIdx.x * 97);
      y[blockIdx.x * 100 + threadIdx.x] = count * 4 + (all != 0) * 2 + (any != 0); }"""
    run(body, 3, 100, y)
    assert y.reshape(3, 100).tolist() == [[34 * 4 + 2 * (b == 0) + (b < 2)] * 100 for b in range(3)]


def test_syncwarp_in_both_arms_of_an_if():
    y = ints(64)
    body = """(int* y) {
      __shared__ volatile int s[64];
      int t = threadIdx.x;
      if (t % 2) { s[t] = t; __syncwarp(); y[t] = s[t - 1]; }
      else { s[t] = 100 + t; __syncwarp(); y[t] = s[t + 1]; } }"""
    run(body, 1, 64, y)
    assert y.tolist() == [99 + t if t % 2 else t + 1 for t in range(64)]


def test_a_barrier_that_some_never_reach():
    body = "(volatile int* y) { if (threadIdx.x < 16) __syncthreads(); else while (y[1] == 0); }"
    with pytest.raises(simt.Deadlock, match="kernel k, line 2"):
        run(body, 1, 32, ints(4))


# Lanes together.


def test_shuffles_in_parts_of_a_warp():
    y = ints(64)
    body = """(int* y) {
      int l = threadIdx.x & 31, v = l * 3;
      if (l < 20) { v += __shfl_xor_sync(0xfffff, v, 1); if (l >= 4) v += __shfl_xor_sync(0xffff0, v, 2); }
      else v -= __shfl_down_sync(0xfff00000, v, 2) * (l < 30);
      y[threadIdx.x] = v; }"""
    run(body, 1, 64, y)
    first = [3 * n + 3 * (n ^ 1) for n in range(20)]
    wanted = [v + (first[n ^ 2] if n >= 4 else 0) for n, v in enumerate(first)]
    wanted += [3 * n - 3 * (n + 2) * (n < 30) for n in range(20, 32)]
    assert y.tolist() == wanted * 2


def test_masks_that_differ_between_lanes():
    y = ints(64)
    body = """(int* y) {
      int l = threadIdx.x & 31;
      unsigned m = __match_any_sync(~0u, l % 3);
      y[threadIdx.x] = __shfl_sync(m, l * 10, __ffs(m) - 1) + __popc(m); }"""
    run(body, 1, 64, y)
    assert y.tolist() == [(n % 32 % 3) * 10 + (11 if n % 32 % 3 < 2 else 10) for n in range(64)]


def test_activemask_in_a_divergent_if():
    y = ints(64)
    body = """(int* y) {
      int l = threadIdx.x & 31;
      if (l % 5 == 2 || l > 25) y[threadIdx.x] = __popc(__activemask() & ((2u << l) - 1)); }"""
    run(body, 1, 64, y)
    chosen = [n % 5 == 2 or n > 25 for n in range(32)]
    assert y.tolist() == [sum(chosen[: n + 1]) if chosen[n] else 0 for n in range(32)] * 2


def test_lanes_that_have_left_may_be_named():
    y = ints(64)
    run(
        "(int* y) { if (threadIdx.x % 32 >= 16) return; y[threadIdx.x] = __shfl_sync(~0u, threadIdx.x * 2, 5); }",
        1,
        64,
        y,
    )
    assert y.tolist() == ([10] * 16 + [0] * 16 + [74] * 16 + [0] * 16)
    y = ints(64)
    body = "(int* y) { int l = threadIdx.x; if (l < 16) { y[l] = __shfl_sync(~0u, l * 2, 1); return; } y[l] = l; }"
    run(body, 1, 64, y)
    assert y.tolist() == [2] * 16 + list(range(16, 64))


def test_a_lane_that_is_named_but_elsewhere():
    body = """(int* y) {
      if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_down_sync(~0u, threadIdx.x, 1);
      else { y[40] = 1; y[threadIdx.x] = __shfl_up_sync(~0u, threadIdx.x, 1) * 3; } }"""
    with pytest.raises(simt.LaneFault, match=r"(?s)line 4.*lanes 16-31"):
        run(body, 1, 32, ints(64))
    with pytest.raises(simt.LaneFault, match="lane 31 of warp 0 .*mask does not name"):
        run("(int* y) { y[threadIdx.x] = __shfl_xor_sync(0x7fffffff, threadIdx.x, 1); }", 1, 32, ints(64))


@pytest.mark.parametrize(
    "body, threads, message",
    [
        ("if (t >= 20) return; y[t] = __shfl_down_sync(~0u, t, 1);", 32, "lane 19 .* reads lane 20 .* has left"),
        ("if (t < 16) y[t] = __shfl_xor_sync(0xffff, t, 16);", 32, "lane 0 .* reads lane 16 .* does not name"),
        (  # an error even where nobody uses what was read
            "if (t < 9) { int v = __shfl_down_sync(0x1ff, t, 2); y[t] = t < 7 ? v : t; }",
            32,
            "lane 7 .* reads lane 9 .* does not name",
        ),
        ("if (t % 2) y[t] = __shfl_sync(__activemask(), t, 4);", 32, "lane 1 .* reads lane 4 .* does not name"),
        ("y[t] = __shfl_down_sync(~0u, t, 1);", 48, r"lane 15 of warp 1 \(thread \(47.* reads lane 16 .* 48 threads"),
        ("y[t] = __shfl_up_sync(t < 16 ? 0xffff : 0xffff0000, t, 1);", 32, "lane 16 .* reads lane 15 .* does not name"),
    ],
)
def test_a_shuffle_that_reads_a_lane_without_a_part_in_it(body, threads, message):
    with pytest.raises(simt.LaneFault, match="(?s)kernel k, line 2 .*" + message):
        run(f"(int* y) {{ int t = threadIdx.x; {body} }}", 1, threads, ints(64))


@pytest.mark.parametrize(
    "body, wanted",
    [  # a lane outside of the segment is not read: the lane gets its own value
        ("if (t < 24) y[t] = __shfl_down_sync(~0u, t, 1, 8);", [n + (n % 8 < 7) for n in range(24)]),
        ("y[t] = __shfl_up_sync(~0u, t, 4);", [max(n - 4, n % 4) if n > 3 else n for n in range(32)]),
        ("if (t >= 20) return; y[t] = __ballot_sync(~0u, t < 3) + __reduce_add_sync(~0u, 1);", [27] * 20),
        ("if (t >= 20) return; __syncwarp(); y[t] = __popc(__match_any_sync(~0u, t / 4));", [4] * 20),
    ],
)
def test_what_lanes_together_may_do_though_some_have_left(body, wanted):
    y = ints(64)
    run(f"(int* y) {{ int t = threadIdx.x; {body} }}", 1, 32, y)
    assert y[: len(wanted)].tolist() == wanted


# Waiting for stores of other threads.


@pytest.mark.parametrize("step", [1, -1])
def test_a_chain_through_2000_blocks(step):
    y = ints(2002)
    first = 1 if step == 1 else 2000
    y[first - step] = 1
    body = """(volatile int* y, int step) {
      int b = blockIdx.x + 1;
      while (y[b - step] == 0);
      __threadfence();
      if (threadIdx.x == 0) y[b] = y[b - step] + 1; }"""
    run(body, 2000, 64, y, I32(step))
    assert sorted(y.tolist()) == [0, *range(1, 2002)]


def test_one_lane_waits_and_tells_its_warp():
    """The other lanes wait in a shuffle: for their own lane, not for those of other warps."""
    y = ints(201)
    y[0] = 1
    body = """(volatile int* y) {
      int v = 0;
      if (threadIdx.x == 0) while ((v = y[blockIdx.x]) == 0);
      v = __shfl_sync(~0u, v, 0);
      if (threadIdx.x == 3) y[blockIdx.x + 1] = v + 1; }"""
    run(body, 200, 32, y)
    assert y.tolist() == list(range(1, 202))


def test_one_thread_waits_and_tells_its_block():
    y = ints(51)
    y[0] = 1
    body = """(volatile int* y) {
      __shared__ int s;
      for (;;) {
        if (threadIdx.x == 0) s = y[blockIdx.x];
        __syncthreads();
        int v = s;
        __syncthreads();
        if (v) break; }
      if (threadIdx.x == 0) y[blockIdx.x + 1] = 1; }"""
    run(body, 50, 64, y, step_limit=20_000)
    assert y.all()


LOOK_BACK = """
extern "C" __global__ void
k(const int* x, int* y, volatile int* flag, volatile int* own, volatile int* all, int* ticket) {
  __shared__ int tile, before, sums[4];
  if (threadIdx.x == 0) tile = atomicAdd(ticket, 1);
  __syncthreads();
  int b = tile, i = b * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32, s = x[i];
  for (int d = 1; d < 32; d *= 2) { int o = __shfl_up_sync(~0u, s, d); if (lane >= d) s += o; }
  if (lane == 31) sums[warp] = s;
  __syncthreads();
  int base = 0, total = 0;
  for (int j = 0; j < blockDim.x / 32; j++) { if (j < warp) base += sums[j]; total += sums[j]; }
  if (threadIdx.x == 0) {
    int sum = 0;
    if (b > 0) {
      own[b] = total; __threadfence(); flag[b] = 1;
      for (int p = b - 1;;) {
        int f = flag[p];
        if (f == 0) continue;
        __threadfence();
        if (f == 2) { sum += all[p]; break; }
        sum += own[p--]; } }
    all[b] = sum + total; __threadfence(); flag[b] = 2;
    before = sum; }
  __syncthreads();
  y[i] = before + base + s; }
"""


def test_decoupled_look_back_over_2000_blocks():
    x = np.random.default_rng(1).integers(0, 9, 2000 * 64).astype(I32)
    y = np.full_like(x, -1)
    simt.compile(LOOK_BACK)["k"](2000, 64, x, y, ints(2000), ints(2000), ints(2000), ints(1))
    assert (y == np.cumsum(x)).all()
    y[:] = -1
    args = ints(40), ints(40), ints(40), ints(1)
    simt.compile(LOOK_BACK)["k"](40, 64, x[: 40 * 64].copy(), y, *args, check_races=True)
    assert (y[: 40 * 64] == np.cumsum(x[: 40 * 64])).all()


def test_looking_back_over_places_long_written_is_no_deadlock():
    y = ints(1)
    body = """(volatile int* flag, int* y) {
      int s = 0, i = 999, v;
      for (;; i--) { while ((v = flag[i]) == 0); if (v == 2) break; s += v * 3; }
      y[0] = s; }"""
    run(body, 1, 32, np.r_[2, np.ones(999)].astype(I32), y)
    assert y[0] == 999 * 3


def test_a_wait_that_gives_up_is_no_deadlock():
    y = ints(32)
    run(
        "(volatile int* v, int* y) { int i = 0; while (v[0] == 0 && i < 100) i++; y[threadIdx.x] = i; }",
        1,
        32,
        ints(1),
        y,
    )
    assert (y == 100).all()
    body = "(volatile int* v, int* y) { long long t = clock64(); while (v[0] == 0 && clock64() - t < 50); y[0] = 7; }"
    run(body, 1, 32, ints(1), y)
    assert y[0] == 7


def test_a_lock_between_lanes_of_a_warp():
    y = ints(2)
    body = """(int* y) {
      bool done = false;
      while (!done)
        if (atomicCAS(&y[0], 0, 1) == 0) { y[1] += 1; __threadfence(); atomicExch(&y[0], 0); done = true; } }"""
    run(body, 4, 64, y)
    assert y.tolist() == [0, 256]


def test_a_barrier_of_the_whole_grid():
    y = ints(2)
    body = """(int* y) {
      for (int round = 1; round <= 3; round++) {
        __syncthreads();
        if (threadIdx.x == 0) {
          __threadfence();
          atomicAdd(&y[0], 1);
          while (*(volatile int*)&y[0] < gridDim.x * round); }
        __syncthreads(); }
      if (threadIdx.x == 0) atomicAdd(&y[1], 1); }"""
    run(body, 300, 256, y)
    assert y.tolist() == [900, 300]


def test_tickets_give_each_thread_a_place():
    y, count = ints(1000), ints(1)
    body = "(int* y, int* c) { y[atomicAdd(c, 1)] = threadIdx.x + blockIdx.x * blockDim.x + 1; }"
    run(body, 10, 100, y, count)
    assert sorted(y) == list(range(1, 1001)) and count[0] == 1000


@pytest.mark.parametrize(
    "body",
    [
        "(volatile int* y) { while (y[blockIdx.x + 1] == 0); y[blockIdx.x] = 1; }",
        "(volatile int* y) { while (y[0] == 0); }",
        "(int* y) { while (atomicCAS(y, 0, 1) != 0); }",
        "(int* y) { while (atomicExch(y, 1) != 0); }",
        "(int* y) { while (atomicAdd(y, 0) < gridDim.x * blockDim.x + 1); }",
        "(volatile int* y) { int wait = 8; while (y[0] == 0) { __nanosleep(wait); if (wait < 256) wait *= 2; } }",
    ],
)
def test_deadlocks_are_reported(body):
    with pytest.raises(simt.Deadlock, match=r"kernel k, line 2 .*nobody will store; block \(\d, 0, 0\), thread \("):
        run(body, 4, 64, ints(8))


@pytest.mark.parametrize(
    "body",
    [
        "for (;;) y[threadIdx.x] += 1;",
        "while (true);",
        "for (;;) __syncthreads();",
        "while (y[0] == 0) __nanosleep(10);",  # y is not volatile: nothing will ever be seen
        "volatile int* v = y; while (v[0] == 0) v[1] = 5;",
        "for (unsigned i = 0; i != 1; i += 2) atomicAdd(y + 1, 1);",
        "int s = 0; for (int i = 1; i; i = i * 3 + 2) s += __shfl_xor_sync(~0u, i, 1); y[1] = s;",
        "if (threadIdx.x == 7) for (unsigned i = 1; i; i += 2) y[i % 8] = i;",
    ],
)
def test_endless_loops_are_stopped(body):
    with pytest.raises(
        simt.StepLimit, match=r"kernel k: stopped after 2001 steps .*block \(.*thread \(.*endless loop.*step_limit"
    ):
        run(f"(int* y) {{ {body} }}", 2, 64, ints(64), step_limit=2000)


def test_a_program_longer_than_the_limit_may_have_a_higher_one():
    body = "(int* y, int n) { int s = 0; for (int i = 0; i < n; i++) s = s * 3 + y[i % 8]; y[threadIdx.x] = s; }"
    with pytest.raises(simt.StepLimit):
        run(body, 1, 32, ints(64), I32(900), step_limit=100)
    run(body, 1, 32, ints(64), I32(900), step_limit=1000)


def test_a_long_loop_is_not_taken_for_an_endless_one(monkeypatch):
    """Beyond the limit of steps a launch goes on, until it has taken the time that nobody waits for an endless one."""
    body = "(int* y, long long v) { int n = 0; for (; n < y[1]; n++) v = v & 1 ? 3 * v + 1 : v / 2; y[0] = n; }"
    y = I32([0, 150_000])
    run(body, 1, 1, y, np.int64(27))
    assert y[0] == 150_000
    monkeypatch.setattr("simt.execute.scheduler.PATIENCE", 0.2)
    with pytest.raises(simt.StepLimit, match="now 100000"):
        run("(int* y) { while (true); }", 1, 32, ints(1))
    monkeypatch.setattr("simt.execute.scheduler.PATIENCE", 10)
    monkeypatch.setattr("simt.execute.scheduler.FEW_STEPS", 500)
    monkeypatch.setattr("simt.execute.scheduler.LONG", 0.05)  # few steps, of which each takes long
    with pytest.raises(simt.StepLimit):
        run("(int* y) { while (true) atomicAdd(y, 1); }", 1, 32, ints(1))
    with pytest.raises(simt.LaunchError, match="step_limit: expected a whole number; got str 'long'"):
        run("(int* y) {}", 1, 32, ints(1), step_limit="long")


def test_large_local_arrays_take_turns(monkeypatch):
    monkeypatch.setattr("simt.execute.scheduler.ROOM", 1 << 22)
    body = """(float* y) { float a[1000];
      for (int i = threadIdx.x; i < 40; i++) a[i * 79 % 1000] = i;
      y[blockIdx.x * 32 + threadIdx.x] = a[39 * 79 % 1000]; }"""
    y = np.zeros((200, 32), F32)
    run(body, 1, 32, y)  # compiled
    tracemalloc.start()
    run(body, 200, 32, y)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (y == 39).all() and most < 3 << 22  # all at once they have 25 MB, and as much again of marks


# What a kernel can say, and how it can stop.


def test_printf():
    body = """(int* y) {
      if (threadIdx.x % 2) { if (threadIdx.x < 4) printf("odd %d\\n", (int)threadIdx.x); }
      else if (threadIdx.x < 4) printf("%u %c|%5x|%-5d|%05.1f%% %s %lld %llu %e %p\\n",
        threadIdx.x, 'a' + threadIdx.x, 255, -3, 1.25, "text", -5ll, 1ull << 40, 1.5f, (void*)16); }"""
    printed = run(body, 1, 64, ints(1)).printed
    line = "%d %s|   ff|-3   |001.2%% text -5 1099511627776 1.500000e+00 0x10\n"
    assert sorted(printed.splitlines(True)) == sorted([line % (0, "a"), line % (2, "c"), "odd 1\n", "odd 3\n"])
    assert printed.index("odd 1") < printed.index("odd 3")


def test_assert_and_trap_name_the_thread():
    y = np.ones(64, I32)
    y[37] = 0
    with pytest.raises(simt.Trap, match=r"line 3 .*assertion failed: y\[threadIdx.x\] > 0; block \(0, .*\(37, 0, 0\)"):
        run("(int* y) {\n assert(y[threadIdx.x] > 0); }", 1, 64, y, before="#include <assert.h>")
    with pytest.raises(simt.Trap, match=r"line 3 .*__trap.*block \(1, 0, 0\), thread \(3, 1, 0\)"):
        run("(int* y) {\n if (blockIdx.x == 1 && threadIdx.x == 3 && threadIdx.y == 1) __trap(); }", 2, (8, 4), y)
    body = '(int* y) { asm volatile("{.reg .pred p; setp.gt.u32 p, %0, 99; @p trap;}" :: "r"(threadIdx.x)); y[0] = 4; }'
    run(body, 1, 64, y)
    assert y[0] == 4


def test_device_variables_keep_their_values():
    module = simt.compile("""
      __device__ int count = 5, table[3] = {7, 8, 9};
      __device__ const char* names[2] = {"ab", "cd"};
      __constant__ float scale[2] = {0.5f, 4.f};
      extern "C" __global__ void k(int* y) { y[threadIdx.x] = atomicAdd(&count, 1) + table[threadIdx.x % 3]; }
      extern "C" __global__ void get(int* y) { y[0] = count; y[1] = names[y[0] & 1][y[0] & 1]; }
      extern "C" __global__ void times(float* y) { y[threadIdx.x] *= scale[threadIdx.x & 1]; }
    """)
    y = ints(32)
    module["k"](1, 32, y)
    assert y.tolist() == [5 + t + 7 + t % 3 for t in range(32)]
    module["k"](1, 32, y)
    module["get"](1, 1, y)
    assert y[0] == 5 + 64 and y[1] == ord("d")
    z = np.ones(32, F32)
    module["times"](1, 32, z)
    assert z.tolist() == [0.5, 4] * 16


def test_calls_of_functions_that_are_not_inlined():
    before = """
      struct Pair { int a, b; };
      __device__ __noinline__ float power(float x, int n) { float r = 1; while (n--) r *= x; return r; }
      __device__ __noinline__ Pair swap(Pair p) { Pair q; q.a = p.b; q.b = p.a + (int)power(2, p.b & 3); return q; }
      __device__ __noinline__ void bump(int* p, int n) { for (int i = 0; i < n; i++) p[i] += i; }"""
    y = ints(64)
    body = """(int* y) {
      int t = threadIdx.x;
      Pair p = {t, t * 2};
      if (t % 3) p = swap(p);
      int own[4] = {1, 2, 3, 4};
      bump(own, t % 5);
      y[t] = p.a * 100 + p.b + own[t & 3]; }"""
    run(body, 1, 64, y, before=before)

    def thread(t):
        a, b = (t, t * 2) if t % 3 == 0 else (t * 2, t + 2 ** (t * 2 & 3))
        return a * 100 + b + (t & 3) + 1 + ((t & 3) if (t & 3) < t % 5 else 0)

    assert y.tolist() == [thread(t) for t in range(64)]


def test_jumps_of_inline_assembly():
    """Labels in { } belong to it; a jump through a table."""
    y = ints(64)
    body = """(int* y) {
      int i = threadIdx.x;
      asm volatile("{.reg .pred p; setp.lt.s32 p, %0, 10; @p bra DONE; add.s32 %0, %0, 100; DONE: }" : "+r"(i));
      asm volatile("{.reg .pred p; setp.gt.s32 p, %0, 120; @p bra DONE; add.s32 %0, %0, 1000; DONE: }" : "+r"(i));
      int j = i & 3, r = 0;
      asm volatile("{ ts: .branchtargets L0, L1, L2, L3; brx.idx %1, ts; L0: mov.u32 %0, 10; bra E; L1: mov.u32 %0, 11;"
                   "bra E; L2: mov.u32 %0, 12; bra E; L3: mov.u32 %0, 13; E: }" : "+r"(r) : "r"(j));
      y[threadIdx.x] = i * 100 + r; }"""
    run(body, 1, 64, y)
    first = [t if t < 10 else t + 100 for t in range(64)]
    second = [i if i > 120 else i + 1000 for i in first]
    assert y.tolist() == [i * 100 + 10 + (i & 3) for i in second]


def test_launch_bounds_and_no_parameters():
    run("() { }", (2, 3, 4), (3, 2, 1), bounds="__launch_bounds__(128, 2)")
    with pytest.raises(simt.LaunchError, match="block: expected at most 128 threads, .*got 129"):
        run("() { }", 1, 129, bounds="__launch_bounds__(128, 2)")


def test_a_race_is_found_only_when_asked_for():
    body = "(int* y) { __shared__ int s[64]; s[threadIdx.x] = 1; y[threadIdx.x] = s[63 - threadIdx.x]; }"
    run(body, 1, 64, ints(64))
    with pytest.raises(simt.SimtError, match="race on byte .*line 2"):
        run(body, 1, 64, ints(64), check_races=True)


def by_hand(body, *args, threads=64):
    """A kernel k(u64 p, u64 q) in PTX: %r0 is the thread, %rd0 = p + 16 * thread, %rd1 = q + 16 * thread."""
    text = f"""
      .version 8.0
      .target sm_90
      .address_size 64
      .visible .entry k(.param .u64 p, .param .u64 q) {{
        .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd0, [p]; ld.param.u64 %rd1, [q]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 16;
        add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2;
        {body}
        ret; }}"""
    return simt.load(text)["k"](1, threads, *args)


def test_guarded_loads_and_stores_of_vectors():
    x, y = np.arange(256, dtype=I32), ints(256)
    body = """
      mov.u32 %r1, -1; mov.u32 %r2, -2; mov.u32 %r3, -3; mov.u32 %r4, -4;
      and.b32 %r9, %r0, 3; setp.eq.u32 %p1, %r9, 2; setp.lt.u32 %p2, %r0, 40;
      @%p1 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0];
      @!%p1 add.s32 %r2, %r2, 100;
      @%p2 st.global.v4.u32 [%rd1], {%r4, %r3, %r2, %r1};
      @%p2 bra OUT;
      @!%p1 st.global.u32 [%rd1+8], %r2;
    OUT:"""
    by_hand(body, x, y)
    for t in range(64):
        own = list(range(4 * t, 4 * t + 4)) if t % 4 == 2 else [-1, 98, -3, -4]
        wanted = own[::-1] if t < 40 else [0, 0, own[1] if t % 4 != 2 else 0, 0]
        assert y[4 * t : 4 * t + 4].tolist() == wanted


def test_a_guard_that_no_lane_passes_touches_nothing():
    y = ints(4)
    body = """
      setp.gt.u32 %p1, %r0, 999; mov.u32 %r1, 5;
      @%p1 ld.global.u32 %r1, [%rd0+4096]; @%p1 st.global.u32 [%rd1+4096], %r1; @%p1 atom.global.add.u32 %r1, [%rd1], 1;
      setp.eq.u32 %p2, %r0, 0; @%p2 st.global.u32 [%rd1], %r1;"""
    report = by_hand(body, ints(4), y)
    assert y.tolist() == [5, 0, 0, 0]
    assert not any(v for k, v in report.counters.items() if "global_op_ld" in k or "global_op_atom" in k)


def test_predicates_two_at_a_time():
    y = ints(256)
    body = """
      setp.lt.u32 %p1|%p2, %r0, 20; and.b32 %r1, %r0, 1; setp.eq.u32 %p3, %r1, 0;
      setp.gt.and.u32 %p4|%p5, %r0, 9, %p3; setp.gt.or.u32 %p6, %r0, 50, !%p3;
      not.pred %p7, %p6; xor.pred %p8, %p1, %p4; @%p8 setp.eq.u32 %p7, %r1, 7;
      selp.u32 %r2, 1, 0, %p1; selp.u32 %r3, 2, 0, %p2; selp.u32 %r4, 4, 0, %p4; selp.u32 %r5, 8, 0, %p5;
      selp.u32 %r6, 16, 0, %p6; selp.u32 %r7, 32, 0, %p7; selp.u32 %r8, 64, 0, %p8;
      add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r6;
      add.u32 %r2, %r2, %r7; add.u32 %r2, %r2, %r8; st.global.u32 [%rd1], %r2;"""
    by_hand(body, ints(1), y)

    def thread(t):
        even = t % 2 == 0
        p1, p2, p4, p5, p6 = t < 20, t >= 20, t > 9 and even, t <= 9 and even, t > 50 or not even
        p8 = p1 != p4
        p7 = False if p8 else not p6
        return p1 + 2 * p2 + 4 * p4 + 8 * p5 + 16 * p6 + 32 * p7 + 64 * p8

    assert y[::4].tolist() == [thread(t) for t in range(64)]


def test_a_register_that_only_some_lanes_set_is_kept_in_the_others():
    """Live through an if, a loop of other lanes, and a barrier, in registers of every kind."""
    y = np.zeros(256, F32)
    body = """
      mov.f32 %f1, 0f3F800000; mov.u16 %h1, 7; mov.u64 %rd5, 9; setp.lt.u32 %p1, %r0, 10; setp.eq.u32 %p3, %r0, %r0;
      mov.u32 %r5, 0;
      @%p1 bra SET;
    LOOP:
      add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, %r0; @%p2 bra LOOP;
      bra.uni JOIN;
    SET:
      mov.f32 %f1, 0f40000000; mov.u16 %h1, 70; mov.u64 %rd5, 90; setp.ne.u32 %p3, %r0, %r0;
    JOIN:
      bar.sync 0;
      cvt.rn.f32.u16 %f2, %h1; cvt.rn.f32.u64 %f3, %rd5; cvt.rn.f32.u32 %f4, %r5;
      selp.f32 %f5, 0f3F000000, 0f00000000, %p3;
      st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4}; @%p3 st.global.f32 [%rd1], %f5;"""
    by_hand(body, ints(1), y)
    wanted = [[2, 70, 90, 0] if t < 10 else [0.5, 7, 9, t] for t in range(64)]
    assert y.reshape(64, 4).tolist() == wanted


def test_what_was_printed_before_a_fault_is_not_lost():
    source = r'extern "C" __global__ void k(int* y) { printf("at %d\n", threadIdx.x); y[threadIdx.x] = 1; }'
    with pytest.raises(simt.MemoryFault) as caught:
        simt.compile(source)["k"](1, 2, np.zeros(1, np.int32))
    assert caught.value.__notes__ == ["printed until then:\nat 0\nat 1\n"]


def test_a_shuffle_whose_members_come_from_memory():
    """One value for each block, while the lanes that run are the same in all."""
    y, members = ints(3 * 32), np.full(3, 0xFFFF, np.int32)
    run(
        """(int* y, const int* members) {
      int lane = threadIdx.x;
      if (lane < 16) y[blockIdx.x * 32 + lane] = __shfl_xor_sync(members[blockIdx.x], lane + 100 * blockIdx.x, 1); }""",
        3,
        32,
        y,
        members,
    )
    assert y.tolist() == [100 * block + (lane ^ 1) if lane < 16 else 0 for block in range(3) for lane in range(32)]
