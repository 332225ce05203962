"""The states' step on the CPU, against float64, on every instruction set that this processor has; and a token's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels import cpu_mamba2
from kernels.cpu_mamba2 import fused, step
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


# A token


def model(width=4, ngroups=1, limits=(0.0, np.inf), biases=False, dtype=torch.float16, layers=3):
    """(config, weights) of random numbers, no size a multiple of a vector's or of eight rows."""
    c = SimpleNamespace(
        hidden=44, nheads=6, headdim=7, dstate=21, ngroups=ngroups, width=width, vocab=53, eps=1e-5, dt_limit=limits,
        ffn=0, d_inner=42, channels=42 + 42 * ngroups,
    )  # fmt: skip
    c.in_rows = c.d_inner + c.channels + c.nheads
    made = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=made)  # noqa: E731

    def matrix(rows, cols):
        found = (draw(rows, cols) / cols**0.5).to(dtype)
        return (found.view(torch.uint16) if dtype == torch.bfloat16 else found).numpy()

    blocks = [
        SimpleNamespace(
            kind="mamba", norm=1 + draw(c.hidden).numpy() / 9, W_in=matrix(c.in_rows, c.hidden),
            b_in=draw(c.in_rows).numpy() if biases else None, conv_weight=draw(c.channels, width).numpy(),
            conv_bias=None if biases else draw(c.channels).numpy(), dt_bias=draw(c.nheads).numpy() * 9,
            A=-draw(c.nheads).exp().numpy(), D=draw(c.nheads).numpy(), gated_norm=1 + draw(c.d_inner).numpy() / 9,
            W_out=matrix(c.hidden, c.d_inner), b_out=draw(c.hidden).numpy() if biases else None,
        )
        for _ in range(layers)
    ]  # fmt: skip
    return c, SimpleNamespace(layers=blocks, norm=1 + draw(c.hidden).numpy() / 9, head=matrix(c.vocab, c.hidden))


def states_of(c, layers=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (layers, c.width - 1, c.channels), (layers, c.nheads, c.headdim, c.dstate)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("isa", [None, "portable"])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"width": 2, "biases": True},
        {"ngroups": 3, "width": 3},
        {"limits": (0.3, 0.7), "dtype": torch.float32},
        {"dtype": torch.bfloat16, "ngroups": 2},
    ],
    ids=str,
)
def test_a_token_in_one_call_is_the_operations_one_by_one(kind, threads, isa):
    c, weights = model(**kind)
    one, other = states_of(c), states_of(c)
    assert fused.takes(c, weights)
    for seed in range(5):
        x = np.random.default_rng(seed).standard_normal(c.hidden).astype(np.float32)
        before = x.copy()
        found = fused.token_logits(c, weights, x, *one, threads=threads, isa=isa)
        wanted = step.token_logits(c, weights, x, *other, threads=threads)
        assert off(found, wanted) < 2e-5 and (x == before).all()
    assert off(one[1], other[1]) < 1e-5 and off(one[0], other[0]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_token_in_one_call_has_the_same_bits_with_any_number_of_threads(dtype):
    """Each row is summed in one order, whichever rows it is worked on with."""
    c, weights = model(dtype=dtype)
    x = np.random.default_rng(7).standard_normal(c.hidden).astype(np.float32)
    found = [fused.token_logits(c, weights, x, *states_of(c), threads=threads) for threads in (1, 2, 3, 16)]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_a_token_in_one_call_keeps_nan():
    c, weights = model()
    conv, ssm = states_of(c)
    ssm[2, 3, 1, 4] = np.nan  # the last layer's: it reaches what is behind it, and no other state
    assert np.isnan(fused.token_logits(c, weights, np.ones(c.hidden, np.float32), conv, ssm)).all()
    assert np.isnan(ssm).sum() == 1 and np.isfinite(conv).all()


@pytest.mark.parametrize("way", [fused, step])
@pytest.mark.parametrize("limits", [(0.0, np.inf), (0.3, 0.7)])
def test_a_step_that_is_nan_stays_nan(way, limits):
    """In its head's state of the last layer and in no other, and in the logits."""
    c, weights = model(limits=limits)
    x, found = np.ones(c.hidden, np.float32), []
    for value in (0.0, np.nan):
        weights.layers[-1].dt_bias[2] = value
        conv, ssm = states_of(c)
        logits = way.token_logits(c, weights, x, conv, ssm)
        found.append(ssm)
    clean, with_nan = found
    assert np.isnan(logits).all() and np.isnan(with_nan[-1, 2]).all()
    clean[-1, 2] = np.nan
    np.testing.assert_array_equal(with_nan, clean)


def test_nan_in_dt_of_the_states_step_stays_in_its_head():
    state, x, dt, A, B, C, D = made(3, 4, 20, 1)
    dt[1] = np.nan
    y = cpu_mamba2.state_step(state, x, dt, A, B, C, D)
    for found in (y, state):
        assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()


def test_what_a_token_in_one_call_does_not_take():
    c, weights = model()
    conv, ssm = states_of(c)
    x = np.ones(c.hidden, np.float32)
    for error, wanted, call in [
        (TypeError, "conv must be a float32 array", lambda: fused.token_logits(c, weights, x, conv.astype("f8"), ssm)),
        (ValueError, "ssm must be a float32 array", lambda: fused.token_logits(c, weights, x, conv, ssm[:2])),
        (ValueError, "x must be a float32 array", lambda: fused.token_logits(c, weights, x[1:], conv, ssm)),
    ]:
        with pytest.raises(error, match=wanted):
            call()
    for name in ("norm", "conv_weight", "dt_bias", "A", "D", "gated_norm"):  # biases may be None, these may not
        kept = getattr(weights.layers[1], name)
        setattr(weights.layers[1], name, None)
        with pytest.raises(TypeError, match=f"token_logits: {name} must be a NumPy float32 .*, got NoneType"):
            fused.token_logits(c, weights, x, conv, ssm)
        setattr(weights.layers[1], name, kept)
    weights.layers[1].D = weights.layers[1].D[1:]
    with pytest.raises(ValueError, match="D must be a float32 array of shape"):
        fused.token_logits(c, weights, x, conv, ssm)
    weights.layers[0].W_out = weights.layers[0].W_out.astype(np.float32)
    assert not fused.takes(c, weights)
    with pytest.raises(TypeError, match="matrices of one type, got others"):
        fused.token_logits(c, weights, x, conv, ssm)
