"""The pictures of chapter 20: what is drawn is what was given."""

import matplotlib
import pytest

from lab import plots
from models.slim.report import Library, Report

matplotlib.use("Agg")


def widths(axis):
    return [bar.get_width() for bar in axis.patches]


def test_device_code_draws_every_byte():
    first = Library(
        "a/liblarge.so.12", 5_000_000, 0, {"sm_90": 1_000_000, "sm_100": 2_000_000, "PTX 9.0": 500_000}, 9, 3
    )
    second = Library("b/libsmall.so", 100_000, 0, {"sm_90a": 50_000}, 9, 1)
    found = Report([first, second, Library("libnone.so", 7, 7)], [])
    left, right = plots.device_code(found, card=(9, 0)).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["large", "small"]
    assert widths(left) == pytest.approx([3.5, 0.05, 1.5, 0.05])
    assert [label.get_text() for label in right.get_yticklabels()] == ["sm_100", "sm_90", "PTX", "sm_90a"]
    assert widths(right) == pytest.approx([2, 1, 0.5, 0.05])
    colours = [bar.get_facecolor() for bar in right.patches]
    assert colours[1] == colours[3] and len({*colours}) == 3  # what the card runs, PTX, and the rest
    assert [text.get_text() for text in right.texts] == ["56.3 %", "28.2 %", "14.1 %", "1.4 %"]


def test_container_layout_puts_entries_one_behind_another():
    picture = plots.container_layout(
        [(1000, 600, [("sm_80", 200), ("PTX 8.0", 400)]), (3000, 100, [("sm_80", 100)])], 5000
    )
    (axis,) = picture.axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axis.patches if bar.get_width()]
    assert [x for bar in bars for x in bar] == pytest.approx([0, 5, 1, 0.2, 1.2, 0.4, 3, 0.1])
    first, second, third = [bar.get_facecolor() for bar in axis.patches if bar.get_width()][1:]
    assert first == third != second


def test_thin_copies_says_each_size():
    rows = {"as it comes": {"file": 9, "on disk": 9, "zstd": 4}, "compacted": {"file": 3, "on disk": 3, "zstd": 1.5}}
    (axis,) = plots.thin_copies(rows).axes
    assert widths(axis) == [9, 3, 9, 3, 4, 1.5]
    assert [text.get_text() for text in axis.texts] == ["9", "3", "9", "3", "4", "1.5"]
