"""The quantised cache in NumPy: codes and scales by loops, e4m3 by distances and by torch, error bounds, appending."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.attention import decode_attention
from ref.kv_cache import (
    E4M3,
    LARGEST,
    append,
    default_group,
    dequantize,
    e4m3,
    error_bound,
    quantize,
    round_up_to_half,
)

quick = settings(max_examples=60, deadline=None)
BITS, AXES = list(LARGEST), ["token", "channel"]
formats = pytest.mark.parametrize(("bits", "axis"), [(bits, axis) for bits in BITS for axis in AXES])
# kv and the group: one group, several, one that is not full, groups of one
SHAPES = [((1, 1, 1, 1), 1), ((2, 13, 3, 8), 4), ((1, 8, 1, 8), 8), ((3, 5, 2, 6), 2), ((1, 97, 2, 16), 16)]


def draw(shape, dtype=np.float16, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def keys_with_outliers(shape, seed=0):
    """N(0, 1), and four channels of each head 20 times as large."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal(shape)
    for g in range(shape[2]):
        kv[:, :, g, rng.choice(shape[3], 4, replace=False)] *= 20
    return kv.astype(np.float16)


def error(kv, bits, **options):
    kv = kv.astype(np.float64)
    return np.linalg.norm(dequantize(quantize(kv, bits, **options)) - kv) / np.linalg.norm(kv)


def same(a, b):
    """Equal bit for bit, in all that is stored."""
    assert (a.bits, a.axis, a.group, a.shape) == (b.bits, b.axis, b.group, b.shape)
    for one, other in ((a.codes, b.codes), (a.scale, b.scale), (a.recent, b.recent)):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# e4m3


def test_the_values_of_e4m3_by_torch():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, values)
    assert np.signbit(E4M3[0x80]) and E4M3[0x7E] == 448 and E4M3[1] == 2**-9 and E4M3[8] == 2**-6


def test_every_byte_is_kept():
    finite = np.isfinite(E4M3)
    assert e4m3(E4M3)[finite].tolist() == np.arange(256)[finite].tolist()
    assert np.isnan(E4M3[e4m3(E4M3[~finite])]).all() and (~finite).sum() == 2


def nearest(x):
    """The code nearest to each x of 0 or more, by distances to all codes; of two equally near ones the even one."""
    distance = np.abs(E4M3[:127].astype(np.float64) - x.astype(np.float64)[:, None])
    return np.array([min(np.flatnonzero(row == row.min()), key=lambda code: code % 2) for row in distance])


def test_every_float16_goes_to_the_nearest_code():
    x = np.arange(0x7C00, dtype=np.uint16).view(np.float16)  # 0 to 65504
    wanted = nearest(x)
    assert e4m3(x).tolist() == wanted.tolist() and e4m3(-x).tolist() == (wanted | 0x80).tolist()


def test_e4m3_between_two_codes_in_float32():
    values = E4M3[:127].astype(np.float32)
    middle = (values[:-1] + values[1:]) / 2
    assert e4m3(middle).tolist() == [i + i % 2 for i in range(126)]  # ties to even
    assert e4m3(np.nextafter(middle, np.float32(0))).tolist() == list(range(126))
    assert e4m3(np.nextafter(middle, np.float32(500))).tolist() == list(range(1, 127))


def test_e4m3_by_torch():
    rng = np.random.default_rng(8)
    x = (rng.standard_normal(50_000) * 2.0 ** rng.integers(-14, 9, 50_000)).astype(np.float32)
    x = np.concatenate([x[np.abs(x) <= 448], np.float32([0, -0.0, 448, -448, 464, 1e-45, -1e-45])])
    assert e4m3(x).tolist() == torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_e4m3_saturates():
    large = np.float32([449, 464, 465, 1e30, np.inf])
    assert E4M3[e4m3(large)].tolist() == [448] * 5 and E4M3[e4m3(-large)].tolist() == [-448] * 5


# Scales


