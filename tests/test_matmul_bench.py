"""The matmul's bench, its variants and the sweep on a made-up card: inputs are cold, variants are right."""

import json
import re
import sys
import time

import made_up_card
import pytest
import torch
from matmul_tensors import close
from test_gemv_bench import cold

from kernels import benching, headline, matmul
from kernels.bench import GPU_TOPICS
from kernels.matmul import bench, sweep, trials
from kernels.matmul.variants import FEW, LARGE, Variant, changed, compiled, sizes
from lab import results
from lab.check import Verdict

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

SMALLEST = (64, 64, 1)


@pytest.fixture
def card(monkeypatch):
    made = made_up_card.put_in(monkeypatch)
    for module in (bench, benching):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(benching, "empty", lambda: None)
    for module in (bench, sweep):
        monkeypatch.setattr(module, "empty", lambda: None)
    return made


def test_the_ladder_reads_cold_inputs(card):
    rungs = [rung for rung in matmul.RUNGS if rung.name == "tma"]
    verdicts = {rung.name: Verdict(shapes=1) for rung in rungs}
    ladder = bench.ladder("a title", "fp16", (5, 48, 32), rungs, verdicts, 0.1)
    assert [f.name for f in ladder.figures] == [*(r.title for r in rungs), card.timed[-1]]
    assert card.timed[-1] in ("cuBLAS: F.linear", "cuBLAS: torch.mm") and ladder.bound == "flops"
    for name in card.timed:
        assert cold(card.calls[name]), name
    for figure in ladder.figures[:-1]:
        assert figure.checked == "right on 2 shapes" and all((results.ROOT / s).is_file() for s in figure.sources)
    assert ladder.figures[0].flops == 2 * 5 * 48 * 32 and "matmul" in GPU_TOPICS


def test_each_ladder_has_a_title_of_its_own_and_those_of_the_readme_are_among_them():
    titles = [bench.title(name, *shape) for name, shape, _ in bench.works()]
    assert len(set(titles)) == len(titles) == len(bench.SQUARES) + len(bench.LAYERS) * len(bench.TOKENS) - 1
    wanted = {case.ladder: case.ours for case in headline.CASES if case.topic == "matmul"}
    rungs = {bench.title(name, *shape): [rung.title for rung in rungs] for name, shape, rungs in bench.works()}
    assert all(ours in rungs[title] for title, ours in wanted.items())


def test_a_wrong_rung_is_not_timed(card, monkeypatch):
    broken = bench.Rung("tile", "broken", lambda x, W, *, out: out.fill_(1), ("kernels/matmul/tile.cu",))
    with pytest.raises(ValueError, match="broken is not right, so it is not timed: relative error"):
        bench.ladder("a title", "fp16", (5, 48, 32), [broken], {"tile": Verdict(shapes=1)}, 0.1)
    assert not card.timed


def test_rungs_are_held_to_hostile_shapes(card, monkeypatch):
    monkeypatch.setattr(bench, "HOSTILE", [(1, 8, 8), (3, 16, 72)])
    monkeypatch.setattr(bench, "ODD", [])
    monkeypatch.setattr(bench, "DTYPES", {"fp16": torch.float16})
    assert str(bench._check(bench.LINEAR)) == "right on 2 shapes"
    broken = bench.Rung("linear", "broken", lambda x, W, *, out: matmul.linear(x, W, out=out).add_(1), ())
    assert not bench._check(broken)


