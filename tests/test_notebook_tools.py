"""lab/notebooks.py: the canonical form, what it refuses, and the way from a solution to its exercise."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from lab import notebooks
from lab.notebooks import NotebookError, canonical, strip, strip_source

# Taken apart, so that a search for paths of some machine does not find this file.
HOME, TMP, MAC, WINDOWS = (
    "/" + "home/ada/x.py",
    "/" + "tmp/x.so",
    "/" + "Users/ada/x",
    "C:" + r"\Users\ada\x.py",
)


def code(source, *outputs, count=1, id="c1", **metadata):
    cell = v4.new_code_cell(source, id=id, execution_count=count, outputs=list(outputs))
    cell.metadata.update(metadata)
    return cell


def said(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


def shown(**data):
    return v4.new_output("display_data", data={k.replace("__", "/"): v for k, v in data.items()})


def notebook(*cells):
    """Not v4.new_notebook, which mends what some tests here break."""
    return nbformat.from_dict({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.fixture
def house(tmp_path, monkeypatch):
    """An empty course, with the tool pointed at it."""
    for folder in notebooks.FOLDERS:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tmp_path


# The canonical form


def test_canonical_is_stable_and_leaves_its_argument_alone():
    nb = notebook(code("1", said("a"), said("b")))
    before = copy.deepcopy(nb)
    once = canonical(nb)
    assert nb == before
    assert notebooks.text_of(canonical(once)) == notebooks.text_of(once)
    assert notebooks.text_of(once).endswith("}\n")


def test_canonical_keeps_ids_counts_and_tags_and_drops_the_rest():
    cell = code("1", count=7, id="mine", tags=["t"], execution={"x": "2026"}, scrolled=True, ExecuteTime={})
    nb = notebook(cell)
    nb.metadata = {
        "widgets": {"state": 1},
        "kernelspec": {"name": "conda-x", "display_name": "Mine"},
        "toc": 1,
    }
    got = canonical(nb)
    assert (got.cells[0].id, got.cells[0].execution_count) == ("mine", 7)
    assert got.cells[0].metadata == {"tags": ["t"]}
    assert got.metadata == notebooks.KERNEL
    assert (got.nbformat, got.nbformat_minor) == (4, 5)


def test_canonical_gives_missing_ids_that_do_not_change():
    def without():
        nb = notebook(code("1"), code("1"))
        for cell in nb.cells:
            del cell["id"]
        return [cell.id for cell in canonical(nb).cells]

    assert without() == without()
    assert len(set(without())) == 2


def test_canonical_joins_streams_across_a_dropped_widget():
    widget = shown(**{notebooks.WIDGET: {"model_id": "1"}, "text__plain": "IntSlider(value=0)"})
    got = canonical(notebook(code("1", said("a\n"), widget, said("b\n"), said("c\n", "stderr"), said("d\n"))))
    assert [(o.name, o.text) for o in got.cells[0].outputs] == [
        ("stdout", "a\nb\n"),
        ("stderr", "c\n"),
        ("stdout", "d\n"),
    ]


@pytest.mark.parametrize(
    "raw, kept",
    [("1%\r2%\r100%\ndone\n", "100%\ndone\n"), ("a\r\nb\n", "a\nb\n"), ("1%\r", "1%\r"), ("", "")],
)
def test_progress_lines_keep_what_a_terminal_would_show(raw, kept):
    assert notebooks.as_on_a_terminal(raw) == kept


@pytest.mark.parametrize(
    "output",
    [
        said(f"see {HOME}"),
        said(f"file://{HOME}"),
        said(f"\x1b[32m{TMP}\x1b[0m"),
        said(f"({MAC})"),
        said(WINDOWS),
        said("/" + "root/.cache/x", "stderr"),
        shown(text__html=f"<a href='{HOME}'>x</a>"),
        shown(**{"image/svg+xml": f"<svg><!-- {TMP} --></svg>"}),
        shown(**{"application/json": {"deep": [{"er": TMP}]}}),
    ],
)
def test_a_machine_path_in_an_output_is_refused_and_the_cell_named(output):
    with pytest.raises(NotebookError, match=r"book, cell 2 \(id here\).*path of this machine"):
        canonical(notebook(code("1"), code("2", output, id="here")), "book")


def test_the_path_of_the_checkout_is_refused_wherever_it_lies(monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", Path("/srv/my course"))
    canonical(notebook(code("1", said("/srv/your course/lab"))))
    with pytest.raises(NotebookError, match="path of this machine"):
        canonical(notebook(code("1", said("in /srv/my course/lab"))))


@pytest.mark.parametrize(
    "output",
    [
        said("https://example.org/home/page and ./tmp/x and ~/tmp/y and a/tmp/z and 3 /tmp"),
        said(r"$f: \mathbb{R} \to \mathbb{R}$"),
        shown(image__png="iVBOR+/tmp/w0KG=\n"),
        shown(text__html="<img src='data:image/png;base64,iVBOR+/tmp/w0KG=='>"),
    ],
)
def test_what_only_looks_like_a_machine_path_is_let_through(output):
    canonical(notebook(code("1", output)))


def test_errors_double_ids_and_outputs_of_an_unrun_cell_are_refused():
    error = v4.new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
    with pytest.raises(NotebookError, match="cell 1 .*ZeroDivisionError"):
        canonical(notebook(code("1/0", error)))
    with pytest.raises(NotebookError, match="cell 2 .*same id"):
        canonical(notebook(code("1"), code("2")))
    with pytest.raises(NotebookError, match="cell 1 .*no execution count"):
        canonical(notebook(code("1", said("x"), count=None)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '{"nbformat": 3, "worksheets": []}',
        '{"nbformat": 4}',
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}',
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}',
        "\udcff",
    ],
)
def test_a_damaged_file_is_one_clear_error(house, text):
    path = house / "notebooks" / "01_a.ipynb"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(NotebookError, match=r"^notebooks/01_a\.ipynb: [^\n]*$"):
        notebooks.read(path)
    assert len(notebooks.problems(path)) == 1
    assert path.read_bytes() == text.encode(errors="surrogateescape")


def test_writing_is_whole_or_not_at_all(house, monkeypatch):
    path = house / "notebooks" / "01_a.ipynb"
    notebooks.write(canonical(notebook(code("1"))), path)
    before = path.read_bytes()
    monkeypatch.setattr(notebooks.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError):
        notebooks.write(canonical(notebook(code("2"))), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["01_a.ipynb"]


# From a solution to its exercise


def test_a_python_region_becomes_a_stub():
    region = "    ### BEGIN SOLUTION about 2 lines\n    y = x\n    return y\n    ### END SOLUTION"
    source = "def f(x):\n    a = 1\n" + region
    assert strip_source(source) == (
        'def f(x):\n    a = 1\n    # your code here: about 2 lines\n    raise NotImplementedError("not done yet")'
    )


def test_without_a_hint_only_the_stub_stands_and_what_follows_is_kept():
    source = "### BEGIN SOLUTION\nx = 1\n### END SOLUTION\nprint(x)"
    assert strip_source(source) == 'raise NotImplementedError("not done yet")\nprint(x)'


def test_a_c_region_becomes_a_compile_error():
    source = (
        'SOURCE = """\nvoid f(float *x) {\n'
        "    // ### BEGIN SOLUTION about 1 line\n    x[0] = 1;\n    // ### END SOLUTION\n"
        '}\n"""'
    )
    assert strip_source(source) == (
        'SOURCE = """\nvoid f(float *x) {\n    // your code here: about 1 line\n    #error "not done yet"\n}\n"""'
    )


