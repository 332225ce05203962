"""Checks of chapter 03, the first CUDA kernels.

The learner's CUDA C++ runs on the SIMT machine, so the verdict is the same with and without a GPU. Quality is counted,
never timed: requests, and the sectors that each of them touches.
"""

import itertools
import tempfile

import numpy as np

from exercises.checks import counted, shown, time_limit
from exercises.checks.launches import (
    BLOCK,
    blocks_for,
    coalesced,
    compare,
    compiled,
    launched,
    requests,
    unchanged,
    whole_numbers,
)
from lab.check import unset
from lab.exercise import Exercise, Wrong

# Exercise 1: rows, columns, blocks

TILE = (32, 8)  # threads of a block along x and y


def exercise_1(grid_for, source):
    """grid_for(rows, cols) -> (blocks along x, blocks along y), and the CUDA source of scale_rows."""
    exercise = Exercise("Exercise 1: rows, columns, blocks")
    edges = (1, 2, 7, 8, 9, 31, 32, 33, 65)
    shapes = [(8, 32), *sorted(itertools.product(edges, repeat=2), key=lambda s: (s[0] * s[1], s))]
    with exercise, time_limit(60):
        grids = {shape: _grid(grid_for, *shape) for shape in shapes}
        kernel, rng = compiled(source, "scale_rows"), np.random.default_rng()
        for rows, cols in shapes:
            _scale_rows(kernel, rng, grids[rows, cols], rows, cols)
        at = "rows = 61, cols = 96"
        coalesced(_scale_rows(kernel, rng, _grid(grid_for, 61, 96), 61, 96), at)
        for (rows, cols), grid in grids.items():
            needed = (blocks_for(cols, TILE[0]), blocks_for(rows, TILE[1]))
            exercise.require(
                grid == needed,
                f"right, but for rows = {rows}, cols = {cols} your grid {grid} has blocks without any work; "
                f"{needed[0]} × {needed[1]} are enough",
            )
    return exercise.report(f"right on {len(shapes)} shapes, and every request is coalesced")


def _grid(grid_for, rows, cols):
    call = f"grid_for({rows}, {cols})"
    got = grid_for(rows, cols)
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{call} gave {shown(got)}, expected a pair (blocks along x, blocks along y)")
    if not all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in got):
        raise Wrong(f"{call} gave {shown(got)}, expected two whole numbers (// divides without a remainder)")
    if not all(1 <= v <= 65535 for v in got):
        raise Wrong(f"{call} gave {shown(got)}: a grid has at least one block along each axis, and at most 65,535")
    return int(got[0]), int(got[1])


def _scale_rows(kernel, rng, grid, rows, cols):
    at = f"rows = {rows}, cols = {cols}"
    A, s = whole_numbers(rng, rows, cols), whole_numbers(rng, rows)
    C, before = unset((rows, cols)), {"A": A.copy(), "s": s.copy()}
    races = rows * cols < 1000
    try:
        report = launched(kernel, grid, TILE, A, s, C, np.int32(rows), np.int32(cols), at=at, check_races=races)
    except Wrong as error:
        if "race on C" not in str(error):
            raise
        raise Wrong(f"{error}. Two threads write the same element: is the r or c of one outside the matrix?") from None
    compare("C", C, before["A"] * before["s"][:, None], at)
    unchanged({"A": A, "s": s}, before, at)
    return report


# Exercise 2: a loop for any grid


def exercise_2(source):
    """CUDA source of axpy."""
    exercise = Exercise("Exercise 2: a loop for any grid")
    launches = [(1, 32), (2, 64), (1, 1), (3, 96), (7, 33), (5, 256)]
    cases = [(n, *shape) for n in (1, 31, 33, 64, 300) for shape in launches]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "axpy"), np.random.default_rng()
        for n, grid, block in cases:
            at = f"n = {n}, {counted(grid, 'block')} of {block}"
            if n < 64:
                _axpy(kernel, grid, block, 1, np.ones(n, np.float32), np.zeros(n, np.float32), at)
            _axpy(kernel, grid, block, 3, whole_numbers(rng, n), whole_numbers(rng, n), at)
        n, grid = 2048, 2
        at = f"n = {n}, {grid} blocks of {BLOCK}"
        report = _axpy(kernel, grid, BLOCK, 3, whole_numbers(rng, n), whole_numbers(rng, n), at)
        coalesced(report, at)
        made, needed = requests(report, "ld"), 2 * n // 32
        exercise.require(
            made <= needed,
            f"right, but at {at} the warps make {made:,} load requests; {needed} are enough if in each request "
            "all 32 lanes take part",
        )
    return exercise.report(f"right for {len(cases)} sizes and grids, and every request is coalesced")


