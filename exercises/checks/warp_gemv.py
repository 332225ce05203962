"""Checks of chapter 04: shuffles, wide loads, shared memory.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races. Quality is counted, never timed: requests,
sectors, bank conflicts, instructions.
"""

import re

import numpy as np

from exercises.checks import counted, time_limit
from exercises.checks.launches import (
    blocks_for,
    coalesced,
    compare,
    compiled,
    launched,
    near,
    requests,
    unchanged,
    whole_numbers,
)
from lab.check import unset
from lab.exercise import Exercise, Wrong

BLOCK, WARPS = 256, 8  # threads and warps of a block
SHARED = "smsp__inst_executed_op_shared_{}.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"


def no_shared(report, at):
    """Raise Wrong if the kernel went through shared memory, where shuffles are to be used."""
    made = sum(report.counters[SHARED.format(op)] for op in ("ld", "st"))
    if made:
        raise Wrong(f"right, but at {at} the warps make {made:,} requests to shared memory: shuffles need none")


def wide_or_coalesced(report, at, **bytes_needed):
    """Raise Wrong if requests touch more than 4 sectors on average, and more than `bytes_needed` ({op: bytes}) in all.

    A load of 16 bytes a lane touches 16 sectors; as long as no byte comes in vain, that is no fault.
    """
    if any(requests(report, op) * report.sectors_per_request(op) * 32 > n for op, n in bytes_needed.items()):
        coalesced(report, at)


def named_lanes(source):
    """Raise Wrong if the lanes of a shuffle are those that happen to be together."""
    if re.search(r"__activemask\s*\(", source):
        raise Wrong(
            "__activemask() says which lanes happen to be together, and a shuffle may then ask one that is not. "
            "Let all 32 lanes come to the shuffle, with the mask 0xffffffff"
        )


# Exercise 1: the largest of 32

WARP_MAX = r"__device__[\s\w]*\sfloat\s+warp_max\s*\(\s*(const\s+)?float\s+\w+\s*\)"
ALL_LANES = """
#line 1 "the check"
extern "C" __global__ void all_lanes(const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = warp_max(x[i]);
}
"""
MOST_INSTRUCTIONS = 50  # of a warp; five shuffles and five comparisons, the load and the store make about 30


def exercise_1(source):
    """CUDA source of `__device__ float warp_max(float value)`."""
    exercise = Exercise("Exercise 1: the largest of 32")
    with exercise, time_limit(60):
        if isinstance(source, str):
            if not re.search(WARP_MAX, source):
                raise Wrong("the source has no function `__device__ float warp_max(float value)`")
            source += ALL_LANES
        kernel, rng = compiled(source, "all_lanes"), np.random.default_rng()
        report = None
        for name, offset in (("all values negative", -1000), ("all values positive", 0)):
            # warp k has its largest value in lane k
            x = rng.permuted(np.tile(np.arange(1, 33), (32, 1)), axis=1) + 0.0
            top = x.argmax(axis=1)
            x[np.arange(32), top], x[np.arange(32), np.arange(32)] = x[np.arange(32), np.arange(32)], 32
            x = (x + offset).astype(np.float32)
            y = unset((32, 32))
            report = launched(kernel, 8, 128, x.reshape(-1), y.reshape(-1), at=name)
            wanted = np.float32(32 + offset)
            bad = np.argwhere(y != wanted)
            if len(bad):
                k, lane = map(int, bad[0])
                raise Wrong(
                    f"wrong with {name}: the largest is {wanted:g}, in lane {k}, and lane {lane} got {y[k, lane]:g}"
                )
        x = np.full((1, 32), -np.inf, np.float32)
        y = unset((1, 32))
        launched(kernel, 1, 32, x.reshape(-1), y.reshape(-1), at="all values -inf")
        if not np.array_equal(x, y):
            raise Wrong(f"wrong with all values -inf: a lane got {y[y != x][0]:g}, expected -inf")
        no_shared(report, "32 warps")
        made = report.counters[INSTRUCTIONS] // 32
        exercise.require(
            made <= MOST_INSTRUCTIONS,
            f"right, but a warp executes {made} instructions; wanted: at most {MOST_INSTRUCTIONS}, which five "
            "shuffles and five comparisons leave room for",
        )
    return exercise.report("right in all lanes, wherever the largest is, in a few instructions")