@pytest.mark.parametrize("c", ["", "// "])
def test_stub_lines_are_handed_over_in_place_of_the_default(c):
    source = "\n".join(
        [
            f"  {c}### BEGIN SOLUTION",
            f"  {c}### STUB for i in n:",
            f"  {c}### STUB     bug",
            f"  {c}### STUB",
            "  right",
            f"  {c}### END SOLUTION",
        ]
    )
    assert strip_source(source) == "  for i in n:\n      bug\n"


def test_two_regions_of_one_cell_do_not_share_their_stubs():
    region = "### BEGIN SOLUTION\n{}x = 1\n### END SOLUTION\n"
    got = strip_source(region.format("### STUB x = 2\n") + region.format(""))
    assert got == 'x = 2\nraise NotImplementedError("not done yet")\n'


def test_source_without_markers_is_left_as_it_is():
    source = "# begin here\r\nx = '### not a marker'  # a stub of a tail \n\n\n"
    assert strip_source(source) == source


@pytest.mark.parametrize(
    "source, problem",
    [
        ("### BEGIN SOLUTION\nx", "without END"),
        ("x\n### END SOLUTION", "outside a region"),
        ("### STUB x", "outside a region"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION\n### END SOLUTION", "inside another"),
        ("### BEGIN SOLUTION\nx\n// ### END SOLUTION", "or none"),
        ("// ### BEGIN SOLUTION\n### STUB x\n// ### END SOLUTION", "or none"),
        ("x = 1  ### BEGIN SOLUTION\n### END SOLUTION", "alone on its line"),
        ("### begin solution\nx\n### end solution", "alone on its line"),
        ("# BEGIN SOLUTION\nx\n# END SOLUTION", "alone on its line"),
        ("###BEGIN SOLUTION\nx\n###END SOLUTION", "alone on its line"),
        ("### BEGIN SOLUTIONS\nx", "alone on its line"),
        ("### BEGIN  SOLUTION\nx", "alone on its line"),
        ("### BEGIN SOLUTION: about 3 lines\nx", "alone on its line"),
        ("### BEGIN-SOLUTION\nx", "alone on its line"),
        ("### BEGIN SOLUTION\n## STUB x\n### END SOLUTION", "alone on its line"),
    ],
)
def test_markers_that_do_not_balance_are_an_error_that_names_the_cell(source, problem):
    with pytest.raises(NotebookError, match=rf"^book, cell 2 \(id bad\): .*{problem}"):
        strip(notebook(code("1"), code(source, id="bad")), "book")


def test_strip_leaves_out_what_is_for_the_solution_only_and_all_outputs():
    nb = notebook(
        v4.new_markdown_cell("say", id="m1"),
        code("1", said(HOME), id="c1"),
        code("secret", id="c2", tags=["solution-only"]),
        v4.new_markdown_cell("secret", id="m2", metadata={"tags": ["solution-only"]}),
    )
    got = strip(nb)
    assert [cell.id for cell in got.cells] == ["m1", "c1"]
    assert got.cells[1].outputs == [] and got.cells[1].execution_count is None
    assert nb.cells[1].outputs  # the solution itself is as it was


def test_a_marker_in_prose_hides_nothing_and_is_an_error():
    prose = v4.new_markdown_cell("### BEGIN SOLUTION\n42\n### END SOLUTION", id="m1")
    with pytest.raises(NotebookError, match=r"cell 1 \(id m1\).*solution-only"):
        strip(notebook(prose))


# The whole way, on a small course


MASTER = "def f():\n    ### BEGIN SOLUTION about 1 line\n    return 42\n    ### END SOLUTION\n"
CHECK = "try:\n    print(f())\nexcept NotImplementedError as e:\n    print(e)"


def master(house):
    path = house / "solutions" / "01_a.ipynb"
    nb = notebook(code(MASTER, count=None), code(CHECK, count=None, id="c2"))
    notebooks.write(canonical(nb), path)
    return path


def test_strip_execute_check(house, capsys):
    path = master(house)
    assert notebooks.main(["strip"]) == 0
    assert notebooks.main(["execute"]) == 0
    assert notebooks.main(["check"]) == 0, capsys.readouterr().out
    texts = [notebooks.read(house / f / path.name).cells[1].outputs[0].text for f in ("solutions", "exercises")]
    assert texts == ["42\n", "not done yet\n"]

    # Stripping again changes nothing, outputs included.
    before = (house / "exercises" / path.name).read_bytes()
    assert notebooks.main(["strip", "01_a"]) == 0
    assert (house / "exercises" / path.name).read_bytes() == before

    # Each of these is noticed.
    for file, old, new, problem in [
        ("exercises", "not done yet", "all done", "differs from"),
        ("solutions", "about 1 line", "about 2 lines", "differs from"),
        ("exercises", '"execution_count": 2', '"execution_count": 5', "not run from top to bottom"),
        ("exercises", '"metadata": {},', '"metadata": {"x": 1},', "canonical"),
        ("solutions", "42", "/" + "home/ada/x", "path of this machine"),
    ]:
        changed = house / file / path.name
        text = changed.read_text()
        assert old in text
        changed.write_text(text.replace(old, new))
        capsys.readouterr()
        assert notebooks.main(["check"]) == 1
        assert problem in capsys.readouterr().out
        changed.write_text(text)
    assert notebooks.main(["check"]) == 0

    path.unlink()
    assert notebooks.main(["check"]) == 1
    assert "there is no solutions/01_a.ipynb" in capsys.readouterr().out


def test_a_run_that_fails_names_the_notebook_and_writes_nothing(house, capsys):
    path = house / "notebooks" / "01_a.ipynb"
    notebooks.write(canonical(notebook(code("print(1)\n1/0", count=None))), path)
    before = path.read_bytes()
    assert notebooks.main(["execute"]) == 1
    out = capsys.readouterr().out
    assert "notebooks/01_a.ipynb: stopped" in out and "ZeroDivisionError" in out
    assert path.read_bytes() == before


def test_a_damaged_exercise_is_written_anew(house):
    path = master(house)
    (house / "exercises" / path.name).write_text("{")
    assert notebooks.main(["strip"]) == 0
    assert json.loads((house / "exercises" / path.name).read_text())["nbformat"] == 4


def test_names_are_found_in_every_folder_and_unknown_ones_refused(house, capsys):
    master(house)
    notebooks.main(["strip"])
    assert [p.parent.name for p in notebooks.find(["01_a"])] == ["solutions", "exercises"]
    assert [p.parent.name for p in notebooks.find(["exercises/01_a.ipynb"])] == ["exercises"]
    assert notebooks.main(["check", "02_b"]) == 1
    assert "found '02_b'; there: 01_a" in capsys.readouterr().out


def test_the_command_line_answers():
    command = [sys.executable, "-m", "lab.notebooks", "check", "no_such_notebook"]
    run = subprocess.run(command, cwd=notebooks.ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "no_such_notebook" in run.stdout and "Traceback" not in run.stderr


# Looks, and Colab


def kept_by_a_sanitiser(shown):
    """What is left of an output's HTML where every style is dropped, and elements beyond text, code and tables too."""
    bleach = pytest.importorskip("bleach")
    tags = {"div", "pre", "code", "b", "i", "table", "caption", "thead", "tbody", "tr", "th", "td", "br", "small"}
    return bleach.clean(shown, tags=tags, attributes={"*": ["align", "nowrap"]}, strip=True)


def test_listings_and_tables_keep_their_look_without_style():
    from lab import show
    from lab.table import html_table

    code = kept_by_a_sanitiser(show("kernels/cpu_gemv/naive.c")._repr_html_())
    assert re.search(r"<pre><code>.*<b>for</b> .*</code></pre>", code, re.S) and "<i>/*" in code and "style" not in code
    table = kept_by_a_sanitiser(html_table("t", ["a", "b"], [["1", "2 µs"]]))
    assert '<thead><tr><th align="left" nowrap' in table and '<tbody><tr><td align="left" nowrap' in table


OLD_CODE = (
    '<div><code>a.c</code><pre style="font-family:x; margin:0"><code style="font:inherit">'
    '<span style="color: #0072B2; font-weight: bold">int</span> a = <span style="color: #D55E00">1</span>; '
    '<span style="color: #7A7A7A; font-style: italic">// &lt;b&gt;</span>\n</code></pre></div>'
)
OLD_LOOK = 'style="text-align:left; white-space:nowrap; padding:2px 5px"'
OLD_TABLE = (
    '<table style="font-size:85%"><caption style="text-align:left"><b>t</b></caption>'
    f"<tr><th {OLD_LOOK}>a</th></tr><tr><td {OLD_LOOK}>1</td></tr></table>"
)


def test_what_was_stored_before_is_dressed_as_it_is_made_now():
    from lab.table import html_table

    assert notebooks.restyled(OLD_TABLE) == html_table("t", ["a"], [["1"]])
    now = notebooks.restyled(OLD_CODE)
    assert re.search(
        r'<pre[^>]*><code[^>]*><b style="color:#0072B2">int</b> a = <span style="color:#D55E00">1</span>; ', now
    )
    assert '<i style="color:#7A7A7A">// &lt;b&gt;</i>' in now and "font" not in now
    for shown in (now, notebooks.restyled(OLD_TABLE), "<p>other</p>"):
        assert notebooks.restyled(shown) == shown


def test_pictures_get_a_text_that_says_what_they_show():
    drawing = code('plots.curves(x, y, "tokens of a text", "ms")', shown(image__png="iVBORw0KGgo="))
    (output,) = notebooks.dressed(canonical(notebook(drawing))).cells[0].outputs
    said = output["metadata"]["image/png"]["alt"]
    assert said.startswith("Curves over one x axis.") and "tokens of a text" in said
    stable = notebooks.dressed(canonical(notebook(drawing)))
    assert notebooks.text_of(canonical(stable)) == notebooks.text_of(stable)


def test_a_badge_comes_and_goes_and_all_stays_canonical(tmp_path):
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "01_roofline.ipynb"
    before = (notebooks.ROOT / "notebooks" / path.name).read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")
    there = notebooks.with_badge(notebooks.read(path), path, "ada/course")
    notebooks.write(canonical(there), path)
    assert notebooks.problems(path) == []
    assert "github/ada/course/blob/main/notebooks/01_roofline.ipynb" in there.cells[1].source
    again = notebooks.with_badge(notebooks.read(path), path, "ada/course")
    assert notebooks.text_of(again) == path.read_text(encoding="utf-8")
    assert notebooks.text_of(notebooks.with_badge(notebooks.read(path), path, "")) == before


def test_the_cell_for_colab_does_nothing_elsewhere_and_fetches_there(monkeypatch):
    there = notebooks.with_badge(notebook(code("1")), "solutions/01_a.ipynb", "ada/course")
    done = []
    monkeypatch.setattr("os.system", done.append)
    monkeypatch.setattr("os.chdir", done.append)
    (fetch,) = [cell.source for cell in there.cells if cell.id == notebooks.FETCH]
    exec(fetch, {})
    assert done == []
    monkeypatch.setitem(sys.modules, "google.colab", object())
    exec(fetch, {})
    assert "git clone -q --depth 1 https://github.com/ada/course /content/course" in done[0]
    assert done[1] == "/content/course/solutions"
    exercise = strip(canonical(there))
    said = "".join(c.source for c in exercise.cells)
    assert "main/exercises/01_a.ipynb" in said and "course/exercises" in said and "solutions" not in said


def test_colab_keeps_its_torch_and_gets_the_compiler_of_version_13():
    from lab import colab

    project = {
        "dependencies": [
            "torch>=2",
            "numpy>=2",
            "nvidia-cuda-nvrtc>=13,<14; sys_platform != 'darwin'",
            "cuda-bindings>=13",
        ],
        "optional-dependencies": {"models": ["lz4"]},
    }
    versions = {"torch": "2.9", "numpy": "2.0", "nvidia-cuda-nvrtc": "12.8.1", "cuda-bindings": "13.0.1", "lz4": "4"}
    assert colab.lacking(project, versions.__getitem__) == ["nvidia-cuda-nvrtc>=13,<14"]
