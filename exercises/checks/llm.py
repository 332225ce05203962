"""The checks of chapter 17: a sampler, a law from ablations, and by name those of its other modules.

Exercise 1 is in llm_bytes.py, 2 and 3 are in llm_positions.py, 6 and 7, which are kernels, in llm_kernels.py.
"""

import itertools
import warnings
from math import inf

import numpy as np

from exercises.checks import call_text, counted, number_from, shown, time_limit
from exercises.checks.llm_bytes import exercise_1
from exercises.checks.llm_kernels import exercise_6, exercise_7
from exercises.checks.llm_positions import exercise_2, exercise_3
from lab.check import apart
from lab.exercise import Exercise, Wrong
from ref.llm import draw, probabilities

__all__ = [
    "exercise_1", "exercise_2", "exercise_3", "exercise_4", "exercise_5", "exercise_6", "exercise_7",
]  # fmt: skip

# Exercise 4: a sampler

NEAR = 1e-9  # u is no nearer to an end of a token's place, where rounding decides
LAST = 1 - 2**-53  # the largest number below 1


def _lines(rng):
    """[(name, logits, temperature, top_k, top_p, exact)]: exact, if no place ends at a number that is rounded."""
    one, ties = [0.5], [1.0, 3.0, 1.0, 3.0, 3.0, 0.0]
    cases = [
        ("one token", one, 1.0, None, None, True),
        ("one token, temperature 0", one, 0, None, None, True),
        ("two equal logits", [2.0, 2.0], 1.0, None, None, True),
        ("logits 0, 1, 2", [0.0, 1.0, 2.0], 1.0, None, None, False),
        ("temperature 0", [1.0, 3.0, 2.0], 0, None, None, True),
        ("temperature 0 and equal logits", ties, 0, None, None, True),
        ("temperature 0.5", [0.0, 1.0, 2.0], 0.5, None, None, False),
        ("logits of 90,000, temperature 0.01", [9e4, 9e4 - 0.01, 8e4], 0.01, None, None, False),
        ("temperature 0.0001", [1.0, 1.0 + 2**-13, 0.5], 1e-4, None, None, False),
        ("temperature 1000", [0.0, 90.0, 900.0], 1e3, None, None, False),
        ("logits of −90,000", [-9e4, -9e4 + 1], 1.0, None, None, False),
        ("four equal logits, top_k = 2", [7.0] * 4, 1.0, 2, None, True),
        ("top_k = 1", [1.0, 3.0, 2.0], 1.0, 1, None, True),
        ("top_k = 1 and equal logits", ties, 1.0, 1, None, True),
        ("top_k beyond the vocabulary", [1.0, 2.0], 1.0, 10, None, False),
        ("top_k that cuts through equal logits", ties, 1.0, 4, None, False),
        ("four equal logits, top_p = 0.5", [7.0] * 4, 1.0, None, 0.5, True),
        ("four equal logits, top_p = 0.51", [7.0] * 4, 1.0, None, 0.51, False),
        ("top_p = 1", [1.0, 3.0, 2.0], 1.0, None, 1.0, False),
        ("top_p = 0.995", [0.0, 5.0, -3.0], 1.0, None, 0.995, False),
        ("a small top_p", [1.0, 3.0, 2.0], 1.0, None, 1e-6, True),
        ("top_p that cuts through equal logits", ties, 1.0, None, 0.7, False),
        ("eight equal logits, top_k = 4, top_p = 0.5", [1.0] * 8, 1.0, 4, 0.5, True),
        ("all but one −inf", [-inf, -inf, 4.0, -inf], 1.0, None, None, True),
        ("all but one −inf, top_k = 3", [-inf, -inf, 4.0, -inf], 1.0, 3, 1.0, True),
        ("all but one −inf, temperature 0", [-inf, 4.0], 0, None, None, True),
        ("ten equal logits", [1.0] * 10, 1.0, None, None, False),
        ("ten equal logits and three of −inf", [-inf] + [1.0] * 10 + [-inf] * 2, 1.0, None, None, False),
        ("sixty equal logits", [1.0] * 60, 1.0, None, None, False),
        ("sixty equal logits, top_k = 40", [1.0] * 60, 1.0, 40, None, False),
    ]
    for n in range(1, 20):
        vocab = int(rng.integers(1, 300)) if n < 19 else 32_000
        logits = (rng.standard_normal(vocab) * rng.choice([1, 5])).astype(np.float32)
        if n % 3 == 0:
            logits = np.round(logits)  # many equal ones
        if n % 4 == 0 and vocab > 1:
            logits[rng.integers(0, vocab, vocab // 3)] = -inf
            logits[int(rng.integers(vocab))] = 1
        top_k = int(rng.integers(1, 400)) if rng.random() < 0.5 else None
        top_p = float(rng.uniform(0.05, 1)) if rng.random() < 0.5 else None
        cases.append(
            (f"{counted(vocab, 'logit')}, draw {n}", logits, float(rng.uniform(0.3, 1.5)), top_k, top_p, False)
        )
    return cases


def exercise_4(sample):
    """sample(logits, u, temperature, top_k, top_p) -> token"""
    exercise = Exercise("Exercise 4: a sampler")
    rng = np.random.default_rng()
    cases = _lines(rng)
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, given, temperature, top_k, top_p, exact in cases:
            logits = np.array(given, np.float32)
            law = probabilities(logits, temperature, top_k, top_p)
            for u in _places(rng, law, exact):
                _sampled(sample, name, logits, law, u, temperature, top_k, top_p)
    return exercise.report(f"the right token of {len(cases)} vocabularies, wherever u lies")


def _places(rng, law, exact):
    """Numbers u whose token is sure: in tokens' places, just behind and before their ends, the very ends if those are
    exact, and the largest below 1."""
    lengths = np.sort(law)[::-1]
    ends = np.cumsum(lengths)
    some = np.flatnonzero(lengths > 4 * NEAR)
    if len(some) > 12:  # of a large vocabulary fewer: an answer may walk along the line in Python, for every place
        some = np.r_[0, some[-1], rng.choice(some, 8 if len(law) < 1000 else 2, replace=False)]
    found = [0.0, *(float(ends[i] - part * lengths[i]) for i in some for part in (0.5, rng.uniform(0.1, 0.9)))]
    found += [float(ends[i] + by) for i in some for by in (-NEAR, NEAR)]
    found += [float(ends[i]) for i in some if exact]
    found = [u for u in found if 0 <= u < 1 - NEAR]
    return [*found, 1 - 1e-15, LAST] if lengths[lengths > 0][-1] > 4 * NEAR else found


def _sampled(sample, name, logits, law, u, temperature, top_k, top_p):
    wanted, before = draw(law, u), logits.copy()
    how = f"temperature = {temperature:g}, top_k = {top_k}, top_p = {top_p if top_p is None else f'{top_p:.4g}'}"
    at = f"with {name} (u = {u!r}, {how}" + (f", logits = {shown(before.tolist())}" if len(logits) < 9 else "") + ")"
    try:
        got = number_from(sample, logits, u, temperature, top_k, top_p, whole=True)
    except IndexError as error:
        why = "Is that a place behind the last token? Sums are rounded, and u may be larger"
        if u < 0.5:
            why = "Are all the weights numbers? A large power is infinite, and infinity over infinity is NaN"
        raise Wrong(f"{at} your code asks for what is not there ({error}). {why}") from None
    except Wrong as error:
        raise Wrong(f"{at}: {str(error).split(') ', 1)[-1]}") from None
    if not np.array_equal(logits, before):
        raise Wrong(f"{at} your function changed the logits")
    if got == wanted:
        return
    why = ""
    if not 0 <= got < len(logits):
        why = f": there are {counted(len(logits), 'token')}"
    elif law[got] == 0:
        why = f": token {got} is not let in"
    elif before[got] == before[wanted]:
        why = (
            ": their logits are equal. Is the one with the smaller index first on the line, how many are let in, and "
            "does a place hold its beginning, not its end?"
        )
    raise Wrong(f"{at} your function gave token {got}, expected {wanted}{why}")


# Exercise 5: the law's constant

REPEATS, NOISE = 9, 0.004  # times of a run, and how far they lie apart, over their mean


def _machine(rng, noise):
    """(GB/s, c, kernels, runs): a made-up machine, and the times of a model's step there with kernels left out."""
    speed, c = float(rng.uniform(500, 8000)), float(rng.uniform(0.4, 3))
    layers, products = int(rng.integers(8, 60)), ("qkv", "o", "gate_up", "down")
    kernels = {name: (layers * int(rng.uniform(10e6, 120e6)), layers) for name in products}
    kernels |= {"norms": (layers * 20_000, 2 * layers), "rope": (layers * 8_000, layers), "embed": (10_000, 3)}
    kernels |= {"attention": (layers * int(rng.uniform(1e6, 30e6)), 2 * layers), "head": (250_000_000, 2)}
    left_out = [part for n in (0, 1, 2) for part in itertools.combinations(rng.permutation(list(kernels)).tolist(), n)]
    runs, between = [], noise * _time(kernels, (), speed, c)
    for part in rng.permutation(len(left_out)).tolist():
        times = _time(kernels, left_out[part], speed, c) + between * rng.standard_normal(REPEATS)
        if noise:
            disturbed = rng.choice(REPEATS, int(rng.integers(0, 3)), replace=False)
            times[disturbed] *= rng.uniform(1.2, 3, len(disturbed))
        runs.append((left_out[part], times.tolist()))
    return speed, c, kernels, runs


def _left(kernels, left_out):
    """(bytes, launches) of what is still there."""
    return tuple(sum(kernels[name][n] for name in kernels if name not in left_out) for n in (0, 1))


def _time(kernels, left_out, speed, c):
    bytes_, launches = _left(kernels, left_out)
    return bytes_ / speed / 1e3 + launches * c


def _fit(kernels, runs):
    bytes_, launches = np.array([_left(kernels, left_out) for left_out, _ in runs], float).T
    times = np.array([np.median(times) for _, times in runs])
    slope, c = np.linalg.lstsq(np.stack([bytes_ / 1e3, launches], axis=1), times)[0]
    return 1 / slope, c


def _law_of(fit_law, kernels, runs, at):
    given = dict(kernels), [(left_out, list(times)) for left_out, times in runs]
    got = fit_law(*given)
    if given != (kernels, runs):
        raise Wrong(f"{at} your function changed the kernels or the runs")
    if got is None:
        raise Wrong(f"{at} your function gave None. Does it return its result?")
    try:
        speed, c = (float(n) for n in got)
    except (TypeError, ValueError):
        raise Wrong(f"{at} your function gave {shown(got)}, expected a pair (GB/s, µs)") from None
    if not np.isfinite([speed, c]).all():
        raise Wrong(f"{at} your function gave ({speed}, {c}), expected two finite numbers")
    return speed, c


TWO = {"products": (4_000_000_000, 100), "norms": (0, 200)}
THREE = {"products": (4_000_000_000, 100), "head": (400_000_000, 20), "norms": (40_000_000, 200)}
EXACT = [(TWO, [(), ("norms",)]), (TWO, [("products",), ()]), (THREE, [("head",), (), ("norms", "head")])]


def exercise_5(fit_law, most_launches):
    """fit_law(kernels, runs) -> (GB/s, µs a launch); most_launches(gb_per_s, c, bytes, share) -> launches"""
    exercise = Exercise("Exercise 5: the law's constant")
    rng = np.random.default_rng()
    exact = [(4000.0, 1.0, k, [(out, [_time(k, out, 4000, 1)] * 3) for out in runs]) for k, runs in EXACT]
    exact += [_machine(rng, 0.0) for _ in range(10)]
    machines, off = 120, np.zeros((2, 2))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, (speed, c, kernels, runs) in enumerate(exact):
            at = f"with kernels = {kernels}, runs = {runs}" if n < len(EXACT) else "with the runs of a quiet machine"
            got = _law_of(fit_law, kernels, runs, at)
            if not np.allclose(got, (speed, c), rtol=1e-6, atol=0):
                mine, right = (
                    " GB/s and ".join(texts) + " µs a launch"
                    for texts in zip(*(apart(g, w) for g, w in zip(got, (speed, c))))
                )
                raise Wrong(f"{at} your function gave {mine}, expected {right}")
        for _ in range(machines):
            speed, c, *given = _machine(rng, NOISE)
            for n, law in enumerate((_law_of(fit_law, *given, "with noise"), _fit(*given))):
                off[n] += np.abs(np.array(law) / (speed, c) - 1) / machines
        for what, mine, fit in zip(("GB/s", "c"), *off):
            exercise.require(
                mine <= 1.6 * fit,
                f"right without noise, but on {machines} machines with noise your {what} is off by {mine:.2%} on "
                f"average; a fit through the medians of all runs is off by {fit:.2%}",
            )
        _most(exercise, most_launches, rng)
    return exercise.report(f"{machines} machines found through their noise, and the launches that each can bear")


def _most(exercise, most_launches, rng):
    cases = [(4000.0, 1.0, 4_000_000_000, 0.9), (4000.0, 2.0, 4_000_000_000, 0.9), (1000.0, 1.0, 1_024_000_000, 0.5)]
    cases += [(1000.0, 1.0, 1_024_000_000, 0.25), (1000.0, 900.0, 1_000_000, 0.9), (1000.0, 0.5, 1_000_000_000, 1.0)]
    for n in rng.integers(0, 3000, 40).tolist():
        share, speed = float(rng.uniform(0.3, 0.99)), float(rng.uniform(500, 8000))
        bytes_ = int(rng.integers(10**8, 10**11))
        cases.append((speed, bytes_ / speed / 1e3 * (1 / share - 1) / (n + 0.5), bytes_, share))
    for speed, c, bytes_, share in cases:
        limit = bytes_ / speed / 1e3
        wanted = int(limit * (1 / share - 1) / c)
        got = number_from(most_launches, speed, c, bytes_, share, whole=True)
        call = call_text(most_launches, speed, c, bytes_, share)
        exercise.require(
            got == wanted,
            f"{call} gave {got:,}, expected {wanted:,}: the bytes take {limit:,.6g} µs, and the step may take "
            f"{limit / share:,.6g} µs",
        )
