"""The references of chapter 05, held against other ways to write the same thing."""

import numpy as np
import pytest

import ref.fusion as fusion
from ref.gemv import gemv_loops


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def layer(rng, hidden, kv_rows, ffn):
    """The weights of a layer, as decoder_layer takes them."""
    norm, matrix = lambda: rng.standard_normal(hidden), lambda rows, cols: rng.standard_normal((rows, cols))
    first = (norm(), matrix(hidden, hidden), matrix(kv_rows, hidden), matrix(kv_rows, hidden), matrix(hidden, hidden))
    return (*first, norm(), matrix(ffn, hidden), matrix(ffn, hidden), matrix(hidden, ffn))


def test_rmsnorm_by_loops(rng):
    x, weight = rng.standard_normal(7), rng.standard_normal(7)
    mean = sum(float(a) ** 2 for a in x) / 7
    wanted = [float(a) / (mean + 1e-5) ** 0.5 * float(w) for a, w in zip(x, weight)]
    np.testing.assert_allclose(fusion.rmsnorm(x, weight), wanted, rtol=1e-12)


def test_rmsnorm_gives_a_root_mean_square_of_one(rng):
    normed = fusion.rmsnorm(1000 * rng.standard_normal(513), np.ones(513))
    assert np.sqrt((normed**2).mean()) == pytest.approx(1, abs=1e-9)


def test_eps_decides_where_x_is_zero():
    assert not fusion.rmsnorm(np.zeros(3), np.ones(3)).any()
    np.testing.assert_allclose(fusion.rmsnorm(np.full(4, 1e-3), np.ones(4), eps=3e-6), 0.5)


def test_silu_at_the_ends():
    np.testing.assert_array_equal(fusion.silu(np.array([0.0, 1e4, -1e4])), [0, 1e4, 0])
    assert fusion.silu(1.0) == pytest.approx(1 / (1 + np.exp(-1)))


@pytest.mark.parametrize("rows, cols", [(3, 1), (1, 5), (7, 33)])
def test_the_pieces_by_loops(rng, rows, cols):
    W, V, x, weight = (rng.standard_normal(s) for s in ((rows, cols), (rows, cols), cols, cols))
    residual, normed = rng.standard_normal(rows), fusion.rmsnorm(x, weight)
    gate, up = gemv_loops(W, normed), gemv_loops(V, normed)
    np.testing.assert_allclose(fusion.gemv_residual(W, x, residual), residual + gemv_loops(W, x))
    np.testing.assert_allclose(fusion.norm_glu(x, weight, W, V), gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(fusion.norm_qkv(x, weight, W, V[:1], V), np.concatenate([gate, up[:1], up]))


def test_the_root_comes_out_of_the_sum(rng):
    x, weight, W = rng.standard_normal(130), rng.standard_normal(130), rng.standard_normal((9, 130))
    np.testing.assert_allclose(fusion.rmsnorm_folded(x, weight, W), W @ fusion.rmsnorm(x, weight))


def test_the_layer_is_its_four_steps(rng):
    x, weights = rng.standard_normal(12), layer(rng, 12, 3, 20)
    y, qkv = fusion.decoder_layer(x, *weights)
    h = x + weights[4] @ qkv[:12]
    np.testing.assert_allclose(y, fusion.feed_forward(h, *weights[5:]))
    assert qkv.shape == (12 + 2 * 3,)


def test_half_precision_is_summed_in_float64():
    ones = np.ones(1 << 12, np.float16)  # float16 stops to count at 2048
    assert fusion.gemv_residual(ones[None], ones, np.zeros(1, np.float16)) == [1 << 12]
