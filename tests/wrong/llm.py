"""Wrong answers to the exercises of chapter 17: a sampler, a law; and those of the modules beside this one.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import numpy as np

from wrong import llm_bytes, llm_kernels, llm_positions

# Exercise 4: a sampler


def _sampler(
    order=lambda logits: np.argsort(-logits, kind="stable"),
    first=lambda logits, order: order[0],
    type=np.float64,
    scaled=lambda line, temperature: (line - line[0]) / temperature,
    cut=lambda weights, k: slice(k, None),
    again=True,
    let_in=lambda before, weights, p: before < p,
    one=True,
    p_first=False,
    stretched=True,
    side="right",
    divided=False,
    clamp=lambda place, weights: place,
    in_place=False,
):
    """Right, but for what is said."""

    def by_k(weights, top_k):
        if top_k is not None:
            weights[cut(weights, top_k)] = 0
            if again:
                weights /= weights.sum()

    def by_p(weights, top_p):
        if top_p is not None:
            keep = let_in(np.cumsum(weights) - weights, weights, top_p)
            keep[0] |= one
            weights[~keep] = 0

    def sample(logits, u, temperature=1.0, top_k=None, top_p=None):
        line_of = order(logits)
        if temperature == 0:
            return int(first(logits, line_of))
        if in_place:
            logits /= temperature
        line = logits[line_of].astype(type)
        weights = np.exp(scaled(line, temperature)).astype(type)
        weights /= weights.sum()
        for step in (by_p, by_k) if p_first else (by_k, by_p):
            step(weights, top_k if step is by_k else top_p)
        if divided:
            weights /= weights.sum()
        ends = np.cumsum(weights)
        place = np.searchsorted(ends, u * (ends[-1] if stretched else 1), side=side)
        return int(line_of[clamp(place, weights)])

    return sample


def _threshold_k(logits, u, temperature=1.0, top_k=None, top_p=None):
    """All that are as large as the k-th largest."""
    if top_k is not None and top_k < len(logits):
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    return SAMPLER(logits, u, temperature, None, top_p)


def _along_the_vocabulary(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The line in the order of the vocabulary."""
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    weights = np.exp((logits[order].astype(np.float64) - logits[order[0]]) / temperature)
    if top_k is not None:
        weights[top_k:] = 0
    weights /= weights.sum()
    if top_p is not None:
        keep = np.cumsum(weights) - weights < top_p
        keep[0] = True
        weights[~keep] = 0
    found = np.zeros(len(logits))
    found[order] = weights
    ends = np.cumsum(found)
    return int(min(np.searchsorted(ends, u * ends[-1], side="right"), np.flatnonzero(found)[-1]))


def _draws_itself(logits, u, temperature=1.0, top_k=None, top_p=None):
    return SAMPLER(logits, float(np.random.random()), temperature, top_k, top_p)


SAMPLER = _sampler()
EX4 = {
    "ties in any order": (
        _sampler(order=lambda logits: np.argsort(logits, kind="stable")[::-1]),
        "their logits are equal",
    ),
    "no stable sort": (_sampler(order=lambda logits: np.argsort(-logits)), "their logits are equal"),
    "the last of equal logits where temperature is 0": (
        _sampler(first=lambda logits, order: np.flatnonzero(logits == logits.max())[-1]),
        "with temperature 0 and equal logits",
    ),
    "float32": (_sampler(type=np.float32), "a place behind the last token"),
    "the largest is not subtracted": (
        _sampler(scaled=lambda line, temperature: line / temperature),
        "with logits of 90,000",
    ),
    "multiplies by the temperature": (
        _sampler(scaled=lambda line, temperature: (line - line[0]) * temperature),
        "with temperature 0.5",
    ),
    "a low temperature is taken for 0": (
        lambda logits, u, temperature, *cut: SAMPLER(logits, u, temperature if temperature > 1e-3 else 0, *cut),
        "with temperature 0.0001",
    ),
    "a high temperature is taken for 10": (
        lambda logits, u, temperature, *cut: SAMPLER(logits, u, min(temperature, 10), *cut),
        "with temperature 1000",
    ),
    "no temperature": (_sampler(scaled=lambda line, temperature: line - line[0]), "with temperature 0.5"),
    "top_k lets in one more": (_sampler(cut=lambda weights, k: slice(k + 1, None)), "top_k = 2"),
    "top_k by value": (_threshold_k, "with four equal logits, top_k = 2"),
    "top_k is not stretched before top_p": (_sampler(again=False), "top_k = 4, top_p = 0.5"),
    "top_p before top_k": (_sampler(p_first=True), "expected"),
    "top_p lets in one too few": (
        _sampler(let_in=lambda before, weights, p: before + weights <= p),
        "top_p",
    ),
    "top_p lets in a token beyond a sum that is enough": (
        _sampler(let_in=lambda before, weights, p: before <= p),
        "with four equal logits, top_p = 0.5",
    ),
    "a small top_p lets in nobody": (
        _sampler(let_in=lambda before, weights, p: before + weights <= p, one=False),
        "expected",
    ),
    "what is let in is not stretched": (_sampler(stretched=False), "a place behind the last token"),
    "a place holds its end": (_sampler(side="left"), "with two equal logits (u = 0.5"),
    "divided, and rounding gives a place behind the last": (
        _sampler(divided=True, stretched=False),
        "Is that a place behind the last token? Sums are rounded",
    ),
    "divided, and the last token, let in or not": (
        _sampler(divided=True, stretched=False, clamp=lambda place, weights: min(place, len(weights) - 1)),
        "is not let in",
    ),
    "the line in the order of the vocabulary": (_along_the_vocabulary, "with logits 0, 1, 2"),
    "changes the logits": (_sampler(in_place=True, scaled=lambda line, t: line - line[0]), "changed the logits"),
    "draws a number of its own": (_draws_itself, "expected"),
    "always the likeliest": (lambda logits, u, *how: int(np.argmax(logits)), "with two equal logits"),
    "a float": (lambda *given: float(SAMPLER(*given)), "expected a whole number, an int"),
}

