"""The references of SSD: every form held against loops over numbers, and against each other; faults must show."""

from math import exp, fsum, inf, log1p, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ref.ssd
import ref.ssd_schedule
import ref.ssd_steps
from ref.ssd import (
    chunk_bmm,
    chunk_cumsum,
    chunk_scan,
    chunk_state,
    linear_attention,
    segment_bounds,
    segsum,
    seq_idx_of,
    silu,
    softplus,
    ssd_chunked,
    ssd_matrix,
    ssd_recurrent,
    ssd_segments,
    ssd_varlen,
    state_passing,
)

quick = settings(max_examples=60, deadline=None)


def chunked(chunk_size):
    return lambda *arrays, **options: ssd_chunked(*arrays, chunk_size=chunk_size, **options)


def by_segments(chunk_size, segments):
    return lambda *arrays, **options: ssd_segments(*arrays, chunk_size=chunk_size, segments=segments, **options)


FORMS = {
    "recurrent": ssd_recurrent,
    "matrix": ssd_matrix,
    "chunks of 1": chunked(1),
    "chunks of 4": chunked(4),
    "chunks of 7": chunked(7),
    "one chunk": chunked(64),
    "1 segment": by_segments(4, 1),
    "3 segments": by_segments(3, 3),
    "more segments than chunks": by_segments(5, 9),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
# batch, seqlen, nheads, ngroups, headdim, dstate
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 13, 4, 2, 3, 5), (1, 2, 3, 3, 1, 4), (1, 31, 2, 1, 2, 1), (3, 8, 6, 2, 1, 2)]


def problem(batch, seqlen, nheads, ngroups, headdim, dstate, seed=0, dtype=np.float64, fastest=16):
    """x, dt, A, B, C; A · dt between 0 and -fastest."""
    rng = np.random.default_rng([seed, batch, seqlen, nheads, dstate])
    keys = batch, seqlen, ngroups, dstate
    return [
        a.astype(dtype)
        for a in (
            rng.standard_normal((batch, seqlen, nheads, headdim)),
            rng.uniform(0, 1, (batch, seqlen, nheads)),
            -rng.uniform(0, fastest, nheads),
            rng.standard_normal(keys),
            rng.standard_normal(keys),
        )
    ]


def all_options(x, B, seed=1):
    rng = np.random.default_rng(seed)
    batch, seqlen, nheads, headdim = x.shape
    return dict(
        D=rng.standard_normal(nheads),
        z=rng.standard_normal(x.shape),
        dt_bias=rng.standard_normal(nheads),
        dt_softplus=True,
        dt_limit=(0.3, 1.2),
        initial_states=rng.standard_normal((batch, nheads, headdim, B.shape[3])),
        seq_idx=np.cumsum(rng.random((batch, seqlen)) < 0.15, axis=1),
    )


def by_loops(
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0, inf),
    initial_states=None,
    seq_idx=None,
):
    """The layer as Python adds it up, one number at a time, each output from all tokens that it can see."""
    (batch, seqlen, nheads, headdim), (ngroups, dstate) = x.shape, B.shape[2:]
    y, final = np.zeros(x.shape), np.zeros((batch, nheads, headdim, dstate))

    for b, h in np.ndindex(batch, nheads):
        g = h // (nheads // ngroups)
        steps = [float(dt[b, t, h]) + (0 if dt_bias is None else float(dt_bias[h])) for t in range(seqlen)]
        steps = [log1p(exp(v)) if dt_softplus and v <= 20 else v for v in steps]
        steps = [min(max(v, dt_limit[0]), dt_limit[1]) for v in steps]
        rates = [float(A[h]) * v for v in steps]
        begins = [t == 0 or (seq_idx is not None and seq_idx[b, t] != seq_idx[b, t - 1]) for t in range(seqlen)]
        states = np.zeros((seqlen, headdim, dstate))
        for p, n in np.ndindex(headdim, dstate):
            put = [steps[j] * float(x[b, j, h, p]) * float(B[b, j, g, n]) for j in range(seqlen)]
            for t in range(seqlen):
                first = max(j for j in range(t + 1) if begins[j])
                terms = [exp(fsum(rates[j + 1 : t + 1])) * put[j] for j in range(first, t + 1)]
                if first == 0 and initial_states is not None:
                    terms.append(exp(fsum(rates[: t + 1])) * float(initial_states[b, h, p, n]))
                states[t, p, n] = fsum(terms)
        for t, p in np.ndindex(seqlen, headdim):
            v = fsum(states[t, p, n] * float(C[b, t, g, n]) for n in range(dstate))
            if D is not None:
                v += float(D[h] if D.ndim == 1 else D[h, p]) * float(x[b, t, h, p])
            if z is not None:
                v *= float(z[b, t, h, p]) / (1 + exp(-float(z[b, t, h, p])))
            y[b, t, h, p] = v
        final[b, h] = states[-1]
    return y, final


