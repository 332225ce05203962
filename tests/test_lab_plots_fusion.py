"""The pictures of chapter 05: launches, what they hold, and what they cost."""

import matplotlib
import pytest
from matplotlib.colors import to_hex

from lab import plots

matplotlib.use("Agg")
LIGHT = "#bbddf2"


def texts(picture):
    return [t.get_text() for axis in picture.axes for t in axis.texts]


def bars(picture):
    """[(row, left, width, colour)] in µs."""
    (axis,) = picture.axes
    return [
        (round(b.get_y() + b.get_height() / 2), b.get_x(), b.get_width(), to_hex(b.get_facecolor()))
        for b in axis.patches
    ]


def test_a_timeline_puts_launches_one_behind_the_other():
    picture = plots.launch_timeline({"a": ([4e-6, 2e-6], 1e-6, 3e-6), "b": ([6e-6], 1e-6, 3e-6)}, "title")
    whole = [(row, left, width) for row, left, width, colour in bars(picture) if colour == LIGHT]
    busy = [(row, left, width) for row, left, width, colour in bars(picture) if colour != LIGHT]
    # work and loss, a gap of 3 µs, and the next; half of the loss lies before the work
    assert whole == [pytest.approx(b) for b in [(0, 0, 5), (0, 8, 3), (1, 0, 7)]]
    assert busy == [pytest.approx(b) for b in [(0, 0.5, 4), (0, 8.5, 2), (1, 0.5, 6)]]
    assert texts(picture) == ["11 µs", "7 µs"]
    (axis,) = picture.axes
    assert axis.get_title(loc="left") == "title" and "µs" in axis.get_xlabel()
    assert axis.get_xlim()[1] > 11  # room for the number


def test_a_timeline_has_no_gap_before_the_first_launch_or_after_the_last():
    one = plots.launch_timeline({"a": ([1e-6], 0, 5e-6)}, "")
    two = plots.launch_timeline({"a": ([1e-6, 1e-6], 0, 5e-6)}, "")
    assert texts(one) == ["1 µs"] and texts(two) == ["7 µs"]


def test_operations_of_a_launch_stand_in_one_frame():
    rows = {"apart": [["o"], ["add"]], "together": [["o", "add"]]}
    picture = plots.fused_operations(rows)
    (axis,) = picture.axes
    frames = [p for p in axis.patches if not p.get_facecolor()[3]]
    boxes = [p for p in axis.patches if p.get_facecolor()[3]]
    assert len(frames) == 3 and len(boxes) == 4
    apart, also, together = sorted(frames, key=lambda f: (f.get_y(), f.get_x()))
    assert apart.get_width() == also.get_width() == together.get_width() / 2
    assert also.get_x() > apart.get_x() + apart.get_width()  # a gap between two launches
    for box in boxes:  # each inside of exactly one frame
        inside = [f for f in frames if f.get_bbox().x0 <= box.get_x() and box.get_bbox().x1 <= f.get_bbox().x1]
        assert len([f for f in inside if f.get_y() <= box.get_y() < f.get_y() + f.get_height()]) == 1
    assert {"2 launches", "1 launch", "apart", "together"} <= set(texts(picture))
    assert texts(picture).count("add") == 2


def test_heavy_operations_have_a_colour_of_their_own():
    picture = plots.fused_operations({"row": [["o", "add", "other"]]}, heavy=("other",))
    colours = [to_hex(p.get_facecolor()) for p in picture.axes[0].patches if p.get_facecolor()[3]]
    assert colours[0] == colours[1] != colours[2]


def test_a_stream_brings_a_block_every_so_manyth_group_and_a_thread_its_column():
    picture = plots.row_stream(groups=5, rows=2, blocks=2, stages=2, threads=4, block=1, thread=3)
    said = texts(picture)
    assert said[:5] == [
        "group 0: block 0",
        "group 1: block 1",
        "group 2: block 0",
        "group 3: block 1",
        "group 4: block 0",
    ]
    assert [t for t in said if t.startswith(("slot", "group")) and ":" not in t] == [
        "slot 0",
        "group 1",
        "slot 1",
        "group 3",
    ]
    (axis,) = picture.axes
    of_thread = [p for p in axis.patches if to_hex(p.get_facecolor()).upper() == plots.ORANGE]
    assert len(of_thread) == 2 * 2 + 2 * 2 + 1  # of two groups in W, of two slots, and of x
    assert len({p.get_x() for p in of_thread}) == 2  # one column of W, one of the ring and of x
    longer = texts(plots.row_stream(groups=6, rows=2, blocks=2, stages=2))
    assert "group 1, then 5" in longer and "group 3" in longer


def test_pictures_are_closed():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    plots.fused_operations({"row": [["o"]]})
    plots.launch_timeline({"row": ([1e-6], 0, 0)}, "")
    assert plt.get_fignums() == before