# Exercise 5: the law's constant


def _left(kernels, left_out):
    """(bytes, launches) of what is still there."""
    return [sum(kernels[name][n] for name in set(kernels) - set(left_out)) for n in (0, 1)]


def _fit(middle=np.median, columns=lambda b, n: (b / 1e3, n), unit=1.0, some=lambda runs: runs, left=_left):
    """Right, but for what is said. some: which of [(bytes, launches, times)] are looked at."""

    def fit_law(kernels, runs):
        found = some([(*left(kernels, left_out), times) for left_out, times in runs])
        A = np.array([columns(b, n) for b, n, _ in found])
        s, c = np.linalg.lstsq(A, np.array([middle(times) for _, _, times in found]))[0][:2]
        return unit / s, c

    return fit_law


def _ends(runs):
    runs = sorted(runs)
    return [runs[0], runs[-1]]


def _by_ratio(runs):
    runs = sorted(runs, key=lambda run: run[1] / max(run[0], 1))
    return [runs[0], runs[-1]]


def _what_is_saved(kernels, runs):
    """Times saved, over bytes and launches left out."""
    ((_, whole),) = (run for run in runs if not run[0])
    rest = [(left_out, np.median(whole) - np.median(times)) for left_out, times in runs if left_out]
    A = np.array([[sum(kernels[name][n] for name in left_out) for n in (0, 1)] for left_out, _ in rest])
    s, c = np.linalg.lstsq(A / (1e3, 1), np.array([saved for _, saved in rest]))[0]
    return (1 / s, c) if len(rest) > 1 else FIT(kernels, runs)


def _sorts(kernels, runs):
    runs.sort()
    return FIT(kernels, runs)


def _most(gb_per_s, c, bytes, share):
    return int(bytes / gb_per_s / 1000 * (1 / share - 1) / c)


FIT = _fit()
FOUND, WANTED = "the medians of all runs", "expected 4000 GB/s and 1 µs"
EX5 = {
    "the mean of the times": ((_fit(np.mean), _most), FOUND),
    "the shortest time": ((_fit(np.min), _most), FOUND),
    "the first time": ((_fit(lambda times: times[0]), _most), FOUND),
    "the whole step and the smallest": ((_fit(some=_ends), _most), FOUND),
    "two runs that differ most": ((_fit(some=_by_ratio), _most), FOUND),
    "the first two runs": ((_fit(some=lambda runs: runs[:2]), _most), FOUND),
    "what each run saves": ((_what_is_saved, _most), FOUND),
    "a third constant": ((_fit(columns=lambda b, n: (b / 1e3, n, 1)), _most), WANTED),
    "what is left out, in place of what is there": (
        (_fit(left=lambda kernels, out: [sum(kernels[name][n] for name in out) for n in (0, 1)]), _most),
        "expected",
    ),
    "all launches, whatever is left out": (
        (_fit(left=lambda kernels, out: (_left(kernels, out)[0], sum(n for _, n in kernels.values()))), _most),
        WANTED,
    ),
    "bytes over GB/s are taken for µs": ((_fit(columns=lambda b, n: (b, n)), _most), WANTED),
    "bandwidth in TB/s": ((_fit(unit=1e-3), _most), "gave 4 GB/s and"),
    "time a GB, not GB a time": (((lambda *given: (1 / FIT(*given)[0], FIT(*given)[1])), _most), WANTED),
    "the other way round": (((lambda *given: FIT(*given)[::-1]), _most), "gave 1 GB/s and 4000 µs a launch"),
    "sorts the runs it was given": ((_sorts, _most), "changed the kernels or the runs"),
    "forgets to return": ((lambda kernels, runs: None, _most), "gave None"),
    "rounds the launches": (
        (FIT, lambda speed, c, b, share: round(b / speed / 1000 * (1 / share - 1) / c)),
        "expected",
    ),
    "a share of launches over bytes": (
        (FIT, lambda speed, c, b, share: int(b / speed / 1000 * (1 - share) / c)),
        "gave 99, expected 111",
    ),
    "one launch too many": ((FIT, lambda *given: _most(*given) + 1), "gave 112, expected 111"),
    "forgets c": ((FIT, lambda speed, c, b, share: _most(speed, 1, b, share)), "gave 111, expected 55"),
    "launches in a float": ((FIT, lambda *given: float(_most(*given))), "expected a whole number"),
}

RIGHT = {**llm_bytes.RIGHT, **llm_positions.RIGHT, 4: SAMPLER, 5: (FIT, _most), **llm_kernels.RIGHT}
WRONG = {**llm_bytes.WRONG, **llm_positions.WRONG, 4: EX4, 5: EX5, **llm_kernels.WRONG}
