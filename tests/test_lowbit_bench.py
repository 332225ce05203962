"""The bench of low-bit weights on a made-up card: every row is held against its own truth; a wrong one is not timed."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import made_up_card
import pytest
import torch

from kernels import benching, lowbit, running
from kernels.lowbit import bench, peers
from lab import Rung, cuda_timing, results
from lab.check import Verdict

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")


@pytest.fixture
def card(monkeypatch):
    """A card that is this CPU, and small matrices."""
    made = made_up_card.put_in(monkeypatch)
    for module in (bench, benching):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "SHAPES", [(48, 384)])
    monkeypatch.setattr(bench, "FURTHER", [("int8 per row", (32, 256), 8)])
    monkeypatch.setattr(bench, "HOSTILE", [(5, 2)])
    monkeypatch.setattr(bench, "WHOLE_TILES", [(16, 3)])
    monkeypatch.setattr(peers, "families", lambda *args: [])
    monkeypatch.setattr(bench, "compile_ahead", lambda meanwhile: meanwhile())
    monkeypatch.setattr(bench.compiling, "ahead", lambda module: None)
    bench._checked.cache_clear()
    return made


def test_every_format_has_a_ladder(card):
    found = {ladder.title: ladder for ladder in bench.ladders()}
    assert list(found) == [
        *(f"GEMV, {name}, 48 × 384" for name in bench.FORMATS),
        "GEMV, int4 g128, 48 × 384, 16 rows of x",
        "GEMV, int8 per row, 32 × 256, 8 rows of x",
    ]
    titles = [rung.title for rung in lowbit.RUNGS]
    more = [f"{titles[-1]}, PDL", "16 bits", "16 bits, PDL", "reading the weights only"]
    assert [figure.name for figure in found["GEMV, int4 g128, 48 × 384"].figures] == [*titles, *more]
    ladder = found["GEMV, int2 g128, 48 × 384"]
    titles = [rung.title for rung in lowbit.RUNGS if rung.name != "digits"]  # which takes 4 bits alone
    assert [figure.name for figure in ladder.figures] == [*titles, *more]
    assert all(figure.sources for figure in ladder.figures)
    assert all((results.ROOT / source).is_file() for figure in ladder.figures for source in figure.sources)
    many = found["GEMV, int4 g128, 48 × 384, 16 rows of x"]
    assert many[titles[-1]].flops == 16 * many[f"{titles[-1]}, one row of x"].flops == 2 * 16 * 48 * 384
    nbytes = ladder[titles[-1]].bytes
    assert nbytes == 48 * 384 // 4 + 48 * 4 * 4 + 2 * (48 + 384)  # three groups, kept as four
    assert ladder["reading the weights only"].bytes == 1 << 17 >= nbytes
    # What was there is kept from Python's look for garbage, before inputs are made and before they are timed.
    assert benching.gc.asked == ["unfreeze", "collect", "freeze", "freeze"] * len(found)


def test_of_stored_ladders_the_times_as_called_alone(card, monkeypatch):
    stored = {ladder.title: ladder for ladder in bench.ladders()}
    monkeypatch.setattr(cuda_timing, "Graph", lambda calls: pytest.fail("a graph was captured"))
    card.as_called = 7e-5
    with running.set_to(running.Run(called=True, stored=stored, only=("int4",))):
        found = bench.ladders()
    assert [ladder.title for ladder in found] == [title for title in stored if "int4" in title]
    for ladder in found:
        before = stored[ladder.title]
        assert [f.name for f in ladder.figures] == [f.name for f in before.figures]
        assert [replace(f, called=None, host=None) for f in ladder.figures] == [
            replace(f, called=None, host=None) for f in before.figures
        ]
        assert {f.called.median for f in ladder.figures} == {7e-5} and all(f.host for f in ladder.figures)
        assert {"kernels/lowbit/gemv.py", "lab/cuda/launch.py"} <= set(ladder.called_on.sources)


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


@pytest.mark.parametrize("rung", ["shift", "digits", "gemv"])
def test_cold_copies_share_nothing_that_is_read(rung, monkeypatch):
    Wq = lowbit.quantize(torch.randn(16, 256).half(), 4, 128)
    monkeypatch.setattr(cuda_timing, "COLD", 3 * Wq.nbytes)
    copies = bench.cold(Wq, rung)
    read = ("packed", "factors") if rung in bench.INTERLEAVED else ("_row_major", "scale", "zero")
    assert all(len({getattr(c, name).data_ptr() for c in copies}) == len(copies) == 3 for name in read)
    x = torch.randn(256).half()
    for c in copies[1:]:  # nothing else is read: with the rest spoilt, the product is the same
        for name in {"packed", "factors", "_row_major", "scale", "zero"} - set(read):
            if getattr(c, name) is not None:
                setattr(c, name, torch.zeros_like(getattr(c, name)))
        assert torch.equal(getattr(lowbit, rung)(c, x), getattr(lowbit, rung)(Wq, x))


def test_peers_truths_are_near_the_product():
    """What a peer must give lies as near the exact product as its bits allow: zeros and scales are its own."""
    torch.manual_seed(1)
    W, x = torch.randn(32, 256).half(), torch.randn(1, 256).half()
    exact = x.double() @ W.double().T
    Wq = lowbit.quantize(W, 4, 128)
    ours = x.double() @ Wq.dequantize(torch.float64).T
    for family, like, allowed in (
        (("torch.compile", *peers.compiled(W, x, 1)), exact, 0.02),
        (peers._gemlite_int8(W, x, 1), exact, 0.02),
        (peers._int4pack(Wq, x, 1), ours, 0.02),
        (peers._gemlite_linear(Wq, x, 1), ours, 1e-3),
    ):
        wanted = family[2]
        assert float((wanted - like).norm() / like.norm()) < allowed, family[0]
    name, modes, wanted = peers._scaled_mm(W, x, 1)
    assert wanted.shape == (16, 32)
    assert list(modes) == ["one scale", "one scale, fast sums", "a scale a row", "a scale a row, fast sums"]


class Autotuner:
    """As Triton's: it keeps one choice for each case."""

    def __init__(self):
        self.cache = {}


