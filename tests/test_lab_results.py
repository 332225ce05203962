"""Stored results: written whole, read back the same, refused when damaged, and tied to the code they measured."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lab import Ladder, Roof, Timing, results
from lab.figure import Figure
from lab.results import ResultsError, Stored, code_hash
from lab.table import Table

ROOF = Roof("AMD EPYC, 2 threads", 20e9, 15e9, 100e9, {1: (11e9, 8e9, 50e9), 2: (20e9, 15e9, 100e9)})
VERSIONS = {"numpy": "2.4.6", "compiler": "gcc 12"}
NAIVE = "void gemv(int n) { n++; } /* slow */\n"
FAST = "void gemv(int n) { ++n; }\n"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with one topic, two rungs and a header."""
    topic = tmp_path / "kernels" / "toy"
    topic.mkdir(parents=True)
    for name, text in {"naive.c": NAIVE, "fast.c": FAST, "vec.h": "typedef int vec;\n", "py.py": "x = 1\n"}.items():
        (topic / name).write_text(text)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return tmp_path


def ladders():
    def figure(name, share, *sources):
        timing = Timing(0.25, 0.125, 0.5, 9)
        return Figure(
            name, 100, 200, timing, share, "read", "right on 3 shapes", tuple("kernels/toy/" + s for s in sources)
        )

    first = [figure("naive", 0.1, "naive.c"), figure("fast", 0.75, "fast.c", "vec.h"), figure("NumPy", 0.5)]
    return [Ladder("GEMV 3 × 4", "read", first), Ladder("GEMV 5 × 6", "read", [figure("py", 0.5, "py.py")])]


def save(course, roof=ROOF):
    return results.save(course / "kernels" / "toy", ladders(), roof, VERSIONS)


def leftovers(folder):
    return [p.name for p in folder.rglob("*.part")]


# Save and load


def test_round_trip(course):
    path = save(course)
    assert path == course / "kernels/toy/measured/amd_epyc_2_threads.json"
    item = Stored(path)
    assert (item.card, item.versions, item.roof) == (ROOF.card, VERSIONS, ROOF)
    assert item.roof.by_threads == ROOF.by_threads
    assert [x.title for x in item.ladders] == ["GEMV 3 × 4", "GEMV 5 × 6"]
    for back, then in zip(item.ladders, ladders()):
        assert back.figures == then.figures and back.bound == then.bound
        assert back.source == f"stored run: AMD EPYC, 2 threads, {item.date}" and back.source in str(back)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", item.date)
    names = ["fast.c", "naive.c", "py.py", "vec.h"]
    assert item.sources.pop(results.C_FLAGS)
    assert item.sources == {f"kernels/toy/{n}": code_hash(course / "kernels/toy" / n) for n in names}
    assert item.stale == [] == item.changed() and leftovers(course) == []
    assert str(course) not in path.read_text()


def test_a_note_stays_with_its_ladder(course):
    """How some rows were measured otherwise than the rest: stored, kept when others are measured, and shown."""
    first, second = ladders()
    folder, note = course / "kernels" / "toy", "NumPy on another machine"
    path = results.save(folder, [replace(first, note=note), second], ROOF, VERSIONS)
    results.save(folder, [second], ROOF, VERSIONS, keep=True)
    one, other = Stored(path).ladders
    assert (one.note, other.note) == (note, "") and str(one).splitlines()[0].endswith(f"; {note})")
    assert "note" not in json.loads(path.read_text())["ladders"][1]


def test_a_gpu_roof_has_no_threads(course):
    roof = Roof("NVIDIA H200", 4e12, 4e12, 7e14)
    path = results.save(course / "lab", [], roof, {})
    assert path.name == "nvidia_h200.json" and Stored(path).roof == roof and Stored(path).ladders == []


def on_gpu(course, *sources):
    """Save one GPU figure that rests on these files of the toy topic, beside a peer."""
    for name in ("warp.cu", "load.h"):
        (course / "kernels/toy" / name).write_text("int n;\n")
    times = {"timing": Timing(0.25, 0.125, 0.5, 9), "called": Timing(0.75, 0.5, 1.0, 5)}
    warp = Figure(
        "warp", 100, 200, share=0.5, bound="read", sources=tuple("kernels/toy/" + s for s in sources), **times
    )
    peer = Figure("cuBLAS", 100, 200, share=0.9, bound="read", **times)
    gpu = Ladder("GEMV", "read", [warp, peer], device="cuda")
    return results.save(course / "kernels/toy", [gpu], Roof("NVIDIA H200", 4e12, 4e12, 7e14), VERSIONS), gpu


