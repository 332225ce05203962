"""Checks of chapter 10: freed pages, shared prefixes, merging, shares; and by name those of its other modules.

Exercise 2, an allocator, is in paged_pool.py; 6 and 7, which are kernels, are in paged_kernels.py.
"""

import contextlib
import itertools
import numbers
import warnings

import numpy as np

from exercises.checks import array_from, call_text, counted, shown, time_limit
from exercises.checks.costs import garbage_in_empty, limited_steps
from exercises.checks.paged_kernels import exercise_6, exercise_7
from exercises.checks.paged_pool import exercise_2
from lab.check import differs
from lab.exercise import Exercise, Wrong

__all__ = [
    "exercise_1",
    "exercise_2",
    "exercise_3",
    "exercise_4",
    "exercise_5",
    "exercise_6",
    "exercise_7",
]
EXACT = 1e-9

# Exercise 1: a freed page

GARBAGE = {"NaN": np.nan, "infinity": np.inf, "1e300": 1e300, "zeros": 0.0}


def exercise_1(last_pages):
    """last_pages(q, k, v, lens) -> (out (n, head_dim), lse (n,))"""
    exercise = Exercise("Exercise 1: a freed page")
    rng = np.random.default_rng()
    cases = [((1, 4, 2), [3]), ((1, 4, 2), [4]), ((1, 4, 2), [0]), ((2, 4, 3), [0, 4]), ((5, 16, 8), [1, 16, 0, 7, 15])]
    cases.append(((40, 16, 8), rng.integers(0, 17, 40).tolist()))
    with exercise, time_limit(), warnings.catch_warnings(), garbage_in_empty():
        warnings.simplefilter("error")
        for (n, page, dim), lens in cases:
            for what, garbage in GARBAGE.items():
                _last_pages(last_pages, rng, (n, page, dim), lens, garbage, f"lens {shown(lens)}, {what} behind them")
        warnings.simplefilter("ignore")
        _last_pages(last_pages, rng, (2, 4, 3), [3, 4], np.nan, "a NaN in a value that counts", seen=True)
        _last_pages(last_pages, rng, (300, 4, 2), [3] * 300, np.nan, "300 requests", most=200)
    return exercise.report(f"right in {4 * len(cases) + 2} cases, whatever was left in the pages")


def _last_pages(last_pages, rng, sizes, lens, garbage, at, seen=False, most=None):
    n, page, dim = sizes
    q, k, v = (rng.standard_normal(shape) for shape in ((n, dim), (n, page, dim), (n, page, dim)))
    lens = np.array(lens)
    for row, tokens in enumerate(lens):
        k[row, tokens:], v[row, tokens:] = garbage, garbage
    if seen:
        v[0, 1, 2] = np.nan
    wanted, lse = np.zeros((n, dim)), np.full(n, -np.inf)
    for row, tokens in enumerate(lens):
        if tokens:
            s = k[row, :tokens] @ q[row]
            p = np.exp(s - s.max())
            wanted[row], lse[row] = p @ v[row, :tokens] / p.sum(), s.max() + np.log(p.sum())
    before, given = [a.copy() for a in (q, k, v, lens)], (q, k, v, lens)
    problem = "your function loops over requests or tokens; expected: operations on all pages at once"
    try:
        with limited_steps(most, problem) if most else contextlib.nullcontext():
            got = last_pages(*given)
    except (RuntimeWarning, FloatingPointError) as problem:
        raise Wrong(f"with {at}: {problem}") from None
    for name, a, old in zip(("q", "k", "v", "lens"), given, before):
        if not np.array_equal(a, old, equal_nan=True):
            raise Wrong(f"with {at}: your function wrote to {name}; the page may be another's by now")
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"with {at} your function gave {shown(got)}, expected a pair (out, lse)")
    _same(array_from(got[0], wanted.shape, f"with {at}"), wanted, "out", f"with {at}")
    _same(array_from(got[1], lse.shape, f"with {at}", "lse"), lse, "lse", f"with {at}")


def _same(got, wanted, name, at):
    """Raise Wrong unless both are alike to 9 digits; NaN and infinities where they are wanted."""
    with np.errstate(invalid="ignore"):
        near = np.abs(got - wanted) <= EXACT * np.maximum(1, np.abs(np.where(np.isfinite(wanted), wanted, 1)))
    bad = np.argwhere(~(near | (got == wanted) | np.isnan(got) & np.isnan(wanted)))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise Wrong(f"{at}: " + differs(f"{name}[{', '.join(map(str, place))}]", got[place], wanted[place]))


# Exercise 3: when a prefix pays

MOST = 4096
H200 = {"read": 4.6e12, "flops": 6.5e14}


