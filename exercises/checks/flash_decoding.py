"""Checks of chapter 08: softmax over a stream, merging, shares, the online softmax as a kernel, and a merge in Triton.

The learner's CUDA C++ runs on the SIMT machine, which also looks for races, and Triton in its interpreter. Quality is
counted, never timed.
"""

import numbers
import warnings
import weakref

import numpy as np

from exercises.checks import array_from, call_text, counted, number_from, shown, time_limit
from exercises.checks.costs import counted_memory
from exercises.checks.launches import blocks_for, coalesced, compiled, launched, near, requests, unchanged
from exercises.checks.triton_launch import called, guarded, output
from exercises.checks.triton_launch import near as near_tensor
from exercises.checks.warp_gemv import named_lanes, no_shared
from lab.check import apart, differs, unset
from lab.exercise import Exercise, Wrong

TOLERANCE = 1e-4  # of a kernel in fp32: scores of a thousand are rounded by 1e-4
EXACT = 1e-9  # of NumPy in float64
WIDE = 2000  # numbers in a value, where memory is counted


# Exercise 1: softmax over a stream


class Value(np.ndarray):
    """An array that can be watched: NumPy's own cannot be the target of a weak reference to each view."""


def exercise_1(stream_mean):
    """stream_mean(pairs) -> (head_dim,)"""
    exercise = Exercise("Exercise 1: softmax over a stream")
    rng = np.random.default_rng()
    inf = np.inf
    named = {  # scores, smallest cases first
        "1 token": [0.5],
        "2 tokens": [0.0, np.log(3)],
        "scores that grow": [-1.0, 0.0, 2.0, 3.5],
        "scores that fall": [3.5, 2.0, 0.0, -1.0],
        "scores that grow by 2000": [-1000.0, 0.3, 999.0, 1000.0],
        "scores that grow by 40,000": [-20000.0, 0.3, 19999.0, 20000.0],
        "scores that grow by 1 from token to token": np.arange(1600.0) - 800,
        "scores that grow by 300 and fall again": [0.0, 300.0, 600.0, 900.0, 899.0, 300.0],
        "scores around 2000": 2000 + rng.standard_normal(5),
        "scores around -2000": -2000 + rng.standard_normal(5),
        "-inf in the middle": [0.3, -inf, 1.0],
        "-inf first": [-inf, -inf, 0.3, 1.0],
        "scores from -900 to 900": rng.uniform(-900, 900, 40),
        "300 tokens": 3 * rng.standard_normal(300),
    }
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, scores in named.items():
            scores = np.asarray(scores, float)
            values = rng.standard_normal((len(scores), 3)) + 2
            weights = np.exp(scores - scores.max())
            _vector(stream_mean(_stream(scores, values, name)), weights @ values / weights.sum(), f"with {name}")
        with counted_memory() as most:
            stream_mean((float(t % 7), np.full(WIDE, float(t))) for t in range(200))
            kept = most() / np.zeros(WIDE).nbytes
        exercise.require(
            kept < 40,
            f"with 200 tokens of {WIDE:,} numbers your function held as much memory as {kept:.0f} values at once; "
            "keep two sums and a maximum, not the tokens",
        )
    return exercise.report(f"right on {len(named)} streams, without a look back")


def _stream(scores, values, name):
    """One pair after another. What was given before the last must be gone when the next is asked for."""
    alive = []
    for number, (score, value) in enumerate(zip(scores, values)):
        kept = sum(reference() is not None for reference in alive[:-1])
        if kept > 2:
            raise Wrong(f"with {name}: at token {number}, {kept} of the values before were still kept; keep none")
        given, value = value, value.copy().view(Value)
        alive.append(weakref.ref(value))
        yield float(score), value
        if not np.array_equal(value, given):
            raise Wrong(f"with {name}: your function changed the value of token {number}, which it should only read")
        del value


def _vector(got, wanted, at):
    """Raise Wrong unless the answer is this vector, to 9 digits."""
    array = array_from(got, wanted.shape, at)
    off = ~(np.abs(array - wanted) <= EXACT * np.maximum(1, np.abs(wanted)))
    if off.any():
        i = int(np.flatnonzero(off)[0])
        raise Wrong(f"{at} {differs(f'element {i}', array[i], wanted[i])}")


# Exercise 2: merge


