"""The pictures of chapters 07 to 09: how tokens are shared out, online softmax, merging, and what lanes hold."""

import itertools

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from kernels.attention.plan import plan
from lab import plots
from lab.plots import schedules

matplotlib.use("Agg")


# Chapter 08


def said(axis):
    return [text.get_text() for text in axis.texts]


def test_online_softmax_shows_what_the_sums_are():
    scores, values = [1, 0, 3, 2], [8, 4, 2, 6]
    for step in range(5):
        top, low = plots.online_softmax(scores, values, step).axes
        title = top.get_title(loc="left")
        if not step:
            assert title == "before the first token: m = -infinity, total = 0" and not said(low)
            continue
        weights = 2.0 ** (np.array(scores[:step]) - max(scores[:step]))
        out = (weights * values[:step]).sum() / weights.sum()
        assert said(low) == [f"{w:.3g}" for w in weights]
        assert title.endswith(f"total = {weights.sum():.4g}, out = {out:.4g}") and f"m = {max(scores[:step])}" in title
        correction = {1: 0, 2: 1, 3: 0.25, 4: 1}[step]
        assert f"correction = {correction:g}," in title


def test_a_merge_tree_joins_neighbours():
    (axis,) = plots.merge_tree({"warps": list("abcdef"), "blocks": ["x", "-inf"], "all": ["r"]}).axes
    assert sorted(said(axis)) == sorted([*"abcdef", "x", "-inf", "r", "warps", "blocks", "all"])
    ends = [(round(line.get_xdata()[0], 2), round(line.get_xdata()[1], 2)) for line in axis.lines]
    assert ends == [(0.5, 1.5), (1.5, 1.5), (2.5, 1.5), (3.5, 4.5), (4.5, 4.5), (5.5, 4.5), (1.5, 3), (4.5, 3)]


def test_waves_are_counted():
    (axis,) = plots.waves({"a": 1, "b": 24, "c": 25}, multiprocessors=4, room=6).axes
    assert said(axis) == ["a: 1 blocks, 1 wave", "b: 24 blocks, 1 wave", "c: 25 blocks, 2 waves"]
    filled = [int((np.asarray(image.get_array()) > 0).sum()) for image in axis.images]
    assert filled == [1, 24, 24, 1]


def test_a_lane_keeps_its_elements_from_product_to_product(monkeypatch):
    """In all lanes, score and weight of one head and token are in the same lane, and each element is in one lane."""
    monkeypatch.setattr(Axes, "add_patch", lambda axis, box: box)  # the texts are read: 16,384 boxes are not needed
    places = []
    for lane in range(32):
        scores, weights = plots.operand_layout(lane).axes
        at = [sorted(text.get_position() for text in axis.texts) for axis in (scores, weights)]
        assert at[0] == at[1] and len(at[0]) == 8
        places += at[0]
    assert len(set(places)) == 256


