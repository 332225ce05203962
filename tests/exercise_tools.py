"""For the tests of exercises: get at what a notebook's cells define, and at what its checks print.

    names = load("solutions", "01_roofline")       # every code cell but the checks has run
    names["gemv_intensity"](2, 3, 4)

    printed("exercises", "01_roofline")            # {"ex1-check": "Exercise 1: ...: not done yet\n", ...}

Cells run in this process, as plain Python (no %magic), in the notebook's own folder. The current folder and
sys.path are as before afterwards.
"""

import contextlib
import io
import itertools
import linecache
import os
import sys
from pathlib import Path

import numpy as np

from lab import notebooks

CHECK_MARK = "# NBVAL_CHECK_OUTPUT"  # the first line of a check cell


def load(folder, name):
    """Run the code cells of folder/name.ipynb, all but the checks; return the names that they defined."""
    names, _ = _run(folder, name, checks=False)
    return names


def printed(folder, name):
    """Run all code cells; return what each check cell printed, by cell id."""
    _, said = _run(folder, name, checks=True)
    return said


def draw_the_same(monkeypatch):
    """From here on, checks draw in this test what they draw in every run of it.

    Whatever is drawn, a wrong answer is rejected. But one draw in a thousand hides it from the case that mostly gives
    it away, and what a later case says of it is something else.
    """
    seeds, generator = itertools.count(), np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: generator(next(seeds) if seed is None else seed))


def expect_one_verdict(judged, times, capsys):
    """`judged()` gives an exercise; its answer must pass every time, with the same short line for the notebook."""
    verdicts = set()
    for _ in range(times):
        exercise = judged()
        assert exercise.passed, exercise.message
        verdicts.add(capsys.readouterr().out)
    (verdict,) = verdicts  # the same on every run: notebooks are compared
    assert verdict.count("\n") == 1 and len(verdict) < 150


def expect_each_part_counts(judge, number, part, parts, stubs, solutions):
    """An answer of several parts, of which one is still the stub, is not done yet. parts: their names, in order"""
    names = {**solutions, part: stubs[part]}
    assert judge(number, *(names[name] for name in parts)).message == "not done yet"


def expect_rejected(exercise, says):
    """The answer must have been refused, for the reason that `says` is part of, and not by a crash."""
    assert not exercise.passed
    assert exercise.message.startswith("not yet: ")
    assert says in exercise.message
    assert "raised" not in exercise.message and "Traceback" not in exercise.message
    assert not any(str(path) in exercise.message for path in (os.getcwd(), "/tmp/"))


def _run(folder, name, checks):
    path = Path(notebooks.ROOT) / folder / f"{name}.ipynb"
    names, said, before = {"__name__": "__main__"}, {}, list(sys.path)
    with contextlib.chdir(path.parent):
        try:
            for cell in notebooks.read(path).cells:
                is_check = cell.source.startswith(CHECK_MARK)
                if cell.cell_type != "code" or (is_check and not checks):
                    continue
                heard = io.StringIO()
                with contextlib.redirect_stdout(heard):
                    exec(_compiled(cell, f"<{folder}/{name}, cell {cell.id}>"), names)
                if is_check:
                    said[cell.id] = heard.getvalue()
        finally:
            sys.path[:] = before
    return names, said


def _compiled(cell, label):
    """Compiled under a name for which tracebacks find the source, as they do in Jupyter."""
    linecache.cache[label] = (len(cell.source), None, cell.source.splitlines(keepends=True), label)
    return compile(cell.source, label, "exec")
