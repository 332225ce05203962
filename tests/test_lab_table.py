"""Tables of measured numbers: as text, as HTML, and stored with a run."""

import json

import pytest
from test_lab_results import ROOF
from test_lab_results import course as course

from lab import results
from lab.table import Table

ROWS = {"a <b>": {"error": 3.2e-4, "registers": 168}, "b": {"error": 1234.5, "most waits": "barrier 4 %"}}


def table():
    return Table("what was counted", ROWS, ("kernels/toy/naive.c",))


def save(course, **also):
    return results.save(course / "kernels" / "toy", [], ROOF, {}, tables=[table()], **also)


def test_a_table_as_text_and_html():
    assert table().columns == ["error", "registers", "most waits"]
    lines = str(table()).splitlines()
    assert lines[0] == "what was counted" and lines[1].split() == ["error", "registers", "most", "waits"]
    assert lines[2].split() == ["a", "<b>", "0.00032", "168"]
    assert lines[3].split() == ["b", "1,234", "barrier", "4", "%"]
    shown = table()._repr_html_()
    assert "a &lt;b&gt;" in shown and "<b>a" not in shown and shown.count("<tr>") == 3


def test_tables_are_stored_beside_or_apart(course):
    path, other = save(course), save(course, name="ncu")
    assert (path.name, other.name) == ("amd_epyc_2_threads.json", "amd_epyc_2_threads_ncu.json")
    (item,), (apart,) = results.stored("toy"), results.stored("toy", "ncu")
    assert (item.path, apart.path) == (path, other) and results.paths() == [path, other]
    found = apart.table("what was counted")
    assert found.rows == ROWS and found.source.startswith("stored run: AMD") and not found.stale
    assert apart.table("another") is None and "stored run" in str(found)


def test_a_table_knows_when_it_is_stale(course):
    path = save(course)
    (course / "kernels/toy/naive.c").write_text("int other;\n")
    assert results.Stored(path).changed() == ["kernels/toy/naive.c"]
    results.Stored(path).mark_stale()
    found = results.Stored(path).table("what was counted")
    assert found.stale and "stale: a source has changed since" in str(found)


@pytest.mark.parametrize("harm", [{"title": 1}, {"rows": [1]}, {"rows": {"a": {"b": True}}}, {"sources": None}])
def test_a_damaged_table_is_one_clear_error(course, harm):
    path = save(course)
    record = json.loads(path.read_text())
    record["tables"][0] |= harm
    path.write_text(json.dumps(record))
    with pytest.raises(results.ResultsError, match="is damaged"):
        results.Stored(path)


def test_a_number_that_is_none_is_damage(course):
    path = save(course)
    path.write_text(path.read_text().replace("1234.5", "NaN"))
    with pytest.raises(results.ResultsError, match="is damaged .*where a number belongs"):
        results.Stored(path)
