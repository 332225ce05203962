"""The reference of a whole Mamba-2 and its hybrid, held against other ways to write their parts."""

import numpy as np
import pytest
import torch

import ref.mamba2 as mamba2
from ref.ssd import seq_idx_of


@pytest.fixture
def rng():
    return np.random.default_rng(18)


def model(rng, **changes):
    sizes = {"hidden": 12, "n_layers": 3, "nheads": 4, "headdim": 6, "dstate": 5, "vocab": 29, "chunk_size": 4}
    c = mamba2.Config(**sizes | changes)
    matrix = lambda rows, cols: rng.standard_normal((rows, cols)) / cols**0.5  # noqa: E731
    weight = lambda n: 1 + 0.1 * rng.standard_normal(n)  # noqa: E731
    layers = []
    for index in range(c.n_layers):
        if index in c.attention_layers:
            q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
            rows = matrix(q, c.hidden), matrix(kv, c.hidden), matrix(kv, c.hidden), matrix(c.hidden, q)
            mixer = mamba2.Attention(weight(c.hidden), *rows)
            norm = mixer.attention_norm
        else:
            mixer = mamba2.Block(
                matrix(c.d_inner + c.channels + c.nheads, c.hidden), matrix(c.channels, c.width),
                0.1 * rng.standard_normal(c.channels), rng.standard_normal(c.nheads) - 1,
                -rng.uniform(0.1, 16, c.nheads), weight(c.nheads), weight(c.d_inner), matrix(c.hidden, c.d_inner),
            )  # fmt: skip
            norm = weight(c.hidden)
        feed = (weight(c.hidden), matrix(c.ffn, c.hidden), matrix(c.ffn, c.hidden), matrix(c.hidden, c.ffn))
        layers.append(mamba2.Layer(norm, mixer, *(feed if c.ffn else ())))
    embedding = rng.standard_normal((c.vocab, c.hidden))
    return mamba2.Model(c, embedding, layers, weight(c.hidden), embedding)


HYBRID = {"attention_layers": (1,), "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "rotary": 4, "ffn": 10}
KINDS = {"plain": {}, "groups": {"ngroups": 2, "width": 3}, "clamped": {"dt_limit": (0.1, 0.5)}, "hybrid": HYBRID}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_behind_a_prompt_is_the_prompt_with_one_more(kind, rng):
    m, tokens = model(rng, **KINDS[kind]), rng.integers(0, 29, 11).tolist()
    whole, state = mamba2.logits(m, tokens), mamba2.State.empty(m.config)
    np.testing.assert_allclose(mamba2.prefill(m, tokens[:6], state), whole[:6], rtol=1e-10, atol=1e-12)
    for count in range(6, 11):
        np.testing.assert_allclose(mamba2.step(m, tokens[count], state), whole[count], rtol=1e-9, atol=1e-12)
    assert state.length == 11


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (4, 8), (1, 2, 3, 5)], ids=str)
def test_a_prompt_in_pieces_is_the_prompt_at_once(kind, cuts, rng):
    """Pieces shorter than the convolution is wide, too."""
    m, tokens = model(rng, **KINDS[kind]), rng.integers(0, 29, 11)
    state = mamba2.State.empty(m.config)
    found = np.concatenate([mamba2.prefill(m, part, state) for part in np.split(tokens, cuts)])
    np.testing.assert_allclose(found, mamba2.logits(m, tokens), rtol=1e-9, atol=1e-12)


def test_the_convolution_is_torchs_own(rng):
    xBC, weight, bias = rng.standard_normal((2, 9, 7)), rng.standard_normal((7, 4)), rng.standard_normal(7)
    state = rng.standard_normal((2, 3, 7))
    for first, wanted_first in ((None, np.zeros((2, 3, 7))), (state, state)):
        out, final = mamba2.conv1d(xBC, weight, bias, first)
        seen = torch.from_numpy(np.concatenate([wanted_first, xBC], axis=1)).transpose(1, 2)
        wanted = torch.nn.functional.conv1d(seen, torch.from_numpy(weight)[:, None], torch.from_numpy(bias), groups=7)
        np.testing.assert_allclose(out, torch.nn.functional.silu(wanted).transpose(1, 2).numpy(), rtol=1e-12)
        np.testing.assert_array_equal(final, xBC[:, -3:])


