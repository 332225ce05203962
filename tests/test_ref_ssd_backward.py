"""The references of SSD run backwards: against finite differences, torch.autograd and each other; faults must show."""

from math import nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ref_ssd import SHAPES, all_options, problem, quick

import ref.ssd_backward
import ref.ssd_backward_forms
from ref.ssd import seq_idx_of, ssd_recurrent, ssd_varlen
from ref.ssd_backward import (
    Gradients,
    backward_chunked,
    backward_matrix,
    backward_recurrent,
    backward_varlen,
    gradients,
    silu_slope,
    step_sizes_slope,
)

NAMES = ["x", "dt", "A", "B", "C"]


def chunked(chunk_size):
    return lambda *arrays, **options: backward_chunked(*arrays, chunk_size=chunk_size, **options)


FORMS = {
    "recurrent": backward_recurrent,
    "matrix": backward_matrix,
    "chunks of 1": chunked(1),
    "chunks of 4": chunked(4),
    "chunks of 7": chunked(7),
    "chunks of 64": gradients,
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def whole(*shape, seed=0, fastest=2, options=True):
    """(dy, dfinal_states, arrays by name, options)"""
    arrays = problem(*shape, seed, fastest=fastest)
    rng = np.random.default_rng([7, seed])
    options = all_options(arrays[0], arrays[3], seed) if options else {}
    states = shape[0], shape[2], shape[4], shape[5]
    return rng.standard_normal(arrays[0].shape), rng.standard_normal(states), dict(zip(NAMES, arrays)), options


def loss(dy, dfinal, call):
    y, final = ssd_recurrent(**call)
    return (dy * y).sum() + (dfinal * final).sum()


def by_differences(dy, dfinal, call, name, step=1e-5):
    """d(loss) by every number of one argument, from two losses each."""
    wanted = np.zeros(call[name].shape)
    for index in np.ndindex(wanted.shape):
        sides = []
        for sign in (1, -1):
            moved = call[name].copy()
            moved[index] += sign * step
            sides.append(loss(dy, dfinal, call | {name: moved}))
        wanted[index] = (sides[0] - sides[1]) / (2 * step)
    return wanted


def same(found, wanted, tolerance=1e-11):
    """Every gradient, to rounding of the largest number of each."""
    for name in Gradients._fields:
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape and one.dtype == np.float64, name
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1, np.abs(other).max()), err_msg=name)


def by_autograd(dy, dfinal, call):
    """torch.autograd through the recurrence, a line for each line of ref/ssd.py."""
    leaves = {k: torch.tensor(call[k], requires_grad=True) for k in Gradients._fields if k in call}
    t = leaves.get
    x, B, C, A, low, high = t("x"), t("B"), t("C"), t("A"), *call.get("dt_limit", (0, np.inf))
    group = x.shape[2] // B.shape[2]
    dt = t("dt") if t("dt_bias") is None else t("dt") + t("dt_bias")
    dt = torch.nn.functional.softplus(dt) if call.get("dt_softplus") else dt
    dt = dt.clamp(low, high)
    h = torch.tensor(np.zeros(dfinal.shape)) if t("initial_states") is None else t("initial_states")
    ys, seq_idx = [], call.get("seq_idx")
    for i in range(x.shape[1]):
        if i and seq_idx is not None:
            h = h * torch.tensor(seq_idx[:, i] == seq_idx[:, i - 1])[:, None, None, None]
        B_i, C_i = B[:, i].repeat_interleave(group, 1), C[:, i].repeat_interleave(group, 1)
        step = dt[:, i, :, None, None]
        h = torch.exp(A[:, None, None] * step) * h + step * x[:, i, :, :, None] * B_i[:, :, None]
        ys.append(torch.einsum("bhpn,bhn->bhp", h, C_i))
    y = torch.stack(ys, 1)
    if t("D") is not None:
        y = y + (t("D") if t("D").ndim == 2 else t("D")[:, None]) * x
    if t("z") is not None:
        y = y * torch.nn.functional.silu(t("z"))
    ((torch.tensor(dy) * y).sum() + (torch.tensor(dfinal) * h).sum()).backward()
    return Gradients(**{k: leaves[k].grad.numpy() if k in leaves else None for k in Gradients._fields})


