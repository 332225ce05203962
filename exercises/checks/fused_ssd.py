"""The checks of chapter 13: shares of a line, who waits forever, a look-back, what counts, and a chain with a race.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races.
"""

import math
import re
import warnings

import numpy as np

from exercises.checks import call_text, number_from, shown, time_limit
from exercises.checks.launches import compiled, launched, near, unchanged
from lab.check import differs, unset
from lab.exercise import Exercise, Wrong

EXACT = 1e-9  # of NumPy in float64
# What puts memory in order, in PTX. The SIMT machine finds no fault without a fence behind the wait; a card may.
ORDERING = re.compile(r"^\s*(?:@\S+\s+)?(?:membar|fence|\w+(?:\.\w+)*\.(?:acquire|release|acq_rel))\b", re.M)


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


# Exercise 2: who waits forever


def _stuck(order, waits, room):
    left, running, ended = list(order), [], set()
    while True:
        while left and len(running) < room:
            running.append(left.pop(0))
        done = {p for p in running if set(waits[p]) <= ended}
        if not done:
            return sorted(running + left)
        running, ended = [p for p in running if p not in done], ended | done


def exercise_2(never_end):
    """never_end(order, waits, room) -> list of programs"""
    exercise = Exercise("Exercise 2: who waits forever")
    rng = np.random.default_rng()
    back = {s: list(range(s)) for s in range(4)}  # a look-back over all segments
    cases = [([0], {0: []}, 1), ([0, 1, 2], {0: [], 1: [0], 2: [1]}, 1), ([2, 1, 0], {0: [], 1: [0], 2: [1]}, 2)]
    cases += [([2, 1, 0], {0: [], 1: [0], 2: [1]}, 3), ([3, 0, 1, 2], back, 1), ([3, 0, 1, 2], back, 2)]
    cases += [([0, 1, 2, 3], {0: [], 1: [2], 2: [1], 3: []}, 4), ([0, 3, 1, 2], {0: [], 1: [0], 2: [], 3: [1, 2]}, 2)]
    for _ in range(60):
        n = int(rng.integers(1, 9))
        waits = {
            p: sorted(rng.choice(p, int(rng.integers(0, min(p, 3) + 1)), replace=False).tolist()) for p in range(n)
        }
        cases.append((rng.permutation(n).tolist(), waits, int(rng.integers(1, n + 1))))
    with exercise, time_limit():
        for order, waits, room in cases:
            wanted = _stuck(order, waits, room)
            call = call_text(never_end, order, waits, room)
            got = never_end(list(order), {p: list(w) for p, w in waits.items()}, room)
            if got is None:
                raise Wrong(f"{call} gave None. Does the function return its result?")
            if not isinstance(got, (list, tuple, set)):
                raise Wrong(f"{call} gave {shown(got)}, expected a list")
            try:
                same = sorted(got) == wanted
            except TypeError:
                same = False
            exercise.require(same, f"{call} gave {shown(got)}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 3: look back


def exercise_3(look_back):
    """look_back(published, initial) -> state"""
    exercise = Exercise("Exercise 3: look back")
    rng, nan = np.random.default_rng(), math.nan
    named = {
        "no segment before": ([], False),
        "one segment before": ([0.5], False),
        "three segments before": ([0.5, 0.25, 2.0], False),
        "a cut in the segment before": ([0.5, None], True),
        "a cut two segments before": ([0.5, None, 0.125], True),
        "two cuts": ([None, 0.5, None, 0.75], True),
        "a decay of 0": ([0.5, 0.0], False),
    }
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (decays, hidden) in named.items():
            published = [(rng.standard_normal((2, 3)), decay) for decay in decays]
            initial = rng.standard_normal((2, 3))
            if hidden:  # nothing in front of the last cut may be looked at
                cut = max(n for n, decay in enumerate(decays) if decay is None)
                published[:cut] = [(np.full((2, 3), nan), decay) for _, decay in published[:cut]]
                initial = np.full((2, 3), nan)
            before = [state.copy() for state, _ in published], initial.copy()
            got = look_back(published, initial)
            wanted = before[1] if not hidden else np.zeros((2, 3))
            for state, decay in zip(before[0], decays):
                wanted = state if decay is None else decay * wanted + state
            if got is None:
                raise Wrong(f"with {name} your function gave None. Does it return its result?")
            try:
                array = np.asarray(got, float)
            except (TypeError, ValueError):
                raise Wrong(f"with {name} your function gave {shown(got)}, expected an array") from None
            exercise.require(array.shape == (2, 3), f"with {name} the result has shape {array.shape}, expected (2, 3)")
            off = ~(np.abs(array - wanted) <= EXACT * np.maximum(1, np.abs(wanted)))
            if off.any():
                i, j = (int(n) for n in np.argwhere(off)[0])
                raise Wrong(f"with {name}: {differs(f'state[{i}, {j}]', array[i, j], wanted[i, j])}")
            same = all(np.array_equal(a, b, equal_nan=True) for a, (b, _) in zip(before[0], published))
            exercise.require(same and np.array_equal(initial, before[1], equal_nan=True),
                             f"with {name} your function changed what was published, or the initial state")  # fmt: skip
    return exercise.report(f"right in {len(named)} cases, and nothing in front of a cut was looked at")


# Exercise 4: what counts


def _counting(dt, A, Q, bits):
    n = len(dt) // Q
    logs = (A * dt).reshape(n, Q).sum(1) / math.log(2)
    count, after = 0, 0.0
    for log in logs[::-1]:
        if after < -bits:
            break
        count, after = count + 1, after + log
    return count


def exercise_4(chunks_that_count):
    """chunks_that_count(dt, A, Q, bits) -> how many"""
    exercise = Exercise("Exercise 4: what counts")
    rng = np.random.default_rng()
    ln2 = math.log(2)
    cases = [([1.0] * 4, -0.1, 4, 64), ([1.0] * 8, -17 * ln2, 4, 64), ([1.0] * 12, -15 * ln2, 4, 64)]
    cases += [([9.0] * 8 + [0.001] * 8, -8.0, 4, 64), ([0.001] * 8 + [9.0] * 8, -8.0, 4, 64)]
    cases += [([1.0] * 8 + [0.0] * 8, -100.0, 4, 64), ([1.0, math.nan] + [0.01] * 14, -1.0, 4, 64)]
    cases += [([0.01] * 9 + [math.nan] + [0.01] * 6, -1.0, 4, 64)]
    cases += [([9.0] * 8 + [0.01, math.nan] + [0.01] * 6, -8.0, 4, 64)]
    cases += [([5.0] * 6 + [math.nan] + [5.0] * 9, -8.0, 4, 64), ([1.0] * 64, -0.25 * ln2, 8, 7)]
    for _ in range(30):
        Q, n = int(rng.integers(1, 9)), int(rng.integers(1, 20))
        cases.append((rng.uniform(0, 1, n * Q).tolist(), -float(rng.uniform(0.1, 20)), Q, int(rng.integers(1, 100))))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dt, A, Q, bits in cases:
            dt = np.array(dt)
            got, wanted = number_from(chunks_that_count, dt.copy(), A, Q, bits, whole=True), _counting(dt, A, Q, bits)
            name = getattr(chunks_that_count, "__name__", "your function")
            call = f"{name}(dt, {A:.4g}, {Q}, {bits}) with dt = {shown(dt.round(3).tolist())}"
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 5: find the bugs


def exercise_5(source):
    """CUDA source of hand_on."""
    exercise = Exercise("Exercise 5: find the bugs")
    sizes = [(1, 32), (2, 32), (3, 64), (5, 128), (8, 64)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "hand_on"), np.random.default_rng()
        for chunks, numbers in sizes:
            at = f"chunks = {chunks}, {numbers} numbers"
            added = rng.standard_normal((chunks, numbers)).astype(np.float32)
            decay = rng.uniform(0, 1, chunks).astype(np.float32)
            counters, starts = np.zeros(2, np.uint32), unset((chunks, numbers))
            state = unset(numbers)
            arrays = {"added": added, "decay": decay}
            before = {name: a.copy() for name, a in arrays.items()}
            launched(
                kernel, chunks, numbers, added.reshape(-1), decay, starts.reshape(-1), state, counters,
                at=at, check_races=True,
            )  # fmt: skip
            wanted, now = np.zeros((chunks, numbers)), np.zeros(numbers)
            for chunk in range(chunks):
                wanted[chunk], now = now, decay[chunk] * now + added[chunk]
            near("starts", starts, wanted, 1e-5, at)
            near("state", state, now, 1e-5, at)
            unchanged(arrays, before, at)
        ordering = len(ORDERING.findall(kernel.module.ptx))
        missing = "the numbers are right, but there must be a fence behind the wait and one before the release, or"
        exercise.require(ordering >= 2, f"{missing} an acquire and a release: found {ordering}")
    return exercise.report(f"right for {len(sizes)} chains, no race")
