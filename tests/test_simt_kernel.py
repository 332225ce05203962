"""What a learner calls: modules, kernels, arguments. Wrong ones are refused before anything runs or is written."""

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import simt
from simt import nvrtc

ROOT = Path(__file__).resolve().parent.parent
I32, F32 = np.int32, np.float32
SOURCE = """
extern "C" __global__ void scale(float* y, const float* x, int n, float by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}
extern "C" __global__ void fill(float* y) {
  __shared__ volatile float s[256];
  s[threadIdx.x] = 1;
  y[threadIdx.x] = s[threadIdx.x];
}
"""
HALF = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half h, float* y) { y[0] = __half2float(h); }'
STRUCT = """
struct P { float a; int n; double d; float4 v; };
struct Q { float a[2]; };
extern "C" __global__ void k(P p, float* y) { if (threadIdx.x < p.n) y[threadIdx.x] = p.a + p.d + p.v.w; }
extern "C" __global__ void q(Q q, float* y) { y[threadIdx.x] = q.a[threadIdx.x & 1]; }
"""
ADD_PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 p, .param .u32 n)
{
  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd2, %rd1;
  mul.wide.s32 %rd3, %r5, 4;
  add.s64 %rd4, %rd2, %rd3;
  ld.global.f32 %f1, [%rd4];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd4], %f2;
