"""The trials that chapters tell of, on a made-up card: variants are right, and differ from their rungs as they say."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention_bench import card as card
from test_attention_bench import sources_are_there

from kernels import gemv, trials
from kernels.attention import bench, mix
from kernels.attention import trials as mix_trials
from kernels.fusion import launches as fusion_launches
from kernels.fusion import trials as fusion_trials
from kernels.gemv import trials as gemv_trials
from kernels.kv_cache import rungs
from kernels.kv_cache import trials as kv_trials
from kernels.lowbit import trials as lowbit_trials
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


@pytest.mark.parametrize("name, shape", [("naive_blocks", (37, 8)), ("stores", (37, 8)), ("in_flight", (5, 4096))])
def test_the_trials_of_gemv(card, monkeypatch, name, shape):
    monkeypatch.setattr(gemv_trials, "SHAPE", shape)
    monkeypatch.setattr(gemv_trials, "LADDERS", {"a title": getattr(gemv_trials, name)})
    (ladder,) = gemv_trials.ladders()
    assert all(f.checked == "right on 1 shape" for f in ladder.figures) and sources_are_there(ladder)
    first, last = {
        "naive_blocks": ("1024 threads a block", "32 threads a block"),
        "stores": ("one warp a row, 8 warps a block", "coalesced stores, 32 warps a block"),
        "in_flight": ("16 KB on an SM: 1 block of 2 rows, x first", "128 KB on an SM: 4 blocks of 4 rows, x first"),
    }[name]
    assert (ladder.figures[0].name, ladder.figures[-1].name) == (first, last)


def test_the_trials_of_the_ring(card, monkeypatch):
    monkeypatch.setattr(gemv_trials, "SHAPE", (21, 4096))
    for module in (gemv, gemv_trials):  # so few rows are enough for the ring
        monkeypatch.setattr(module, "_room", lambda device: (2, 227 * 1024))
    monkeypatch.setattr(gemv_trials, "LADDERS", {"a title": gemv_trials.rings})
    (ladder,) = gemv_trials.ladders()
    assert [f.name for f in ladder.figures] == [
        "rows share x",
        "ring of weights",
        "ring, tensor cores",
        "ring of weights, PDL",
        "ring, tensor cores, PDL",
        "ring, tensor cores, PDL, all slots before x",
    ]
    assert all(f.checked == "right on 1 shape" for f in ladder.figures) and sources_are_there(ladder)


def test_the_tables_of_gemv(card, monkeypatch):
    for name, value in {"READ_BYTES": 1 << 20, "CHAIN_BYTES": 1 << 13, "STEPS": 70, "WORDS": (1, 4)}.items():
        monkeypatch.setattr(gemv_trials, name, value)
    monkeypatch.setattr(gemv_trials, "_room", lambda device: (4, 227 * 1024))
    by_bytes, latency = gemv_trials.tables()
    assert list(by_bytes.rows) == ["1 × 16 bytes", "4 × 16 bytes"]
    assert list(by_bytes.rows["1 × 16 bytes"]) == [f"{n} blocks" for n in (1, 2, 4, 8, 12)]
    assert list(latency.rows) == ["a chain of loads"]


def test_the_variants_of_gemv_are_what_they_say():
    """Words that are asked for together, no spills in the ring, as many blocks as registers allow."""
    for words in (1, 8):
        assert "LDG" * words in "".join(re.findall(r"LDG|BRA", gemv_trials.reading(words).sass("read")))
    for product in ("MultiplyAdds", "TensorCores"):
        module = gemv._ring(torch.float16, 512, 1, 8, 3, 2, product).module
        assert module.resources()["gemv"]["spill_stores"] == 0
    most = {}
    for rows, x_first, blocks in gemv_trials.IN_FLIGHT[:-2]:
        most[rows, x_first] = max(blocks, most.get((rows, x_first), 0))
    for (rows, x_first), blocks in most.items():
        registers = gemv._kernel("gemv", torch.float16, 8, 2, rows, x_first).module.resources()["gemv"]["registers"]
        assert 65536 // (-(-registers // 8) * 8 * 256) == blocks


def test_the_trials_of_fusion(card, monkeypatch):
    monkeypatch.setattr(
        fusion_trials, "MODEL", replace(fusion_trials.MODEL, hidden=64, ffn=96, head_dim=8, n_kv_heads=2)
    )
    hints, barriers = fusion_trials.ladders()
    assert [f.name for f in hints.figures] == ["128 bytes at once", "256 bytes at once", "no hint"]
    assert all(f.checked == "right on 1 shape" for f in hints.figures)
    names = ["1 launch", "1 launch, without its barriers"]
    assert [f.name for f in barriers.figures] == [*names, *(f"{name}, PDL" for name in names)]
    assert sources_are_there(hints) and sources_are_there(barriers)


def test_the_variants_of_fusion_differ_as_they_say():
    for hint in fusion_trials.HINTS.values():
        copies = re.findall(r"cp\.async\.cg\S*", fusion_trials.hinted(hint, torch.bfloat16, 1, 4, 1).module.ptx())
        assert copies and all(copy.endswith(hint) for copy in copies)
    sizes = (1, 4, 1, 1, 1)  # words and rows, stages, words and rows of W_down
    ours = fusion_trials.unordered(torch.bfloat16, *sizes).module
    theirs = fusion_launches.module("layer", torch.bfloat16, *sizes)
    assert "atom.add" in theirs.ptx() and "atom.add" not in ours.ptx()


def test_the_trials_of_lowbit(card, monkeypatch):
    monkeypatch.setattr(lowbit_trials.bench, "DEVICE", "cpu")
    monkeypatch.setattr(lowbit_trials, "SHAPE", (37, 256))
    monkeypatch.setattr(lowbit_trials, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(lowbit_trials, "STEPS", 2)
    (ladder,) = lowbit_trials.ladders()
    *ours, without = ladder.figures
    shift, magic = (rung.title for rung in lowbit_trials.RUNGS[:2])
    cached = ", weights in the L2 cache"
    assert [f.name for f in ours] == [shift, shift + cached, magic, magic + cached]
    assert all(f.checked == "right on 1 shape" for f in ours) and sources_are_there(ladder)
    assert (without.name, without.checked) == ("shift without the conversion", "not checked")
    (table,) = lowbit_trials.tables()
    assert list(table.rows) == list(lowbit_trials.KINDS) and table.rows["FFMA"] == {"a cycle": 128}


def test_the_loops_of_lowbit_are_of_one_instruction():
    for kind in lowbit_trials.KINDS:
        code = re.findall(
            r"^\s*/\*\w+\*/\s+(?:@!?U?P\d+ )?([A-Z]\w*)", lowbit_trials.loop(kind).module.sass("run"), re.M
        )
        assert code.count(kind) >= lowbit_trials.OPS and len(code) < 2 * lowbit_trials.OPS, kind
    without = lowbit_trials.unconverted(torch.float16, torch.float16, 4, 128).module.sass("gemv")
    assert "I2F" not in without and without.count("FFMA") >= 64


def test_the_trials_of_the_mix(card, monkeypatch):
    monkeypatch.setattr(mix_trials, "CELLS", [("fp32", 40), ("fp16", 40)])
    monkeypatch.setattr(mix_trials, "BLOCKS_AT", ("fp32", 40))
    monkeypatch.setattr(mix_trials, "SPLIT_BY", mix_trials.SPLIT_BY[:1])
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
    """What chapter 07 says of the two: 32 registers and 10 loads, 56 and 32; the latter is its rung 4."""
    rung, roomy = mix._kernel("mix_shared", torch.float32).module, mix_trials.roomy(torch.float32)
    assert rung.resources()["mix"]["registers"] == 32 and roomy.resources()["mix"]["registers"] == 56
    assert (loads_ahead(rung), loads_ahead(roomy)) == (10, 32)
    assert roomy.sass("mix") == cuda.load(rungs.HERE / "mix_fp32.cu").sass("mix")


def test_the_trials_of_words(card, monkeypatch):
    monkeypatch.setattr(kv_trials, "TOKENS", 40)
    monkeypatch.setattr(kv_trials, "WORDS", [(8, 8), (8, 1), (2, 8)])
    (ladder,) = kv_trials.ladders()
    names = [f.name for f in ladder.figures]
    assert names[:3] == ["8 words of 16 bytes", "1 word of 16 bytes", "8 words of 4 bytes"]
    assert sources_are_there(ladder)
    with pytest.raises(ValueError, match="v allows words of 2 halves at most, got 8"):
        kv_trials.mix_flight(8, 1, torch.zeros(1, 3), torch.zeros(3, 1, 2, dtype=torch.float16))


def test_the_trials_of_ssd(card, monkeypatch):
    small = dict(nheads=2, headdim=16, dstate=16)
    monkeypatch.setattr(ssd_trials, "compile_ahead", lambda: None)
    monkeypatch.setattr(ssd_trials, "inputs", lambda seqlen, **how: ssd_bench.inputs(seqlen, **how, **small))
    monkeypatch.setattr(ssd_trials, "copies", lambda call: [call])
    for name, value in {"LONG": 70, "FEW_TOKENS": 140, "CHUNK": 128, "LAYER": (2, 16, 1, 16), "RUNS": 2}.items():
        monkeypatch.setattr(ssd_trials, name, value)
    call, launched = ssd_trials.inputs(70), ssd_trials.in_bundles
    out = torch.empty_like(call["x"])
    assert launched(2, call, out)() is out
    assert (out - ssd_bench.truth(call)).norm() < 2e-3 * out.double().norm()
    monkeypatch.setattr(ssd_trials, "BUNDLED", 70)  # by another rung: fused.cu takes a second each time
    monkeypatch.setattr(ssd_trials, "in_bundles", lambda n, call, out: lambda: ssd_trials.five(**call, out=out))
    scan, few, once, bundles, slow = ssd_trials.ladders()
    assert [f.name for f in slow.figures][1:] == ["2 pairs in a bundle", "4 pairs in a bundle"]
    assert slow.title == f"{bundles.title}, slow decay"
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


def test_the_row_of_a_kernel_that_goes_on(monkeypatch):
    ends = np.concatenate([[0], 0.01 * np.arange(1, 11), 0.1 + 0.02 * np.arange(1, 46)])  # 10 ms, from 0.1 s on 20
    row = ssd_trials.summary(ends, 10, [(1980, 300), (1980, 500)] + [(1650, 700)] * 8 + [(1900, 100)])
    assert row == {
        "at first, ms": pytest.approx(1),
        "at the end, ms": pytest.approx(2),
        "clock at most, MHz": 1980,
        "clock at the end, MHz": 1650,
        "power at the end, W": 700,
    }
    assert set(ssd_trials.summary(ends, 10, [])) == {"at first, ms", "at the end, ms"}
    answers = iter(["1980, 301.5\n345, 80\n", "[N/A], [N/A]\n"])  # of two cards; then of nobody
    monkeypatch.setattr(ssd_trials.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=next(answers)))
    seen = []
    ssd_trials._watch(SimpleNamespace(is_set=lambda: False), seen)
    assert seen == [(1980, 301.5)]


def test_they_are_stored_in_a_file_of_their_own(monkeypatch, tmp_path, capsys):
    table = mix_trials.Table("a trial", {"a": {"b": 1}}, ("kernels/trials.py",))
    module = SimpleNamespace(ladders=list, tables=lambda: [table])
    monkeypatch.setattr(trials.importlib, "import_module", lambda name: {"kernels.kv_cache.trials": module}[name])
    monkeypatch.setattr(trials, "HERE", tmp_path)
    (path,) = trials.store("kv_cache", ROOF, {})
    assert path == tmp_path / "kv_cache/measured/nvidia_h200_trials.json" and "a trial" in capsys.readouterr().out
    assert results.Stored(path).table("a trial").rows == table.rows


def test_the_command(monkeypatch, capsys):
    assert trials.main(["roof"]) == 2 and "no topic named roof" in capsys.readouterr().out
    monkeypatch.setattr(trials, "gpu_roof", lambda: None)
    assert trials.main([]) == 1 and "No NVIDIA GPU" in capsys.readouterr().out
    monkeypatch.setattr(trials, "gpu_roof", lambda: ROOF)
    asked = []
    monkeypatch.setattr(trials, "store", lambda topic, *about: asked.append(topic) or [results.ROOT / "x"])
    assert trials.main([]) == 0 and asked == trials.TOPICS


def test_benches_measure_them_too(monkeypatch):
    asked = []
    monkeypatch.setattr(trials, "store", lambda topic, *about: asked.append(topic) or [topic])
    from kernels.fusion import bench as fusion_bench
    from kernels.gemv import bench as gemv_bench
    from kernels.kv_cache import bench as kv_bench
    from kernels.latent import bench as latent_bench
    from kernels.lowbit import bench as lowbit_bench
    from kernels.mamba2 import studies as mamba2_studies
    from kernels.matmul import bench as matmul_bench
    from kernels.paged import bench as paged_bench
    from kernels.ssd import profile, studies

    monkeypatch.setattr(profile, "store", lambda *about: ["ncu"])
    benches = gemv_bench, fusion_bench, lowbit_bench, bench, kv_bench, paged_bench, latent_bench, studies, matmul_bench
    benches += (mamba2_studies,)
    found = [path for one in benches for path in one.further(ROOF, {})]
    assert sorted(found) == sorted([*asked, "ncu"])
    assert asked == trials.TOPICS