def test_round_up_to_half():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    x = halves.astype(np.float32)
    assert round_up_to_half(x).tolist() == halves.tolist()
    assert round_up_to_half(np.nextafter(x[1:], np.float32(0))).tolist() == halves[1:].tolist()
    assert round_up_to_half(np.nextafter(x[:-1], np.float32(1e9))).tolist() == halves[1:].tolist()
    above = round_up_to_half(np.float32([65504.01, 65519, 65520, 1e30]))
    assert np.isinf(above).all() and above.dtype == np.float16


def exact_codes(group, bits):
    """(scale, codes) of one group in exact arithmetic, by the definition. Whole numbers only, not e4m3."""
    x = [Fraction(float(a)) for a in group]
    m = max(x, key=lambda a: (abs(a), -a))
    quotient = np.float32(float(abs(m))) / np.float32(LARGEST[bits])
    scale = next(
        h for h in (np.float16(quotient), np.nextafter(np.float16(quotient), np.float16(1e4))) if h >= quotient
    )
    scale = -scale if bits == 4 and m > 0 else scale
    if scale == 0:
        return scale, [0] * len(x)
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    return scale, [min(high, max(low, round(a / Fraction(float(scale))))) for a in x]  # Fraction rounds ties to even


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("shape", "group"), SHAPES, ids=str)
def test_whole_codes_by_loops(bits, axis, shape, group):
    kv = draw(shape)
    kv[0, 0, 0, :group] = 0
    found = quantize(kv, bits, axis=axis, group=group)
    assert found.codes.dtype == np.int8 and found.scale.dtype == np.float16 and found.shape == shape
    batch, kv_len, n_kv_heads, head_dim = shape
    along = head_dim if axis == "token" else kv_len
    groups = -(-along // group)
    split = (kv_len, groups) if axis == "token" else (groups, head_dim)
    assert found.scale.shape == (batch, split[0], n_kv_heads, split[1])
    for b, i, g, j in np.ndindex(found.scale.shape):
        members = (b, i, g, slice(j * group, (j + 1) * group))
        if axis == "channel":
            members = (b, slice(i * group, (i + 1) * group), g, j)
        scale, codes = exact_codes(kv[members], bits)
        assert found.scale[b, i, g, j] == scale and found.codes[members].tolist() == codes


@pytest.mark.parametrize("bits", BITS)
def test_numbers_next_to_a_tie_are_on_their_side_of_it(bits):
    """x / scale in float32 finds the code that exact arithmetic finds, however near x is to halfway."""
    scale = np.random.default_rng(4).integers(0x400, 0x800, (200, 1)) * 2.0**-15  # 11 bits, as float16 has
    codes = E4M3[1:127].astype(np.float64) if bits == "fp8" else np.arange(1.0, LARGEST[bits])
    tie = (scale * (codes[:-1] + codes[1:]) / 2).astype(np.float32)
    for direction, wanted in ((-np.inf, codes[:-1]), (np.inf, codes[1:])):
        x = np.nextafter(tie, np.float32(direction))
        kv = np.concatenate([-LARGEST[bits] * scale, x], axis=1).astype(np.float32)[None, :, None]
        found = quantize(kv, bits, group=kv.shape[3])
        assert found.scale.ravel().tolist() == scale.ravel().tolist()
        np.testing.assert_array_equal(dequantize(found)[0, :, 0, 1:], wanted * scale)


@pytest.mark.parametrize("axis", AXES)
def test_fp8_codes_by_torch(axis):
    kv = draw((2, 13, 3, 8), np.float32)
    found = quantize(kv, "fp8", axis=axis, group=4)
    assert found.codes.dtype == np.uint8 and found.scale.dtype == np.float16
    spread = np.repeat(found.scale, 4, axis=3 if axis == "token" else 1)[:, :13].astype(np.float32)
    wanted = torch.from_numpy(kv / spread).to(torch.float8_e4m3fn)
    assert found.codes.tolist() == wanted.view(torch.uint8).tolist()
    np.testing.assert_array_equal(dequantize(found), wanted.float().numpy() * spread)


@formats
def test_the_largest_of_each_group_has_the_largest_code(bits, axis):
    found = quantize(draw((2, 40, 3, 32)), bits, axis=axis, group=8)
    values = np.abs(E4M3[found.codes] if bits == "fp8" else found.codes.astype(int))
    groups = values.reshape(2, 40, 3, 4, 8).max(4) if axis == "token" else values.reshape(2, 5, 8, 3, 32).max(2)
    assert (groups == LARGEST[bits]).all()


def test_int4_uses_all_sixteen_codes_on_either_side():
    kv = np.zeros((1, 2, 1, 16), np.float16)
    kv[0, 0, 0], kv[0, 1, 0] = np.arange(-8, 8), np.arange(8, -8, -1)
    found = quantize(kv, 4, group=16)
    assert found.scale.ravel().tolist() == [1, -1]
    assert found.codes[0, :, 0].tolist() == [list(range(-8, 8))] * 2
    np.testing.assert_array_equal(dequantize(found), kv)


def test_int4_of_a_tie_takes_the_negative_one_for_the_largest():
    found = quantize(np.float16([3, -3]).reshape(1, 1, 1, 2), 4, group=2)
    assert found.scale.item() == 0.375 and found.codes.ravel().tolist() == [7, -8]


@formats
def test_zeros_stay_zero(bits, axis):
    kv = draw((1, 8, 2, 8))
    kv[:, :, 1] = [0, -0.0] * 4
    with np.errstate(all="raise", under="ignore"):
        found = quantize(kv, bits, axis=axis, group=4)
    assert not found.codes[:, :, 1].any() and not found.scale[:, :, 1].any()
    assert not dequantize(found)[:, :, 1].any() and found.scale[:, :, 0].all()


@formats
def test_defaults(bits, axis):
    kv = draw((1, 170, 2, 128))
    group = 32 if bits == 4 else 128  # on either axis, as in kernels.kv_cache
    assert default_group(bits, axis, 128) == group
    same(quantize(kv, bits, axis=axis), quantize(kv, bits, axis=axis, group=group))
    same(quantize(kv, bits), quantize(kv, bits, axis="token"))
    for head_dim in (1, 8, 24, 80):
        assert head_dim % default_group(bits, "token", head_dim) == 0


@formats
def test_float16_and_bfloat16_are_not_rounded_before(bits, axis):
    kv = draw((1, 5, 2, 8))
    by = dict(axis=axis, group=4)
    wanted = quantize(kv.astype(np.float64), bits, **by)
    for dtype in (np.float16, np.float32):
        found = quantize(kv.astype(dtype), bits, **by)
        assert found.recent.dtype == dtype
        assert found.codes.tobytes() == wanted.codes.tobytes() and found.scale.tobytes() == wanted.scale.tobytes()


# Errors


@formats
@quick
@given(
    st.tuples(*[st.integers(1, 3), st.integers(1, 20), st.integers(1, 2)]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 1 << 32),
    st.floats(-22, 12),
    st.floats(0, 6),
)
def test_the_bound_holds(bits, axis, shape, groups, group, seed, size, spread):
    """From numbers whose scale is a subnormal float16 to large ones, alike or of all magnitudes."""
    rng = np.random.default_rng(seed)
    shape = (*shape, groups * group)
    kv = rng.standard_normal(shape) * 2.0 ** (size + spread * rng.standard_normal(shape))
    kv = np.clip(kv, -5e5, 5e5).astype(np.float32)
    found = quantize(kv, bits, axis=axis, group=group)
    assert (np.abs(dequantize(found) - kv.astype(np.float64)) <= error_bound(kv, found)).all()


@formats
def test_the_bound_is_reached(bits, axis):
    kv = draw((2, 512, 3, 64))
    found = quantize(kv, bits, axis=axis)
    ratio = np.abs(dequantize(found) - kv.astype(np.float64)) / error_bound(kv, found)
    assert 0.9 < ratio.max() <= 1


def test_int4_errs_by_more_than_half_a_step_on_the_clipped_side_only():
    kv = draw((1, 512, 4, 64), np.float32)
    found = quantize(kv, 4)
    scale = np.repeat(found.scale, 32, axis=3).astype(np.float64)
    steps = np.abs(dequantize(found) - kv) / np.abs(scale)
    far = steps > 0.5001
    assert far.any() and (found.codes[far] == 7).all() and steps.max() <= 1


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.01), ("fp8", 0.03), (4, 0.09)])
def test_relative_error_of_normal_numbers(bits, allowed):
    kv = draw((2, 512, 2, 128))
    for axis in AXES:
        assert 0.3 * allowed < error(kv, bits, axis=axis) <= allowed


