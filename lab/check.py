"""Is it right? Ask on shapes that hurt, with fresh random inputs, before any timing.

    verdict = check(gemv, reference, make_inputs, shapes)
    print(verdict)            # "right on 14 shapes"

What it guards against:
  * lucky shapes      1, primes, one past a tile, long and thin: see hostile_shapes
  * lucky inputs      drawn anew on every call, with a seed that the message names
  * unset output      `out` is full of NaN before the call, so a row that was skipped shows
  * reading outside   inputs lie between NaNs: one element read too far turns the result into NaN
  * writing outside   `out` lies between guard elements that are compared afterwards
  * changed inputs    compared with a copy
"""

from dataclasses import dataclass, field

import numpy as np

GUARD = 67  # elements of NaN (a pattern for integers) on each side; odd, so that nothing is aligned by luck
FENCE = 1234  # around an output: a number, so that a NaN that was read past an input and written past it shows


@dataclass
class Verdict:
    """The outcome of a check. True in a condition when all was right; prints as one line, or says what is wrong."""

    shapes: int = 0
    error: float = 0.0  # the worst ‖out − ref‖ / ‖ref‖ over the shapes
    worst: float = 0.0  # the worst |out − ref| of one element, over the largest |ref| of its shape
    problems: list = field(default_factory=list)

    def __bool__(self):
        return not self.problems

    def __str__(self):
        if self.problems:
            return self.problems[0]
        return f"right on {self.shapes} shape{'s' if self.shapes > 1 else ''}"

    __repr__ = __str__


def hostile_shapes(dimensions, tile=16, long=1023, limit=None):
    """Shapes that catch mistakes at edges, for arrays of this many dimensions.

    Every axis takes 1, 2, primes, the tile, one less and one more than it; then one axis at a time is long.
    The first shape is irregular, so that a first failure is a telling one. `limit` caps how many are given.
    """
    small = [7, 1, 2, tile - 1, tile, tile + 1, 2 * tile + 3]
    mixed = [tuple(small[(i * (axis + 1) + axis) % len(small)] for axis in range(dimensions)) for i in range(7)]
    ones = [tuple(n if axis == at else 1 for axis in range(dimensions)) for at in range(dimensions) for n in (13, 2)]
    longs = [tuple(long if axis == at else 5 for axis in range(dimensions)) for at in range(dimensions)]
    found = list(dict.fromkeys([tuple([37, 61, 53, 41][:dimensions]), *mixed, *ones, *longs]))
    return found[:limit]


def check(function, reference, make_inputs, shapes, *, tolerance=1e-5, size=1.0, out=None, seed=None):
    """Compare `function` with `reference` on every shape and return a Verdict.

    make_inputs  make_inputs(rng, *shape) -> the tuple of arguments, for both functions
    out          out(*shape) -> (shape, dtype) of the output: `function` is then called with out=..., poisoned
    tolerance    on ‖out − ref‖ / ‖ref‖, and ten times that on one element over the largest |ref|
    size         what an output is of the order of. Terms of size 1 can cancel to almost 0, with a rounding error as
                 before: such an output is judged as if it were `size`
    seed         repeats the inputs of an earlier check (its message names it)
    """
    seed = np.random.SeedSequence().entropy % (1 << 32) if seed is None else seed
    verdict, shapes = Verdict(), list(shapes)
    if not shapes:
        raise ValueError("check: there is no shape to check on")
    for number, shape in enumerate(shapes):
        rng = np.random.default_rng([seed, number])
        problem = _one(function, reference, make_inputs(rng, *shape), shape, (tolerance, size), out, verdict)
        verdict.shapes += 1
        if problem:
            sizes = " × ".join(str(n) for n in shape)
            verdict.problems.append(f"wrong at shape {sizes} (seed {seed}): {problem}")
            break
    return verdict


def _one(function, reference, inputs, shape, limits, out, verdict):
    """Run one shape; return what is wrong, or None."""
    wanted = np.asarray(reference(*inputs))
    guarded = [between_guards(a) if isinstance(a, np.ndarray) else a for a in inputs]
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in inputs]
    if out is None:
        got = function(*guarded)
    else:
        buffer = poisoned(*out(*shape))
        got = function(*guarded, out=buffer)
        if got is not None and not np.shares_memory(got, buffer) and buffer.size:
            return "the result was not written to out"
        if not guards_intact(buffer):
            return "elements outside the output were overwritten"
        got = buffer
    if not isinstance(got, np.ndarray):
        got = np.asarray(got)
    for number, (now, then) in enumerate(zip(guarded, before)):
        if isinstance(then, np.ndarray) and not np.array_equal(now, then, equal_nan=then.dtype.kind == "f"):
            return f"input number {number + 1} was changed"
    if got.shape != wanted.shape:
        return f"the result has shape {got.shape}, expected {wanted.shape}"
    return _compare(got, wanted, *limits, verdict)


