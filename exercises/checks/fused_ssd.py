"""The checks of chapter 15: shares of a line, and what counts of a segment."""

import math
import warnings

import numpy as np

from exercises.checks import call_text, number_from, shown, time_limit
from lab.exercise import Exercise, Wrong

# Exercise 1: shares of a line


def _cut_line(pairs, chunks, limit, again):
    lengths, total = [], pairs * chunks
    while (begin := sum(lengths)) < total:
        longest = 0
        for length in range(1, total - begin + 1):
            twice = min(length, (begin + length) % chunks)  # 0 at the end of a pair
            if length + again * twice <= limit:
                longest = length
        lengths.append(longest)
    return lengths


def exercise_1(cut_line):
    """cut_line(pairs, chunks, limit, again) -> list of chunks a share"""
    exercise = Exercise("Exercise 1: shares of a line")
    rng = np.random.default_rng()
    cases = [(1, 1, 1.5, 0.5), (1, 4, 4.0, 0.5), (1, 7, 3.0, 0.0), (1, 7, 3.0, 0.5), (2, 10, 9.0, 0.5)]
    cases += [(2, 10, 10.0, 0.5), (3, 4, 100.0, 0.5), (2, 5, 1.5, 0.5), (5, 1, 3.0, 0.5), (4, 12, 16.0, 0.375)]
    for _ in range(30):
        pairs, chunks, eighths, more = (
            int(rng.integers(low, high)) for low, high in ((1, 7), (1, 13), (0, 9), (0, 160))
        )
        cases.append((pairs, chunks, 1 + (eighths + more) / 8, eighths / 8))  # exact in binary
    with exercise, time_limit():
        for case in cases:
            call, wanted = call_text(cut_line, *case), _cut_line(*case)
            got = cut_line(*case)
            if got is None:
                raise Wrong(f"{call} gave None. Does the function return its result?")
            if not isinstance(got, (list, tuple)) and not (isinstance(got, np.ndarray) and got.ndim):
                raise Wrong(f"{call} gave {shown(got)}, expected a list")
            same = len(got) == len(wanted) and all(np.ndim(a) == 0 and a == b for a, b in zip(got, wanted))
            exercise.require(same, f"{call} gave {shown(got)}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 2: what counts


def _counting(dt, A, Q, bits):
    n = len(dt) // Q
    logs = (A * dt).reshape(n, Q).sum(1) / math.log(2)
    count, after = 0, 0.0
    for log in logs[::-1]:
        if after < -bits:
            break
        count, after = count + 1, after + log
    return count


def exercise_2(chunks_that_count):
    """chunks_that_count(dt, A, Q, bits) -> how many"""
    exercise = Exercise("Exercise 2: what counts")
    rng = np.random.default_rng()
    ln2 = math.log(2)
    cases = [([1.0] * 4, -0.1, 4, 64), ([1.0] * 8, -17 * ln2, 4, 64), ([1.0] * 12, -15 * ln2, 4, 64)]
    cases += [([9.0] * 8 + [0.001] * 8, -8.0, 4, 64), ([0.001] * 8 + [9.0] * 8, -8.0, 4, 64)]
    cases += [([1.0] * 8 + [0.0] * 8, -100.0, 4, 64), ([1.0, math.nan] + [0.01] * 14, -1.0, 4, 64)]
    cases += [([0.01] * 9 + [math.nan] + [0.01] * 6, -1.0, 4, 64)]
    cases += [([9.0] * 8 + [0.01, math.nan] + [0.01] * 6, -8.0, 4, 64)]
    cases += [([5.0] * 6 + [math.nan] + [5.0] * 9, -8.0, 4, 64), ([1.0] * 64, -0.25 * ln2, 8, 7)]
    cases += [([1.0] * 4 + [0.0] * 4, -1.0, 2, 0)]  # a decay of 1 is not below 2^0
    for _ in range(30):
        Q, n = int(rng.integers(1, 9)), int(rng.integers(1, 20))
        cases.append((rng.uniform(0, 1, n * Q).tolist(), -float(rng.uniform(0.1, 20)), Q, int(rng.integers(0, 100))))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dt, A, Q, bits in cases:
            dt = np.array(dt)
            got, wanted = number_from(chunks_that_count, dt.copy(), A, Q, bits, whole=True), _counting(dt, A, Q, bits)
            name = getattr(chunks_that_count, "__name__", "your function")
            call = f"{name}(dt, {A:.4g}, {Q}, {bits}) with dt = {shown(dt.round(3).tolist())}"
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")