@pytest.mark.parametrize("segments, stages, warps, side, pdl", [
    ((6, 4), 3, 4, 2, True), ((6, 4), 3, 4, 2, False), ((4,), 3, 4, 4, True), ((1,), 3, 4, 1, True),
    ((2, 1, 7), 1, 8, 2, True), ((10, 4), 6, 4, 2, True), ((5, 3), 2, 2, 1, False),
])  # fmt: skip
def test_the_schedule_of_decode_keeps_the_kernels_order(segments, stages, warps, side, pdl):
    steps, copies = plots.decode_schedule(segments, stages, warps, side, pdl)
    slices, tiles = warps // side, sum(segments)
    for warp in range(warps):
        mine = [step for step in steps if step.warp == warp]
        assert all(a.end == b.begin for a, b in itertools.pairwise(mine)) and mine[0].begin == 0  # one after another
        for what in ("ask", "scores", "weights", "values"):  # every slice-th tile, each once and in order
            assert [s.tile for s in mine if s.what == what] == list(range(warp // side, tiles, slices))
        for slot in range(stages):
            kept = [copy for copy in copies if (copy.warp, copy.slot) == (warp, slot)]
            assert all(a.free <= b.asked for a, b in itertools.pairwise(kept))  # a slot has one tile at a time
    assert len(copies) == tiles * side
    begins = {(step.warp, step.tile): step.begin for step in steps if step.what == "scores"}
    newest = np.cumsum(segments)[:-1] - 1
    for copy in copies:
        assert copy.there <= begins[copy.warp, copy.tile] < copy.free
        if not pdl or copy.tile in newest:
            assert copy.asked > schedules.BEFORE
    assert min(step.begin for step in steps if step.what == "queries") >= schedules.BEFORE
    merges = sorted({step.begin for step in steps if step.what == "merge, write"})
    if slices > 1:  # the warps meet
        assert len(merges) == len(segments)
    else:
        assert not any(step.what == "wait for the other warps" for step in steps)


def test_a_longer_ring_waits_less_and_pdl_begins_earlier():
    def end(stages, pdl=True):
        steps, _ = plots.decode_schedule((10, 4), stages, pdl=pdl)
        return max(step.end for step in steps)

    ends = [end(stages) for stages in range(1, 7)]
    assert ends == sorted(ends, reverse=True) and ends[0] > 2 * ends[2]
    assert all(end(stages) < end(stages, pdl=False) for stages in range(1, 7))


def test_the_timeline_shows_every_step_and_copy():
    (axis,) = plots.decode_timeline((3, 2), stages=2, warps=2, side=1).axes
    steps, copies = plots.decode_schedule((3, 2), 2, 2, 1)
    assert len(axis.patches) == len(steps) + 2 * len(copies)
    assert [t.get_text() for t in axis.get_yticklabels()] == ["warp 0\nKV head 0", "warp 1\nKV head 0"]
    assert "schematic" in axis.get_xlabel() and {"end of segment 0 ", "end of segment 1 "} < set(said(axis))
    (key,) = axis.figure.legends
    used = {step.what for step in steps}
    assert used < {text.get_text() for text in key.get_texts()} and used <= set(schedules.DRAWN)


def test_tiles_are_shared_out_as_the_kernel_is_told():
    (axis,) = plots.tile_shares([4, 5, 5], 4).axes
    assert axis.get_title("left") == "14 tiles, 4 blocks with 3 or 4 of them"
    boxes = [(int(p.get_y()), int(p.get_x())) for p in axis.patches]
    assert boxes == [(0, t) for t in range(4)] + [(row, t) for row in (1, 2) for t in range(5)]
    lower = [text.get_position()[1] % 1 > 0.5 for text in axis.texts]  # segments stand below the tiles
    assert [t for t, low in zip(said(axis), lower) if not low] == [*"0000", *"11112", *"22333"]
    assert [t for t, low in zip(said(axis), lower) if low] == ["0", "2", "3", "4", "5"]  # share + row
    made = plan(1, 32, 8, 128, 4096, 132, 227 * 1024)
    assert (made.each, made.rest) == divmod(made.rows * 256, made.shares)


# Chapter 07: which block takes which tokens, what a warp reads of a cache, where slices meet


def colours(axis):
    return [to_hex(p.get_facecolor()).upper() for p in axis.patches]


def test_a_share_for_every_token_and_red_where_nobody_comes():
    picture = plots.token_shares(10, [(0, 3), (3, 6), (6, 9)], row=4)
    (axis,) = picture.axes
    assert len(axis.patches) == 10 and colours(axis).count(plots.RED) == 1 and colours(axis)[9] == plots.RED
    assert [p.get_xy() for p in axis.patches[3:5]] == [(3, 0.12), (0, 1.12)]  # a line has four
    assert [t.get_text() for t in axis.texts] == ["0", "1", "2"]  # each block's first token
    assert colours(axis)[2] != colours(axis)[3] == colours(axis)[5]
    assert axis.get_title("left") == "1 of 10 tokens are taken by no block"


def test_shares_that_cover_all_tokens():
    picture = plots.token_shares(5, [(0, 0), (0, 5), (5, 5)], "mended")  # empty shares
    (axis,) = picture.axes
    assert plots.RED not in colours(axis)
    assert axis.get_title("left") == "mended: all 5 tokens are taken" and axis.texts[0].get_text() == "1"


def test_more_blocks_than_tokens_drop_all():
    (axis,) = plots.token_shares(3, [(0, 0)] * 4).axes
    assert colours(axis) == [plots.RED] * 3 and axis.get_title("left").startswith("3 of 3 tokens")


def test_cache_reads_marks_the_elements_in_one_kv_head():
    reads = {"time": [(t, 7) for t in range(32)], "channels": [(7, d) for d in range(32)]}
    picture = plots.cache_reads(reads, n_kv_heads=4, head_dim=32, mine=2)
    assert [axis.get_title("left") for axis in picture.axes] == ["time", "channels"]
    for axis in picture.axes:
        lanes = [p for p in axis.patches if to_hex(p.get_facecolor()).upper() == plots.ORANGE]
        assert len(lanes) == 32 and all(64 <= p.get_x() < 96 for p in lanes)  # head 2
    assert {p.get_x() for p in picture.axes[0].patches[4:]} == {71}
    assert {p.get_y() for p in picture.axes[1].patches[4:]} == {7}


def test_slices_meet_has_a_row_a_warp_and_one_for_the_result():
    (axis,) = plots.slices_meet(slices=4, lanes=8).axes
    assert len(axis.patches) == 4 * 8 + 8
    assert colours(axis).count(plots.SKY) == 4 and colours(axis).count(plots.BLUE) == 1  # one channel, followed
    assert any("warp 3: tokens 3, 7, 11" in t.get_text() for t in axis.texts)


# Chapters 07 and 09: instructions in order, what has a code, where bits go, what shares a scale


def test_instructions_stand_in_order_and_only_those_there_have_a_key():
    (axis,) = plots.instruction_order({"a": ["2", "4", "f"], "b": ["16", "c"]}).axes
    assert [(p.get_x(), p.get_y()) for p in axis.patches] == [(0, 0.42), (1, 0.42), (2, 0.42), (0, 1.42), (1, 1.42)]
    assert colours(axis)[:2] == [plots.ORANGE, plots.BLUE] and said(axis) == ["a", "b"]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == [
        "load of 2 bytes",
        "load of 4 bytes",
        "load of 16 bytes",
        "conversion",
        "multiply–add",
    ]


def test_code_values_are_counted_once_and_inside():
    one, two = plots.code_values({"a": np.array([-2, -1, 0, 0.5, 0.5, 1]), "b": np.array([0.0])}).axes
    assert one.get_title("left") == "a: 4 values" and two.get_title("left") == "b: 1 values"


def test_bit_fields_number_their_lowest_bits():
    (axis,) = plots.bit_fields({"a word": [("high", 24, "white"), ("low", 8, "white")]}).axes
    assert [p.get_width() for p in axis.patches] == [24, 8]
    assert said(axis) == ["a word", "high", "8", "low", "0"]


def test_shared_scales_frames_every_group_the_last_one_short():
    numbers = np.ones((5, 8))
    by_token, by_channel = plots.shared_scales(numbers, {"token": (1, 4), "channel": (4, 1)}).axes
    assert by_token.get_title("left") == "token: 10 scales" and len(by_token.patches) == 10
    assert by_channel.get_title("left") == "channel: 16 scales"
    assert sorted({p.get_height() for p in by_channel.patches}) == [1, 4]


def test_error_dots_say_their_heights():
    (axis,) = plots.error_dots({"x": {"a": 1.0, "b": 20.0}, "y": {"a": 0.5, "b": 3.0}}, "title").axes
    assert sorted(said(axis)) == ["0.5", "1", "20", "3"] and axis.get_yscale() == "log" and not axis.patches
    dots = {line.get_label(): line for line in axis.lines}
    assert list(dots["a"].get_ydata()) == [1.0, 0.5] and list(dots["b"].get_ydata()) == [20.0, 3.0]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["a", "b"]


def test_grouped_bars_begin_at_0():
    (axis,) = plots.grouped_bars({"x": {"a": 1.0, "b": 20.0}, "y": {"a": 0.5, "b": 3.0}}, "title", "times").axes
    assert sorted(said(axis)) == ["0.5", "1", "20", "3"] and axis.get_yscale() == "linear"
    assert axis.get_ylim()[0] == 0 and [p.get_height() for p in axis.patches] == [1.0, 0.5, 20.0, 3.0]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["a", "b"]
