"""The pictures of chapters 07 to 09: how tokens are shared out, online softmax, merging, and what lanes hold."""

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from lab import plots

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


# Chapter 09: instructions in order, what has a code, where bits go, what shares a scale


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


def test_error_bars_say_their_heights():
    (axis,) = plots.error_bars({"x": {"a": 1.0, "b": 20.0}, "y": {"a": 0.5, "b": 3.0}}, "title").axes
    assert sorted(said(axis)) == ["0.5", "1", "20", "3"] and axis.get_yscale() == "log"
    assert [p.get_height() for p in axis.patches] == [1.0, 0.5, 20.0, 3.0]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["a", "b"]