class Layer:
    """As gemlite's: at its first call it chooses, by the preset that is loaded then, or by itself."""

    def __init__(self, core, tuner):
        self.core, self.tuner = core, tuner

    def __deepcopy__(self, memo):
        return Layer(self.core, self.tuner)

    def __call__(self, x):
        return self.tuner.cache.setdefault("case", self.core.GEMLITE_TRITON_CONFIG_CACHE.get("case", "its own"))


@pytest.fixture
def gemlite(monkeypatch, tmp_path):
    """gemlite, made up, with a preset for 16 × 256 weights of 4 bits in groups of 128, and one row of x."""
    tuner = Autotuner()
    core = SimpleNamespace(GEMLITE_TRITON_CONFIG_CACHE={}, __file__=str(tmp_path / "core.py"))

    def load_config(path):
        core.GEMLITE_TRITON_CONFIG_CACHE.update(case=json.loads(Path(path).read_text())["(1, 16, 256, 128, 8, 104)"])
        return True

    core.GemLiteLinear = SimpleNamespace(load_config=load_config)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "h100.json").write_text('{"(1, 16, 256, 128, 8, 104)": "the preset"}')
    made = SimpleNamespace(from_weights=lambda *args, **named: Layer(core, tuner))
    helper = SimpleNamespace(A16Wn=lambda **how: made, A16W8=lambda **how: made)
    found = core, helper, core.GEMLITE_TRITON_CONFIG_CACHE
    monkeypatch.setattr(peers, "_gemlite", lambda: found)
    monkeypatch.setitem(sys.modules, "gemlite.triton_kernels.one", SimpleNamespace(kernel=tuner, number=1))
    return core


def test_gemlite_is_called_with_its_preset_and_without(gemlite, monkeypatch):
    monkeypatch.setattr(peers, "_preset", lambda x, Wq: Path(gemlite.__file__).with_name("configs") / "h100.json")
    Wq, x = lowbit.quantize(torch.randn(16, 256).half(), 4, 128), torch.randn(1, 256).half()
    _, modes, _ = peers._gemlite_linear(Wq, x, 3)
    assert list(modes) == ["A16Wn", "A16Wn, its preset for H100"]
    own, preset = (make() for make in modes.values())
    for calls, choice in ((own, "its own"), (preset, "the preset"), (own, "its own")):  # each list keeps its choice
        assert [call() for call in calls] == [choice] * 3
    assert set(peers._gemlite_int8(Wq.dequantize(), x, 1)[1]) == {"A16W8", "A16W8, scale last"}


def test_a_preset_is_that_of_the_chip_and_of_the_case(gemlite, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def found(m=1, rows=16, bits=4, group=128):
        return peers._preset(OnCard(m), SimpleNamespace(shape=(rows, 256), bits=bits, group=group)) is not None

    class OnCard(list):
        is_cuda, device = True, "cuda"

        def __init__(self, m):
            super().__init__(range(m))

    assert found() and not found(m=16) and not found(rows=32) and not found(bits=2) and not found(group=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not found()
    x = torch.ones(1, 256)
    assert peers._preset(x, lowbit.quantize(torch.ones(16, 256), 4, 128)) is None


def test_peers_are_called_once_ahead_of_time(card, monkeypatch):
    called = []

    def refuses():
        raise RuntimeError("not here")

    def families(W, Wq, x, copies, tuned):
        assert W.shape == Wq.shape == (48, 384) and x.shape == (16, 384) and copies == 1 and tuned
        modes = {"refuses": refuses, "works": lambda: [lambda: called.append(Wq.bits)]}
        yield "peer", modes, None, 0
        yield "other", {"works": lambda: [lambda: called.append("other")]}, None, 0
        yield "torch.compile, int8", {"tunes": lambda: called.append("which has its own way")}, None, 0

    monkeypatch.setattr(peers, "families", families)
    bench._call_peers(3)
    assert called == [4, "other"]


def test_every_ladder_is_compiled_in_a_process_of_its_own(monkeypatch):
    """One that takes too long does not end the bench."""
    commands, done = [], []

    def run(command, **how):
        commands.append(command)
        if int(command[-1]) == 3:
            raise bench.subprocess.TimeoutExpired(command, 90)

    monkeypatch.setattr(bench.subprocess, "run", run)
    bench.compile_ahead(lambda: done.append(1))
    assert sorted(int(command[-1]) for command in commands) == list(range(16)) and done == [1]
    assert all(command[:3] == [sys.executable, "-m", "kernels.lowbit.bench"] for command in commands)
