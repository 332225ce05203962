"""Checks of chapter 09: rounding to 8 bits, packing 4, loads in pairs, scales on the other side.

The CUDA C++ runs on the SIMT machine; quality is counted there, as requests. The NumPy answers are also watched for the
memory that they take.
"""

import warnings

import numpy as np

from exercises.checks import counted, expect_array, shown, time_limit
from exercises.checks.costs import Watched, counted_memory
from exercises.checks.launches import BLOCK, blocks_for, compiled, launched, near, requests, unchanged
from lab.check import differs, unset
from lab.exercise import Exercise, Wrong

# Exercise 1: a row in 8 bits


def exercise_1(quantize_rows):
    """quantize_rows(x) -> (codes, scale)."""
    exercise = Exercise("Exercise 1: a row in 8 bits")
    rng = np.random.default_rng()
    cases = [
        ("the example", np.array([[12.7, -3.04, 0]])),
        ("a row of zeros", np.array([[1, 2], [0, 0]])),
        ("a row whose largest number is negative", np.array([[1, -9, 2]])),
        ("rows of very different size", rng.standard_normal((5, 7)) * 10.0 ** np.arange(-3, 2)[:, None]),
        ("a square matrix", rng.standard_normal((6, 6)) * np.array([1, 30, 1, 1, 0.1, 1])[:, None]),
        ("one column", rng.standard_normal((4, 1))),
        ("tiny numbers", rng.standard_normal((3, 5)) * 1e-30),
    ]
    cases += [(f"{r} × {n} random numbers", rng.standard_normal((r, n))) for r, n in ((1, 1), (3, 64), (50, 33))]
    with exercise, time_limit():
        for at, x in cases:
            _quantized_rows(exercise, quantize_rows, x.astype(np.float32), at)
    return exercise.report(f"right on {len(cases)} cases, no number is off by more than half a scale")


def _quantized_rows(exercise, quantize_rows, x, at):
    before = x.copy()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with np.errstate(all="warn"):
            got = quantize_rows(x)
    exercise.require(np.array_equal(x, before), f"{at}: the function changed x, which it should only read")
    codes, scale = _pair(got, at)
    expect_array(codes, "codes", np.int8, x.shape, at)
    expect_array(scale, "scale", np.float32, x.shape[:1], at)
    exercise.require(
        np.isfinite(scale).all() and (scale >= 0).all(),
        f"{at}: a scale is {scale[~(scale >= 0)][:1]}, expected 0 or more",
    )
    exercise.require(not said, f"{at}: there was a warning: {said[0].message if said else ''}")
    exercise.require(codes.min() >= -127, f"{at}: a code is -128; codes go from -127 to 127")
    off = np.abs(codes * scale[:, None].astype(np.float64) - before)
    allowed = scale[:, None] / 2 * (1 + 1e-5)
    bad = np.argwhere(off > allowed)
    if len(bad):
        r, c = map(int, bad[0])
        raise Wrong(
            f"{at}: x[{r}, {c}] is {before[r, c]:.6g}, and code {codes[r, c]} times scale {scale[r]:.6g} is "
            f"{codes[r, c] * float(scale[r]):.6g}: off by more than half a scale"
        )
    wanted = np.abs(before).max(axis=1) / 127.0
    bad = np.argwhere(np.abs(scale - wanted) > 1e-5 * wanted)
    if len(bad):
        r = int(bad[0, 0])
        raise Wrong(f"{at}: {differs(f'scale[{r}]', scale[r], wanted[r])}: the largest code is to be 127")
    exercise.require((codes[scale == 0] == 0).all(), f"{at}: a row of zeros has codes that are not 0")


def _pair(got, at):
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{at}: the function gave {shown(got)}, expected a pair (codes, scale)")
    return got


# Exercise 2: eight numbers in a word


def exercise_2(source):
    """CUDA source of pack and unpack."""
    exercise = Exercise("Exercise 2: eight numbers in a word")
    rng = np.random.default_rng()
    cases = [("the example", np.array([[-1, 2, 0, 0, 0, 0, 0, -8]]))]
    for place in range(8):  # each code alone in each place, beside zeros and beside ones
        for beside in (0, -1):
            codes = np.full((16, 8), beside)
            codes[:, place] = np.arange(-8, 8)
            cases.append((f"all codes in place {place}, {beside} beside them", codes))
    cases += [(f"{n} words of random codes", rng.integers(-8, 8, (n, 8))) for n in (1, 31, 255, 257, 1024)]
    with exercise, time_limit(60):
        pack, unpack = compiled(source, "pack"), compiled(source, "unpack")
        for at, codes in cases:
            codes, n = codes.astype(np.int8), len(codes)
            words = ((codes.astype(np.int64) & 15) << 4 * np.arange(8)).sum(axis=1).astype(np.uint32)
            got = np.full(n, 0xDEADBEEF, np.uint32)
            report = launched(pack, blocks_for(n), BLOCK, codes.reshape(-1), got, np.int32(n), at=f"pack, {at}")
            bad = np.flatnonzero(got != words)
            if len(bad):
                i = int(bad[0])
                raise Wrong(
                    f"wrong at pack, {at}: the codes {', '.join(map(str, codes[i]))} gave the word {got[i]:#010x}, "
                    f"expected {words[i]:#010x}"
                )
            reports = {"pack": report}
            back = np.full((n, 8), 99, np.int8)
            args = (words, back.reshape(-1), np.int32(n))
            reports["unpack"] = launched(unpack, blocks_for(n), BLOCK, *args, at=f"unpack, {at}")
            bad = np.flatnonzero((back != codes).any(axis=1))
            if len(bad):
                i = int(bad[0])
                raise Wrong(
                    f"wrong at unpack, {at}: the word {words[i]:#010x} gave {', '.join(map(str, back[i]))}, "
                    f"expected {', '.join(map(str, codes[i]))}"
                )
        for name, report in reports.items():  # of the last case, 1024 words
            for op, word in (("ld", "load"), ("st", "store")):
                made, most = requests(report, op), n // 32
                exercise.require(
                    made <= most,
                    f"right, but at {at} {name} makes {made} {word} requests; wanted: at most {most}, one for each 32 "
                    "words: a thread's eight bytes in one piece",
                )
    return exercise.report(f"right on {len(cases)} cases, and bytes travel in eights")


