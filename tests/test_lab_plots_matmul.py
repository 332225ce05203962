"""The pictures of chapter 14: banks, the phases of mbarriers, roles over time, the order of tiles."""

import matplotlib
import pytest
from matplotlib.colors import to_hex

import ref.matmul
from lab import plots
from lab.plots import matmul

matplotlib.use("Agg")


def said(axis):
    return [text.get_text() for text in axis.texts]


def test_turns_of_a_column_are_counted():
    ways = {"plain": lambda row, word: word, "halves": lambda row, word: word ^ row // 4, "all": lambda r, w: w ^ r}
    titles = [axis.get_title(loc="left") for axis in plots.column_banks(ways, column=5).axes]
    assert titles == ["plain: 8 turns", "halves: 4 turns", "all: 1 turn"]
    (axis,) = plots.column_banks({"all": lambda row, word: word ^ row}, column=5).axes
    strong = [box for box in axis.patches if to_hex(box.get_facecolor()) == plots.ORANGE.lower()]
    assert [(box.get_y(), box.get_x()) for box in strong] == [(row, 5 ^ row) for row in range(8)]


@pytest.mark.parametrize("stages, fill, read", [(1, 2, 3), (2, 2, 3), (3, 3, 1)])
def test_a_ring_waits_for_what_it_must(stages, fill, read):
    when = {(who, row): times for who, row, *times in matmul.ring_schedule(7, stages, fill, read)}
    for row in range(7):
        (_, begins, ends), (_, reads, done) = when["filler", row], when["reader", row]
        assert reads >= ends and ends - begins == fill and done - reads == read
        assert row < stages or begins >= when["reader", row - stages][2]
    # the slower side never waits once it is under way, if there is a slot to spare
    if stages > 1:
        slow = "reader" if read > fill else "filler"
        assert all(when[slow, row][0] == when[slow, row][1] for row in range(1, 7))


def test_phases_end_where_rows_are_filled_and_read():
    (axis,) = plots.ring_phases(rows=5, stages=2).axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["filler", "reader", "full[0]", "empty[0]", "full[1]", "empty[1]"]
    steps = {(who, row): ends for who, row, _, _, ends in matmul.ring_schedule(5, 2, 2.0, 3.0)}
    for at, (who, rows) in {2: ("filler", (0, 2, 4)), 3: ("reader", (0, 2, 4)), 5: ("reader", (1, 3))}.items():
        phases = [box for box in axis.patches if box.get_y() == at + 0.18]
        assert [box.get_x() for box in phases] == [0, *(steps[who, row] for row in rows)]
        assert [to_hex(box.get_facecolor()) for box in phases] == [
            matmul.PALE[n % 2].lower() for n in range(len(phases))
        ]
    asked = [text.split("\n")[1] for text in said(axis) if text.startswith("row")]
    assert asked == [f"asked for {parity}" for parity in (1, 0, 1, 0, 0, 1, 0, 1, 1, 0)]  # filler, reader, row by row


@pytest.mark.parametrize("persistent", [False, True])
def test_roles_wait_for_each_other(persistent):
    tiles, steps, stages = 3, 5, 4
    schedule = matmul.role_schedule(tiles, steps, stages, persistent)
    asked, come, done = (
        [(begins, ends) for role, what, begins, ends, _ in schedule if (role, what) == wanted]
        for wanted in (("producer", "ask"), ("TMA, loads", "copy"), ("consumer 0", "products"))
    )
    assert len(asked) == len(come) == len(done) == tiles * steps
    for n in range(tiles * steps):
        assert come[n][1] >= asked[n][0] + matmul.LATENCY and done[n][0] >= come[n][1]
        if n >= stages and (persistent or n % steps >= stages):
            assert asked[n][0] >= done[n - stages][1]
    for role in {step[0] for step in schedule} - {"TMA, stores"}:
        mine = sorted(step[2:4] for step in schedule if step[0] == role)
        assert all(before[1] <= after[0] + 1e-9 for before, after in zip(mine, mine[1:])), role


def test_blocks_that_stay_end_earlier():
    ends = {stays: max(step[3] for step in matmul.role_schedule(3, 5, 4, stays)) for stays in (False, True)}
    assert ends[True] < ends[False]
    assert [axis.get_title(loc="left") for axis in plots.role_timeline().axes] == [
        "a block for each tile",
        "blocks that stay",
    ]


def test_tiles_are_numbered_in_their_order():
    order = list(ref.matmul.tile_order(5, 3, 2))
    (axis,) = plots.tile_raster({"bands of 2": order}, at_a_time=4).axes
    assert axis.get_title(loc="left") == "bands of 2\nfirst round: 2 strips of x, 2 of W"
    assert said(axis) == [str(n) for n in range(15)]
    assert [(box.get_y(), box.get_x()) for box in axis.patches] == order
    colours = [to_hex(box.get_facecolor()) for box in axis.patches]
    assert colours == 4 * [matmul.PALE[0].lower()] + 4 * [matmul.PALE[1].lower()] + 7 * [matmul.NOTHING.lower()]


def test_the_levels_of_a_tile():
    whole, step = plots.tile_levels().axes
    assert {"x (m, k)", "y (m, n)", "a tile"} <= set(said(whole)) and "128 registers" in said(step)[0]
