"""The reference of latent attention: its two forms against each other and against ref.attention; AMLA's addition to the
bits of a float against ldexp over every exponent, and whatever breaks it."""

import numpy as np
import pytest

from ref import attention
from ref import latent_attention as latent

NOPE, ROPE, SMALL, V_DIM = 6, 4, 10, 5


def problem(rng, batch, n_heads, kv_len):
    """(q_nope, q_rope, cache, w_uk, w_uv) of small sizes."""
    shapes = (batch, n_heads, NOPE), (batch, n_heads, ROPE), (batch, kv_len, SMALL + ROPE)
    return [rng.standard_normal(shape) for shape in (*shapes, (n_heads, NOPE, SMALL), (n_heads, V_DIM, SMALL))]


def off(found, wanted):
    """‖found - wanted‖ / ‖wanted‖"""
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_the_absorbed_form_is_the_models():
    rng = np.random.default_rng(0)
    q_nope, q_rope, cache, w_uk, w_uv = problem(rng, 3, 4, 7)
    how = {"scale": (NOPE + ROPE) ** -0.5, "kv_lens": (7, 0, 3)}
    wanted = latent.heads(q_nope, q_rope, cache, w_uk, w_uv, **how)
    q = latent.absorb(q_nope, q_rope, w_uk)
    found = latent.project(latent.decode(q, cache, latent=SMALL, **how), w_uv)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)
    assert not found[1].any() and wanted[0].any()


def test_absorbed_it_is_attention_with_one_kv_head():
    rng = np.random.default_rng(1)
    q, cache = rng.standard_normal((2, 5, 576)), rng.standard_normal((2, 9, 576))
    wanted = attention.decode_attention(q, cache[:, :, None], cache[:, :, None], 0.07, kv_lens=(9, 4))[..., :512]
    np.testing.assert_allclose(latent.decode(q, cache, scale=0.07, kv_lens=(9, 4)), wanted, rtol=1e-11, atol=1e-13)


def test_scores_of_minus_infinity_in_a_whole_row_give_zeros():
    rng = np.random.default_rng(2)
    q, cache = np.abs(rng.standard_normal((1, 2, 576))), rng.standard_normal((1, 3, 576))
    cache[0, :, -1], q[0, 1, -1] = -np.inf, -1
    q[0, 1, :-1] = 0
    with np.errstate(invalid="ignore"):
        out = latent.decode(q[:, :1], cache, scale=1.0)
    assert not out.any()


EXPONENTS = np.arange(1, 255)  # of normal numbers


def normal_numbers(rng, count):
    """(numbers (254, count) of every exponent, both signs)"""
    bits = EXPONENTS[:, None] << 23 | rng.integers(0, 1 << 23, (254, count)) | rng.integers(0, 2, (254, count)) << 31
    return bits.astype(np.uint32).view(np.float32)


def test_an_addition_to_the_exponent_is_ldexp_for_every_exponent_and_step():
    rng = np.random.default_rng(3)
    x = normal_numbers(rng, 16)[:, None]  # (exponent, step, number)
    x[..., 0], x[..., 1] = np.ldexp(1.0, EXPONENTS[:, None] - 127), np.ldexp(2 - 2.0**-23, EXPONENTS[:, None] - 127)
    steps = np.arange(-253, 254)[:, None]
    found, wrong = latent.add_to_exponent(x, steps), latent.breaks(x, steps)
    with np.errstate(over="ignore", under="ignore"):
        wanted = np.ldexp(x.astype(np.float64), steps).astype(np.float32)
    same = found.view(np.int32) == wanted.view(np.int32)
    assert (~wrong).sum() > 1e5 * 5 and same[~wrong].all()
    # and where it breaks, it is wrong, but for a power of two that becomes inf
    to_infinity = np.isinf(found) & np.isinf(wanted) & same
    assert not (same & wrong & ~to_infinity).any()


