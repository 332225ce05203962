"""What CUDA's headers bring beside arithmetic, on the SIMT machine: groups, pipelines, atomics on vectors."""

import numpy as np
import pytest
from cooperative_kernels import TURNS, turned

import simt

F32, I32 = np.float32, np.int32

SOURCE = r"""
#include <cuda/barrier>
#include <cuda/pipeline>
extern "C" __global__ void add(float2* pairs, float4* four, float4* old, int n) {
    int i = threadIdx.x;
    if (i < n) {
        atomicAdd(pairs + i % 2, make_float2(i, 1));
        old[i] = atomicAdd(four, make_float4(1, 2, 3, 4));
    }
}
extern "C" __global__ void ring(const float* x, float* y, int n, bool waits) {  // all fetch, all use
    __shared__ float tile[3][128];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 3> state;
    auto block = cooperative_groups::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    for (int i = 0, ahead = 0; i < n; i++) {
        for (; ahead < n && ahead < i + 3; ahead++) {
            pipe.producer_acquire();
            cuda::memcpy_async(block, tile[ahead % 3], x + ahead * 128, cuda::aligned_size_t<16>(512), pipe);
            pipe.producer_commit();
        }
        if (waits) pipe.consumer_wait();
        y[i * 128 + threadIdx.x] = tile[i % 3][127 - threadIdx.x];
        pipe.consumer_release();
    }
}
extern "C" __global__ void roles(const float* x, float* y, int n) {  // half of the block fetches, half uses
    __shared__ float tile[3][64];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 3> state;
    auto pipe = cuda::make_pipeline(cooperative_groups::this_thread_block(), &state, 64);
    int t = threadIdx.x % 64;
    for (int i = 0; i < n; i++) {
        if (threadIdx.x < 64) {
            pipe.producer_acquire();
            cuda::memcpy_async(&tile[i % 3][t], x + i * 64 + t, 4, pipe);
            pipe.producer_commit();
        } else {
            pipe.consumer_wait();
            y[i * 64 + t] = tile[i % 3][63 - t];
            pipe.consumer_release();
        }
    }
}
extern "C" __global__ void barrier(const float* x, float* y) {
    __shared__ float tile[128];
    __shared__ cuda::barrier<cuda::thread_scope_block> ready;
    if (threadIdx.x == 0) init(&ready, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(tile + threadIdx.x, x + threadIdx.x, 4, ready);
    ready.arrive_and_wait();
    y[threadIdx.x] = tile[127 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def module():
    return simt.compile(TURNS + SOURCE)


def test_blocks_wait_for_each_other(module):
    turns = module["turns"]
    a, b = np.zeros((2, 600 * 128), I32)
    turns(600, 128, a, b, I32(3))  # three parts of the machine's
    assert (a == turned(600 * 128, 3)).all()
    small, other = np.zeros((2, 96), I32)
    with pytest.raises(simt.Deadlock, match="has not begun"):
        turns(3, 32, small, other, I32(1), places=2)
    turns(3, 32, small, other, I32(1), check_races=True)  # what the failed launch left does not count
    assert (small == turned(96, 1)).all()


def test_atomics_on_vectors(module):
    add, old = module["add"], np.zeros((64, 4), F32)
    pairs, four = np.zeros((2, 2), F32), np.zeros(4, F32)
    report = add(1, 64, pairs, four, old, I32(40))
    assert pairs.tolist() == [[380, 20], [400, 20]] and four.tolist() == [40, 80, 120, 160]
    assert (old[:40, 0] == np.arange(40)).all() and (old[:40, 3] == 4 * old[:40, 0]).all()
    assert report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum"] == 2
    assert report.counters["l1tex__t_requests_pipe_lsu_mem_global_op_red.sum"] == 2
    with pytest.raises(simt.MemoryFault, match=r"pairs\[0\] on: 8 bytes at once must start at a multiple of 8"):
        add(1, 64, simt.Buffer(pairs, 4), four, old, I32(40))
    with pytest.raises(simt.MemoryFault, match=r"16 bytes from four\[0\] on, but four has 2 elements"):
        add(1, 64, pairs, four[:2], old, I32(40))


def test_copies_that_an_mbarrier_counts(module):
    x = np.arange(128 * 7, dtype=F32)
    for name, width, given in ("ring", 128, (I32(7), np.True_)), ("roles", 64, (I32(14),)), ("barrier", 128, ()):
        y = np.zeros_like(x)
        module[name](1, 128, x, y, *given)
        wanted = x.reshape(-1, width)[:, ::-1].reshape(-1)
        assert (y == wanted)[: 128 if name == "barrier" else None].all(), name
        module[name](1, 128, x, y, *given, check_races=True)
    with pytest.raises(simt.MemoryFault, match="an asynchronous copy may not have arrived: nothing has waited for it"):
        module["ring"](1, 128, x, np.zeros_like(x), I32(7), np.False_)


VARIABLES = """
struct Pair { int a; float b; };
__constant__ float weights[4];
__constant__ double scale = 2;
__constant__ Pair pair;
__device__ int count = 5;
__device__ const float* first = weights;
extern "C" __global__ void k(float* y) {
    y[threadIdx.x] = weights[threadIdx.x % 4] * scale + pair.a * pair.b + *first;
    if (threadIdx.x == 0) count += 3;
}"""


def test_variables_are_filled_from_python():
    module, y = simt.compile(VARIABLES), np.zeros(8, F32)
    weights = np.arange(1, 5, dtype=F32)
    assert module.get("count", I32).tolist() == [5] and module.get("scale", float).tolist() == [2]
    module.set("weights", weights)
    module.set("pair", np.array([(3, 0.5)], [("a", I32), ("b", F32)]))
    module["k"](1, 8, y)
    assert (y == np.tile(2 * weights, 2) + 2.5).all() and module.get("count", I32).tolist() == [8]
    module.set("scale", np.float64(3))
    weights[:] = 0  # the variable has its own copy
    module["k"](1, 8, y)
    assert (y[:4] == [5.5, 8.5, 11.5, 14.5]).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weights", np.zeros(4), r"weights has 16 bytes; got 32, an array of float64 and shape \(4,\)"),
        ("weight", np.zeros(4, F32), "no variable 'weight'; it has weights, scale, pair, count, first"),
        ("weights", [1, 2, 3, 4], r"weights takes a NumPy array or scalar; got list \[1, 2, 3, 4\]"),
        ("first", np.zeros(1, np.uint64), "first holds addresses"),
        ("k", np.zeros(1), "no variable 'k'"),
    ],
)
def test_variables_that_cannot_be_filled(name, value, message):
    with pytest.raises(simt.LaunchError, match=message):
        simt.compile(VARIABLES).set(name, value)


CUB = r"""
#include <cub/cub.cuh>
struct Less { __device__ bool operator()(int a, int b) const { return a < b; } };
struct Differ { __device__ bool operator()(int a, int b) const { return a != b; } };
struct Total {
    int before;
    __device__ int operator()(int sum) { int old = before; before += sum; return old; }
};
__global__ void primitives(const int* x, int* y, float* keys) {  // 128 threads, 4 items each
    using Load = cub::BlockLoad<int, 128, 4, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
    using Merge = cub::BlockMergeSort<int, 128, 4>;
    using Heads = cub::BlockDiscontinuity<int, 128>;
    using Scan = cub::BlockScan<int, 128, cub::BLOCK_SCAN_WARP_SCANS>;
    using Exchange = cub::BlockExchange<int, 128, 4>;
    using Sort = cub::BlockRadixSort<float, 128, 4, int>;
    __shared__ union {
        Load::TempStorage load;
        Merge::TempStorage merge;
        Heads::TempStorage heads;
        Scan::TempStorage scan;
        Exchange::TempStorage exchange;
        Sort::TempStorage sort;
    } s;
    int v[4], heads[4], t = threadIdx.x;
    float k[4];
    Load(s.load).Load(x, v);
    for (int i = 0; i < 4; i++) k[i] = keys[4 * t + i];
    __syncthreads();
    Sort(s.sort).SortDescending(k, v);  // values go with their keys
    for (int i = 0; i < 4; i++) keys[4 * t + i] = k[i], y[4 * t + i] = v[i];
    __syncthreads();
    Merge(s.merge).Sort(v, Less());
    for (int i = 0; i < 4; i++) y[512 + 4 * t + i] = v[i];
    __syncthreads();
    Heads(s.heads).FlagHeads(heads, v, Differ());
    __syncthreads();
    Total total = {100};
    Scan(s.scan).InclusiveSum(heads, heads, total);
    __syncthreads();
    Exchange(s.exchange).BlockedToStriped(heads, heads);
    for (int i = 0; i < 4; i++) y[1024 + i * 128 + t] = heads[i];
}
__global__ void sums(const int* x, int* y) {  // 8 x 8 threads
    using Reduce = cub::BlockReduce<int, 8, cub::BLOCK_REDUCE_RAKING, 8>;
    using Warp = cub::WarpReduce<int>;
    __shared__ Reduce::TempStorage s;
    __shared__ Warp::TempStorage w[2];
    int t = threadIdx.y * 8 + threadIdx.x, most = Reduce(s).Reduce(x[t], cub::Max());
    if (t == 0) y[0] = most;
    int head = Warp(w[t / 32]).HeadSegmentedSum(x[t], t % 5 == 0);
    if (t % 5 == 0 || t == 32) y[1 + t] = head;
}
"""


def test_cub_in_blocks_and_warps():
    random = np.random.default_rng(5)
    x, keys = random.integers(-50, 50, 512, I32), random.standard_normal(512).astype(F32)
    y, sorted_keys, module = np.full(3 * 512, -1, I32), keys.copy(), simt.compile(CUB)
    module["primitives"](1, 128, x, y, sorted_keys, check_races=True)
    order = np.argsort(-keys, kind="stable")
    assert (sorted_keys == keys[order]).all() and (y[:512] == x[order]).all()
    assert (y[512:1024] == np.sort(x)).all()
    assert (y[1024:] == 100 + np.cumsum(np.diff(np.sort(x), prepend=-99) != 0)).all()
    y = np.zeros(65, I32)
    module["sums"](1, (8, 8), x, y, check_races=True)
    assert y[0] == x[:64].max()
    for t in range(64):
        if t % 5 == 0:
            assert y[1 + t] == x[t : min(t + 5, 32 if t < 32 else 64)].sum()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tex2D<float>(image, 1, 2)", "tex.2d.*there are no textures: pass the array"),
        ("surf2Dread<float>(image, 1, 2)", "suld.*there are no surfaces"),
    ],
)
def test_textures_are_refused(line, message):
    module = simt.compile("__global__ void k(float* y, unsigned long long image) { y[threadIdx.x] = " + line + "; }")
    with pytest.raises(simt.Unsupported, match=f"(?s)line 1 .*{message}"):
        module["k"](1, 32, np.zeros(32, F32), np.uint64(0))