def _compare(got, wanted, tolerance, size, verdict):
    given, wanted = got, wanted.astype(np.float64)
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = np.abs(got - wanted)
    # equal infinities and NaNs where NaNs belong are right; a NaN anywhere else is infinitely wrong
    off = np.where((got == wanted) | (np.isnan(got) & np.isnan(wanted)), 0.0, np.where(np.isnan(off), np.inf, off))
    finite = np.where(np.isfinite(wanted), wanted, 0.0)
    scale = max(np.abs(finite).max(initial=0.0), size)
    error = float(np.linalg.norm(off) / max(np.linalg.norm(finite), size * max(off.size, 1) ** 0.5))
    worst = float(off.max(initial=0.0) / scale)
    verdict.error, verdict.worst = max(verdict.error, error), max(verdict.worst, worst)
    if error <= tolerance and worst <= 10 * tolerance:
        return None
    bad = np.argwhere(off > tolerance * scale)
    if not len(bad):  # many small errors that only add up to too much
        bad = np.argwhere(off > 0)
    first = [differs(f"[{', '.join(map(str, at))}]", given[tuple(at)], wanted[tuple(at)]) for at in bad[:5]]
    first = "; ".join(first[:1] if is_unset(given[tuple(bad[0])]) else first)  # of unset ones, one says it all
    return f"{len(bad)} of {off.size} elements differ, relative error {error:.2g}. First: {first}"


def differs(what, got, wanted, digits=6):
    """A sentence on two numbers that should be equal: as many digits as tell them apart, and the likely cause."""
    if is_unset(got):
        return f"{what} was never set, or only added to: it is NaN, as before the call"
    one, other = apart(got, wanted, digits)
    return f"{what} is {one}, expected {other}{_likely(got, wanted)}"


def apart(one, other, digits=6):
    """Two numbers as texts, with as many digits as show that they differ."""
    for precision in range(digits, 18 if float(one) != float(other) else digits + 1):
        texts = f"{one:.{precision}g}", f"{other:.{precision}g}"
        if texts[0] != texts[1]:
            break
    return texts


def _likely(got, wanted):
    """Why two numbers are nearly equal, if they are."""
    got, wanted = float(got), float(wanted)
    off = abs(got - wanted)
    if not (np.isfinite(off) and 0 < off <= 1e-6 * abs(wanted)):
        return ""
    with np.errstate(over="ignore"):
        if got == float(np.float32(wanted)):
            return " (the same, rounded to float32)"
    return f" (right to {int(-np.log10(off / abs(wanted)))} digits: is something rounded on the way?)"


# NaN with bits of its own, which no arithmetic makes: what an output holds before the call.
UNSET = {2: 0x7E5A, 4: 0x7FC05A5A, 8: 0x7FF8000000005A5A}


def unset(shape, dtype=np.float32):
    """An array of floats that nothing was put into yet: see is_unset."""
    dtype = np.dtype(dtype)
    return np.full(shape, UNSET[dtype.itemsize], f"u{dtype.itemsize}").view(dtype).copy()


def is_unset(value):
    """Is this element still as `unset` made it? (NaN that was computed has other bits.)"""
    value = np.asarray(value)
    return value.dtype.kind == "f" and int(value.view(f"u{value.itemsize}")[()]) == UNSET.get(value.itemsize)


def between_guards(array, guard=None):
    """A copy of `array` that lies between guard elements: NaN for floats, an odd pattern for integers, or `guard`."""
    home = np.empty(array.size + 2 * GUARD, array.dtype)
    home[:] = (np.nan if array.dtype.kind == "f" else _pattern(array.dtype)) if guard is None else guard
    inside = home[GUARD : GUARD + array.size].reshape(array.shape)
    inside[...] = array
    return inside


def poisoned(shape, dtype):
    """An output between guards, full of values that no right answer holds, so that unwritten elements show."""
    dtype = np.dtype(dtype)
    full = unset(shape, dtype) if dtype.kind == "f" else np.full(shape, _pattern(dtype), dtype)
    return between_guards(full, _fence(dtype))


def guards_intact(array):
    """True if nothing was written around an array that `poisoned` made."""
    home = array.base
    while home.base is not None:
        home = home.base
    return bool((np.concatenate([home[:GUARD], home[-GUARD:]]) == _fence(array.dtype)).all())


def _fence(dtype):
    return FENCE if dtype.kind == "f" else _pattern(dtype) ^ 1


def _pattern(dtype):
    return True if dtype.kind == "b" else np.iinfo(dtype).max // 3
