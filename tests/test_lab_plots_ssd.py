"""The pictures of chapter 11: matrices of decays, which blocks of them are dense, and the five steps."""

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from lab import plots

matplotlib.use("Agg")


def said(axis):
    return [text.get_text() for text in axis.texts]


def test_what_lies_above_the_diagonal_is_not_drawn():
    values = np.arange(16.0).reshape(4, 4) / 16
    one, two = plots.token_matrices({"one": values, "two": -values}).axes
    for axis, title in ((one, "one"), (two, "two")):
        drawn = axis.images[0].get_array()
        assert axis.get_title(loc="left") == title
        np.testing.assert_array_equal(drawn.mask, ~np.tri(4, dtype=bool))
        assert (drawn.compressed() == values[np.tri(4, dtype=bool)]).all()


@pytest.mark.parametrize(
    "seqlen, chunk, decay, dense, states, gone",
    [(64, 16, 0, 4, 6, 0), (64, 16, 0.02, 4, 6, 0), (50, 8, 0.5, 7, 20, 1), (5, 8, 1, 1, 0, 0), (48, 16, 100, 3, 0, 3)],
)
def test_blocks_are_counted(seqlen, chunk, decay, dense, states, gone):
    kinds = list(plots.chunk_blocks(seqlen, chunk, decay).values())
    assert [kinds.count(kind) for kind in (plots.DENSE, plots.STATES, plots.GONE)] == [dense, states, gone]


def test_a_block_is_gone_if_its_largest_entry_is():
    seqlen, chunk, decay = 45, 7, 0.6
    token = np.arange(seqlen)
    worth = np.where(token[:, None] >= token, np.exp(-decay * np.abs(token[:, None] - token)), 0)
    for (row, column), kind in plots.chunk_blocks(seqlen, chunk, decay).items():
        block = worth[row * chunk :, column * chunk :][:chunk, :chunk]
        assert (kind == plots.GONE) == (block.max() < 2.0**-24)


@pytest.mark.parametrize("seqlen, chunk", [(64, 16), (50, 8), (16, 64)])
def test_blocks_cover_the_triangle(seqlen, chunk):
    left, right = plots.chunk_matrix(seqlen, chunk, 0.5).axes
    blocks = [p for p in right.patches if p.get_width()]
    covered = np.zeros((seqlen, seqlen), int)
    for p in blocks:
        covered[p.get_y() : p.get_y() + p.get_height(), p.get_x() : p.get_x() + p.get_width()] += 1
    assert (covered[np.tri(seqlen, dtype=bool)] == 1).all() and covered.max() == 1
    dense = [p for p in blocks if to_hex(p.get_facecolor()) == plots.BLUE.lower()]
    assert all(p.get_x() == p.get_y() for p in dense) and len(dense) == -(-seqlen // chunk)
    assert left.images[0].get_array().shape == (seqlen, seqlen)
    legend = [text.get_text() for text in right.get_legend().get_texts()]
    assert legend[0].startswith(f"{plots.DENSE}: {len(dense)} block")


def test_the_steps_have_a_state_for_each_chunk():
    (axis,) = plots.chunk_steps(3).axes
    words = said(axis)
    assert [f"chunk {k}" in words and f"$S_{k}$" in words and f"$H_{k}$" in words for k in range(4)] == [True] * 3 + [
        False
    ]
    assert words.count("× decay") == 3 and "final" in words


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_panels_share_their_axes_and_one_legend(count):
    x, lines = [128, 1024, 16384], {f"panel {n}": {"one": [1, 2, 4 + n], "two": [3, 3, 3]} for n in range(count)}
    picture = plots.panels(x, lines, "tokens", "times", "a title")
    drawn = [axis for axis in picture.axes if axis.lines]
    assert [axis.get_title(loc="left") for axis in drawn] == list(lines)
    assert len({axis.get_ylim() for axis in drawn}) == 1 and drawn[0].get_ylim()[0] == 0
    assert drawn[0].get_ylim()[1] > 3 + count
    for axis, of in zip(drawn, lines.values()):
        assert [list(line.get_ydata()) for line in axis.lines] == list(of.values())
        assert [line.get_color() for line in axis.lines] == plots.COLOURS[:2]
        assert axis.xaxis.get_major_formatter()(16384.0) == "16,384"
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


def test_panels_with_two_logarithmic_axes():
    (axis, _) = plots.panels([1, 10], {"one": {"a": [1e-9, 1e-2]}}, "tokens", "error", log="xy").axes
    low, high = axis.get_ylim()
    assert 0 < low < 1e-9 and high > 1e-2 and axis.get_yscale() == axis.get_xscale() == "log"
