"""Launching CUDA C++ on a card: right results on the right stream, little host time, and errors before the launch."""

import threading
import time

import numpy as np
import pytest
import torch
from cooperative_kernels import TURNS, turned

from lab import cuda, cuda_driver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a CUDA GPU")

hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)

SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <stdint.h>

extern "C" __global__ void scale(const float* x, float* y, int n, float by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}
extern "C" __global__ void scale_half(const half* x, half* y, int64_t n, half by) {
  int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}
extern "C" __global__ void scale_bf16(const __nv_bfloat16* x, __nv_bfloat16* y, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2bfloat16(__bfloat162float(x[i]) * 2);
}
struct Pair { double a; int b; };
extern "C" __global__ void all_kinds(double* out, char c, short s, int i, long long l, bool t, float f, double d,
                                     Pair p, const float* absent) {
  out[0] = c; out[1] = s; out[2] = i; out[3] = (double)l; out[4] = t; out[5] = f; out[6] = d;
  out[7] = p.a; out[8] = p.b; out[9] = absent == nullptr;
}
extern "C" __global__ void reverse(float* x) {  // through dynamic shared memory, one block
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < SIZE; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < SIZE; i += blockDim.x) x[i] = tile[SIZE - 1 - i];
}
extern "C" __global__ void __launch_bounds__(64) bounded(float* x) { x[threadIdx.x] = 1; }
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void first(int* x) {
  asm volatile("griddepcontrol.launch_dependents;");
  long long start = clock64();
  while (clock64() - start < 2000000) {}
  x[0] = 41;
}
extern "C" __global__ void second(int* x) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  x[0] += 1;
}
__device__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
extern "C" __global__ void slow(unsigned long long* t) {
  asm volatile("griddepcontrol.launch_dependents;");
  long long start = clock64();
  while (clock64() - start < 2000000) {}
  t[0] = now();
}
extern "C" __global__ void early(unsigned long long* t) { t[1] = now(); }  // does not wait
extern "C" __global__ void ranks(unsigned* out) {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  out[blockIdx.x] = rank;
}
#endif
extern "C" __global__ void nothing(const float* w, const float* x, const float* b, float* y, int rows, int cols) {}
extern "C" __global__ void grid3(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0) out[block] = blockDim.x * 100 + blockDim.y * 10 + blockDim.z;
}
"""
BOUNDED = 'extern "C" __global__ void __launch_bounds__(64) bounded(float* x) { x[threadIdx.x] = 1; }'
SIZE = 50_000  # floats: 200 KB of shared memory


@pytest.fixture(scope="module")
def module():
    return cuda.compile(SOURCE, (f"-DSIZE={SIZE}",), name="launch.cu")


def numbers(n, dtype=torch.float32):
    return torch.randn(n, device="cuda").to(dtype)


# Results


@pytest.mark.parametrize("n", [1, 31, 1000, 100_003])
def test_scale(module, n):
    x, y = numbers(n), torch.full((n,), float("nan"), device="cuda")
    assert module.scale(-(-n // 128), 128, x, y, n, 2.5) is None
    assert torch.equal(y, x * 2.5)
    module["scale"]((-(-n // 128),), (128, 1, 1), x, y, np.int32(n), np.float32(-1))
    assert torch.equal(y, -x)


def test_sixteen_bits(module):
    x = numbers(999, torch.float16)
    y = torch.empty_like(x)
    module.scale_half(8, 128, x, y, 999, np.float16(0.5))
    assert torch.equal(y, x * 0.5)
    x = numbers(999, torch.bfloat16)
    y = torch.empty_like(x)
    module.scale_bf16(8, 128, x, y, 999)
    assert torch.equal(y, x * 2)


def test_every_kind_of_argument(module):
    out = torch.zeros(10, dtype=torch.float64, device="cuda")
    pair = np.void((1.25, -7, 0), dtype=[("a", "f8"), ("b", "i4"), ("tail", "i4")])
    module.all_kinds(1, 1, out, -3, -300, -70_000, -(2**40), True, 0.1, 0.1, pair, None)
    assert out.tolist() == [-3, -300, -70_000, -(2**40), 1, np.float32(0.1), 0.1, 1.25, -7, 1]
    module.all_kinds(
        1, 1, out, 3, 300, np.int32(2**31 - 1), np.int64(2**40), False, np.float32(3), 4, pair, out.float()
    )
    assert out.tolist() == [3, 300, 2**31 - 1, 2**40, 0, 3, 4, 1.25, -7, 0]
    module.all_kinds(1, 1, out, -1, -1, -2, -3, np.True_, float("inf"), np.float64(2), pair, None)
    assert out.tolist() == [-1, -1, -2, -3, 1, float("inf"), 2, 1.25, -7, 1]
    with pytest.raises(ValueError, match="s = 65535 does not fit in 16 bits"):
        module.all_kinds(1, 1, out, 1, 65535, 1, 1, True, 1.0, 1.0, pair, None)


def test_unchecked(module):
    x, n = numbers(64), 64
    for by in (2.0, 3.0, -0.5):  # the first is checked, whatever is said
        y = torch.full((n,), float("nan"), device="cuda")
        assert module.scale.unchecked(2, 32, x, y, n, by) is None
        assert torch.equal(y, x * by)
    y.zero_()
    for args, kind, said in [
        ((x, y, 2**32, 1.0), ValueError, "n = 4294967296 does not fit in 32 bits"),
        ((x, y, n, 1e39), ValueError, r"by = 1e\+39 does not fit in 32 bits"),
        ((x, y, n), TypeError, "takes 4 arguments after grid and block"),
        ((x, y, 8.0, 1.0), TypeError, "n must be an int .*, got float 8.0"),
        ((x, [1], n, 1.0), TypeError, "y must be a tensor .*, got list"),
        ((x, y, x, 1.0), TypeError, "n must be an int .*, got a tensor"),
        ((x.cpu(), y, n, 1.0), ValueError, "y must be on cpu, like x, got a tensor on cuda:0"),
    ]:
        with pytest.raises(kind, match=said):
            module.scale.unchecked(2, 32, *args)
    assert not y.any()
    with pytest.raises(ValueError, match="compiled for at most 64 threads per block"):
        module.bounded.unchecked(1, 65, x)
    module.scale.unchecked([2], [32], x, torch.nn.Parameter(y), n, np.float32(4))
    assert torch.equal(y, x * 4)


def test_three_dimensions(module):
    out = torch.zeros(5 * 3 * 2, dtype=torch.uint32, device="cuda")
    module.grid3((5, 3, 2), (4, 2, 8), out)
    assert set(out.tolist()) == {428}


def test_misaligned_view(module):
    whole = numbers(1000)
    x, y = whole[1:514], torch.zeros(700, device="cuda")[3:516]
    module.scale(5, 128, x, y, 513, 3.0)
    assert torch.equal(y, x * 3)


def test_much_shared_memory(module):
    x = numbers(SIZE)
    wanted = x.flip(0)
    module.reverse(1, 1024, x, shared=4 * SIZE)
    assert torch.equal(x, wanted)


def test_empty_tensor(module):
    module.scale(1, 32, torch.empty(0, device="cuda"), torch.empty(0, device="cuda"), 0, 1.0)
    torch.cuda.synchronize()


# Streams, graphs, threads


def test_goes_on_the_current_stream(module):
    x, y = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()
    for stream in (None, side):  # the current one, and one that is named
        y.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            x.fill_(7)
        if stream is None:
            with torch.cuda.stream(side):
                module.scale(1, 32, x, y, 1, 1.0)
        else:
            module.scale(1, 32, x, y, 1, 1.0, stream=side)
        assert not side.query(), "the stream was not busy, so this test shows nothing"
        side.synchronize()
        assert y.item() == 7
        x.fill_(1)


def test_graph_capture_of_a_first_launch():
    """Compiling and loading happen inside the capture and do not break it."""
    fresh = cuda.compile(SOURCE, (f"-DSIZE={SIZE}", "-DFRESH=1"), name="fresh.cu")
    x, y = numbers(256), torch.zeros(256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh.scale(2, 128, x, y, 256, 2.0)
        fresh.scale(2, 128, y, y, 256, 2.0)
    assert not y.any()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * 4)


def test_from_a_fresh_thread(module):
    x, y, failed = numbers(64), torch.zeros(64, device="cuda"), []
    torch.cuda.synchronize()

    def work():
        try:
            for _ in range(200):
                module.scale(1, 64, x, y, 64, 2.0)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch.cuda.synchronize()
    assert not failed
    assert torch.equal(y, x * 2)


@hopper
def test_programmatic_dependent_launch(module):
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(20):
        module.first(1, 1, x)
        module.second(1, 1, x, pdl=True)
        assert x.item() == 42


@hopper
def test_dependent_launch_starts_before_the_kernel_ahead_ends(module):
    t = torch.zeros(2, dtype=torch.uint64, device="cuda")
    module.slow(1, 1, t), module.early(1, 1, t)  # loaded by now
    for pdl in (False, True, False, True):
        torch.cuda.synchronize()
        module.slow(1, 1, t)
        module.early(1, 1, t, pdl=pdl)
        end, start = t.tolist()
        assert (start < end) == pdl


@hopper
def test_clusters(module):
    for size in (1, 2, 8, 16):
        out = torch.zeros(32, dtype=torch.uint32, device="cuda")
        module.ranks(32, 32, out, cluster=(size, 1, 1), pdl=size == 2)
        assert out.tolist() == [i % size for i in range(32)]
    with pytest.raises(ValueError, match="divides the grid"):
        module.ranks(32, 32, out, cluster=(5, 1, 1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_blocks_wait_for_each_other(device):
    """A launch of grid.sync() is cooperative by itself; a grid that finds no room is refused by the driver."""
    turns = cuda.compile(TURNS).turns
    a, b = torch.zeros((2, 100 * 128), dtype=torch.int32, device=device)
    turns(100, 128, a, b, 5)
    assert torch.equal(a.cpu(), torch.from_numpy(turned(100 * 128, 5)))
    if device == "cuda":
        with pytest.raises(cuda_driver.CudaError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
            turns(100_000, 128, a, b, 5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_variables_are_set(device):
    module = cuda.compile("""