def test_a_gpus_ladder_round_trip(course):
    path, gpu = on_gpu(course, "warp.cu", "load.h")
    item = Stored(path)
    (back,) = item.ladders
    assert back.figures == gpu.figures and back.device == "cuda" and back["warp"].called.median == 0.75
    assert back.source == f"stored run: NVIDIA H200, {item.date}"
    assert set(item.sources) == {results.CUDA_FLAGS, "kernels/toy/warp.cu", "kernels/toy/load.h"}  # its .h is CUDA's
    assert item.changed() == []


def test_files_from_before_there_was_a_gpu_are_read(course):
    path = save(course)
    record = json.loads(path.read_text())
    for item in record["ladders"]:
        del item["device"]
        for raw in item["figures"]:
            del raw["called"]
    path.write_text(json.dumps(record))
    assert [x.device for x in Stored(path).ladders] == ["cpu", "cpu"]
    assert [x.figures for x in Stored(path).ladders] == [x.figures for x in ladders()]


def test_the_compilers_flags_are_a_source(course, monkeypatch):
    from simt import nvrtc

    path, _ = on_gpu(course, "warp.cu")
    cpu = save(course)
    monkeypatch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "--use_fast_math"))
    assert Stored(path).changed() == [results.CUDA_FLAGS] and Stored(cpu).changed() == []
    assert Stored(path).mark_stale() == [results.CUDA_FLAGS]
    assert [f.stale for f in Stored(path).ladders[0].figures] == [True, False]  # a peer has no source of ours
    monkeypatch.setattr(results, "BASE_FLAGS", ("-O0",))
    assert Stored(path).changed() == [] and Stored(cpu).changed() == [results.C_FLAGS]


def test_ladders_are_found_by_the_start_of_their_title(course):
    item = Stored(save(course))
    assert item.ladder("GEMV 5").title == "GEMV 5 × 6"
    with pytest.raises(KeyError, match=r"kernels/toy/measured/.*no ladder 'matmul'; there are .*GEMV 3 × 4"):
        item.ladder("matmul")


def test_a_source_that_is_not_there_is_not_stored(course):
    (course / "kernels/toy/vec.h").unlink()
    with pytest.raises(FileNotFoundError, match=r"vec\.h"):
        save(course)
    assert not list(course.rglob("*.json"))


def test_measuring_again_replaces_the_file(course):
    path = save(course)
    (course / "kernels/toy/naive.c").write_text("int changed;\n")
    assert Stored(path).mark_stale()
    assert save(course) == path and Stored(path).changed() == Stored(path).stale == []


@pytest.mark.parametrize("fails", ["replace", "write_text"])
def test_an_interrupted_write_leaves_the_old_file_whole(course, monkeypatch, fails):
    path = save(course)
    before = path.read_bytes()

    def half_written(self, text, *args, **kwargs):
        with open(self, "w") as file:
            file.write(text[:50])
        raise KeyboardInterrupt

    def interrupted(*_):
        raise KeyboardInterrupt

    if fails == "replace":
        monkeypatch.setattr(results.os, "replace", interrupted)
    else:
        monkeypatch.setattr(results.Path, "write_text", half_written)
    with pytest.raises(KeyboardInterrupt):
        save(course, Roof(**(vars(ROOF) | {"read": 1.0})))
    assert path.read_bytes() == before and leftovers(course) == []


def test_a_folder_that_cannot_be_written(course):
    (course / "kernels/toy/measured").write_text("a file stands where the folder should")
    with pytest.raises(OSError, match="measured"):
        save(course)
    assert leftovers(course) == [] and (course / "kernels/toy/measured").read_text().startswith("a file")


def test_a_read_only_folder(course, monkeypatch):
    path = save(course)
    before = path.read_bytes()

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(results.Path, "write_text", refuse)
    with pytest.raises(PermissionError, match="measured"):
        save(course)
    assert path.read_bytes() == before and leftovers(course) == []


