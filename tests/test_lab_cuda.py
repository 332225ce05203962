"""One call for a CUDA C++ kernel: what reaches the SIMT machine, what is refused, and what the code looks like."""

import struct
import sys
import types

import numpy as np
import pytest
import torch

from lab import cuda
from lab.cuda import disassembly, signature
from simt.errors import CompileError

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

SOURCE = r"""
#include <cuda_fp16.h>
#include <stdint.h>
#define SCALAR __nv_bfloat16
// extern "C" __global__ void commented(float* x) {}
extern "C" __global__ void __launch_bounds__(128, (2)) axpy(
    const float* __restrict__ x,  // (n,)
    float* y, int n, float by) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += by * x[i];
}
extern "C" __global__ void any(const void* a, uint4* b, half *c, int64_t* d, const unsigned char e[]) {}
extern "C" __global__ void values(float* out, char c, unsigned short s, unsigned u, size_t z, bool t, double d,
                                  half h) {
  out[0] = c + s + (float)u + (float)z + t + (float)d + __half2float(h);
}
extern "C" __global__ void hello() { printf("hello\n"); }
__global__ void mangled(float* x) { x[0] = 1; }
template <class A, class B> struct Two { A a; B b; };
extern "C" __global__ void unreadable(Two<float, int> two, float* x) { x[0] = two.a; }
#define KERNEL(name) extern "C" __global__ void name(float* x) { x[0] = 1; }
KERNEL(by_macro)
"""


@pytest.fixture
def module():
    return cuda.compile(SOURCE, name="launch.cu")


@pytest.fixture
def machine(monkeypatch):
    """A SIMT machine that only writes down how it was called: machine.calls, machine.modules."""
    import simt

    fake = types.SimpleNamespace(calls=[], modules=[], report=simt.report.Report("fake", "", {}))

    class Buffer:
        def __init__(self, array, misalignment=0):
            self.array, self.misalignment = array, misalignment

    def load(ptx, source=""):
        fake.modules.append((ptx, source))

        class Kernels(dict):
            def __missing__(self, name):
                def kernel(grid, block, *args, shared, check_races, places, order, ahead):
                    fake.calls.append((name, grid, block, args, shared, check_races))
                    return fake.report

                return kernel

        return Kernels()

    monkeypatch.setattr(simt, "load", load, raising=False)
    monkeypatch.setattr(simt, "Buffer", Buffer, raising=False)
    return fake


# What reaches the machine


def test_nothing_compiles_before_it_is_needed(monkeypatch):
    from simt import nvrtc

    monkeypatch.setattr(nvrtc, "_ask", lambda *args: pytest.fail("compiled"))
    module = cuda.compile("broken +" + SOURCE + "// not in the memory")
    repr(module), repr(module.axpy), module["axpy"]
    assert not hasattr(module, "_repr_html_")


def test_arguments_of_the_machine(module, machine):
    x, y = torch.randn(7), torch.randn(7)
    assert module.axpy(3, (4, 2), x, y, 7, 0.5, shared=16, check_races=True) is machine.report
    ((name, grid, block, args, shared, races),) = machine.calls
    assert (name, grid, block, shared, races) == ("axpy", (3, 1, 1), (4, 2, 1), 16, True)
    assert args[0].dtype == np.float32 and args[0].shape == (7,)
    args[1][3] = 42  # written in place
    assert y[3] == 42
    assert [type(a) for a in args[2:]] == [np.int32, np.float32] and args[2:] == (7, 0.5)
    module["axpy"](1, 1, x, y, np.int32(7), np.float32(0.5), pdl=True)
    assert len(machine.calls) == 2 and len(machine.modules) == 1
    assert machine.modules[0][1] == SOURCE and ".entry axpy" in machine.modules[0][0]


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (torch.bfloat16, np.uint16),
        (torch.float16, np.float16),
        (torch.float8_e4m3fn, np.uint8),
        (torch.bool, np.uint8),
        (torch.int8, np.int8),
        (torch.uint16, np.uint16),
        (torch.int64, np.int64),
        (torch.float64, np.float64),
    ],
)
def test_dtypes_share_their_memory(module, machine, dtype, seen):
    tensor = torch.zeros(4, dtype=dtype)
    module.any(1, 1, tensor, None, None, None, None)
    ((_, _, _, args, _, _),) = machine.calls
    assert args[0].dtype == seen
    args[0].view(np.uint8)[0] = 1
    assert tensor.view(torch.uint8)[0] == 1
    assert all(a == 0 and a.itemsize == 8 for a in args[1:]), "None is a null pointer"


