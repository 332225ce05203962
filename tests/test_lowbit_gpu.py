"""The best low-bit rung on a card: right beside float64, also where launches overlap and in a graph."""

import pytest
import torch

from kernels import lowbit

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CASES = [  # rows, cols, bits, group, m, dtype of x, of scales
    (1, 1, 8, None, 1, HALF, HALF),
    (37, 129, 4, None, 3, BRAIN, SINGLE),
    (1009, 4224, 4, 128, 1, HALF, HALF),
    (777, 1408, 2, 64, 5, BRAIN, BRAIN),
    (4096, 4096, 4, 32, 16, HALF, SINGLE),
    (4096, 14336, 4, 128, 16, HALF, HALF),
    (1031, 14336, 2, 128, 1, HALF, HALF),
    (32000, 4096, 8, None, 1, HALF, HALF),
    (100, 40000, 4, 64, 2, HALF, HALF),
    (300, 2048, 8, None, 11, BRAIN, HALF),
    (64, 4096, 8, 64, 16, BRAIN, SINGLE),
    (14336, 4096, 4, 128, 16, HALF, HALF),
    (4096, 14336, 2, 128, 1, HALF, HALF),
]


def problem(rows, cols, bits, group, m, dtype, scale_dtype):
    rng = torch.Generator("cuda").manual_seed(rows + cols)
    W = torch.randn(rows, cols, generator=rng, device="cuda")
    Wq = lowbit.quantize(W.to(dtype), bits, group, scale_dtype=scale_dtype)
    xs = [torch.randn(m, cols, generator=rng, device="cuda").to(dtype) for _ in range(4)]
    return Wq, Wq.dequantize(torch.float64).T, xs


def close(y, x, W):
    wanted = x.double() @ W
    assert float((y.double() - wanted).norm()) <= torch.finfo(y.dtype).eps * float(wanted.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("pdl", [False, True])
def test_right(case, pdl):
    """x changes between launches: a kernel that reads it too early is found out."""
    Wq, W, xs = problem(*case)
    x, got = torch.full_like(xs[0], torch.nan), []
    torch.cuda.synchronize()  # a dependent launch may read the weights before they are written
    xs += [one.abs() for one in xs[:2]]  # of one sign: the largest sums
    for one in xs:
        x.copy_(one)
        got.append(lowbit.gemv(Wq, x, pdl=pdl))
    for one, y in zip(xs, got):
        close(y, one, W)


@pytest.mark.parametrize("case", [CASES[2], CASES[5], CASES[11]], ids=str)
def test_a_chain_in_a_graph(case):
    """Launches that follow each other at once, each into its own output, and a replay with another x."""
    Wq, W, xs = problem(*case)
    x = xs[0].clone()
    outs = [torch.full((len(x), case[0]), torch.nan, device="cuda", dtype=x.dtype) for _ in range(8)]
    lowbit.gemv(Wq, x, pdl=True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            lowbit.gemv(Wq, x, out=out, pdl=True)
    for one in xs:
        x.copy_(one)
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            close(out, one, W)
            assert torch.equal(out, outs[0])


@pytest.mark.parametrize("m", [3, 12])
def test_card_and_machine_agree(m):
    """Up to four rows sums over a group are exact on both; what is left are float32 sums."""
    Wq, _, xs = problem(100, 512, 4, 128, m, HALF, HALF)
    here = lowbit.QuantizedWeight(Wq.codes().cpu(), Wq.scale.cpu(), Wq.zero.cpu(), 4, 128, HALF)
    wanted = lowbit.gemv(here, xs[0].cpu()).double()
    difference = lowbit.gemv(Wq, xs[0]).cpu().double() - wanted
    assert float(difference.abs().max()) <= 2**-8 * float(wanted.abs().max())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("m", [2, 7])
def test_what_is_not_finite_stays_in_its_row(bad, m):
    Wq, W, xs = problem(300, 1024, 4, 128, m, HALF, HALF)
    xs[0][1, 700] = bad
    y = lowbit.gemv(Wq, xs[0])
    assert not y[1].isfinite().any()
    close(y[:1], xs[0][:1], W)
