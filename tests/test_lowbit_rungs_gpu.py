"""Chapter 06's weights and first three rungs on a card: the same codes as on the CPU, right on hostile and large
shapes, and the same bits as on the SIMT machine."""

import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

from kernels import lowbit

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

BITS = (8, 4, 2)
# rows, cols, group, m
SHAPES = [(7, 97, None, None), (1, 1, None, 1), (33, 1056, 32, 1), (4096, 4096, 128, None), (129, 576, 64, 3)]
SHAPES += [(1000, 4100, None, 16), (300, 14336, 128, 5)]
every_bits = pytest.mark.parametrize("bits", BITS)
every_rung = pytest.mark.parametrize("name", ["shift", "magic"])


def problem(rows, cols, bits, group, m, dtype, skip=0):
    W = torch.randn(rows, cols, device="cuda").to(dtype)
    lead = () if m is None else (m,)
    out = between(torch.full((*lead, rows), torch.nan, dtype=dtype, device="cuda"), FENCE)
    x = torch.randn(*lead, cols, device="cuda").to(dtype)
    return lowbit.quantize(W, bits, group), between(x, skip=skip), out


def close(out, Wq, x):
    W = Wq.dequantize(torch.float64)
    wanted, size = x.double() @ W.T, x.double().abs() @ W.abs().T
    eps = torch.finfo(out.dtype).eps / 2
    assert ((out.double() - wanted).abs() <= 1.01 * eps * wanted.abs() + 1e-5 * size + 1e-7).all()


@every_bits
def test_the_codes_are_those_of_the_cpu(bits):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for scale_dtype in (None, torch.float16, torch.float32):
            W = torch.randn(200, 4096) * 2.0 ** torch.randint(-12, 8, (200, 1))
            W[3, :128] = 0.3
            on_card, on_cpu = (
                lowbit.quantize(w, bits, 128, scale_dtype=scale_dtype) for w in (W.to(dtype).cuda(), W.to(dtype))
            )
            for name in ("scale", "zero", "packed", "factors"):
                assert torch.equal(getattr(on_card, name).cpu(), getattr(on_cpu, name)), name
            assert torch.equal(on_card.dequantize().cpu(), on_cpu.dequantize())
            assert torch.equal(on_card.row_major().cpu(), on_cpu.row_major())


@pytest.mark.parametrize("rows, cols", [(16, 256), (4096, 4096), (1008, 14336), (48, 2176)])
def test_digits_on_its_shapes(rows, cols):
    Wq, x, out = problem(rows, cols, 4, 128, None, torch.float16)
    assert lowbit.digits(Wq, x, out=out) is out
    close(out, Wq, x)
    assert fences_stand(out)


@every_bits
@every_rung
def test_right_on_hostile_shapes(name, bits):
    for dtype in (torch.float16, torch.bfloat16):
        for skip, shape in enumerate(SHAPES):
            Wq, x, out = problem(*shape[:2], bits, *shape[2:], dtype, skip % 5)
            assert getattr(lowbit, name)(Wq, x, out=out) is out
            close(out, Wq, x)
            assert fences_stand(out)


@every_bits
def test_the_bits_of_the_machine(bits):
    for dtype in (torch.float16, torch.bfloat16):
        W, x = torch.randn(9, 1056).to(dtype), torch.randn(2, 1056).to(dtype)
        wanted = lowbit.shift(lowbit.quantize(W, bits, 32), x)
        Wq = lowbit.quantize(W.cuda(), bits, 32)
        for name in ("shift", "magic"):
            assert torch.equal(getattr(lowbit, name)(Wq, x.cuda()).cpu(), wanted)


@every_rung
def test_in_a_graph(name):
    Wq, x, out = problem(512, 1024, 4, 128, None, torch.float16)
    rung = getattr(lowbit, name)
    rung(Wq, x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rung(Wq, x, out=out)
    x.copy_(torch.randn(1024))
    graph.replay()
    close(out, Wq, x)


@every_rung
def test_a_graph_does_not_capture_the_first_call(name):
    """It would lay the codes out in the graph's memory, where nothing is before a replay."""
    Wq, x, out = problem(512, 1024, 4, 128, None, torch.float16)
    rung, graph = getattr(lowbit, name), torch.cuda.CUDAGraph()
    codes, W = Wq.codes(), Wq.dequantize()
    instead = "call it before the capture"
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.mul_(1)  # so that the graph is not empty
        with pytest.raises(
            RuntimeError, match="a graph cannot capture the first call, .* of Wq anew; call the rung once"
        ):
            rung(Wq, x, out=out)
        with pytest.raises(RuntimeError, match=f"from_codes: a graph cannot capture the look at codes.*{instead}"):
            lowbit.from_codes(codes, Wq.scale, Wq.zero, 4)
        with pytest.raises(RuntimeError, match=f"quantize: a graph cannot capture the look at .* of W, .*{instead}"):
            lowbit.quantize(W, 4, 128)
    assert out.isnan().all() and fences_stand(out)
    rung(Wq, x, out=out)
    close(out, Wq, x)


@every_rung
def test_another_stream_reads_the_codes_that_the_first_call_lays_out(name):
    for _ in range(3):
        Wq, x, _ = problem(4096, 4096, 4, 128, None, torch.float16)
        rung, side = getattr(lowbit, name), torch.cuda.Stream()
        rung(lowbit.quantize(torch.ones(64, 4096, device="cuda").half(), 4, 128), x)  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # the first call waits behind this
        one = rung(Wq, x)
        with torch.cuda.stream(side):
            two = rung(Wq, x)
        torch.cuda.synchronize()
        assert torch.equal(one, two)
        close(two, Wq, x)


def test_what_a_card_refuses():
    Wq, x, _ = problem(4, 32, 4, None, None, torch.float16)
    with pytest.raises(ValueError, match="magic: x must be on cuda:0, like the first tensor, got one on cpu"):
        lowbit.magic(Wq, x.cpu())
    with pytest.raises(ValueError, match="counters: x must be on the CPU, got a tensor on cuda:0"):
        lowbit.counters("magic", Wq, x)
    bad = torch.ones(3, 32, device="cuda")
    bad[2, 7] = torch.nan
    with pytest.raises(ValueError, match=r"W must be finite, got nan at \(2, 7\)"):
        lowbit.quantize(bad, 4)