# Damaged files


def without(record, *keys):
    *way, last = keys
    for key in way:
        record = record[key]
    del record[last]


def put(value, record, *keys):
    *way, last = keys
    for key in way:
        record = record[key]
    record[last] = value


FIGURE = ("ladders", 0, "figures", 0)
DAMAGE = {
    "other version": (lambda r: put(99, r, "schema"), "has format 99, this course reads format 1"),
    "no version": (lambda r: without(r, "schema"), "has format None"),
    **{
        f"no {key}": (lambda r, key=key: without(r, key), f"is damaged .*{key}")
        for key in ("card", "date", "versions", "roof", "sources", "stale", "ladders")
    },
    "no read roof": (lambda r: without(r, "roof", "read"), "is damaged .*read"),
    "an unknown roof": (lambda r: put(1, r, "roof", "speed"), "is damaged .*speed"),
    "no threads": (lambda r: without(r, "roof", "by_threads"), "is damaged"),
    "threads by name": (lambda r: put({"two": [1, 2, 3]}, r, "roof", "by_threads"), "is damaged .*two"),
    "no timing": (lambda r: without(r, *FIGURE, "timing"), "is damaged .*timing"),
    "no median": (lambda r: without(r, *FIGURE, "timing", "median"), "is damaged .*median"),
    "half a time as called": (lambda r: put({"median": 1.0}, r, *FIGURE, "called"), "is damaged .*p20"),
    "a negative time as called": (
        lambda r: put({"median": -1.0, "p20": 1, "p80": 1, "runs": 1}, r, *FIGURE, "called"),
        "is damaged .*-1.0 where a positive",
    ),
    "no bytes": (lambda r: without(r, *FIGURE, "bytes"), "is damaged .*bytes"),
    "no sources of a figure": (lambda r: without(r, *FIGURE, "sources"), "is damaged .*sources"),
    "no bound": (lambda r: without(r, "ladders", 0, "bound"), "is damaged .*bound"),
    "an unknown bound": (lambda r: put("copy", r, "ladders", 0, "bound"), "is damaged .*bound"),
    "ladders that are none": (lambda r: put([1], r, "ladders"), "is damaged"),
    "sources that are none": (lambda r: put(7, r, "sources"), "is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_clear_error(course, kind):
    harm, said = DAMAGE[kind]
    path = save(course)
    record = json.loads(path.read_text())
    harm(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ResultsError, match=said) as caught:
        Stored(path)
    message = str(caught.value)
    assert message.startswith("kernels/toy/measured/amd_epyc_2_threads.json ")
    assert "measure again with `make bench`" in message and str(course) not in message


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"x"', b"\xff\xfe\x00", "truncated"])
def test_what_is_no_results_file_is_one_clear_error(course, text):
    path = save(course)
    if text == "truncated":
        text = path.read_text()[:-40]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ResultsError, match=r"^kernels/toy/measured/\S+ .*`make bench`"):
        Stored(path)


def test_a_file_that_cannot_be_opened_names_no_machine_path(course):
    path = save(course)
    path.unlink()
    path.mkdir()
    with pytest.raises(ResultsError, match="^kernels/toy/measured/.* cannot be read") as caught:
        Stored(path)
    assert str(course) not in str(caught.value)


def test_stored_passes_over_a_damaged_file_with_a_notice(course, capsys):
    path = save(course)
    other = results.save(course / "kernels/toy", ladders(), Roof("other", 1.0, 1.0, 1.0), VERSIONS)
    other.write_text("{")
    (found,) = results.stored("toy")
    assert found.path == path
    said = capsys.readouterr().out
    assert said.startswith("notice: kernels/toy/measured/other.json cannot be read") and said.count("\n") == 1
    assert results.stored("no_such_topic") == []


def test_stored_results_come_newest_first(course):
    for card, date in {"a": "2026-01-02", "b": "2026-03-01", "c": "2025-12-31"}.items():
        path = save(course, Roof(card, 1.0, 1.0, 1.0))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"date": date}))
    assert [item.card for item in results.stored("toy")] == ["b", "a", "c"]
    results.save(course / "lab", [], ROOF, {})
    assert [item.card for item in results.stored("roof")] == [ROOF.card]
    assert len(results.paths()) == 4


