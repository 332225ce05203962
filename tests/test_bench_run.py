"""Runs of the bench that measure less: some ladders, those that changed, or times as called alone; what they store."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kernels import bench, beside, running
from lab import Ladder, Roof, Timing, results
from lab.figure import AsCalled, Figure
from lab.results import Stored

ROOF = Roof("NVIDIA H200", 4e12, 4e12, 7e14)
FILES = {"kernels/gemv/a.cu": "int a;\n", "kernels/gemv/b.cu": "int b;\n", "lab/launch.py": "x = 1\n"}
TITLES = "first", "second"


def time(seconds):
    return Timing(seconds, seconds, seconds, 9)


def ladder(title, graph=1.0, called=2.0):
    """One row of ours, which rests on a.cu or b.cu, and a peer."""
    source = "kernels/gemv/a.cu" if title == "first" else "kernels/gemv/b.cu"
    times = {"timing": time(graph), "called": time(called), "host": time(called / 2)}
    figures = [Figure("ours", 1, 1, share=0.5, bound="read", sources=(source,), **times)]
    figures.append(Figure("peer", 1, 1, share=0.5, bound="read", **times))
    on = AsCalled("AMD EPYC", dict.fromkeys([source, "lab/launch.py"]))
    return Ladder(title, "read", figures, device="cuda", called_on=on)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with one topic, whose bench measures two ladders and gives them the times that a test asks for."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = SimpleNamespace(
        path=tmp_path, times={"graph": 1.0, "called": 2.0}, measured=[], fails=None, rows=slice(None)
    )

    def ladders():
        found = []
        for title in filter(running.wants, TITLES):
            if title == made.fails:
                raise KeyboardInterrupt
            made.measured.append((title, running.only_called()))
            one = ladder(title, **made.times)
            found.append(running.done(replace(one, figures=one.figures[made.rows])))
        return found

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "HERE", tmp_path / "kernels")
    monkeypatch.setattr(beside, "HERE", tmp_path / "kernels")
    monkeypatch.setattr(bench, "gpu_roof", lambda: ROOF)
    monkeypatch.setattr(bench, "versions", lambda: {"torch": made.__dict__.get("torch", "2.11")})
    module = SimpleNamespace(ladders=ladders, further=lambda *about: made.measured.append("trials") or [])
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: module)
    return made


def stored(course):
    return Stored(course.path / "kernels/gemv/measured/nvidia_h200.json")


def change(course, name):
    (course.path / name).write_text("int changed;\n" if name.endswith("cu") else "x = 2\n")


def of(course, title):
    """(time in a graph, as called, of the processor) of our row."""
    figure = stored(course).ladder(title)["ours"]
    return tuple(timing.median for timing in (figure.timing, figure.called, figure.host))


def test_a_whole_run_has_its_account(course):
    assert bench.main(["gemv"]) == 0 and course.measured == [("first", False), ("second", False), "trials"]
    item = stored(course)
    on = item.ladder("first").called_on
    assert (on.processor, on.card, on.date, on.versions, on.stale) == (
        "AMD EPYC", "NVIDIA H200", item.date, {"torch": "2.11"}, False,
    )  # fmt: skip
    assert on.sources == {n: results.code_hash(course.path / n) for n in ("kernels/gemv/a.cu", "lab/launch.py")}
    assert item.changed() == [] and "as called" not in item.ladder("first").source


def test_times_as_called_alone(course):
    bench.main(["gemv"])
    before = json.loads(stored(course).path.read_text())
    course.times, course.torch = {"graph": 7.0, "called": 3.0}, "2.12"
    course.measured.clear()
    assert bench.main(["--called", "gemv"]) == 0
    assert course.measured == [("first", True), ("second", True)]  # no trials
    assert of(course, "first") == (1.0, 3.0, 1.5)  # the time in the graph stays
    after = json.loads(stored(course).path.read_text())
    assert after["versions"] == {"torch": "2.11"} and after["ladders"][0]["called_on"]["versions"] == {"torch": "2.12"}
    for item in (*before["ladders"], *after["ladders"]):
        del item["called_on"]
        for raw in item["figures"]:
            del raw["called"], raw["host"]
    assert before == after  # and so does all else


def test_times_as_called_have_a_day_of_their_own(course):
    bench.main(["gemv"])
    record = json.loads(stored(course).path.read_text())
    record["ladders"][0]["called_on"]["date"] = "2031-02-03"
    stored(course).path.write_text(json.dumps(record))
    first, second = stored(course).ladders
    assert first.source.endswith("; as called: 2031-02-03") and "as called" not in second.source


def test_a_row_that_is_missing_keeps_the_times_of_all(course, capsys):
    bench.main(["gemv"])
    course.times["called"], course.rows = 3.0, slice(1)  # without the peer
    bench.main(["--called", "gemv"])
    assert of(course, "first") == (1.0, 2.0, 1.0)
    assert "first keeps its times as called: 'peer' was not measured" in capsys.readouterr().out


def test_nothing_is_called_where_nothing_is_stored(course, capsys):
    assert bench.main(["--called", "gemv"]) == 1
    assert "nothing of gemv is stored for NVIDIA H200" in capsys.readouterr().out
    bench.main(["gemv", "--only", "first"])
    course.measured.clear()
    bench.main(["gemv", "--called"])
    assert course.measured == [("first", True)]  # the other is not stored


def test_some_ladders_alone(course):
    bench.main(["gemv"])
    course.times["graph"] = 5.0
    course.measured.clear()
    assert bench.main(["gemv", "--only", "seco", "--only", "nothing"]) == 0 and course.measured == [("second", False)]
    assert of(course, "first")[0] == 1.0 and of(course, "second")[0] == 5.0
    assert [x.title for x in stored(course).ladders] == list(TITLES)


def test_the_ladders_of_the_headline_alone(course, monkeypatch):
    monkeypatch.setattr(bench, "CASES", [bench.CASES[0]._replace(ladder="sec"), bench.CASES[0]._replace(topic="ssd")])
    bench.main(["gemv", "--headline"])
    assert course.measured == [("second", False)]


def test_what_has_changed(course):
    bench.main(["gemv", "--changed"])
    assert course.measured == [("first", False), ("second", False)]  # neither is stored
    course.measured.clear()
    bench.main(["gemv", "--changed"])
    assert course.measured == []
    change(course, "kernels/gemv/b.cu")
    bench.main(["gemv", "--changed"])
    assert course.measured == [("second", False)] and stored(course).changed() == []
    change(course, "lab/launch.py")  # which times in a graph do not rest on
    course.measured.clear()
    bench.main(["gemv", "--changed"])
    assert course.measured == [] and stored(course).changed() == ["lab/launch.py"]
    bench.main(["gemv", "--called", "--changed", "--only", "first"])
    assert course.measured == [("first", True)] and stored(course).current(called=True) == {"first"}
    bench.main(["gemv", "--called", "--changed"])
    assert course.measured == [("first", True), ("second", True)] and stored(course).changed() == []


def test_what_ends_a_run_early_loses_no_ladder(course):
    bench.main(["gemv"])
    course.times["graph"], course.fails = 5.0, "second"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["gemv"])
    assert of(course, "first")[0] == 5.0 and of(course, "second")[0] == 1.0


def test_what_has_changed_and_is_not_measured_is_stale(course):
    bench.main(["gemv"])
    for name in ("kernels/gemv/a.cu", "kernels/gemv/b.cu"):
        change(course, name)
    bench.main(["gemv", "--only", "first"])
    item = stored(course)
    assert [item.ladder(title)["ours"].stale for title in TITLES] == [False, True]
    assert item.changed() == ["kernels/gemv/b.cu"]  # of its times as called, until they are marked
    course.measured.clear()
    bench.main(["gemv", "--changed"])
    assert course.measured == [("second", False)] and stored(course).changed() == []
    assert not stored(course).ladder("second")["ours"].stale


def test_less_is_for_the_gpus_topics(course, capsys):
    assert bench.main(["--called", "cpu_gemv"]) == 2
    assert "--called are for the GPU's topics, not for cpu_gemv" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--caled"])


# Changed code


def test_python_that_a_call_runs_is_what_its_time_rests_on(course):
    bench.main(["gemv"])
    change(course, "lab/launch.py")
    assert stored(course).changed() == ["lab/launch.py"]
    assert stored(course).mark_stale() == ["lab/launch.py"] and stored(course).changed() == []
    item = stored(course)
    first = item.ladder("first")
    assert item.stale == [] and not first["ours"].stale and first.called_on.stale
    at = first.headings.index("as called")
    assert [row[at : at + 2] for row in first.rows()] == [("(stale) 2 s", "(stale) 1 s")] * 2
    assert bench.main(["gemv", "--called", "--changed"]) == 0 and not stored(course).ladder("first").called_on.stale


def test_a_kernel_is_what_both_times_rest_on(course):
    bench.main(["gemv"])
    change(course, "kernels/gemv/a.cu")
    assert stored(course).mark_stale() == ["kernels/gemv/a.cu"]
    item = stored(course)
    assert item.stale == ["kernels/gemv/a.cu"]
    assert (
        [item.ladder(t).called_on.stale for t in TITLES]
        == [True, False]
        == [item.ladder(t)["ours"].stale for t in TITLES]
    )


def test_a_source_that_moves_or_runs_the_same(course):
    bench.main(["gemv"])
    (course.path / "lab/launch.py").rename(course.path / "lab/start.py")
    assert stored(course).move("lab/launch.py", "lab/start.py") and stored(course).changed() == []
    change(course, "lab/start.py")
    assert stored(course).same("lab/start.py", "it is only said otherwise") and stored(course).changed() == []
    (kept,) = stored(course).record["same"]
    assert (
        kept["source"] == "lab/start.py"
        and kept["measured"] != kept["now"]
        and "lab/start.py" not in stored(course).sources
    )


def test_damage_is_seen(course):
    bench.main(["gemv"])
    path = stored(course).path
    whole = path.read_text()
    for key, value in (("processor", 3), ("stale", "no"), ("sources", {"a": 1}), ("sources", None), ("speed", 1)):
        record = json.loads(whole)
        record["ladders"][0]["called_on"][key] = value
        path.write_text(json.dumps(record))
        with pytest.raises(results.ResultsError, match="is damaged"):
            Stored(path)


def test_a_source_that_is_gone_is_not_stored(course):
    (course.path / "lab/launch.py").unlink()
    with pytest.raises(FileNotFoundError, match="no source lab/launch.py"):
        bench.measure("gemv")


def test_a_topic_that_fails_does_not_keep_the_others(course, capsys):
    fails = bench.importlib.import_module("kernels.gemv.bench")
    right = SimpleNamespace(ladders=lambda: [running.done(ladder("second"))])

    def ladders():
        raise RuntimeError("out of memory")

    fails.ladders, modules = ladders, {"kernels.gemv.bench": fails, "kernels.matmul.bench": right}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.importlib, "import_module", modules.__getitem__)
        assert bench.main(["gemv", "matmul"]) == 1
    said = capsys.readouterr().out
    assert "RuntimeError: out of memory" in said and "wrote kernels/matmul/measured/nvidia_h200.json" in said


# Another card


def test_another_cards_run_is_a_file_of_its_own_and_is_shown_beside_the_h200s(course, monkeypatch, capsys):
    bench.main(["gemv"])
    before = stored(course).path.read_bytes()
    assert "Tesla T4" not in capsys.readouterr().out
    monkeypatch.setattr(bench, "gpu_roof", lambda: Roof("Tesla T4", 3e11, 3e11, 6e13))
    course.times = {"graph": 12.0, "called": 13.0}
    assert bench.main(["gemv"]) == 0
    assert stored(course).path.read_bytes() == before
    assert Stored(course.path / "kernels/gemv/measured/tesla_t4.json").card == "Tesla T4"
    first, second = beside.beside("gemv", "Tesla T4")
    assert first.title == "first" and set(first.rows) == {"ours", "peer"} and not first.stale
    assert first.rows["ours"] == {
        "Tesla T4": "12 s", "Tesla T4, of its roof": "50 %", "NVIDIA H200": "1 s", "NVIDIA H200, of its roof": "50 %"
    }  # fmt: skip
    said = capsys.readouterr().out
    assert str(first) in said and str(second) in said and "Tesla T4, 20" in said

    monkeypatch.setattr(bench, "gpu_roof", lambda: ROOF)  # an H200 has nothing to stand beside
    bench.main(["gemv"])
    assert "of its roof" not in capsys.readouterr().out


def test_rows_that_only_one_card_has_are_left_out(course, monkeypatch):
    bench.main(["gemv"])
    monkeypatch.setattr(bench, "gpu_roof", lambda: Roof("Tesla T4", 3e11, 3e11, 6e13))
    course.rows = slice(1)
    bench.main(["gemv", "--only", "second"])
    (table,) = beside.beside("gemv", "Tesla T4")
    assert table.title == "second" and set(table.rows) == {"ours"}
    change(course, "kernels/gemv/b.cu")
    for name in "tesla_t4", "nvidia_h200":
        Stored(course.path / f"kernels/gemv/measured/{name}.json").mark_stale()
    assert beside.beside("gemv", "Tesla T4")[0].stale


def test_the_command_beside(course, monkeypatch, capsys):
    assert beside.main(["Tesla T4"]) == 2 and "stored are: none but the NVIDIA H200's yet" in capsys.readouterr().out
    bench.main(["gemv"])
    monkeypatch.setattr(bench, "gpu_roof", lambda: Roof("Tesla T4", 3e11, 3e11, 6e13))
    bench.main(["gemv"])
    capsys.readouterr()
    for words in ([], ["NVIDIA H200"], ["T4"], ["Tesla T4", "x"]):
        assert beside.main(words) == 2 and "stored are: Tesla T4\n" in capsys.readouterr().out
    assert beside.main(["Tesla T4"]) == 0 and capsys.readouterr().out.count("of its roof") == 4
