"""The ladder of a whole model, on the SIMT machine: its rungs are right, its law finds what was put in."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import models
from kernels import benching
from kernels.llm import bench, peers, prompts, shapes, starting, studies
from kernels.llm.step import Step
from lab import Ladder
from lab.figure import Figure

TINY = shapes.Shape("tiny", 128, 2, 4, 2, 32, 256, 100, torch.float16)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(benching, "DEVICE", "cpu")
    torch.manual_seed(0)  # few bits are not right for all numbers: bounds are for these


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_every_rung_is_right_and_a_wrong_one_is_found(bits):
    weights = shapes.random_weights(TINY, bits, "cpu")
    cache = shapes.RandomCache(TINY, 9, 16, device="cpu")
    wanted = shapes.wanted_logits(TINY, weights, cache, bench.TOKEN)
    names = []
    for name, (step, sources) in bench.rungs(TINY, bits, weights, 9):
        if "PDL" not in name:
            assert bench.checked(name, step, cache, wanted, TINY.dtype) < 5e-3, name
            assert all((benching_root() / source).is_file() for source in sources)
            names.append(name)
    assert len(names) >= (4 if bits == 16 else 3)
    step.kv_len.fill_(8)
    with pytest.raises(ValueError, match="is not right, so it is not timed"):
        bench.checked(name, step, cache, wanted, TINY.dtype)


def benching_root():
    from lab import results

    return results.ROOT


@pytest.mark.parametrize("bits", [8, 4])
def test_a_cache_of_few_bits_is_right_too(bits):
    shape = dataclasses.replace(TINY, n_layers=1)
    weights, cache = shapes.random_weights(shape, 16, "cpu"), shapes.RandomCache(shape, 20, 32, bits, "cpu")
    step = Step(shape, weights, shape.dtype, "cpu")
    step.token.fill_(bench.TOKEN), step.kv_len.fill_(20)
    wanted = shapes.wanted_logits(shape, weights, cache, bench.TOKEN)
    assert bench.checked("", step, cache, wanted, shape.dtype) < 2e-2
    assert cache.bytes < shapes.RandomCache(shape, 20, 32, 16, "cpu").bytes * (0.6 if bits == 8 else 0.4)


def test_what_is_left_out_is_not_launched_and_not_counted():
    weights, cache = shapes.random_weights(TINY, 16, "cpu"), shapes.RandomCache(TINY, 9, 16, device="cpu")
    step = studies.without(Step(TINY, weights, TINY.dtype, "cpu"), ("feed", "attend"))
    step.kv_len.fill_(9)
    step.qkv.normal_(), step.mixed.normal_()
    step.glu.fill_(7)
    step.launch(cache)
    assert (step.glu == 7).all()
    whole = studies.bytes_of(weights, cache, ())
    assert whole == weights.bytes + cache.bytes
    layer = weights.layers[0]
    assert whole - studies.bytes_of(weights, cache, ("feed",)) == 2 * (layer.W_glu.nbytes + layer.ffn_norm.nbytes)
    assert whole - studies.bytes_of(weights, cache, ("attend", "end")) == (
        cache.bytes + weights.head.nbytes + weights.norm.nbytes
    )


def test_the_law_finds_its_constant():
    rows, rate = {}, 4e12
    for i, (n, gb) in enumerate([(230, 14.0), (200, 14.0), (100, 7.0), (60, 2.0)]):
        rows[str(i)] = {"launches": n, "GB": gb, "µs": gb * 1e15 / rate + 1.5 * n}
    found = studies.fit(rows, rate)
    assert found["c, µs"] == pytest.approx(1.5) and found["its deviation"] < 1e-9
    rows["0"]["µs"] += 46
    found = studies.fit(rows, rate)
    assert 1.5 < found["c, µs"] < 1.7 and found["its deviation"] > 0.01
    assert found["most"] == pytest.approx(1.7) and found["largest miss, %"] > 0.1


def test_a_checkpoint_is_one_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(starting, "SHARD", 20_000)
    starting.write_checkpoint(tmp_path, TINY)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = models.load(tmp_path, device="cpu")
    assert model.config.n_layers == 2 and torch.isfinite(model.logits([3, 4])).all()
    said = starting._first_token(str(tmp_path))
    assert 0 < said["imports"] < said["to the first token"] and "weights on the card" in said


def test_peers_take_turns(tmp_path, monkeypatch):
    """A peer that is ready waits for its turn; one that ends early is left out with its last words."""
    script = tmp_path / "with_toy.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(peers.HERE)!r})\nfrom turns import take_turn\n"
        "if 'bad' in sys.argv[1]: sys.exit(print('no such card'))\nprint('chatter')\n"
        "take_turn({'name': 'toy'}, lambda: None, seconds=0.01)\n"
    )
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    monkeypatch.setattr(peers, "HERE", tmp_path / "a" / "b" / "c")
    case = {"bits": 16, "length": 4}
    good, bad = (peers.Peer(f"../../../{script.name}", case | extra) for extra in ({}, {"bad": 1}))
    assert good.ready() and good.process.poll() is None
    name, timing = good.measured()
    assert name == "toy" and timing.runs >= 5 and good.process.poll() is not None
    assert bad.measured() is None


def test_prompts_of_both_are_timed(capfd):
    """Ours and transformers', in processes of their own, on a model that a processor runs."""
    sizes = dict(hidden=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn=96, vocab=50)
    shape = dataclasses.replace(shapes.MISTRAL_7B, n_layers=2, **sizes)
    how = {"lengths": (16, 40), "seconds": 0.01, "device": "cpu"}
    both = [prompts.Ours(**how, layers=2, sizes=sizes), prompts.theirs(False, shape, **how)]
    rows = prompts.prompts(both, shape).rows
    assert list(rows) == ["16 tokens", "40 tokens"]
    ours, rate, theirs, times = rows["16 tokens"]
    assert (ours, rate, times) == ("ours, ms", "ours, TFLOP/s", "times faster") and theirs.startswith("transformers ")
    assert all(value > 0 for row in rows.values() for value in row.values())
    assert all(row[times] == pytest.approx(row[theirs] / row[ours]) for row in rows.values())
    assert prompts.flops_of(shape, 2) == 2 * (2 * 2 * (64 * (2 * 64 + 2 * 32 + 3 * 96)) + 50 * 64) + 4 * 2 * 64 * 3


