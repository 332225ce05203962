"""Checks of chapter 05, fusion.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races. A check launches a kernel once for each
result, so the number of launches is given. Requests are counted: nothing is to be loaded twice, and results are to be
stored together.
"""

import numbers

import numpy as np

from exercises.checks import call_text, counted, number_from, shown, time_limit
from exercises.checks.launches import (
    blocks_for,
    coalesced,
    compare,
    compiled,
    in_registers,
    launched,
    near,
    requests,
    unchanged,
    whole_numbers,
)
from lab.check import unset
from lab.exercise import Exercise, Wrong

WARPS, BLOCK = 8, 256  # warps and threads of a block, where nothing else is said
TOLERANCE = 1e-4  # over the largest result: more than fp32 sums lose, less than 16 bits do


def at_most(report, op, most, at, why):
    """Raise Wrong if the warps make more requests than that. op: "ld" or "st"."""
    made, word = requests(report, op), {"ld": "load", "st": "store"}[op]
    if made > most:
        raise Wrong(f"right, but at {at} the warps make {made:,} {word} requests; {most:,} are enough: {why}")


def no_atomics(report, at):
    """Raise Wrong if the kernel uses atomics on global memory: neither loads nor stores, they would not be counted."""
    made = requests(report, "red") + requests(report, "atom")
    if made:
        raise Wrong(f"right, but at {at} the warps make {made:,} atomic requests; wanted: none, loads and stores only")


def away_from_zero(rng, *shape, signs=True):
    """Random float32 numbers between 0.5 and 1.5, and their negatives: beside their squares, eps is small."""
    numbers = rng.uniform(0.5, 1.5, shape) * (rng.choice([-1, 1], shape) if signs else 1)
    return numbers.astype(np.float32)


# Exercise 1: what does it save?


def exercise_1(unfused_cost, fused_cost, tokens_for_half):
    """Launches and bytes of a feed-forward block with biases."""
    exercise = Exercise("Exercise 1: what does it save?")
    rng = np.random.default_rng()
    cases = [(1, 1, 1, 1), (1, 1, 2, 1), (3, 1, 1, 1), (1, 5, 1, 1), (1, 1, 1, 2), (768, 3072, 1, 2)]
    cases += [tuple(int(n) for n in rng.integers(1, [5000, 20000, 5000, 9])) for _ in range(50)]
    with exercise, time_limit():
        for function, launches, of_hidden, of_ffn in ((unfused_cost, 7, 9, 6), (fused_cost, 2, 3, 2)):
            for case in cases:
                hidden, ffn, tokens, size = case
                weights, vectors = 2 * hidden * ffn + 2 * hidden + ffn, of_hidden * hidden + of_ffn * ffn
                call, (count, moved) = call_text(function, *case), _pair(function, *case)
                exercise.require(count == launches, f"{call} counts {count} launches, expected {launches}")
                wanted = size * (weights + tokens * vectors)
                exercise.require(
                    moved == wanted,
                    f"{call} counts {moved:,} bytes, expected {wanted:,}: {weights:,} weights and {vectors:,} "
                    f"numbers of vectors for each token, {counted(size, 'byte')} each",
                )
        for hidden, ffn in [(1, 1), (1, 2), (2, 1), *(case[:2] for case in cases)]:
            weights, less = 2 * hidden * ffn + 2 * hidden + ffn, 3 * hidden + 2 * ffn
            got, wanted = number_from(tokens_for_half, hidden, ffn, whole=True), -(-weights // less)
            exercise.require(
                got == wanted,
                f"{call_text(tokens_for_half, hidden, ffn)} gave {got:,}, expected {wanted:,}: the smallest number of "
                "tokens with which the fused block moves at most half of the unfused block's bytes",
            )
    return exercise.report(f"right for {len(cases)} blocks, from one token to thousands")


def _pair(function, *args):
    """(launches, bytes) as the learner's function gives them."""
    got, call = function(*args), call_text(function, *args)
    if got is None:
        raise Wrong(f"{call} gave None. Does the function return its result?")
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{call} gave {shown(got)}, expected a pair (launches, bytes)")
    if not all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in got):
        raise Wrong(f"{call} gave {shown(got)}, expected two whole numbers (// divides without a remainder)")
    return int(got[0]), int(got[1])


# Exercise 2: a wide epilogue