@pytest.mark.parametrize(
    "x, n, becomes",
    [
        (0.0, -1, -np.inf),  # its bits are 0: the step borrows from the sign
        (0.0, 3, 2.0**-124),  # 0 becomes a number
        (2.0**-126, -1, 0.0),  # 2**-127 would be subnormal
        (2.0**-126, -2, -np.inf),
        (2.0**-130, 4, 2.0**-123 + 2.0**-127),  # subnormal: its first bit stands for itself
        (1.5 * 2.0**127, 1, np.nan),
        (2.0**127, 2, -0.0),  # through the exponent into the sign
    ],
)
def test_what_breaks_it(x, n, becomes):
    found = latent.add_to_exponent(x, n)
    np.testing.assert_array_equal(found, np.float32(becomes))
    assert np.signbit(found) == np.signbit(np.float32(becomes)) or np.isnan(becomes)
    assert latent.breaks(x, n)


@pytest.fixture(scope="module")
def sequence():
    rng = np.random.default_rng(4)
    q, cache = (latent.bfloat16(rng.standard_normal(shape)) for shape in ((16, 576), (2048, 576)))
    return q, cache, latent.decode(q[None], cache[None], scale=192**-0.5)[0]


def test_amla_with_its_compensation_is_about_as_right_as_a_product(sequence):
    q, cache, wanted = sequence
    how = {"scale": 192**-0.5, "tile": 64}
    plain, amla = off(latent.flash(q, cache, **how), wanted), off(latent.amla(q, cache, **how), wanted)
    assert 6e-4 < plain < 1e-3 and amla < 1.2 * plain
    assert off(latent.amla(q, cache, compensate=False, **how), wanted) > 1.3 * amla


def test_where_weights_are_not_rounded_nothing_is_left_to_compensate(sequence):
    """c16 = c, so that eps is 1e-6, and the addition is to the exponent alone."""
    q, cache, wanted = sequence
    how = {"scale": 192**-0.5, "rounded": np.float32}
    assert off(latent.flash(q, cache, **how), wanted) < 1e-6
    assert off(latent.amla(q, cache, compensate=False, **how), wanted) > 1e-4  # c is rounded all the same


def test_a_value_of_zero_breaks_amla(sequence):
    q, cache, _ = sequence
    cache = cache[np.argsort(cache @ q[0])].copy()  # so that maxima grow
    cache[:, 7] = 0
    right = latent.amla(q[:1], cache, scale=0.07)
    broken = latent.amla(q[:1], cache, scale=0.07, at_zero="add")
    assert not right[:, 7].any() and not abs(broken[0, 7]) < 1e30  # NaN, too


def test_a_maximum_that_leaps_leaves_less_than_a_billionth():
    """Steps end at -30: what came before is worth 2**-30 then, not less."""
    rng = np.random.default_rng(5)
    q, cache = (latent.bfloat16(rng.standard_normal(shape)) for shape in ((3, 576), (128, 576)))
    cache[70] = q[1]
    wanted = latent.decode(q[None], cache[None], scale=0.5)[0]
    assert off(latent.amla(q, cache, scale=0.5)[1], wanted[1]) < 1e-3
    assert (cache @ q[1] * 0.5).max() > 200


def test_parts_added_up_in_one_place_are_the_whole():
    rng = np.random.default_rng(6)
    q, cache = rng.standard_normal((5, 576)), rng.standard_normal((90, 576))
    cache[3] *= 20
    parts = [], [], []
    for rows in np.split(cache, (30, 31, 60)):
        s = 0.07 / np.log(2) * q @ rows.T
        p = np.exp2(s - s.max(axis=1, keepdims=True))
        for part, found in zip(parts, (p @ rows[:, :512], s.max(axis=1), p.sum(axis=1))):
            part.append(found)
    found = latent.merge_in_place(*map(np.array, parts))
    np.testing.assert_allclose(found, latent.decode(q[None], cache[None], scale=0.07)[0], rtol=1e-10, atol=1e-12)


def test_a_row_whose_parts_saw_nothing_is_zero():
    outs, lowest = np.zeros((2, 1, 4)), np.full((2, 1), np.finfo(np.float32).min)
    assert not latent.merge_in_place(outs, lowest, np.zeros((2, 1))).any()
