"""The pictures of chapter 04 say what the machine says."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from lab import plots
from lab.roof import Roof


def texts(picture):
    return [t.get_text() for axis in picture.axes for t in axis.texts]


def title(picture):
    return picture.axes[0].get_title("left")


def test_a_reduction_by_xor_ends_with_the_sum_in_every_lane():
    values = np.random.default_rng().integers(-50, 50, 32)
    picture = plots.shuffle_reduction(values)
    rows = np.array(texts(picture)).reshape(6, 32).astype(float)
    assert (rows[0] == values).all()
    assert (rows[5] == values.sum()).all()
    assert rows[1, 3] == values[3] + values[19]  # the first step goes 16 lanes far
    assert title(picture) == "__shfl_xor_sync, 5 of 5 steps: 32 of 32 lanes hold the sum of all"


def test_a_reduction_by_down_ends_in_lane_0_only():
    picture = plots.shuffle_reduction(np.arange(32), "down")
    rows = np.array(texts(picture)).reshape(6, 32).astype(float)
    assert rows[5, 0] == 496 and rows[5, 31] == 32 * 31  # lane 31 has only ever heard itself
    assert "1 of 32 lanes hold the sum of all" in title(picture)
    colours = [patch.get_facecolor() for patch in picture.axes[0].patches]
    assert colours.count(colours[5 * 32]) == 1  # one green lane


@pytest.mark.parametrize("steps", range(6))
def test_each_step_doubles_what_a_sum_holds(steps):
    picture = plots.shuffle_reduction(np.ones(32), "bfly", steps)
    rows = np.array(texts(picture)).reshape(steps + 1, 32).astype(float)
    assert (rows == 2.0 ** np.arange(steps + 1)[:, None]).all()
    lines = picture.axes[0].lines
    assert len(lines) == 32 * steps  # one from each lane at each step
    if 0 < steps < 5:
        assert title(picture).endswith(f"{steps} of 5 steps: sums of {2**steps} lanes")


@pytest.mark.parametrize("warps, sectors", [(32, 4), (8, 1)])
def test_a_transpose_shows_its_sectors(warps, sectors):
    said = texts(plots.block_transpose(warps))
    assert f"y: {sectors} sector{'s' * (sectors > 1)}, one request" in said
    assert f"{warps} warps, 32 lanes each" in said


def test_more_loads_in_flight_take_less_time():
    picture = plots.loads_in_flight((1, 2, 8), words=8, latency=20)
    times = [float(axis.get_title("left").split(" take ")[1].split()[0]) for axis in picture.axes]
    assert times == [8.4, 4.4, 1.4]
    bars = [[p for p in axis.patches if p.get_width() == 20] for axis in picture.axes]
    assert [len(b) for b in bars] == [8, 8, 8]
    starts = [sorted(p.get_x() for p in b) for b in bars]
    assert starts[0][1] - starts[0][0] > 20 and starts[2][7] - starts[2][0] == 7
    used = sorted(p.get_x() for p in picture.axes[2].patches if to_hex(p.get_facecolor()).upper() == plots.ORANGE)
    assert used == [start + 20 for start in starts[2]]  # one after another, each as it arrives


@pytest.mark.parametrize("mine", [0, 5])
def test_an_mma_for_one_vector_has_two_diagonals(mine):
    (axis,) = plots.mma_diagonals(mine).axes
    colours = {(p.get_x(), p.get_y()): to_hex(p.get_facecolor()).upper() for p in axis.patches}
    product = {(x - 31, y): colour for (x, y), colour in colours.items() if x >= 31 and colour != "#F2F2F2"}
    assert sorted(product) == sorted((g, g + below) for g in range(8) for below in (0, 8))  # of 128
    assert product[mine, mine] == plots.BLUE and product[mine, mine + 8] == plots.ORANGE
    row = [colours[column, mine] for column in range(16)]
    assert row == 16 * [plots.BLUE] and colours[19.5 + mine, 9] == plots.GREEN
    said = texts(axis.figure)
    assert said.count(f"lane {4 * mine + 3}") == 3 and f"D[{mine + 8}, {mine}]" in said


def test_littles_law_ends_at_the_roof():
    roof = Roof("a card", read=4e12, copy=1.0, flops=1.0)
    points = {"a": (np.array([1e6, 8e6]), np.array([1e12, 3.9e12]))}
    (axis,) = plots.bytes_in_flight(points, 1e-6, roof).axes
    law, dots = axis.lines
    x, y = law.get_data()
    assert np.allclose(y, np.minimum(x * 1000, 4000)) and y.max() == 4000
    assert dots.get_ydata().tolist() == [1000, 3900] and dots.get_xdata().tolist() == [1, 8]
    assert "4,000 GB/s" in texts(axis.figure)[0] and "a card" in axis.get_title("left")
