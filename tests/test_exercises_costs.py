"""What checks count of a learner's Python: steps, memory, products; and np.empty full of garbage."""

import sys

import numpy as np
import pytest

from exercises.checks import time_limit
from exercises.checks.costs import Watched, counted_memory, garbage_in_empty, limited_steps
from lab.exercise import Wrong

WAYS = {  # to make a step for each of n things
    "a loop": lambda n: [None for _ in range(n)],
    "a generator": lambda n: sum(i for i in range(n)),
    "map": lambda n: list(map(lambda i: i, range(n))),
    "np.vectorize": lambda n: np.vectorize(lambda i: i)(np.arange(n)),
    "np.apply_along_axis": lambda n: np.apply_along_axis(lambda row: row, 1, np.ones((n, 2))),
}


def loop(n):
    total = 0
    for i in range(n):
        total += i
    return total


@pytest.mark.parametrize("way", [loop, *WAYS.values()], ids=["lines", *WAYS])
def test_a_step_for_each_thing_is_too_many_and_one_for_all_is_not(way):
    before = sys.gettrace()
    with pytest.raises(Wrong, match="too many"), limited_steps(300, "too many"):
        way(400)
    with limited_steps(300, "too many"):
        way(40)
        assert np.pad(np.arange(10_000.0), 3).cumsum().size == 10_006
    assert sys.gettrace() is before


def test_steps_that_are_too_many_cannot_be_caught():
    def stubborn():
        try:
            loop(400)
        except Exception:
            pass

    with pytest.raises(Wrong, match="too many"), limited_steps(300, "too many"):
        stubborn()


def test_time_that_is_up_cannot_be_caught_as_an_exception():
    def stubborn():
        try:
            while True:
                pass
        except Exception:
            return

    with pytest.raises(Wrong, match="still running after 0.2 seconds"), time_limit(0.2):
        stubborn()


def test_memory_is_counted_at_its_peak():
    with counted_memory() as most:
        np.ones(100_000).sum()
        assert 800_000 <= most() < 900_000


def test_empty_arrays_are_full_of_garbage_and_others_are_not():
    with garbage_in_empty():
        assert np.isnan(np.empty((2, 3))).all() and np.isnan(np.empty(4, np.float32, order="F")).all()
        assert (np.empty(3, np.uint8) == 255).all() and (np.empty_like(np.zeros(3, np.int32)) == -1).all()
        assert not np.zeros(5).any() and not np.zeros_like(np.ones(5)).any() and (np.full(3, 2.0) == 2).all()
        assert np.empty(2, object).tolist() == [None, None] and np.empty(0).size == 0 and np.isnan(np.empty(()))
    assert np.empty.__module__ == "numpy"


def test_products_of_watched_arrays_are_counted_and_those_of_others_are_not():
    q, scale, codes = np.ones(4).view(Watched), np.ones((3, 4), np.float32).view(Watched), np.ones((10, 4), np.int8)
    Watched.products = 0
    weights = np.float64(q) * scale[1]
    assert type(weights) is np.ndarray and Watched.products == 4
    assert (codes @ weights * 2).tolist() == [8.0] * 10 and Watched.products == 4
    assert np.einsum("td,d,d->t", codes, scale[0], q).tolist() == [4.0] * 10 and Watched.products == 44
