"""Tensor maps on a card: boxes of every rank and dtype against slices of the tensor, launches, graphs, host time."""

import threading
import time

import pytest
import torch
from hopper_kernels import PRELUDE

from lab import cuda, tensor_map
from lab.tensor_map import TensorMap

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a CUDA GPU of compute capability 9.0",
)


def load(rank):
    """A kernel that writes one box as it lies in shared memory, and 64 bytes behind it."""
    coordinates = ", ".join(f"%{i + 3}" for i in range(rank))
    given = ", ".join(f'"r"(c{i})' for i in range(rank))
    return f"""
extern "C" __global__ void load{rank}(int* y, const __grid_constant__ CUtensorMap map, int bytes,
                                      int c0, int c1, int c2, int c3, int c4) {{
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ u64 bar;
  for (int i = threadIdx.x; i < bytes / 4 + 16; i += blockDim.x) ((int*)s)[i] = -1;
  proxy_fence();
  if (threadIdx.x == 0) init(&bar, 1);
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(&bar, bytes);
    asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {{{coordinates}}}], [%2];"
                 :: "r"(at(s)), "l"(&map), "r"(at(&bar)), {given} : "memory");
  }}
  wait(&bar, 0);
  for (int i = threadIdx.x; i < bytes / 4 + 16; i += blockDim.x) y[i] = ((int*)s)[i];
}}"""


@pytest.fixture(scope="module")
def module():
    return cuda.compile(PRELUDE + "".join(load(rank) for rank in range(1, 6)), arch="sm_90a", name="boxes.cu")


def outside_zero(x, box, start):
    """The box of a CPU tensor that begins at `start`, zeros where it lies outside."""
    out = torch.zeros(box, dtype=x.dtype)
    inside = [range(max(s, 0), min(s + b, n)) for s, b, n in zip(start, box, x.shape)]
    if all(len(r) for r in inside):
        to = tuple(slice(r.start - s, r.stop - s) for r, s in zip(inside, start))
        out[to] = x[tuple(slice(r.start, r.stop) for r in inside)]
    return out


def fetch(module, x, box, start, swizzle=0, launch="__call__", **options):
    """The box's bytes in shared memory."""
    size = box[-1] * x.element_size()
    for n in box[:-1]:
        size *= n
    y = torch.zeros(size // 4 + 16, dtype=torch.int32, device="cuda")
    at = [*start[::-1], 0, 0, 0, 0][:5]
    kernel = getattr(module[f"load{x.dim()}"], launch)
    kernel(1, 64, y, TensorMap(x, box, swizzle, **options), size, *at, shared=size + 64)
    assert (y[size // 4 :] == -1).all(), "nothing behind the box is touched"
    return y[: size // 4].view(torch.uint8).cpu()


DTYPES = [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "box", "start"),
    [
        ((1000,), (64,), (48,)),
        ((40, 32), (16, 16), (-3, 16)),
        ((5, 6, 32), (2, 3, 16), (4, -1, 16)),
        ((2, 150, 6, 64), (1, 64, 1, 16), (1, 128, 3, 32)),  # as x of an SSD layer: (batch, seqlen, nheads, headdim)
        ((2, 3, 2, 3, 32), (1, 2, 1, 2, 16), (1, 1, 0, 2, 0)),
    ],
)
def test_boxes_of_every_rank(module, dtype, shape, box, start):
    x = torch.randint(1, 100, shape).to(dtype)
    got = fetch(module, x.cuda(), box, start).view(dtype).view(box)
    assert torch.equal(got.float(), outside_zero(x.float(), box, start))


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzles_and_views(module, swizzle):
    wide = torch.randint(0, 9999, (70, 200), dtype=torch.int16)
    columns = swizzle // 2
    for l2 in (0, 64, 128, 256):
        got = fetch(module, wide.cuda()[3:, 8:168], (24, columns), (5, 16), swizzle, l2_promotion=l2).view(torch.int16)
        byte = torch.arange(24 * columns) * 2
        place = byte ^ (byte >> 3 & (swizzle - 16))
        assert torch.equal(got[place // 2].view(24, columns), wide[8:32, 24 : 24 + columns])


def test_many_maps_after_one_another(module):
    """Each launch reads its own map, checked, unchecked and out of a graph."""
    many = [torch.full((8, 32), float(i), device="cuda") for i in range(40)]
    for launch in ("__call__", "unchecked"):
        for i, x in enumerate(many):
            assert (fetch(module, x, (4, 16), (2, 8), launch=launch).view(torch.float32) == i).all()
    out = [torch.zeros(80, dtype=torch.int32, device="cuda") for _ in many]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, y in zip(many, out):
            module.load2.unchecked(1, 64, y, TensorMap(x, (4, 16)), 256, 0, 0, 0, 0, 0, shared=320)
    for x in many:
        x += 0.5
    graph.replay()
    for i, y in enumerate(out):
        assert (y[:64].view(torch.float32) == i + 0.5).all()


def test_from_a_fresh_thread(module):
    """One that has no CUDA context of its own yet."""
    x, found = torch.full((8, 32), 7.0, device="cuda"), []
    thread = threading.Thread(target=lambda: found.append(TensorMap(x, (8, 32)).value))
    thread.start()
    thread.join()
    assert found == [TensorMap(x, (8, 32)).value]


def test_what_a_launch_refuses(module):
    x, y = torch.ones(8, 32, device="cuda"), torch.zeros(80, dtype=torch.int32, device="cuda")
    rest = 256, 0, 0, 0, 0, 0
    map = TensorMap(x, (4, 16))
    assert len(map.value) == tensor_map.BYTES and map.get_device() == x.device.index
    for launch in (module.load2, module.load2.unchecked):
        launch(1, 64, y, map, *rest, shared=320)
        for wrong, kind, said in [
            (
                TensorMap(x.cpu(), (4, 16)),
                ValueError,
                "map must be on cuda:0, like y, got a tensor map of a tensor on cpu",
            ),
            (map.value, TypeError, r"map must be a lab.tensor_map.TensorMap \(CUtensorMap\), got bytes"),
            (x, TypeError, "map must be a lab.tensor_map.TensorMap .*, got a tensor"),
        ]:
            with pytest.raises(kind, match=said):
                launch(1, 64, y, wrong, *rest, shared=320)


def test_host_time(module, capsys):
    """On the host of an H200: 1.2 us for a map that was made before, 14 for a new one, with its slice of the tensor."""
    x, y = torch.ones(1, 4096, 80, 64, dtype=torch.float16, device="cuda"), torch.zeros(160, device="cuda").int()
    start = time.perf_counter()
    for i in range(1000):
        TensorMap(x[:, i:], (1, 64, 1, 64), 128)
    new = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(1000):
        map = TensorMap(x, (1, 64, 1, 64), 128)
    again = time.perf_counter() - start
    small = TensorMap(x.view(-1, 64), (4, 64), 128)
    module.load2(1, 64, y, small, 512, 0, 0, 0, 0, 0, shared=1024)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        module.load2.unchecked(1, 64, y, small, 512, 0, 0, 0, 0, 0, shared=1024)
    launch = time.perf_counter() - start
    with capsys.disabled():
        print(
            f"\na new map {new * 1e3:.2f} us, made before {again * 1e3:.2f} us, a launch with one {launch * 1e3:.2f} us"
        )
    assert map.value is TensorMap(x, (1, 64, 1, 64), 128).value
    assert new < 0.1 and again < 0.02, "us a map, by 1000"