def test_scalars_get_the_type_of_their_parameter(module, machine):
    out = torch.zeros(1)
    module.values(1, 1, out, -1, 65535, 2**32 - 1, 2**64 - 1, True, 1, np.float16(2))
    kinds = [np.int8, np.uint16, np.uint32, np.uint64, np.int8, np.float64, np.float16]
    values = machine.calls[0][3][1:]
    assert [type(v) for v in values] == kinds
    assert values == (-1, 65535, 2**32 - 1, 2**64 - 1, 1, 1.0, 2.0)


def test_unchecked_is_the_checked_launch_on_the_machine(module, machine):
    for _ in range(2):
        assert module.axpy.unchecked(3, 32, X, Y, 8, 0.5, shared=16, check_races=True) is machine.report
        with pytest.raises(TypeError, match="y must be a tensor .*, got int 3"):
            module.axpy.unchecked(3, 32, X, 3, 8, 0.5)
    name, grid, block, args, shared, races = machine.calls[1]
    assert (name, grid, block, shared, races) == ("axpy", (3, 1, 1), (32, 1, 1), 16, True)
    assert args[2:] == (8, 0.5) and len(machine.calls) == 2


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_integers_keep_their_bits_on_a_card(size):
    """Of a type that does not say its sign, all bits; `struct` refuses what is then converted, or refused by name."""
    top = 1 << 8 * size - 1
    for kind in ("integer", "pointer or integer") if size == 8 else ("integer",):
        parameter = signature.Parameter("n", kind, size, "index")
        convert = signature.converter("k", parameter, True)
        for value in (0, 1, -1, top - 1, top, 2 * top - 1, -top, np.dtype(f"i{size}").type(-3), True):
            written = struct.pack("=" + parameter.code, convert(value))
            assert written == (int(value) % (2 * top)).to_bytes(size, "little")
            try:
                assert struct.pack("=" + parameter.code, value) == written, "unconverted"
            except struct.error:
                pass
        for value in (2 * top, -top - 1):
            with pytest.raises(struct.error):
                struct.pack("=" + parameter.code, value)
            with pytest.raises(ValueError, match=f"k: n = {value} does not fit in {8 * size} bits"):
                convert(value)
    assert signature.converter("k", signature.Parameter("p", "pointer", 8), True)(None) == 0


@pytest.mark.parametrize(
    ("ctype", "size", "low", "high"),
    [
        ("int", 4, -(2**31), 2**31 - 1),
        ("int64_t", 8, -(2**63), 2**63 - 1),
        ("short", 2, -(2**15), 2**15 - 1),
        ("unsigned", 4, 0, 2**32 - 1),
        ("unsigned long long", 8, 0, 2**64 - 1),
        ("size_t", 8, 0, 2**64 - 1),
        ("uint8_t", 1, 0, 255),
    ],
)
@pytest.mark.parametrize("on_card", [True, False])
def test_an_integer_fits_its_type(ctype, size, low, high, on_card):
    parameter = signature.Parameter("n", "integer", size, ctype)
    convert = signature.converter("k", parameter, on_card)
    for value in (low, high, 5, np.int8(5)):
        assert convert(value) == value
        if on_card:
            written = struct.pack("=" + parameter.code, convert(value))
            assert written == (int(value) % 2 ** (8 * size)).to_bytes(size, "little")
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"k: n = {value} does not fit in .* \({ctype}\): .* {low} to {high}"):
            convert(value)
        with pytest.raises(struct.error):  # which leads to the conversion
            struct.pack("=" + parameter.code, value)


def test_views_keep_their_misalignment(module, machine):
    whole = torch.arange(200.0)
    for offset, wanted in ((1, 4), (63, 252), (65, 4)):
        module.by_macro(1, 1, whole[offset:])
        buffer = machine.calls[-1][3][0]
        assert buffer.misalignment == wanted and buffer.array[0] == offset
    for tensor in (whole, whole[64:], whole[1:1]):
        module.by_macro(1, 1, tensor)
        assert isinstance(machine.calls[-1][3][0], np.ndarray)


def test_parameters_of_a_model_are_taken(module, machine):
    weight = torch.nn.Parameter(torch.ones(3))
    module.by_macro(1, 1, weight)
    machine.calls[0][3][0][1] = 5
    assert weight[1] == 5


# What is refused, before anything has run

X, Y = torch.ones(8), torch.ones(8)
GOOD = (X, Y, 8, 1.0)


