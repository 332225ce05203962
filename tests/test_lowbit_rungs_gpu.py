"""Chapter 06's weights and first two rungs on a card: the same codes as on the CPU, right on hostile and large shapes,
and the same bits as on the SIMT machine."""

import pytest
import torch

from kernels import lowbit

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

BITS = (8, 4, 2)
GUARD, FENCE = 64, 1234.0
# rows, cols, group, m
SHAPES = [(7, 97, None, None), (1, 1, None, 1), (33, 1056, 32, 1), (4096, 4096, 128, None), (129, 576, 64, 3)]
SHAPES += [(1000, 4100, None, 16), (300, 14336, 128, 5)]
every_bits = pytest.mark.parametrize("bits", BITS)
every_rung = pytest.mark.parametrize("name", ["shift", "magic"])


def between(tensor, fence=torch.nan, skip=0):
    """A copy on the card that lies between guards, `skip` elements further on than an aligned address."""
    home = torch.full((tensor.numel() + 2 * GUARD + skip,), fence, dtype=tensor.dtype, device="cuda")
    return home[GUARD + skip : GUARD + skip + tensor.numel()].view(tensor.shape).copy_(tensor)


def fences_stand(out):
    home = torch.empty(0, dtype=out.dtype, device="cuda").set_(out.untyped_storage())
    first, last = out.storage_offset(), out.storage_offset() + out.numel()
    return bool((home[:first] == FENCE).all() and (home[last:] == FENCE).all())


def problem(rows, cols, bits, group, m, dtype, skip=0):
    W = torch.randn(rows, cols, device="cuda").to(dtype)
    lead = () if m is None else (m,)
    out = between(torch.full((*lead, rows), torch.nan, dtype=dtype), FENCE)
    return lowbit.quantize(W, bits, group), between(torch.randn(*lead, cols).to(dtype), skip=skip), out


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