VARIANTS = [
    sizes("two parts", SMALLEST, splits=2),
    *(v._replace(chosen=(("tile", SMALLEST), ("cluster", 2))) for v in LARGE if v.changes and "cluster 2" in v.title),
    Variant("from registers", (("tile", SMALLEST),), output="Plain"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.title)
def test_variants_are_right(variant):
    x, W = torch.randn(70, 136).half(), torch.randn(136, 136).half()
    y = torch.full((70, 136), torch.nan).half()
    variant.prepare(x, W, y)()
    close(y, x, W)


def test_every_variant_finds_what_it_replaces():
    titles = [variant.title for variant in LARGE], [variant.title for variant in FEW]
    assert all(len(set(t)) == len(t) for t in titles)
    for variant in (*LARGE, *FEW):
        assert variant.fits(4096, 4096, 4096, torch.device("cpu")), variant.title
        compiled("any", variant.changes)
    with pytest.raises(RuntimeError, match="planned.cu must have 'no such text' once"):
        compiled("any", (("no such text", ""),))


def test_the_trials(card, monkeypatch):
    monkeypatch.setattr(trials, "SHAPE", (5, 24, 72))
    monkeypatch.setattr(trials, "LARGE", [sizes("one", SMALLEST), sizes("other", SMALLEST)._replace(promotion=128)])
    monkeypatch.setattr(trials.bench, "DEVICE", "cpu")
    (ladder,) = trials.ladders()
    assert [f.name for f in ladder.figures] == ["one", "other"] and trials.tables() == []
    assert all((results.ROOT / s).is_file() for f in ladder.figures for s in f.sources)


def test_the_sweep_tells_each_variant(card, monkeypatch, capsys):
    wrong = Variant("wrong", (("tile", SMALLEST),), (("sums[r] + 4 * j, row", "sums[r], row"),), "Plain")
    broken = Variant("broken", (("tile", SMALLEST),), (("no such text", ""),))
    cluster = sizes("a cluster", SMALLEST, cluster=(2, 1), splits=1)
    variants = [sizes("no room", (128, 256, 2), stages=8), cluster, wrong, broken]
    monkeypatch.setattr(sweep, "SHAPES", [(5, 24, 72, variants)])
    sweep.worker(set())
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    begun = [line["begins"] for line in told if "begins" in line]
    assert begun == ["cuBLAS", "wrong", "broken", "a cluster", sweep.CHOSEN.title]
    ended = {line["title"]: line for line in told if "title" in line}
    assert "relative error" in ended["wrong"]["wrong"] and "no such text" in ended["broken"]["wrong"]
    assert ended["a cluster"]["ours"] > 0 and "64x64x1 cluster 2x1" in ended["a cluster"]["plan"]
    sweep.worker({(0, v.title) for v in (sweep.CHOSEN, *variants)})
    assert capsys.readouterr().out == ""


WORKER = """
import json, sys, time
done = json.loads(sys.argv[2])
def say(**facts): print(json.dumps(facts), flush=True)
for title in ("one", "hangs", "dies", "pair 1", "pair 2", "pair 3", "last"):
    if [0, title] not in done:
        say(index=0, begins=title)
        if title == "hangs": time.sleep(60)
        if title in ("dies", "pair 1", "pair 2", "pair 3"): sys.exit(7)
        say(index=0, title=title, ours=1e-6, theirs=2e-6, plan="its plan")
"""


def test_the_sweep_goes_on_behind_what_hangs_or_dies(card, monkeypatch, capsys, tmp_path):
    pairs = [sizes(f"pair {i}", SMALLEST, cluster=2) for i in (1, 2, 3)]
    monkeypatch.setattr(sweep, "SHAPES", [(5, 24, 72, pairs)])
    monkeypatch.setattr(sweep, "compile_ahead", lambda device: None)
    monkeypatch.setattr(sweep, "START", 1.0)
    command = sys.executable, "-c", WORKER, "worker"
    found = sweep.main(60, tmp_path / "all.txt", command, silence=0.5)
    assert [told["title"] for told in found[0]] == ["one", "last"]
    said, kept = capsys.readouterr().out, (tmp_path / "all.txt").read_text()
    assert "hangs: NO RESULT, silent for 0 s, killed" in kept and "dies: NO RESULT, 7" in kept
    assert "pair 2: NO RESULT" in kept and "pair 3" not in kept and "no more clusters of (2, 1)" in said
    assert "5 × 72 times 24 × 72: cuBLAS 2.0 us" in said
    assert re.search(r"^ +[\d.]+ TFLOP/s  2.000  last$", said, re.M)
    begin = time.perf_counter()
    assert list(sweep.main(0.5, None, (*command[:2], "import time; time.sleep(60)", "worker"))) == []
    assert time.perf_counter() - begin < 10


def test_the_sweep_compiles_what_is_launched():
    assert len(sweep.sources(torch.device("cpu"))) > len(LARGE)
    shape = Variant("one", (("tile", SMALLEST),)).plan(64, 64, 64, torch.device("cpu")).shape("__half", "Plain")
    module = compiled(shape).module
    assert (module.source, module.options, module.name) == (changed(()), (f"-DSHAPE={shape}",), "planned.cu")
