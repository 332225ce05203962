"""The pictures of several cards: what is drawn is what was given, one thing behind another."""

import pytest

from lab import plots
from lab.plots import link

NS = {"relaxed": 700, "word": 710, "released": 1300, "data": 1800}


def texts(picture):
    return [text.get_text() for axis in picture.axes for text in axis.texts]


def test_steps_stand_behind_one_another():
    steps = [("launch", "a", 0.5), ("tell", "b", 1.25), ("load", "c", 0.75)]
    assert link.spans(steps) == [("launch", "a", 0, 0.5), ("tell", "b", 0.5, 1.75), ("load", "c", 1.75, 2.5)]
    picture = plots.exchange_steps({"one": steps, "two": steps[:2]}, {"one": 3.1})
    assert [axis.get_title(loc="left") for axis in picture.axes] == [
        "one: 2.50 µs by its steps",
        "two: 1.75 µs by its steps",
    ]
    assert texts(picture).count("measured") == 1
    arrows = [sum(hasattr(t, "arrow_patch") and t.arrow_patch is not None for t in axis.texts) for axis in picture.axes]
    assert arrows == [2 + 2, 2]  # a tell goes both ways, a load there and back
    assert len(plots.exchange_steps({"one": steps}).axes) == 1


def test_each_way_to_tell_ends_when_it_was_measured():
    said = texts(plots.handovers(NS))
    assert [text for text in said if text.endswith("\nns")] == ["700\nns", "710\nns", "1,300\nns", "1,800\nns"]


@pytest.mark.parametrize("what", ["Q, K, V", "W_o", "W_down", "half the heads"])
def test_both_cards_have_their_half(what):
    said = texts(plots.split_layer())
    assert said.count(what) == 2 and said.count("Σ") == 2
