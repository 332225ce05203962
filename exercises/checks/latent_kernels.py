"""Check of chapter 16, exercise 5: blocks that add up in one place, on the SIMT machine."""

import numpy as np

from exercises.checks import time_limit
from exercises.checks.launches import compiled, launched, near, requests, unchanged
from lab.check import unset
from lab.exercise import Exercise

TOLERANCE, DIM = 1e-5, 64
CASES = [  # parts, rows, about which maxima, how far they are spread
    (1, 1, 5, 1),
    (2, 1, 5, 2),
    (3, 4, 8, 4),
    (4, 2, 0, 6),
    (2, 3, -20, 4),
    (5, 2, -300, 9),
    (3, 2, 900, 9),
    (7, 5, 0, 200),
    (2, 4, -900, 200),
]
MANY = 520  # parts: the machine runs 512 such blocks until all wait, and then the others, which here divide


def exercise_5(source):
    """CUDA source of merged."""
    exercise = Exercise("Exercise 5: find the bug")
    rng, first = np.random.default_rng(), np.random.default_rng(16)  # the stub's verdict is the same on every run
    with exercise, time_limit(60):
        kernel = compiled(source, "merged")
        for parts, rows, high, spread in CASES:
            for order in ("forward", "reverse"):
                _merged(kernel, first, parts, rows, high, spread, order)
        _merged(kernel, first, 3, 3, 0, 4, "forward", empty=True)
        for _ in range(2):
            parts, rows = int(rng.integers(3, 9)), int(rng.integers(1, 9))
            _merged(kernel, rng, parts, rows, float(rng.normal(0, 100)), 30, int(rng.integers(100)))
        _merged(kernel, first, MANY, 1, 3, 6, "reverse", races=False)
        parts, rows = 2, 6
        report = _merged(kernel, rng, parts, rows, 0, 30, "forward")
        most = 3 * parts * (rows + 1)  # two warps' columns and a sum for each row; maxima, and two meetings
        made = sum(requests(report, op) for op in ("red", "atom"))
        exercise.require(
            made <= most,
            f"right, but with {parts} parts of {rows} rows warps ask for {made} additions and maxima in memory, "
            f"wanted: at most {most}",
        )
    return exercise.report(
        f"right in {2 * len(CASES) + 5} cases, maxima of all signs, blocks in any order, without a race"
    )


def _merged(kernel, rng, parts, rows, high, spread, order, races=True, empty=False):
    at = f"parts = {parts}, rows = {rows}, maxima about {high:.0f}" + ", no token in row 0" * empty
    values = rng.standard_normal((parts, rows, DIM)).astype(np.float32)
    maxima = (high + spread * rng.standard_normal((parts, rows))).astype(np.float32)
    sums = rng.uniform(0.5, 9, (parts, rows)).astype(np.float32)
    if parts > 2:  # parts without tokens of some rows, or of any
        sums[rng.random(sums.shape) < 0.3] = 0
        sums[rng.integers(parts)] = 0
    if empty:
        sums[:, 0] = 0
    values[sums == 0], maxima[sums == 0] = np.nan, np.nan
    arrays = {"values": values.reshape(-1), "maxima": maxima.reshape(-1), "sums": sums.reshape(-1)}
    before = {name: a.copy().view(np.int32) for name, a in arrays.items()}  # by bits: some are NaN
    place, total, out = unset(rows * DIM), unset(rows), unset((rows, DIM))
    highest, arrived = np.zeros(rows, np.uint32), np.zeros(1, np.uint32)
    report = launched(
        kernel, parts, DIM, *arrays.values(), place, total, highest, arrived, out.reshape(-1), np.int32(rows), at=at,
        check_races=races, order=order,
    )  # fmt: skip
    near("out", out, _wanted(values, maxima, sums), TOLERANCE * max(1, parts / 50), at)
    unchanged({name: a.view(np.int32) for name, a in arrays.items()}, before, at)
    return report


def _wanted(values, maxima, sums):
    """In float64."""
    there, wanted = sums > 0, np.zeros(values.shape[1:])
    for row in range(values.shape[1]):
        if (mine := there[:, row]).any():
            by = np.exp2(maxima[mine, row].astype(np.float64) - maxima[mine, row].max())
            wanted[row] = by @ values[mine, row] / (by @ sums[mine, row])
    return wanted