# Exercise 3: pairs from any row


def exercise_3(source):
    """CUDA source of scores."""
    exercise = Exercise("Exercise 3: pairs from any row")
    shapes = [(1, d) for d in (1, 2, 3, 4, 5)] + [(2, 1), (9, 3), (3, 31), (9, 63), (5, 64), (8, 65), (17, 127)]
    shapes += [(2, 200), (33, 66), (5, 33)]
    with exercise, time_limit(60):
        kernel, rng = compiled(source, "scores"), np.random.default_rng()
        for kv_len, head_dim in shapes:
            _scores(kernel, rng, kv_len, head_dim)
        for head_dim, each in ((128, 6), (257, 14)):
            kv_len = 64
            at = f"kv_len = {kv_len}, head_dim = {head_dim}"
            report = _scores(kernel, rng, kv_len, head_dim)
            made, most = requests(report, "ld"), kv_len * each
            exercise.require(
                made <= most,
                f"right, but at {at} the warps make {made:,} load requests; wanted: at most {most:,}, {each} for each "
                "token: keys in pairs",
            )
            sectors = report.sectors_per_request("ld")
            exercise.require(
                sectors <= 8,
                f"right, but at {at} a load of a warp touches {sectors:.3g} sectors on average; wanted: at most 8",
            )
    return exercise.report(f"right on {len(shapes) + 2} shapes, with half the requests for keys")


def _scores(kernel, rng, kv_len, head_dim):
    at = f"kv_len = {kv_len}, head_dim = {head_dim}"
    q, k = rng.standard_normal(head_dim).astype(np.float32), rng.standard_normal((kv_len, head_dim)).astype(np.float16)
    out, before = unset(kv_len), {"q": q.copy(), "k": k.copy()}
    args = (q, k, out, np.int32(kv_len), np.int32(head_dim))
    report = launched(kernel, blocks_for(kv_len, 8), BLOCK, *args, at=at)
    wanted = before["k"].astype(np.float64) @ before["q"]
    size = np.linalg.norm(q.astype(np.float64)) * np.linalg.norm(k.astype(np.float64), axis=1).max()
    near("out", out, wanted, 1e-5, at, size)
    unchanged({"q": q, "k": k}, before, at)
    return report


# Exercise 4: scores, without the keys


def exercise_4(scores):
    """scores(q, codes, scale, group) -> (kv_len,)."""
    exercise = Exercise("Exercise 4: scores, without the keys")
    rng = np.random.default_rng()
    shapes = [
        (1, 1, 1),
        (2, 1, 1),
        (1, 3, 4),
        (5, 2, 2),
        (7, 4, 3),
        (64, 16, 32),
        (65, 16, 32),
        (100, 128, 64),
        (31, 8, 64),
    ]
    with exercise, time_limit():
        for kv_len, head_dim, group in shapes:
            _scored(exercise, scores, rng, kv_len, head_dim, group)
        kv_len, head_dim, group = 20_000, 64, 100
        keys, most = kv_len * head_dim, 8 * kv_len + 40 * 8 * group * head_dim
        peak, made = _scored(exercise, scores, rng, kv_len, head_dim, group)
        exercise.require(
            peak <= most,
            f"right, but with {keys:,} keys in groups of {group * head_dim:,} the function took {peak / 1e6:.1f} MB; "
            f"wanted: at most {most / 1e6:.1f}, room for the scores and for a few groups",
        )
        scales = kv_len // group * head_dim
        exercise.require(
            made <= 2 * scales,
            f"right, but with {keys:,} keys and {scales:,} scales, numbers of q or scales were multiplied "
            f"{counted(made, 'time')}; wanted: at most {2 * scales:,}, a scale by its number of q once for all tokens "
            "of its group",
        )
    return exercise.report(f"right on {len(shapes) + 1} shapes, each scale used once, and the keys were never made")


