"""The README's figures are those of the stored results, never typed."""

import json
import re
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from kernels import bench, headline
from lab import Ladder, Roof, Timing, notebooks, results
from lab.figure import AsCalled, Figure

README = (results.ROOT / "README.md").read_text()
MEASURED = any(item.card == bench.README_CARD for item in results.stored("gemv"))
measured = pytest.mark.skipif(not MEASURED, reason=f"no figures of an {bench.README_CARD} are stored yet")


@measured
def test_the_readmes_table_is_the_stored_one():
    block = bench.ladder_block(bench.readme_ladder())
    assert f"<!-- ladder:begin -->\n{block}\n<!-- ladder:end -->" in README, "run `python -m kernels.bench readme`"


@measured
def test_the_readmes_headline_is_the_stored_one():
    block = headline.headline(bench.README_CARD)
    assert f"<!-- headline:begin -->\n{block}\n<!-- headline:end -->" in README, "run `python -m kernels.bench readme`"


@measured
def test_the_readmes_picture_is_there():
    assert bench.picture_line(bench.readme_ladder()) in README.splitlines(), "run `python -m kernels.bench readme`"
    assert bench.PICTURE.read_bytes().startswith(b"\x89PNG")


@measured
@pytest.mark.parametrize("chapter", sorted({case.chapter for case in headline.CASES}))
def test_each_row_of_the_headline_stands_in_its_chapter(chapter):
    (path,) = (results.ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
    shown = [o.get("data", {}) for cell in notebooks.read(path).cells for o in cell.get("outputs", ())]
    for ladder in headline.ladders(chapter):
        assert str(ladder) in [data.get("text/plain") for data in shown], ladder.title


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with the README as it is, and a stored GPU ladder of two figures."""
    shutil.copy(results.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "PICTURE", tmp_path / "kernels/gemv/measured/ladder.png")
    cases = [headline.Case("04", "gemv", bench.README_LADDER, "a"), headline.Case("15", "ssd", "not stored", "a")]
    monkeypatch.setattr(headline, "CASES", cases)
    return tmp_path


def store(course, card):
    def figure(name, share, seconds, *sources):
        called = 31e-6 if sources else seconds + 7e-6
        times = {"timing": Timing(seconds, 27e-6, 28e-6, 9), "called": Timing(called, 30e-6, 32e-6, 9)}
        return Figure(name, 10**8, 10**8, share=share, bound="read", sources=sources, **times)

    source = "kernels/gemv/gemv.cu"
    (course / source).parent.mkdir(parents=True, exist_ok=True)
    (course / source).write_text("int a;")
    figures = [figure("a", 0.5, 27.5e-6, source), figure("a, PDL", 0.9, 25e-6, source)]
    figures += [figure("slow peer", 0.3, 90e-6), figure("peer", 0.4, 55e-6)]
    steps = [Ladder("GEMV fp16, 14336 × 4096", "read", figures[:1]), Ladder(bench.README_LADDER, "read", figures)]
    return results.save(course / "kernels" / "gemv", steps, Roof(card, 4e12, 4e12, 7e14), {})


def test_the_readme_is_drawn_in_one_command(course):
    store(course, "another card")
    with pytest.raises(results.ResultsError, match="no stored results of gemv on an NVIDIA H200 yet: run `make bench`"):
        bench.readme()
    assert (course / "README.md").read_text() == README and not bench.PICTURE.exists()
    store(course, bench.README_CARD)
    assert bench.main(["readme"]) == 0
    text = (course / "README.md").read_text()
    assert bench.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert text.count("kernels/gemv/measured/ladder.png") == 1 and "cpu_gemv/measured" not in text
    table = text.split("<!-- ladder:begin -->")[1].split("<!-- ladder:end -->")[0]
    assert "| a | 27.5 µs | 27 – 28 | 31 µs | 3.64 TB/s | 50 % |" in table
    assert "stored run: NVIDIA H200, 2" in table and "as called: from Python" in table
    row = "| 27.5 µs / 25 µs | 50 % / 90 % | 55 µs, peer | 2.00× / 2.20× "
    row += "| 31 µs / 31 µs | 62 µs, peer | 2.00× / 2.00× | – |"
    assert f"| 04 | {bench.README_LADDER} {row}" in text and "| 15 |" not in text
    blocks = r"(?s)!\[.*?\)|<!-- ladder:begin.*?ladder:end -->|<!-- headline:begin.*?headline:end -->"
    outside = [re.sub(blocks, "", t) for t in (text, README)]
    assert outside[0] == outside[1]  # nothing else was touched
    bench.readme()
    assert (course / "README.md").read_text() == text


def test_a_work_that_was_not_measured_has_no_row_and_is_named(course, monkeypatch, capsys):
    store(course, bench.README_CARD)
    missing = [headline.Case("04", "gemv", "GEMV bf16, 1 × 1", "a"), headline.Case("04", "gemv", "GEMV fp16", "b")]
    monkeypatch.setattr(headline, "CASES", [*missing, *headline.CASES])
    table = headline.headline(bench.README_CARD)
    assert "1 × 1" not in table and "fp16" not in table and f"| 04 | {bench.README_LADDER} |" in table
    assert capsys.readouterr().out.count("notice: ") == 2
    assert [ladder.title for ladder in headline.ladders("04")] == [bench.README_LADDER]


@measured
def test_every_topic_that_is_stored_has_the_works_of_the_headline(capsys):
    headline.headline(bench.README_CARD)
    assert [line for line in capsys.readouterr().out.splitlines() if "run of matmul" not in line] == []


def row_of(*figures):
    return headline._row(headline.Case("15", "ssd", "title", "a"), Ladder("title", "read", list(figures)))


def timed(name, graph, called=None, sustained=None, *, ours=False):
    graph, called, sustained = (x and Timing(x, x, x, 9) for x in (graph, called, sustained))
    sources = ("a.cu",) if ours else ()
    return Figure(name, 1, 1, graph, 0.5, "read", sources=sources, called=called, sustained=sustained)


def test_graphs_are_compared_with_graphs_and_calls_with_calls():
    ours, peer = timed("a", 100e-6, 110e-6, ours=True), timed("peer", 120e-6, 90e-6)  # slower in a graph
    assert row_of(ours, peer)[4:9] == ("120 µs, peer", "1.20×", "110 µs", "90 µs, peer", "0.82×")
    row = row_of(ours, timed("other", 95e-6, 200e-6), peer)  # another peer is the best one in a graph
    assert row[4:9] == ("95 µs, other", "0.95×", "110 µs", "90 µs, peer", "0.82×")
    assert row_of(ours)[4:6] == ("none was measured", "") and row_of(ours)[7:9] == ("", "")
    assert row_of(timed("a", 1e-4, ours=True), peer)[6:10] == ("–",) * 4  # stored without it


def test_what_the_processor_does_stands_beside_where_it_is_known(course):
    ours, peer = timed("a", 1e-4, 1.1e-4, ours=True), timed("peer", 1e-4, 2e-4)
    assert row_of(ours, peer)[headline.HOST] == "–"
    ours, peer = (replace(f, host=Timing(s, s, s, 9)) for f, s in ((ours, 4e-6), (peer, 9e-6)))
    assert row_of(ours, peer)[headline.HOST] == "4 µs; 9 µs" and row_of(ours)[headline.HOST] == "4 µs"
    stale = Ladder("title", "read", [ours, peer], called_on=AsCalled("AMD EPYC", {}, stale=True))
    row = headline._row(headline.Case("15", "ssd", "title", "a"), stale)
    assert row[6:8] == ("(stale) 110 µs", "(stale) 200 µs, peer") and row[headline.HOST] == "(stale) 4 µs; 9 µs"
    path = store(course, bench.README_CARD)
    assert "processor" not in headline.headline(bench.README_CARD)
    record = json.loads(path.read_text())
    for ladder in record["ladders"]:
        ladder["called_on"] = asdict(AsCalled("AMD EPYC", {}, date="2031-02-03"))
        for figure in ladder["figures"]:
            figure["host"] = figure["called"]
    path.write_text(json.dumps(record))
    found = headline.headline(bench.README_CARD)
    assert "| processor: ours; peer |" in found and "| 31 µs / 31 µs; 62 µs | – |" in found
    assert found.endswith("; as called: AMD EPYC, 2031-02-03*")
    block = bench.ladder_block(bench.readme_ladder())
    assert "| as called | processor |" in block and "processor: its part of that*" in block


def test_sustained_times_stand_where_they_differ():
    ours, peer = timed("a", 100e-6, 1e-4, 120e-6, ours=True), timed("peer", 200e-6, 2e-4, 204e-6)
    assert row_of(ours, peer)[-1] == "120 µs; 204 µs: 1.70×" and row_of(ours)[-1] == "120 µs"
    assert row_of(timed("a", 1e-4, 1e-4, 1.02e-4, ours=True), peer)[-1] == "the same"
    assert row_of(ours, timed("peer", 2e-4, 2e-4))[-1] == "–"  # the peer's is not known


def test_a_readme_without_a_picture_is_refused():
    with pytest.raises(ValueError, match="must show a ladder.png once.*found 0"):
        bench.replace_picture("text\n", "![a](b/ladder.png)")


def test_a_gpus_topics_need_a_gpu(course, monkeypatch, capsys):
    monkeypatch.setattr(bench, "gpu_roof", lambda: None)
    monkeypatch.setattr(bench, "measure", lambda topic, options=None: asked.append(topic) or [])
    asked, path = [], store(course, bench.README_CARD)
    before = path.read_bytes()
    assert bench.main([]) == 0 and asked == [t for t in bench.TOPICS if t not in bench.GPU_TOPICS]
    said = capsys.readouterr().out
    assert "No NVIDIA GPU" in said and "stay as they are" in said
    assert f"ladders ({', '.join(bench.GPU_TOPICS)}) are not measured" in said
    assert bench.main(["gemv"]) == 1 and "No NVIDIA GPU" in capsys.readouterr().out
    assert bench.main(["cpu_gemv"]) == 0 and capsys.readouterr().out == ""
    assert asked[-1] == "cpu_gemv" and "gemv" not in asked and path.read_bytes() == before


def test_a_gpus_topics_are_stored_under_the_gpus_name(course, monkeypatch):
    steps = [Ladder(bench.README_LADDER, "read", [], device="cuda")]
    module = SimpleNamespace(ladders=lambda: steps)
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: {"kernels.gemv.bench": module}[name])
    monkeypatch.setattr(bench, "HERE", course / "kernels")
    monkeypatch.setattr(bench, "gpu_roof", lambda: Roof("NVIDIA H200", 4e12, 4e12, 7e14))
    monkeypatch.setattr(bench, "roof", lambda: pytest.fail("the processor's roof was asked for"))
    monkeypatch.setattr(bench, "versions", dict)
    steps[0].figures.append(Figure("a", 1, 1, Timing(1, 1, 1, 1), 0.5, "read"))
    assert bench.measure("gemv") == [course / "kernels/gemv/measured/nvidia_h200.json"]


def test_a_topic_can_be_measured_in_parts(course, monkeypatch, capsys):
    from kernels.ssd import bench as ssd

    assert bench.PARTS["ssd"] == ssd.PARTS
    assert bench.main(["ssd:nothing"]) == 2 and "ssd:lengths" in capsys.readouterr().out
    asked, figure = [], Figure("a", 1, 1, Timing(1, 1, 1, 1), 0.5, "read")

    def ladders(parts=ssd.PARTS):
        asked.append(parts)
        return [Ladder(part, "read", [figure], device="cuda") for part in parts]

    module = SimpleNamespace(ladders=ladders, tables=lambda: asked.append("tables") or [])
    module.further = lambda *about: asked.append("further") or []
    monkeypatch.setattr(bench.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(bench, "HERE", course / "kernels")
    monkeypatch.setattr(bench, "gpu_roof", lambda: Roof("NVIDIA H200", 4e12, 4e12, 7e14))
    monkeypatch.setattr(bench, "versions", dict)
    assert bench.main(["ssd:lengths", "ssd:studies"]) == 0
    assert asked == [("lengths",), ("studies",), "tables", "further"]
    (stored,) = results.stored("ssd")
    assert {ladder.title for ladder in stored.ladders} == {"lengths", "studies"}
    asked.clear()
    bench.measure("ssd")
    assert asked == [ssd.PARTS, "tables", "further"]


def test_a_block_is_replaced_and_nothing_else():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    assert bench.replace_block(text, "x", "new") == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    assert (
        bench.replace_block("<!-- x:begin -->\n<!-- x:end -->", "x", "new") == "<!-- x:begin -->\nnew\n<!-- x:end -->"
    )


def test_bench_names_an_unknown_topic(capsys):
    assert bench.main(["no_such_topic"]) == 2
    assert "no_such_topic" in capsys.readouterr().out
