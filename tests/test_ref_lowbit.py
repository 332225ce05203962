"""Low-bit weights in NumPy: codes by exact fractions, packing by shifts in Python, conversions for every value of every
field, bounds that hold and are reached."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ref import lowbit
from ref.lowbit import BITS, SCALE_DTYPES, dequantize, error_bound, pack, quantize, round_up, unpack

quick = settings(max_examples=60, deadline=None)
every_bits = pytest.mark.parametrize("bits", BITS)
every_scale = pytest.mark.parametrize("dtype", SCALE_DTYPES)
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# rows, cols and the group: one group, several, groups of one
SHAPES = [(1, 1, None), (3, 7, None), (5, 12, 4), (2, 96, 32), (4, 6, 1)]


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def random_codes(bits, rows, cols, groups, seed=0):
    rng = np.random.default_rng([seed, bits, rows, cols])
    q = rng.integers(0, 1 << bits, (rows, cols), dtype=np.uint8)
    return q, rng.random((rows, groups)), rng.integers(0, 1 << bits, (rows, groups)).astype(float)


# Quantising


def exact(group, bits, dtype):
    """(scale, zero, codes) of one group, by the definition, in exact arithmetic but for the division of step 2."""
    low, high = min(*group, 0.0), max(*group, 0.0)
    steps = 1 if len(set(group)) == 1 else 2**bits - 1
    scale = round_up(np.float64((high - low) / steps), dtype).item()
    if scale == 0:
        return scale, 0, [0] * len(group)
    zero = round(Fraction(-low) / Fraction(scale))
    return scale, zero, [min(2**bits - 1, max(0, round(Fraction(w) / Fraction(scale)) + zero)) for w in group]


@every_bits
@every_scale
@pytest.mark.parametrize(("rows", "cols", "group"), SHAPES, ids=str)
def test_codes_by_fractions(bits, dtype, rows, cols, group):
    W = draw(rows, cols)
    W[0, : group or cols] *= np.float64(1e-3)
    W[-1] = np.abs(W[-1])  # all on one side of 0
    q, scale, zero = quantize(W, bits, group, scale_dtype=dtype)
    width = group or cols
    assert q.dtype == np.uint8 and q.shape == W.shape and scale.shape == zero.shape == (rows, cols // width)
    assert scale.dtype == zero.dtype == np.float64
    for r, g in np.ndindex(scale.shape):
        part = slice(g * width, (g + 1) * width)
        assert (scale[r, g], zero[r, g], q[r, part].tolist()) == exact(W[r, part].tolist() * 1, bits, dtype)


@every_bits
def test_all_codes_are_used_and_the_range_holds_zero(bits):
    L = 2**bits - 1
    for low in (0, L // 2, L):
        W = np.arange(-low, L - low + 1.0)[None]
        q, scale, zero = quantize(W, bits)
        assert q[0].tolist() == list(range(L + 1)) and scale.item() == 1 and zero.item() == low
        np.testing.assert_array_equal(dequantize(q, scale, zero), W)
    q, scale, zero = quantize(np.array([[3.0, 4.0], [-4.0, -3.0]]), bits)
    assert zero.ravel().tolist() == [0, L] and scale.ravel().tolist() == [4 / L] * 2
    assert q[0, 1] == L and q[1, 0] == 0


@every_bits
@pytest.mark.parametrize("dtype", TORCH)
def test_equal_weights_are_exact(bits, dtype):
    values = torch.tensor([0.1, -0.1, 3.14159, -7e4, 1e-6, 0.0, -0.0, 6e-8]).clamp(-65504, 65504)
    W = values.to(TORCH[dtype]).double().numpy()[:, None].repeat(10, 1)
    with np.errstate(all="raise", under="ignore"):
        q, scale, zero = quantize(W, bits, 5, scale_dtype=dtype)
    np.testing.assert_array_equal(dequantize(q, scale, zero), W)
    assert (zero == (W[:, ::5] < 0)).all() and not np.signbit(zero).any()
    assert scale[5:7].tolist() == [[0, 0]] * 2 and not q[5:7].any()


@every_bits
def test_ties_go_to_even_codes_of_an_even_zero_and_to_odd_ones_of_an_odd_one(bits):
    """W / scale is rounded before zero is added: to an even whole number."""
    L = 2**bits - 1
    for zero in (0, 1):
        W = np.array([[-zero, L - zero, 0.5, 1.5, 0.5 - zero]])
        q, scale, found = quantize(W, bits)
        assert scale.item() == 1 and found.item() == zero
        assert q[0].tolist() == [0, L, zero, min(L, 2 + zero), zero if zero == 0 else 1]


@every_bits
def test_a_zero_stays_zero(bits):
    W = draw(9, 64)
    W[:, 5] = 0
    for group in (8, 64):
        assert not dequantize(*quantize(W, bits, group))[:, 5].any()


@every_bits
def test_a_group_is_its_own(bits):
    W = draw(3, 12)
    before = quantize(W, bits, 4)
    W[1, 4:8] *= 100
    after = quantize(W, bits, 4)
    for one, other in zip(before, after):
        changed = one.reshape(3, 3, -1) != other.reshape(3, 3, -1)
        assert not np.delete(changed.any(2).ravel(), 4).any()
    assert after[1][1, 1] == pytest.approx(100 * before[1][1, 1])


def test_one_scale_for_a_row_is_a_group_as_long_as_the_row():
    W = draw(3, 12)
    for one, other in zip(quantize(W, 4), quantize(W, 4, 12)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", TORCH)
def test_round_up_is_the_least_number_not_below(dtype):
    rng = np.random.default_rng(1)
    x = rng.random(20_000) * 2.0 ** rng.integers(-30, 15, 20_000)
    tie = torch.arange(1, 0x7BFF, dtype=torch.int16).view(torch.float16).double().numpy()
    x = np.concatenate([x, [0.0], tie, np.nextafter(tie, 0), np.nextafter(tie, 9e9)])
    up = round_up(x, dtype)
    as_torch = torch.from_numpy(up).to(TORCH[dtype])
    assert (as_torch.double().numpy() == up).all() and (up >= x).all()
    below = (as_torch.view(torch.int32 if dtype == "float32" else torch.int16)[up > 0] - 1).view(TORCH[dtype])
    assert (below.double().numpy() < x[up > 0]).all()
    assert np.isinf(round_up(1e39, dtype)) and round_up(0.0, dtype) == 0


def test_round_up_past_the_largest():
    assert round_up(65504.0, "float16") == 65504 and np.isinf(round_up(np.nextafter(65504.0, 9e9), "float16"))
    largest = torch.finfo(torch.bfloat16).max
    assert round_up(largest, "bfloat16") == largest and np.isinf(round_up(largest * 1.0001, "bfloat16"))
    assert round_up(1 + 2.0**-40, "bfloat16") == 1 + 2.0**-7 and round_up(1 + 2.0**-40, "float64") == 1 + 2.0**-40


def test_ternary_by_its_definition():
    W = draw(6, 40) * 0.02
    q, scale, zero = lowbit.ternary(W)
    gamma = np.abs(W).mean()
    assert q.dtype == np.uint8 and set(q.ravel()) == {0, 1, 2}
    assert scale.shape == zero.shape == (6, 1) and (scale == gamma).all() and (zero == 1).all()
    for w, code in zip(W.ravel() / gamma, q.ravel()):
        assert code == (2 if w > 0.5 else 0 if w < -0.5 else 1)


def test_ternary_weights_are_kept_and_two_bits_by_range_lose_them():
    W = 0.75 * np.random.default_rng(0).integers(-1, 2, (5, 64))
    np.testing.assert_array_equal(dequantize(*lowbit.ternary(W, 0.75)), W)
    q, scale, zero = quantize(W, 2)
    assert np.abs(dequantize(q, scale, zero) - W).max() == pytest.approx(0.25)
    zeros = np.zeros((2, 3))
    assert not dequantize(*lowbit.ternary(zeros)).any()


# Packing


@every_bits
@pytest.mark.parametrize("cols", [1, 3, 4, 15, 16, 17, 33])
def test_packing_by_shifts(bits, cols):
    q = np.random.default_rng(cols).integers(0, 1 << bits, (3, cols), dtype=np.uint8)
    words = pack(q, bits)
    assert words.dtype == np.uint32 and words.shape == (3, -(-cols * bits // 32))
    for row, packed in zip(q.tolist(), words.tolist()):
        whole = sum(code << (bits * i) for i, code in enumerate(row))
        assert whole == sum(word << (32 * i) for i, word in enumerate(packed))
    back = unpack(words, bits, cols)
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, q)


@every_bits
@quick
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=5))
def test_unpacking_and_packing_any_words(bits, values):
    words = np.array(values, np.uint32)
    np.testing.assert_array_equal(pack(unpack(words, bits, len(words) * 32 // bits), bits), words)


@every_bits
def test_sign_extension(bits):
    half = 1 << (bits - 1)
    fields = np.arange(1 << bits, dtype=np.uint32)
    wanted = [*range(half), *range(-half, 0)]
    assert lowbit.sign_extend(fields, bits).tolist() == wanted
    assert [v & ((1 << bits) - 1) for v in wanted] == fields.tolist()


# Products


@every_bits
@pytest.mark.parametrize("m", [None, 1, 3])
def test_products_by_loops(bits, m):
    q, scale, zero = random_codes(bits, 5, 24, 3)
    x = draw(*(() if m is None else (m,)), 24)
    wanted = np.zeros((x.size // 24, 5))
    for i, r, c in np.ndindex(len(wanted), 5, 24):
        wanted[i, r] += (float(q[r, c]) - zero[r, c // 8]) * scale[r, c // 8] * x.reshape(-1, 24)[i, c]
    wanted = wanted.reshape(*x.shape[:-1], 5)
    for found in (
        lowbit.gemv_lowbit(q, scale, zero, x),
        lowbit.gemv_by_groups(q, scale, zero, x),
        lowbit.gemv_by_groups(q, scale, zero, x, offset=1024),
        dequantize(q, scale, zero) @ x if m is None else x @ dequantize(q, scale, zero).T,
    ):
        assert found.shape == wanted.shape and found.dtype == np.float64
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


# Codes to numbers: every value


def all_signed(bits, signed):
    """(every field, the number that it stands for)."""
    fields = np.arange(1 << bits, dtype=np.uint16)
    return fields, lowbit.sign_extend(fields, bits) if signed else fields.astype(int)


def places():
    """Every (bits, dtype, at) for which a mantissa has room."""
    return [
        (bits, dtype, at)
        for bits in BITS
        for dtype, (*_, room) in lowbit.MAGIC.items()
        for at in range(room - bits + 1)
    ]


def test_where_there_is_room():
    found = places()
    assert (8, "bfloat16", 0) not in found and (8, "float16", 2) in found and (4, "bfloat16", 3) in found
    assert len(found) == 3 + 0 + 7 + 4 + 9 + 6
    for bits, dtype, at in ((8, "bfloat16", 0), (8, "float16", 3), (4, "bfloat16", 4), (2, "bfloat16", 6)):
        with pytest.raises(
            ValueError, match=f"{bits} bits at bit {at} do not fit into the .* bits of {dtype}'s mantissa"
        ):
            lowbit.magic_number(bits, dtype, at)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("bits", "dtype", "at"), places(), ids=str)
def test_every_field_among_all_other_bits(bits, dtype, at, signed):
    """All 65536 patterns: whatever lies around the field does not count."""
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    fields, numbers = all_signed(bits, signed)
    found = lowbit.convert(patterns, bits, dtype, at, signed)
    np.testing.assert_array_equal(found, numbers[patterns >> at & fields[-1]])
    as_dtype = torch.from_numpy(found).to(TORCH[dtype])  # each is a number of the dtype
    np.testing.assert_array_equal(as_dtype.float().numpy(), found)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("bits", "dtype", "at"), places(), ids=str)
def test_each_step_is_exact_in_the_dtype(bits, dtype, at, signed):
    """The magic value, the sum, and the FMA of torch in that dtype: what a kernel does, with its roundings."""
    pattern, value = lowbit.magic_number(bits, dtype, at, signed)
    fields, numbers = all_signed(bits, signed)
    bits16 = torch.from_numpy(((fields << at) ^ pattern).astype(np.int16))
    held = bits16.view(TORCH[dtype])
    flipped = fields ^ (1 << (bits - 1)) if signed else fields
    magic = lowbit.MAGIC[dtype][1]
    assert held.double().tolist() == (magic + flipped.astype(int) * 2**at).tolist()
    assert torch.tensor(value, dtype=TORCH[dtype]).item() == value
    assert ((held - value) * 2.0**-at).tolist() == numbers.tolist()  # two roundings, where an FMA has one


def test_the_published_magic_numbers():
    assert lowbit.magic_number(4, "float16") == (0x6400, 1024)
    assert lowbit.magic_number(2, "bfloat16") == (0x4300, 128)
    assert lowbit.magic_number(2, "bfloat16", signed=True) == (0x4302, 130)
    assert lowbit.magic_number(8, "float16", signed=True) == (0x6480, 1152)
    for dtype, (pattern, value, room) in lowbit.MAGIC.items():
        one, two = lowbit.read([pattern, pattern + 1], dtype)
        assert one == value and two == value + 1
        assert lowbit.read(pattern + (1 << room) - 1, dtype) == 2 * value - 1  # the last one with steps of 1


@pytest.mark.parametrize("signed", [False, True])
def test_every_byte_becomes_a_bfloat16(signed):
    fields, numbers = all_signed(8, signed)
    found = lowbit.convert_bytes(fields, signed)
    assert found.dtype == np.float32 and found.tolist() == numbers.tolist()
    assert not (found.view(np.uint32) & 0xFFFF).any()  # the lower half is empty: cutting it off rounds nothing


@every_bits
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", lowbit.MAGIC)
def test_words_in_the_order_of_their_fields(bits, dtype, signed):
    """Every value in every place of a word, its neighbours all 0 and all 1."""
    per_word = 32 // bits
    fields, numbers = all_signed(bits, signed)
    for around in (0, fields[-1]):
        for place in range(per_word):
            codes = np.full((len(fields), per_word), around, np.uint8)
            codes[:, place] = fields
            found = lowbit.convert_word(pack(codes, bits)[:, 0], bits, dtype, signed)
            np.testing.assert_array_equal(found, numbers[codes])


def test_read_by_torch():
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for dtype in lowbit.MAGIC:
        wanted = torch.from_numpy(patterns.view(np.int16)).view(TORCH[dtype]).float().numpy()
        np.testing.assert_array_equal(lowbit.read(patterns, dtype), wanted)


def test_a_zero_point_folded_in_float16_is_lost():
    """(1024 + q) · scale - (1024 + zero) · scale in one FMA of float16: the constant is off by up to half a step."""
    zero, scale = 7, np.arange(1024, 2048)[:, None] * 2.0**-16  # every mantissa
    constant = (-(1024 + zero) * scale).astype(np.float16).astype(float)
    folded = ((1024 + np.arange(16)) * scale + constant).astype(np.float16)
    off = np.abs(folded / scale - (np.arange(16) - zero)).max(1)
    assert off.max() > 0.45 and np.median(off) > 0.1
    exact = lowbit.convert(np.arange(16), 4, "float16") - zero  # subtracted first: nothing is lost
    assert exact.tolist() == list(range(-7, 9))


# Bounds


@every_bits
@every_scale
@quick
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 1 << 32),
    st.floats(-20, 10),
    st.floats(0, 4),
)
def test_the_bound_holds(bits, dtype, rows, groups, group, seed, size, shift):
    """From scales that are subnormal float16 to large ones; around 0, and far from it."""
    rng = np.random.default_rng(seed)
    W = (rng.standard_normal((rows, groups * group)) + shift * rng.integers(-1, 2)) * 2.0**size
    q, scale, zero = quantize(W, bits, group, scale_dtype=dtype)
    assert ((zero >= 0) & (zero <= 2**bits - 1) & (zero == np.rint(zero))).all()
    assert (np.abs(dequantize(q, scale, zero) - W) <= error_bound(W, scale)).all()


@every_bits
def test_the_bound_is_reached(bits):
    W = draw(8, 4096)
    q, scale, zero = quantize(W, bits, 128)
    ratio = np.abs(dequantize(q, scale, zero) - W) / error_bound(W, scale)
    assert 0.98 < ratio.max() <= 1


@pytest.mark.parametrize(("bits", "expected"), [(8, 0.006), (4, 0.10), (2, 0.53)])
def test_relative_error_of_normal_weights(bits, expected):
    W = draw(64, 1024)
    off = {group: dequantize(*quantize(W, bits, group)) - W for group in (32, 128, None)}
    error = {group: np.linalg.norm(x) / np.linalg.norm(W) for group, x in off.items()}
    assert error[32] < error[128] < error[None]
    assert 0.7 * expected < error[128] < 1.3 * expected


@every_bits
@quick
@given(st.integers(0, 1 << 32), st.sampled_from([6, 16, 48]), st.sampled_from(["float16", "float64"]))
def test_the_output_bound_holds(bits, seed, group, dtype):
    rng = np.random.default_rng(seed)
    W, x = rng.standard_normal((5, 48)), rng.standard_normal((3, 48))
    q, scale, zero = quantize(W, bits, group, scale_dtype=dtype)
    off = np.abs(lowbit.gemv_lowbit(q, scale, zero, x) - x @ W.T)
    assert (off <= lowbit.output_bound(W, scale, x)).all()
    worst = np.sign(dequantize(q, scale, zero) - W)[0]  # every error counts with one sign
    assert lowbit.gemv_lowbit(q, scale, zero, worst)[0] - W[0] @ worst > 0.2 * lowbit.output_bound(W, scale, worst)[0]


def in_float32(q, scale, zero, x, offset):
    """gemv_by_groups with every operation in float32, terms one after another."""
    f = np.float32
    grouped, x_grouped = q.astype(f).reshape(*scale.shape, -1), x.astype(f).reshape(scale.shape[1], -1)
    products = np.cumsum((f(offset) + grouped) * x_grouped, axis=2, dtype=f)[..., -1]
    sums = np.cumsum(x_grouped, axis=1, dtype=f)[:, -1]
    terms = scale.astype(f) * (products - (f(offset) + zero.astype(f)) * sums)
    return np.cumsum(terms, axis=1, dtype=f)[:, -1]


@every_bits
@pytest.mark.parametrize("offset", [0, 128, 1024])
def test_the_float32_bound_holds_and_an_offset_costs_digits(bits, offset):
    q, scale, zero = quantize(draw(16, 2048), bits, 128, scale_dtype="float16")
    x = draw(2048, seed=3).astype(np.float16).astype(np.float64)
    off = np.abs(in_float32(q, scale, zero, x, offset) - lowbit.gemv_lowbit(q, scale, zero, x))
    bound = lowbit.float32_bound(q, scale, zero, x, offset)
    assert bound.shape == off.shape and (off <= bound).all() and off.max() > 2e-5 * bound.max()
    plain = lowbit.float32_bound(q, scale, zero, x)
    assert offset == 0 or 1 + offset / 256 < (bound / plain).min()


@pytest.mark.parametrize("groups", [1, 1024])
def test_the_float32_bound_counts_the_terms(groups):
    """A sum of equal terms, each rounded to the same side: far more than one rounding."""
    q, scale, zero = np.ones((1, 8192), np.uint8), np.ones((1, groups)), np.zeros((1, groups))
    x = np.full(8192, 0.1, np.float32).astype(np.float64)
    off = np.abs(in_float32(q, scale, zero, x, 0) - lowbit.gemv_lowbit(q, scale, zero, x))
    assert 20 * 2.0**-24 * 819 < off < lowbit.float32_bound(q, scale, zero, x) < 1


# What is wrong with a call


@pytest.mark.parametrize("bits", [1, 3, 16, 0, "4", None, True, 4.5])
def test_bits_that_are_not_offered(bits):
    for call in (lambda: quantize(draw(2, 4), bits), lambda: pack(np.zeros((2, 4), np.uint8), bits)):
        with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got"):
            call()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, r"W must have shape \(rows, cols\), none of it 0, got \(4,\)"),
        ((2, 0), {}, r"W must have shape .* got \(2, 0\)"),
        ((2, 12), dict(group=5), "group must be None or a divisor of cols, 12, got 5"),
        ((2, 12), dict(group=24), "group must be None or a divisor of cols, 12, got 24"),
        ((2, 12), dict(group=0), "group must be .* got 0"),
        ((2, 12), dict(group=-4), "group must be .* got -4"),
        ((2, 12), dict(group=4.0), "group must be .* got 4.0"),
        ((2, 12), dict(group=True), "group must be .* got True"),
        ((2, 12), dict(scale_dtype="float8"), "scale_dtype must be one of float64, .*, got 'float8'"),
    ],
)
def test_calls_that_do_not_fit(shape, options, message):
    with pytest.raises(ValueError, match=message):
        quantize(np.ones(shape), 4, **options)


@every_bits
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_weight_that_is_not_finite_is_named(bits, bad):
    W = draw(4, 8)
    W[1, 3] = W[2, 0] = bad
    for call in (lambda: quantize(W, bits, 4), lambda: lowbit.ternary(W)):
        with pytest.raises(ValueError, match=rf"W must be finite, got {bad} at \(1, 3\)"):
            call()


def test_scales_beyond_their_dtype():
    with pytest.raises(ValueError, match="W must have scales within float16, got one beyond it"):
        quantize(np.array([[0, 3 * 65504.1]]), 2, scale_dtype="float16")
    quantize(np.array([[0, 3 * 65504.0]]), 2, scale_dtype="float16")
    with pytest.raises(ValueError, match="W must have scales within float64"):
        quantize(np.array([[-1.7e308, 1.7e308]]), 8)


def test_codes_that_do_not_fit():
    with pytest.raises(ValueError, match="q must be from 0 to 3, got 4"):
        pack(np.array([[0, 4]], np.uint8), 2)
    with pytest.raises(ValueError, match="q must be of uint8, got int64"):
        pack(np.array([[0, 1]]), 2)