@pytest.mark.parametrize("bits", BITS)
def test_outlier_channels_cost_nothing_by_channel(bits):
    normal, outliers = draw((2, 512, 2, 128)), keys_with_outliers((2, 512, 2, 128))
    assert error(outliers, bits, axis="channel") <= 1.2 * error(normal, bits, axis="channel")


def test_outlier_channels_ruin_the_others_by_token():
    kv = keys_with_outliers((1, 512, 2, 128)).astype(np.float64)
    ordinary = np.abs(kv).max(axis=(0, 1)) < 10  # of the (2, 128) channels
    lost = {}
    for axis in AXES:
        off = dequantize(quantize(kv, 4, axis=axis)) - kv
        lost[axis] = np.linalg.norm(off[:, :, ordinary]) / np.linalg.norm(kv[:, :, ordinary])
    assert lost["channel"] <= 0.09 and lost["token"] > 5 * lost["channel"]


def test_scale_keeps_a_cache_of_any_size_as_good():
    kv = draw((1, 64, 2, 128), np.float32)
    for bits in BITS:
        errors = [error(kv * np.float32(2.0**size), bits) for size in (-5, 0, 10, 15)]
        assert max(errors) <= 1.02 * min(errors)


def test_attention_is_off_by_less_than_its_keys_are():
    q, k, v = draw((1, 8, 128), np.float64), draw((1, 512, 2, 128)), draw((1, 512, 2, 128), seed=1)
    wanted = decode_attention(q, k, v)
    off = {}
    for bits in BITS:
        keys, values = quantize(k, bits, axis="channel"), quantize(v, bits)
        found = decode_attention(q, dequantize(keys), dequantize(values))
        off[bits] = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert off[8] < 0.015 and off["fp8"] < 0.06 and off[4] < 0.2 and off[8] < off["fp8"] < off[4]