def same(found, wanted, tolerance=1e-12):
    """Both y and final states, to rounding of the largest number."""
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1, np.abs(other).max()))


# Every form against loops


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_by_loops(form, shape):
    arrays = problem(*shape)
    same(form(*arrays), by_loops(*arrays))


@forms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_options_by_loops(form, shape):
    arrays = problem(*shape, fastest=2)
    options = all_options(arrays[0], arrays[3])
    same(form(*arrays, **options), by_loops(*arrays, **options))


OPTIONS = ["D", "z", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "seq_idx"]


@forms
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(form, name):
    arrays = problem(2, 13, 4, 2, 3, 5, fastest=2)
    option = {name: all_options(arrays[0], arrays[3])[name]}
    wanted = by_loops(*arrays, **option)
    same(form(*arrays, **option), wanted)
    assert np.abs(wanted[0] - by_loops(*arrays)[0]).max() > 1e-3  # the option does something


@forms
def test_D_may_differ_within_a_head(form):
    arrays = problem(1, 5, 2, 1, 3, 2)
    D = np.arange(6.0).reshape(2, 3)
    same(form(*arrays, D=D), by_loops(*arrays, D=D))


@forms
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_narrow_numbers_are_added_in_float64(form, dtype):
    arrays = problem(1, 9, 2, 1, 3, 2, dtype=dtype)
    same(form(*arrays), by_loops(*arrays))


@forms
def test_arguments_are_not_written(form):
    arrays = problem(2, 13, 4, 2, 3, 5)
    options = all_options(arrays[0], arrays[3])
    before = [np.copy(a) for a in (*arrays, *options.values())]
    form(*arrays, **options)
    assert all(np.array_equal(a, b) for a, b in zip(before, (*arrays, *options.values())))


@quick
@given(
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 45),
    st.integers(1, 7),
    st.sampled_from([0, 0.01, 1, 100]),
    st.integers(0, 2**32),
)
def test_forms_agree(batch, seqlen, ngroups, group, headdim, dstate, chunk_size, segments, fastest, seed):
    arrays = problem(batch, seqlen, ngroups * group, ngroups, headdim, dstate, seed, fastest=fastest)
    options = all_options(arrays[0], arrays[3], seed)
    wanted = ssd_recurrent(*arrays, **options)
    same(ssd_matrix(*arrays, **options), wanted)
    same(ssd_chunked(*arrays, chunk_size=chunk_size, **options), wanted)
    same(ssd_segments(*arrays, chunk_size=chunk_size, segments=segments, **options), wanted)


@quick
@given(st.integers(2, 30), st.data())
def test_a_sequence_may_be_cut_anywhere(seqlen, data):
    """The final state of the first part is the initial state of the second."""
    cut, chunk_size = data.draw(st.integers(1, seqlen - 1)), data.draw(st.integers(1, 8))
    x, dt, A, B, C = problem(2, seqlen, 2, 1, 2, 3, fastest=1)
    whole = ssd_recurrent(x, dt, A, B, C)
    first, state = ssd_chunked(*(x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut]), chunk_size=chunk_size)
    rest = x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:]
    second, state = ssd_chunked(*rest, chunk_size=chunk_size, initial_states=state)
    same((np.concatenate([first, second], axis=1), state), whole)


