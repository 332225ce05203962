"""The law of a step, from steps that obey it."""

import numpy as np
import pytest

from lab.law import fit


def test_a_law_is_found_again():
    steps = [
        (read, launches, read / 4e12 + launches * 1.5e-6) for read, launches in ((15e9, 227), (2e9, 200), (9e9, 3))
    ]
    assert fit(steps) == pytest.approx((4e12, 1.5e-6))
    assert fit(steps[:2]) == pytest.approx((4e12, 1.5e-6))


def test_noise_moves_it_a_little():
    rng = np.random.default_rng(17)
    read, launches = rng.uniform(1e9, 15e9, 40), rng.integers(1, 230, 40)
    took = (read / 4e12 + launches * 1.5e-6) * rng.normal(1, 0.01, 40)
    assert fit(np.stack([read, launches, took], 1)) == pytest.approx((4e12, 1.5e-6), rel=0.1)


@pytest.mark.parametrize("steps", [[], [(1e9, 10, 1e-3)], [(1e9, 10, 1e-3), (2e9, 20, 2e-3), (3e9, 30, 3e-3)]])
def test_steps_that_do_not_tell_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps must differ in bytes and in launches, got {len(steps)} that do not"):
        fit(steps)