def test_transformers_writes_a_token_after_another():
    shape = dataclasses.replace(shapes.LLAMA_1B, hidden=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn=96)
    case = peers.case_of(shape, 16, 12) | {"dtype": "float32", "compile": False, "device": "cpu", "seconds": 0.05}
    peer = peers.Peer("with_transformers.py", case)
    name, timing = peer.measured()
    assert name.startswith("transformers ") and name.endswith(", eager") and 0 < timing.median < 1


def test_peers_that_are_not_there_are_not_asked_for(monkeypatch):
    for name in ("GPT_FAST", "CALM", "YALM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.peers_of(shapes.MISTRAL_7B, 16, 128) == []
    for name in ("GPT_FAST", "CALM", "YALM"):
        monkeypatch.setenv(name, "/x")
    scripts = [[script for script, _ in peers.peers_of(shapes.MISTRAL_7B, bits, 128)] for bits in (16, 8)]
    assert scripts == [["with_gpt_fast.py", "with_calm.py", "with_yalm.py"], ["with_gpt_fast.py", "with_calm.py"]]
    assert peers.peers_of(shapes.LLAMA_1B, 16, 128) == []


def test_a_file_of_calms_layout_is_whole(tmp_path):
    """Its header says where all of it lies, within the file."""
    sys.path.insert(0, str(peers.HERE))
    try:
        import with_calm
    finally:
        sys.path.remove(str(peers.HERE))
    case = dict(hidden=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn=96, vocab=50, tied=False, dtype="fp8")
    path = tmp_path / "x"
    with_calm.write(case, path, {"bos_token_id": "-2"})
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert header.pop("__metadata__")["hidden_dim"] == "96" and len(header) == 2 + 2 * 9 + 1 + 2
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        each = {"F32": 4, "F8_E5M2": 1, "U8": 1}[entry["dtype"]]
        assert end - begin == each * np.prod(entry["shape"]) and 8 + size + end <= len(raw), name


def test_a_peer_has_a_row_among_ours():
    timing = starting.Timing.of([0.01, 0.02, 0.03])
    ours = Figure("ours", 4 * 10**9, 7, starting.Timing.of([0.002]), 0.5, "read", sources=("a",))
    ladder = Ladder("a", "read", [ours])  # so the roof is 4e12
    figure = bench._figure(SimpleNamespace(measured=lambda: ("peer", timing)), ladder)
    assert figure.name == "peer" and figure.share == pytest.approx(0.05) and not figure.sources
    assert (figure.bytes, figure.flops) == (ours.bytes, ours.flops)
    assert bench._figure(SimpleNamespace(measured=lambda: None), ladder) is None


def test_a_bench_of_a_model_is_a_command():
    run = subprocess.run(
        [sys.executable, "-m", "kernels.bench", "llm"], capture_output=True, text=True, cwd=benching_root()
    )
    assert run.returncode == 1 and "No NVIDIA GPU" in run.stdout


def test_tables_of_a_made_up_card(monkeypatch):
    """Each row has its figures, and what is left out of the law stands in its row."""
    timing = starting.Timing.of([2e-4])
    graph = lambda calls: [call() for call in calls] and SimpleNamespace(turn=lambda: [3e-6])  # noqa: E731
    monkeypatch.setattr(studies.cuda_timing, "Graph", graph)
    monkeypatch.setattr(studies.cuda_timing, "read_probe", lambda: (None, 10**9))
    monkeypatch.setattr(studies.cuda_timing, "against", lambda probe, calls, seconds: {n: (timing, 0.5) for n in calls})
    monkeypatch.setattr(studies, "launches", lambda call: (call(), 12)[1])
    monkeypatch.setattr(studies, "LENGTH", 9)
    monkeypatch.setattr(bench, "ROOMS", {9: 16})
    found = studies.attention_alone(TINY)
    assert found.rows == {
        row: {"8 tokens, µs": 3.0, "8 tokens, PDL, µs": 3.0} for row in ("three launches", "one launch")
    }
    weights, cache = shapes.random_weights(TINY, 16, "cpu"), shapes.RandomCache(TINY, 9, 16, device="cpu")
    rows = studies.law(TINY, 16, weights, cache, False, 0).rows
    assert list(rows)[:2] == ["all", "without attention"] and list(rows)[-1] == "fit"
    assert rows["without attention"]["GB"] == pytest.approx((weights.bytes) / 1e9)
    assert rows["fit"]["attention, µs a layer"] == 0 and rows["all"]["launches"] == 12