# Faults that the comparison must see


def wrong_tail(dt, A, chunk_size, **options):
    """softplus behind the end too: tokens that are not there decay the state."""
    dt = np.pad(dt, [(0, 0), (0, -dt.shape[1] % chunk_size), (0, 0)])
    return chunk_cumsum(dt, A, chunk_size, **options | {"seq_idx": None})


def without_decay(states, dA_cumsum, **options):
    """The state before the first chunk does not decay through it."""
    undone = dA_cumsum.copy()
    undone[:, :, 0] = 0
    return state_passing(states, undone, **options)


def starts_at_end(states, dA_cumsum, **options):
    """States behind the chunks in place of those before."""
    starts, final = state_passing(states, dA_cumsum, **options)
    return np.concatenate([starts[:, 1:], final[:, None]], axis=1), final


def edit(step, **changes):
    """A step with some of its options replaced."""
    return lambda *args, **options: step(*args, **options | changes)


FAULTS = {
    "tail decays": ("chunk_cumsum", wrong_tail),
    "limit forgotten": ("chunk_cumsum", edit(chunk_cumsum, dt_limit=(0, inf))),
    "bias forgotten": ("chunk_cumsum", edit(chunk_cumsum, dt_bias=None)),
    "decay of the initial state forgotten": ("state_passing", without_decay),
    "initial state forgotten": ("state_passing", edit(state_passing, initial_states=None)),
    "state of the wrong chunk": ("state_passing", starts_at_end),
    "state passed on to another sequence": ("state_passing", edit(state_passing, seq_idx=None)),
    "chunk adds another sequence": ("chunk_state", edit(chunk_state, seq_idx=None)),
    "reads another sequence": ("chunk_scan", edit(chunk_scan, seq_idx=None)),
    "gate forgotten": ("chunk_scan", edit(chunk_scan, z=None)),
    "transposed": ("chunk_bmm", lambda C, B, chunk_size: chunk_bmm(B, C, chunk_size)),
    "groups swapped": ("chunk_bmm", lambda C, B, Q: chunk_bmm(C[:, :, ::-1], B[:, :, ::-1], Q)),
    "decay within the token": ("chunk_scan", lambda CB, x, dt, a, *rest, **o: chunk_scan(CB, x, dt, a + 1, *rest, **o)),
}


@pytest.mark.parametrize("step, fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_fails(step, fault, monkeypatch):
    arrays = problem(2, 13, 4, 2, 3, 5, fastest=2)
    options = all_options(arrays[0], arrays[3]) | dict(seq_idx=np.array([[0] * 6 + [1] * 7, [0] * 10 + [1] * 3]))
    wanted = by_loops(*arrays, **options)
    same(ssd_chunked(*arrays, chunk_size=4, **options), wanted)
    monkeypatch.setattr(ref.ssd, step, fault)
    with pytest.raises(AssertionError):
        same(ssd_chunked(*arrays, chunk_size=4, **options), wanted)


# Segment sums


@quick
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12))
def test_segsum_by_loops(a):
    sums = segsum(a)
    assert sums.shape == (len(a), len(a))
    for i, j in np.ndindex(sums.shape):
        assert sums[i, j] == pytest.approx(fsum(a[j + 1 : i + 1]), abs=1e-11) if j <= i else sums[i, j] == -inf


def test_segsum_of_more_axes():
    a = np.random.default_rng(0).standard_normal((2, 3, 5))
    np.testing.assert_array_equal(segsum(a)[1, 2], segsum(a[1, 2]))