def exercise_2(source):
    """CUDA source of bias_residual."""
    exercise = Exercise("Exercise 2: a wide epilogue")
    rng = np.random.default_rng()
    shapes = [(1, 1), (31, 5), (32, 32), (33, 7), (65, 33), (100, 130), (int(rng.integers(400, 600)), 9)]
    with exercise, time_limit(60):
        kernel = compiled(source, "bias_residual")
        for rows, cols in shapes:
            _bias_residual(kernel, rng, rows, cols)
        rows, cols = 256, 96
        at = f"rows = {rows}, cols = {cols}"
        report = _bias_residual(kernel, rng, rows, cols)
        blocks, inner = rows // 32, 2 * rows * cols // 32
        no_atomics(report, at)
        at_most(report, "st", blocks, at, "one for the 32 results of a block")
        at_most(
            report, "ld", inner + 2 * blocks, at, "those of the loop, and for each block one for h and one for bias"
        )
        coalesced(report, at)
    return exercise.report(f"right on {len(shapes) + 1} shapes, and a block loads and stores its 32 results in one go")


def _bias_residual(kernel, rng, rows, cols):
    at = f"rows = {rows}, cols = {cols}"
    W, x, bias, h = (whole_numbers(rng, *shape) for shape in ((rows, cols), (cols,), (rows,), (rows,)))
    bias[bias + W @ x == 0] += 5  # an element to which nothing is added would not show that it was left out
    wanted, before = h + bias + W @ x, {"W": W.copy(), "x": x.copy(), "bias": bias.copy()}
    args = (W, x, bias, h, np.int32(rows), np.int32(cols))
    report = launched(kernel, blocks_for(rows, 32), 1024, *args, at=at, check_races=rows <= 100)
    compare("h", h, wanted, at)
    unchanged({"W": W, "x": x, "bias": bias}, before, at)
    return report


# Exercise 3: add and norm

MOST_COLS = 4096


def exercise_3(source):
    """CUDA source of add_norm."""
    exercise = Exercise("Exercise 3: add and norm")
    rng = np.random.default_rng()
    shapes = [(1, 1), (1, 2), (3, 31), (2, 33), (1, 255), (2, 256), (1, 257), (int(rng.integers(6, 20)), 300)]
    with exercise, time_limit(60):
        kernel = compiled(source, "add_norm")
        for tokens, cols in shapes:
            _add_norm(kernel, rng, tokens, cols, 1.0)
        _add_norm(kernel, rng, 2, 96, 1e-3)  # mean squares around 1e-6: eps decides
        _add_norm(kernel, rng, 1, 64, 0.0)
        for tokens, cols in ((3, 1024), (3, 1000), (2, MOST_COLS)):
            at = f"tokens = {tokens}, cols = {cols}"
            report = _add_norm(kernel, rng, tokens, cols, 1.0)
            pieces = tokens * blocks_for(cols, 32)
            no_atomics(report, at)
            at_most(report, "ld", 3 * pieces, at, "each number of h, delta and weight once")
            at_most(report, "st", 2 * pieces, at, "each number of h and delta once")
            coalesced(report, at)
        in_registers(kernel, at)
    return exercise.report(f"right in {len(shapes) + 5} cases, and each number is loaded once and stored once")


def _add_norm(kernel, rng, tokens, cols, size):
    at = f"tokens = {tokens}, cols = {cols}" + (f", with numbers around {size:g}" if size != 1 else "")
    h, delta, weight = (away_from_zero(rng, *shape) for shape in ((tokens, cols), (tokens, cols), (cols,)))
    h, delta = np.float32(size) * h, np.float32(size) * np.copysign(delta, h)  # so that no sum is nearly 0
    stream, eps, before = h + delta, 1e-5, weight.copy()
    exact = stream.astype(np.float64)
    normed = exact / np.sqrt((exact**2).mean(1, keepdims=True) + eps) * weight
    args = (h, delta, weight, np.int32(cols), np.float32(eps))
    report = launched(kernel, tokens, BLOCK, *args, at=at, check_races=cols <= 1000)
    compare("h", h, stream, at)
    near("delta", delta, normed, TOLERANCE, at)
    unchanged({"weight": weight}, {"weight": before}, at)
    return report


# Exercise 4: find the bug


