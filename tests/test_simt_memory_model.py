"""The memory model between blocks: the classic litmus shapes, as CUDA C++, right and each with one thing missing.

Right ones end without a word; of the others each must be found, in whatever order the blocks start.
"""

import time

import numpy as np
import pytest

import simt
from simt.execute import scheduler
from simt.memory.races import Races, nothing_stale
from simt.memory.shadow import Shadow

PRELUDE = r"""
__device__ unsigned acquire(const unsigned *p) {
  unsigned v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ unsigned relaxed(const unsigned *p) {
  unsigned v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ void release(unsigned *p, unsigned v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
__device__ void store(unsigned *p, unsigned v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
"""
# Message passing: block 0 writes x and sets a flag, block 1 sees the flag and reads x.
FENCES = (
    PRELUDE
    + r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  if (blockIdx.x == 0) {
    x[threadIdx.x] = 7 + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // release
      store(flag, 1);
    }
  } else {
    if (threadIdx.x == 0) {
      while (relaxed(flag) != 1);
      __threadfence();  // acquire
    }
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x ^ 32];
  }
}"""
)
RELEASES = (
    FENCES.replace("__threadfence();  // release\n      store(", "release(")
    .replace("relaxed(flag)", "acquire(flag)")
    .replace("      __threadfence();  // acquire\n", "")
)
VOLATILE = FENCES.replace("store(flag, 1)", "*(volatile unsigned *)flag = 1").replace(
    "relaxed(flag)", "*(volatile unsigned *)flag"
)
# Three blocks: 0 tells 1, 1 tells 2, and 2 reads what 0 wrote.
CHAIN = (
    PRELUDE
    + r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  if (blockIdx.x == 0) {
    x[threadIdx.x] = 7 + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) release(flag, 1);
  } else if (blockIdx.x == 1) {
    if (threadIdx.x == 0) while (acquire(flag) != 1);
    __syncthreads();
    if (threadIdx.x == 40) release(flag + 1, 1);
  } else {
    if (threadIdx.x == 0) while (acquire(flag + 1) != 1);
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x ^ 32];
  }
}"""
)
# Store buffering. The machine cannot show that both may read 0; it can say that plain accesses race.
BUFFERING = (
    PRELUDE
    + r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  if (threadIdx.x) return;
  store(flag + blockIdx.x, 1);
  __threadfence();
  y[blockIdx.x] = relaxed(flag + (blockIdx.x ^ 1));
}"""
)
LOCK = r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  if (threadIdx.x % 32) return;
  while (atomicCAS(flag, 0u, 1u) != 0);
  __threadfence();  // acquire
  x[0] += 1;
  __threadfence();  // release
  atomicExch(flag, 0u);
}"""
# Tickets from a counter; who has number n waits for n - 1. `y` is one running sum, handed on.
QUEUE = (
    PRELUDE
    + r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  __shared__ unsigned ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(flag, 1);
  __syncthreads();
  unsigned mine = ticket;
  if (threadIdx.x == 0) while (acquire(flag + 1) != mine);
  __syncthreads();
  x[threadIdx.x] += mine;
  __syncthreads();  // all have added
  if (threadIdx.x == 0) release(flag + 1, mine + 1);
}"""
)
# Decoupled look-back: a block publishes its own sum, then adds up those of the blocks before it.
LOOK_BACK = (
    PRELUDE
    + r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  __shared__ unsigned ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(flag, 1);
  __syncthreads();
  unsigned mine = ticket;
  if (threadIdx.x == 0) {
    x[2 * mine] = mine + 1;
    release(flag + 1 + mine, 1);
    unsigned before = 0;
    for (int n = mine - 1; n >= 0; n--) {
      unsigned state;
      do state = acquire(flag + 1 + n); while (state == 0);
      if (state == 2) { before += x[2 * n + 1]; break; }
      before += x[2 * n];
    }
    x[2 * mine + 1] = before + mine + 1;
    release(flag + 1 + mine, 2);
    y[mine] = before;
  }
}"""
)
# The last block to come adds up what all have left.
LAST = r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  __shared__ bool last;
  x[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // release
    last = atomicAdd(flag, 1) == gridDim.x - 1;
    __threadfence();  // acquire
  }
  __syncthreads();
  if (last) {
    unsigned sum = 0;
    for (int n = 0; n < gridDim.x; n++) sum += x[n * blockDim.x + threadIdx.x];
    y[threadIdx.x] = sum;
  }
}"""
# A barrier of the grid, twice, around what blocks tell each other.
GRID = (
    PRELUDE
    + r"""
