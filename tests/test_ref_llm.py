"""The reference of a whole language model, held against other ways to write its parts."""

import numpy as np
import pytest

import ref.llm as llm


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def model(rng, **changes):
    sizes = {"hidden": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "ffn": 32, "vocab": 29}
    c = llm.Config(**sizes | changes)
    matrix = lambda rows, cols: rng.standard_normal((rows, cols)) / cols**0.5  # noqa: E731
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layers = [
        llm.Layer(
            1 + 0.1 * rng.standard_normal(c.hidden), matrix(q, c.hidden), matrix(kv, c.hidden), matrix(kv, c.hidden),
            matrix(c.hidden, q), 1 + 0.1 * rng.standard_normal(c.hidden), matrix(c.ffn, c.hidden),
            matrix(c.ffn, c.hidden), matrix(c.hidden, c.ffn),
        )
        for _ in range(c.n_layers)
    ]  # fmt: skip
    embedding = rng.standard_normal((c.vocab, c.hidden))
    return llm.Model(c, embedding, layers, np.ones(c.hidden), embedding)


def test_rope_is_a_turn_of_the_complex_plane(rng):
    x, positions = rng.standard_normal((5, 3, 8)), np.array([0, 1, 2, 77, 4099])
    frequencies = llm.rope_frequencies(8)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None, None] * frequencies)
    np.testing.assert_allclose(llm.rope(x, positions, frequencies), np.concatenate([turned.real, turned.imag], -1))


def test_the_two_layouts_are_one_up_to_order(rng):
    x, frequencies = rng.standard_normal((5, 3, 8)), llm.rope_frequencies(8)
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # neighbours are the pairs of halves
    by_halves = llm.rope(x, np.arange(5), frequencies)[..., order]
    np.testing.assert_allclose(llm.rope_interleaved(x[..., order], np.arange(5), frequencies), by_halves)


def test_scores_depend_on_the_distance_alone(rng):
    q, k, frequencies = rng.standard_normal(8), rng.standard_normal(8), llm.rope_frequencies(8)
    at = lambda x, position: llm.rope(x[None], position, frequencies)[0]  # noqa: E731
    assert at(q, 9) @ at(k, 4) == pytest.approx(at(q, 1005) @ at(k, 1000))


def test_llama3_scaling_leaves_fast_pairs_and_slows_slow_ones():
    plain = llm.rope_frequencies(128, 500000.0)
    scaled = llm.rope_frequencies(128, 500000.0, ("llama3", 8.0, 1.0, 4.0, 8192))
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 4], plain[turns >= 4])
    np.testing.assert_allclose(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (np.diff(scaled / plain) <= 0).all()


def test_a_window_sees_the_last_tokens_alone(rng):
    """With one layer, what stands before the window changes nothing; with two, it reaches further, layer by layer."""
    one = model(rng, n_layers=1, window=3)
    tokens = [5, 1, 9, 4, 22, 7]
    np.testing.assert_array_equal(llm.logits(one, tokens)[-1] != llm.logits(one, [6, *tokens[1:]])[-1], False)
    two = model(rng, n_layers=2, window=3)
    assert (llm.logits(two, tokens)[4] != llm.logits(two, [6, *tokens[1:]])[4]).any()


def test_a_step_reads_nothing_of_what_comes_later(rng):
    m = model(rng)
    np.testing.assert_array_equal(llm.logits(m, [1, 2, 3]), llm.logits(m, [1, 2, 3, 4])[:3])


def test_probabilities_let_in_whom_they_should():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(llm.probabilities(logits), [0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(llm.probabilities(logits, top_k=2), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(llm.probabilities(logits, top_p=0.69), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(llm.probabilities(logits, top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9])
    np.testing.assert_allclose(llm.probabilities(logits, top_p=1e-9), [0, 1, 0, 0])
    np.testing.assert_allclose(llm.probabilities(logits, 0.5), np.square([0.1, 0.4, 0.2, 0.3]) / 0.3)
    np.testing.assert_array_equal(llm.probabilities([1, 3, 3, 2], 0), [0, 1, 0, 0])  # of equals the first


def test_draw_walks_the_line_from_the_largest_on():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    assert [llm.draw(p, u) for u in (0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999999)] == [1, 1, 3, 3, 2, 2, 0, 0]
    assert llm.draw(np.array([0, 1.0, 0]), 1 - 2**-53) == 1