def _scored(exercise, scores, rng, kv_len, head_dim, group):
    at = f"kv_len = {kv_len}, head_dim = {head_dim}, group = {group}"
    q = rng.standard_normal(head_dim)
    codes = rng.integers(-127, 128, (kv_len, head_dim)).astype(np.int8)
    codes[codes == 0] = 1  # where it is the only one of a token, 0 would let any answer pass
    scale = (rng.random((-(-kv_len // group), head_dim)) * 10.0 ** rng.integers(-3, 2, head_dim)).astype(np.float32)
    before = {"q": q.copy(), "codes": codes.copy(), "scale": scale.copy()}
    keys = codes * np.repeat(scale, group, axis=0)[:kv_len].astype(np.float64)
    wanted, size = keys @ q, np.abs(keys) @ np.abs(q)
    del keys
    Watched.products = 0
    with counted_memory() as most:
        got = scores(q.view(Watched), codes, scale.view(Watched), group)
        peak = most()
    made = Watched.products
    exercise.require(isinstance(got, np.ndarray), f"{at}: the function gave {shown(got)}, expected an array")
    exercise.require(got.shape == (kv_len,), f"{at}: the result has shape {got.shape}, expected {(kv_len,)}")
    exercise.require(got.dtype == np.float64, f"{at}: the result has dtype {got.dtype}, expected float64")
    off = np.abs(got - wanted)
    bad = np.flatnonzero(~(off <= 1e-6 * size))
    if len(bad):
        t = int(bad[0])
        raise Wrong(
            f"wrong at {at}: {len(bad)} of {counted(kv_len, 'score')} differ. "
            + differs(f"That of token {t}", got[t], wanted[t])
        )
    unchanged({"q": q, "codes": codes, "scale": scale}, before, at)
    return peak, made


# Exercise 5: one more token


def exercise_5(append):
    """append(cache, token, group) -> cache. It calls quantize_group, which the check watches."""
    exercise = Exercise("Exercise 5: one more token")
    rng = np.random.default_rng()
    cases = [(1, 1, 4), (2, 3, 6), (4, 2, 9), (8, 5, 25), (32, 16, 70)]  # group, head_dim, appends
    with exercise, time_limit():
        for group, head_dim, appends in cases:
            tokens = rng.standard_normal((appends, head_dim)).astype(np.float32)
            tokens *= 1 + np.arange(appends)[:, None] % 3  # scales that grow within a group
            tokens[1] += np.copysign(2 * tokens[0], tokens[1])  # the first one in every channel
            if appends > 6:
                tokens[3] = 0
            _grown(exercise, append, tokens, group)
    return exercise.report(f"right after each of {sum(n for *_, n in cases)} appends, bit for bit")


def _grown(exercise, append, tokens, group):
    head_dim, calls = tokens.shape[1], []
    names = getattr(append, "__globals__", {})
    original = names.get("quantize_group")

    def watched(given):
        calls.append(len(given))
        return _group_codes(np.asarray(given))

    cache = {
        "codes": np.zeros((0, head_dim), np.int8),
        "scale": np.zeros((0, head_dim), np.float32),
        "recent": np.zeros((0, head_dim), np.float32),
    }
    try:
        if original is not None:
            names["quantize_group"] = watched
        for n, token in enumerate(tokens, 1):
            at = f"group = {group}, token number {n}"
            before, calls[:] = {name: array.copy() for name, array in cache.items()}, []
            given = token.copy()
            new = append(cache, given, group)
            exercise.require(isinstance(new, dict), f"{at}: append gave {shown(new)}, expected a dictionary")
            exercise.require(
                all(np.array_equal(before[name], cache.get(name)) for name in before) and np.array_equal(given, token),
                f"{at}: append changed the cache, or the token, that it was given",
            )
            cache = _expected(new, tokens[:n], group, at)
            exercise.require(
                len(calls) == 1 and calls[0] <= group,
                f"{at}: right, but append called quantize_group for {calls or 'no'} tokens; wanted: one call, with at "
                f"most {group}: finished groups stay as they are",
            )
    finally:
        if original is not None:
            names["quantize_group"] = original


def _expected(cache, tokens, group, at):
    """Raise Wrong unless this is the cache of these tokens; return its three arrays."""
    n, head_dim = tokens.shape
    groups = [_group_codes(tokens[first : first + group]) for first in range(0, n, group)]
    wanted = {
        "codes": np.concatenate([codes for codes, _ in groups]),
        "scale": np.stack([scale for _, scale in groups]),
        "recent": tokens[n - n % group :],
    }
    for name, right in wanted.items():
        got = cache.get(name)
        expect_array(got, f'cache["{name}"]', right.dtype, right.shape, at)
        bad = np.argwhere(got != right)
        if len(bad):
            index = tuple(map(int, bad[0]))
            raise Wrong(f"wrong at {at}: " + differs(f'cache["{name}"]{list(index)}', got[index], right[index]))
    return {name: cache[name] for name in wanted}


def _group_codes(tokens):
    scale = np.abs(tokens).max(axis=0) / np.float32(127)
    codes = np.rint(tokens / np.where(scale == 0, np.float32(1), scale))
    return np.clip(codes, -127, 127).astype(np.int8), scale
