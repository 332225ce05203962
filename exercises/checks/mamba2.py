"""The checks of chapter 18: a state's rounding, and by name those of its other modules.

Exercise 1 is in mamba2_bytes.py, 2 and 3 are in mamba2_states.py, 5 and 6, which are kernels, in mamba2_kernels.py.
"""

import warnings

import numpy as np

from exercises.checks import expect_array, shown, time_limit
from exercises.checks.mamba2_bytes import exercise_1
from exercises.checks.mamba2_kernels import exercise_5, exercise_6
from exercises.checks.mamba2_states import exercise_2, exercise_3
from lab.check import differs
from lab.exercise import Exercise, Wrong

__all__ = ["exercise_1", "exercise_2", "exercise_3", "exercise_4", "exercise_5", "exercise_6"]

# Exercise 4: where a state's error comes from

STEPS, DECAY, ROWS, DSTATE = 3000, 0.999, 8, 32
LARGE = 200  # one number of each row
BOUND = 0.05  # of the mean of the other states, against the truth's
LAST = 1 - 2**-24  # the largest u of float32


def exercise_4(to_half, to_codes):
    """to_half(h, u) -> float16 like h; to_codes(h, u) -> (int8 like h, float32 (rows,))"""
    exercise = Exercise("Exercise 4: a state that does not stand still")
    rng, praise = np.random.default_rng(), ""
    with exercise, time_limit(30), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, h in _states(rng):
            for u in _chances(rng, h.shape):
                _half(to_half, name, h, u)
                _codes(to_codes, name, h, u)
        _on_average(to_half, to_codes, rng)
        praise = _long(to_half, to_codes, rng)
    return exercise.report(praise)


def _states(rng):
    """[(name, h (rows, dstate) float32)]"""
    some = rng.standard_normal((5, 7)).astype(np.float32)
    cases = [("one number", [[1.5]]), ("zeros", np.zeros((2, 3))), ("a negative number", [[-3.0, 1.0]])]
    cases += [
        ("numbers that fp16 has", [[1.0, -0.5, 2048.0, 2.0**-24]]),
        ("1 + 2^-11, between two of fp16", [[1 + 2**-11, -1 - 2**-11]]),
    ]
    cases += [
        ("a row of zeros beside another", [[0.0, 0.0], [1.0, -2.0]]),
        ("numbers below fp16's least", [[1e-9, -2e-8, 3e-8]]),
    ]
    cases += [("rows of very different size", some * np.array([[1e-3], [1], [1e2], [1e4], [1e-6]]))]
    cases += [("60,000", [[6e4, 1.0]]), ("drawn numbers", some), ("drawn numbers", 100 * some)]
    return [(name, np.array(h, np.float32)) for name, h in cases]


def _chances(rng, shape):
    found = [np.zeros(shape), np.full(shape, 0.5), np.full(shape, LAST), *rng.random((4, *shape))]
    return [np.minimum(u.astype(np.float32), np.float32(LAST)) for u in found]


def _asked(function, h, u, at):
    given = h.copy(), u.copy()
    got = function(*given)
    if not np.array_equal(given[0], h) or not np.array_equal(given[1], u):
        raise Wrong(f"{at} your function changed h or u")
    if got is None:
        raise Wrong(f"{at} your function gave None. Does it return its result?")
    return got


def _around(h):
    """The two numbers of fp16 between which each of h lies: the same one twice where fp16 has it."""
    near = h.astype(np.float16)
    wide = near.astype(np.float64)
    low = np.where(wide > h, np.nextafter(near, np.float16(-np.inf)), near)
    high = np.where(wide < h, np.nextafter(near, np.float16(np.inf)), near)
    return low.astype(np.float64), high.astype(np.float64)


def _half(to_half, name, h, u):
    at = f"to_half: with {name}"
    got = _asked(to_half, h, u, at)
    expect_array(got, "the result", np.float16, h.shape, at)
    low, high = _around(h)
    wanted = np.where(h - low > u * (high - low), high, low)
    sure = np.abs((h - low) - u * (high - low)) > 1e-6 * (high - low)
    _equal("the result", got.astype(np.float64), wanted, sure | (high == low), h, u, at, (low, high))


