"""The matmul ladder on a card: right on hostile and on large shapes, in every size that the plan knows, in clusters, in
graphs, and again and again with the same bits."""

import functools

import matmul_tensors
import pytest
import torch
from guarded_tensors import fences_stand
from matmul_tensors import close

from kernels import matmul
from kernels.matmul import bench
from kernels.matmul.variants import FEW, LARGE, Variant
from lab import cuda
from lab.tensor_map import TensorMap

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
HOPPER = HERE and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a card of compute capability 9.0")

NAMES = [rung.name for rung in matmul.RUNGS]
DTYPES = [torch.float16, torch.bfloat16]
problem = functools.partial(matmul_tensors.problem, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    if not HOPPER and name not in ("tile", "mma"):
        pytest.skip("needs a card of compute capability 9.0")
    shapes = bench.HOSTILE + ([] if name == "persistent" else [(67, 71, 88), (1, 1, 8), (1000, 1001, 1016)])
    for shape in shapes + ([(129, 131, 83), (1, 1, 1)] if name == "tile" else []):
        x, W, out = problem(*shape, dtype)
        before = x.clone(), W.clone()
        assert getattr(matmul, name)(x, W, out=out) is out
        close(out, x, W)
        assert fences_stand(out) and torch.equal(x, before[0]) and torch.equal(W, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:linear")
def test_linear_takes_any_shape(dtype):
    sizes = (1, 7, 8, 63, 65, 128, 257)
    for m in sizes:
        for n in sizes:
            for k in (1, 8, 13, 64, 200):
                x, W, out = problem(m, n, k, dtype, skip=(m + n) % 3)
                matmul.linear(x, W, out=out)
                close(out, x, W)
                assert fences_stand(out)


@hopper
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 4096), (8191, 4104, 1000), (16, 14336, 4096), (3000, 5000, 14336)])
def test_large_shapes(m, n, k):
    x, W, out = problem(m, n, k, torch.bfloat16)
    for name in ("linear", "specialised", "planned"):
        getattr(matmul, name)(x, W, out=out.fill_(torch.nan))
        close(out, x, W)
        assert fences_stand(out)


@hopper
@pytest.mark.parametrize("variant", [*LARGE, *FEW], ids=lambda v: v.title)
def test_every_variant(variant: Variant):
    """On a shape whose edges cut tiles and pairs of them, with several tiles for each block."""
    for m, n, k in ((4100, 4104, 328), (300, 520, 1032)):
        x, W, out = problem(m, n, k, torch.bfloat16)
        if variant.fits(m, n, k, x.device):
            variant.prepare(x, W, out)()
            close(out, x, W)
            assert fences_stand(out)


@hopper
def test_a_row_beyond_2_to_31_elements():
    x, W, _ = problem(65600, 8, 8, torch.float16)
    W = W.repeat(4200, 1)  # y has 2.2e9 elements
    y = matmul.linear(x, W)
    rows = torch.tensor([0, 1, 32767, 32768, 65535, 65599], device="cuda")
    close(y[rows], x[rows], W)


@hopper
def test_the_same_bits_again():
    """Nothing depends on which block comes first: 20 runs into poisoned outputs, cut along k and not."""
    for shape in ((1000, 4104, 2056), (64, 512, 8192)):
        x, W, out = problem(*shape, torch.bfloat16)
        first = matmul.linear(x, W).clone()
        for _ in range(20):
            matmul.linear(x, W, out=out.fill_(torch.nan))
            assert torch.equal(out, first)


