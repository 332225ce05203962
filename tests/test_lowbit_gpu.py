"""The best low-bit rung on a card: right beside float64, also where launches overlap and in a graph."""

import pytest
import torch

from kernels import lowbit
from kernels.lowbit.plan import plan
from lab import card

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
    (1009, 4096, 8, None, 8, HALF, HALF),
    (2048, 14336, 8, None, 16, BRAIN, SINGLE),
    (1031, 28672, 8, None, 1, HALF, HALF),
    (777, 28672, 2, 128, 16, HALF, HALF),
    (5120, 5120, 4, 128, 4, HALF, HALF),
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


def waited(Wq, x):
    """The product, with nothing else under way: what overlapping launches must give, bit for bit."""
    torch.cuda.synchronize()
    y = lowbit.gemv(Wq, x, pdl=True)
    torch.cuda.synchronize()
    return y


def replayed(launches):
    """A function that replays these launches from a graph, once they have been called."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return graph.replay


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("m, bits", [(1, 4), (4, 8), (16, 4), (7, 2)])
def test_y_is_the_next_x(m, bits, graph):
    """A dependent launch that reads x before the one ahead has ended would read what the last round left there."""
    Wq, _, xs = problem(2048, 2048, bits, 128, m, HALF, HALF)
    Wq = lowbit.QuantizedWeight(Wq.codes(), Wq.scale / 45, Wq.zero, bits, 128, HALF)  # y is as large as x
    W = Wq.dequantize(torch.float64).T
    chain = [torch.full_like(xs[0], torch.nan) for _ in range(9)]

    def launches():
        for x, y in zip(chain, chain[1:]):
            lowbit.gemv(Wq, x, out=y, pdl=True)

    torch.cuda.synchronize()
    again = replayed(launches) if graph else launches
    for first in xs:
        chain[0].copy_(first)
        again()
        torch.cuda.synchronize()
        for x, y in zip(chain, chain[1:]):
            assert torch.equal(y, waited(Wq, x))
            close(y, x, W)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("m, wide", [(16, 14336), (2, 40960)])
def test_split_and_whole_in_turn(m, wide, graph):
    """Up and down, again and again, as in a layer of a model: the way down is split, so that its parts take the memory
    of those before; and what is written was read by the launch ahead. Both ways early, and alternating with plain."""
    up, _, xs = problem(wide, 1024, 4, 128, m, HALF, HALF)
    down, _, _ = problem(1024, wide, 4, 128, m, HALF, HALF)
    up, down = (
        lowbit.QuantizedWeight(w.codes(), w.scale / w.shape[1] ** 0.5, w.zero, 4, 128, HALF) for w in (up, down)
    )
    multiprocessors, room = (count(xs[0].device) for count in (card.multiprocessors, card.shared_memory))
    splits = [plan(*w.shape, m, 4, 128, 2, multiprocessors, room, True, True).splits for w in (up, down)]
    assert splits[0] == 1 < splits[1]
    x, hidden = torch.full_like(xs[0], torch.nan), torch.full((m, wide), torch.nan, device="cuda", dtype=HALF)
    kept = [torch.full_like(x, torch.nan) for _ in range(4)]  # what each round leaves in x

    def launches():
        for i, keep in enumerate(kept):
            lowbit.gemv(up, x, out=hidden, pdl=True)
            lowbit.gemv(down, hidden, out=x, pdl=i != 1)
            if i == 2:
                lowbit.gemv(down, hidden, out=x, pdl=True)  # split after split: the second one's parts
            keep.copy_(x)

    torch.cuda.synchronize()
    again = replayed(launches) if graph else launches
    for first in xs:
        x.copy_(first)
        again()
        torch.cuda.synchronize()
        wanted = first
        for keep in kept:
            wanted = waited(down, waited(up, wanted))
            assert torch.equal(keep, wanted) and keep.isfinite().all()


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


def test_weights_taken_apart_are_refused_before_anything_is_written():
    Wq, _, xs = problem(512, 4096, 4, 128, 3, HALF, HALF)
    out = torch.full((3, 512), torch.nan, device="cuda", dtype=HALF)
    for _ in range(3):  # what has been launched before is not looked at as closely
        lowbit.gemv(Wq, xs[0])
    whole = Wq.factors
    for factors in (whole.cpu(), torch.stack((whole, whole), -1)[..., 0]):
        Wq.factors = factors
        with pytest.raises(ValueError, match="factors must be"):
            lowbit.gemv(Wq, xs[0], out=out)
    torch.cuda.synchronize()
    assert out.isnan().all()
