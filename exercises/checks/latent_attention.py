"""Checks of chapter 16: absorbed projections, bytes and flops, exponents, a reference that is a power of two.

Exercise 5, a kernel, is in latent_kernels.py.
"""

import contextlib
import numbers
import warnings

import numpy as np

from exercises.checks import array_from, call_text, counted, expect_array, number_from, shown, time_limit
from exercises.checks.costs import counted_memory, garbage_in_empty, limited_steps
from exercises.checks.latent_kernels import exercise_5
from lab.check import differs
from lab.exercise import Exercise, Wrong
from ref import latent_attention as ref

__all__ = ["exercise_1", "exercise_2", "exercise_3", "exercise_4", "exercise_5"]

# Exercise 1: absorb the projections


def exercise_1(latent_decode):
    """latent_decode(q_nope, q_rope, cache, w_uk, w_uv, scale) -> (n_heads, v_dim)"""
    exercise = Exercise("Exercise 1: absorb the projections")
    rng = np.random.default_rng()
    cases = [(1, 1, 2, 1, 3, 2), (2, 3, 4, 2, 5, 3), (3, 0, 4, 2, 5, 3), (5, 70, 16, 8, 24, 12), (16, 33, 8, 4, 12, 20)]
    with exercise, time_limit(30), warnings.catch_warnings(), garbage_in_empty():
        warnings.simplefilter("error")
        for sizes in cases:
            _absorbed(latent_decode, rng, sizes, f"with {counted(sizes[0], 'head')} and {counted(sizes[1], 'token')}")
        _absorbed(latent_decode, rng, (4, 50, 16, 8, 24, 12), "with scores beyond 1000", sharp=4000)
        _absorbed(latent_decode, rng, (24, 1, 16, 8, 24, 12), "with one token, whatever its score", sharp=4000)
        _absorbed(latent_decode, rng, (300, 400, 4, 2, 6, 3), "with 300 heads", steps=200)
        most = 12 << 20  # cache, scores and weights are 5 MB; keys of all heads are 16 MB
        with counted_memory() as grown:
            _absorbed(latent_decode, rng, (16, 4000, 32, 8, 64, 32), "with 4,000 tokens", wanted=False)
            exercise.require(
                grown() < most,
                f"right, but with 16 heads and 4,000 tokens your function takes {grown() / 2**20:.0f} MB at a time, "
                f"wanted: at most {most >> 20}: nothing of all heads' keys or values is made",
            )
    return exercise.report(f"right in {len(cases) + 4} cases, without keys and values")


def _absorbed(latent_decode, rng, sizes, at, sharp=1.0, wanted=True, steps=None):
    heads, tokens, nope, rope, latent, v_dim = sizes
    q_nope, q_rope = sharp * rng.standard_normal((heads, nope)), rng.standard_normal((heads, rope))
    cache = rng.standard_normal((tokens, latent + rope))
    w_uk, w_uv = rng.standard_normal((heads, nope, latent)), rng.standard_normal((heads, v_dim, latent))
    scale = float(rng.uniform(0.5, 1.5)) * (nope + rope) ** -0.5
    given = q_nope, q_rope, cache, w_uk, w_uv
    before = [a.copy() for a in given] if wanted else None
    told = "your function takes steps for each head or token; expected: operations on all of them at once"
    try:
        with limited_steps(steps, told) if steps else contextlib.nullcontext():
            got = latent_decode(*given, scale)
    except (RuntimeWarning, FloatingPointError) as problem:
        raise Wrong(f"{at}: {problem}") from None
    got = array_from(got, (heads, v_dim), at)
    if not wanted:
        return
    for name, a, old in zip(("q_nope", "q_rope", "cache", "w_uk", "w_uv"), given, before):
        if not np.array_equal(a, old):
            raise Wrong(f"{at}: your function wrote to {name}")
    right = ref.heads(q_nope[None], q_rope[None], cache[None], w_uk, w_uv, scale=scale)[0]
    _near(got, right, 1e-9, at)


def _near(got, wanted, tolerance, at):
    size = max(np.abs(wanted).max(initial=0), 1e-30)
    bad = np.argwhere(~(np.abs(got - wanted) <= tolerance * size))
    if len(bad):
        place = tuple(map(int, bad[0]))
        raise Wrong(f"{at}: " + differs(f"out[{', '.join(map(str, place))}]", got[place], wanted[place]))


