"""The checks of chapter 13: how many places, a look-back, and protocols between blocks.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races, and starts blocks in any order.
"""

import warnings
from numbers import Integral

import numpy as np

import simt
from exercises.checks import array_from, call_text, counted, shown, time_limit
from exercises.checks.launches import STEPS, by_warp, compare, compiled, launched, near, unchanged, whole_numbers
from lab.check import differs, unset
from lab.exercise import Exercise, Wrong

EXACT = 1e-9  # of NumPy in float64


# Exercise 1: how many places


def _all_end(order, waits, places):
    left, running, ended = list(order), [], set()
    while True:
        while left and len(running) < places:
            running.append(left.pop(0))
        done = {p for p in running if set(waits[p]) <= ended}
        if not done:
            return not running
        running, ended = [p for p in running if p not in done], ended | done


def exercise_1(places_needed):
    """places_needed(order, waits) -> the smallest number of places, or None"""
    exercise = Exercise("Exercise 1: how many places")
    rng = np.random.default_rng()
    chain, back = {0: [], 1: [0], 2: [1]}, {s: list(range(s)) for s in range(4)}  # back: a look-back over all segments
    cases = [([0], {0: []}), ([0, 1, 2], chain), ([2, 1, 0], chain), ([1, 0, 2], chain), ([3, 0, 1, 2], back)]
    cases += [([0, 1], {0: [0], 1: []}), ([0, 1, 2, 3], {0: [], 1: [2], 2: [1], 3: []})]
    cases += [([0, 3, 1, 2], {0: [], 1: [0], 2: [], 3: [1, 2]}), ([4, 3, 0, 1, 2], {**back, 4: []})]
    for n in rng.integers(1, 9, 60).tolist():
        waits = {
            p: sorted(rng.choice(p, int(rng.integers(0, min(p, 3) + 1)), replace=False).tolist()) for p in range(n)
        }
        cases.append((rng.permutation(n).tolist(), waits))
    with exercise, time_limit():
        for order, waits in cases:
            wanted = next((places for places in range(1, len(order) + 1) if _all_end(order, waits, places)), None)
            call = call_text(places_needed, order, waits)
            got = places_needed(list(order), {p: list(w) for p, w in waits.items()})
            if got is not None and (isinstance(got, bool) or not isinstance(got, Integral)):
                raise Wrong(f"{call} gave {shown(got)}, expected a whole number or None")
            exercise.require(got == wanted, f"{call} gave {got}, expected {wanted}")
    return exercise.report(f"right in {len(cases)} cases")


# Exercise 2: look back


def _look_back_over(rng, segments, heads, cuts, lost=()):
    """published, initial, wanted: `cuts` and `lost` are (segment, head). What nobody may look at is NaN, and so is a
    number of each state that is lost, though it counts."""
    cut = np.zeros((segments, heads), bool)
    for place in cuts:
        cut[place] = True
    decays = np.where(cut, np.nan, rng.uniform(0, 1, (segments, heads)))
    states, initial = rng.standard_normal((segments, heads, 3)), rng.standard_normal((heads, 3))
    for place in lost:
        states[place][0] = np.nan
    wanted = initial.copy()
    for state, decay, ends in zip(states, decays, cut):
        wanted = np.where(ends[:, None], state, decay[:, None] * wanted + state)
    for head in range(heads):
        if cut[:, head].any():
            last = np.flatnonzero(cut[:, head])[-1]
            states[:last, head], decays[:last, head], initial[head] = np.nan, np.nan, np.nan
    return list(zip(states, decays, cut)), initial, wanted