def test_segsum_keeps_digits_and_stays_finite_where_differences_do_not():
    a = np.full(6, -1e-3)
    a[1] = -1e15
    assert segsum(a)[5, 3] == -2e-3
    running = np.cumsum(a)
    assert running[5] - running[3] == 0  # all digits lost
    a[1] = -inf
    assert np.exp(segsum(a))[5].tolist() == [0, *np.exp([-4e-3, -3e-3, -2e-3, -1e-3, 0])]
    running = np.cumsum(a)
    with np.errstate(invalid="ignore"):
        assert np.isnan(running[5] - running[3])


# Steps


def test_softplus_and_silu():
    v = np.array([-inf, -800, -1, 0, 1, 20, 20.5, 800, inf])
    found = softplus(v)
    np.testing.assert_allclose(found[1:6], [0, log1p(exp(-1)), log1p(1), log1p(exp(1)), log1p(exp(20))], rtol=1e-15)
    assert found[[0, 6, 7, 8]].tolist() == [0, 20.5, 800, inf] and np.isnan(softplus(np.array(nan)))
    np.testing.assert_allclose(silu(v[2:6]), v[2:6] / (1 + np.exp(-v[2:6])), rtol=1e-15)
    assert silu(np.array([-800.0, 800])).tolist() == [0, 800]


def test_a_negative_dt_is_clamped():
    arrays = problem(1, 5, 2, 1, 3, 2)
    arrays[1] -= 0.5
    clamped = [a if i != 1 else np.maximum(a, 0) for i, a in enumerate(arrays)]
    same(ssd_recurrent(*arrays), by_loops(*clamped, dt_limit=(-inf, inf)))


def test_shapes_and_values_of_each_step():
    x, dt, A, B, C = problem(2, 13, 4, 2, 3, 5, fastest=2)
    dA_cumsum, steps = chunk_cumsum(dt, A, 5, dt_bias=A, dt_softplus=True)
    assert dA_cumsum.shape == steps.shape == (2, 4, 3, 5)
    np.testing.assert_allclose(steps[1, 2, 1], softplus(dt[1, 5:10, 2] + A[2]), rtol=1e-15)
    assert (steps[:, :, 2, 3:] == 0).all() and (dA_cumsum[:, :, 2, 3:] == dA_cumsum[:, :, 2, 2:3]).all()
    np.testing.assert_allclose(dA_cumsum[1, 2, 1, 3], A[2] * steps[1, 2, 1, :4].sum(), rtol=1e-14)

    CB = chunk_bmm(C, B, 5)
    assert CB.shape == (2, 3, 2, 5, 5)
    np.testing.assert_allclose(CB[1, 1, 1, 4, 2], C[1, 9, 1] @ B[1, 7, 1], rtol=1e-12)

    states = chunk_state(B, x, steps, dA_cumsum)
    assert states.shape == (2, 3, 4, 3, 5)
    decay = np.exp(dA_cumsum[1, 2, 1, -1] - dA_cumsum[1, 2, 1]) * steps[1, 2, 1]
    np.testing.assert_allclose(states[1, 1, 2], np.einsum("q,qp,qn->pn", decay, x[1, 5:10, 2], B[1, 5:10, 1]))

    starts, final = state_passing(states, dA_cumsum)
    assert starts.shape == states.shape and final.shape == (2, 4, 3, 5)
    assert (starts[:, 0] == 0).all()
    np.testing.assert_array_equal(starts[:, 1], states[:, 0])
    half = ssd_recurrent(x[:, :5], softplus(dt[:, :5] + A), A, B[:, :5], C[:, :5])
    np.testing.assert_allclose(starts[:, 1], half[1], atol=1e-12)
    y = chunk_scan(CB, x, steps, dA_cumsum, C, starts)
    assert y.shape == x.shape
    np.testing.assert_allclose(y[:, :5], half[0], atol=1e-12)


