"""fused.cu on a card: right on hostile shapes and inputs, in graphs, on two streams, each time; and far into memory."""

import math
import sys

import pytest
import torch
from test_ssd_rungs_gpu import MAMBA, inputs, truth

from kernels.ssd import fused, which
from kernels.ssd.five import five

MODULE = sys.modules["kernels.ssd.fused"]
HERE = torch.cuda.is_available() and torch.version.cuda is not None
HOPPER = HERE and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of compute capability 9.0")
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poison():
    """Memory that the allocator hands out again is full of NaN."""
    torch.manual_seed(13)
    torch.full((1 << 27,), torch.nan, device="cuda")


def off(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check(call, **options):
    wanted, state = truth(**call)
    out = torch.full(call["x"].shape, torch.nan, dtype=call["x"].dtype, device="cuda")
    y, final = fused(**call, out=out, return_final_states=True, **options)
    assert off(y, wanted) < ALLOWED[y.dtype] and off(final, state) < ALLOWED[y.dtype]


@needs_hopper
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 1000, 4099])
def test_right_at_odd_lengths(seqlen):
    call = inputs(seqlen, *MAMBA)
    assert which(**call) == ("fused", "")
    check(call)


@needs_hopper
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 24, 128, 2, 64), (3, 7, 64, 1, 128), (1, 128, 64, 8, 128), (8, 80, 64, 1, 128), (2, 5, 128, 5, 64),
        (1, 80, 64, 1, 256), (2, 9, 128, 3, 192), (1, 24, 80, 1, 136), (3, 5, 32, 5, 200), (1, 7, 8, 1, 256),
        (1, 80, 80, 1, 128), (2, 12, 48, 3, 96), (1, 10, 32, 1, 16), (2, 7, 8, 7, 8), (1, 6, 112, 2, 40),
    ],
)  # fmt: skip
def test_right_at_other_shapes(shape, dtype):
    """Batches, odd heads, groups, sizes that fill no tile; D a column, z, limits and initial states of both types."""
    call = inputs(777, *shape, dtype=dtype)
    batch, nheads, headdim, _, dstate = shape
    call["D"] = torch.randn(nheads, headdim, device="cuda")
    call["z"] = torch.randn_like(call["x"])
    call["initial_states"] = torch.randn(batch, nheads, headdim, dstate, device="cuda")
    call["dt_limit"] = (0.002, 0.2)
    assert which(**call) == ("fused", "")
    check(call)
    call["initial_states"] = call["initial_states"].to(dtype)
    check(call)


@needs_hopper
@pytest.mark.parametrize("seqlen", [1, 64, 65, 1009, 4099])
@pytest.mark.parametrize("rates", [(0.01, 0.1), (1, 16)])
def test_right_where_a_state_has_halves(seqlen, rates):
    """And the same bits each time, though two warpgroups hand each other sums."""
    call = inputs(seqlen, 1, 80, 64, 1, 256, rates=rates)
    assert which(**call) == ("fused", "")
    check(call)
    check(call, stop=0)
    first = fused(**call)
    assert all(torch.equal(first, fused(**call)) for _ in range(30))


@pytest.mark.filterwarnings("ignore:fused. x is float32")
@pytest.mark.parametrize("shape", [MAMBA, (2, 6, 40, 3, 72), (1, 3, 128, 1, 256), (1, 5, 32, 1, 16)])
@pytest.mark.parametrize("seqlen", [1, 257, 1009, 4099])
def test_float32_keeps_its_digits(shape, seqlen):
    """Off by no more than 1e-5 of the norm, where one product of rounded factors would be off by 4e-4."""
    for rates in ((0.01, 0.1), (1, 16)):
        call = inputs(seqlen, *shape, dtype=torch.float32, rates=rates)
        assert which(**call)[0] == "five"
        wanted, state = truth(**call)
        y, final = fused(**call, return_final_states=True)
        assert off(y, wanted) < 1e-5 and off(final, state) < 1e-5
        assert ((y - wanted).abs().max() / wanted.abs().max()).item() < 3e-5