@hopper
def test_in_a_graph_and_on_streams():
    x, W, out = problem(512, 4096, 4096, torch.bfloat16)
    small = problem(64, 512, 8192, torch.bfloat16)  # cut along k
    wanted = [matmul.linear(*args[:2]).clone() for args in ((x, W), small)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul.linear(x, W, out=out)
        matmul.linear(*small[:2], out=small[2])
    for _ in range(3):
        out.fill_(torch.nan), small[2].fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted[0]) and torch.equal(small[2], wanted[1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = matmul.linear(x, W)
    stream.synchronize()
    assert torch.equal(again, wanted[0])


@hopper
def test_results_feed_the_next_layer():
    """Launch behind launch, merge.cu as a dependent among them: each reads what the one before wrote."""
    x = torch.randn(48, 4096, device="cuda").bfloat16()
    layers = [(torch.randn(4096, 4096, device="cuda") / 64).bfloat16() for _ in range(4)]
    for _ in range(10):
        y, wanted = x, x
        for W in layers:
            y, wanted = matmul.linear(y, W), torch.nn.functional.linear(wanted, W)
        assert float((y.double() - wanted.double()).norm() / wanted.double().norm()) < 0.02


@hopper
def test_a_call_that_was_prepared_sees_other_tensors():
    x, W, _ = problem(40, 64, 72, torch.float16)
    for _ in range(3):
        x.normal_()
        close(matmul.linear(x, W), x, W)
    other = torch.randn_like(W)
    close(matmul.linear(x, other), x, other)
    with pytest.raises(ValueError, match="out must not share memory"):
        matmul.linear(x, W, out=x.view(-1)[: 40 * 64].view(40, 64))


@pytest.mark.skipif(not HERE or torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0")
@pytest.mark.parametrize("name", ["ring", "box", "fragments", "product", "registers", "store", "cluster"])
def test_tools_on_a_card(name):
    kernel = cuda.load(matmul.HERE / "tools" / f"{name}.cu", arch="sm_90a" if HOPPER else None)[name]
    tile = torch.randint(-8, 9, (64, 64), device="cuda").half()
    if name == "ring":
        from_ = torch.arange(3200, dtype=torch.int32, device="cuda")
        to = torch.full_like(from_, -1)
        kernel(1, 64, from_, to, 100)
        assert torch.equal(to.view(100, 32), from_.view(100, 32).flip(1))
    elif name == "box":
        to = torch.full((64, 64), torch.nan, device="cuda").half()
        kernel(1, 128, TensorMap(tile, (64, 64), 128), to, 8, 16)
        assert torch.equal(to[:56, :48], tile[8:, 16:]) and (to[56:] == 0).all() and (to[:, 48:] == 0).all()
    elif name == "fragments":
        to = torch.full((4, 4, 32, 8), torch.nan, device="cuda").half()
        kernel(1, 32, tile, to)
        parts = tile.view(4, 2, 8, 4, 2, 4, 2)
        assert torch.equal(to, parts.permute(0, 3, 2, 5, 4, 1, 6).reshape(4, 4, 32, 8))
    elif name == "product" and HOPPER:
        to = torch.full((64, 64), torch.nan, device="cuda")
        kernel(1, 128, tile, tile.flip(0).contiguous(), to)
        assert torch.equal(to.double(), tile.double() @ tile.double().flip(0).T)
    elif name == "registers" and HOPPER:
        x, to = torch.randn(456, device="cuda"), torch.full((2, 128, 200), torch.nan, device="cuda")
        kernel(1, 384, x, to, 256)
        products = x[:256, None] * x.unfold(0, 200, 1)[:256]
        assert torch.allclose(to[0], products.view(2, 128, 200).sum(0), atol=1e-4) and torch.equal(to[0], to[1])
    elif name == "store":
        y = torch.full((100, 72), torch.nan, device="cuda").half()
        kernel(1, 128, tile, TensorMap(y, (64, 64), 128), 64, 8)
        assert torch.equal(y[64:, 8:], tile[:36]) and y[:64].isnan().all() and y[:, :8].isnan().all()
    elif name == "cluster":
        to = torch.full((2, 64, 64), torch.nan, device="cuda").half()
        kernel(2, 128, TensorMap(tile, (32, 64), 128), to, cluster=(2, 1, 1))
        assert torch.equal(to, tile.expand(2, 64, 64))