def exercise_4(source):
    """CUDA source of norm_residual."""
    exercise = Exercise("Exercise 4: find the bug")
    rng = np.random.default_rng()
    sizes = [1, 2, 7, 8, 9, 31, 33, 100, int(rng.integers(400, 600))]
    with exercise, time_limit(60):
        kernel = compiled(source, "norm_residual")
        for n in sizes:
            _norm_residual(kernel, rng, n, 1.0)
        for size in (1e-3, 0.0):
            _norm_residual(kernel, rng, 40, size)
        n = 96
        at = f"n = {n}"
        report = _norm_residual(kernel, rng, n, 1.0)
        most = 4 * n * n // 32  # W, h and g for each row, the squares for each block, and the residual
        at_most(report, "ld", most, at, "the launch reads little more than W, h and g for each row")
    return exercise.report(f"right for {len(sizes) + 3} cases, without a race")


def _norm_residual(kernel, rng, n, size):
    at = f"n = {n}" + (f", with numbers around {size:g} in h" if size != 1 else "")
    signs = n > 10  # a few terms may cancel, and nearly nothing would be left to compare
    W, g, h = (away_from_zero(rng, *shape, signs=signs) for shape in ((n, n), (n,), (n,)))
    h, out, eps = np.float32(size) * h, unset(n), 1e-5
    before, exact = {"W": W.copy(), "g": g.copy(), "h": h.copy()}, h.astype(np.float64)
    wanted = exact + W.astype(np.float64) @ (exact / np.sqrt((exact**2).mean() + eps) * g)
    args = (W, g, h, out, np.int32(n), np.float32(eps))
    report = launched(kernel, blocks_for(n, WARPS), BLOCK, *args, at=at, check_races=n <= 100)
    unchanged({"W": W, "g": g, "h": h}, before, at)
    near("out", out, wanted, TOLERANCE, at)
    return report


# Exercise 5: LayerNorm, folded


def exercise_5(source):
    """CUDA source of layer_norm_gemv."""
    exercise = Exercise("Exercise 5: LayerNorm, folded")
    rng = np.random.default_rng()
    shapes = [(1, 1), (3, 31), (8, 32), (9, 33), (17, 100), (70, 9), (9, int(rng.integers(520, 800)))]
    with exercise, time_limit(60):
        kernel = compiled(source, "layer_norm_gemv")
        for rows, cols in shapes:
            _layer_norm_gemv(kernel, rng, rows, cols)
        for constant in (2, 33.3):
            _layer_norm_gemv(kernel, rng, 10, 64, constant=constant)
        _layer_norm_gemv(kernel, rng, 10, 64, size=1e-3)
        rows, cols = 64, 512
        at = f"rows = {rows}, cols = {cols}"
        report = _layer_norm_gemv(kernel, rng, rows, cols)
        most = 4 * rows * cols // 32 + 2 * rows
        at_most(report, "ld", most, at, "a warp loads its row of W, and x, g and b once")
        at_most(report, "st", rows, at, "one for each row")
        coalesced(report, at)
    return exercise.report(f"right in {len(shapes) + 4} cases, in one launch that loads nothing twice")


def _layer_norm_gemv(kernel, rng, rows, cols, *, constant=None, size=1.0):
    """x has a mean of about twice its spread. Where it has no spread, whole numbers make all sums exact, and others
    leave a variance that rounding may have made negative."""
    at, tolerance = f"rows = {rows}, cols = {cols}", 2e-4  # E[x²] − mean² loses some digits
    shapes = (rows, cols), (cols,), (cols,), (cols,)
    if constant:
        at += f", with all of x {constant:g}"
        W, x, g, b = (whole_numbers(rng, *shape) for shape in shapes)
        x[:], tolerance = constant, 2e-4 if constant % 1 == 0 else 0.1
    elif cols == 1:
        W, x, g, b = (whole_numbers(rng, *shape) for shape in shapes)
    else:
        W, x, g, b = (away_from_zero(rng, *shape) for shape in shapes)
        x = np.float32(size) * (x + 2)
    if size != 1:
        at += f", with numbers around {size:g} in x"
    out, eps = unset(rows), 1e-5
    arrays = {"W": W, "x": x, "g": g, "b": b}
    before, exact = {name: a.copy() for name, a in arrays.items()}, x.astype(np.float64)
    normed = (exact - exact.mean()) / np.sqrt(exact.var() + eps) * g + b
    args = (W, x, g, b, out, np.int32(rows), np.int32(cols), np.float32(eps))
    report = launched(kernel, blocks_for(rows, WARPS), BLOCK, *args, at=at, check_races=rows * cols < 2000)
    near("out", out, W.astype(np.float64) @ normed, tolerance, at)
    unchanged(arrays, before, at)
    return report