# Appending


@formats
@quick
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 5), st.integers(0, 1 << 32))
def test_appending_gives_what_quantizing_at_once_gives(bits, axis, counts, group, seed):
    kv = draw((2, sum(counts), 2, 2 * group), seed=seed)
    kv *= np.linspace(0.1, 4, kv.shape[1], dtype=np.float16)[:, None, None]  # so that new tokens change scales
    parts = np.split(kv, np.cumsum(counts)[:-1], axis=1)
    found = quantize(parts[0], bits, axis=axis, group=group)
    for part in parts[1:]:
        found = append(found, part)
    same(found, quantize(kv, bits, axis=axis, group=group))


@pytest.mark.parametrize("bits", BITS)
def test_a_new_token_changes_the_codes_of_its_own_group_only(bits):
    kv = draw((1, 7, 1, 4))
    before = quantize(kv, bits, axis="channel", group=3)
    assert before.recent.tolist() == kv[:, 6:].tolist()
    after = append(before, np.full((1, 1, 1, 4), 9, np.float16))
    assert before.shape == (1, 7, 1, 4) and after.shape == (1, 8, 1, 4)
    assert after.codes[:, :6].tolist() == before.codes[:, :6].tolist()
    assert after.scale[:, :2].tolist() == before.scale[:, :2].tolist()
    assert (np.abs(after.scale[:, 2]) > np.abs(before.scale[:, 2])).all()
    assert (after.codes[:, 6] != before.codes[:, 6]).any()