@pytest.mark.parametrize(
    ("args", "kind", "said"),
    [
        (
            (X, Y, 8),
            TypeError,
            r"axpy: takes 4 arguments after grid and block \(float\* x, .*, float by\), got 3",
        ),
        ((X, Y, 8, 1.0, 2), TypeError, "takes 4 arguments .*, got 5"),
        (
            (X.double(), Y, 8, 1.0),
            TypeError,
            r"x is a float\* and must be a tensor of torch.float32, got torch.float64",
        ),
        ((X[::2], Y, 8, 1.0), ValueError, r"x must be contiguous, got shape \(4,\) with strides \(2,\); x.contiguous"),
        ((X.reshape(2, 4).T, Y, 8, 1.0), ValueError, r"x must be contiguous, .* strides \(1, 4\)"),
        (
            (X.numpy(), Y, 8, 1.0),
            TypeError,
            r"x must be a tensor \(float\*\), got a NumPy array; torch.from_numpy\(x\)",
        ),
        ((X, 3, 8, 1.0), TypeError, r"y must be a tensor \(float\*\), got int 3"),
        ((X, [1.0], 8, 1.0), TypeError, "y must be a tensor .*, got list"),
        ((X, Y, X, 1.0), TypeError, r"n must be an int or a NumPy integer of 32 bits \(int\), got a tensor"),
        ((X, Y, 8.0, 1.0), TypeError, "n must be an int .*, got float 8.0"),
        ((X, Y, np.int64(8), 1.0), TypeError, "n must be an int or a NumPy integer of 32 bits .*, got int64 8"),
        ((X, Y, np.float32(8), 1.0), TypeError, "n must be an int .*, got float32 8.0"),
        ((X, Y, None, 1.0), TypeError, "n must be an int .*, got NoneType"),
        ((X, Y, 8, np.float64(1)), TypeError, r"by must be a float or np.float32 \(float\), got float64 1.0"),
        ((X, Y, 8, np.int32(1)), TypeError, "by must be a float .*, got int32 1"),
        ((X, Y, 8, "1"), TypeError, "by must be a float .*, got str"),
        ((X, Y, 2**32, 1.0), ValueError, "n = 4294967296 does not fit in 32 bits"),
        ((X, Y, -(2**31) - 1, 1.0), ValueError, "n = -2147483649 does not fit in 32 bits"),
        ((X, Y, 8, 1e39), ValueError, r"by = 1e\+39 does not fit in 32 bits"),
        ((X.to("meta"), Y, 8, 1.0), ValueError, "x must be on the CPU or on a CUDA device, got a tensor on meta"),
        ((X, Y.to("meta"), 8, 1.0), ValueError, "y must be on the CPU or on a CUDA device"),
        ((X.to_sparse(), Y, 8, 1.0), ValueError, "x must be a dense tensor, got layout torch.sparse_coo"),
        ((None, None, 8, 1.0), TypeError, "at least one argument must be a tensor, whose device says where to run"),
    ],
)
def test_wrong_arguments(module, machine, args, kind, said):
    for _ in range(2):  # the second time after a good call: what was found for that one does not cover this one
        with pytest.raises(kind, match=said):
            module.axpy(1, 1, *args)
        module.axpy(1, 1, *GOOD)
    assert len(machine.calls) == 2


def test_structs_are_checked_for_size(module, machine):
    pair = np.void((1.0, 2), dtype=[("a", "f4"), ("b", "i4")])
    module.unreadable(1, 1, pair, X)
    assert machine.calls[0][3][0] is pair
    for wrong in (np.void((1.0,), dtype=[("a", "f4")]), np.void(bytes(9))):
        with pytest.raises(TypeError, match="argument 0 must be a NumPy scalar of 8 bytes .*, got void"):
            module.unreadable(1, 1, wrong, X)
    assert len(machine.calls) == 1


def test_unknown_dtype_and_no_tensor(module, machine):
    with pytest.raises(TypeError, match="a must have one of the dtypes .*float32.*, got torch.complex64"):
        module.any(1, 1, torch.zeros(4, dtype=torch.complex64), None, None, None, None)
    with pytest.raises(TypeError, match="at least one argument must be a tensor"):
        module.hello(1, 1)
    with pytest.raises(TypeError, match=r"d is a int64_t\* and must be a tensor of torch.int64 or torch.uint64"):
        module.any(1, 1, X, X, X.half(), X.int(), X)
    module.any(1, 1, X, X, X.half(), X.long(), X)  # void*, uint4* and char[] may be read from anything
    assert len(machine.calls) == 1