# Exercise 2: bytes and flops


def exercise_2(latent_cost, ridge_heads):
    """latent_cost(batch, tokens, heads, cards) -> (bytes, flops); ridge_heads(read, flops) -> heads"""
    exercise = Exercise("Exercise 2: bytes and flops")
    rng = np.random.default_rng()
    cases = [(1, 1, 1, 1), (1, 4096, 128, 1), (1, 4096, 128, 2), (16, 4096, 128, 8), (16, 4096, 65, 1)]
    cases += [(3, 1000, 100, 3), (2, 100, 64, 1), (2, 100, 192, 1)]
    cases += [tuple(int(n) for n in rng.integers(1, (65, 40_000, 257, 9))) for _ in range(12)]
    cards = [(4.7e12, 6.58e14), (4.8e12, 9.9e14), (3.35e12, 8.65e14), (1e12, 1e12), (1e12, 1e15)]
    cards += [(float(rng.uniform(1, 8)) * 1e12, float(rng.uniform(50, 2000)) * 1e12) for _ in range(8)]
    with exercise, time_limit(30):
        for case in cases:
            call, got = call_text(latent_cost, *case), latent_cost(*case)
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{call} gave {shown(got)}, expected a pair (bytes, flops)")
            for name, mine, right in zip(("bytes", "flops"), got, _cost(*case)):
                good = isinstance(mine, numbers.Real) and not isinstance(mine, bool) and mine == right
                shown_as = f"{mine:,}" if isinstance(mine, numbers.Real) else shown(mine)
                exercise.require(good, f"{call}: {name} are {shown_as}, expected {right:,}")
        for read, flops in cards:
            each = 2 * (576 + 512) / 1152 / (flops / read)  # of the ridge, for a head
            if abs(round(1 / each) * each - 1) < 1e-9:
                continue  # too close to tell
            got, right = number_from(ridge_heads, read, flops, whole=True), int(-(-1 // each))
            exercise.require(got == right, f"{call_text(ridge_heads, read, flops)} gave {got}, expected {right}")
    return exercise.report(f"right for {len(cases)} batches and {len(cards)} cards")


def _cost(batch, tokens, heads, cards):
    mine = -(-heads // cards)
    moved = 2 * batch * (576 * tokens + (576 + 512) * mine)
    return moved, 2 * (576 + 512) * batch * tokens * 64 * -(-mine // 64)


# Exercise 3: exponents


class Bits(np.ndarray):
    """Floats of which no product is to be made: they remain Bits, or become whole numbers that are their bits."""

    BANNED = {"multiply", "divide", "true_divide", "ldexp", "exp2", "exp", "power", "float_power", "matmul", "square"}

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **named):
        floats = any(isinstance(a, Bits) and a.dtype.kind == "f" for a in inputs)
        if floats and ufunc.__name__ in self.BANNED:
            raise Wrong(f"your function calls np.{ufunc.__name__} on x, expected: additions to its bits")
        plain = [np.asarray(a) if isinstance(a, Bits) else a for a in inputs]
        if out is not None:
            named["out"] = tuple(np.asarray(a) if isinstance(a, Bits) else a for a in out)
        return getattr(ufunc, method)(*plain, **named)

    def view(self, *to, **named):
        seen = super().view(*to, **named)
        self._expect_bits("view", isinstance(seen, Bits) or seen.dtype.kind != "f")
        return seen

    def astype(self, dtype, *more, **named):
        self._expect_bits("astype", np.dtype(dtype) == self.dtype)
        return super().astype(dtype, *more, **named)

    def tolist(self):
        self._expect_bits("tolist")
        return super().tolist()

    def item(self, *place):
        self._expect_bits("item")
        return super().item(*place)

    def _expect_bits(self, call, harmless=False):
        if self.dtype.kind == "f" and not harmless:
            raise Wrong(f"your function calls {call} on x, which takes its numbers; expected: additions to its bits")


def exercise_3(times_power):
    """times_power(x, n) -> float32"""
    exercise = Exercise("Exercise 3: add to the exponent")
    rng = np.random.default_rng()
    mantissas = np.array([0, 1, 1 << 22, (1 << 23) - 1, int(rng.integers(1 << 23))], np.int32)
    signs = np.array([0, -(1 << 31)], np.int32)
    x = (np.arange(256, dtype=np.int32)[:, None, None] << 23 | mantissas | signs[:, None]).reshape(-1).view(np.float32)
    steps = [0.0, 1.0, -1.0, 3.0, -7.0, 30.0, -30.0]
    steps += [2.5, 3.5, -2.5, -0.5, -2.9999998, 0.49999997, 40.0, -31.0, -1e9, 3e9, np.inf, -np.inf, np.nan]
    with exercise, time_limit(30), warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in steps:
            _powers(times_power, x, np.float32(n), f"n = {n:.9g}")
        each = rng.uniform(-40, 40, len(x)).astype(np.float32)
        _powers(times_power, x, each, "an n for each x")
        grid = rng.standard_normal((6, 8)).astype(np.float32)
        grid[2] = 0
        _powers(times_power, grid[:, ::2], np.float32([[3], [-2], [1], [-9], [0], [5]]), "an n for each row")
        _powers(times_power, np.zeros((0, 3), np.float32), np.float32(1), "an empty x")
    return exercise.report(f"right, bit for bit, for all exponents and {len(steps)} steps, zeros among them")


def _powers(times_power, x, n, at):
    given, before = x.copy().view(Bits), x.copy()
    step = np.rint(np.clip(np.where(np.isnan(n), -np.inf, n), -30, 30)).astype(np.int64)
    with np.errstate(all="ignore"):
        right = np.ldexp(np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x).astype(np.float64), step)
        right = np.where(np.abs(right) < 2.0**-126, np.copysign(0, right), right).astype(np.float32)
    right = np.where(np.isnan(x), x, right)
    try:
        got = times_power(given, n if np.ndim(n) else np.array(n))
    except (RuntimeWarning, FloatingPointError) as problem:
        raise Wrong(f"with {at}: {problem}") from None
    if isinstance(got, Bits):
        got = np.asarray(got)
    expect_array(got, "the result", np.float32, right.shape, f"with {at}")
    if not np.array_equal(given.view(np.int32), before.view(np.int32)):
        raise Wrong(f"with {at}: your function wrote to x, which it should only read")
    bad = np.argwhere(got.view(np.int32) != right.view(np.int32))
    if len(bad):
        place = tuple(bad[0])
        step = np.broadcast_to(n, x.shape)[place]
        what = f"x = {_number(x[place])}, n = {step:.9g}"
        raise Wrong(f"with {at}: {len(bad)} of {x.size} differ. For {what} you gave {_number(got[place])}, expected "
                    f"{_number(right[place])}")  # fmt: skip


def _number(x):
    """A float32 as a text; a NaN with its bits, of which there are many."""
    return f"NaN (bits {int(x.view(np.uint32)):#010x})" if np.isnan(x) else f"{x:.9g}"


# Exercise 4: a reference that is a power of two

SLACK = 8


def exercise_4(attend):
    """attend(s, v, rescale) -> (dim,)"""
    exercise = Exercise("Exercise 4: a reference that may be stale")
    rng = np.random.default_rng()
    cases = {
        "one tile": _scores(rng, [0]),
        "four tiles alike": _scores(rng, [0, 0, 0, 0]),
        "maxima that creep up, within 8": _scores(rng, [0, 1, 2, 3, 4]),
        "maxima just within 8": _scores(rng, [0, 7.9, 7.9]),
        "maxima just beyond 8": _scores(rng, [0, 8.9, 8.9]),
        "a leap of 20": _scores(rng, [0, 0, 20, 0]),
        "three leaps": _scores(rng, [0, 12, 24, 36, 30]),
        "scores of 3000": _scores(rng, [3000, 3011, 2990]),
        "scores of -3000": _scores(rng, [-3000, -3020, -2985]),
        "a leap of 500": _scores(rng, [0, 500, 100]),
        "a fall": _scores(rng, [50, 0, -50]),
        "a first tile of -inf": _scores(rng, [-np.inf, -40, 3]),
        "a tile of -inf": _scores(rng, [5, -np.inf, 7]),
        "no score at all": _scores(rng, [-np.inf, -np.inf]),
    }
    exactly = cases["a maximum exactly 8 above, and one beyond"] = _scores(rng, [-1, 7, 7])
    exactly[:, 0] = 0, SLACK, SLACK + 0.5
    for number in range(6):
        cases[f"random tiles ({number})"] = _scores(rng, rng.normal(0, 12, int(rng.integers(2, 30))))
    with exercise, time_limit(30), warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [_attend(attend, rng, s, f"with {at}") for at, s in cases.items()]
        for at, rescales in zip(cases, made):  # when all results are right
            _rescaled(exercise, *rescales, f"with {at}")
    return exercise.report(f"right in {len(cases)} cases, and sums were rescaled where they must be, and nowhere else")


def _scores(rng, levels):
    s = rng.uniform(-4, 0, (len(levels), 5)) + np.array(levels, float)[:, None]
    s[:, 2] = np.array(levels, float) - 0.3  # the highest of a tile, or nearly
    return s.astype(np.float32)


def _attend(attend, rng, s, at):
    """The rescales of an answer, n and numbers of each, and those that must be; its result is right."""
    v = rng.standard_normal((*s.shape, 6)).astype(np.float32)
    v[..., 3] = 0
    calls, given = [], []

    def rescale(x, n):
        """x · 2**n by an addition to the exponent; 0 stays 0, and what becomes too small is 0."""
        if isinstance(n, bool) or not float(n).is_integer():
            raise Wrong(f"{at}: rescale was given n = {shown(n)}; an exponent takes whole numbers")
        if n > 0:
            raise Wrong(f"{at}: rescale was given n = {int(n)}; sums become less when a reference rises")
        x = np.asarray(x)
        if x.dtype != np.float32:
            raise Wrong(f"{at}: rescale was given {x.dtype}; bits are added to those of float32")
        calls.append(int(n))
        given.append(x.astype(np.float64).reshape(-1))
        n = max(int(n), -200)
        return np.where(ref.breaks(x, n), np.float32(0), ref.add_to_exponent(x, n))

    before = s.copy(), v.copy()
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(over="raise", invalid="raise", divide="raise"))
        try:
            got = attend(s, v, rescale)
        except (RuntimeWarning, FloatingPointError) as problem:
            raise Wrong(f"{at}: {problem}") from None
    if not (np.array_equal(s, before[0]) and np.array_equal(v, before[1])):
        raise Wrong(f"{at}: your function wrote to s or v, which it should only read")
    got = array_from(got, (6,), at)
    flat = s.astype(np.float64).reshape(-1)
    high = flat.max()
    p = np.zeros_like(flat) if high == -np.inf else np.exp2(flat - high)
    wanted = p @ v.astype(np.float64).reshape(-1, 6) / max(p.sum(), 1e-300)
    _near(got, wanted, 1e-5, at)
    return calls, given, _due(s, v)


def _due(s, v):
    """The rescales that must be: for each its n, and the sums and the sum of weights before it, in float64."""
    due, reference, kept = [], None, np.zeros(v.shape[2] + 1)
    for scores, values in zip(s.astype(np.float64), v.astype(np.float64)):
        top = scores.max()
        if top > -np.inf and (reference is None or top > reference + SLACK):
            if reference is not None:
                due.append((int(reference - np.ceil(top)), kept))
                kept = kept * np.exp2(due[-1][0])
            reference = np.ceil(top)
        if reference is not None:
            kept = kept + np.exp2(scores - reference) @ np.column_stack([values, np.ones(len(values))])
    return due


def _rescaled(exercise, calls, given, due, at):
    """rescale was called with these n and numbers: those that must be, in two calls, or in one for both sums."""
    made = [n for n, x in zip(calls, given) for _ in x]
    wanted = [n for n, kept in due for _ in kept]
    twice = [n for n, _ in due for _ in "vw"]
    exercise.require(
        made == wanted and len(calls) <= len(twice),
        f"right, but {at} rescale is called with n = {shown(calls)}, wanted: {shown(twice)}, twice where a tile's "
        f"highest score exceeds the reference by more than {SLACK}, and for all of the sums",
    )
    made = np.concatenate([np.zeros(0), *given])
    for n, kept in due:
        mine, made = made[: len(kept)], made[len(kept) :]
        # Sorted: which of the two comes first is the answer's affair.
        near = np.abs(np.sort(mine) - np.sort(kept)) <= 1e-4 * np.abs(kept).max()
        mine, kept = (shown([float(f"{x:.4g}") for x in a]) for a in (mine, kept))
        exercise.require(
            near.all(),
            f"right, but {at} rescale is given {mine} at n = {n}, wanted: the sums, and the sum of weights, relative "
            f"to the reference: {kept}",
        )