# What a notebook shows of them


@pytest.fixture
def run(course):
    save(course)
    return results.stored_on("toy", card=ROOF.card)


def test_the_newest_run_on_a_card(course):
    save(course, Roof("NVIDIA H200", 4e12, 4e12, 7e14))
    for name, date in {"a": "2026-03-01", "b": "2026-04-01"}.items():
        path = save(course, Roof(name, 1.0, 1.0, 1.0))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"date": date}))
    assert [results.stored_on("toy").card, results.stored_on("toy", card="a").date] == ["NVIDIA H200", "2026-03-01"]
    assert results.stored_on("toy", card="c") is results.stored_on("toy", "ncu") is results.stored_on("none") is None


def test_a_ladder_has_the_whole_title(run):
    assert results.ladder(run, "GEMV 5 × 6").figures == run.ladders[1].figures
    assert results.ladder(run, "GEMV 5") is results.ladder(None, "GEMV 5 × 6") is None


@pytest.mark.parametrize(
    "names, shown",
    [((), ["naive", "fast", "NumPy"]), (("NumPy", "na"), ["naive", "NumPy"]), (("fast", "none"), ["fast"])],
)
def test_rows_are_found_by_name_or_by_its_beginning(run, names, shown, capsys):
    found, whole = results.measured(run, "GEMV 3 × 4", *names), run.ladders[0]
    assert [f.name for f in found.figures] == shown and found.source == whole.source == run.source
    assert (found.title, found.bound, found.device) == (whole.title, whole.bound, whole.device)
    assert found.rows()[0][-1] == "1×" and capsys.readouterr().out == ""
    assert len(whole.figures) == 3 and whole.first is None


def test_a_whole_name_is_no_beginning(course):
    path = save(course)
    record = json.loads(path.read_text())
    record["ladders"][0]["figures"][1]["name"] = "naive, PDL"
    path.write_text(json.dumps(record))
    run = Stored(path)
    assert [f.name for f in results.measured(run, "GEMV 3 × 4", "naive").figures] == ["naive"]
    assert [f.name for f in results.measured(run, "GEMV 3 × 4", "naive,").figures] == ["naive, PDL"]


def test_the_speedup_may_be_over_a_row_that_is_not_shown(course):
    path = save(course)
    record = json.loads(path.read_text())
    record["ladders"][0]["figures"][0]["timing"]["median"] = 0.5
    path.write_text(json.dumps(record))
    assert results.measured(Stored(path), "GEMV 3 × 4", "fast", first="naive").rows()[0][-1] == "2×"
    with pytest.raises(KeyError, match=r"GEMV 3 × 4: no rung 'slow'; there are naive, fast, NumPy"):
        results.measured(Stored(path), "GEMV 3 × 4", "fast", first="slow")


@pytest.mark.parametrize("title, names", [("GEMV 3", ()), ("matmul", ()), ("GEMV 3 × 4", ("slow",))])
def test_where_nothing_is_stored_a_sentence_says_so(run, title, names, capsys):
    for one in (run, None):
        assert results.measured(one, title, *names) is None
        assert capsys.readouterr().out == results.NOTHING + "\n"


def test_a_table_or_a_sentence(course, capsys):
    found = Table("errors", {"ours": {"1K": 0.5}}, ("kernels/toy/naive.c",))
    run = Stored(results.save(course / "kernels" / "toy", [], ROOF, VERSIONS, tables=[found]))
    assert results.table(run, "errors").rows == found.rows and capsys.readouterr().out == ""
    for one, title in ((run, "shares"), (None, "errors")):
        assert results.table(one, title) is None and capsys.readouterr().out == results.NOTHING + "\n"


# What the hash sees

