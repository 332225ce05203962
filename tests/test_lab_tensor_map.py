"""Tensor maps: what they refuse, what a launch refuses, and boxes on the SIMT machine against slices of the tensor."""

import ctypes
import struct
import sys
import types

import numpy as np
import pytest
import torch
from hopper_kernels import GEMM, PRELUDE

import simt
from lab import cuda, cuda_driver, tensor_map
from lab.cuda import signature
from lab.tensor_map import TensorMap

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

COPY = (
    PRELUDE
    + r"""
extern "C" __global__ void copy(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                                int column, int row, int bytes) {  // a box of `from`, to the origin of `to`
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(&bar, 1);
    proxy_fence();
    expect(&bar, bytes);
    load2(s, &from, column, row, &bar);
    wait(&bar, 0);
    store2(&to, 0, 0, s);
    commit_stores();
    wait_stores();
  }
}
struct Other { long long words[16]; };
extern "C" __global__ void takes(float* y, const __grid_constant__ CUtensorMap map, int n, Other other) {
  y[0] = n + other.words[0];
}
"""
)


@pytest.fixture(scope="module")
def module():
    return cuda.compile(COPY, arch="sm_90a", name="copy.cu")


def numbers(dtype, *shape):
    return torch.randint(1, 100, shape).to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint16, torch.float8_e4m3fn],
)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_box_of_each_dtype(module, dtype, swizzle):
    columns = (swizzle or 64) // dtype.itemsize
    x, y = numbers(dtype, 23, 2 * columns), torch.zeros(8, columns).to(dtype)
    box = (8, columns)
    maps = TensorMap(x, box, swizzle), TensorMap(y, box, swizzle)
    size = 8 * columns * dtype.itemsize
    module.copy(1, 32, *maps, columns // 2, 18, size, shared=size, check_races=True)
    right = torch.zeros(8, columns)
    right[:5] = x[18:, columns // 2 : columns // 2 + columns].float()
    assert torch.equal(y.float(), right), "rows 23 to 25 lie outside: zeros"


def test_a_view_of_a_wider_tensor(module):
    """As x, B and C are views of one projection; the map writes to the tensor's own memory."""
    wide = numbers(torch.float16, 16, 96)
    y = torch.full((40, 160), float("nan"), dtype=torch.float16)
    part = y[8:24, 32:96]
    maps = TensorMap(wide[:, 16:80], (16, 64), 128), TensorMap(part, (16, 64), swizzle=128)
    module.copy(1, 32, *maps, 0, 0, 2048, shared=2048)
    assert torch.equal(part, wide[:, 16:80])
    assert y.isnan().sum() == y.numel() - part.numel()


def test_the_matmul_by_tensors():
    a, b = torch.randn(256, 192).half(), torch.randn(128, 192).half()
    c = torch.full((256, 128), float("nan"))
    maps = [TensorMap(x, (128, 64), swizzle=128) for x in (a, b)]
    cuda.compile(GEMM, arch="sm_90a").gemm((1, 2), 288, *maps, c, 128, 192, shared=3 * 2**15)
    assert torch.allclose(c, a.float() @ b.float().T, rtol=1e-4, atol=1e-4)


X = torch.zeros(32, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    ("args", "options", "kind", "said"),
    [
        (([1], (1,)), {}, TypeError, "tensor must be a torch.Tensor, got list"),
        ((X.numpy(), (8, 64)), {}, TypeError, "tensor must be a torch.Tensor, got ndarray"),
        ((X.to_sparse(), (8, 64)), {}, ValueError, "tensor must be dense, .* got layout torch.sparse_coo on cpu"),
        ((X.to("meta"), (8, 64)), {}, ValueError, "tensor must be .*, on the CPU or on a CUDA device, got .* on meta"),
        ((X.to(torch.complex64), (8, 64)), {}, TypeError, "one of the dtypes bfloat16, bool, .*, got torch.complex64"),
        ((X.view(2, 2, 2, 2, 2, 64), (1,) * 6), {}, ValueError, r"1 to 5 axes, .*, got shape \(2, 2, 2, 2, 2, 64\)"),
        ((X[0, 0], ()), {}, ValueError, r"1 to 5 axes, .*, got shape \(\)"),
        ((X[:0], (8, 64)), {}, ValueError, r"got shape \(0, 64\)"),
        ((X[:, 1:], (8, 8)), {}, ValueError, "must start at a multiple of 16 bytes, got one that starts 2 bytes"),
        ((X.T, (8, 8)), {}, ValueError, r"a dense last axis, stride 1, got strides \(1, 64\)"),
        ((X.view(-1)[:1980].view(20, 99), (8, 8)), {}, ValueError, r"multiples of 16 bytes \(16 / 2 = 8 elements\), "
         "below .*, got 198 bytes along axis 0"),
        ((X[:1].expand(9, 64), (8, 8)), {}, ValueError, "got 0 bytes along axis 0"),
        ((X, (8,)), {}, ValueError, r"box must be 2 ints, one for each axis of the tensor, got \(8,\)"),
        ((X, 8), {}, ValueError, r"box must be 2 ints, .*, got \(8,\)"),
        ((X, (8, 8.0)), {}, ValueError, r"box must be 2 ints, .*, got \(8, 8.0\)"),
        ((X, (257, 64)), {}, ValueError, r"box must have 1 to 256 elements along each axis, got \(257, 64\)"),
        ((X, (0, 64)), {}, ValueError, r"box must have 1 to 256 elements along each axis, got \(0, 64\)"),
        ((X, (8, 12)), {}, ValueError, r"box must have a last axis of a multiple of 16 bytes, got 12 \* 2"),
        ((X, (8, 64), 256), {}, ValueError, "swizzle must be 0, 32, 64 or 128 bytes, got 256"),
        ((X, (8, 64), 64), {}, ValueError, r"with swizzle=64 the last axis of box must have 64 bytes, got 64 \* 2"),
        ((X, (8, 32), 128), {}, ValueError, r"with swizzle=128 the last axis of box must have 128 bytes, got 32 \* 2"),
        ((X, (8, 64), 128), {"l2_promotion": 32}, ValueError, "l2_promotion must be 0, 64, 128 or 256 bytes, got 32"),
    ],
)  # fmt: skip
def test_what_is_no_map(args, options, kind, said):
    with pytest.raises(kind, match=f"^TensorMap: .*{said}"):
        TensorMap(*args, **options)


def test_an_axis_of_one_may_have_any_stride(module):
    one = torch.as_strided(X, (1, 64), (3, 1))
    assert tensor_map.check(0, *(one.shape, one.stride(), one.dtype), (1, 64), 128, 256) == (128,)
    assert tensor_map.check(0, (3, 1, 1, 9), (64, 7, 5, 1), torch.float16, (1, 1, 1, 8), 0, 0) == (128, 32, 32)
    y = torch.zeros(8, 64, dtype=torch.float16)
    module.copy(1, 32, TensorMap(one + 3, (8, 64), 128), TensorMap(y, (8, 64), 128), 0, 0, 1024, shared=1024)
    assert (y[0] == 3).all() and not y[1:].any()


@pytest.mark.parametrize("launch", ["__call__", "unchecked"])
def test_what_a_launch_refuses(module, launch):
    y, map = torch.zeros(4), TensorMap(X, (8, 64), 128)
    other = np.void(bytes(128))
    takes = getattr(module.takes, launch)
    wanted = r"takes: map must be a lab.tensor_map.TensorMap \(CUtensorMap\), got "
    for wrong, got in [
        (X, "a tensor"),
        (other, "void"),
        (bytes(128), "bytes"),
        (None, "NoneType"),
        (simt.TensorMap(X.numpy(), (8, 64)), "TensorMap"),
        (5, "int"),
    ]:
        with pytest.raises(TypeError, match=wanted + got):
            takes(1, 1, y, wrong, 5, other)
    with pytest.raises(TypeError, match=r"takes: other must be a NumPy scalar of 128 bytes \(Other\), got TensorMap"):
        takes(1, 1, y, map, 5, map)
    with pytest.raises(TypeError, match=r"takes: y must be a tensor \(float\*\), got TensorMap"):
        takes(1, 1, map, map, 5, other)
    with pytest.raises(TypeError, match=r"takes: n must be an int .*, got TensorMap"):
        takes(1, 1, y, map, map, other)
    assert not y.any()
    takes(1, 1, y, map, 5, other)
    assert y[0] == 5


def on(map, index):
    """The same map, as if its tensor lay on a card."""
    moved = object.__new__(TensorMap)
    for name in TensorMap.__slots__:
        setattr(moved, name, getattr(map, name))
    moved.device, moved.index, moved.value = torch.device("cuda", index), index, bytes(range(128))
    return moved


def test_a_map_of_another_device_is_refused(module):
    y, map = torch.zeros(4), TensorMap(X, (8, 64), 128)
    module.takes(1, 1, y, map, 5, np.void(bytes(128)))  # what was found for this one does not cover the next
    with pytest.raises(ValueError, match="map must be on cpu, like y, got a tensor map of a tensor on cuda:0"):
        module.takes(1, 1, y, on(map, 0), 5, np.void(bytes(128)))


# What a card is given, without one


def test_the_drivers_arguments(monkeypatch):
    """Axes innermost first, strides of all but the innermost in bytes; encoded once for the same memory."""
    calls = []

    def encode(at, *given):
        calls.append([list(g) if hasattr(g, "_length_") else g.value for g in given])
        ctypes.memmove(at.value, bytes(range(128)), 128)
        return 0 if at.value % 64 == 0 else 1

    monkeypatch.setattr(cuda_driver, "driver", lambda: types.SimpleNamespace(cuTensorMapEncodeTiled=encode))
    monkeypatch.setattr(cuda_driver, "capability", lambda index: (9, 0))
    tensor_map.encoded.cache_clear()
    place = (4096, (2, 100, 80, 64), (80 * 6400, 5120, 64, 1), torch.bfloat16)
    for _ in range(2):
        assert tensor_map.encoded(0, *place, (1, 64, 1, 64), 128, 128) == bytes(range(128))
    wide = [64, 80, 100, 2], [128, 10240, 2 * 80 * 6400, 0], [64, 1, 64, 1]
    assert calls == [[9, 4, 4096, *wide, [1] * 4, 0, 3, 2, 0]]
    tensor_map.encoded(0, 4096, (1000,), (1,), torch.float32, (64,), 0, 0)
    assert calls[1] == [7, 1, 4096, [1000], [0], [64], [1], 0, 0, 0, 0]
    monkeypatch.setattr(cuda_driver, "capability", lambda index: (8, 9))
    with pytest.raises(RuntimeError, match="tensor maps need a card of compute capability 9.0 or newer"):
        tensor_map.encoded(0, *place, (1, 64, 1, 64), 128, 256)
    tensor_map.encoded.cache_clear()


def test_a_card_gets_the_bytes(module):
    parameters = module.entries()["takes"].parameters
    assert [parameter.is_map for parameter in parameters] == [False, True, False, False]
    map = on(TensorMap(X, (8, 64), 128), 0)
    convert = signature.converter("takes", parameters[1], True)
    slot = cuda_driver._Slot(parameters, cooperative=False)
    slot.pack(slot.values, 0, 4096, convert(map), 7, bytes(128))
    assert slot.values[16 : 16 + 128] == bytes(range(128)) and slot.pointers[1] - slot.pointers[0] == 16
    with pytest.raises(struct.error):
        slot.pack(slot.values, 0, 4096, None, 7, bytes(128))  # so that `unchecked` turns to the checked launch
