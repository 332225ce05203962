"""Wrong answers to the exercises of chapter 15. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

import math

import numpy as np

# Exercise 1: shares of a line


def _line(twice=lambda length, before: min(length, before), fits=lambda cost, limit: cost <= limit, stops=False):
    """twice(length of the share, chunks of its last pair in front of its end) -> chunks walked twice."""

    def cut_line(pairs, chunks, limit, again):
        lengths, begin = [], 0
        while begin < pairs * chunks:
            longest = 1
            for length in range(1, pairs * chunks - begin + 1):
                if fits(length + again * twice(length, (begin + length) % chunks), limit):
                    longest = length
                elif stops:
                    break
            lengths.append(longest)
            begin += longest
        return lengths

    return cut_line


def _at_the_ends_too(pairs, chunks, limit, again):
    """Walks the last piece twice, even where its pair ends there."""
    lengths, begin = [], 0
    while begin < pairs * chunks:
        ends = range(begin + 1, pairs * chunks + 1)
        dear = {end: min(end - begin, (end - 1) % chunks + 1) for end in ends}
        fitting = [end for end in ends if end - begin + again * dear[end] <= limit]
        lengths.append(max(fitting) - begin)
        begin = max(fitting)
    return lengths


def _equal(pairs, chunks, limit, again):
    shares = len(_line()(pairs, chunks, limit, again))
    cuts = [n * pairs * chunks // shares for n in range(shares + 1)]
    return [b - a for a, b in zip(cuts, cuts[1:])]


# Exercise 2: what counts

LN2 = math.log(2)


def _counts(go_on=lambda after, bits: not after < -bits, own=False, clean=lambda log: log, base=LN2, least=0):
    def chunks_that_count(dt, A, Q, bits):
        logs = (A * dt / base).reshape(-1, Q).sum(axis=1)
        count, after = 0, 0.0
        for log in logs[::-1]:
            log = clean(log)
            if not go_on(after + log if own else after, bits):
                break
            count, after = count + 1, after + log
        return max(count, least)

    return chunks_that_count


def _from_the_front(dt, A, Q, bits):
    return _counts()(dt[::-1], A, Q, bits)


def _each_alone(dt, A, Q, bits):
    logs = (A * dt / math.log(2)).reshape(-1, Q).sum(axis=1)
    return 1 + int((~(logs[1:] < -bits)).cumprod().sum())


RIGHT = {1: _line(), 2: _counts()}

WRONG = {
    1: {
        "stops at the first that is too dear": (_line(stops=True), "expected [4]"),
        "nothing is walked twice": (_line(twice=lambda length, before: 0), "expected ["),
        "the whole share twice": (_line(twice=lambda length, before: length if before else 0), "expected ["),
        "more of the pair than it has": (_line(twice=lambda length, before: before), "expected ["),
        "twice at the end of a pair as well": (_at_the_ends_too, "expected [4]"),
        "below the limit": (_line(fits=lambda cost, limit: cost < limit), "expected ["),
        "equal shares": (_equal, "expected ["),
        "where shares end": (lambda *a: np.cumsum(_line()(*a)).tolist(), "expected ["),
        "how many": (lambda *a: len(_line()(*a)), "expected a list"),
    },
    2: {
        "a NaN ends it": (_counts(go_on=lambda after, bits: after >= -bits), "with dt = "),
        "a NaN is nothing": (_counts(clean=lambda log: 0.0 if math.isnan(log) else log), "with dt = "),
        "at most in place of below": (_counts(go_on=lambda after, bits: not after <= -bits, least=1), "with dt = "),
        "its own decay as well": (_counts(own=True, least=1), "with dt = "),
        "in powers of e": (_counts(base=1.0), "with dt = "),
        "from the front": (_from_the_front, "with dt = "),
        "each chunk alone": (_each_alone, "with dt = "),
    },
}
