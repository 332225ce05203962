"""The trials that chapters tell of, on a made-up card: variants are right, and differ from their rungs as they say."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention_bench import card as card
from test_attention_bench import sources_are_there

from kernels import trials
from kernels.attention import bench, mix
from kernels.attention import trials as mix_trials
from kernels.kv_cache import rungs
from kernels.kv_cache import trials as kv_trials
from kernels.ssd import bench as ssd_bench
from kernels.ssd import segments
from kernels.ssd import trials as ssd_trials
from lab import Roof, cuda, results

ROOF = Roof("NVIDIA H200", 4e12, 4e12, 7e14)


def loads_ahead(module):
    """Loads before the first multiply-add of the main loop, in machine code."""
    code = re.findall(r"\b(LDG|FFMA|BRA)\b", module.sass("mix"))
    pieces = " ".join(code).split("BRA")
    return max(piece.split("FFMA")[0].count("LDG") for piece in pieces if "FFMA" in piece)


def test_the_trials_of_the_mix(card, monkeypatch):
    monkeypatch.setattr(mix_trials, "CELLS", [("fp32", 40), ("fp16", 40)])
    monkeypatch.setattr(mix_trials, "BLOCKS_AT", ("fp32", 40))
    monkeypatch.setattr(mix_trials, "RUNS", 2)
    monkeypatch.setattr(mix_trials, "RUNS_AT", 40)
    ours = [mix_trials.TITLES["mix_shared"], mix_trials.ROOMY.title]
    first, second = mix_trials.ladders()
    split = [mix_trials.TITLES["mix_split"], *(rung.title for rung in mix_trials.SPLIT_BY)]
    assert [f.name for f in first.figures] == [*split, *ours, "reading the cache only"]
    assert [f.name for f in second.figures] == [split[0], *ours, "reading the cache only"]
    assert all(f.checked == "right on 2 shapes" for f in first.figures[:-1]) and sources_are_there(first)
    (table,) = mix_trials.tables()
    assert [row["different results"] for row in table.rows.values()] == [1, 1, 1, 1]  # blocks come in order here


def test_the_variant_of_rung_3_has_its_loads_ahead():
    """What chapter 07 says of the two: 32 registers and 10 loads, 56 and 32; the latter is chapter 09's first rung."""
    rung, roomy = mix._kernel("mix_shared", torch.float32).module, mix_trials.roomy(torch.float32)
    assert rung.resources()["mix"]["registers"] == 32 and roomy.resources()["mix"]["registers"] == 56
    assert (loads_ahead(rung), loads_ahead(roomy)) == (10, 32)
    assert roomy.sass("mix") == cuda.load(rungs.HERE / "mix_fp32.cu").sass("mix")


def test_the_trials_of_words(card, monkeypatch):
    monkeypatch.setattr(kv_trials, "TOKENS", 40)
    (ladder,) = kv_trials.ladders()
    names = [f.name for f in ladder.figures]
    assert names[0] == "8 words of 16 bytes" and "1 word of 16 bytes" in names and "8 words of 4 bytes" in names
    assert sources_are_there(ladder)
    with pytest.raises(ValueError, match="v allows words of 2 halves at most, got 8"):
        kv_trials.mix_flight(8, 1, torch.zeros(1, 3), torch.zeros(3, 1, 2, dtype=torch.float16))


def test_the_trials_of_ssd(card, monkeypatch):
    small = dict(nheads=2, headdim=16, dstate=16)
    monkeypatch.setattr(ssd_bench, "HOSTILE", [(37, 1, 2, 16, 1, 16)])
    monkeypatch.setattr(ssd_trials, "inputs", lambda seqlen: ssd_bench.inputs(seqlen, **small))
    monkeypatch.setattr(ssd_trials, "copies", lambda call: [call])
    for name, value in {"LONG": 70, "FEW_TOKENS": 140, "CHUNK": 128, "LAYER": (2, 16, 1, 16), "RUNS": 2}.items():
        monkeypatch.setattr(ssd_trials, name, value)
    scan, few, once = ssd_trials.ladders()
    assert [f.name for f in scan.figures] == ["as it is", "num_stages=2", "num_stages=3"]
    assert [f.name for f in few.figures] == ["as it is", "a whole chunk a program"]
    assert [f.name for f in once.figures][1] == "two-pass segments, dt once"
    table = ssd_trials.without_barriers()
    assert table.rows["without"] == {"runs": 2, "with other bits": 0}  # programs come in order here


def test_the_variant_of_rung_4_calls_the_other_function():
    for kernel, name in ((ssd_trials.walk_once, "chunk_decay"), (ssd_trials.walk_chunks_once, "chunk_decay")):
        assert kernel.fn.__globals__[name] is ssd_trials.chunk_decay_once
    assert ssd_trials.walk_once.fn.__globals__["walk_chunks"] is ssd_trials.walk_chunks_once
    assert segments.walk.fn.__globals__["chunk_decay"] is segments.chunk_decay  # the rung's own stays


def test_the_row_of_a_kernel_that_goes_on():
    ends = np.concatenate([[0], 0.01 * np.arange(1, 11), 0.1 + 0.02 * np.arange(1, 46)])  # 10 ms, from 0.1 s on 20
    row = ssd_trials.summary(ends, 10, [(1980, 300), (1980, 500)] + [(1650, 700)] * 8)
    assert row == {
        "at first, ms": pytest.approx(1),
        "at the end, ms": pytest.approx(2),
        "clock at most, MHz": 1980,
        "clock at the end, MHz": 1650,
        "power at the end, W": 700,
    }
    with pytest.raises(RuntimeError, match="nvidia-smi said nothing of clock and power"):
        ssd_trials.summary(ends, 10, [])


def test_they_are_stored_in_a_file_of_their_own(monkeypatch, tmp_path, capsys):
    table = mix_trials.Table("a trial", {"a": {"b": 1}}, ("kernels/trials.py",))
    module = SimpleNamespace(ladders=list, tables=lambda: [table])
    monkeypatch.setattr(trials.importlib, "import_module", lambda name: {"kernels.kv_cache.trials": module}[name])
    monkeypatch.setattr(trials, "HERE", tmp_path)
    (path,) = trials.store("kv_cache", ROOF, {})
    assert path == tmp_path / "kv_cache/measured/nvidia_h200_trials.json" and "a trial" in capsys.readouterr().out
    assert results.Stored(path).table("a trial").rows == table.rows


def test_the_command(monkeypatch, capsys):
    assert trials.main(["gemv"]) == 2 and "no topic named gemv" in capsys.readouterr().out
    monkeypatch.setattr(trials, "gpu_roof", lambda: None)
    assert trials.main([]) == 1 and "No NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setattr(trials, "gpu_roof", lambda: ROOF)
    asked = []
    monkeypatch.setattr(trials, "store", lambda topic, *about: asked.append(topic) or [results.ROOT / "x"])
    assert trials.main([]) == 0 and asked == trials.TOPICS


def test_benches_measure_them_too(monkeypatch):
    asked = []
    monkeypatch.setattr(trials, "store", lambda topic, *about: asked.append(topic) or [topic])
    from kernels.kv_cache import bench as kv_bench
    from kernels.ssd import profile

    monkeypatch.setattr(profile, "store", lambda *about: ["ncu"])
    assert [found for one in (bench, kv_bench, ssd_bench) for found in one.further(ROOF, {})] == [*asked, "ncu"]
    assert asked == trials.TOPICS