def test_a_state_keeps_what_a_short_piece_leaves_of_it(rng):
    state, xBC = rng.standard_normal((1, 3, 5)), rng.standard_normal((1, 2, 5))
    _, final = mamba2.conv1d(xBC, rng.standard_normal((5, 4)), None, state)
    np.testing.assert_array_equal(final, np.concatenate([state[:, 2:], xBC], axis=1))


def test_sequences_end_to_end_are_each_alone(rng):
    """One shorter than the convolution, a state that belongs to the first, and NaN that stays in its sequence."""
    xBC, weight, bias = rng.standard_normal((1, 12, 5)), rng.standard_normal((5, 4)), rng.standard_normal(5)
    xBC[0, 6] = np.nan
    state, ends = rng.standard_normal((1, 3, 5)), [0, 5, 7, 9, 12]
    out, final = mamba2.conv1d(xBC, weight, bias, state, seq_idx=seq_idx_of(ends))
    for begin, end in zip(ends, ends[1:]):
        alone, last = mamba2.conv1d(xBC[:, begin:end], weight, bias, None if begin else state)
        np.testing.assert_allclose(out[:, begin:end], alone)
    np.testing.assert_array_equal(final, last)
    short = mamba2.conv1d(xBC[:, :9], weight, bias, state, seq_idx=seq_idx_of(ends[:4]))[1]
    np.testing.assert_array_equal(short, [np.r_[np.zeros((1, 5)), xBC[0, 7:9]]])


def test_the_gated_norm_has_groups_of_its_own(rng):
    y, z, weight = rng.standard_normal((3, 12)), rng.standard_normal((3, 12)), rng.standard_normal(12)
    gated = y * z / (1 + np.exp(-z))
    found = mamba2.gated_norm(y, z, weight, 1e-5, 3)
    for i in range(3):
        part = slice(4 * i, 4 * i + 4)
        wanted = gated[:, part] / np.sqrt((gated[:, part] ** 2).mean(1, keepdims=True) + 1e-5) * weight[part]
        np.testing.assert_allclose(found[:, part], wanted, rtol=1e-12)
    np.testing.assert_allclose(mamba2.gated_norm(5 * y, z, weight, 0), mamba2.gated_norm(y, z, weight, 0))


def test_the_state_step_is_the_recurrence(rng):
    state, x, z = rng.standard_normal((2, 4, 6, 5)), rng.standard_normal((2, 4, 6)), rng.standard_normal((2, 4, 6))
    dt, A, B, C = rng.uniform(0, 1, (2, 4)), -rng.uniform(1, 16, 4), *rng.standard_normal((2, 2, 2, 5))
    y, after = mamba2.state_step(state, x, dt, A, B, C, D=np.ones(4), z=z)
    for b, h in np.ndindex(2, 4):
        wanted = np.exp(A[h] * dt[b, h]) * state[b, h] + dt[b, h] * np.outer(x[b, h], B[b, h // 2])
        np.testing.assert_allclose(after[b, h], wanted)
        gate = z[b, h] / (1 + np.exp(-z[b, h]))
        np.testing.assert_allclose(y[b, h], (wanted @ C[b, h // 2] + x[b, h]) * gate)


def test_half_of_a_head_turns(rng):
    """The rotary numbers alone, and scores that go by the distance."""
    q, k, frequencies = rng.standard_normal(8), rng.standard_normal(8), mamba2.llm.rope_frequencies(4)
    at = lambda x, position: mamba2.llm.rope(x[None], position, frequencies)[0]  # noqa: E731
    np.testing.assert_array_equal(at(q, 7)[4:], q[4:])
    assert (at(q, 7)[:4] != q[:4]).all()
    assert at(q, 9) @ at(k, 4) == pytest.approx(at(q, 105) @ at(k, 100))


@pytest.mark.parametrize(
    "wanted, call",
    [
        (r"initial_state must have shape \(1, 3, 5\)", {"initial_state": np.zeros((1, 4, 5))}),
        (r"bias must have shape \(5,\)", {"bias": np.zeros(4)}),
        (r"seq_idx must be whole numbers of shape \(1, 6\)", {"seq_idx": np.zeros((1, 5), int)}),
    ],
)
def test_what_does_not_fit_is_named(wanted, call):
    with pytest.raises(ValueError, match=wanted):
        mamba2.conv1d(np.zeros((1, 6, 5)), np.zeros((5, 4)), **call)