def _codes(to_codes, name, h, u):
    at = f"to_codes: with {name}"
    got = _asked(to_codes, h, u, at)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Wrong(f"{at} your function gave {shown(got)}, expected (codes, scales)")
    codes, scales = got
    expect_array(codes, "codes", np.int8, h.shape, at)
    expect_array(scales, "scales", np.float32, (len(h),), at)
    largest = np.abs(h).max(axis=1)
    for row, (scale, most) in enumerate(zip(scales, largest)):
        if not abs(scale - most / 127) <= 1e-6 * most:
            raise Wrong(
                f"{at}: scales[{row}] is {scale:.6g}, expected {most / 127:.6g}: the largest of its row over 127"
            )
    step = np.where(largest > 0, largest / np.float64(127), 1)[:, None]
    exact = h / step
    low = np.floor(exact + 1e-5)
    whole = np.abs(exact - np.round(exact)) < 1e-5
    wanted = np.where(whole, np.round(exact), np.where(exact - low > u, low + 1, low))
    inside = (u > 1e-5) & (u < 1 - 1e-5)  # else a quotient's own rounding may take a whole number up or down
    sure = np.where(whole, inside | (h == 0), np.abs(exact - low - u) > 1e-5)
    if np.abs(codes.astype(int)).max() > 127:
        raise Wrong(f"{at}: a code is {int(codes.astype(int).min())}, expected −127 to 127. Did 128 turn round?")
    _equal("codes", codes.astype(np.float64), wanted, sure, h, u, at, (low, low + 1))


def _equal(what, got, wanted, sure, h, u, at, ends):
    bad = np.argwhere(sure & ~(got == wanted))
    if len(bad):
        place = tuple(int(n) for n in bad[0])
        index = ", ".join(map(str, place))
        low, high = (end[place] for end in ends)
        why = f" (h = {h[place]!s}, between {low:.8g} and {high:.8g}; u = {u[place]!s})"
        raise Wrong(f"{at}: {differs(f'{what}[{index}]', got[place], wanted[place])}{why}")


def _on_average(to_half, to_codes, rng):
    h = rng.uniform(1, 2, (1, 4000)).astype(np.float32)
    h[0, 0] = 2
    sums = np.zeros((2, 4000))
    for _ in range(60):
        u = rng.random(h.shape, np.float32)
        codes, scales = to_codes(h, u)
        sums += np.stack([to_half(h, u).astype(np.float64)[0], (codes * scales[:, None].astype(np.float64))[0]]) / 60
    for name, found, step in zip(("to_half", "to_codes"), sums, (2**-10, 2 / 127)):
        off = (found - h[0]).mean() / step
        if abs(off) > 0.02:
            raise Wrong(f"{name}: on average over many u the result is {off:+.3f} of a step off, expected 0")


def _long(to_half, to_codes, rng):
    """Words about how far states are off after many steps."""
    add = rng.uniform(0.005, 0.015, (ROWS, DSTATE)).astype(np.float32)
    truth = np.zeros((ROWS, DSTATE))
    truth[:, 0], add[:, 0] = LARGE, LARGE * (1 - DECAY)  # stays as it is: the scale of each row is its
    off = {}
    for name, keep in (("to_half", _kept_as_half(to_half)), ("to_codes", _kept_as_codes(to_codes))):
        wanted, h = truth, truth.astype(np.float32)
        for _ in range(STEPS):
            wanted = DECAY * wanted + add
            h = keep((np.float32(DECAY) * h + add).astype(np.float32), rng.random(h.shape, np.float32))
        off[name] = abs(h[:, 1:].mean() / wanted[:, 1:].mean() - 1)
        if not off[name] <= BOUND:
            raise Wrong(
                f"{name}: after {STEPS:,} steps of small additions the states are {off[name]:.1%} off on average, "
                f"expected at most {BOUND:.0%}"
            )
    return f"after {STEPS:,} steps of small additions fp16 and 8 bits are less than {BOUND:.0%} off on average"


def _kept_as_half(to_half):
    return lambda h, u: to_half(h, u).astype(np.float32)


def _kept_as_codes(to_codes):
    def keep(h, u):
        codes, scales = to_codes(h, u)
        return codes * scales[:, None]

    return keep