PYTHON = '''"""Module docstring # with a hash."""

import os  # a comment


class Rung(object):
    """Docstring
    over lines."""

    name = "# no comment"  # but this is one


def f(x):
    # only a comment
    "a docstring"

    def nested(y):
        """Nested µ docstring."""
        return f"{y} # {y!r:>{x}}"

    text = """
# part of the string
"""
    return nested(x), text, '// "', b"#", r"\\#"


async def g(): "docstring µ"; return 1  # noqa
'''
BARE_PYTHON = """import os
class Rung(object):
    name = "# no comment"
def f(x):
    def nested(y):
        return f"{y} # {y!r:>{x}}"
    text = \"\"\"
# part of the string
\"\"\"
    return nested(x), text, '// "', b"#", r"\\#"
async def g(): ; return 1"""
C = r"""/* What this is.
   // and more */
#include <stdint.h>   // for int64_t

static const char *text = "/* no // comment \" */"; /* but this is */
char quote = '"', other = '\'';  // "not a string

int f(int n /* count */, int m) {
    // only a comment
    return n / m; /* a
    comment */
}
"""
BARE_C = r"""#include <stdint.h>
static const char *text = "/* no // comment \" */";
char quote = '"', other = '\'';
int f(int n , int m) {
return n / m;
}"""


def hash_of(tmp_path, text, name):
    (tmp_path / name).write_text(text)
    return code_hash(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "bare", "name"), [(PYTHON, BARE_PYTHON, "a.py"), (C, BARE_C, "a.c"), (C, BARE_C, "a.cu")]
)
def test_what_is_hashed(tmp_path, text, bare, name):
    """The text itself is spelled out here, so that the same hash comes out under every Python."""
    assert hash_of(tmp_path, text, name) == hashlib.sha256(bare.encode()).hexdigest()


@pytest.mark.parametrize(
    ("name", "text", "edits"),
    [
        (
            "a.py",
            PYTHON,
            [
                ("# a comment", ""),
                ("# only a comment", "# another"),
                ("Module docstring # with a hash.", "Other\n\nwords"),
                ('"""Docstring\n    over lines."""', '"one line"'),
                ('    "a docstring"\n', ""),
                ("Nested µ docstring.", "#"),
                ('"docstring µ"', "'''docstring'''"),
                ("\n\n\nclass", "\n\n# here\n\n\n\nclass"),
                ("import os  #", "import os#"),
            ],
        ),
        (
            "a.c",
            C,
            [
                ("// and more", "/ and less"),
                ("   // for int64_t", ""),
                (" /* but this is */", ""),
                ("/* count */", "/* how many, // at most */"),
                (" /* count */", "  "),
                ("    // only a comment\n", "\n\n"),
                ("/* a\n    comment */", "// a comment"),
                ('// "not a string', ""),
                ("\n\nint f", "\n/* f\n\n */\n\nint f"),
                ("    return", "\treturn"),
            ],
        ),
    ],
)
def test_comments_docstrings_and_blank_lines_are_free(tmp_path, name, text, edits):
    measured = hash_of(tmp_path, text, name)
    for old, new in edits:
        assert text.count(old) == 1, old
        assert hash_of(tmp_path, text.replace(old, new), name) == measured, old


@pytest.mark.parametrize(
    ("name", "text", "edits"),
    [
        (
            "a.py",
            PYTHON,
            [
                ("import os", "import sys"),
                ('"# no comment"', '"# a comment"'),
                ("# part of the string", "# changed"),
                ('f"{y} # {y!r', 'f"{y} # {x!r'),
                ('f"{y} # {', 'f"{y} // {'),
                ("    return nested", "    if x: return nested"),
                ("        return f", "        return 'x' + f"),
                ("class Rung(object)", "class Rang(object)"),
                ("async def g()", "async def h()"),
                ("; return 1", "; return 2"),
                ('b"#"', 'b"##"'),
                ("'// \"'", "'// '"),
            ],
        ),
        (
            "a.c",
            C,
            [
                ("return n / m", "return n * m"),
                ("no // comment", "no // remark"),
                ('\\" */"', '\\" "'),
                ("<stdint.h>", "<stddef.h>"),
                ("#include", "// #include"),
                ("other = '\\''", "other = '/'"),
                ("int m)", "int k)"),
                ("return n", "returnn"),
            ],
        ),
    ],
)
def test_code_is_seen(tmp_path, name, text, edits):
    measured = hash_of(tmp_path, text, name)
    for old, new in edits:
        assert text.count(old) == 1, old
        assert hash_of(tmp_path, text.replace(old, new), name) != measured, old