def test_requantizing_what_was_dequantized_would_lose_more():
    kv = draw((1, 32, 4, 64))
    exact = quantize(kv, 4, axis="channel")
    once = np.abs(dequantize(exact) - kv.astype(np.float64)).mean()
    stored = kv[:, :1]
    for t in range(1, 32):  # without the exact numbers: each token is rounded again whenever a scale changes
        stored = np.concatenate([dequantize(quantize(stored, 4, axis="channel")), kv[:, t : t + 1]], axis=1)
    again = dequantize(quantize(stored, 4, axis="channel"))
    assert np.abs(again - kv.astype(np.float64)).mean() > 1.1 * once


# What is wrong with a call


@pytest.mark.parametrize("bits", [2, 16, "int8", "e4m3", None, 7.5, [8]])
def test_bits_that_are_not_offered(bits):
    with pytest.raises(ValueError, match="bits must be 8, 4 or 'fp8', got"):
        quantize(draw((1, 2, 1, 4)), bits)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 2, 1, 4), dict(axis="head"), "axis must be 'token' or 'channel', got 'head'"),
        ((1, 2, 4), {}, r"kv must have shape .* got \(1, 2, 4\)"),
        ((1, 0, 1, 4), {}, r"kv must have shape .* none of it 0, got \(1, 0, 1, 4\)"),
        ((1, 2, 1, 4), dict(group=0), "group must be a whole number of 1 or more, got 0"),
        ((1, 2, 1, 4), dict(group=2.0, axis="channel"), "group must be a whole number .* 2.0"),
        ((1, 2, 1, 48), dict(group=32), "group must divide head_dim, 48, .* got 32"),
    ],
)
def test_calls_that_do_not_fit(shape, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(np.ones(shape), 4, **options)


@formats
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_number_that_is_not_finite_is_named(bits, axis, bad):
    kv = draw((2, 9, 2, 4))
    found = quantize(kv, bits, axis=axis, group=4)
    kv[1, 3, 0, 2] = kv[1, 3, 1, 0] = bad
    with pytest.raises(ValueError, match=rf"kv must be finite, got {bad} at \(1, 3, 0, 2\)"):
        quantize(kv, bits, axis=axis, group=4)
    with pytest.raises(ValueError, match=rf"kv_new must be finite, got {bad} at \(1, 0, 0, 2\)"):
        append(found, kv[:, 3:5])


@formats
def test_numbers_too_large_for_a_scale_are_named(bits, axis):
    kv = np.ones((1, 5, 1, 4), np.float32)
    kv[0, 3, 0, 1] = -65504.0 * LARGEST[bits]
    found = quantize(kv, bits, axis=axis, group=4)
    assert np.isfinite(dequantize(found)).all() and np.abs(found.scale).max() == 65504
    kv[0, 3, 0, 1] = np.nextafter(kv[0, 3, 0, 1], np.float32(-np.inf))
    with pytest.raises(ValueError, match=r"kv must not pass \d+ in magnitude, got -.* at \(0, 3, 0, 1\)"):
        quantize(kv, bits, axis=axis, group=4)
    with pytest.raises(ValueError, match=r"kv_new must not pass \d+ in magnitude, got -.* at \(0, 1, 0, 1\)"):
        append(found, kv[:, 2:])


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (2, 1, 1, 4), (2, 1, 2, 8), (2, 0, 2, 4), (2, 2, 4)])
def test_new_tokens_that_do_not_fit(shape):
    cache = quantize(draw((2, 5, 2, 4)), 8)
    with pytest.raises(ValueError, match=r"kv_new must have shape \(2, n, 2, 4\), like the cache"):
        append(cache, np.ones(shape))
