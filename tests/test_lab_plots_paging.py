"""The pictures of walking through a table, and of two warpgroups: what is drawn is what they say."""

import pytest

from lab import plots
from lab.plots import paging


def titles(picture):
    return [axis.get_title(loc="left") for axis in picture.axes]


def test_numbers_that_are_there_cost_nothing_and_a_load_that_waits_costs_its_time():
    free, waiting, ahead = (int(title.split(" in ")[1].split()[0]) for title in titles(plots.table_walk()))
    assert free == ahead < waiting
    one = titles(plots.table_walk(tiles=4, load=3, use=1, stages=1))
    assert [title.split(": ")[1] for title in one] == [f"4 tiles in {n} of time" for n in (16, 28, 16)]


@pytest.mark.parametrize("together", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_products_and_softmax_stand_in_an_order_that_can_be(steps, together):
    schedule = paging.append_schedule(steps, together)
    groups = (0, 1) if together else (0,)
    at = {(what, said): (begins, ends) for _, what, begins, ends, said in schedule}
    assert len(at) == len(schedule) == 3 * steps * len(groups)  # each once
    for group in groups:
        for step in range(steps):
            said = f"{group}.{step}"
            scores, softmax, values = (at[what, said] for what in (paging.SCORES, paging.SOFTMAX, paging.VALUES))
            assert scores[1] <= softmax[0] and softmax[1] <= values[0]
    for band in {band for band, *_ in schedule}:
        spans = sorted((begins, ends) for one, _, begins, ends, _ in schedule if one == band)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))  # nothing overlaps


def test_two_warpgroups_leave_no_gap_between_products():
    spans = sorted(step[2:4] for step in paging.append_schedule(6, 1) if step[0] == 0)
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
    alone = paging.append_schedule(6, 0)
    busy = sum(ends - begins for band, _, begins, ends, _ in alone if band == 0)
    assert busy / max(step[3] for step in alone) == pytest.approx(2 / 3)
    assert len(titles(plots.append_timeline())) == 2
