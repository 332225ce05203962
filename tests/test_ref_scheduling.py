"""Plans of many caches' tiles: each tile once, shares as equal as is promised, small cases by hand, faults named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import scheduling
from ref.scheduling import PLANNERS, Costs, Work, equal_line, least_limit, longest_first, makespan, whole_rows

quick = settings(max_examples=60, deadline=None)
planners = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
batches = st.tuples(
    st.lists(st.one_of(st.integers(0, 4), st.integers(0, 90)), max_size=9), st.integers(1, 5), st.integers(1, 17)
)


@planners
@quick
@given(batch=batches)
def test_every_tile_is_read_once(planner, batch):
    tiles, heads, blocks = batch
    plan = planner(tiles, heads, blocks)
    scheduling.expect_each_once(plan, tiles, heads, blocks)
    # expect_each_once is tried on wrong plans below; here the sum is counted apart from it
    assert sum(work.tiles for work in plan) == heads * sum(tiles)


@quick
@given(batch=batches)
def test_shares_of_the_line_differ_by_a_tile_at_most(batch):
    tiles, heads, blocks = batch
    plan = equal_line(tiles, heads, blocks)
    shares = [sum(w.tiles for w in plan if w.block == block) for block in range(blocks)]
    assert max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)
    rows = [(r, h) for r, many in enumerate(tiles) for h in range(heads) if many]
    numbers = [w.block + rows.index((w.request, w.head)) for w in plan]
    assert numbers == sorted(set(numbers))  # block + row numbers a segment, as in tiles.cuh
    assert len(plan) <= blocks + len(rows)


@quick
@given(batch=batches)
def test_the_heap_is_never_more_than_a_work_above_the_mean(batch):
    tiles, heads, blocks = batch
    plan = longest_first(tiles, heads, blocks)
    limit = max(1, -(-sum(tiles) * heads // blocks))
    assert all(w.tiles <= limit for w in plan)
    cost = [sum(w.tiles + 2 for w in plan if w.block == block) for block in range(blocks)]
    assert max(cost) <= sum(cost) / blocks + limit + 2
    assert longest_first(tiles, heads, blocks) == plan


def test_a_line_by_hand():
    # requests of 3, 0 and 4 tiles, 2 heads, 4 blocks: shares of 4, 4, 3, 3 on a line of 3 3 4 4
    plan = equal_line([3, 0, 4], 2, 4)
    assert plan == [
        Work(0, 0, 0, 0, 3), Work(0, 0, 1, 0, 1), Work(1, 0, 1, 1, 2), Work(1, 2, 0, 0, 2),
        Work(2, 2, 0, 2, 2), Work(2, 2, 1, 0, 1), Work(3, 2, 1, 1, 3),
    ]  # fmt: skip
    assert scheduling.merge_map(plan) == {(0, 1): [1, 2], (2, 0): [3, 4], (2, 1): [5, 6]}


def test_a_heap_by_hand():
    # 17 tiles, 3 blocks: limit 6. Row 0 is cut into 6, 6, 1; sorted: 6 6 2 1 1 1. The two long ones to blocks 0 and 1
    # (cost 8 each), and the short ones to block 2 (4, 7, 10); the last one to block 0
    plan = longest_first([13, 2, 1, 1], 1, 3)
    assert plan == [
        Work(0, 0, 0, 0, 6), Work(1, 0, 0, 6, 6), Work(2, 1, 0, 0, 2), Work(2, 0, 0, 12, 1), Work(2, 2, 0, 0, 1),
        Work(0, 3, 0, 0, 1),
    ]  # fmt: skip
    assert scheduling.merge_map(plan) == {(0, 0): [0, 1, 3]}


def test_a_makespan_by_hand():
    costs = Costs(tile=2.0, start=3.0, merge=0.5)
    plan = equal_line([3, 0, 4], 2, 4)
    # block 0: two works of 3 and 1 tiles; 1: of 2 and 2; 2: of 2 and 1; 3: one of 3
    assert scheduling.loads(plan, 4, costs).tolist() == [14, 14, 12, 9]
    assert makespan(plan, 4, costs) == 14 + 1.0  # three rows of two parts, merged by three blocks
    assert makespan(plan[:1], 4, costs) == 9.0  # nothing to merge
    assert makespan([], 4, costs) == 0
    one_row = equal_line([8], 1, 4)
    assert makespan(one_row, 4, costs) == 3 + 4 + 4 * 0.5  # one row's parts follow each other


def test_merges_share_the_blocks():
    plan = equal_line([2] * 5, 1, 10)  # five rows of two parts
    costs = Costs(tile=0, start=0, merge=1.0)
    assert makespan(plan, 10, costs) == 2
    two = [work._replace(block=work.block % 2) for work in plan]
    assert makespan(two, 2, costs) == 6  # three rows for one of the two


def test_fair_shares_are_as_even_as_the_mean_and_whole_rows_are_as_long_as_the_longest():
    costs, heads, blocks = scheduling.H200, 8, 132
    found = {}
    for name, tiles in scheduling.traces().items():
        mean = costs.tile * heads * sum(tiles) / blocks
        found[name] = {way: makespan(planner(tiles, heads, blocks), blocks, costs) / mean
                       for way, planner in PLANNERS.items()}  # fmt: skip
        assert found[name]["equal line"] < 1.2 and found[name]["longest first"] < 1.3
    whole = {name: of["a block for each row"] for name, of in found.items()}
    assert whole["1 × 128K and 63 × 1K"] > 11 and whole["64 of 64K/i"] > 3.4 and whole["16 × 4K"] < 1.1


def test_traces_are_those_that_are_named():
    found = scheduling.traces()
    assert found["1 × 128K and 63 × 1K"] == [8192] + [64] * 63
    assert found["64 of 64K/i"][:3] == [4096, 2048, 1366] and len(found["64 of 64K/i"]) == 64
    drawn = found["64 of 512 to 1024"]
    assert len(drawn) == 64 and 32 <= min(drawn) < 40 and 58 < max(drawn) <= 64
    assert found == scheduling.traces() and found != scheduling.traces(seed=11)


@quick
@given(batch=batches, more=st.integers(0, 60))
def test_the_least_limit_is_the_first_that_fits(batch, more):
    tiles, heads, _ = batch
    most = max(1, heads * sum(many > 0 for many in tiles)) + more
    limit = least_limit(tiles, heads, most)
    works = {n: heads * sum(-(-many // n) for many in tiles) for n in (limit, limit - 1) if n}
    assert works[limit] <= most and (limit == 1 or works[limit - 1] > most)
    assert len(longest_first(tiles, heads, 3, limit)) == works[limit]


WRONG = {
    "a tile left out": (lambda plan: plan[:2] + plan[3:], "tile 1 of request 0, head 1, is read 0 times"),
    "a tile twice": (lambda plan: [*plan, Work(1, 2, 1, 3, 1)], "tile 3 of request 2, head 1, is read 2 times"),
    "a block that is not there": (lambda plan: [*plan[:-1], plan[-1]._replace(block=4)], "there are 4 blocks"),
    "a negative block": (lambda plan: [*plan[:-1], plan[-1]._replace(block=-1)], "there are 4 blocks"),
    "another request": (lambda plan: [*plan, Work(0, 3, 0, 0, 1)], "there are 3 requests"),
    "past the end": (lambda plan: [*plan, Work(0, 0, 0, 2, 2)], "request 0 has 3 tiles"),
    "before the start": (lambda plan: [*plan, Work(0, 0, 0, -1, 1)], "request 0 has 3 tiles"),
    "no tile": (lambda plan: [*plan, Work(0, 1, 0, 0, 0)], "request 1 has 0 tiles"),
}


@pytest.mark.parametrize("spoil, says", WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_found(spoil, says):
    batch = [3, 0, 4], 2, 4
    plan = equal_line(*batch)
    scheduling.expect_each_once(plan, *batch)
    with pytest.raises(ValueError, match=says):
        scheduling.expect_each_once(spoil(plan), *batch)


BAD = {
    "tiles must be whole": lambda: equal_line([1.5], 1, 1),
    "tiles must be whole numbers of at least 0": lambda: whole_rows([2, -1], 1, 1),
    "one for each request": lambda: longest_first([[1, 2]], 1, 1),
    "heads must be a whole number": lambda: whole_rows([1], 0, 1),
    "blocks must be a whole number": lambda: equal_line([1], 1, True),
    "limit must be a whole number": lambda: longest_first([1], 1, 1, limit=0),
    "most must be at least 4": lambda: least_limit([3, 0, 1], 2, 3),
}


@pytest.mark.parametrize("says", BAD)
def test_bad_input(says):
    with pytest.raises(ValueError, match=says):
        BAD[says]()


def test_nothing_to_do():
    for planner in PLANNERS.values():
        assert planner([], 2, 3) == planner([0, 0], 2, 3) == []
    assert np.array_equal(scheduling.loads([], 3), np.zeros(3)) and least_limit([], 1, 1) == 1