@needs_hopper
@pytest.mark.parametrize("rates", [(0.01, 0.1), (1, 16), (100, 1000)])
@pytest.mark.parametrize("how", [dict(sort=0), dict(sort=1), dict(sort=1, together=4)], ids=str)
def test_right_at_every_decay(monkeypatch, rates, how):
    whole = MODULE.plan
    monkeypatch.setattr(MODULE, "plan", lambda *sizes: whole(*sizes, **how))
    MODULE._prepared.cache_clear()
    MODULE.CALLS.clear()
    call = inputs(5000, *MAMBA, rates=rates)
    check(call)
    check(call, stop=0)
    if not how["sort"]:  # shares are the same with any stop
        assert torch.equal(fused(**call), fused(**call, stop=0))
    MODULE._prepared.cache_clear()
    MODULE.CALLS.clear()


@needs_hopper
def test_the_same_bits_a_hundred_times():
    for seqlen, rates in ((1000, (1, 16)), (6000, (0.01, 0.1))):
        call = inputs(seqlen, *MAMBA, rates=rates)
        first = fused(**call, return_final_states=True)
        for _ in range(100):
            again = fused(**call, return_final_states=True)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@needs_hopper
def test_in_graphs_that_run_at_once():
    calls = [inputs(seqlen, *MAMBA) for seqlen in (1000, 3000)]
    wanted = [fused(**call) for call in calls]
    found = [torch.full_like(y, torch.nan) for y in wanted]
    graphs, streams = [], [torch.cuda.Stream() for _ in calls]
    for call, y in zip(calls, found):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused(**call, out=y)
            fused(**call, out=y)
        graphs.append(graph)
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


@needs_hopper
def test_on_two_streams_at_once():
    """Neither has all multiprocessors, so blocks of both wait for tickets of their own launch alone."""
    calls = [inputs(3000, *MAMBA, rates=(0.01, 0.1)) for _ in range(2)]
    wanted = [fused(**call) for call in calls]
    streams, found = [torch.cuda.Stream() for _ in calls], [[], []]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, call, ys in zip(streams, calls, found):
            with torch.cuda.stream(stream):
                ys.append(fused(**call))
    torch.cuda.synchronize()
    assert all(torch.equal(y, right) for ys, right in zip(found, wanted) for y in ys)


@needs_hopper
@pytest.mark.parametrize("dstate", [128, 256])
def test_nan_reaches_what_it_should_and_nothing_else(dstate):
    call = inputs(7000, 1, 6, 64, 1, dstate, rates=(100, 1000))
    clean = fused(**call)
    call["x"] = call["x"].clone()
    call["x"][0, 333, 2, 17] = math.nan
    expected = torch.zeros(clean.shape, dtype=torch.bool, device="cuda")
    expected[0, 333:, 2, 17] = True
    for options in ({}, {"stop": 0}, {}):
        y = fused(**call, **options)
        assert torch.equal(y.isnan(), expected)
        assert torch.allclose(y[~expected], clean[~expected], rtol=2e-3, atol=2e-3)


@needs_hopper
def test_offsets_beyond_31_bits():
    """500,000 tokens of 80 heads: 2.6e9 elements of x. The last tokens depend on the last few thousand alone."""
    free, _ = torch.cuda.mem_get_info()
    seqlen = 500_000
    if free < 40 << 30:
        pytest.skip("needs 40 GB of free memory")
    _, nheads, headdim, ngroups, dstate = MAMBA
    x = torch.randn(1, seqlen, nheads, headdim, device="cuda", dtype=torch.float16)
    B, C = (torch.randn(1, seqlen, ngroups, dstate, device="cuda", dtype=torch.float16) for _ in range(2))
    dt = torch.rand(1, seqlen, nheads, device="cuda").mul_(0.1).half()
    A = torch.full((nheads,), -4.0, device="cuda")
    y = fused(x, dt, A, B, C, dt_softplus=True)
    last, zeros = slice(seqlen - 1500, None), torch.zeros(nheads, device="cuda")
    call = {"x": x[:, last], "dt": dt[:, last], "A": A, "B": B[:, last], "C": C[:, last], "D": zeros, "dt_bias": zeros}
    wanted, _ = truth(**call, dt_softplus=True)
    assert off(y[:, -1000:], wanted[:, -1000:]) < 1e-3


def test_older_cards_run_another_rung(monkeypatch):
    """Whatever this card is: one that says it is an A100 gets a rung that it can run."""
    call = inputs(300, *MAMBA)
    wanted = five(**call)
    sys.modules["kernels.ssd.fused_choice"]._choice.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    rung, why = which(**call)
    assert rung == "fused_tuned" and "compute capability 9.0" in why
    monkeypatch.undo()
    sys.modules["kernels.ssd.fused_choice"]._choice.cache_clear()
    assert off(fused(**call), wanted.double()) < 1e-3