def exercise_2(look_back):
    """look_back(published, initial) -> states"""
    exercise = Exercise("Exercise 2: look back")
    rng = np.random.default_rng()
    named = {  # segments, heads, cuts, states with a NaN that counts
        "no segment before": (0, 1, []),
        "one segment before": (1, 1, []),
        "three segments before": (3, 1, []),
        "a cut in the segment before": (2, 1, [(1, 0)]),
        "a cut two segments before": (3, 1, [(1, 0)]),
        "two cuts": (4, 1, [(0, 0), (2, 0)]),
        "two heads": (3, 2, []),
        "two heads, of which one is cut": (3, 2, [(1, 0)]),
        "two heads, cut in different segments": (4, 2, [(0, 1), (2, 0)]),
        "heads that are all cut": (3, 3, [(1, 0), (1, 1), (1, 2)]),
        "a cut in one head, and a NaN that counts in the other": (2, 2, [(1, 0)], [(0, 1)]),
    }
    for n, (segments, heads) in enumerate(rng.integers(1, 7, (6, 2)).tolist(), 1):
        cuts = [(s, h) for s in range(segments) for h in range(heads) if rng.random() < 0.2]
        drawn = f"{counted(segments, 'segment')}, {counted(heads, 'head')}, {counted(len(cuts), 'cut')}"
        named[f"draw {n}: {drawn}"] = segments, heads, cuts
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in named.items():
            published, initial, wanted = _look_back_over(rng, *case)
            given = [tuple(a.copy() for a in segment) for segment in published], initial.copy()
            got = look_back(*given)
            array = array_from(got, wanted.shape, f"with {name}")
            off = ~(np.abs(array - wanted) <= EXACT * np.maximum(1, np.abs(wanted)))
            off &= ~(np.isnan(array) & np.isnan(wanted))
            if off.any():
                i, j = (int(n) for n in np.argwhere(off)[0])
                why = " (NaN is what nobody may look at)" if np.isnan(array[i, j]) else ""
                raise Wrong(f"with {name}: {differs(f'states[{i}, {j}]', array[i, j], wanted[i, j])}{why}")
            same = all(
                np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                for old, new in zip([*published, (initial,)], [*given[0], (given[1],)])
                for a, b in zip(old, new)
            )
            exercise.require(same, f"with {name} your function changed what was published, or the initial states")
    return exercise.report(f"right in {len(named)} cases, and nothing in front of a cut was looked at")


# Exercise 3: find the bugs

TOKENS = 4  # of a chunk
PLAIN = " A loop that waits for another block must read the flag by an atomic, or through volatile"
# chunks, numbers, how blocks start: one place is enough, if blocks draw tickets
CHAINS = [
    (1, 32, {}),
    (2, 32, {}),
    (3, 64, {"order": "reverse"}),
    (2, 32, {"places": 1}),
    (3, 64, {"order": "reverse", "places": 1}),
    (5, 128, {"order": "reverse", "places": 3}),
    (9, 96, {"order": 13, "places": 2}),
]


def exercise_3(source):
    """CUDA source of look_back."""
    exercise = Exercise("Exercise 3: find the bugs")
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "look_back"), np.random.default_rng()
        for chunks, numbers, how in CHAINS:
            at = f"{counted(chunks, 'chunk')} of {numbers} numbers" + _started(how)
            _look_back(kernel, rng, chunks, numbers, at, how)
        _flag_before_the_wait(kernel)
    return exercise.report(f"right for {len(CHAINS)} chains, whatever the order of the blocks; no race")


def _started(how):
    """In which order blocks start, and how many fit, in words."""
    said = ""
    if "order" in how:
        said += ", blocks in reverse order" if how["order"] == "reverse" else ", blocks in another order"
    return said + (f", {counted(how['places'], 'place')}" if "places" in how else "")


