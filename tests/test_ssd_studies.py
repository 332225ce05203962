"""What is measured of SSD besides times: the study of accuracy, and what Nsight Compute counts. On a made-up card."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from test_attention_bench import card as card

from kernels import bench as topics
from kernels.ssd import accuracy, bench, peers, profile, trained
from kernels.ssd.bench import Shape
from lab import Roof, results
from lab.table import Table
from models import scans

SMALL = Shape(nheads=2, headdim=16, dstate=16)
ROOF = Roof("NVIDIA H200", 4e12, 4e12, 7e14)


@pytest.fixture
def small(card, monkeypatch):
    """The made-up card, a small layer, no peer."""
    monkeypatch.setattr(bench, "Shape", lambda: SMALL)
    monkeypatch.setattr(accuracy, "LENGTHS", (40, 100))
    monkeypatch.setattr(accuracy, "LONG", 100)
    monkeypatch.setattr(peers, "_module", lambda: None)
    torch.manual_seed(13)


def test_errors_are_those_of_the_kernels(small, monkeypatch):
    def off(**call):
        return 1.01 * accuracy.five(**call).float()

    monkeypatch.setattr(accuracy, "variants", lambda dtype: {"five": accuracy.five, "off by 1 %": off})
    table = accuracy._errors(torch.float16, True)
    assert table.title == "SSD, fp16, slow decay: error against float64" and table.columns == ["40", "100"]
    for row in table.rows["five"], table.rows["only y rounded"]:
        assert all(1e-5 < value < 1e-3 for value in row.values())
    assert all(0.009 < value < 0.011 for value in table.rows["off by 1 %"].values())
    assert all(table.rows["only y rounded"][n] < table.rows["five"][n] for n in table.columns)


def test_shares_count_outputs(small, monkeypatch):
    def changed(**call):
        y = accuracy.five(**call)
        y[:, :50, 0] += 5e-3 * (1 + y[:, :50, 0].abs())  # a quarter of all, by more than 1e-3 and less than 1e-2
        y[:, :25, 1] += 1
        return y

    monkeypatch.setattr(accuracy, "variants", lambda dtype: {"five, fp32 states": accuracy.five, "changed": changed})
    table = accuracy._shares(torch.float16)
    assert list(table.rows) == ["changed", "changed, slow decay"]
    row = table.rows["changed"]
    assert row["differ, %"] == row["by more than 0.001, %"] == 37.5 and row["by more than 0.01, %"] == 12.5


def test_the_whole_study(small):
    tables = accuracy.tables()
    assert len({table.title for table in tables}) == len(tables) == 6
    assert {"five, fp32 states", "five, bf16 states", "fused.cu"} <= set(tables[2].rows)
    assert all((results.ROOT / source).is_file() for table in tables for source in table.sources)


@pytest.fixture
def two_heads(card, monkeypatch):
    """The made-up card; of the small model two heads of two layers, over few tokens; no peer."""
    read, run = trained._read, trained._run

    def of_two(file):
        heads = [{k: call[k][..., :2] for k in ("dt", "A", "D", "dt_bias")} for call in read(file)[:2]]
        return [call | two | {"x": call["x"][:, :, :2]} for call, two in zip(read(file), heads)]

    monkeypatch.setattr(trained, "_read", of_two)
    monkeypatch.setattr(trained, "TOKENS", 70)
    here = {"models.scans": lambda *arguments: scans.main(list(map(str, arguments)))}
    monkeypatch.setattr(trained, "_run", lambda name, *a, **k: here[name](*a) if name in here else run(name, *a, **k))
    monkeypatch.setattr(peers, "published", lambda: None)


def test_errors_with_trained_weights(two_heads, monkeypatch):
    def off(**call):
        return 1.01 * accuracy.five(**call).float()

    monkeypatch.setattr(accuracy, "variants", lambda dtype: {"five": accuracy.five, "off by 1 %": off})
    in_fp16, in_bf16 = trained.tables()
    assert in_fp16.title == "SSD, fp16, trained weights: error against float64"
    assert in_bf16.columns == ["layer 1", "layer 2", "all layers"]
    for table, least, most in ((in_fp16, 1e-4, 1e-3), (in_bf16, 1e-3, 1e-2)):
        for row in table.rows["only y rounded"], table.rows["five"]:
            assert all(least < value < most for value in row.values())
            layers = row["layer 1"], row["layer 2"]
            assert min(layers) <= row["all layers"] <= max(layers)
        assert all(0.005 < value < 0.015 for value in table.rows["off by 1 %"].values())
    assert all((results.ROOT / source).is_file() for source in in_fp16.sources)


def test_a_published_kernel_that_fails_loses_only_its_row(two_heads, monkeypatch, capsys):
    run = trained._run

    def hangs(module, *arguments):
        if module == "kernels.ssd.trained":
            raise RuntimeError("no result within 150 seconds")
        return run(module, *arguments)

    monkeypatch.setattr(trained, "_run", hangs)
    monkeypatch.setattr(peers, "published", lambda: print)
    monkeypatch.setattr(accuracy, "variants", lambda dtype: {"five": accuracy.five})
    assert [list(table.rows) for table in trained.tables()] == [["only y rounded", "five"]] * 2
    assert "the published fused kernel is left out: no result" in capsys.readouterr().out
    monkeypatch.setattr(
        trained, "_run", lambda module, *a: "[[1, 100], [3, 300]]" if "ssd" in module else run(module, *a)
    )
    rows = [table.rows["published fused kernel"] for table in trained.tables()]
    assert rows == [{"layer 1": 0.1, "layer 2": 0.1, "all layers": 0.1}] * 2


def test_the_published_kernel_in_a_process_of_its_own(two_heads, monkeypatch, tmp_path):
    scans.main([trained.FOLDER, "70", str(tmp_path / "scans.pt")])
    asked = []

    def published_calls(calls, *way):
        asked.append(way)
        return [lambda: accuracy.five(**calls[0])]

    monkeypatch.setattr(peers, "published_calls", published_calls)
    parts = trained._published(tmp_path / "scans.pt", torch.float16)
    assert asked == [("medium", 128)] * 2 and all(0 < off < 1e-6 * of for off, of in parts)
    with pytest.raises(RuntimeError, match="No module named lab.nothing"):
        trained._run("lab.nothing")
    with pytest.raises(RuntimeError, match="no result within 0.001 seconds"):
        trained._run("lab.nothing", seconds=0.001)


# Nsight Compute

METRICS = {
    "gpu__time_duration.sum": "1,234,000",
    "launch__registers_per_thread": "128",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "24.96",
    "dram__bytes_read.sum": "700,000,000",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "0.5",
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio": "0.25",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "2.25",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": "1",
    "launch__func_cache_config": "CachePreferNone",
}


def told(names):
    """ncu's answer, for kernels of these names."""
    lines = [["ID", "Kernel Name", *METRICS], ["", "", *("ns" for _ in METRICS)]]
    lines += [[str(n), name, *METRICS.values()] for n, name in enumerate(names)]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines) + "\n"