def exercise_2(merge):
    """merge(out_a, lse_a, out_b, lse_b) -> (out, lse)"""
    exercise = Exercise("Exercise 2: merge")
    rng, inf = np.random.default_rng(), np.inf
    pairs = [(0.0, 0.0), (3.0, 3 + np.log(3)), (1.0, 4.0), (4.0, 1.0), (5000.0, 5001.5), (-5000.0, -5002.0)]
    pairs += [(2.0, -inf), (-inf, -7.0), (-inf, -inf), (900.0, -900.0), *rng.uniform(-30, 30, (10, 2)).tolist()]
    with exercise, time_limit():
        for lse_a, lse_b in pairs:
            at = f"with the lse {lse_a:g} and {lse_b:g}"
            a, b = (rng.standard_normal(5) if lse > -inf else np.zeros(5) for lse in (lse_a, lse_b))
            top = max(lse_a, lse_b)
            weights = np.zeros(2) if top == -inf else np.exp(np.array([lse_a, lse_b]) - top)
            total = weights.sum()
            wanted = (weights[0] * a + weights[1] * b) / (total or 1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    got = merge(a.copy(), lse_a, b.copy(), lse_b)
                except (RuntimeWarning, FloatingPointError, OverflowError) as problem:
                    raise Wrong(f"{at}: {problem}") from None
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{at} your function gave {shown(got)}, expected a pair (out, lse)")
            _vector(got[0], wanted, at)
            lse = top + np.log(total) if total else -inf
            if not isinstance(got[1], numbers.Real):
                raise Wrong(f"{at} the lse is {shown(got[1])}, expected a number")
            close = got[1] == lse if total == 0 else abs(got[1] - lse) <= EXACT * max(1, abs(lse))
            exercise.require(close, f"{at} " + differs("the result's lse", got[1], lse))
    return exercise.report(f"right on {len(pairs)} pairs, empty ones among them")


# Exercise 3: shares of whole tiles


def exercise_3(share):
    """share(kv_len, splits, i) -> (first, last)"""
    exercise = Exercise("Exercise 3: shares of whole tiles")
    rng = np.random.default_rng()
    cases = [(n, splits) for n in (1, 15, 16, 17, 31, 32, 33, 48, 100, 1000) for splits in (1, 2, 3, 7, 20)]
    cases += [(int(n), int(splits)) for n, splits in zip(rng.integers(1, 5000, 30), rng.integers(1, 140, 30))]
    cases += [((1 << 20) + 1, 132)]
    with exercise, time_limit():
        for kv_len, splits in cases:
            at, tiles = 0, []
            for i in range(splits):
                call, got = call_text(share, kv_len, splits, i), share(kv_len, splits, i)
                first, last = _two_numbers(got, call)
                gap = "starts behind" if first > at else "starts again before"
                exercise.require(
                    first == at,
                    f"{call} gave ({first}, {last}), which {gap} the token {at}, where the block before it ends",
                )
                exercise.require(
                    first <= last <= kv_len, f"{call} gave ({first}, {last}), with {counted(kv_len, 'token')}"
                )
                exercise.require(
                    last % 16 == 0 or last == kv_len,
                    f"{call} gave ({first}, {last}): {last} is no multiple of 16 and not the end",
                )
                tiles.append(-(-last // 16) - -(-first // 16))
                at = last
            exercise.require(
                at == kv_len, f"kv_len = {kv_len}, splits = {splits}: the tokens from {at} on belong to no block"
            )
            exercise.require(
                max(tiles) - min(tiles) <= 1,
                f"kv_len = {kv_len}, splits = {splits}: one block has {counted(min(tiles), 'tile')}, "
                f"another {max(tiles)}",
            )
    return exercise.report(f"right for {len(cases)} caches: no token lost, tiles whole, shares even")


def _two_numbers(got, call):
    if got is None:
        raise Wrong(f"{call} gave None. Does the function return its result?")
    whole = isinstance(got, (tuple, list)) and len(got) == 2
    if not whole or not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in got):
        raise Wrong(f"{call} gave {shown(got)}, expected a pair of whole numbers (first, last)")
    return int(got[0]), int(got[1])


# Exercise 4: how many splits


def exercise_4(best_splits):
    """best_splits(kv_len, heads, room, step, merge) -> int"""
    exercise = Exercise("Exercise 4: how many splits")
    rng = np.random.default_rng()
    cases = [(1000, 8, 32, 0.1, 0.5), (1, 8, 32, 0.1, 0.5), (7, 1, 100, 1.0, 0.25), (4096, 32, 792, 0.1, 0.1)]
    cases += [
        (512, 32, 792, 0.1, 0.5),
        (3000, 8, 132, 0.05, 0.05),
        (200, 200, 132, 0.1, 0.1),
        (1000, 32, 100, 1.0, 0.1),
    ]
    for _ in range(12):
        sizes = (int(rng.integers(1, high)) for high in (3000, 64, 1000))
        cases.append((*sizes, int(rng.integers(1, 33)) / 64, int(rng.integers(1, 33)) / 64))  # exact in binary
    with exercise, time_limit(30):
        for kv_len, heads, room, step, merge in cases:
            args = kv_len, heads, room, step, merge
            splits = np.arange(1, kv_len + 1)
            waves, tokens = -(-heads * splits // room), -(-kv_len // splits)
            times = waves * tokens * step + splits * merge
            got = number_from(best_splits, *args, whole=True)
            call, wanted = call_text(best_splits, *args), 1 + int(times.argmin())
            exercise.require(1 <= got <= kv_len, f"{call} gave {got:,}, expected 1 to {kv_len:,}")
            mine, best = times[got - 1], times[wanted - 1]
            longer, shortest = apart(mine, best)
            text = f"{call} gave {got:,}, which takes {longer} µs; {wanted:,} takes {shortest} µs"
            exercise.require(mine <= best * (1 + 1e-9), text)
            exercise.require(got <= wanted, f"{text}, as long, and is smaller")
    return exercise.report(f"right in {len(cases)} cases")


# Exercises 5 and 6: kernels


def _inputs(rng, heads, kv_len, how):
    """q (heads, 64), k and v (kv_len, 64), with scores of a kind."""
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((heads, 64), (kv_len, 64), (kv_len, 64)))
    v += np.sign(v)  # away from zero
    if how == "all equal":
        q[:] = 0
    elif how != "random":  # the first channel carries the score, the others a little
        q[:, 1:] *= 0.05
        q[:, 0] = 1
        steps = np.linspace(-1, 1, kv_len) if kv_len > 1 else np.ones(1)
        one = np.zeros(kv_len)
        one[(kv_len - 1) // 8 * 8 - 1 if kv_len % 8 == 1 else -1] = 300  # not a token of warp 0
        k[:, 0] = {
            "one far above all": one,
            "growing": 60 * steps,
            "falling": -60 * steps,
            "around 2000": 2000 + steps,
            "around -2000": steps - 2000,
        }[how]
    return q, k, v


def _attention(q, k, v, base):
    s = (q.astype(np.float64) @ k.T.astype(np.float64)) * np.log(base)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return (p @ v / p.sum(axis=1, keepdims=True)).astype(np.float64)


KINDS = ("random", "all equal", "growing", "falling", "around 2000", "around -2000", "one far above all")


def exercise_5(source):
    """CUDA source of stale."""
    exercise = Exercise("Exercise 5: find the bug")
    cases = [(n, how) for n in (1, 2, 8, 9, 100) for how in KINDS]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "stale"), np.random.default_rng()
        q, k, v = np.ones((1, 64), np.float32), np.zeros((2, 64), np.float32), np.ones((2, 64), np.float32)
        k[1, 0], v[1] = 1, 4  # by hand: (1 · 1 + 2 · 4) / (1 + 2)
        _stale(kernel, q, k, v, "kv_len = 2, scores 0 and 1", TOLERANCE)
        for kv_len, how in cases:
            at = f"kv_len = {kv_len}, scores {how}"
            report = _stale(kernel, *_inputs(rng, 1, kv_len, how), at, _rounding(how), kv_len < 10 and how == KINDS[0])
        most = 4 * kv_len + 2 * 8  # two words of a key and of a value, and q
        made = requests(report, "ld")
        exercise.require(
            made <= most,
            f"right, but at kv_len = {kv_len} the warps make {made:,} load requests; wanted: at most {most:,}",
        )
    return exercise.report(f"right in {len(cases) + 1} cases, whatever the order of the scores")


def _stale(kernel, q, k, v, at, tolerance, races=True):
    out, arrays = unset(64), {"q": q, "k": k, "v": v}
    before = {name: a.copy() for name, a in arrays.items()}
    flat = (a.reshape(-1) for a in (q, k, v))
    report = launched(kernel, 1, 256, *flat, out, np.int32(len(k)), at=at, check_races=races)
    near("out", out, _attention(q, k, v, 2)[0], tolerance, at)
    unchanged(arrays, before, at)
    return report


def _rounding(how):
    return 10 * TOLERANCE if "2000" in how else TOLERANCE


def exercise_6(source):
    """CUDA source of online."""
    exercise = Exercise("Exercise 6: the online softmax")
    sizes = [(1, 1), (1, 2), (5, 31), (4, 100)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "online"), np.random.default_rng()
        if isinstance(source, str):
            named_lanes(source)
        for heads, kv_len in sizes:
            for how in KINDS:
                report = _online(kernel, rng, heads, kv_len, how)
        heads, kv_len = sizes[-1]
        at = f"heads = {heads}, kv_len = {kv_len}"
        no_shared(report, at)
        made, most = requests(report, "ld"), heads * (4 * kv_len + 4)
        exercise.require(
            made <= most,
            f"right, but at {at} the warps make {made:,} load requests; wanted: at most {most:,}, "
            "4 for a token and head: two for its key, two for its value",
        )
        if report.sectors_per_request("ld") > 4 and made > most // 2:
            coalesced(report, at)
        exercise.require(requests(report, "st") <= 2 * heads, f"right, but at {at} more is stored than the result")
    return exercise.report(f"right in {len(sizes) * len(KINDS)} cases, each key and value read once")


def _online(kernel, rng, heads, kv_len, how):
    at = f"heads = {heads}, kv_len = {kv_len}, scores {how}"
    q, k, v = _inputs(rng, heads, kv_len, how)
    out, arrays = unset((heads, 64)), {"q": q, "k": k, "v": v}
    before = {name: a.copy() for name, a in arrays.items()}
    flat = (a.reshape(-1) for a in (q, k, v, out))
    races = kv_len < 40 and how == KINDS[0]  # where they are does not depend on the scores
    report = launched(
        kernel, blocks_for(heads, 4), 128, *flat, np.int32(kv_len), np.int32(heads), at=at, check_races=races
    )
    near("out", out, _attention(q, k, v, np.e), _rounding(how), at)
    unchanged(arrays, before, at)
    return report


# Exercise 7: a Triton kernel, and its launch

MOST_SPLITS, MOST_CHANNELS = 64, 128


def _lse(rng, splits, heads, how):
    """(splits, heads), in units of log 2, with empty splits or without."""
    lse = 4 * rng.standard_normal((splits, heads))
    lse += {"around 5000": 5000, "around -5000": -5000}.get(how, 0)
    if how == "some splits empty":
        lse[rng.random(lse.shape) < 0.4] = -np.inf
        lse[0, 0], lse[-1, 0] = -np.inf, 3  # one is, and not all of head 0
    if how == "no token at all in the last head":
        lse[:, -1] = -np.inf
    return lse.astype(np.float32)


def exercise_7(merge_splits):
    """merge_splits(partial, lse, out), which launches a Triton kernel"""
    exercise = Exercise("Exercise 7: a Triton kernel, and its launch")
    some, none = "some splits empty", "no token at all in the last head"
    cases = [  # splits, heads, head_dim, lse: smallest first, then those that hurt, each of them for one reason
        (1, 1, 1, "around 0"),
        (2, 1, 1, "around 0"),
        (1, 1, 1, none),
        (3, 2, 5, "around 0"),
        (4, 3, 16, "around 5000"),
        (5, 2, 17, "around -5000"),
        (7, 3, 31, some),
        (17, 2, 33, none),
        (61, 3, 80, some),
        (MOST_SPLITS, 2, MOST_CHANNELS, "around 5000"),
    ]
    with exercise, time_limit(60), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rng = np.random.default_rng()
        cases.append((*(int(rng.integers(2, most)) for most in (MOST_SPLITS, 6, MOST_CHANNELS)), some))
        _merge_splits(exercise, merge_splits, np.array([[[10.0]], [[20.0]]]), np.array([[3.0], [4.0]]), "lse 3 and 4")
        for splits, heads, head_dim, how in cases:
            lse = _lse(rng, splits, heads, how)
            partial = np.where(lse[..., None] > -np.inf, rng.standard_normal((splits, heads, head_dim)) + 2, 0)
            _merge_splits(exercise, merge_splits, partial, lse, f"lse {how}")
    return exercise.report(f"right on {len(cases) + 1} shapes, each partial result read once")


def _merge_splits(exercise, merge_splits, partial, lse, how):
    splits, heads, head_dim = partial.shape
    many = ", ".join(counted(n, word) for n, word in ((splits, "split"), (heads, "head"), (head_dim, "channel")))
    at = f"{many}, {how}"
    tensors = {"partial": guarded(partial), "lse": guarded(lse), "out": output(heads, head_dim)}
    before = {name: tensors[name].numpy().copy() for name in ("partial", "lse")}
    counts = called(merge_splits, tensors)
    top = np.maximum(lse.max(axis=0), np.finfo(np.float32).min)  # finite, where all are empty
    weights = 2.0 ** (lse - top)
    total = weights.sum(axis=0)
    wanted = (weights[..., None] * partial.astype(np.float32)).sum(axis=0) / np.where(total, total, 1)[:, None]
    near_tensor(tensors["out"], wanted, f"with {at}", "out", TOLERANCE)
    unchanged({name: tensors[name].numpy() for name in before}, before, at)
    wrote, read = counts.wrote["out"], counts.read["partial"]
    exercise.require(
        wrote == heads * head_dim,
        f"with {at}: out is right, but a kernel stored {counted(wrote, 'element')} of it; wanted: {heads * head_dim:,}",
    )
    exercise.require(
        read <= partial.size,
        f"with {at}: right, but {counted(read, 'element')} of partial were loaded; wanted: {partial.size:,}, each once",
    )
    exercise.require(
        counts.programs == heads,
        f"with {at}: right, but {counted(counts.programs, 'program')} ran; wanted: {heads:,}, one for each head",
    )