def _look_back(kernel, rng, chunks, numbers, at, how):
    x = rng.standard_normal((chunks, TOKENS, numbers)).astype(np.float32)
    decay = rng.uniform(0, 1, chunks).astype(np.float32)
    starts, published = unset((chunks, numbers)), unset((chunks, numbers))
    flags, tickets = np.zeros(chunks, np.uint32), np.zeros(1, np.uint32)
    before = {"x": x.copy(), "decay": decay.copy()}
    args = (x, decay, starts, published, flags, tickets)
    report = launched(kernel, chunks, numbers, *args, at=at, check_races=True, by_warp=True, hint=PLAIN, **how)
    wanted, now = np.zeros((chunks, numbers)), np.zeros(numbers)
    for chunk in range(chunks):
        wanted[chunk], now = now, decay[chunk] * now + x[chunk].sum(axis=0, dtype=np.float64)
    near("starts", starts, wanted, 1e-5, at)
    unchanged({"x": x, "decay": decay}, before, at)
    made = by_warp(report)[:, 1:].sum()  # the first warp may also load flags, again and again
    most = (numbers // 32 - 1) * chunks * (TOKENS + chunks - 1)
    if made > most:
        raise Wrong(
            f"right, but at {at} the warps behind the first make {made:,} load requests; {most:,} are enough: each "
            "number of x once, and for each chunk before its own a decay and what that one has published"
        )


def _flag_before_the_wait(kernel):
    """Nobody has chunk 0, so the block that has chunk 1 waits forever. Its flag should be up all the same."""
    flags, tickets, decay = np.zeros(2, np.uint32), np.ones(1, np.uint32), np.ones(2, np.float32)
    try:
        kernel(1, 32, np.ones((2, TOKENS, 32), np.float32), decay, *unset((2, 2, 32)), flags, tickets, step_limit=STEPS)
    except simt.SimtError:
        pass
    if not flags[1]:
        raise Wrong(
            "right, but a block raises its flag only behind its wait: so chunks go one after another. What it has "
            "published needs nothing of the others"
        )


# Exercise 4: two waits

# rows, cols, numbers, how blocks start
TABLES = [
    (1, 1, 32, {}),
    (1, 4, 64, {}),
    (3, 1, 64, {"order": "reverse"}),
    (2, 2, 64, {"places": 1}),
    (3, 4, 96, {"order": "reverse", "places": 1}),
    (4, 3, 64, {"order": 13, "places": 3}),
]


def exercise_4(source):
    """CUDA source of best_path."""
    exercise = Exercise("Exercise 4: two waits")
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "best_path"), np.random.default_rng()
        for rows, cols, numbers, how in TABLES:
            at = f"{rows} × {cols} cells of {numbers} numbers" + _started(how)
            _best_path(kernel, rng, rows, cols, numbers, at, how)
        _waits_for_neighbours_only(kernel)
    return exercise.report(f"right for {len(TABLES)} tables, whatever the order of the blocks; no race")


def _best_path(kernel, rng, rows, cols, numbers, at, how):
    x, best = whole_numbers(rng, rows, cols, numbers), unset((rows, cols, numbers))
    before, args = x.copy(), (np.zeros(rows * cols, np.uint32), np.zeros(1, np.uint32), np.int32(rows), np.int32(cols))
    launched(kernel, rows * cols, numbers, x, best, *args, at=at, check_races=True, hint=PLAIN, **how)
    wanted = x.copy()
    for r, c in np.ndindex(rows, cols):
        ways = [wanted[r - 1, c]] * (r > 0) + [wanted[r, c - 1]] * (c > 0)
        wanted[r, c] += np.max(ways, axis=0) if ways else 0
    compare("best", best, wanted, at)
    unchanged({"x": x}, {"x": before}, at)


def _waits_for_neighbours_only(kernel):
    """In whatever order tickets go, of the four cells of a table the third one has the first for its only neighbour."""
    tickets, two = np.zeros(1, np.uint32), np.int32(2)
    args = np.ones((4, 32), np.float32), unset((4, 32)), np.zeros(4, np.uint32), tickets, two, two
    try:
        kernel(1, 32, *args, step_limit=STEPS)
        tickets[:] = 2
        kernel(1, 32, *args, step_limit=STEPS)
    except simt.SimtError:
        raise Wrong(
            "right, but a block waits for more than its neighbours: with 2 × 2 cells, of which the first is done, the "
            "block with ticket 2 waits for the one with ticket 1. So cells go one after another"
        ) from None