# Against what knows nothing of the formulas


@pytest.mark.parametrize("name", Gradients._fields)
@forms
def test_by_differences(form, name):
    dy, dfinal, arrays, options = whole(2, 6, 4, 2, 2, 3)
    wanted = by_differences(dy, dfinal, arrays | options, name)
    found = getattr(form(dy, **arrays, dfinal_states=dfinal, **options), name)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-8 * max(1, np.abs(wanted).max()))
    assert np.abs(wanted).max() > 1e-2  # there is something to be seen


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_autograd(form, shape):
    dy, dfinal, arrays, options = whole(*shape)
    same(form(dy, **arrays, dfinal_states=dfinal, **options), by_autograd(dy, dfinal, arrays | options))


OPTIONS = ["D", "z", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "seq_idx"]


@forms
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(form, name):
    dy, dfinal, arrays, options = whole(2, 13, 4, 2, 3, 5)
    option = {name: options[name]}
    wanted = by_autograd(dy, dfinal, arrays | option)
    same(form(dy, **arrays, dfinal_states=dfinal, **option), wanted)


@forms
def test_without_options_and_without_final_states(form):
    dy, dfinal, arrays, _ = whole(1, 9, 2, 1, 3, 2)
    found = form(dy, **arrays)
    same(found, by_autograd(dy, 0 * dfinal, arrays))
    assert found.D is found.z is found.dt_bias is found.initial_states is None


@forms
def test_D_may_differ_within_a_head(form):
    dy, dfinal, arrays, options = whole(2, 5, 2, 1, 3, 2)
    options["D"] = np.arange(6.0).reshape(2, 3)
    same(form(dy, **arrays, dfinal_states=dfinal, **options), by_autograd(dy, dfinal, arrays | options))


@forms
def test_arguments_are_not_written(form):
    dy, dfinal, arrays, options = whole(2, 13, 4, 2, 3, 5)
    everything = [dy, dfinal, *arrays.values(), *options.values()]
    before = [np.copy(a) for a in everything]
    form(dy, **arrays, dfinal_states=dfinal, **options)
    assert all(np.array_equal(a, b) for a, b in zip(before, everything))


@quick
@given(
    st.integers(1, 2),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 35),
    st.sampled_from([0, 0.01, 1, 100]),
    st.integers(0, 2**32),
)
def test_forms_agree(batch, seqlen, ngroups, group, headdim, dstate, chunk_size, fastest, seed):
    shape = batch, seqlen, ngroups * group, ngroups, headdim, dstate
    dy, dfinal, arrays, options = whole(*shape, seed=seed, fastest=fastest)
    wanted = backward_recurrent(dy, **arrays, dfinal_states=dfinal, **options)
    same(backward_matrix(dy, **arrays, dfinal_states=dfinal, **options), wanted)
    same(backward_chunked(dy, **arrays, chunk_size=chunk_size, dfinal_states=dfinal, **options), wanted)


@pytest.mark.parametrize("seqlen", [5, 130])
def test_the_short_way_of_a_decay(seqlen):
    """d(log decay) is a sum of what y and x carry; and as A has one decay in every token, d(A) is a sum over all."""
    dy, dfinal, arrays, _ = whole(1, seqlen, 2, 1, 3, 4, fastest=1)
    y, final = ssd_recurrent(**arrays)
    found = backward_recurrent(dy, **arrays, dfinal_states=dfinal)
    flows = (dy * y - arrays["x"] * found.x).sum(axis=-1)  # (1, L, H)
    log_decay = flows[:, ::-1].cumsum(axis=1)[:, ::-1] + (dfinal * final).sum(axis=(-1, -2))[:, None]
    np.testing.assert_allclose((log_decay * arrays["dt"]).sum(axis=(0, 1)), found.A, rtol=1e-9, atol=1e-9)


