"""The bench of low-bit weights on a made-up card: every row is held against its own truth; a wrong one is not timed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels import lowbit
from kernels.attention import bench as attention_bench
from kernels.lowbit import bench, peers
from lab import Rung, Timing, cuda_timing, results
from lab.check import Verdict

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@pytest.fixture
def card(monkeypatch):
    """A card that is this CPU: every call is made once and takes 10 µs. Small matrices, two copies of each."""

    def against(probe, calls, *, seconds, least_turns):
        for call in calls.values():
            for c in call:
                c()
        return {name: (Timing.of([1e-5]), 2.0) for name in calls}

    monkeypatch.setattr(cuda_timing, "expect_gpu", lambda where: None)
    monkeypatch.setattr(cuda_timing, "cold_copies", lambda tensor: [tensor, tensor.clone()])
    monkeypatch.setattr(cuda_timing, "COLD", 1)
    monkeypatch.setattr(cuda_timing, "read_calls", lambda tensors: [lambda: None] * len(tensors))
    monkeypatch.setattr(cuda_timing, "read_probe", lambda: (lambda: None, 1 << 30))
    monkeypatch.setattr(cuda_timing, "against", against)
    monkeypatch.setattr(cuda_timing, "as_called", lambda calls: Timing.of([2e-5]))
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: SimpleNamespace(turn=lambda: [len([c() for c in calls])]))
    for module in (bench, attention_bench):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "SHAPES", [(48, 384)])
    monkeypatch.setattr(bench, "HOSTILE", [(5, 2)])
    monkeypatch.setattr(peers, "families", lambda *args: [])
    monkeypatch.setattr(bench, "compile_ahead", lambda: None)
    bench._checked.cache_clear()


def test_every_format_has_a_ladder(card):
    found = {ladder.title: ladder for ladder in bench.ladders()}
    assert list(found) == [
        *(f"GEMV, {name}, 48 × 384" for name in bench.FORMATS),
        "GEMV, int4 g128, 48 × 384, 16 rows of x",
    ]
    titles = [rung.title for rung in lowbit.RUNGS]
    ladder = found["GEMV, int2 g128, 48 × 384"]
    names = [*titles, f"{titles[-1]}, PDL", "16 bits", "16 bits, PDL", "reading the weights only"]
    assert [figure.name for figure in ladder.figures] == names
    assert all(figure.sources for figure in ladder.figures)
    assert all((results.ROOT / source).is_file() for figure in ladder.figures for source in figure.sources)
    many = found["GEMV, int4 g128, 48 × 384, 16 rows of x"]
    assert many[titles[-1]].flops == 16 * many[f"{titles[-1]}, one row of x"].flops == 2 * 16 * 48 * 384
    nbytes = ladder[titles[-1]].bytes
    assert nbytes == 48 * 384 // 4 + 48 * 4 * 4 + 2 * (48 + 384)  # three groups, kept as four


def test_a_wrong_rung_is_not_timed(card, monkeypatch):
    right = lowbit.RUNGS[-1].function

    def wrong(Wq, x, *, out=None, pdl=False):
        y = right(Wq, x, out=out, pdl=pdl)
        y[..., -1] += 100
        return y

    monkeypatch.setattr(bench, "RUNGS", [Rung("gemv", "wrong", wrong, lowbit.RUNGS[-1].sources)])
    monkeypatch.setattr(bench, "_checked", lambda *args: Verdict(shapes=1))
    with pytest.raises(ValueError, match="not right"):
        bench.ladders()


def test_peers_truths_are_near_the_product():
    """What a peer must give lies as near the exact product as its bits allow: zeros and scales are its own."""
    torch.manual_seed(1)
    W, x = torch.randn(32, 256).half(), torch.randn(1, 256).half()
    exact = x.double() @ W.double().T
    Wq = lowbit.quantize(W, 4, 128)
    ours = x.double() @ Wq.dequantize(torch.float64).T
    for family, like, allowed in (
        (peers._compiled(W, x, 1), exact, 0.02),
        (peers._int4pack(Wq, x, 1), ours, 0.02),
        (peers._gemlite_linear(Wq, x, 1), ours, 1e-3),
    ):
        wanted = family[2]
        assert float((wanted - like).norm() / like.norm()) < allowed, family[0]
    assert peers._scaled_mm(W, x, 1)[2].shape == (16, 32)


def test_peers_are_called_once_ahead_of_time(card, monkeypatch):
    called = []

    def refuses():
        raise RuntimeError("not here")

    def families(W, Wq, x, copies):
        assert W.shape == Wq.shape == (48, 384) and x.shape == (16, 384) and copies == 1
        modes = {"refuses": refuses, "works": lambda: [lambda: called.append(Wq.bits)]}
        yield "peer", modes, None, 0
        yield "other", {"works": lambda: [lambda: called.append("other")]}, None, 0

    monkeypatch.setattr(peers, "families", families)
    bench._call_peers(3)
    assert called == [4, "other"]


def test_every_ladder_is_compiled_in_a_process_of_its_own(monkeypatch):
    commands = []
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **how: commands.append(command))
    bench.compile_ahead()
    assert sorted(int(command[-1]) for command in commands) == list(range(16))
    assert all(command[:3] == [sys.executable, "-m", "kernels.lowbit.bench"] for command in commands)