DONE:
  ret;
}
"""

nvrtc_needed = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@pytest.fixture(scope="module")
def module():
    return simt.compile(SOURCE)


def scale(module, grid=2, block=32, y=None, x=None, n=None, by=None, **how):
    y = np.zeros(64, F32) if y is None else y
    x = np.ones(64, F32) if x is None else x
    return module["scale"](grid, block, y, x, I32(64) if n is None else n, F32(3) if by is None else by, **how)


# Modules and names.


@nvrtc_needed
def test_modules_name_their_kernels(module):
    assert sorted(module.names) == ["fill", "scale"]
    assert repr(module["scale"]) == "scale(y: u64, x: u64, n: u32, by: f32)"
    assert module["scale"] is module["scale"]
    assert simt.compile(SOURCE) is simt.compile(SOURCE) is not simt.compile(SOURCE + " ")


@nvrtc_needed
def test_kernels_that_are_not_there(module):
    with pytest.raises(simt.LaunchError, match=r"no kernel 'scal'; it has .*Did you mean 'scale'\?"):
        module["scal"]
    with pytest.raises(simt.LaunchError, match=r"it has _Z1kPf, _Z1kPi\. 2 are named 'k': say which, or write extern"):
        simt.compile("__global__ void k(float* y) { y[0] = 1; } __global__ void k(int* y) { y[0] = 1; }")["k"]
    with pytest.raises(simt.LaunchError, match="it has none"):
        simt.compile("__device__ void k() {}")["k"]
    for name in (None, 3, ("scale",)):
        with pytest.raises(simt.LaunchError, match="no kernel"):
            module[name]


TEMPLATES = """
template <int N, typename T> __global__ void fill(T* y) { y[threadIdx.x] = N; }
__global__ void fill_more(float* y) { y[threadIdx.x] = 1; }
template <typename T> __global__ void one(T* y) { y[threadIdx.x] = 2; }
struct P2 { int a, b; };
__global__ void of(P2 p, float* y) { y[threadIdx.x] = p.b; }  // _Z2of2P2Pf: a digit follows the name
"""


@nvrtc_needed
def test_kernels_have_the_names_of_the_source():
    module, y = simt.compile(TEMPLATES, instances=["fill<3, float>", "fill< 4,int >", "one<float>"]), np.zeros(2, F32)
    assert sorted(module.names) == ["fill<3,float>", "fill<4,int>", "fill_more", "of", "one<float>"]
    for name, value in (
        ("fill<3,float>", 3),
        ("fill_more", 1),
        ("one", 2),
        ("fill < 3, float>", 3),
        ("_Z9fill_morePf", 1),
    ):
        report = module[name](1, 2, y)
        assert (y == value).all() and report.kernel in module.names
    assert module["fill_more"] is module["_Z9fill_morePf"] and repr(module["one"]) == "one<float>(y: u64)"
    assert simt.load(module.ptx)["fill<3, float>"].name == "fill<3,float>"  # the PTX says how it is spelt
    with pytest.raises(simt.MemoryFault, match=r"kernel fill<3,float>, line 2.* writes y\[2\]"):
        module["fill<3, float>"](1, 3, y)
    module["of"](1, 2, np.array([(1, 7)], [("a", "i4"), ("b", "i4")])[0], y)
    assert (y == 7).all()
    with pytest.raises(simt.LaunchError, match="2 are named 'fill': say which"):
        module["fill"]
    for name, wanted in ("fill<5, int>", r"\['fill<5, int>'\]"), ("fill<3>", r"\['fill<3>'\]"):
        with pytest.raises(simt.LaunchError, match=f"fill is a template: simt.compile.source, instances={wanted}"):
            module[name]
    with pytest.raises(simt.LaunchError, match=r"one is a template: .*instances=\['one<...>'\]"):
        simt.compile(TEMPLATES)["one"]


@nvrtc_needed
@pytest.mark.parametrize(
    ("instances", "kind", "message"),
    [
        ("one<int>", TypeError, "instances must be a list of strings"),
        ([1], TypeError, r"a list of strings, such as .*, got \[1\]"),
        (["one"], ValueError, "an instance is a template's name and arguments, as .*, got 'one'"),
        (["one<int>; }"], ValueError, "an instance is"),
        (["none<int>"], simt.CompileError, 'identifier "none" is undefined'),
    ],
)
def test_instances_that_cannot_be(instances, kind, message):
    with pytest.raises(kind, match=message):
        simt.compile(TEMPLATES, instances=instances)


@nvrtc_needed
def test_source_that_does_not_compile():
    with pytest.raises(simt.CompileError, match=r"(?s)kernel.cu:2: error: .*undeclared_thing"):
        simt.compile('extern "C" __global__ void k(float* y) {\n  y[0] = undeclared_thing; }')
    with pytest.raises(simt.CompileError, match="error"):
        simt.compile("this is no program")
    with pytest.raises(TypeError, match="source"):
        simt.compile(None)


# Arguments.


@nvrtc_needed
def test_how_many_arguments(module):
    for given in ((), (np.zeros(4, F32),), (np.zeros(4, F32),) * 5):
        with pytest.raises(
            simt.LaunchError, match=rf"scale expects 4: y \(an array.*by \(np.float32\); got {len(given)}"
        ):
            module["scale"](1, 32, *given)


@nvrtc_needed
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 64}, r"n: expected np.int32; got int 64: write np.int32\(64\)"),
        ({"n": 2**31 + 5}, "n: expected np.int32; got int 2147483653, which no np.int32 can hold"),
        ({"n": True}, r"n: expected np.int32; got bool True"),
        ({"n": 64.0}, r"n: expected np.int32; got float 64.0"),
        ({"n": F32(64)}, "n: expected np.int32; got np.float32"),
        ({"n": np.int64(64)}, r"n: expected np.int32; got np.int64 \(8 bytes\)"),
        ({"n": np.int8(64)}, "n: expected np.int32; got np.int8"),
        ({"n": np.bool_(1)}, "n: expected np.int32; got np.bool"),
        ({"n": np.zeros(1, I32)}, "n: expected np.int32; got an array of int32"),
        ({"n": np.zeros((), I32)}, "n: expected np.int32; got an array of int32"),
        ({"n": b"abc"}, r"n: expected np.int32; got bytes \(3 bytes\)"),
        ({"by": 2}, r"by: expected np.float32; got int 2"),
        ({"by": 2.5}, r"by: expected np.float32; got float 2.5: write np.float32\(2.5\)"),
        ({"by": I32(2)}, "by: expected np.float32; got np.int32"),
        ({"by": np.float64(2)}, "by: expected np.float32; got np.float64"),
        ({"x": [1.0, 2.0]}, "x: expected an array, or a 64-bit integer .*; got list"),
        ({"x": "text"}, "x: expected an array.*; got str 'text'"),
        ({"x": np.float64(3)}, "x: expected an array.*; got np.float64"),
        ({"x": np.complex64(3)}, "x: expected an array.*; got np.complex64"),
        ({"x": np.str_("ab")}, "x: expected an array.*; got np.str"),
        ({"x": np.datetime64("2020")}, "x: expected an array.*; got np.datetime64"),
        ({"x": np.ones((64, 2), F32)[:, 0]}, r"x: expected a C-contiguous array; got strides \(8,\) for shape \(64,\)"),
        ({"x": np.ones((8, 8), F32).T}, "x: expected a C-contiguous array"),
        ({"x": np.ones(64, F32)[::-1]}, "x: expected a C-contiguous array"),
        ({"x": np.zeros(64, object)}, "x: expected an array of numbers; got dtype object"),
        ({"x": np.array(["a", "b"])}, "x: expected an array of numbers; got dtype <U1"),
        ({"x": np.zeros(64, ">f4")}, "x: expected the machine's own byte order; got dtype >f4"),
        ({"x": simt.Buffer(3)}, "x: expected a Buffer of an array; got one of int"),
        ({"x": simt.Buffer(np.zeros(4, F32), -4)}, "x: misalignment: expected 0 or more; got -4"),
        ({"x": simt.Buffer(np.zeros(4, F32), 0.5)}, "x: misalignment: expected a whole number; got float 0.5"),
        ({"grid": 0}, "grid.x: expected 1 to 2147483647; got 0"),
        ({"grid": -1}, "grid.x: expected"),
        ({"grid": 2**31}, "grid.x: expected 1 to 2147483647; got 2147483648"),
        ({"grid": (1, 65536)}, "grid.y: expected 1 to 65535; got 65536"),
        ({"grid": (1, 1, 65536)}, "grid.z: expected 1 to 65535"),
        ({"grid": (1, 1, 1, 1)}, "grid: expected 1 to 3 numbers; got 4"),
        ({"grid": ()}, "grid: expected 1 to 3 numbers; got 0"),
        ({"grid": 1.0}, "grid.x: expected a whole number; got float 1.0"),
        ({"grid": None}, "grid.x: expected a whole number; got NoneType None"),
        ({"grid": "1"}, "grid.x: expected a whole number; got str '1'"),
        ({"block": 0}, "block.x: expected 1 to 1024; got 0"),
        ({"block": 1025}, "block.x: expected 1 to 1024; got 1025"),
        ({"block": (32, 33)}, "block: expected at most 1024 threads; got 1056"),
        ({"block": (1, 1, 65)}, "block.z: expected 1 to 64; got 65"),
        ({"shared": -1}, "shared: expected 0 or more; got -1"),
        ({"shared": 1.5}, "shared: expected a whole number; got float 1.5"),
        ({"shared": 227 * 1024 + 1}, "shared: expected at most 232448 bytes .*; got 232449"),
    ],
)
def test_wrong_arguments(module, wrong, message):
    y = np.zeros(64, F32)
    with pytest.raises(simt.LaunchError, match=message):
        scale(module, y=y, **wrong)
    assert not y.any()  # nothing ran


@nvrtc_needed
def test_right_arguments(module):
    y = np.zeros(64, F32)
    for grid, block in ((2, 32), ([2], (32,)), (np.int64(2), np.array(32)[()]), ((1, 1, 1), (64, 1, 1))):
        y[:] = 0
        scale(module, grid, block, y=y)
        assert (y == 3).all()
    scale(module, y=y.reshape(8, 8), n=np.uint32(64), by=F32(5))  # any shape; an unsigned for an int
    assert (y == 5).all()
    scale(module, y=y.view(I32), x=np.ones(64, F32).view(np.uint8), by=F32(7))  # memory has no type
    assert (y == 7).all()
    module["fill"](1, 32, y, shared=227 * 1024 - 1024)
    with pytest.raises(simt.LaunchError, match="232448 less the 1024 that fill declares"):
        module["fill"](1, 32, y, shared=227 * 1024)


@nvrtc_needed
def test_small_types_and_halves():
    y = np.zeros(1, F32)
    source = 'extern "C" __global__ void k(unsigned char c, short s, bool b, char d, long long l, float* y) { '
    kernel = simt.compile(source + "y[0] = c + s + b + d + l; }")["k"]
    kernel(1, 1, np.uint8(200), np.int16(-5), np.bool_(True), np.int8(-3), np.int64(1000), y)
    assert y[0] == 200 - 5 + 1 - 3 + 1000
    kernel = simt.compile(HALF)["k"]
    for h in np.float16(1.5), np.uint16(0x3E00), b"\x00\x3e":
        y[0] = 0
        kernel(1, 1, h, y)
        assert y[0] == 1.5
    for wrong in F32(1.5), np.int16(1), 1.5:
        with pytest.raises(simt.LaunchError, match="h: expected 2 bytes, such as np.float16; got"):
            kernel(1, 1, wrong, y)


@nvrtc_needed
def test_structs_are_passed_as_bytes():
    module, y = simt.compile(STRUCT), np.zeros(64, F32)
    dtype = np.dtype({"names": "andv", "formats": ["f4", "i4", "f8", "4f4"], "offsets": [0, 4, 8, 16], "itemsize": 32})
    p = np.zeros((), dtype)
    p["a"], p["n"], p["d"], p["v"] = 1.5, 20, 2.25, [0, 0, 0, 4]
    for given in p[()], p.tobytes():
        y[:] = 0
        module["k"](1, 64, given, y)
        assert y.tolist() == [7.75] * 20 + [0] * 44
    module["q"](1, 64, np.array([3, 4], F32).tobytes(), y)
    assert y.tolist() == [3, 4] * 32
    for wrong in np.int64(3), b"1234", np.float64(1), 3:
        with pytest.raises(simt.LaunchError, match="q: expected a struct of 8 bytes; got"):
            module["q"](1, 64, wrong, y)


@nvrtc_needed
def test_parameters_without_names_are_counted():
    source = '#define KERNEL(name) extern "C" __global__ void name(float* y, int)\nKERNEL(k) { y[0] = 1; }'
    with pytest.raises(simt.LaunchError, match="param 1: expected np.int32"):
        simt.compile(source)["k"](1, 1, np.zeros(1, F32), 3)


# Without a compiler.


def test_ptx_runs_without_nvrtc(monkeypatch):
    def missing():
        raise simt.CompilerMissing("no NVRTC")

    monkeypatch.setattr(nvrtc, "_load", missing)
    with pytest.raises(simt.CompilerMissing):
        simt.compile('extern "C" __global__ void never_seen_before(float* y) { y[0] = 1; }')
    y = np.arange(100, dtype=F32)
    report = simt.load(ADD_PTX)["twice"](4, 32, y, I32(90))
    assert y.tolist() == [*range(0, 180, 2), *range(90, 100)]
    assert report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == 12
    with pytest.raises(simt.MemoryFault, match=r"param 0\[90\]|p\[90\]"):
        simt.load(ADD_PTX)["twice"](4, 32, y[:90].copy(), I32(100))


def test_the_missing_compiler_says_how_to_get_it(monkeypatch):
    nvrtc._load.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        with pytest.raises(simt.CompilerMissing, match="(?s)NVRTC.*(pip install|none for macOS).*simt.load"):
            simt.compile('extern "C" __global__ void k(float* y) { y[0] = 1; }')
    finally:
        nvrtc._load.cache_clear()


def test_text_that_is_no_ptx():
    for text in ("", "garbage", 'extern "C" __global__ void k() {}'):
        with pytest.raises(ValueError, match="expected PTX"):
            simt.load(text)
    for text in (None, b".target sm_90", 3):
        with pytest.raises(TypeError, match="expected PTX as a str"):
            simt.load(text)
    for cut in (-4, -40, ADD_PTX.index("mad.lo") + 3, ADD_PTX.index(".param .u32") + 8):
        with pytest.raises(ValueError, match="PTX"):
            simt.load(ADD_PTX[:cut])
    with pytest.raises(ValueError, match="NOWHERE"):
        simt.load(ADD_PTX.replace("bra DONE", "bra NOWHERE"))["twice"]


def damaged(text, rng):
    """A statement cut short, left out, or with a word of it that is another one's."""
    lines = text.split("\n")
    at, other = rng.integers(5, len(lines) - 2, 2)
    words, others = (re.split(r"(\W+)", lines[n]) for n in (at, other))
    words[rng.integers(len(words))] = str(rng.choice([*others, "", "v4", "b128", "f16x2", "-1", "%r99", "{%r1, %r2}"]))
    lines[at] = rng.choice(
        ["".join(words), "".join(words), lines[at][: rng.integers(len(lines[at]) + 1)], lines[other]]
    )
    return "\n".join(lines)