def names():
    return [name for *_, each, _ in profile.calls(None) for name in each]


def answering(monkeypatch, text, code=0, errors=""):
    monkeypatch.setattr(shutil, "which", lambda name: "ncu")
    asked = []
    done = SimpleNamespace(stdout=text, stderr=errors, returncode=code)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command) or done)
    return asked


def test_a_row_of_what_was_counted():
    (found,) = profile.counted(told(["fused"]))
    row = profile.row(found[1])
    assert found[0] == "fused" and row["time, µs"] == 1234 and row["registers"] == 128
    assert row["occupancy, %"] == 24.96 and row["read, MB"] == 700 and "written, MB" not in row
    assert row["waits at barriers, %"] == 25  # 0.75 of 3: a warp that is issued does not wait
    assert row["most waits"] == "long scoreboard 75 %" and row["then"] == "barrier 17 %"


def test_all_is_profiled_and_stored(monkeypatch, tmp_path, capsys):
    asked = answering(monkeypatch, told(names()))
    monkeypatch.setattr(profile, "HERE", tmp_path)
    (path,) = profile.store(ROOF, {"triton": "3.6"})
    (command,) = asked
    assert command[0] == "ncu" and command[command.index("--clock-control") + 1] == "none"
    assert path.name == "nvidia_h200_ncu.json"
    item = results.Stored(path)
    table = item.table(profile.TITLE)
    assert item.changed() == [] and not table.stale and len(table.rows) == len(names())
    assert {"published design", "fused.cu", "five, chunk 256: scan_kernel"} <= set(table.rows)
    assert {"kernels/ssd/fused.cu", "kernels/ssd/chunk_scan.py", "kernels/ssd/profile.py"} <= set(table.sources)


def test_the_kernels_are_there():
    text = (results.ROOT / "kernels/ssd/fused.cu").read_text()
    assert re.search(r"__global__[^;{]*\bfused\(", text) and "fused" in names()
    assert names()[0] == "published" and len(set(names())) == len(names())


def test_other_kernels_than_expected_are_refused(monkeypatch):
    answering(monkeypatch, told(names()[:-1]))
    with pytest.raises(RuntimeError, match="ncu saw .* and not .*scan_kernel"):
        profile.table()
    answering(monkeypatch, "nothing")
    with pytest.raises(RuntimeError, match="ncu gave no table: nothing"):
        profile.table()


def test_where_ncu_is_missing_or_may_not_count_it_says_so(monkeypatch, capsys):
    answering(monkeypatch, "==PROF== x\n", 1, "==ERROR== ERR_NVGPUCTRPERM: no permission\n")
    assert profile.store(ROOF, {}) == []
    said = capsys.readouterr().out
    assert "ncu failed" in said and "ERR_NVGPUCTRPERM" in said and "stays" in said
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert profile.store(ROOF, {}) == [] and "is not installed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert profile.main([]) == 1
    assert "No NVIDIA GPU" in capsys.readouterr().out


def test_the_bench_stores_them_beside_the_ladders(monkeypatch, tmp_path, capsys):
    written, asked = tmp_path / "x.json", []
    ssd = SimpleNamespace(
        ladders=list,
        tables=lambda: [Table("errors", {"a": {"b": 1.5}})],
        further=lambda *about: asked.append(about) or [written],
    )
    modules = {"kernels.ssd.bench": ssd, "kernels.ssd.studies": ssd}
    monkeypatch.setattr(topics.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(topics, "HERE", tmp_path)
    monkeypatch.setattr(topics, "gpu_roof", lambda: ROOF)
    monkeypatch.setattr(topics, "versions", dict)
    path, further = topics.measure("ssd")
    assert further == written and asked == [(ROOF, {})]
    assert results.Stored(path).table("errors").rows == {"a": {"b": 1.5}} and "errors" in capsys.readouterr().out