def _axpy(kernel, grid, block, a, x, y, at):
    wanted, before = a * x + y, x.copy()
    ones = not y.any()
    races = x.size <= 100
    report = launched(kernel, grid, block, np.float32(a), x, y, np.int32(x.size), at=at, check_races=races)
    bad = np.flatnonzero(~(y == wanted))
    if ones and len(bad) and y[bad[0]] in range(100):
        times = int(y[bad[0]])
        often = {0: "was left out", 1: "was added once"}.get(times, f"was added {times} times")
        raise Wrong(f"wrong at {at}: for {len(bad)} of {x.size} elements. a * x[{bad[0]}] {often}")
    compare("y", y, wanted, at)
    unchanged({"x": x}, {"x": before}, at)
    return report


# Exercise 3: 16 bytes a lane


def exercise_3(source):
    """CUDA source of scale4."""
    exercise = Exercise("Exercise 3: 16 bytes a lane")
    sizes = [*range(1, 14), *range(125, 132), 1021, 1022, 1023, 1024, 1025, 4096, 5000, 8189]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "scale4"), np.random.default_rng()
        for n in sizes:
            _scale4(kernel, rng, n)
        for n in (8192, 8195):
            report = _scale4(kernel, rng, n)
            most = n // 128 + n % 4  # as many as there are full warps of four floats each, and the tail one by one
            for op, word in (("ld", "load"), ("st", "store")):
                made = requests(report, op)
                exercise.require(
                    made <= most,
                    f"right, but at n = {n} the warps make {made:,} {word} requests; wanted: at most {most}, "
                    "with 16 bytes for each lane",
                )
    return exercise.report(f"right for {len(sizes) + 2} sizes, with a quarter of the requests")


def _scale4(kernel, rng, n):
    at = f"n = {n}"
    x, y = whole_numbers(rng, n), unset(n)
    before = x.copy()
    grid = blocks_for(n, 4 * BLOCK)
    report = launched(kernel, grid, BLOCK, x, y, np.float32(3), np.int32(n), at=at, check_races=n < 1000)
    compare("y", y, 3 * before, at)
    unchanged({"x": x}, {"x": before}, at)
    return report


# Exercise 4: find the bug

HUGE = (1_250_000, 4096)  # more than 2**32 bytes: a sparse file, of which only a few pages are ever there


def exercise_4(source):
    """CUDA source of fetch_rows."""
    exercise = Exercise("Exercise 4: find the bug")
    cases = [((16, 16), 64, 64)]  # the author's
    sizes = sorted(itertools.product((1, 5, 16, 17, 33), (1, 16, 30, 65)), key=lambda s: (s[0] * s[1], s))
    cases += [((16, 16), *size) for size in sizes]
    for block in ((32, 8), (8, 32), (64, 1), (1, 64)):
        cases += [(block, *size) for size in ((1, 1), (5, 30), (33, 16), (17, 65), (33, 65))]
    with exercise, time_limit(120):
        kernel, rng = compiled(source, "fetch_rows"), np.random.default_rng()
        for block, n, cols in cases:
            table = rng.integers(-100, 101, (1000, cols), np.int8)
            _fetch_rows(kernel, block, table, rng.integers(0, 1000, n, np.int32))
        with tempfile.TemporaryFile() as file:
            table = np.memmap(file, np.int8, "w+", shape=HUGE)
            ids = np.array([0, 524_287, 524_288, 700_000, 1_048_576, HUGE[0] - 1], np.int32)  # 2**31 / 4096 = 524,288
            table[ids] = rng.integers(1, 101, (len(ids), HUGE[1]), np.int8)
            _fetch_rows(kernel, (32, 8), np.asarray(table), ids)
            del table
    return exercise.report(f"right on {len(cases)} cases, and on a table of {HUGE[0] * HUGE[1] / 1e9:.1f} GB")