def test_damaged_ptx_is_an_error_of_ours_or_runs():
    rng, seen = np.random.default_rng(0), set()
    for _ in range(400):
        text = damaged(ADD_PTX, rng)
        try:
            simt.load(text)["twice"](1, 64, np.zeros(64, F32), I32(60), step_limit=100)
        except simt.SimtError as error:
            seen.add(type(error))
        except ValueError as error:
            assert isinstance(error, simt.LaunchError) or "expected complete PTX" in str(error), text
            seen.add(type(error))
    assert {simt.Unsupported, simt.MemoryFault, ValueError} <= seen


# What the machine does not know.


@nvrtc_needed
@pytest.mark.parametrize(
    ("body", "instruction"),
    [
        ('(long long* y) {\n __shared__ long long b;\n asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 '
         '[%0], 8;" :: "r"((unsigned)__cvta_generic_to_shared(&b))); }', "mbarrier.complete_tx"),
        ('(int* y) {\n int s = 0;\n asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0; @p barrier.cluster.arrive;}" :: '
         '"r"(s));\n y[0] = s; }', "barrier.cluster.arrive"),
        ('(int* y) {\n __shared__ int b[9];\n asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group'
         '.add.u32 [%0], [%1], 128;" :: "l"(y), "r"((unsigned)__cvta_generic_to_shared(b))); }', "cp.reduce.async"),
        ('(int* y) {\n unsigned r;\n asm volatile("mov.u32 %0, %%pm0;" : "=r"(r));\n y[0] = r; }', "%pm0"),
        ('(int* y) {\n\n asm volatile("{.reg .pred p; setp.lt.u32 p, %0, 32; @p bar.sync 1, 32;}" :: '
         '"r"(threadIdx.x));\n}', "bar.sync"),
    ],
)  # fmt: skip
def test_unsupported_instructions_are_named_with_their_line(body, instruction):
    with pytest.raises(simt.Unsupported) as caught:
        simt.compile(f'extern "C" __global__ void k{body}')["k"](1, 64, np.zeros(64, np.int64))
    said = str(caught.value)
    assert re.match(r"kernel k, line 3 `.*asm volatile.*`: ", said) and instruction in said
    assert "not supported by the SIMT machine" in said and caught.value.line == 3