# Exercise 2: softmax, a warp for each row


def exercise_2(source):
    """CUDA source of softmax."""
    exercise = Exercise("Exercise 2: softmax by a warp")
    shapes = [(1, 1), (1, 2), (1, 31), (1, 32), (1, 33), (2, 7), (9, 64), (17, 100), (8, 129), (3, 1000)]
    largest = [(1, 1), (1, 33), (17, 100)]  # shapes with values near 500 and -500, too
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "softmax"), np.random.default_rng()
        named_lanes(source)
        for rows, cols in shapes:
            at = f"rows = {rows}, cols = {cols}"
            x = rng.standard_normal((rows, cols)).astype(np.float32)
            _softmax(kernel, x, at)
            if (rows, cols) in largest:
                _softmax(kernel, x + 500, f"{at}, with values near 500")
                _softmax(kernel, x - 500, f"{at}, with values near -500")
        x = rng.standard_normal((5, 70)).astype(np.float32)
        x[:, rng.permutation(70)[:40]] = -np.inf
        _softmax(kernel, x, "rows = 5, cols = 70, with 40 columns of -inf")
        rows, cols = 64, 1024
        at = f"rows = {rows}, cols = {cols}"
        report = _softmax(kernel, rng.standard_normal((rows, cols)).astype(np.float32), at)
        wide_or_coalesced(report, at, ld=3 * 4 * rows * cols, st=4 * rows * cols)
        no_shared(report, at)
        for op, word, times in (("ld", "load", 3), ("st", "store", 1)):
            made, most = requests(report, op), times * rows * cols // 32
            exercise.require(
                made <= most,
                f"right, but at {at} the warps make {made:,} {word} requests; wanted: at most {most:,}, "
                f"{times} for each 32 elements",
            )
    return exercise.report(f"right on {len(shapes) + 2 * len(largest) + 2} cases, and every request is coalesced")


def _softmax(kernel, x, at):
    (rows, cols), before = x.shape, x.copy()
    y = unset((rows, cols))
    args = (x, y, np.int32(rows), np.int32(cols))
    report = launched(kernel, blocks_for(rows, WARPS), BLOCK, *args, at=at, check_races=x.size < 2000)
    powers = np.exp(before.astype(np.float64) - before.max(axis=1, keepdims=True))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    near("y", y, wanted, 2e-6, at)
    unchanged({"x": x}, {"x": before}, at)
    return report


# Exercise 3: find the bug


def exercise_3(source):
    """CUDA source of gemv."""
    exercise = Exercise("Exercise 3: find the bug")
    cases = [(8, 32, 1), (32, 64, 4), (64, 128, 8)]  # the author's
    shapes = [(1, 1), (1, 5), (8, 31), (7, 33), (9, 32), (16, 3), (17, 40), (40, 1), (65, 100), (100, 65)]
    cases += [(rows, cols, grid) for rows, cols in shapes for grid in (blocks_for(rows, WARPS), 1, 3)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "gemv"), np.random.default_rng()
        named_lanes(source)
        for rows, cols, grid in dict.fromkeys(cases):
            at = f"rows = {rows}, cols = {cols}, {counted(grid, 'block')}"
            if grid == 1:
                _gemv(kernel, np.ones((rows, cols), np.float32), np.ones(cols, np.float32), grid, at)
            _gemv(kernel, whole_numbers(rng, rows, cols), whole_numbers(rng, cols), grid, at)
        rows, cols, grid = 256, 128, 5
        at = f"rows = {rows}, cols = {cols}, {grid} blocks"
        report = _gemv(kernel, whole_numbers(rng, rows, cols), whole_numbers(rng, cols), grid, at)
        coalesced(report, at)
        made = requests(report, "st")
        exercise.require(
            made <= rows // WARPS,
            f"right, but at {at} the warps make {made} store requests; wanted: at most {rows // WARPS}, "
            "eight results in each, as before",
        )
    return exercise.report(f"right on {len(dict.fromkeys(cases))} cases, without a race, and stores are still shared")


