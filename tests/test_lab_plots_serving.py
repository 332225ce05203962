"""The pictures of serving: what they draw is what they are given."""

import matplotlib
import numpy as np
import pytest

from lab import plots
from ref import scheduling

matplotlib.use("Agg")


def titles(picture):
    return [axis.get_title(loc="left") for axis in picture.axes]


def test_padding_counts_what_is_empty():
    picture = plots.padding([10, 33, 40], page=16)
    padded, paged = picture.axes
    assert titles(picture) == ["room for the longest: 31 % of it is empty", "pages of 16: 26 % of it is empty"]
    rooms, tokens = padded.containers
    assert [bar.get_width() for bar in rooms] == [40, 40, 40] and [bar.get_width() for bar in tokens] == [10, 33, 40]
    assert [bar.get_width() for bar in paged.containers[0]] == [16, 48, 48]
    (wide, _) = plots.padding([10, 33], longest=100).axes
    assert {bar.get_width() for bar in wide.containers[0]} == {100}


def test_a_page_table_shows_who_has_what():
    picture = plots.page_table([[3, 0], [3, 5], [1]], lens=[20, 32, 16], page=16, n_pages=7)
    (axis,) = picture.axes
    assert titles(picture) == ["4 of 7 pages are taken, 1 of them by several requests"]
    said = [(text.get_position(), text.get_text()) for text in axis.texts]
    assert said == [((3.5, 0.5), "0"), ((0.5, 0.5), "1"), ((3.5, 1.5), "0"), ((5.5, 1.5), "1"), ((1.5, 2.5), "0")]
    hatched = [(patch.get_x(), patch.get_y()) for patch in axis.patches if patch.get_hatch()]
    assert hatched == [(0, 0)]  # 20 tokens fill the first page and not the second
    orange = matplotlib.colors.to_rgba("#F5CF87")
    assert sorted((p.get_x(), p.get_y()) for p in axis.patches if p.get_facecolor() == orange) == [(3, 0), (3, 1)]
    assert "several" not in titles(plots.page_table([[0]], [3], 16, 2))[0]


def test_loads_are_drawn_to_their_makespan():
    tiles, costs = [9, 2, 1], scheduling.Costs(1.0, 0.5, 0.25)
    plans = {name: planner(tiles, 2, 4) for name, planner in scheduling.PLANNERS.items()}
    ends = {name: scheduling.makespan(plan, 4, costs) for name, plan in plans.items()}
    picture = plots.block_loads(plans, 4, costs, ends, ["request 0", "request 1"])
    for axis, (name, plan) in zip(picture.axes, plans.items()):
        assert len(axis.patches) == len(plan)
        tops = {}
        for box in axis.patches:
            block = round(box.get_x() + box.get_width() / 2)
            assert box.get_y() == pytest.approx(tops.get(block, 0))  # one upon the other
            tops[block] = box.get_y() + box.get_height()
        assert [tops.get(b, 0) for b in range(4)] == pytest.approx(scheduling.loads(plan, 4, costs))
        dotted, mean = (line.get_ydata()[0] for line in axis.lines)
        assert dotted == ends[name] and mean == pytest.approx(scheduling.loads(plan, 4, costs).mean())
        assert axis.get_title(loc="left").startswith(f"{name}: {ends[name]:.4g} µs")
    assert len({axis.get_ylim() for axis in picture.axes}) == 1


def test_a_server_over_time():
    steps = np.array([[0, 1, 2, 0, 30, 32], [1, 3, 3, 5, 40, 64]], float)
    top, low = plots.server_over_time(steps, "so").axes
    run, wait = top.lines
    assert run.get_xdata().tolist() == [1, 3] and run.get_ydata().tolist() == [2, 3]
    assert wait.get_ydata().tolist() == [0, 5] and top.get_title(loc="left") == "so"
    assert low.get_xlim() == (0, 3) and low.get_ylabel() == "thousand tokens"
    room, held = (area.get_paths()[0].vertices[:, 1].max() for area in low.collections)
    assert (room, held) == (0.064, 0.04)


def test_lateness_is_the_share_that_comes_later():
    (axis,) = plots.lateness({"a": np.array([0.3, 0.1, 0.2, 0.4])}, "late").axes
    line = axis.lines[0]
    assert line.get_xdata() == pytest.approx([100, 200, 300, 400])  # ms
    assert line.get_ydata().tolist() == [1, 0.75, 0.5, 0.25]  # the share that is at least so late


def test_rates_have_an_axis_for_each_figure():
    figures = {"tokens/s": {"a": [1, 2], "b": [1, 3]}, "p99, ms": {"a": [5, 400], "b": [5, 6]}}
    picture = plots.over_rates([1, 2], figures)
    left, right = picture.axes
    assert titles(picture) == list(figures) and left.get_yscale() == "linear" and right.get_yscale() == "log"
    assert left.get_ylim()[0] == 0 and [line.get_ydata().tolist() for line in right.lines] == [[5, 400], [5, 6]]
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["a", "b"]
