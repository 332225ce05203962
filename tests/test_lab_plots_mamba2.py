"""The pictures of chapter 18: the block, the convolution's window, lists of layers, costs, heads' memory."""

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from lab import plots

matplotlib.use("Agg")


def texts(picture):
    return [t.get_text() for axis in picture.axes for t in axis.texts]


def test_a_block_has_the_references_steps_and_two_states():
    said = " ".join(texts(plots.mamba2_block(n_layers=7)))
    for step in ("1: norm", "2: conv1d", "3: SSD", "4: gate", "5: W_out"):  # ref.mamba2's numbers
        assert step in said
    assert "7 such layers" in said and "conv state" in said and "SSM state" in said


def test_nothing_is_written_over_the_edge_of_its_box():
    picture = plots.mamba2_block()
    picture.savefig(io.BytesIO())
    (axis,) = picture.axes
    boxes = [patch.get_window_extent() for patch in axis.patches if patch.get_facecolor()[3]]
    assert len(boxes) >= 7
    for text in axis.texts:
        written = text.get_window_extent()
        for box in boxes:
            if box.contains((written.x0 + written.x1) / 2, (written.y0 + written.y1) / 2):
                assert box.x0 - 2 <= written.x0 and written.x1 <= box.x1 + 2, text.get_text()


@pytest.mark.parametrize("width, piece", [(4, 6), (2, 3)])
def test_a_window_begins_width_minus_one_before_its_token(width, piece):
    (axis,) = plots.conv_window(9, width, piece).axes
    arrows = [text for text in axis.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 2 * width
    for first, token in zip(arrows[::width], (1, piece)):
        assert first.xyann[0] - 0.46 == pytest.approx(token - width + 1) and first.xy[0] - 0.46 == pytest.approx(token)
    inputs = [patch for patch in axis.patches if patch.get_y() == 0]
    kept = [p.get_x() for p in inputs if to_hex(p.get_facecolor()) == to_hex("#F5CF87")]
    assert kept == list(range(piece - width + 1, piece))


def test_layers_are_of_the_colour_of_their_kind():
    (axis,) = plots.layer_kinds({"one": ["a", "b", "a"], "two": ["b"]}).axes
    colours = [to_hex(patch.get_facecolor()) for patch in axis.patches]
    assert colours[0] == colours[2] != colours[1] == colours[3]


def test_costs_over_the_context_have_a_panel_each():
    picture = plots.over_context([1, 10], {"GB": {"x": [1, 2], "y": [3, 4]}, "ms": {"x": [5, 6], "y": [7, 8]}}, "title")
    first, second = picture.axes
    assert [list(line.get_ydata()) for line in first.lines + second.lines] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert first.get_title(loc="left") == "GB" and first.get_xscale() == "log"
    assert first.xaxis.get_major_formatter()(1 << 20, 0) == "1M" and first.xaxis.get_major_formatter()(128, 0) == "128"


def test_heads_are_sorted_by_what_they_remember():
    (axis,) = plots.memory_of_heads({"fresh": np.array([[3, 1], [2, 9]]), "trained": [5.0]}, "title").axes
    assert list(axis.lines[0].get_ydata()) == [1, 2, 3, 9]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["fresh", "trained"]