def test_what_a_kernel_leaves_unwritten_is_not_read():
    """C·Bᵀ above the diagonal may hold anything."""
    x, dt, A, B, C = problem(1, 13, 2, 1, 3, 5)
    dA_cumsum, dt = chunk_cumsum(dt, A, 4)
    states, _ = state_passing(chunk_state(B, x, dt, dA_cumsum), dA_cumsum)
    CB = chunk_bmm(C, B, 4)
    poisoned = np.where(np.tri(4, dtype=bool), CB, nan)
    wanted = chunk_scan(CB, x, dt, dA_cumsum, C, states)
    np.testing.assert_array_equal(chunk_scan(poisoned, x, dt, dA_cumsum, C, states), wanted)


@quick
@given(st.integers(0, 40), st.integers(1, 12))
def test_segment_bounds(nchunks, segments):
    bounds = segment_bounds(nchunks, segments)
    lengths = np.diff(bounds)
    assert bounds[0] == 0 and bounds[-1] == nchunks and len(lengths) == segments
    assert lengths.min() >= 0 and lengths.max() - lengths.min() <= 1


def test_stopping_early_drops_less_than_it_says():
    arrays = problem(1, 200, 2, 1, 3, 4, fastest=10)
    wanted, exact = ssd_recurrent(*arrays), by_segments(8, 5)(*arrays)
    stopped = ssd_segments(*arrays, chunk_size=8, segments=5, stop=2.0**-60)
    same(stopped, wanted)
    assert not np.array_equal(exact[0], ssd_segments(*arrays, chunk_size=8, segments=5, stop=1e-3)[0])
    same(ssd_segments(*arrays, chunk_size=8, segments=5, stop=1e-3), wanted, tolerance=1e-2)


def test_stopping_early_reads_less():
    """What lies further back than the stop is not looked at: here, a whole segment of NaN."""
    x, dt, A, B, C = problem(1, 64, 1, 1, 2, 2)
    dt[:], A[:] = 1, -20
    x[:, :8] = nan
    y, final = ssd_segments(x, dt, A, B, C, chunk_size=8, segments=4, stop=2.0**-60)
    assert np.isnan(y[:, :16]).all() and np.isfinite(y[:, 32:]).all() and np.isfinite(final).all()
    assert np.isnan(ssd_segments(x, dt, A, B, C, chunk_size=8, segments=4)[0]).all()


# Linear attention


@quick
@given(st.integers(1, 20), st.integers(1, 2), st.integers(1, 2), st.integers(1, 9), st.integers(0, 2**32))
def test_linear_attention_is_ssd_without_decay(seqlen, ngroups, group, chunk_size, seed):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 2, seqlen, ngroups, 3))
    v = rng.standard_normal((2, seqlen, ngroups * group, 4))
    scores = np.einsum("bign,bjgn->bgij", q, k).repeat(group, axis=1)  # directly: scores, mask, values
    wanted = np.einsum("bhij,bjhp->bihp", np.tril(scores), v)
    np.testing.assert_allclose(linear_attention(q, k, v, chunk_size=chunk_size), wanted, rtol=0, atol=1e-11)
    still = np.zeros(ngroups * group)
    same((ssd_recurrent(v, np.ones(v.shape[:3]), still, k, q)[0],), (wanted,))


# Several sequences in one


def test_varlen_is_seq_idx_and_each_sequence_alone():
    x, dt, A, B, C = problem(1, 23, 4, 2, 3, 5, fastest=2)
    options = all_options(x, B)
    options.pop("seq_idx")
    ends = [0, 0, 5, 6, 6, 16, 23]
    y, states = ssd_varlen(x, dt, A, B, C, ends, **options)
    idx = seq_idx_of(ends)
    assert idx.tolist() == [[1] * 5 + [2] + [4] * 10 + [5] * 7]
    wanted = by_loops(x, dt, A, B, C, seq_idx=idx, **options)
    same((y, states[-1:]), wanted)
    assert states.shape == (6, 4, 3, 5) and (states[[0, 3]] == 0).all()
    for i, t in ((2, slice(5, 6)), (4, slice(6, 16))):
        part = options | dict(z=options["z"][:, t], initial_states=None)
        alone = by_loops(x[:, t], dt[:, t], A, B[:, t], C[:, t], **part)
        same((y[:, t], states[i : i + 1]), alone)