def test_a_string_that_is_no_docstring_is_code(tmp_path):
    assert hash_of(tmp_path, 'x = 1\n"a"\n', "a.py") != hash_of(tmp_path, 'x = 1\n"b"\n', "a.py")
    one, two = (f'SOURCE = """\nint f() {{ return {n}; }}  # {n}\n"""\n' for n in (1, 2))
    assert hash_of(tmp_path, one, "a.py") != hash_of(tmp_path, two, "a.py")


def test_odd_line_ends_do_not_shift_what_is_cut(tmp_path):
    one, two = (f'x = "\x0c\u2028"\n\n\ndef f():\n    """doc {n}"""\n    return {n}  # {n}\n' for n in (1, 2))
    assert hash_of(tmp_path, one, "a.py") != hash_of(tmp_path, two, "a.py")
    assert hash_of(tmp_path, one, "a.py") == hash_of(tmp_path, one.replace("doc 1", "words").replace("# 1", ""), "a.py")
    assert hash_of(tmp_path, C.replace("\n", "\r\n"), "a.c") == hash_of(tmp_path, C, "a.c")


# Changed and stale


def test_a_change_of_code_is_noticed_until_it_is_marked(course):
    item = Stored(save(course))
    naive = course / "kernels/toy/naive.c"
    naive.write_text("/* words only */\n\n" + NAIVE)
    assert item.changed() == []
    naive.write_text(NAIVE.replace("n++", "n--"))
    (course / "kernels/toy/vec.h").unlink()
    assert sorted(item.changed()) == ["kernels/toy/naive.c", "kernels/toy/vec.h"]
    assert not any(f.stale for x in Stored(item.path).ladders for f in x.figures)

    assert sorted(item.mark_stale()) == ["kernels/toy/naive.c", "kernels/toy/vec.h"]
    item = Stored(item.path)
    assert item.changed() == [] and item.stale == ["kernels/toy/naive.c", "kernels/toy/vec.h"]
    assert [f.stale for f in item.ladders[0].figures] == [True, True, False]
    assert [f.stale for f in item.ladders[1].figures] == [False]
    assert str(item.ladders[0]).count("stale") >= 2

    before = item.path.read_bytes()
    assert item.mark_stale() == [] and item.path.read_bytes() == before
    (course / "kernels/toy/py.py").write_text("x = 2\n")
    assert item.mark_stale() == ["kernels/toy/py.py"] and len(Stored(item.path).stale) == 3


def test_the_command(course, capsys):
    path = save(course)
    assert results.main([]) == 0
    assert re.fullmatch(r"kernels/toy/measured/\S+ \(\d{4}-\d\d-\d\d\): up to date\n", capsys.readouterr().out)
    (course / "kernels/toy/fast.c").write_text("int other;\n")
    assert results.main([]) == 0 and Stored(path).stale == []
    assert "changed since: kernels/toy/fast.c" in capsys.readouterr().out
    assert results.main(["stale"]) == 0 and Stored(path).stale == ["kernels/toy/fast.c"]
    assert "marked stale: kernels/toy/fast.c" in capsys.readouterr().out
    assert results.main([]) == 0
    assert "up to date; stale: kernels/toy/fast.c" in capsys.readouterr().out
    for wrong in (
        ["fresh"],
        ["moved"],
        ["same", "kernels/toy/fast.c"],
        ["moved", "kernels/toy/fast.c"],
        ["stale", "moved", "a"],
    ):
        assert results.main(wrong) == 2
        assert capsys.readouterr().out == results.USAGE + "\n"
    path.write_text("{")
    assert results.main([]) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_a_source_that_moved_keeps_its_figures(course, capsys):
    path = save(course)
    (course / "kernels/toy/fast.c").rename(course / "kernels/toy/faster.c")
    move = ["moved", "kernels/toy/fast.c", "kernels/toy/faster.c"]
    assert results.main(move) == 0
    assert capsys.readouterr().out == "kernels/toy/faster.c stands for kernels/toy/fast.c in 1 file\n"
    item = Stored(path)
    assert item.changed() == [] and item.ladder("GEMV 3").figures[1].sources == (
        "kernels/toy/faster.c",
        "kernels/toy/vec.h",
    )
    assert results.main(move) == 1 and "in 0 files" in capsys.readouterr().out
    before = path.read_bytes()
    assert results.main(["moved", "kernels/toy/naive.c", "kernels/toy/faster.c"]) == 1 and path.read_bytes() == before
    assert "kernels/toy/faster.c is not the code that" in capsys.readouterr().out