@nvrtc_needed
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{ y[0] = again(y[1]); }", "line 4 .* it is recursive: write it as a loop"),
        ("{\n A a; B b; A* p = y[1] ? &a : &b;\n y[0] = p->f(3); }", "line 9 .* a call through a pointer"),
        ("{\n int* p = (int*)malloc(8); p[y[1]] = 3;\n y[0] = p[0]; }", "line 8 .* a call of malloc; there is no heap"),
    ],
)
def test_what_needs_a_stack_or_a_heap_says_so(body, why):
    before = """
struct A { virtual int f(int x) { return x; } };
struct B : A { int f(int x) override { return 2 * x; } };
__device__ __noinline__ int again(int n) {
  return n < 2 ? n : again(n - 1) + again(n - 2);
}
"""
    with pytest.raises(simt.Unsupported, match=why):
        simt.compile(f'{before}extern "C" __global__ void k(int* y) {body}')["k"](1, 64, np.zeros(64, I32))


@nvrtc_needed
def test_recursion_and_pointers_to_functions_are_unsupported():
    recursive = "__device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }"
    with pytest.raises(simt.Unsupported, match="recursive"):
        simt.compile(recursive + 'extern "C" __global__ void k(int* y) { y[0] = f(y[0]); }')["k"]
    pointers = "typedef int (*F)(int); __device__ __noinline__ int a(int x) { return x + 1; } " + (
        "__device__ __noinline__ int b(int x) { return x * 2; }"
    )
    source = pointers + 'extern "C" __global__ void k(int* y) { F f = y[0] ? a : b; y[1] = f(y[2]); }'
    with pytest.raises(simt.Unsupported, match="kernel k, line 1"):
        simt.compile(source)["k"](1, 1, np.ones(3, I32))