def _gemv(kernel, W, x, grid, at):
    (rows, cols), before = W.shape, {"W": W.copy(), "x": x.copy()}
    y = unset(rows)
    report = launched(kernel, grid, BLOCK, W, x, y, np.int32(rows), np.int32(cols), at=at, check_races=W.size < 10_000)
    ones = " with W and x all ones" if (W == 1).all() and (x == 1).all() else ""
    compare("y", y, before["W"] @ before["x"], at + ones)
    unchanged({"W": W, "x": x}, before, at)
    return report


# Exercise 4: 16 bytes at a time, wherever a row begins


def exercise_4(source):
    """CUDA source of row_squares."""
    exercise = Exercise("Exercise 4: wide loads from any row")
    shapes = [(1, c) for c in range(1, 10)] + [(9, c) for c in (1, 2, 3, 4, 5, 6, 7, 8, 33, 127, 128, 129, 130, 131)]
    shapes += [(20, 257), (3, 1023), (5, 4099)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "row_squares"), np.random.default_rng()
        for rows, cols in shapes:
            _row_squares(kernel, rng, rows, cols)
        for cols in (4096, 4097, 4098, 4099):
            rows = 16
            at = f"rows = {rows}, cols = {cols}"
            report = _row_squares(kernel, rng, rows, cols)
            # beside the head and the tail, lanes with one word less than others may leave an unrolled loop early
            made, most = requests(report, "ld"), rows * (cols // 128 + (0 if cols % 128 == 0 else 6))
            exercise.require(
                made <= most,
                f"right, but at {at} the warps make {made:,} load requests; wanted: at most {most:,}, "
                "with 16 bytes for each lane" + (" and six more for the ends of a row" if cols % 128 else ""),
            )
            each = report.sectors_per_request("ld")
            exercise.require(
                each <= 17,
                f"right, but at {at} a load of a warp touches {each:.3g} sectors on average; wanted: at most 17, "
                "as many as 512 neighbouring bytes may lie in",
            )
    return exercise.report(f"right on {len(shapes) + 4} shapes, with a quarter of the requests")


def _row_squares(kernel, rng, rows, cols):
    at = f"rows = {rows}, cols = {cols}"
    W, out = whole_numbers(rng, rows, cols), unset(rows)
    before = W.copy()
    args = (W, out, np.int32(rows), np.int32(cols))
    report = launched(kernel, blocks_for(rows, WARPS), BLOCK, *args, at=at, check_races=W.size < 2000)
    compare("out", out, (before.astype(np.float64) ** 2).sum(axis=1), at)
    unchanged({"W": W}, {"W": before}, at)
    return report


# Exercise 5: transpose


def exercise_5(source):
    """CUDA source of transpose."""
    exercise = Exercise("Exercise 5: transpose")
    edges = (1, 5, 31, 32, 33, 65)
    shapes = sorted(((r, c) for r in edges for c in edges), key=lambda s: (s[0] * s[1], s)) + [(96, 64), (61, 200)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "transpose"), np.random.default_rng()
        for rows, cols in shapes:
            _transpose(kernel, rng, rows, cols)
        rows, cols = 128, 96
        at = f"rows = {rows}, cols = {cols}"
        report = _transpose(kernel, rng, rows, cols)
        coalesced(report, at)
        for op, word in (("ld", "load"), ("st", "store")):
            made, most = requests(report, op), rows * cols // 32
            exercise.require(
                made <= most,
                f"right, but at {at} the warps make {made:,} {word} requests; wanted: at most {most:,}",
            )
        exercise.require(
            report.bank_conflicts == 0,
            f"right and coalesced, but at {at} there are {report.bank_conflicts:,} bank conflicts in shared memory: "
            f"a load of a warp takes {report.wavefronts_per_request('ld'):.3g} wavefronts, a store "
            f"{report.wavefronts_per_request('st'):.3g}; wanted: 1 each",
        )
    return exercise.report(f"right on {len(shapes) + 1} shapes, coalesced both ways, without a bank conflict")


def _transpose(kernel, rng, rows, cols):
    at = f"rows = {rows}, cols = {cols}"
    A, B = whole_numbers(rng, rows, cols), unset((cols, rows))
    A += np.arange(rows * cols, dtype=np.float32).reshape(rows, cols) * 8  # so that no two are equal
    before = A.copy()
    grid = (blocks_for(cols, 32), blocks_for(rows, 32))
    args = (A, B, np.int32(rows), np.int32(cols))
    report = launched(kernel, grid, (32, 8), *args, at=at, check_races=A.size < 5000)
    compare("B", B, before.T, at)
    unchanged({"A": A}, {"A": before}, at)
    return report


# Exercise 6: RMSNorm, a block for each row

EPSILON = np.float32(1e-5)


def exercise_6(source):
    """CUDA source of rmsnorm."""
    exercise = Exercise("Exercise 6: RMSNorm by a block")
    shapes = [(1, 1), (1, 2), (2, 31), (3, 32), (2, 33), (1, 255), (2, 256), (3, 257), (2, 1000), (1, 1025)]
    cases = [(rows, cols, 256) for rows, cols in shapes]
    cases += [(rows, cols, block) for rows, cols in shapes[::3] for block in (32, 96)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "rmsnorm"), np.random.default_rng()
        named_lanes(source)
        for rows, cols, block in cases:
            _rmsnorm(kernel, rng, rows, cols, block)
        rows, cols, block = 4, 4096, 1024
        at = f"rows = {rows}, cols = {cols}, blocks of {block}"
        report = _rmsnorm(kernel, rng, rows, cols, block)
        wide_or_coalesced(report, at, ld=3 * 4 * rows * cols, st=4 * rows * cols)
        exercise.require(report.bank_conflicts == 0, f"right, but at {at} there are bank conflicts")
        made, most = requests(report, "ld"), 3 * rows * cols // 32
        exercise.require(
            made <= most,
            f"right, but at {at} the warps make {made:,} load requests; wanted: at most {most:,}: x twice, weight once",
        )
        made, most = sum(report.counters[SHARED.format(op)] for op in ("ld", "st")), 4 * rows * block // 32
        exercise.require(
            made <= most,
            f"right, but at {at} the warps make {made:,} requests to shared memory; wanted: at most {most:,}: "
            "shuffles first, and then a few for each warp",
        )
    return exercise.report(f"right on {len(cases) + 1} cases, without a race, with a sum in two steps")


def _rmsnorm(kernel, rng, rows, cols, block):
    at = f"rows = {rows}, cols = {cols}, blocks of {block}"
    x, weight = rng.standard_normal((rows, cols)).astype(np.float32), rng.random(cols, np.float32) + 0.5
    x *= np.float32(10.0) ** rng.integers(-2, 3, (rows, 1)).astype(np.float32)
    y, before = unset((rows, cols)), {"x": x.copy(), "weight": weight.copy()}
    args = (x, weight, y, np.int32(cols), EPSILON)
    report = launched(kernel, rows, block, *args, at=at, check_races=x.size < 3000)
    wide = before["x"].astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + float(EPSILON)) * before["weight"]
    near("y", y, wanted, 2e-6, at)
    unchanged({"x": x, "weight": weight}, before, at)
    return report
