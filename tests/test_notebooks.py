"""Every committed notebook: run, canonical, free of errors and of anybody's paths, its links alive."""

import json
import re
from urllib.parse import unquote

import pytest

from lab import notebooks

PATHS = notebooks.find()
each = pytest.mark.parametrize("path", PATHS, ids=notebooks.label)
CHAPTERS = notebooks.find(folders=("notebooks",))
GLOSSARY = notebooks.ROOT / "notebooks" / "glossary.md"
PAGES = [*notebooks.ROOT.glob("*.md"), *notebooks.ROOT.glob("[!.]*/*.md")]

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=[\"']([^\"']+)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", re.DOTALL)  # code and formulas
OUTSIDE = re.compile(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/([\w./~#?=&%+-]*\w)?/?)?")  # what an address should look like


def links(markdown):
    """Targets of links and pictures."""
    for groups in LINK.findall(NOT_PROSE.sub("", markdown)):
        yield unquote(next(filter(None, groups)))


def dead(markdown, path):
    """The targets that lead nowhere from the file `path`: no such file, no such <a id> in it, no address."""
    for target in links(markdown):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
            if not OUTSIDE.fullmatch(target):
                yield target
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        # GitHub and JupyterLab make different anchors of a heading, so only those count that are written out.
        if not file.exists() or anchor and f'<a id="{anchor}"></a>' not in file.read_text(encoding="utf-8"):
            yield target


def prose(path):
    return "\n\n".join(cell.source for cell in notebooks.read(path).cells if cell.cell_type == "markdown")


def test_there_are_notebooks():
    assert (notebooks.ROOT / "notebooks" / "01_roofline.ipynb") in PATHS  # the one that `make lab` opens


@each
def test_canonical_run_and_in_step_with_its_solution(path):
    assert notebooks.problems(path) == []


@each
def test_no_errors_and_no_paths_of_a_machine(path):
    """Asked of the file itself, in the plainest way, lest canonical() be blind to something."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in nb["metadata"]
    for cell in nb["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            seen = {k: v for k, v in output.get("data", {}).items() if k not in ("image/png", "image/jpeg")}
            text = json.dumps([seen, output.get("text", "")])
            assert not re.search(r"(?<![\w.~-])/(home|root|tmp|Users)/\w", re.sub(r"base64,[\w+/=]+", "", text))


@each
def test_no_warnings(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr"
            assert not re.search(
                r"\w*Warning\b", json.dumps([output.get("data", {}).get("text/plain"), output.get("text")])
            )


@each
def test_ids_are_unique(path):
    ids = [cell["id"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(ids) == len(set(ids))


@each
def test_links_lead_somewhere(path):
    assert list(dead(prose(path), path)) == []


@pytest.mark.parametrize("path", PAGES, ids=notebooks.label)
def test_links_of_pages_lead_somewhere(path):
    assert list(dead(path.read_text(encoding="utf-8"), path)) == []


def test_links_are_found_and_formulas_are_not():
    prose = "[a](x.md) ![b](<y.png>) [c](https://z.org) [d](#e) `f[i](j)` $k[l](m)$"
    prose += "<img src='n%20o.svg'>\n[p]: q.md#r"
    assert sorted(links(prose)) == ["#e", "https://z.org", "n o.svg", "q.md#r", "x.md", "y.png"]


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('<a id="here"></a> # There')
    right = "[a](page.md) [b](#here) [c](page.md#here) [d](https://a-b.org/c_d/e.html#f) [e](https://a.org/)"
    wrong = "x.md #there page.md#x https://localhost http://a.org https://a.org/, //a.org file:///x".split()
    assert list(dead(right, page)) == []
    assert list(dead(" ".join(f"[a]({target})" for target in wrong), page)) == wrong


# The glossary: an entry is a line  <a id="flop"></a>**flop** ([01](01_roofline.ipynb)): two sentences at most.

ENTRY = re.compile(r'<a id="([a-z0-9-]+)"></a>\*\*(.+?)\*\* \(\[(\d\d)\]\((\3_\w+\.ipynb)\)\): (.+[.)])')


def test_the_glossary_is_in_order_and_short():
    entries = [ENTRY.fullmatch(line) for line in GLOSSARY.read_text(encoding="utf-8").splitlines()[4:] if line]
    assert None not in entries
    terms, anchors = [entry[2].casefold() for entry in entries], [entry[1] for entry in entries]
    assert terms == sorted(terms) and len(anchors) == len(set(anchors))
    assert [entry[2] for entry in entries if len(re.findall(r"[.!?](?= |$)", entry[5])) > 2] == []


def test_chapters_link_the_words_that_they_introduce_and_no_word_twice():
    anchors = {path.name: re.findall(r"\(glossary\.md#([a-z0-9-]+)\)", prose(path)) for path in CHAPTERS}
    assert [(name, a) for name, found in anchors.items() for a in found if found.count(a) > 1] == []
    entries = ENTRY.findall(GLOSSARY.read_text(encoding="utf-8"))
    assert [anchor for anchor, _, _, chapter, _ in entries if anchor not in anchors[chapter]] == []