__constant__ float weights[4];
extern "C" __global__ void k(float* y) { y[threadIdx.x] = weights[threadIdx.x % 4]; }""")
    for start in (0, 5):
        y, weights = torch.zeros(8, device=device), torch.arange(start, start + 4.0, device=device)
        module.set("weights", weights)
        module.k(1, 8, y)
        assert torch.equal(y, weights.repeat(2))
    with pytest.raises(ValueError, match="weights has 16 bytes.* got 4"):
        module.set("weights", torch.zeros(1, device=device))
    with pytest.raises(ValueError, match="no variable 'weight'"):
        module.set("weight", weights)


# Errors, all before the launch


def test_errors(module):
    x, y = numbers(64), torch.zeros(64, device="cuda")
    with pytest.raises(ValueError, match="y must be on cuda:0, like x, got a tensor on cpu"):
        module.scale(1, 64, x, y.cpu(), 64, 1.0)
    with pytest.raises(TypeError, match=r"takes 4 arguments after grid and block \(.*\), got 3"):
        module.scale(1, 64, x, y, 64)
    with pytest.raises(TypeError, match=r"x is a float\* and must be a tensor of torch.float32, got torch.float16"):
        module.scale(1, 64, x.half(), y, 64, 1.0)
    with pytest.raises(ValueError, match=r"x must be contiguous, got shape \(32,\) with strides \(2,\)"):
        module.scale(1, 64, x[::2], y, 64, 1.0)
    with pytest.raises(ValueError, match="n = 4294967296 does not fit in 32 bits"):
        module.scale(1, 64, x, y, 2**32, 1.0)
    with pytest.raises(ValueError, match="compiled for at most 64 threads per block"):
        module.bounded(1, 65, x)
    with pytest.raises(ValueError, match="shared must be at most"):
        module.reverse(1, 64, x, shared=10**6)
    with pytest.raises(ValueError, match="between 1 and 65535 blocks along y"):
        module.scale((1, 65536), 64, x, y, 64, 1.0)
    with pytest.raises(ValueError, match="check_races looks on the SIMT machine"):
        module.scale(1, 64, x, y, 64, 1.0, check_races=True)
    for name, value in {"places": 4, "order": "reverse", "only": [0]}.items():
        with pytest.raises(ValueError, match=f"{name} is for the SIMT machine"):
            module.scale(1, 64, x, y, 64, 1.0, **{name: value})
    with pytest.raises(TypeError, match="stream must be a torch.cuda.Stream of cuda:0"):
        module.scale(1, 64, x, y, 64, 1.0, stream=3)
    with pytest.raises(AttributeError, match="launch.cu has no kernel 'scael'; it has: "):
        module.scael(1, 64, x)
    torch.cuda.synchronize()
    assert not y.any(), "an error came after the launch"


def test_what_the_driver_refuses_is_said(module):
    with pytest.raises(cuda_driver.CudaError, match="wrong.cu .*does not load: the CUDA driver says CUDA_ERROR"):
        cuda_driver.load(b"no machine code", 0, "wrong.cu")
    major, _ = torch.cuda.get_device_capability()
    other = cuda.compile(BOUNDED, arch="sm_80" if major != 8 else "sm_90")
    with pytest.raises(cuda_driver.CudaError, match="NO_BINARY_FOR_GPU"):
        other.bounded(1, 64, numbers(64))


def test_an_old_card_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_driver, "capability", lambda device: (6, 1))
    with pytest.raises(RuntimeError, match="need a card of compute capability 7.5 or newer"):
        cuda.compile(BOUNDED).bounded(1, 1, numbers(1))


def test_a_card_newer_than_the_compiler(monkeypatch):
    """The driver then translates the PTX of the newest architecture that the compiler knows."""
    from simt import nvrtc

    monkeypatch.setattr(nvrtc, "architectures", lambda: ("sm_75", "sm_80"))
    x = torch.zeros(64, device="cuda")
    module = cuda.compile(BOUNDED)
    module.bounded(1, 64, x)
    assert x.all()
    assert module._arch_on(0) == "sm_80"


# Host time


def test_overhead(module, capsys):
    """The median host time of a launch with six arguments, while the stream keeps up."""
    w, x, b, y = (numbers(1024) for _ in range(4))
    kernel = module.nothing
    taken = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            kernel(64, 128, w, x, b, y, 1024, 1024)
        taken.append((time.perf_counter() - begin) / 100 * 1e6)
    with capsys.disabled():
        print(f"\n  a launch takes {sorted(taken)[10]:.1f} µs of host time (best {min(taken):.1f})")
    assert sorted(taken)[10] < 30  # µs; about 6 on a quiet machine
