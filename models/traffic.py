"""Requests as they come to a server: when, with how long a prompt, and how long an answer.

    poisson(count, rate, seed=)          when: independent of each other, so many a second in the mean
    zipf(count, longest, seed=)          how long: an i-th of the longest for the i-th rank, every rank as likely
    of_zipf(count, rate, ...)            requests of such lengths
    of_trace(count, rate, ...)           requests of lengths that models/text_lengths.json holds

Everything is drawn from a seed: the same one gives the same requests.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.arguments import expect_count

TRACE = Path(__file__).resolve().parent / "text_lengths.json"
RANKS = 64


class Request(NamedTuple):
    """arrives: s. prompt, answer: tokens, at least one each. shared: tokens that the prompt begins with as others do,
    fewer than it has."""

    arrives: float
    prompt: int
    answer: int
    shared: int = 0


def poisson(count, rate, seed=0):
    """When so many requests arrive, in s: (count,), rising. rate  requests a second, in the mean"""
    expect_count("poisson", "count", count, low=0)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
        raise ValueError(f"poisson: rate must be above 0 requests a second, got {rate!r}")
    return np.random.default_rng([seed, 1]).exponential(1 / rate, count).cumsum()


def zipf(count, longest, seed=0, ranks=RANKS):
    """Lengths by Zipf's law: longest // rank, at least 1, every rank from 1 to `ranks` as likely. (count,)"""
    expect_count("zipf", "longest", longest)
    expect_count("zipf", "ranks", ranks)
    return np.maximum(1, longest // np.random.default_rng([seed, 2]).integers(1, ranks + 1, count))


def of_zipf(count, rate, *, longest_prompt=16384, longest_answer=1024, shared=0, seed=0):
    """[Request, ...] of lengths by Zipf's law. shared  tokens of a beginning that all prompts have, before their own"""
    lengths = zipf(count, longest_prompt, seed), zipf(count, longest_answer, seed + 1)
    return _requests(poisson(count, rate, seed), *lengths, shared)


def of_trace(count, rate, *, shared=0, seed=0):
    """[Request, ...] whose lengths are pairs of the trace, drawn again and again."""
    pairs = trace()
    drawn = pairs[np.random.default_rng([seed, 3]).integers(0, len(pairs), count)]
    return _requests(poisson(count, rate, seed), drawn[:, 0], drawn[:, 1], shared)


def trace():
    """Lengths of prompts and answers that were counted, tokens: (pairs, 2). models/text_lengths.py says of what."""
    return np.array(json.loads(TRACE.read_text())["pairs"])


def _requests(arrivals, prompts, answers, shared):
    expect_count("requests", "shared", shared, low=0)
    both = zip(arrivals.tolist(), prompts.tolist(), answers.tolist())
    return [Request(arrives, shared + prompt, answer, shared) for arrives, prompt, answer in both]