@forms
def test_a_number_that_comes_back_is_another_sequence(form):
    arrays = problem(1, 9, 2, 1, 2, 3, fastest=1)
    idx = np.array([[0, 0, 1, 1, 0, 0, 0, 3, 3]])
    same(form(*arrays, seq_idx=idx), by_loops(*arrays, seq_idx=np.cumsum([[0, 0, 1, 0, 1, 0, 0, 1, 0]], axis=1)))


@forms
def test_the_initial_state_is_the_first_sequences_whatever_its_number(form):
    arrays = problem(1, 9, 2, 1, 2, 3, fastest=1)
    options = dict(seq_idx=np.array([[7, 7, 7, 7, 7, 2, 2, 2, 2]]), initial_states=np.ones((1, 2, 2, 3)))
    same(form(*arrays, **options), by_loops(*arrays, **options))
    assert np.abs(form(*arrays, **options)[0] - form(*arrays, seq_idx=options["seq_idx"])[0])[0, :5].max() > 1e-3


# NaN and inf reach what depends on them, and nothing else


def reached(form, where, value, token=6, seq_idx=None, initial_states=None):
    """Which outputs are not finite, (L, H, P), and which final states, (H, P, N), when one number is not."""
    arrays = dict(zip(("x", "dt", "A", "B", "C"), problem(1, 13, 4, 2, 2, 3, fastest=2)))
    options = dict(seq_idx=seq_idx, initial_states=np.ones((1, 4, 2, 3)), D=np.ones(4))
    index = {"x": (0, token, 1, 0), "dt": (0, token, 1), "B": (0, token, 1, 2), "C": (0, token, 1, 2)}
    if where == "initial_states":
        options[where][0, 1, 0, 2] = value
    else:
        arrays[where][index[where]] = value
    with np.errstate(invalid="ignore", over="ignore"):
        y, final = form(*arrays.values(), **options)
    return ~np.isfinite(y[0]), ~np.isfinite(final[0])


@forms
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["x", "B", "C", "initial_states"])
def test_what_is_not_finite_passes_on_only_forwards(form, where, value):
    y, final = np.zeros((13, 4, 2), bool), np.zeros((4, 2, 3), bool)
    if where == "x":
        y[6:, 1, 0] = final[1, 0] = True
    elif where == "B":  # heads 2 and 3 are those of group 1
        y[6:, 2:] = final[2:, :, 2] = True
    elif where == "C":
        y[6, 2:] = True
    else:
        y[:, 1, 0] = final[1, 0, 2] = True
    found = reached(form, where, value)
    np.testing.assert_array_equal(found[0], y)
    np.testing.assert_array_equal(found[1], final)


@forms
def test_a_step_that_is_no_number(form):
    y, final = reached(form, "dt", nan)
    wanted = np.zeros((13, 4, 2), bool)
    wanted[6:, 1] = True
    np.testing.assert_array_equal(y, wanted)
    assert final[1].all() and not final[[0, 2, 3]].any()


@forms
@pytest.mark.parametrize("where", ["x", "dt", "B", "initial_states"])
def test_a_new_sequence_is_free_of_what_was_before(form, where):
    for change in (7, 8, 9, 12):
        idx = np.array([[0] * change + [1] * (13 - change)])
        y, final = reached(form, where, nan, seq_idx=idx)
        assert y[:change].any() and not y[change:].any() and not final.any()