def _fetch_rows(kernel, block, table, ids):
    n, cols = len(ids), table.shape[1]
    at = f"n = {n}, cols = {cols}, blocks of {block[0]} × {block[1]}"
    if table.nbytes > 2**31:
        at += f", with a table of {table.nbytes / 1e9:.1f} GB"
    out, before = unset((n, cols)), ids.copy()
    grid = (blocks_for(cols, block[0]), blocks_for(n, block[1]))
    args = (table, ids, out, np.int32(n), np.int32(cols), np.float32(0.5))
    launched(kernel, grid, block, *args, at=at, check_races=n * cols < 600)
    compare("out", out, np.float32(0.5) * table[before], at)
    unchanged({"ids": ids}, {"ids": before}, at)


# Exercise 5: a GEMV that is coalesced


def exercise_5(source):
    """CUDA source of gemv_t."""
    exercise = Exercise("Exercise 5: a GEMV with coalesced loads")
    shapes = [(1, 1), (3, 2), (2, 3), (31, 8), (33, 16), (257, 10), (300, 61)]
    cases = [(rows, cols, splits, 256) for rows, cols in shapes for splits in (1, 2, 8)]
    cases += [(300, 5, 2, 128), (300, 5, 2, 32)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "gemv_t"), np.random.default_rng()
        for rows, cols, splits, block in cases:
            at = f"rows = {rows}, cols = {cols}, {counted(splits, 'split')}"
            at += f", blocks of {block}" if block != BLOCK else ""
            ones = np.ones((cols, rows), np.float32), np.ones(cols, np.float32)
            shares = _gemv_t(kernel, *ones, splits, at, block)[1]  # how many columns each split has taken
            _gemv_t(kernel, whole_numbers(rng, cols, rows), whole_numbers(rng, cols), splits, at, block)
            exercise.require(
                shares.max() - shares.min() <= 1,
                f"right, but at {at} the splits took {shown(shares[:, 0].astype(int).tolist())} columns: they may "
                "differ by one at most, or the others wait for the slowest",
            )
        rows, cols, splits = 1024, 203, 8
        at = f"rows = {rows}, cols = {cols}, {splits} splits"
        report, _ = _gemv_t(kernel, whole_numbers(rng, cols, rows), whole_numbers(rng, cols), splits, at)
        coalesced(report, at)
        made, needed = requests(report, "ld"), 2 * cols * rows // 32
        exercise.require(
            made <= needed,
            f"right, but at {at} the warps make {made:,} load requests; {needed:,} are enough, one for W and one for x "
            "for each warp and column",
        )
        made, needed = requests(report, "st"), splits * rows // 32
        exercise.require(
            made <= needed,
            f"right, but at {at} the warps make {made:,} store requests; {needed:,} are enough if the sum stays in a "
            "register until it is complete",
        )
    return exercise.report(f"right on {len(cases)} cases, evenly split, and every request is coalesced")


def _gemv_t(kernel, Wt, x, splits, at, block=BLOCK):
    """Launch; return the report and the partial sums."""
    cols, rows = Wt.shape
    partial, before = unset((splits, rows)), {"Wt": Wt.copy(), "x": x.copy()}
    races = Wt.size < 1000
    args = (Wt, x, partial, np.int32(rows), np.int32(cols))
    report = launched(kernel, (blocks_for(rows, block), splits), block, *args, at=at, check_races=races)
    missing = np.argwhere(np.isnan(partial))
    if len(missing):
        s, r = map(int, missing[0])
        raise Wrong(
            f"wrong at {at}: {len(missing)} of {counted(partial.size, 'partial sum')} were never set, or only added "
            f"to; the first is partial[{s}, {r}]: it is NaN, as before the call"
        )
    ones = " with Wt and x all ones" if (Wt == 1).all() and (x == 1).all() else ""
    compare("partial.sum(0)", partial.sum(0), before["x"] @ before["Wt"], at + ones)
    unchanged({"Wt": Wt, "x": x}, before, at)
    return report, partial
