"""The pictures of chapter 17: a token's way, positions, dependent launches, the law of a step, rates, candidates."""

import io

import matplotlib
import numpy as np
import pytest

import ref.llm
from lab import plots

matplotlib.use("Agg")


def texts(picture):
    return [t.get_text() for axis in picture.axes for t in axis.texts]


def test_a_tokens_way_has_the_references_steps():
    said = " ".join(texts(plots.model_step(n_layers=7)))
    for step in "1: 2: 3, 5: 6: 7: 8: 9:".split():  # ref.llm's numbers; 3 and 4 share a box
        assert step in said
    assert "7 layers, one after another" in said and "the next token" in said


def test_nothing_is_written_over_the_edge_of_its_box():
    picture = plots.model_step()
    picture.savefig(io.BytesIO())
    (axis,) = picture.axes
    boxes = [patch.get_window_extent() for patch in axis.patches if patch.get_facecolor()[3]]
    for text in axis.texts:
        written = text.get_window_extent()
        for box in boxes:
            middle = (written.x0 + written.x1) / 2, (written.y0 + written.y1) / 2
            if box.contains(*middle):
                assert box.x0 - 2 <= written.x0 and written.x1 <= box.x1 + 2, text.get_text()


def test_hands_turn_by_position_times_frequency():
    frequencies = ref.llm.rope_frequencies(6)
    (axis,) = plots.rope_hands(frequencies, positions=4).axes
    hands = [text for text in axis.texts if text.arrow_patch]
    assert len(hands) == 12
    for hand in hands:
        (x, y), (at, row) = hand.xy, hand.xyann
        angle = np.arctan2(row - y, x - at)
        assert np.cos(angle - at * frequencies[row]) == pytest.approx(1)


def test_dependent_launches_begin_while_the_one_ahead_ends():
    kernels = {"a": 4.0, "b": 0.5, "c": 9.0}
    plain, dependent = (plots.dependent_runs(kernels, pdl) for pdl in (False, True))
    for first, then in zip(plain, plain[1:]):
        assert then.begin == first.end and then.free == then.coming
    for first, then in zip(dependent, dependent[1:]):
        assert first.free <= then.begin < first.end == then.free  # x is whole when all of the one ahead has ended
    assert dependent[-1].end < plain[-1].end and [run.name for run in dependent] == list(kernels)
    picture = plots.dependent_launches(kernels)
    ends = [text for text in texts(picture) if text.endswith("µs")]
    assert ends == [f"{runs[-1].end:.3g} µs" for runs in (plain, dependent)]


def test_the_laws_line_goes_through_nothing_and_has_its_slope():
    (axis,) = plots.law({"plain": ([10, 20], [38, 71], 3.6), "PDL": ([10, 20], [15, 31], 1.5)}, "title").axes
    lines = [line for line in axis.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == 0]
    slopes = [line.get_ydata()[1] / line.get_xdata()[1] for line in lines]
    assert slopes == pytest.approx([3.6, 1.5]) and [line.get_ydata()[0] for line in lines] == [0, 0]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["plain: 3.6 µs each", "PDL: 1.5 µs each"]


def test_rates_lie_under_the_roofs_line():
    series = {"ours": {"fp16": (14e9, 300), "int8": (7e9, 500)}, "peer": {"fp16": (14e9, 200)}}
    (axis,) = plots.rates(series, 4.6e12, "title").axes
    roof, ours, peer = axis.lines
    assert roof.get_xdata() * roof.get_ydata() == pytest.approx(np.full(50, 4600))  # GB · tokens/s
    assert list(ours.get_xdata()) == [14, 7] and list(peer.get_ydata()) == [200]
    assert [t.get_text() for t in axis.texts] == ["fp16", "int8"]


def test_candidates_are_as_long_as_their_probabilities():
    rows = {"T = 1": [("' the'", 0.5), ("' a'", 0.3), ("' an'", 0)], "T = 2": [("' the'", 0.2)]}
    (axis,) = plots.candidates(rows, "title").axes
    assert [round(patch.get_width(), 6) for patch in axis.patches] == [0.5, 0.3, 0.2, 0.2, 0.8]  # the rest is grey
    assert texts(plots.candidates(rows, "title")) == ["' the'", "' a'", "' the'"]


def test_stacked_rows_end_with_their_sums():
    picture = plots.stacked_rows({"a": {"weights": 3.0, "cache": 1.0}, "b": {"weights": 2.0}}, "GB", "title")
    (axis,) = picture.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axis.patches] == [(0, 3), (3, 1), (0, 2)]
    assert texts(picture) == ["4", "2"]
    first, second, third = axis.patches
    assert first.get_facecolor() == third.get_facecolor() != second.get_facecolor()
