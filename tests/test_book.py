"""The site's source: every chapter, no solution, links that lead somewhere. Sphinx is not needed; `make site-test`
looks at what it makes of this."""

import ast
import html
import json
import re
from pathlib import Path

import pytest

from book import pages, reference, sliders
from lab import cells
from lab.cells import ROOT

NAMES = pages.chapters()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """All pages but the functions', which have tests of their own; without the sliders' pictures."""
    site = pages.Site(tmp_path_factory.mktemp("site"), "ada/course")
    for name in NAMES:
        site.notebook("notebooks", name)
        site.notebook("exercises", name)
    site.glossary()
    site.readme()
    site.source_pages()
    return site


def text(site, name):
    return (site.source / name).read_text(encoding="utf-8")


def test_the_table_of_contents_has_every_chapter_once_and_exercises_below(site):
    listed = re.findall(r"^notebooks/(\d\d_\w+)$", text(site, "index.md"), re.M)
    assert listed == NAMES and len(NAMES) >= 20
    for name in NAMES:
        assert f"\n../exercises/{name}\n" in text(site, f"notebooks/{name}.md")
    with pytest.raises(pages.PageError, match="expected each chapter in a part .* and found 99_new in none"):
        pages.parts(["01_roofline", "99_new"])


def test_no_page_has_an_answer(site):
    written = "\n".join(" ".join(path.read_text(encoding="utf-8").split()) for path in site.source.rglob("*.md"))
    solution = re.compile(r"### BEGIN SOLUTION[^\n]*\n(.*?)\n[^\n]*### END SOLUTION", re.S)
    answers = []
    for path in sorted((ROOT / "solutions").glob("*.ipynb")):
        for cell in cells.read(path):
            answers += [" ".join(answer.split()) for answer in solution.findall(cell["source"])]
    long = [answer for answer in answers if len(answer) > 120]
    assert len(long) > 30 and [answer for answer in long if answer in written] == []
    assert not (site.source / "solutions").exists()
    with pytest.raises(pages.PageError, match="expected a page in notebooks or exercises"):
        site.notebook("solutions", NAMES[0])


def test_statements_and_hints_are_there(site):
    said = text(site, "exercises/04_warp_gemv.md")
    assert "## Exercise 1: the largest of 32" in said and "<details><summary>Hint 1</summary>" in said


def test_every_page_that_is_linked_is_written(site):
    for path in site.source.rglob("*.md"):
        for target in re.findall(r"\]\(((?:\.\./)*[^:)\s]+\.md)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8")):
            there = (path.parent / target).resolve()
            assert there.is_file() or "reference/" in target, (path.name, target)


def test_every_picture_is_a_file_with_a_text(site):
    found = 0
    for path in site.source.rglob("*.md"):
        for source, alt in re.findall(r'<img [^>]*src="([^"]+)"[^>]* alt="([^"]*)"', path.read_text(encoding="utf-8")):
            found += 1
            assert len(alt) > 20, (path.name, source)
            assert (site.extra / source.replace("../", "")).is_file(), (path.name, source)
    assert found > 140


def test_links_of_all_kinds():
    site = pages.Site("unused")
    said = site.links(
        "[a](02_cpu_matmul.ipynb) [b](glossary.md#roofline) [c](../solutions/01_roofline.ipynb) [d](https://e.org) "
        "[`f`](../kernels/gemv/ring.cu) [g](../kernels/ssd/by_hand) `[h](i)` [k $x[1](2)$](03_first_cuda_kernel.ipynb)",
        "notebooks/01_roofline.ipynb",
    )
    assert "[a](../notebooks/02_cpu_matmul.md)" in said and "[d](https://e.org)" in said and "`[h](i)`" in said
    assert '<a class="term" href="../notebooks/glossary.html#roofline" title="roof' in said
    assert "c (in the course’s folder)" in said and "g (in the course’s folder)" in said and "solutions" not in said
    assert "[`f`](../sources/kernels/gemv/ring.cu.md)" in said and site.linked == {"kernels/gemv/ring.cu"}
    assert "[k $x[1](2)$](../notebooks/03_first_cuda_kernel.md)" in said
    for dead in ("[a](nowhere.md)", "[a](glossary.md#nothing)"):
        with pytest.raises(pages.PageError, match="notebooks/01_roofline.ipynb: expected"):
            site.links(dead, "notebooks/01_roofline.ipynb")


def test_a_slider_that_moves_here_is_not_said_to_stand_still(site, tmp_path):
    sentence = "The slider needs a running notebook."
    assert sentence in text(site, "notebooks/08_flash_decoding.md")
    moving = pages.Site(tmp_path)
    moving.sliders["08_flash_decoding", "online-widget"] = "<div>here</div>"
    moving.notebook("notebooks", "08_flash_decoding")
    said = text(moving, "notebooks/08_flash_decoding.md")
    assert sentence not in said and "<div>here</div>\n\nAs a still picture" in said


