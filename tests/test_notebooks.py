"""Every committed notebook: run, canonical, free of errors and of anybody's paths, its links alive."""

import json
import re
from urllib.parse import unquote

import pytest

from lab import notebooks

PATHS = notebooks.find()
each = pytest.mark.parametrize("path", PATHS, ids=notebooks.label)

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=[\"']([^\"']+)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", re.DOTALL)  # code and formulas


def links(markdown):
    """Targets of links and pictures that should be files here."""
    for groups in LINK.findall(NOT_PROSE.sub("", markdown)):
        target = next(filter(None, groups))
        if not re.match(r"[a-z][a-z0-9+.-]*:|#|//", target, re.IGNORECASE):
            yield unquote(target.partition("#")[0])


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
def test_ids_are_unique(path):
    ids = [cell["id"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(ids) == len(set(ids))


@each
def test_links_lead_somewhere(path):
    nb = notebooks.read(path)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            dead = [target for target in links(cell.source) if not (path.parent / target).exists()]
            assert dead == []


def test_links_are_found_and_formulas_are_not():
    prose = "[a](x.md) ![b](<y.png>) [c](https://z.org) [d](#e) `f[i](j)` $k[l](m)$"
    prose += "<img src='n%20o.svg'>\n[p]: q.md#r"
    assert sorted(links(prose)) == ["n o.svg", "q.md", "x.md", "y.png"]