# Sequences


@forms
def test_a_sequence_may_be_cut_and_the_gradient_goes_on(form):
    """The initial states' gradient of the second part is the final states' of the first."""
    dy, dfinal, arrays, _ = whole(2, 13, 2, 1, 2, 3)
    whole_way = backward_recurrent(dy, **arrays, dfinal_states=dfinal)
    first, second = ({k: v if k == "A" else v[:, t] for k, v in arrays.items()} for t in (slice(8), slice(8, None)))
    _, state = ssd_recurrent(**first)
    late = form(dy[:, 8:], **second, initial_states=state, dfinal_states=dfinal)
    early = form(dy[:, :8], **first, dfinal_states=late.initial_states)
    for name in ("x", "dt", "B", "C"):
        found = np.concatenate([getattr(early, name), getattr(late, name)], axis=1)
        np.testing.assert_allclose(found, getattr(whole_way, name), rtol=0, atol=1e-11)
    np.testing.assert_allclose(early.A + late.A, whole_way.A, rtol=0, atol=1e-11)


@forms
@pytest.mark.parametrize("ends", [[0, 5, 5, 13], [0, 0, 1, 2, 13], [0, 13]], ids=str)
def test_sequences_laid_end_to_end(form, ends):
    dy, _, arrays, options = whole(1, 13, 4, 2, 3, 5)
    options.pop("seq_idx")
    apart = backward_varlen(dy, **arrays, cu_seqlens=ends, form=form, **options)
    same(apart, backward_recurrent(dy, **arrays, seq_idx=seq_idx_of(ends), **options))


def test_states_at_the_ends_of_sequences():
    """dvarlen_states, against differences of what ssd_varlen returns."""
    dy, _, arrays, options = whole(1, 7, 2, 1, 2, 3)
    options.pop("seq_idx")
    ends, call = [0, 3, 3, 7], arrays | options
    dstates = np.random.default_rng(3).standard_normal((3, 2, 2, 3))

    def loss(**call):
        y, states = ssd_varlen(**call, cu_seqlens=ends)
        return (dy * y).sum() + (dstates * states).sum()

    found = backward_varlen(dy, **arrays, cu_seqlens=ends, dvarlen_states=dstates, **options)
    for name in ("x", "A", "dt_bias", "initial_states"):
        rng = np.random.default_rng(4)
        way = rng.standard_normal(call[name].shape)
        sides = [loss(**call | {name: call[name] + sign * 1e-5 * way}) for sign in (1, -1)]
        wanted = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose((getattr(found, name) * way).sum(), wanted, rtol=1e-7)


@forms
def test_nothing_of_a_sequence_reaches_another(form):
    """Where the other holds NaN, either; and within a sequence NaN reaches no more than it should."""
    dy, dfinal, arrays, options = whole(1, 13, 2, 1, 3, 4)
    options["seq_idx"] = seq_idx_of([0, 5, 13])
    clean = form(dy, **arrays, dfinal_states=dfinal, **options)
    for name in ("x", "B", "C"):
        spoiled = arrays[name].copy()
        spoiled[:, 2] = nan
        found = form(dy, **arrays | {name: spoiled}, dfinal_states=dfinal, **options)
        for one in ("x", "dt", "B", "C", "z"):
            behind, wanted = getattr(found, one)[:, 5:], getattr(clean, one)[:, 5:]
            np.testing.assert_allclose(behind, wanted, rtol=0, atol=1e-12, err_msg=f"{name}, {one}")
    spoiled = dy.copy()
    spoiled[:, 7] = nan
    found = form(spoiled, **arrays, dfinal_states=dfinal, **options)
    assert np.isfinite(found.x[:, :5]).all() and np.isfinite(found.x[:, 8:]).all()
    assert np.isnan(found.x[:, 5:8]).all() and np.isfinite(found.C[:, 8:]).all() and np.isfinite(found.z[:, 8:]).all()