def test_fences_are_longer_than_what_they_hold():
    assert pages.fenced("a ```` b", "text", "output").startswith("`````{code-block} text\n:class: output\n")


def test_tables_lose_their_looks_and_keep_their_cells():
    from lab.table import html_table

    made = pages.table(html_table("a < b", ["", "time"], [["one", "2 µs"]]))
    assert "style" not in made and "nowrap" not in made
    assert '<thead><tr><td></td><th scope="col">time</th></tr></thead><tbody><tr><td>one</td><td>2 µs</td></tr>' in made
    assert 'tabindex="0" role="region" aria-label="a &lt; b"' in made


def test_the_glossarys_text_is_plain():
    said = pages.glossary()
    assert len(said) > 100 and not [t for t in said.values() if re.search(r"\*\*|\\\w|\]\(|<a ", t)]


# Cells


def test_what_a_statement_rests_on():
    source = [
        "import numpy as np, math",
        "a = 1\nb = 2",
        "def f(x):\n    y = np.sin(x)\n    return y + a",
        "a = 5",
        "z = f(3)",
    ]
    trees = [tree for text in source for tree in ast.parse(text).body]
    kept = [ast.unparse(tree) for tree in cells.needed(trees, {"z"})]
    assert kept == [
        "import numpy as np",
        "a = 1",
        "def f(x):\n    y = np.sin(x)\n    return y + a",
        "a = 5",
        "z = f(3)",
    ]


@pytest.mark.parametrize("key", sliders.CHOSEN, ids="/".join)
def test_a_sliders_pictures_can_be_drawn_here(key):
    slider = sliders.find(*key)
    names = slider.names()
    assert 4 <= len(names) <= 16 and len({json.dumps(s) for s in names.values()}) == len(names)
    shown = sliders.markup(slider)
    assert shown.count('class="control"') == len(slider.controls) and len(slider.alt) > 20
    assert all(html.escape(label) in html.unescape(shown) or label in html.unescape(shown) for label in labels(slider))


def labels(slider):
    return [label for options in slider.controls.values() for label in options]


def test_pictures_of_a_slider_differ(tmp_path):
    slider = sliders.find("15_fused_ssd", "places-widget")
    sliders.draw(slider, tmp_path)
    drawn = [(tmp_path / name).read_bytes() for name in slider.names()]
    assert len(set(drawn)) == len(drawn) and all(data.startswith(b"\x89PNG") for data in drawn)


# Functions


def test_every_package_has_its_page_and_every_name_is_found():
    assert [m for m in reference.modules() if reference.file_of(m) is None] == []
    for name in reference.modules():
        module = reference.Module(name)
        constants = {n for n in module.listed or () if re.fullmatch("[A-Z_]+", n)}
        assert set(module.listed or ()) - {n for n, _ in module.public()} - constants <= {"variants"}, name  # a module
    said = reference.page("kernels")
    assert '<a id="kernels.gemv.gemv"></a>\n\n### gemv' in said and "gemv(W, x, *, out=None, pdl=False)" in said
    assert "mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None" in said


def test_a_docstring_keeps_columns_and_lets_paragraphs_flow():
    laid = reference.laid_out("One & two\nthree.\n\n    a  b\n    c  d\n\nname   what")
    assert laid.startswith(
        '<div class="doc"><p>One &amp; two three.</p><pre>    a  b&#10;    c  d</pre><pre>name   what</pre>'
    )


# The command


def test_missing_packages_and_a_wrong_repository_get_a_sentence(monkeypatch, capsys):
    from book import __main__ as book

    monkeypatch.setattr(book, "NEEDED", ("json", "no_such_package"))
    assert book.main([]) == 1
    assert "expected the site's packages and found no no_such_package: `make site`" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        book.main(["--repository", "no slash"])
    assert "expected OWNER/NAME as the repository and found 'no slash'" in capsys.readouterr().err


# The settings that the workflow and the Makefile share


def test_the_workflow_builds_as_make_does():
    import yaml

    workflow = yaml.safe_load((ROOT / ".github/workflows/site.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    assert [s["run"] for s in steps if "run" in s] == ['make site REPOSITORY="$GITHUB_REPOSITORY"']
    assert [s["with"]["path"] for s in steps if "upload-pages" in s.get("uses", "")] == ["build/site"]


def test_what_the_site_needs_is_pinned():
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pins = (ROOT / "constraints.txt").read_text() + Path(ROOT / "book/constraints.txt").read_text()
    pinned = {line.split("==")[0].lower() for line in pins.splitlines() if "==" in line}
    assert {name.lower() for group in groups.values() for name in group} <= pinned