def exercise_3(prefix_pays):
    """prefix_pays(prefix, suffix, heads, kv_heads, head_dim, read, flops, merge) -> (pays, limit)"""
    exercise = Exercise("Exercise 3: when a prefix pays")
    rng = np.random.default_rng()
    cases = [
        ((32768, 640, 32, 8, 128), H200, 5e-6),
        ((1024, 640, 32, 8, 128), H200, 5e-6),
        ((64, 640, 32, 8, 128), H200, 5e-6),
        ((64, 640, 32, 8, 128), H200, 5e-3),
        ((4096, 0, 32, 32, 128), H200, 5e-6),
        ((4096, 100_000, 32, 8, 128), H200, 5e-6),
        ((4096, 64, 64, 8, 64), {"read": 4e12, "flops": 1e12}, 0.0),
        ((4096, 64, 8, 8, 128), H200, 0.0),
    ]
    for _ in range(20):
        kv_heads = int(rng.integers(1, 9))
        sizes = int(rng.integers(16, 50_000)), int(rng.integers(0, 3000)), kv_heads * int(rng.integers(1, 9)), kv_heads
        speeds = {"read": float(rng.uniform(1, 8)) * 1e12, "flops": float(rng.uniform(2, 900)) * 1e12}
        cases.append(((*sizes, 128), speeds, float(rng.uniform(0, 3e-5))))
    with exercise, time_limit(30):
        for sizes, speeds, merge in cases:
            args = (*sizes, speeds["read"], speeds["flops"], merge)
            alone, by_bytes, by_flops = _prefix_times(*args)
            together = np.maximum(by_bytes, by_flops) + merge
            if np.any(np.abs(together / alone - 1) < 1e-9) or np.any(np.abs(by_flops / by_bytes - 1) < 1e-9):
                continue  # too close to tell
            wanted = _first(together < alone), _first(by_flops > by_bytes)
            call, got = call_text(prefix_pays, *args), prefix_pays(*args)
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{call} gave {shown(got)}, expected a pair (pays, limit)")
            for name, mine, right in zip(("pays", "limit"), got, wanted):
                if mine is not None and (isinstance(mine, bool) or not isinstance(mine, numbers.Integral)):
                    raise Wrong(f"{call}: {name} is {shown(mine)}, expected a whole number or None")
                exercise.require(mine == right, f"{call}: {name} is {mine}, expected {right}")
    return exercise.report(f"right in {len(cases)} cases")


def _prefix_times(prefix, suffix, heads, kv_heads, head_dim, read, flops, merge):
    n, token = np.arange(1, MOST + 1), 4 * kv_heads * head_dim
    alone, once = n * (prefix + suffix) * token / read, (prefix + n * suffix) * token / read
    return alone, once, 4.0 * n * prefix * head_dim * heads / flops


def _first(where):
    return int(np.argmax(where)) + 1 if where.any() else None


# Exercise 4: merge


def exercise_4(merge_rows):
    """merge_rows(out, lse, begins) -> (out (rows, head_dim), lse (rows,))"""
    exercise = Exercise("Exercise 4: rows of any number of parts")
    rng, inf = np.random.default_rng(), np.inf
    cases = [  # parts of each row, their lse
        ([2], [0.0, np.log(3)]),
        ([1], [-7.0]),
        ([0], []),
        ([2, 0, 1], [1.0, 4.0, 2.0]),
        ([0, 3, 0], [5000.0, 5001.5, 4990.0]),
        ([2, 2], [-5000.0, -5002.0, 900.0, -900.0]),
        ([3], [-inf, 2.0, -inf]),
        ([2, 1], [-inf, -inf, 3.0]),
        ([1, 0, 2, 0], [-inf, 1.0, -inf]),
    ]
    for _ in range(8):
        counts = rng.integers(0, 6, rng.integers(1, 12)).tolist()
        lse = rng.uniform(-40, 40, sum(counts))
        lse[rng.random(len(lse)) < 0.2] = -inf
        cases.append((counts, lse.tolist()))
    with exercise, time_limit(), warnings.catch_warnings(), garbage_in_empty():
        warnings.simplefilter("error")
        for counts, lse in cases:
            _merge_rows(merge_rows, rng, counts, np.array(lse, float))
    return exercise.report(f"right in {len(cases)} cases, empty rows and empty parts among them")