def test_finite_numbers_give_no_warning():
    x, dt, A, B, C = problem(1, 30, 2, 1, 2, 3, fastest=1e6)
    options = dict(z=1e3 * x, dt_softplus=True, dt_bias=np.array([-900.0, 900]), seq_idx=np.arange(30)[None] // 7)
    with np.errstate(all="raise", under="ignore"):
        for form in FORMS.values():
            form(x, dt, A, B, C, **options)


# What is refused


@pytest.mark.parametrize(
    "changed, options, message",
    [
        (
            dict(x=np.ones((1, 5, 4))),
            {},
            r"x must have shape \(batch, seqlen, nheads, headdim\), none of it 0, got \(1",
        ),
        (dict(x=np.ones((1, 0, 4, 2))), {}, "x must have shape .* none of it 0"),
        (dict(x=np.ones((1, 5, 4, 2), complex)), {}, "x must hold real numbers, got complex128"),
        (dict(dt=np.ones((1, 6, 4))), {}, r"dt must have shape \(1, 5, 4\), got \(1, 6, 4\)"),
        (dict(A=np.ones(3)), {}, r"A must have shape \(4,\), got \(3,\)"),
        (dict(B=np.ones((1, 5, 3))), {}, "B must have shape"),
        (dict(B=np.ones((1, 5, 3, 2))), {}, "nheads must be a multiple of ngroups, got 4 heads and 3 groups"),
        (dict(C=np.ones((1, 5, 2, 4))), {}, r"C must have shape \(1, 5, 2, 3\), got \(1, 5, 2, 4\)"),
        ({}, dict(D=np.ones((4, 3))), r"D must have shape \(4, 2\), got \(4, 3\)"),
        ({}, dict(D=np.ones(2)), r"D must have shape \(4,\), got \(2,\)"),
        ({}, dict(z=np.ones((1, 5, 4))), "z must have shape"),
        ({}, dict(dt_bias=np.ones(1)), "dt_bias must have shape"),
        ({}, dict(dt_limit=(1, 0)), r"dt_limit must be \(low, high\) with low <= high, got \(1, 0\)"),
        ({}, dict(dt_limit=(0, nan)), "dt_limit must be"),
        ({}, dict(initial_states=np.ones((1, 4, 3, 2))), r"initial_states must have shape \(1, 4, 2, 3\)"),
        ({}, dict(seq_idx=np.ones((1, 5))), "seq_idx must be whole numbers of shape .*got float64"),
        ({}, dict(seq_idx=np.ones((1, 4), int)), r"seq_idx must be whole numbers of shape \(1, 5\), got int64 of"),
    ],
)
def test_refusals(changed, options, message):
    arrays = dict(zip(("x", "dt", "A", "B", "C"), problem(1, 5, 4, 2, 2, 3))) | changed
    for form in FORMS.values():
        with pytest.raises(ValueError, match=message):
            form(*arrays.values(), **options)


@pytest.mark.parametrize("size", [0, -4, 2.0, True, None])
def test_refused_sizes(size):
    arrays = problem(1, 5, 4, 2, 2, 3)
    with pytest.raises(ValueError, match="chunk_size must be a whole number of at least 1, got"):
        ssd_chunked(*arrays, chunk_size=size)
    with pytest.raises(ValueError, match="segments must be a whole number of at least 1, got"):
        ssd_segments(*arrays, chunk_size=2, segments=size)


@pytest.mark.parametrize("ends", [[0, 3], [1, 5], [0, 4, 3, 5], [0.0, 5.0], [5], [[0, 5]]])
def test_refused_ends(ends):
    with pytest.raises(ValueError, match="cu_seqlens must"):
        ssd_varlen(*problem(1, 5, 4, 2, 2, 3), ends)


def test_varlen_refusals():
    with pytest.raises(ValueError, match="x must have a batch of 1 where cu_seqlens is given, got 2"):
        ssd_varlen(*problem(2, 5, 4, 2, 2, 3), [0, 5])
    with pytest.raises(ValueError, match="seq_idx must be None where cu_seqlens is given"):
        ssd_varlen(*problem(1, 5, 4, 2, 2, 3), [0, 5], seq_idx=np.zeros((1, 5), int))