__device__ void meet(unsigned *count, unsigned goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // release
    atomicAdd(count, 1);
    while (relaxed(count) < goal);
    __threadfence();  // acquire
  }
  __syncthreads();
}
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  unsigned n = blockIdx.x * blockDim.x + threadIdx.x, total = gridDim.x * blockDim.x;
  for (unsigned step = 1; step <= 2; step++) {
    x[n] = n * step;
    meet(flag, (2 * step - 1) * gridDim.x);
    y[n] = x[total - 1 - n];
    meet(flag, 2 * step * gridDim.x);
  }
}"""
)
# Flags in shared memory, between the warps of one block.
WARPS = r"""
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  __shared__ unsigned data[32];
  __shared__ volatile unsigned ready;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    data[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x == 0) {
      __threadfence_block();  // release
      ready = 1;
    }
  } else {
    if (threadIdx.x == 32) {
      while (ready == 0);
      __threadfence_block();  // acquire
    }
    __syncwarp();
    y[threadIdx.x] = data[threadIdx.x ^ 33];
  }
}"""
SHAPES = {
    "message passing, fences": (FENCES, 2), "message passing, release and acquire": (RELEASES, 2),
    "message passing, volatile": (VOLATILE, 2), "cumulativity": (CHAIN, 3), "store buffering": (BUFFERING, 2),
    "lock": (LOCK, 4), "queue": (QUEUE, 4), "look-back": (LOOK_BACK, 6), "last block": (LAST, 4), "grid": (GRID, 3),
    "flags of warps": (WARPS, 2),
}  # fmt: skip
FENCE, BACK = "__threadfence();  // release", "__threadfence();  // acquire"
# shape, what is put in the place of what, and a part of the message
SPOILT = [
    ("message passing, fences", FENCE, "", "no release covers it"),
    ("message passing, fences", BACK, "", "there is no acquire"),
    ("message passing, fences", FENCE, "__threadfence_block();", "it was released for its own block only"),
    ("message passing, fences", BACK, "__threadfence_block();", "there is no acquire"),
    ("message passing, fences", f"__syncthreads();\n    if (threadIdx.x == 0) {{\n      {FENCE}",
     "__threadfence(); __syncthreads();\n    if (threadIdx.x == 0) {", "no release covers it"),
    ("message passing, fences", "__syncthreads();\n    if (threadIdx.x == 0) {\n      __t", "if (!threadIdx.x) { __t",
     "no release covers it"),
    ("message passing, fences", f"{FENCE}\n      store(flag, 1);", "store(flag, 1); __threadfence();",
     "no release covers it"),
    ("message passing, fences", "while (relaxed(flag) != 1);\n      __threadfence();",
     "__threadfence(); while (relaxed(flag) != 1);", "there is no acquire"),
    ("message passing, fences", f"{BACK}\n    }}\n    __syncthreads();", "}\n    __syncthreads(); __threadfence();",
     "thread 0 of its block has acquired it, but there is no barrier"),
    ("message passing, fences", "store(flag, 1)", "*flag = 1", "race on flag"),
    ("message passing, fences", "__threadfence();  // acquire\n    }\n    __syncthreads();", "__threadfence(); }",
     "race on x"),
    ("message passing, release and acquire", "release(flag", "store(flag", "no release covers it"),
    ("message passing, release and acquire", "acquire(flag)", "relaxed(flag)", "there is no acquire"),
    ("message passing, release and acquire", "release.gpu", "release.cta", r"race on flag.*scope of a block \(.cta\)"),
    ("message passing, release and acquire", "acquire.gpu", "acquire.cta", r"race on flag.*scope of a block \(.cta\)"),
    ("message passing, volatile", FENCE, "", "no release covers it"),
    ("message passing, volatile", BACK, "", "there is no acquire"),
    ("cumulativity", "release(flag, 1)", "store(flag, 1)", "no release covers it"),
    ("cumulativity", "while (acquire(flag) != 1)", "while (relaxed(flag) != 1)", "race on x"),
    ("cumulativity", "while (acquire(flag) != 1);\n    __syncthreads();", "while (acquire(flag) != 1);", "race on x"),
    ("cumulativity", "release(flag + 1, 1)", "store(flag + 1, 1)", "race on x"),
    ("cumulativity", "acquire(flag + 1)", "relaxed(flag + 1)", "there is no acquire"),
    ("store buffering", "store(flag + blockIdx.x, 1)", "flag[blockIdx.x] = 1", "race on flag"),
    ("lock", FENCE, "", "race on x"),
    ("lock", BACK, "", "there is no acquire"),
    ("lock", "atomicCAS(", "atomicCAS_block(", "race on flag"),
    ("lock", "atomicExch(flag, 0u)", "*flag = 0", "race on flag"),
    ("queue", "acquire(flag + 1)", "relaxed(flag + 1)", "there is no acquire"),
    ("queue", "release(flag + 1,", "store(flag + 1,", "no release covers it"),
    ("queue", "  __syncthreads();  // all have added\n", "", "no release covers it"),
    ("queue", "atomicAdd(flag, 1)", "atomicAdd_block(flag, 1)", "race on flag"),
    ("look-back", "release(flag + 1 + mine, 1)", "store(flag + 1 + mine, 1)", "race on x"),
    ("look-back", "release(flag + 1 + mine, 2)", "store(flag + 1 + mine, 2)", "race on x"),
    ("look-back", "acquire(flag", "relaxed(flag", "there is no acquire"),
    ("last block", FENCE, "", "race on x"),
    ("last block", BACK, "", "there is no acquire"),
    ("last block", "__syncthreads();\n  if (threadIdx.x == 0) {", "if (threadIdx.x == 0) {", "race on x"),
    ("last block", FENCE, "__threadfence_block();", "released for its own block only"),
    ("grid", FENCE, "", "race on"),
    ("grid", BACK, "", "race on"),
    ("grid", "    meet(flag, 2 * step * gridDim.x);\n", "", "race on x"),
    ("grid", "while (relaxed(count) < goal);", "", "race on"),
    ("flags of warps", "__threadfence_block();  // release", "", "race on"),
    ("flags of warps", "__threadfence_block();  // acquire", "", "race on"),
    ("flags of warps", "__syncwarp();\n    if (threadIdx.x == 0) {", "if (threadIdx.x == 0) {", "race on"),
    ("flags of warps", "    __syncwarp();\n    y[", "    y[", "race on"),
]  # fmt: skip


def run(source, blocks, order="forward"):
    x, flag, y = (np.zeros(512, np.uint32) for _ in range(3))
    simt.compile(source)["k"](blocks, 64, x, flag, y, check_races=True, order=order)
    return x, flag, y


@pytest.mark.parametrize("order", ["forward", "reverse", 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_right(shape, order):
    x, flag, y = run(*SHAPES[shape], order)
    right = {
        "lock": lambda: x[0] == 8,
        "queue": lambda: (x[:64] == 6).all(),
        "look-back": lambda: (y[:6] == np.cumsum(range(6))).all(),
        "last block": lambda: (y[:64] == 4).all(),
        "grid": lambda: (y[:192] == 2 * np.arange(192)[::-1]).all(),
        "flags of warps": lambda: (y[32:64] == np.arange(32, 64) ^ 33).all(),
        "store buffering": lambda: y[0] | y[1],
    }
    assert right.get(shape, lambda: (y[:64] == 7 + (np.arange(64) ^ 32)).all())()


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(("shape", "old", "new", "says"), SPOILT)
def test_spoilt(shape, old, new, says, order):
    source, blocks = SHAPES[shape]
    assert old in source
    with pytest.raises(simt.RaceError, match=says if order == "forward" else "race on"):
        run(source.replace(old, new), blocks, order)


# A ring of asynchronous copies: all warps read each tile that the whole block has brought.
RING = r"""
#include <cuda_pipeline.h>
extern "C" __global__ void k(const float *x, float *y, int tiles) {
  __shared__ float ring[DEPTH][64];
  for (int t = 0; t < DEPTH - 1; t++) {
    if (t < tiles) __pipeline_memcpy_async(&ring[t][threadIdx.x], x + t * 64 + threadIdx.x, 4);
    __pipeline_commit();
  }
  float sum = 0;
  for (int t = 0; t < tiles; t++) {
    int next = t + DEPTH - 1;
    if (DEPTH == 1) __syncthreads();  // before the only place is filled again
    if (next < tiles) __pipeline_memcpy_async(&ring[next % DEPTH][threadIdx.x], x + next * 64 + threadIdx.x, 4);
    __pipeline_commit();
    __pipeline_wait_prior(DEPTH - 1);
    __syncthreads();  // the tile of all
    sum += ring[t % DEPTH][threadIdx.x ^ 32];
    if (DEPTH > 1) __syncthreads();  // before the place is filled again
  }
  y[threadIdx.x] = sum;
}"""


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_ring_filled_again_too_early_is_found_at_any_depth(depth):
    def run(source):
        x, y = np.random.default_rng(depth).random((9, 64), np.float32), np.zeros(64, np.float32)
        simt.compile(source, (f"-DDEPTH={depth}",))["k"](1, 64, x, y, np.int32(9), check_races=True)
        return np.abs(y - x.sum(0)[np.arange(64) ^ 32]).max()

    assert run(RING) < 1e-5
    for line in (
        line for line in RING.splitlines() if "filled again" in line and f"DEPTH {'=' if depth == 1 else '>'}" in line
    ):
        with pytest.raises(simt.RaceError, match="memcpy_async"):
            run(RING.replace(line, ""))
    with pytest.raises(simt.SimtError, match="race|asynchronous copy may not have arrived"):
        run(RING.replace("__syncthreads();  // the tile of all", ""))


# A barrier for a part of the block orders that part, and what it has been told.
PARTS = r"""
__device__ void meet(int n) { asm volatile("bar.sync %0, 64;" :: "r"(n) : "memory"); }
__device__ void come(int n) { asm volatile("bar.arrive %0, 64;" :: "r"(n) : "memory"); }
extern "C" __global__ void k(float *y) {
  __shared__ float s[96];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    s[lane] = lane;
    come(1);
  } else if (warp == 1) {
    meet(1);
    s[32 + lane] = s[lane ^ 1];
    meet(2);
  } else {
    meet(2);
    y[lane] = s[32 + (lane ^ 3)] + s[lane];  // of warp 1, and of warp 0, which warp 1 has met
  }
}"""


def test_barriers_for_a_part_of_the_block():
    def run(*change):
        y = np.zeros(32, np.float32)
        simt.compile(PARTS.replace(*change))["k"](1, 96, y, check_races=True)
        return y

    lane = np.arange(32)
    assert (run("", "") == (lane ^ 2) + lane).all()
    for change in (("    come(1);\n", ""), ("    meet(1);\n", "")):
        with pytest.raises(simt.SimtError, match="race on byte|waits at a barrier|nothing has been written"):
            run(*change)
    with pytest.raises(
        simt.RaceError, match=r"race on byte \d+ of shared memory \(s\)"
    ):  # 2 comes too early to tell of 0
        run(
            "    meet(1);\n    s[32 + lane] = s[lane ^ 1];\n    meet(2);",
            "    s[32 + lane] = 1;\n    meet(2);\n    meet(1);",
        )


def test_no_reader_is_forgotten():
    """Three warps read a place, and the fourth writes it when it has met two of them."""
    source = r"""
    extern "C" __global__ void k(float *y) {
      __shared__ float s;
      if (threadIdx.x == 0) s = 1;
      __syncthreads();
      int warp = threadIdx.x / 32;
      if (warp < 3) y[threadIdx.x] = s;
      if (warp > 0) asm volatile("bar.sync 1, 96;" ::: "memory");
      if (threadIdx.x == 96) s = 2;
    }"""
    with pytest.raises(simt.RaceError, match=r"thread \(\d+, 0, 0\) of block .* reads it"):
        simt.compile(source)["k"](1, 128, np.zeros(96, np.float32), check_races=True)
    everyone = source.replace("warp > 0", "true").replace("1, 96", "1, 128")
    simt.compile(everyone)["k"](1, 128, np.zeros(96, np.float32), check_races=True)


def test_check_races_costs_little():
    """A tiled matmul, by processor time: it took 22 times as long once."""
    source = r"""
    extern "C" __global__ void k(const float *a, const float *b, float *c, int n) {
      __shared__ float s[16][16], t[16][16];
      int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
      float sum = 0;
      for (int i = 0; i < n; i += 16) {
        s[threadIdx.y][threadIdx.x] = row < n && i + threadIdx.x < n ? a[row * n + i + threadIdx.x] : 0;
        t[threadIdx.y][threadIdx.x] = column < n && i + threadIdx.y < n ? b[(i + threadIdx.y) * n + column] : 0;
        __syncthreads();
        for (int j = 0; j < 16; j++) sum += s[threadIdx.y][j] * t[j][threadIdx.x];
        __syncthreads();
      }
      if (row < n && column < n) c[row * n + column] = sum;
    }"""
    n = 100
    a, b = np.random.default_rng(1).random((2, n, n), np.float32)
    c = np.zeros((n, n), np.float32)
    kernel, times = simt.compile(source)["k"], {False: [], True: []}
    for check_races in 4 * (False, True):
        start = time.process_time()
        kernel((7, 7), (16, 16), a, b, c, np.int32(n), check_races=check_races)
        times[check_races].append(time.process_time() - start)  # the least counts: garbage is collected in some launch
    assert np.abs(c - a @ b).max() < 1e-4
    assert min(times[True]) < 5 * min(times[False])
    with pytest.raises(simt.RaceError, match=r"of shared memory \(s\)"):
        simt.compile(source.replace("        __syncthreads();\n      }", "      }"))["k"](
            (7, 7), (16, 16), a, b, c, np.int32(n), check_races=True
        )


def test_a_copy_that_nobody_has_waited_for_is_not_settled_by_a_barrier():
    source = r"""
    #include <cuda_pipeline.h>
    extern "C" __global__ void k(const float *x, float *y) {
      __shared__ float s[64];
      if (threadIdx.x < 32) __pipeline_memcpy_async(&s[threadIdx.x], x + threadIdx.x, 4);
      __syncthreads();
      if (threadIdx.x >= 32) s[threadIdx.x - 32] = 1;
      __pipeline_wait_prior(0);
      __syncthreads();
      y[threadIdx.x] = s[threadIdx.x % 32];
    }"""
    with pytest.raises(simt.RaceError, match="nothing has waited for"):
        simt.compile(source)["k"](1, 64, np.zeros(64, np.float32), np.zeros(64, np.float32), check_races=True)


def test_a_reader_put_aside_does_not_hide_a_later_one():
    """Thread 40 reads x twice; thread 0 writes it behind the first read only."""
    source = r"""
    extern "C" __global__ void k(volatile unsigned *flag, float *x, float *y) {
      if (threadIdx.x == 40) {
        y[0] = x[0];
        __threadfence();
        flag[0] = 1;
        while (flag[1] == 0);
        y[1] = ((volatile float *)x)[0] + x[1];
        flag[2] = 1;
      } else if (threadIdx.x == 0) {
        while (flag[0] == 0);
        __threadfence();
        flag[1] = 1;
        while (flag[2] == 0);
        x[0] = 2;
      }
    }"""
    flag, x, y = np.zeros(3, np.uint32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    with pytest.raises(simt.RaceError, match="race on x"):
        simt.compile(source)["k"](1, 64, flag, x, y, check_races=True)


# Small kernels, each of which a detector could take for its contrary. when() orders nothing: it only makes sure of what
# has happened by then.
MORE = (
    PRELUDE
    + r"""