def _merge_rows(merge_rows, rng, counts, lse):
    at = f"with {' + '.join(map(str, counts))} parts and the lse {shown([round(float(x), 3) for x in lse], 50)}"
    begins = np.array([0, *itertools.accumulate(counts)])
    out = rng.standard_normal((len(lse), 3)) + 2
    out[lse == -np.inf] = np.nan  # nobody wrote there
    wanted, total = np.zeros((len(counts), 3)), np.full(len(counts), -np.inf)
    for row, (first, last) in enumerate(zip(begins, begins[1:])):
        there = [i for i in range(first, last) if lse[i] > -np.inf]
        if there:
            weights = np.exp(lse[there] - max(lse[there]))
            wanted[row] = weights @ out[there] / weights.sum()
            total[row] = max(lse[there]) + np.log(weights.sum())
    given = out.copy(), lse.copy(), begins.copy()
    try:
        got = merge_rows(*given)
    except (RuntimeWarning, FloatingPointError) as problem:
        raise Wrong(f"{at}: {problem}") from None
    for name, a, old in zip(("out", "lse", "begins"), given, (out, lse, begins)):
        if not np.array_equal(a, old, equal_nan=True):
            raise Wrong(f"{at}: your function wrote to {name}, which it should only read")
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{at} your function gave {shown(got)}, expected a pair (out, lse)")
    _same(array_from(got[0], wanted.shape, at), wanted, "out", at)
    _same(array_from(got[1], total.shape, at, "lse"), total, "lse", at)


# Exercise 5: a block's share


def exercise_5(share):
    """share(tiles, blocks, block) -> [(row, first, count, place), ...]"""
    exercise = Exercise("Exercise 5: a share that a block finds alone")
    rng = np.random.default_rng()
    cases = [([5], 1), ([5], 2), ([9, 9, 9], 7), ([0], 3), ([2], 5), ([0, 3, 0, 0, 1, 0], 2), ([4, 4], 2), ([1] * 9, 4)]
    cases += [(rng.integers(0, 30, 20).tolist(), 13), ([8192, *[64] * 63], 132), ([1, 0, 1], 132)]
    cases += [(rng.integers(0, high, rng.integers(1, 30)).tolist(), int(rng.integers(1, 40))) for high in (3, 9, 200)]
    with exercise, time_limit(30):
        large = [3 * 10**12 + 1, 0, 10**12]
        for number, (tiles, blocks) in enumerate(cases):
            if number == 8:
                problem = f"with tiles = {large} your function takes a step for each tile, or for each block"
                with limited_steps(4000, problem):
                    _shares(exercise, share, large, 1_000_000, of=(0, 749_999, 750_000, 999_999))
            _shares(exercise, share, tiles, blocks)
    return exercise.report(
        f"right in {len(cases) + 1} batches: each tile once, shares even, each part in its own place"
    )


def _shares(exercise, share, tiles, blocks, of=None):
    total, at, places = sum(tiles), 0, {}
    line = list(itertools.accumulate(tiles, initial=0))  # where rows begin
    for block in range(blocks) if of is None else of:
        begin, end = (n * (total // blocks) + min(n, total % blocks) for n in (block, block + 1))
        given = list(tiles)
        call, got = call_text(share, shown(tiles, 40), blocks, block).replace("'", ""), share(given, blocks, block)
        if given != tiles:
            raise Wrong(f"{call} changed tiles, which it should only read")
        if not isinstance(got, (list, tuple)) or not all(_four(work) for work in got):
            raise Wrong(f"{call} gave {shown(got)}, expected a list of (row, first, count, place), whole numbers")
        many = sum(work[2] for work in got)
        low, high = total // blocks, -(-total // blocks)
        exercise.require(
            low <= many <= high,
            f"{call} has {counted(many, 'tile')}, expected {low if low == high else f'{low} or {high}'}: "
            f"{total:,} for {counted(blocks, 'block')}",
        )
        if of is not None:
            at = begin
        for row, first, count, place in got:
            if not 0 <= row < len(tiles) or count < 1 or first < 0 or first + count > tiles[row]:
                raise Wrong(f"{call} has ({row}, {first}, {count}, {place}); row {row} has no such tiles")
            here = line[row] + first
            exercise.require(
                here == at,
                f"{call}: tile {first} of row {row} comes "
                + ("again" if here < at else "too early: the tiles before it are nobody's"),
            )
            at = here + count
            exercise.require(
                0 <= place < blocks + len(tiles),
                f"{call}: the place {place} is not below {blocks + len(tiles)}, blocks and rows together",
            )
            exercise.require(place not in places, f"{call}: the place {place} is that of {places.get(place)}, too")
            places[place] = f"row {row} in block {block}"
        if of is not None:
            exercise.require(at == end, f"{call} ends at tile {at:,} of the line, expected {end:,}")
    if of is None:
        exercise.require(at == total, f"tiles = {shown(tiles)}, blocks = {blocks}: the tiles from {at} on are nobody's")


def _four(work):
    whole = isinstance(work, (tuple, list)) and len(work) == 4
    return whole and all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in work)