@pytest.mark.parametrize(
    ("grid", "block", "options", "kind", "said"),
    [
        (0, 32, {}, ValueError, r"grid must have between 1 and 2147483647 blocks along x, got grid \(0,\)"),
        (2**31, 32, {}, ValueError, "grid must have between 1 and 2147483647 blocks along x"),
        ((1, 65536), 32, {}, ValueError, "grid must have between 1 and 65535 blocks along y"),
        ((1, 1, 65536), 32, {}, ValueError, "grid must have between 1 and 65535 blocks along z"),
        ((1, 1, 1, 1), 32, {}, ValueError, "grid must be an int or a tuple of up to three"),
        ((), 32, {}, ValueError, "grid must be an int or a tuple of up to three"),
        (1.5, 32, {}, TypeError, "grid must be an int or a tuple of up to three, got"),
        ("a", 32, {}, TypeError, "grid must be an int or a tuple of up to three, got"),
        (True, 32, {}, ValueError, "grid must be an int"),
        (1, 0, {}, ValueError, "block must have between 1 and 1024 threads along x"),
        (1, 1025, {}, ValueError, "block must have between 1 and 1024 threads along x"),
        (1, (1, 1, 65), {}, ValueError, "block must have between 1 and 64 threads along z"),
        (1, (32, 33), {}, ValueError, r"a block has at most 1024 threads, got block \(32, 33, 1\): 1056"),
        (1, 129, {}, ValueError, r"compiled for at most 128 threads per block \(__launch_bounds__\), got .*: 129"),
        (1, 32, {"shared": -1}, ValueError, "shared must be a number of bytes, 0 or more, got -1"),
        (1, 32, {"shared": 1.0}, ValueError, "shared must be a number of bytes"),
        (1, 32, {"shared": 227 * 1024 + 1}, ValueError, "shared must be at most 232448 bytes"),
        (3, 32, {"cluster": (2, 1, 1)}, ValueError, r"at most 16 blocks and divides the grid \(3, 1, 1\), got cluster"),
        ((2, 2), 32, {"cluster": (1, 2)}, NotImplementedError, "the SIMT machine has clusters along x alone"),
    ],
)
def test_wrong_launches(module, machine, grid, block, options, kind, said):
    with pytest.raises(kind, match=said):
        module.axpy(grid, block, *GOOD, **options)
    assert not machine.calls


def test_unknown_kernels(module):
    known = "axpy, any, values, hello, _Z7mangledPf, unreadable, by_macro"
    for name in ("axpi", "commented"):
        with pytest.raises(AttributeError, match=f"launch.cu has no kernel '{name}'; it has: "):
            getattr(module, name)
        with pytest.raises(AttributeError, match=f"no kernel '{name}'"):
            module[name]
    assert sorted(module.entries()) == sorted(known.split(", "))
    with pytest.raises(AttributeError, match='launch.cu: write extern "C" before __global__ void mangled'):
        module.mangled(1, 1, X)
    with pytest.raises(AttributeError, match="no kernel 'axpi'"):
        module.sass("axpi")