# What lies around the recurrence


def test_slopes():
    v, step = np.array([-40, -3.0, -1e-9, 0, 0.5, 19.9, 30, 700]), 1e-6
    difference = (ref.ssd_backward.silu(v + step) - ref.ssd_backward.silu(v - step)) / (2 * step)
    np.testing.assert_allclose(silu_slope(v), difference, rtol=0, atol=1e-7)
    bias = np.float64(0.25)
    softplus = [ref.ssd_backward.step_sizes(v + s, bias, True) for s in (step, -step)]
    np.testing.assert_allclose(step_sizes_slope(v, bias, True), (softplus[0] - softplus[1]) / (2 * step), atol=1e-7)


def test_a_step_beyond_its_limits_has_no_gradient_and_one_at_them_has():
    dt = np.array([-1, 0.0, 0.5, 2, 3])
    assert step_sizes_slope(dt, dt_limit=(0, 2)).tolist() == [0, 1, 1, 1, 0]
    assert step_sizes_slope(dt).tolist() == [0, 1, 1, 1, 1]


def test_bad_input():
    dy, dfinal, arrays, options = whole(1, 4, 2, 1, 3, 2)
    with pytest.raises(ValueError, match=r"dy must have shape \(1, 4, 2, 3\), got \(1, 3, 2, 3\)"):
        gradients(dy[:, 1:], **arrays)
    with pytest.raises(ValueError, match=r"dfinal_states must have shape \(1, 2, 3, 2\)"):
        gradients(dy, **arrays, dfinal_states=dfinal[..., 1:])
    with pytest.raises(ValueError, match="chunk_size must be a whole number of at least 1, got 0"):
        backward_chunked(dy, **arrays, chunk_size=0)
    with pytest.raises(ValueError, match="x must have a batch of 1"):
        two = {k: v if k == "A" else np.concatenate([v, v]) for k, v in arrays.items()}
        backward_varlen(np.concatenate([dy, dy]), **two, cu_seqlens=[0, 4])
    with pytest.raises(ValueError, match="seq_idx must be None where cu_seqlens is given"):
        backward_varlen(dy, **arrays, cu_seqlens=[0, 4], seq_idx=options["seq_idx"])


# Faults that the comparison must see


def forgets_the_borders(d_added, dA_cumsum, d_final, runs):
    """Each chunk's gradient stays in it."""
    ends, start = ref.ssd_backward_forms._right(d_added, dA_cumsum, d_final, runs)
    return 0 * ends, start


def decays_the_wrong_chunk(d_added, dA_cumsum, d_final, runs):
    """The next chunk's decay in the place of this one's."""
    return ref.ssd_backward_forms._right(d_added, np.roll(dA_cumsum, -1, axis=2), d_final, runs)


def in_the_forward_direction(d_added, dA_cumsum, d_final, runs):
    turned, start = ref.ssd_backward_forms._right(d_added[:, ::-1], dA_cumsum[:, :, ::-1], d_final, runs)
    return turned[:, ::-1], start


@pytest.mark.parametrize("fault", [forgets_the_borders, decays_the_wrong_chunk, in_the_forward_direction])
def test_faults_show(fault, monkeypatch):
    dy, dfinal, arrays, _ = whole(2, 13, 4, 2, 3, 5)
    wanted = backward_recurrent(dy, **arrays, dfinal_states=dfinal)
    monkeypatch.setattr(ref.ssd_backward_forms, "_right", ref.ssd_backward_forms.state_passing_backward, raising=False)
    monkeypatch.setattr(ref.ssd_backward_forms, "state_passing_backward", fault)
    with pytest.raises(AssertionError):
        same(backward_chunked(dy, **arrays, chunk_size=4, dfinal_states=dfinal), wanted)