def test_a_source_does_not_move_to_one_that_was_measured_with_other_code(course, capsys):
    """Else figures of the other would count as measured on code that they have never seen."""
    before = (path := save(course)).read_bytes()
    (course / "kernels/toy/naive.c").write_text((course / "kernels/toy/fast.c").read_text())
    assert results.main(["moved", "kernels/toy/fast.c", "kernels/toy/naive.c"]) == 1 and path.read_bytes() == before
    assert "kernels/toy/naive.c is not the code that" in capsys.readouterr().out


def test_other_code_with_the_same_machine_code_keeps_its_figures(course, capsys):
    path = save(course)
    before, measured = path.read_bytes(), Stored(path).sources["kernels/toy/fast.c"]
    same = ["same", "kernels/toy/fast.c", "the compiler makes the same of both"]
    assert results.main(same) == 1 and path.read_bytes() == before  # nothing has changed
    assert capsys.readouterr().out == "kernels/toy/fast.c keeps its figures in 0 files\n"
    (course / "kernels/toy/more.h").write_text("typedef int more;\n")
    (course / "kernels/toy/fast.c").write_text('#include "more.h"\n' + FAST)
    (course / "kernels/toy/naive.c").write_text("int other;\n")
    assert results.main(["same", "kernels/toy/fast.c", " "]) == 2 and path.read_bytes() == before
    assert results.main(["same", "kernels/toy/vec.h", "why"]) == 1 and path.read_bytes() == before
    capsys.readouterr()
    assert results.main(same) == 0
    assert capsys.readouterr().out == "kernels/toy/fast.c keeps its figures in 1 file\n"
    item = Stored(path)
    assert item.changed() == ["kernels/toy/naive.c"], "what nobody has named stays to be measured"
    (kept,) = item.record["same"]
    assert kept["source"] == "kernels/toy/fast.c" and kept["why"] == same[2]
    assert kept["measured"] == measured != kept["now"] == item.sources["kernels/toy/fast.c"]
    assert "kernels/toy/more.h" in item.ladder("GEMV 3").figures[1].sources
    (course / "kernels/toy/more.h").write_text("typedef long more;\n")
    assert item.changed() == ["kernels/toy/more.h", "kernels/toy/naive.c"]
    (course / "kernels/toy/fast.c").unlink()
    before = path.read_bytes()
    assert results.main(same) == 1 and path.read_bytes() == before


def test_a_figure_rests_on_what_its_sources_include(course):
    (course / "kernels/toy/fast.c").write_text('#include "vec.h"\n' + FAST)
    (course / "kernels/toy/naive.c").write_text('#include "vec.h"\n' + NAIVE)
    item = Stored(save(course))
    assert item.ladder("GEMV 3").figures[0].sources == ("kernels/toy/naive.c", "kernels/toy/vec.h")
    (course / "kernels/toy/vec.h").write_text("typedef long vec;\n")
    assert item.changed() == ["kernels/toy/vec.h"]


def test_the_command_runs():
    done = subprocess.run(
        [sys.executable, "-m", "lab.results", "what"], cwd=results.ROOT, capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stderr) == (2, "") and "usage" in done.stdout


# The course's own stored results


def out_of_date(path):
    """What is wrong between a stored file and the sources it names, as sentences."""
    item, name = Stored(path), path.relative_to(results.ROOT).as_posix()
    problems = [
        f"{source} is not the code that {name} was measured on: run `make bench`, or mark its figures with "
        "`python -m lab.results stale`"
        for source in item.changed()
    ]
    named = {source for x in item.ladders for f in x.figures for source in f.sources}
    problems += [f"{name}: {s} has no hash" for s in sorted(named - set(item.sources))]
    return problems + [f"{name}: {s} is not there" for s in item.sources if results._hash_now(s) is None]


def test_stored_figures_were_measured_on_the_code_as_it_stands():
    assert [problem for path in results.paths() for problem in out_of_date(path)] == []