__device__ unsigned add(unsigned *p, unsigned v) {
  unsigned old; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
__device__ void bar_sync(int n) { asm volatile("bar.sync %0, 64;" :: "r"(n) : "memory"); }
__device__ void bar_arrive(int n) { asm volatile("bar.arrive %0, 64;" :: "r"(n) : "memory"); }
__device__ void some_sync() { asm volatile("barrier.sync 1, 32;" ::: "memory"); }
#define when(flag) while (relaxed(flag) == 0)
extern "C" __global__ void k(unsigned *x, unsigned *flag, unsigned *y) {
  __shared__ __align__(16) unsigned s[64], other[64];
  int t = threadIdx.x, lane = t % 32;
  switch (blockIdx.x) { BLOCKS }
}"""
)
# name, what blocks 0, 1, 2 do, and whether that is right
SMALL = [
    # What one thread releases, another's atomic passes on, and its plain store does not.
    ("an atomic passes a release on", "if (t == 0) { x[0] = 1; release(flag, 1); }",
     "if (t == 0) { when(flag); add(flag, 1); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); y[0] = acquire(flag); y[1] = x[0]; }", True),
    ("a store behind an atomic does not", "if (t == 0) { x[0] = 1; release(flag, 1); }",
     "if (t == 0) { when(flag); add(flag, 1); store(flag, 3); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); y[0] = acquire(flag); y[1] = x[0]; }", False),
    ("a compare-and-swap that fails", "if (t == 0) { x[0] = 1; __threadfence(); y[9] = atomicCAS(flag, 7, 5);"
     " store(flag + 1, 1); }", "if (t == 0) { when(flag + 1); y[0] = acquire(flag); y[1] = x[0]; }", "", False),
    ("a compare-and-swap", "if (t == 0) { x[0] = 1; __threadfence(); y[9] = atomicCAS(flag, 0, 5);"
     " store(flag + 1, 1); }", "if (t == 0) { when(flag + 1); y[0] = acquire(flag); y[1] = x[0]; }", "", True),
    # Strong accesses need no order, so the last one does not stand for those before.
    ("one of two atomics is known", "if (t == 0) { atomicAdd(x, 1); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); atomicAdd(x, 1); release(flag, 1); }",
     "if (t == 0) { while (acquire(flag) == 0); y[0] = x[0]; }", False),
    ("both atomics are known", "if (t == 0) { atomicAdd(x, 1); release(flag + 1, 1); }",
     "if (t == 0) { while (acquire(flag + 1) == 0); atomicAdd(x, 1); release(flag, 1); }",
     "if (t == 0) { while (acquire(flag) == 0); y[0] = x[0]; }", True),
    ("one of two strong stores is known", "if (t == 0) { store(x, 1); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); store(x, 2); release(flag, 1); }",
     "if (t == 0) { while (acquire(flag) == 0); y[0] = x[0]; }", False),
    ("a strong read, then an atomic, then a store", "if (t == 0) { y[0] = relaxed(x); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); atomicAdd(x, 1); release(flag, 1); }",
     "if (t == 0) { while (acquire(flag) == 0); x[0] = 5; }", False),
    ("an ordinary read, then a strong one", "if (t == 0) { y[0] = x[0]; y[1] = relaxed(x); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); store(x, 1); }", "", False),
    ("an ordinary store, then a strong one", "if (t == 0) { x[0] = 0; store(x, 1); store(flag + 1, 1); }",
     "if (t == 0) { when(flag + 1); y[0] = relaxed(x); }", "", False),
    ("atomics in shared memory, and a read", "s[t] = 0; __syncthreads(); atomicAdd(s + t % 2, 1);"
     " if (t == 0) y[0] = s[0];", "", "", False),
    ("atomics in shared memory, a barrier, a read", "s[t] = 0; __syncthreads(); for (int n = 0; n < 3; n++) {"
     " atomicAdd(s + t % 2, 1); __syncthreads(); y[t] = s[t % 2]; __syncthreads(); }", "", "", True),
    # Lanes with addresses in different memories.
    ("a buffer for each lane, and a reader", "unsigned *p = t & 1 ? x : y; p[t] = 1; store(flag + 1, 1);",
     "if (t == 0) when(flag + 1); __syncthreads(); flag[100 + t] = y[t];", "", False),
    ("another buffer than that of the lanes left out", "unsigned *p = lane < 16 ? x : y;"
     " if (lane >= 16) p[t] = 1; store(flag + 1, 1);",
     "if (t == 0) when(flag + 1); __syncthreads(); flag[100 + t] = y[t];", "", False),
    ("a buffer for each lane", "unsigned *p = t & 1 ? x : y; p[t] = 1;",
     "unsigned *p = t & 1 ? y : x; p[t] = 1;", "", True),
    # Threads that have left have no part in what comes.
    ("a thread that has left, and a barrier", "s[t] = t; if (t >= 32) return; __syncthreads(); y[t] = s[t + 32];",
     "", "", False),
    ("a thread that leaves behind the barrier", "s[t] = t; __syncthreads(); if (t >= 32) return; __syncthreads();"
     " y[t] = s[t + 32];", "", "", True),
    ("a reader that has left", "s[t] = t; __syncthreads(); y[t] = s[t ^ 32]; if (t >= 32) return; __syncthreads();"
     " s[t] = 1;", "", "", False),
    ("lanes that have left, and __syncwarp", "s[t] = t; if (lane >= 16) return; __syncwarp(); y[t] = s[t + 16];",
     "", "", False),
    ("lanes that leave behind it", "s[t] = t; __syncwarp(); if (lane >= 16) return; __syncwarp(); y[t] = s[t + 16];",
     "", "", True),
    ("a warp that arrives, stores, and leaves", "if (t < 32) { s[t] = t; bar_arrive(1); other[t] = 1; }"
     " else { bar_sync(1); if (t < 40) y[t] = s[lane]; __syncthreads(); y[t] = other[lane]; }", "", "", False),
    ("a warp that stores, arrives, and leaves", "if (t < 32) { s[t] = t; other[t] = 1; bar_arrive(1); }"
     " else { bar_sync(1); if (t < 40) y[t] = s[lane]; __syncthreads(); y[t] = other[lane]; }", "", "", True),
    ("a warp that stores, arrives, reads, and leaves", "if (t < 32) { s[t] = t; bar_arrive(1); y[t] = s[t]; }"
     " else { bar_sync(1); s[lane] = 1; }", "", "", False),
    ("a warp that stores, reads, arrives, and leaves", "if (t < 32) { s[t] = t; y[t] = s[lane]; bar_arrive(1); }"
     " else { bar_sync(1); s[lane] = 1; }", "", "", True),
    ("blocks that leave, and a barrier of the others", "s[t] = t;", "s[t] = t; __syncthreads(); y[t] = s[t ^ 32];"
     " __syncthreads(); s[t ^ 1] = 1;", "", True),
    ("... that lacks one", "s[t] = t;", "s[t] = t; __syncthreads(); y[t] = s[t ^ 32]; s[t ^ 1] = 1;", "", False),
    # Barriers for some lanes.
    ("barrier.sync of half warps", "s[t] = t; if (lane < 16) { some_sync(); y[t] = s[t ^ 32]; }", "", "", True),
    ("a lane that was not at it", "s[t] = t; if (lane < 16) { some_sync(); y[t] = s[t + 16]; }", "", "", False),
    ("__syncwarp with a mask for each half", "s[t] = t; __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);"
     " y[t] = s[t ^ 15];", "", "", True),
    ("across the halves", "s[t] = t; __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);"
     " y[t] = s[t ^ 16];", "", "", False),
    ("a shuffle", "s[t] = t; y[t] = s[__shfl_xor_sync(~0u, t, 1)];", "", "", False),
    # Asynchronous copies.
    ("a copy's own thread stores there", "__pipeline_memcpy_async(s + t, x + t, 4); s[t] = 5;"
     " __pipeline_commit(); __pipeline_wait_prior(0); y[t] = s[t];", "", "", False),
    ("two copies to one place", "__pipeline_memcpy_async(s + t, x + t, 4);"
     " __pipeline_memcpy_async(s + t, x + t + 64, 4); __pipeline_commit(); __pipeline_wait_prior(0); y[t] = s[t];",
     "", "", False),
    ("a store to what a copy reads", "__pipeline_memcpy_async(s + t, x + t, 4); __pipeline_commit(); __syncthreads();"
     " x[t ^ 32] = 1; __pipeline_wait_prior(0); y[t] = s[t];", "", "", False),
    ("its own thread's", "__pipeline_memcpy_async(s + t, x + t, 4); __pipeline_commit(); x[t] = 1;"
     " __pipeline_wait_prior(0); y[t] = s[t];", "", "", False),
    ("a store behind the wait", "__pipeline_memcpy_async(s + t, x + t, 4); __pipeline_commit();"
     " __pipeline_wait_prior(0); __syncthreads(); x[t ^ 32] = s[t]; y[t] = s[t ^ 1];", "", "", True),
    # What is put aside.
    ("each thread its own element", "for (int n = 0; n < 4; n++) x[t] += n;",
     "x[64 + t] = x[64 + t] * 2 + 1;", "", True),
    ("columns between columns", "for (int n = 0; n < 9; n++) x[32 * n + t / 2 * 2 % 32] = x[32 * n + t / 2 * 2 % 32];",
     "for (int n = 0; n < 9; n++) x[32 * n + t / 2 * 2 % 32 + 1] = n;", "", True),
    ("columns that meet", "for (int n = 0; n < 9; n++) x[32 * n + t / 2 * 2 % 32] = n;",
     "for (int n = 0; n < 9; n++) x[32 * n + t / 2 * 2 % 32 + (n < 8)] = n + 1;", "", False),
    ("an element of another column", "for (int n = 0; n < 9; n++) if (t < 16) x[32 * n + 2 * t] = n;",
     "for (int n = 0; n < 9; n++) if (t < 16) x[32 * n + 2 * t + 1] = n; if (t == 3) y[0] = x[70];", "", False),
    ("own elements, then a neighbour's", "x[t] += 1; x[t] += 2; y[t] = x[t ^ 1];", "", "", False),
    ("bytes in a word", "((unsigned char *)x)[4 * t + 1] = 1;", "y[t] = x[t];", "", False),
    ("bytes beside each other", "((unsigned char *)x)[4 * t + 1] = 1;",
     "((unsigned char *)x)[4 * t + 2] = 1;", "", True),
]  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(("blocks", "right"), [pytest.param(c[1:4], c[4], id=c[0]) for c in SMALL])
def test_small(blocks, right, order):
    cases = "".join(f"case {n}: {{ {does} }} break;\n" for n, does in enumerate(blocks))
    source = "#include <cuda_pipeline.h>\n" + MORE.replace("BLOCKS", cases)
    if right:
        run(source, sum(map(bool, blocks)), order)
    else:
        with pytest.raises(simt.RaceError):
            run(source, sum(map(bool, blocks)), order)


GROUPS = r"""
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
extern "C" __global__ void tiles(unsigned *y, int across) {
  __shared__ unsigned s[64];
  auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  s[threadIdx.x] = threadIdx.x;
  tile.sync();
  y[threadIdx.x] = s[threadIdx.x ^ across];
}
extern "C" __global__ void copies(const unsigned *x, unsigned *y, bool waits) {
  __shared__ cuda::barrier<cuda::thread_scope_block> bar;
  __shared__ alignas(16) unsigned s[64];
  if (threadIdx.x == 0) init(&bar, 64);
  __syncthreads();
  for (int n = 0; n < 3; n++) {
    cuda::memcpy_async(s + threadIdx.x, x + 64 * n + threadIdx.x, 4, bar);
    bar.arrive_and_wait();
    y[threadIdx.x] += s[threadIdx.x ^ 32];
    if (waits) bar.arrive_and_wait();
  }
}
extern "C" __global__ void ring(const unsigned *x, unsigned *y, bool early) {
  __shared__ alignas(16) unsigned s[2][64];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  auto pipe = cuda::make_pipeline(cg::this_thread_block(), &state);
  for (int i = 0, n = 0; i < 5; i++) {
    for (; n < 5 && n < i + 2; n++) {
      pipe.producer_acquire();
      cuda::memcpy_async(s[n % 2] + threadIdx.x, x + 64 * n + threadIdx.x, 4, pipe);
      pipe.producer_commit();
    }
    pipe.consumer_wait();
    if (early) pipe.consumer_release();
    y[threadIdx.x] += s[i % 2][threadIdx.x ^ 32];
    if (!early) pipe.consumer_release();
  }
}
"""


def test_groups_and_mbarriers_of_the_cuda_headers():
    module = simt.compile(GROUPS)
    x, y = np.arange(320, dtype=np.uint32), np.zeros(64, np.uint32)
    module["tiles"](1, 64, y, np.int32(15), check_races=True)
    assert (y == np.arange(64) ^ 15).all()
    with pytest.raises(simt.RaceError, match="both are in one warp"):
        module["tiles"](1, 64, y, np.int32(16), check_races=True)
    for kernel, right, tiles in ("copies", True, 3), ("ring", False, 5):
        y[:] = 0
        module[kernel](1, 64, x, y, np.bool_(right), check_races=True)
        assert (y == x.reshape(5, 64)[:tiles].sum(0)[np.arange(64) ^ 32]).all()
        with pytest.raises(simt.RaceError, match=r"shared memory \(s\)"):
            module[kernel](1, 64, x, y, np.bool_(not right), check_races=True)


def test_a_variable_called_like_an_argument():
    source = r"""
    __device__ unsigned x[64];
    __device__ unsigned *own() { return x; }
    extern "C" __global__ void k(unsigned *x) {
      if (blockIdx.x == 0) x[threadIdx.x] = 1; else own()[threadIdx.x / WIDE] = threadIdx.x;
    }"""
    simt.compile(source, ("-DWIDE=1",))["k"](2, 64, np.zeros(64, np.uint32), check_races=True)
    with pytest.raises(simt.RaceError, match=r"race on ::x\[0\]"):
        simt.compile(source, ("-DWIDE=2",))["k"](2, 64, np.zeros(64, np.uint32), check_races=True)


# What a barrier settles in global memory: each block has a row of x to itself, on which it works in place, and what it
# did before a barrier is in order for its own threads, for nobody else.
STEP = "v = row[t] + row[t ? t - 1 : 0]; __syncthreads(); row[t] = v; __syncthreads();"
STEPS = f"for (int n = 0; n < 3; n++) {{ {STEP} }}"
TELL = "__syncthreads(); if (t == 0) release(flag + b, 1);"
HEAR = "if (t == 0) while (acquire(flag + 1 - b) != 1); __syncthreads();"
ROWS = [  # (what, what the blocks do, is it right)
    ("steps", STEPS, True),
    ("steps of a part of the threads", STEPS.replace("row[t] = v", "if (t > 0 && t < 63) row[t] = v"), True),
    ("as many steps as the block's number", STEPS.replace("n < 3", "n < 2 + 3 * b"), True),
    ("a neighbour's, behind a barrier", STEPS + "v = row[t ^ 33];", True),
    ("a step that lacks the first barrier", STEPS + STEP.replace("__syncthreads(); row", "row"), False),
    ("steps that lack the last barrier", STEPS.replace("v; __syncthreads();", "v;"), False),
    ("blocks that share what they only read", STEPS.replace("row[t] +", "row[t] + x[192 + t] + x[200] +"), True),
    ("one that writes it", STEPS.replace("row[t] +", "row[t] + x[192 + t] +") + "if (b) x[200] = 1;", False),
    ("stores over stores", "for (int n = 0; n < 2; n++) { row[t] = n; __syncthreads(); row[t ^ 1] = n;"
     " __syncthreads(); }", True),
    # Another block.
    ("another block's row", STEPS + "v = other[t];", False),
    ("a store to another block's row", STEPS + "if (t == 9) other[40] = 1;", False),
    ("one byte there", STEPS + "if (b && t == 9) ((unsigned char *)other)[3] = 1;", False),
    ("an atomic there", STEPS + "if (b && t == 9) atomicAdd(other + 3, 1);", False),
    ("by another pointer", STEPS + "if (b == 0 && t == 9) same[3] = 1;", False),
    ("another block has been told", STEPS + TELL + HEAR + "v = other[t ^ 7];", True),
    ("... and has written there", STEPS + TELL + HEAR
     + "if (b) { other[t ^ 7] = 1; __syncthreads(); v = other[t]; }", True),
    ("... and so has the first", STEPS + TELL + HEAR + "if (b) other[t ^ 7] = 1; else row[t] = 2;", False),
    ("told before the last step", STEPS + TELL + STEP + HEAR + "v = other[t];", False),
    ("told before a last store", STEPS + TELL + "if (t < 32) row[t + 32] = 1; __syncthreads(); if (t == 0) v = row[40];"
     + HEAR + "if (t == 50) v = other[t];", False),
    ("told before a last load", STEPS + TELL + "v = row[t ^ 1];" + HEAR + "other[t] = 1;", False),
    ("stores over stores, told between", "row[t] = 1; __syncthreads(); row[t ^ 1] = 2;" + TELL + "if (t < 32)"
     " row[t + 16] = 3; __syncthreads(); if (t < 32) row[2 * t] = 4; __syncthreads();" + HEAR
     + "if (t == 0) v = other[17];", False),
    ("stores that reach further, told between", "row = x + 256 * b; row[t] = 1;" + TELL + "row[t + 32] = 2;"
     " __syncthreads(); if (t == 0) atomicAdd(row + 90, 1);" + HEAR + "if (b && t == 0) v = x[40];", False),
    ("a word that both have read and one writes", STEPS + "if (b == 0) v = x[200]; __syncthreads(); if (b) v = x[200];"
     " __syncthreads(); if (b == 0 && t == 0) x[200] = 1;", False),
    ("a store where the other has only read", STEPS + "v = x[256 + 64 * b + t]; __syncthreads();"
     " if (t == 9) x[256 + 64 * (1 - b) + 40] = 1;", False),
    ("all store one value by one line", "for (int n = 0; n < 3; n++) {" + STEP + "x[200] = 7; }", True),
    ("a byte of a word, and by another block the word as it is now", "row[t] = 7; __syncthreads();"
     " ((unsigned char *)row)[4 * t] = 5; __syncthreads(); if (b) other[t] = 5;", False),
    ("another block's byte in a word that both have stored to", STEPS + "((unsigned char *)x)[2048 + 2 * t + b] = 1;"
     " __syncthreads(); if (b) v = ((unsigned char *)x)[2048 + 2 * (t ^ 1)];", False),
    # A part of the threads.
    ("a barrier of a warp, and its own", STEPS + "row[t] = 1; warps_sync(); v = row[t ^ 31];", True),
    ("... and the other warp's", STEPS + "row[t] = 1; warps_sync(); v = row[t ^ 32];", False),
    ("... which was at no other", STEPS + "if (t < 32) { row[t] = 1; warps_sync(); row[t ^ 1] = 2; warps_sync(); }"
     " else v = row[t - 32];", False),
    ("threads that have stored and left", STEPS + "if (t >= 32) { row[t] = 1; return; } __syncthreads();"
     " v = row[t + 32];", False),
    ("... and left behind a barrier", STEPS + "row[t] = 1; __syncthreads(); if (t >= 32) return; v = row[t + 32];"
     " __syncthreads(); row[t + 32] = v; __syncthreads(); v = row[31 - t + 32];", True),
    ("threads that have read and left", STEPS + "if (t >= 32) { same[800 + t] = row[t - 32]; return; } __syncthreads();"
     " row[t] = 1;", False),
    ("... before the first step", "if (t >= 32) { row[t] = row[t - 32]; return; } __syncthreads();"
     " row[t] = 1; __syncthreads(); v = row[t ^ 1];", False),
    ("threads that leave at once", "if (t >= 32) return;" + STEPS, True),
    ("a block that leaves", "if (b == 0) return;" + STEPS, True),
    ("... with a row that the other reads", "row[t] = 1; if (b == 0) return; " + STEPS + "v = other[t];", False),
    # Words in part, and other kinds of access.
    ("bytes of neighbours' words", STEPS + "((unsigned char *)row)[4 * t + 1] = 1; __syncthreads();"
     " v = row[t ^ 1];", True),
    ("... without a barrier", STEPS + "((unsigned char *)row)[4 * t + 1] = 1; v = row[t ^ 1];", False),
    ("a byte of each of two threads", STEPS + "((unsigned char *)row)[t] = 1; __syncthreads();"
     " ((unsigned char *)row)[63 - t] = 2;", True),
    ("a byte of two threads", STEPS + "((unsigned char *)row)[t] = 1; ((unsigned char *)row)[63 - t] = 2;", False),
    ("bytes of a word that blocks share", "for (int n = 0; n < 3; n++) { ((unsigned char *)x)[2 * t + b] = n;"
     " __syncthreads(); v += ((unsigned char *)x)[2 * (t ^ 1) + b]; __syncthreads(); }", True),
    ("... and meet in", "for (int n = 0; n < 3; n++) { ((unsigned char *)x)[2 * t + b] = n;"
     " __syncthreads(); v += ((unsigned char *)x)[2 * (t ^ 1)]; __syncthreads(); }", False),
    ("atomics behind a barrier", STEPS + "atomicAdd(row + (t ^ 5), 1); __syncthreads(); v = row[t];" + STEPS, True),
    ("... and without", STEPS + "atomicAdd(row + (t ^ 5), 1); v = row[t];", False),
    ("atomics, and a load before", STEPS + "v = row[t]; atomicAdd(row + (t ^ 5), v);", False),
    ("volatile behind a barrier", STEPS + "((volatile unsigned *)row)[t ^ 5] = 1;" + STEP + STEPS, False),
    ("a copy that reads", STEPS + "__pipeline_memcpy_async(s + t, row + t, 4); __pipeline_commit(); __syncthreads();"
     " row[t ^ 32] = 1; __pipeline_wait_prior(0);", False),
    ("... and has been waited for", STEPS + "__pipeline_memcpy_async(s + t, row + t, 4); __pipeline_commit();"
     " __pipeline_wait_prior(0); __syncthreads(); row[t ^ 32] = s[t];", True),
    ("a copy of what a neighbour has stored", STEPS + "row[t] = 1; __pipeline_memcpy_async(s + t, row + (t ^ 1), 4);"
     " __pipeline_commit(); __pipeline_wait_prior(0);", False),
]  # fmt: skip
ROW = """
extern "C" __global__ void k%d(unsigned *x, unsigned *same, unsigned *flag) {
  __shared__ unsigned s[64];
  unsigned t = threadIdx.x, b = blockIdx.x, v = 0, *row = x + 64 * b, *other = x + 64 * (1 - b);
  { %s }
  flag[64 + 64 * b + t] = v + s[0] * 0;
}"""


@pytest.fixture(scope="module")
def rows():
    sync = '__device__ void warps_sync() { if (threadIdx.x < 32) asm volatile("bar.sync 1, 32;" ::: "memory");'
    sync += ' else asm volatile("bar.sync 2, 32;" ::: "memory"); }'
    kernels = "".join(ROW % (n, does) for n, (_, does, _) in enumerate(ROWS)).replace(" + s[0] * 0", "")
    return simt.compile("#include <cuda_pipeline.h>\n" + PRELUDE + sync + kernels)


@pytest.mark.parametrize("together", [2, 1])
@pytest.mark.parametrize("number", [pytest.param(n, id=row[0]) for n, row in enumerate(ROWS)])
def test_rows(rows, number, together, monkeypatch):
    """together: how many blocks the machine takes at a time."""
    monkeypatch.setattr(scheduler, "PART", 64 * together)
    kernel = rows[f"k{number}"]
    for order in "forward", "reverse":
        x = np.zeros(1024, np.uint32)
        arguments = x, x[64:], np.zeros(256, np.uint32)  # `same` is row 1
        if ROWS[number][2]:
            kernel(2, 64, *arguments, check_races=True, order=order)
        else:
            with pytest.raises(simt.RaceError):
                kernel(2, 64, *arguments, check_races=True, order=order)


def test_what_a_barrier_has_settled_is_not_looked_at_again(rows, monkeypatch):
    """The steps of a stencil in place cost no look at single bytes: that would take six times as long."""
    looked = []
    access = Races.access
    monkeypatch.setattr(Races, "access", lambda self, *given: looked.append(given) or access(self, *given))
    for name in "steps", "steps of a part of the threads", "a block that leaves":
        rows[f"k{[row[0] for row in ROWS].index(name)}"](
            2, 64, np.zeros(1024, np.uint32), np.zeros(1024, np.uint32), np.zeros(256, np.uint32), check_races=True
        )
        assert not looked, name


# Two blocks touch the same 8 bytes, with no order between them.
TWO = """extern "C" __global__ void k(unsigned *x, unsigned long long *y) {
  if (blockIdx.x == 0) { FIRST; } else { SECOND; }
}"""


@pytest.mark.parametrize(
    "second, races",
    [
        ('asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(x), "r"(2))', False),
        ('asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(x), "l"(2ull))', True),  # of another size
        ('asm volatile("st.relaxed.cta.global.u32 [%0], %1;" :: "l"(x), "r"(2))', True),  # for its own block alone
        ("*x = 2", True),
        ('unsigned v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(x)); y[1] = v', False),
        (
            'unsigned long long v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(x)); y[1] = v',
            True,
        ),
        ("y[1] = *x", True),
    ],
)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_strong_accesses_need_no_order_where_size_and_scope_agree(second, races, order):
    first = 'asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(x), "r"(1))'
    kernel = simt.compile(TWO.replace("FIRST", first).replace("SECOND", second))["k"]
    arguments = np.zeros(2, np.uint32), np.zeros(2, np.uint64)
    if races:
        with pytest.raises(simt.RaceError):
            kernel(2, 1, *arguments, check_races=True, order=order)
    else:
        kernel(2, 1, *arguments, check_races=True, order=order)


def test_what_is_sorted_anew_is_found_by_kind():
    """Strong accesses that came since somebody looked, sorted with those before: stores are asked for, of all kinds."""
    shadow, zero = Shadow(4), np.zeros(1, np.int64)
    shadow.reserve(1)
    found = []
    for event, kind in enumerate([(True, 2, 4, 1), (False, 2, 4, 2), (True, 2, 4, 1), (True, 2, 4, 3)], 1):
        shadow.note_strong(zero, zero, zero + event, 4, event, kind, nothing_stale)
        shadow.log.sort(shadow, nothing_stale)
        found.append(sorted(shadow.strong_ones(zero, nothing_stale, lambda kind: kind[0])[2].tolist()))
    assert found == [[1], [1], [1, 3], [1, 3, 4]]