def test_compile_errors_bear_the_files_name(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void k(float* x) { x[0] = y; }\n')
    with pytest.raises(CompileError, match='broken.cu:1: error: identifier "y" is undefined'):
        cuda.load(path).k(1, 1, X)
    with pytest.raises(TypeError, match="source must be a str, got PosixPath; cuda.load takes a path"):
        cuda.compile(path)
    with pytest.raises(TypeError, match="options must be a tuple of strings"):
        cuda.compile(SOURCE, "-DN=1")
    with pytest.raises(FileNotFoundError):
        cuda.load(tmp_path / "absent.cu")


def test_a_file_includes_what_lies_beside_it(tmp_path, machine):
    (tmp_path / "shared.cuh").write_text("__device__ float two() { return 2; }\n")
    (tmp_path / "k.cu").write_text('#include "shared.cuh"\nextern "C" __global__ void k(float* x) { x[0] = two(); }\n')
    assert cuda.load(str(tmp_path / "k.cu")).k(1, 1, X) is machine.report


# Signatures


def test_signatures(module):
    entries = module.entries()
    assert [str(p) for p in entries["axpy"].parameters] == ["float* x", "float* y", "int n", "float by"]
    assert entries["axpy"].max_threads == 128 and entries["any"].max_threads == 0
    assert [p.kind for p in entries["any"].parameters] == ["pointer"] * 5
    assert [(p.kind, p.size) for p in entries["values"].parameters[1:]] == [
        ("integer", 1), ("integer", 2), ("integer", 4), ("integer", 8), ("integer", 1), ("float", 8), ("struct", 2)
    ]  # fmt: skip
    assert entries["hello"].parameters == ()
    two, x = entries["unreadable"].parameters
    assert (two.kind, two.size, x.kind) == ("struct", 8, "pointer or integer"), "the PTX alone, which is exact"
    assert [p.name for p in entries["by_macro"].parameters] == ["argument 0"]


def test_names_are_found_without_compiling():
    for name, there in (("axpy", True), ("hello", True), ("mangled", False), ("commented", False), ("by_macro", False)):
        source = SOURCE if name != "mangled" else "__global__ void mangled(float* x) { x[0] = 1; }"
        assert signature.is_named(source, name) is there, name


# Machine code, without a GPU


def test_ptx_cubin_and_sass(module):
    assert ".entry axpy" in module.ptx() and module.cubin()[:4] == b"\x7fELF"
    assert ".target sm_80" in module.ptx("sm_80")
    text = module.sass("axpy")
    assert text.startswith("axpy:\n") and "FFMA" in text and "STG" in text
    assert "hello" not in text and not text.rstrip().endswith("NOP;")
    assert {line[:-1] for line in module.sass().split("\n") if line[:1].isalpha()} == set(module.entries()) - {
        "_Z7mangledPf"
    }
    assert "sm_90a" in cuda.compile(SOURCE, arch="sm_90a").ptx()


def test_resources():
    source = """
    extern "C" __global__ void lean(float* x) {
      __shared__ float t[64];
      t[threadIdx.x] = x[0];
      __syncthreads();
      x[1] = t[3];
    }
    extern "C" __global__ void __launch_bounds__(1024) spills(float* x) {
      float a[160];
      #pragma unroll
      for (int i = 0; i < 160; i++) a[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < 160; i++) x[i * 1024 + threadIdx.x] = a[(i * 7 + 3) % 160] * a[i];
    }
    """
    found = cuda.compile(source).resources()
    lean, spills = found["lean"], found["spills"]
    assert lean["shared"] == 256 and 4 < lean["registers"] < 32
    assert lean["stack"] == lean["spill_stores"] == lean["spill_loads"] == 0
    assert spills["registers"] <= 64 and spills["spill_stores"] > 0 and spills["spill_loads"] > 0


def test_without_a_disassembler(module, monkeypatch):
    monkeypatch.setattr(disassembly.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(disassembly.Path, "is_file", lambda path: False)
    monkeypatch.setattr(disassembly.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match="shown by nvdisasm, which comes with Triton .* module.ptx\\(\\) needs neither"
    ):
        module.sass("axpy")


# The real machine


def test_on_the_machine(module):
    x, y = torch.randn(1000), torch.randn(1002)[2:]
    wanted = y + 0.5 * x
    report = module.axpy(8, 128, x, y, 1000, 0.5)
    assert torch.allclose(y, wanted)
    # 31 full warps and 8 lanes more; y starts in the middle of a sector, so each warp touches one more.
    sectors = (31 * 4 + 1) + (31 * 5 + 2)
    assert report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] == sectors


def test_on_the_machine_sixteen_bits_and_empty():
    source = """
    #include <cuda_bf16.h>
    extern "C" __global__ void twice(const __nv_bfloat16* x, __nv_bfloat16* y, int n, const float* absent) {
      if (threadIdx.x < n && absent == nullptr) y[threadIdx.x] = __float2bfloat16(2 * __bfloat162float(x[threadIdx.x]));
    }
    """
    module = cuda.compile(source)
    x = torch.randn(21).bfloat16()
    y = torch.full_like(x, float("nan"))
    module.twice(1, 32, x, y, 21, None)
    assert torch.equal(y, 2 * x)
    module.twice(1, 32, x[:0], y[:0], 0, None)


def test_what_the_machine_finds_comes_through(module):
    import simt

    with pytest.raises(simt.MemoryFault):
        module.axpy(8, 128, X, torch.ones(1000), 1000, 0.5)


def test_variables_are_set_for_launches_on_the_machine():
    module = cuda.compile("""
__constant__ float weights[4];
extern "C" __global__ void k(float* y) { y[threadIdx.x] = weights[threadIdx.x % 4]; }""")
    y, weights = torch.zeros(8), torch.arange(4.0)
    module.set("weights", weights)
    module.k(1, 8, y)
    assert torch.equal(y, weights.repeat(2))
    for value, error, message in [
        (torch.zeros(1), ValueError, "weights has 16 bytes; got 4"),
        (torch.zeros(4, 2)[:, 0], ValueError, "weights takes a contiguous tensor"),
        ([1.0], TypeError, "weights takes a tensor, got list"),
    ]:
        with pytest.raises(error, match=message):
            module.set("weights", value)
