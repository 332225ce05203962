"""The list of planted mistakes: each has its place and its tests; what does not hold is not taken for seen."""

import re
import shlex

import mutations
import pytest
from mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_each_has_its_place_and_its_tests(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1 and mutation.old != mutation.new
    file, *options = shlex.split(mutation.tests)
    (named,) = re.findall(r"test_\w+", options[1]) if options[:1] == ["-k"] else ("test_",)
    assert f"def {named}" in (ROOT / file).read_text()


def test_names_differ():
    assert len({m.name for m in MUTATIONS}) == len({(m.file, m.old, m.new) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A checkout of one file, and tests that are made up: what pytest would say goes by the file's text."""
    (tmp_path / "a.py").write_text("right = 1\nalso = 2\n")
    said = {
        "sees": lambda text: (1, [], "") if "right = 1" in text else (0, ["test_a - assert 2 == 1"], ""),
        "sleeps": lambda text: (1, [], ""),
        "fails": lambda text: (0, ["test_b"], ""),
        "empty": lambda text: (0, [], ""),
        "hangs": lambda text: (1, [], "") if "right = 1" in text else (0, [], "no verdict in 600 s"),
        "breaks": lambda text: (1, [], "") if "right = 1" in text else (0, ["test_c - SyntaxError: oh"], ""),
    }
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "run", lambda checkout, tests: said[tests]((checkout / "a.py").read_text()))

    def planted(*chosen):
        monkeypatch.setattr(mutations, "MUTATIONS", chosen)
        return mutations.main([])

    yield planted
    assert (tmp_path / "a.py").read_text() == "right = 1\nalso = 2\n"


def test_a_mistake_that_is_seen(course, capsys):
    assert course(Mutation("one", "a.py", "right = 1", "sees", "right = 2")) == 0
    assert re.fullmatch(r"seen    one   +0 s  test_a - assert 2 == 1\n1 of 1 are seen\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "tests, old, what",
    [
        ("sleeps", "right = 1", "goes unseen by sleeps"),
        ("fails", "right = 1", "test_b fails without it"),
        ("empty", "right = 1", "no test runs: empty"),
        ("hangs", "right = 1", "no verdict in 600 s"),
        ("breaks", "right = 1", "is no program: test_c - SyntaxError: oh"),
        ("sees", "wrong = 1", "its text stands 0 times in a.py, not once"),
        ("sees", " = ", "its text stands 2 times in a.py, not once"),
    ],
)
def test_what_is_not_taken_for_seen(course, capsys, tests, old, what):
    good = Mutation("good", "a.py", "right = 1", "sees", "right = 2")
    assert course(good, Mutation("bad", "a.py", old, tests, "else"), good) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^UNSEEN  bad .* s  {re.escape(what)}$", out, re.M) and "2 of 3 are seen" in out


def test_some_by_a_word(capsys):
    assert mutations.main(["--list", "ring:"]) == 0
    assert all(line.startswith("ring: ") for line in capsys.readouterr().out.splitlines())
    assert mutations.main(["no such word"]) == 1
    assert capsys.readouterr().out == "no mutation has no such word in its name or file\n"


def test_pytest_is_asked(tmp_path, monkeypatch):
    """The real thing, once: one test passes, one fails."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # it starts in half the time
    (tmp_path / "test_a.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'so'\n")
    passed, failed, trouble = mutations.run(tmp_path, "test_a.py")
    assert passed == 1 and trouble == "" and failed[0].startswith("test_a.py::test_bad - AssertionError: so")
