"""The states' step on the CPU, against float64, on every instruction set that this processor has; and a block's."""

import numpy as np
import pytest

from kernels import cpu_mamba2
from ref.mamba2 import state_step


def made(nheads, headdim, dstate, ngroups, seed=0):
    rng = np.random.default_rng(seed)
    single = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    dt, A = np.exp(single(nheads) - 3), -np.exp(single(nheads))
    return [
        single(nheads, headdim, dstate), single(nheads, headdim), dt, A, single(ngroups, dstate),
        single(ngroups, dstate), single(nheads),
    ]  # fmt: skip


def off(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (6, 5, 33, 3), (8, 64, 128, 1), (4, 3, 16, 4)], ids=str)
def test_the_step_is_the_reference(sizes, threads, isa):
    state, x, dt, A, B, C, D = made(*sizes)
    wanted, after = state_step(state[None], x[None], dt[None], A, B[None], C[None], D=D)
    y = cpu_mamba2.state_step(state, x, dt, A, B, C, D, threads=threads, isa=isa)
    assert off(y, wanted[0]) < 2e-6 and off(state, after[0]) < 2e-7


def test_a_state_that_is_forgotten_and_nan_stay_where_they_are():
    state, x, dt, A, B, C, D = made(3, 4, 20, 1)
    dt[0], A[0] = 1e4, -1e4  # exp of it is 0
    x[1, 2] = np.nan
    before = state.copy()
    y = cpu_mamba2.state_step(state, x, dt, A, B, C, D)
    np.testing.assert_allclose(state[0], np.float32(1e4) * x[0][:, None] * B[0], rtol=1e-6)
    assert np.isnan(y[1, 2]) and np.isfinite(np.delete(y.reshape(-1), 6)).all()
    assert (state[2] != before[2]).all()


@pytest.mark.parametrize(
    "place, change, error, wanted",
    [
        (0, lambda t: t.astype(np.float64), TypeError, "state must be a float32 array"),
        (0, lambda t: t[:, :, ::2], ValueError, "state must be C-contiguous"),
        (1, lambda t: t[:, 1:].copy(), ValueError, "x must be a float32 array of shape"),
        (2, lambda t: t[1:], ValueError, "dt must be a float32 array of shape"),
        (4, lambda t: np.zeros((3, 8), np.float32), ValueError, r"C must be a float32 array of shape \(3, 8\)"),
        (6, lambda t: None, TypeError, "D must be a NumPy float32 array"),
        (5, lambda t: t.astype(np.float16), TypeError, "C must be a float32 array"),
    ],
)
def test_bad_arguments_are_named(place, change, error, wanted):
    arguments = made(4, 6, 8, 2)
    arguments[place] = change(arguments[place])
    with pytest.raises(error, match=wanted):
        cpu_mamba2.state_step(*arguments)


def test_a_state_is_not_written_over_what_is_read():
    state, x, dt, A, B, C, D = made(4, 8, 8, 1)
    with pytest.raises(ValueError, match="state must not share memory with x"):
        cpu_mamba2.state_step(state, state[0, :4], dt, A, B, C, D)