def test_that_test_can_fail(course):
    path = save(course)
    assert out_of_date(path) == []
    (course / "kernels/toy/naive.c").write_text("int other;\n")
    (problem,) = out_of_date(path)
    assert "kernels/toy/naive.c" in problem and "`make bench`" in problem and "python -m lab.results stale" in problem
    Stored(path).mark_stale()
    assert out_of_date(path) == []
    (course / "kernels/toy/naive.c").unlink()
    assert out_of_date(path) == ["kernels/toy/measured/amd_epyc_2_threads.json: kernels/toy/naive.c is not there"]
    record = json.loads(path.read_text())
    del record["sources"]["kernels/toy/fast.c"]
    path.write_text(json.dumps(record))
    assert any("kernels/toy/fast.c has no hash" in problem for problem in out_of_date(path))


# Parts


def test_what_is_not_measured_again_stays_with_its_date(course, capsys):
    path = save(course)
    record = json.loads(path.read_text()) | {"date": "2020-01-02"}
    record["tables"] = [{"title": "t", "rows": {"a": {"b": 1}}, "sources": ["kernels/toy/py.py"]}]
    path.write_text(json.dumps(record))
    new = [Ladder("GEMV 3 × 4", "read", ladders()[0].figures[:1])]
    results.save(course / "kernels" / "toy", new, ROOF, VERSIONS, keep=True)
    item = Stored(path)
    assert [(len(x.figures), "2020-01-02" in x.source) for x in item.ladders] == [(1, False), (1, True)]
    assert "2020-01-02" in item.table("t").source and "2020-01-02" not in item.date and not item.changed()
    assert (
        set(item.sources) >= {"kernels/toy/naive.c", "kernels/toy/py.py"} and "kernels/toy/fast.c" not in item.sources
    )
    results.save(course / "kernels" / "toy", new, ROOF, VERSIONS, keep=True)  # and once more: the date is still its own
    assert "2020-01-02" in Stored(path).table("t").source
    (course / "kernels" / "toy" / "py.py").write_text("x = 2\n")
    results.save(course / "kernels" / "toy", new, ROOF, VERSIONS, keep=True)
    assert "GEMV 5 × 6 is kept as stale: kernels/toy/py.py changed" in capsys.readouterr().out
    for _ in range(2):  # and once more: what is stale stays so
        item = Stored(path)
        assert [[f.stale for f in x.figures] for x in item.ladders] == [[False], [True]] and item.table("t").stale
        assert "2020-01-02" in item.ladders[1].source and item.changed() == item.stale == []
        assert item.current() == {"GEMV 3 × 4"}
        results.save(course / "kernels" / "toy", new, ROOF, VERSIONS, keep=True)
    (course / "kernels" / "toy" / "py.py").unlink()
    results.save(course / "kernels" / "toy", new, ROOF, VERSIONS, keep=True)
    assert Stored(path).ladders[1].figures[0].stale and "kernels/toy/py.py" not in Stored(path).sources
    results.save(course / "kernels" / "toy", ladders()[:1], ROOF, VERSIONS, keep=True)
    assert [x.title for x in Stored(path).ladders] == ["GEMV 3 × 4", "GEMV 5 × 6"]


def test_of_a_ladder_that_is_kept_only_the_rows_with_changed_code_are_stale(course):
    path = save(course)
    (course / "kernels/toy/fast.c").write_text("int changed;")
    results.save(course / "kernels" / "toy", ladders()[1:], ROOF, VERSIONS, keep=True)
    first, second = Stored(path).ladders
    assert [f.stale for f in first.figures] == [False, True, False] and not second.figures[0].stale
    assert Stored(path).current() == {second.title}


def test_sustained_times_are_stored(course):
    first, *rest = ladders()[0].figures
    sustained = replace(first, sustained=Timing(0.5, 0.4, 0.6, 3), called=Timing(0.2, 0.1, 0.3, 3))
    path = results.save(course / "kernels" / "toy", [Ladder("L", "read", [sustained, *rest])], ROOF, VERSIONS)
    figures = Stored(path).ladder("L").figures
    assert figures[0] == sustained and figures[0].fastest.median == 0.2 and figures[1].fastest.median == 0.25
    assert Stored(path).ladder("L").best_peer().name == "NumPy"