# Speed: against gross regressions only.

GEMV = """
extern "C" __global__ void naive(const float* W, const float* x, float* y, int rows, int cols) {
  int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  float s = 0;
  for (int i = 0; i < cols; i++) s += W[(long long)r * cols + i] * x[i];
  y[r] = s;
}
extern "C" __global__ void warp(const float* W, const float* x, float* y, int rows, int cols) {
  int r = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (r >= rows) return;
  float s = 0;
  for (int i = lane; i < cols; i += 32) s += W[(long long)r * cols + i] * x[i];
  for (int o = 16; o; o /= 2) s += __shfl_down_sync(~0u, s, o);
  if (lane == 0) y[r] = s;
}
extern "C" __global__ void vector(const float4* W, const float4* x, float* y, int rows, int cols) {
  int r = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (r >= rows) return;
  float s = 0;
  for (int i = lane; i < cols / 4; i += 32) {
    float4 w = W[(long long)r * (cols / 4) + i], v = x[i];
    s += w.x * v.x + w.y * v.y + w.z * v.z + w.w * v.w;
  }
  for (int o = 16; o; o /= 2) s += __shfl_down_sync(~0u, s, o);
  if (lane == 0) y[r] = s;
}
"""


@nvrtc_needed
def test_gemv_is_fast_enough_to_be_taught_with():
    n = 4096
    rng = np.random.default_rng(0)
    W, x = rng.standard_normal((n, n), F32), rng.standard_normal(n, F32)
    wanted, module = W.astype(np.float64) @ x, simt.compile(GEMV)
    for name, threads, sectors in (("naive", n, n * n), ("warp", 32 * n, n * n // 8), ("vector", 32 * n, n * n // 8)):
        times = []
        for _ in range(2):
            y = np.full(n, np.nan, F32)
            start = time.process_time()
            report = module[name](threads // 256, 256, W, x, y, I32(n), I32(n))
            times.append(time.process_time() - start)
        print(f"{name}: {min(times):.2f} s of processor time")
        assert np.linalg.norm(y - wanted) < 1e-5 * np.linalg.norm(wanted)
        assert report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] > sectors
        assert min(times) < 2, f"{name} took {min(times):.2f} s of processor time"


def test_the_import_is_fast():
    command = "import time; t = time.process_time(); import simt; print(time.process_time() - t)"
    times = [float(subprocess.check_output([sys.executable, "-c", command], cwd=ROOT)) for _ in range(3)]
    print(f"import simt, of processor time: {min(times):.2f} s")
    assert min(times) < 1
