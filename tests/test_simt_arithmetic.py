"""PTX arithmetic against independent truth: Python integers, Fractions, struct, torch where it rounds once."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from simt.arithmetic import APPROXIMATE, find

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast")  # NaN and overflow are inputs here
RNG = np.random.default_rng(17)
F32, F64, U16, U32, U64 = np.float32, np.float64, np.uint16, np.uint32, np.uint64
SINGLES = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x807FFFFF, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF]
    + [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001, 0x3F000000, 0x3FC00000, 0x40200000]
    + [0x4B000001, 0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000, 0x477FF000, 0x33000000, 0x38800000, 0x3F808000],
    U32,
).view(F32)
WHOLE = [0, 1, 2, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 257, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000]
WHOLE += [0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 1 << 53]


def run(opcode, *x, destinations=1):
    """Call it as the machine does: arrays of three axes."""
    operation = find(opcode, destinations)
    assert operation is not None, opcode
    x = [np.asarray(v).astype(s, copy=False).reshape(1, 1, -1) for v, s in zip(x, operation.sources, strict=True)]
    with np.errstate(all="ignore"):
        result = operation.function(*x)
    single = not isinstance(result, tuple)
    result = (result,) if single else result
    for r, dtype in zip(result, operation.destinations, strict=True):
        assert r.dtype == dtype and r.ndim == 3, opcode
    return result[0].reshape(-1) if single else [r.reshape(-1) for r in result]


def random_floats(n, dtype=F32):
    bits = {2: U16, 4: U32, 8: U64}[np.dtype(dtype).itemsize]
    return RNG.integers(0, np.iinfo(bits).max, n, dtype=bits, endpoint=True).view(dtype)


def near_one(n):
    """float32 of close exponents, with all bits or with a few: sums that land in the middle."""
    x = RNG.integers(-(1 << 24), 1 << 24, n) * 2.0 ** RNG.integers(-28, -20, n)
    return np.where(RNG.random(n) < 0.5, x, np.round(x * 16) / 16).astype(F32)


# ---- the truth about rounding, by Fractions ----


def rounded(exact, precision, lowest, largest, mode="rn"):
    """A Fraction (not 0) -> the float nearest in a format, in a mode."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    scaled = exact / unit
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](scaled)  # round: ties to even
    value = whole * unit
    if abs(value) > Fraction(largest):
        up = {"rn": True, "rz": False, "rm": exact < 0, "rp": exact > 0}[mode]
        return math.copysign(math.inf if up else largest, 1 if exact > 0 else -1)
    return math.copysign(float(value), 1 if exact > 0 else -1)


FORMATS = {
    "f32": (24, -126, float(np.finfo(F32).max)),
    "f16": (11, -14, 65504.0),
    "bf16": (8, -126, (2 - 2.0**-7) * 2.0**127),
}


def value_of(kind, bits):
    if kind == "bf16":
        return (np.asarray(bits).astype(U32) << 16).view(F32)
    return bits.view(np.float16 if kind == "f16" else F32)


def same(kind, got, wanted, message=""):
    """Equal values, equal signs of zero; NaN where NaN is wanted, and then the hardware's."""
    values, wanted = value_of(kind, got).astype(F64), np.asarray(wanted, F64)
    nan = np.isnan(wanted)
    good = np.where(nan, np.isnan(values), (values == wanted) & (np.signbit(values) == np.signbit(wanted)))
    assert good.all(), f"{message} {np.flatnonzero(~good)[:5]}: {values[~good][:5]}, expected {wanted[~good][:5]}"
    bits = got.view(U32) if kind == "f32" else got
    assert (bits[nan] == (0x7FFFFFFF if kind == "f32" else 0x7FFF)).all(), message


def exactly(kind, mode, operation, plain, *x):
    """Element by element: Fractions where everything is finite and the result is not zero, else what `plain` gives."""
    out = []
    for row in zip(*(v.astype(F64).tolist() for v in x)):
        exact = operation(*map(Fraction, row)) if all(map(math.isfinite, row)) else 0
        with np.errstate(all="ignore"):
            out.append(rounded(exact, *FORMATS[kind], mode) if exact else float(plain(*map(F64, row))))
    return out


def crafted(n):
    """a * b + c in the middle between two float32 but for a little, with normal and with subnormal results."""
    a = F32(1) + RNG.integers(0, 1 << 12, n).astype(F32) * F32(2.0**-12)
    b = F32(1) + RNG.integers(0, 1 << 11, n).astype(F32) * F32(2.0**-11)
    c = (RNG.integers(0, 2, n) * 2 - 1) * 2.0 ** RNG.integers(-75, -40, n).astype(F64)
    tiny = RNG.random(n) < 0.3
    scale = np.where(tiny, 2.0 ** -RNG.integers(120, 149, n).astype(F64), 1)
    return a, (b * scale).astype(F32), np.where(tiny, c * 0 + 2.0**-149 * RNG.integers(-99, 99, n), c).astype(F32)


def test_fma_rounds_once():
    hostile = [x.ravel() for x in np.meshgrid(SINGLES, SINGLES[:22], SINGLES[:22])]
    sets = [
        [near_one(6000) for _ in range(3)],
        [random_floats(5000) for _ in range(3)],
        crafted(9000),
        hostile,
    ]
    big = F32(2.0**24 + 2)  # 1 + 2^-23 more or less, times, and then a grain on one side of the middle or the other
    sets.append([np.array([big, big, F32(1 + 2.0**-12)]), F32([1, 1, 1 + 2.0**-12]), F32([2.0**-60, -1, 2.0**-100])])
    for x in sets:
        got = run("fma.rn.f32", *x)
        same("f32", got, exactly("f32", "rn", lambda a, b, c: a * b + c, lambda a, b, c: a * b + c, *x))
    a, b, c = crafted(9000)
    with np.errstate(all="ignore"):
        twice = (a.astype(F64) * b + c).astype(F32)
    assert (twice != run("fma.rn.f32", a, b, c)).any()  # the crafted cases catch one who rounds twice


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "div"])
def test_rounding_modes_of_float32(name, mode):
    operation = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b if b else 0,
        "fma": lambda a, b, c: a * b + c,
    }[name]
    plain = operation if name != "div" else lambda a, b: a / b
    count = 3 if name == "fma" else 2
    x = [
        np.concatenate([near_one(500), random_floats(500), RNG.permutation(np.tile(SINGLES, 8))]) for _ in range(count)
    ]
    got = run(f"{name}.{mode}.f32", *x)
    wanted = np.array(exactly("f32", mode, operation, plain, *x))
    if mode == "rm":  # a sum that cancels is -0 in this mode only
        zero = (wanted == 0) & (got == 0) & (name in ("add", "sub", "fma"))
        wanted[zero] = got[zero]
    same("f32", got, wanted, f"{name}.{mode}")
    assert run("add.rm.f32", F32([1]), F32([-1])).view(U32)[0] == 0x80000000


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma.rn"])
def test_halves_round_once(kind, name):
    count = 3 if name == "fma.rn" else 2
    x = [random_floats(3000, np.float16).view(U16) for _ in range(count)]
    x = [np.where(RNG.random(3000) < 0.5, v, v & U16(0x83FF) | U16(0x3C00)) for v in x]
    operation = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}.get(name)
    operation = operation or (lambda a, b, c: a * b + c)
    got = run(f"{name}.{kind}", *x)
    same(kind, got, exactly(kind, "rn", operation, operation, *(value_of(kind, v) for v in x)), name)
    words = [v.astype(U32) | np.roll(v, 1).astype(U32) << 16 for v in x]
    pair = run(f"{name}.{kind}x2", *words)
    assert (pair == (got.astype(U32) | np.roll(got, 1).astype(U32) << 16)).all()
    relu = run(f"fma.rn.relu.{kind}", x[0], x[1], x[-1])
    plain = value_of(kind, run(f"fma.rn.{kind}", x[0], x[1], x[-1])).astype(F64)
    same(kind, relu, np.where(np.isnan(plain), np.nan, np.maximum(plain, 0) + 0.0))


def test_fma_of_float64():
    x = [np.concatenate([RNG.standard_normal(1500), random_floats(1500, F64)]) for _ in range(3)]
    x[2][:700] = -(x[0][:700] * x[1][:700])  # what is left is the product's error
    with np.errstate(all="ignore"):
        x[0][1500:1700], x[1][1500:1700] = 2.0**-540, 2.0**-530 * x[1][:200]  # subnormal products
    got = run("fma.rn.f64", *x)
    for row, value in zip(zip(*(v.tolist() for v in x)), got.tolist()):
        if all(map(math.isfinite, row)):
            a, b, c = map(Fraction, row)
            exact = a * b + c
            try:
                wanted = exact.numerator / exact.denominator
            except OverflowError:
                wanted = math.inf if exact > 0 else -math.inf
            assert value == wanted, row


def test_flush_and_saturate():
    tiny = F32(2.0**-127)
    assert run("add.ftz.f32", [tiny], [-0.0])[0] == 0 and run("add.f32", [tiny], [-0.0])[0] == tiny
    assert run("mul.ftz.f32", F32([-(2.0**-70)]), F32([2.0**-70])).view(U32)[0] == 0x80000000
    # tiny, if exponents had no end, though it rounds up to the smallest normal number: an H200 flushes it
    assert run("mul.ftz.f32", F32([1 - 2.0**-24]), F32([2.0**-126]))[0] == 0
    assert run("mul.f32", F32([1 - 2.0**-24]), F32([2.0**-126]))[0] == F32(2.0**-126)
    got = run("add.sat.f32", F32([2, -1, 0.25, np.nan, -0.0]), F32([0, 0, 0.25, 0, -0.0])).view(U32)
    assert got.tolist() == [0x3F800000, 0, 0x3F000000, 0, 0]


def test_minimum_maximum_sign():
    nan, zero = F32(np.nan), F32(0)
    a, b = F32([nan, 1, zero, -0.0, nan, -1]), F32([2, nan, -0.0, zero, nan, 1])
    words = lambda x: x.view(U32).tolist()  # noqa: E731
    assert words(run("max.f32", a, b)) == words(F32([2, 1, 0, 0])) + [0x7FFFFFFF] + words(F32([1]))
    assert words(run("min.f32", a, b)) == words(F32([2, 1, -0.0, -0.0])) + [0x7FFFFFFF] + words(F32([-1]))
    assert words(run("max.NaN.f32", a, b))[:2] == [0x7FFFFFFF] * 2
    h = U16([0x7E00, 0x3C00, 0, 0x8000, 0xFC00]), U16([0x4000, 0xFE00, 0x8000, 0, 0x0001])
    assert run("max.f16", *h).tolist() == [0x4000, 0x3C00, 0, 0, 1]
    assert run("min.f16", *h).tolist() == [0x4000, 0x3C00, 0x8000, 0x8000, 0xFC00]
    assert run("min.NaN.bf16", U16([0x7F81, 0x3F80]), U16([0, 0xBF80])).tolist() == [0x7FFF, 0xBF80]
    assert run("neg.f32", F32([0, -1, nan])).view(U32).tolist() == [0x80000000, 0x3F800000, 0x7FFFFFFF]
    assert run("abs.f16", U16([0x8000, 0xBC00, 0xFE01])).tolist() == [0, 0x3C00, 0x7FFF]


# ---- integers, by Python's ----


def signed(x, width):
    return x - (1 << width) if x >> (width - 1) else x


def toward_zero(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGERS = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "div": lambda a, b, w: toward_zero(a, b) if b else -1,
    "rem": lambda a, b, w: a - b * toward_zero(a, b) if b else -1,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
}


def operands(width, n=400):
    hostile = [x & (1 << width) - 1 for x in WHOLE]
    more = RNG.integers(0, 1 << 64, (2, n), dtype=U64, endpoint=False) >> RNG.integers(0, 64, (2, n)).astype(U64)
    pairs = [(x, y) for x in hostile for y in hostile] + [tuple(int(v) & (1 << width) - 1 for v in p) for p in more.T]
    return np.array(pairs, U64).T.astype({16: U16, 32: U32, 64: U64}[width])


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_arithmetic(name, kind):
    width = int(kind[1:])
    a, b = operands(width)
    operation = find(f"{name}.{kind}")
    got = run(f"{name}.{kind}", *(x.view(s) for x, s in zip((a, b), operation.sources)))
    read = (lambda x: signed(int(x), width)) if kind[0] == "s" else int
    assert got.tolist() == [INTEGERS[name](read(x), read(y), width) % (1 << width) for x, y in zip(a, b)]


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"])
def test_shifts_stop_at_the_width(kind):
    width = int(kind[1:])
    a = operands(width)[0]
    amount = RNG.choice(U32([0, 1, 5, width - 1, width, width + 1, 255, 256, 1 << 31, 0xFFFFFFFF]), a.size)
    read = (lambda x: signed(int(x), width)) if kind[0] == "s" else int
    got = run(f"shr.{kind}", a.view(find(f"shr.{kind}").sources[0]), amount)
    assert got.tolist() == [(read(x) >> min(int(n), width)) % (1 << width) for x, n in zip(a, amount)]
    got = run(f"shl.b{width}", a, amount)
    assert got.tolist() == [(int(x) << min(int(n), width)) % (1 << width) for x, n in zip(a, amount)]


def test_funnel_shifts():
    a, b = operands(32)
    n = RNG.integers(0, 70, a.size).astype(U32)
    for side in "lr":
        for limit in "wrap", "clamp":
            got = run(f"shf.{side}.{limit}.b32", a, b, n)
            for x, y, s, value in zip(a.tolist(), b.tolist(), n.tolist(), got.tolist()):
                s, both = s % 32 if limit == "wrap" else min(s, 32), y << 32 | x
                assert value == ((both << s >> 32) if side == "l" else both >> s) % 2**32


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    width = int(kind[1:])
    a, b = operands(width)
    position, length = (RNG.choice(U32([0, 1, 5, 8, 31, 32, 33, 63, 64, 100, 255]), a.size) for _ in "pl")
    got = run(f"bfe.{kind}", a.view(find(f"bfe.{kind}").sources[0]), position, length)
    inserted = run(f"bfi.b{width}", a, b, position, length)
    for x, y, p, n, field, joined in zip(*(v.tolist() for v in (a, b, position, length, got, inserted))):
        sign = x >> min(p + n - 1, width - 1) & 1 if kind[0] == "s" and n else 0
        bits = [(x >> (p + i) & 1 if i < n and p + i < width else sign) for i in range(width)]
        assert field == sum(bit << i for i, bit in enumerate(bits))
        mask = ((1 << n) - 1 << p) % (1 << width)
        assert joined == (y & ~mask | (x << p) & mask) % (1 << width)


@pytest.mark.parametrize("width", [32, 64])
def test_counting_bits(width):
    a = operands(width)[0]
    whole = a.tolist()
    assert run(f"popc.b{width}", a).tolist() == [x.bit_count() for x in whole]
    assert run(f"clz.b{width}", a).tolist() == [width - x.bit_length() for x in whole]
    assert run(f"brev.b{width}", a).tolist() == [int(f"{x:0{width}b}"[::-1], 2) for x in whole]
    for kind in f"u{width}", f"s{width}":
        plain = [~x % (1 << width) if kind[0] == "s" and x >> (width - 1) else x for x in whole]
        view = a.view(find(f"bfind.{kind}").sources[0])
        assert run(f"bfind.{kind}", view).tolist() == [(x.bit_length() - 1) % 2**32 for x in plain]
        shift = [width - x.bit_length() if x else 2**32 - 1 for x in plain]
        assert run(f"bfind.shiftamt.{kind}", view).tolist() == shift


def test_lop3_knows_all_256_tables():
    a, b, c = (RNG.integers(0, 1 << 32, 5, dtype=U64).astype(U32) for _ in "abc")
    planes = [(x[:, None] >> np.arange(32, dtype=U32)) & 1 for x in (a, b, c)]
    index = planes[0] * 4 + planes[1] * 2 + planes[2]
    for table in range(256):
        wanted = ((table >> index & 1).astype(U32) << np.arange(32, dtype=U32)).sum(1, dtype=U32)
        got = find("lop3.b32").function(*(x.reshape(1, 1, -1) for x in (a, b, c)), U32([[[table]]]))
        assert got.shape == (1, 1, 5) and got.dtype == U32 and (got == wanted).all(), table


def test_permute():
    a, b = operands(32)
    selector = RNG.integers(0, 1 << 16, a.size).astype(U32)
    modes = {"f4e": (3, 4, 5, 6), "rc8": (3, 3, 3, 3), "ecl": (3, 3, 3, 3), "ecr": (3, 2, 1, 0), "rc16": (2, 3, 2, 3)}
    for x, y, s, value in zip(a.tolist(), b.tolist(), selector.tolist(), run("prmt.b32", a, b, selector).tolist()):
        data = struct.pack("<II", x, y)
        chosen = [s >> 4 * i & 15 for i in range(4)]
        wanted = [data[n & 7] if n < 8 else 0xFF * (data[n & 7] >> 7) for n in chosen]
        assert value == int.from_bytes(bytes(wanted), "little")
    few = [RNG.integers(0, 1 << 32, 40, dtype=U64).astype(U32) for _ in "ab"]
    for alike in (0x3210, 0x5410, 0x7632, 0x6543, 0x1087, 0x9810, 0xFEDC, *selector[:40].tolist()):
        alone = run("prmt.b32", *few, U32([alike]))  # a selector that all threads share takes a shorter way
        assert (alone == run("prmt.b32", *few, np.full(40, alike, U32))).all(), hex(alike)
    for mode, order in modes.items():
        got = run(f"prmt.b32.{mode}", a[:3], b[:3], U32([3, 3, 3]))
        data = struct.pack("<II", int(a[2]), int(b[2]))
        wanted = {"ecr": (0, 1, 2, 3)}.get(mode, order)
        assert int(got[2]) == int.from_bytes(bytes(data[n] for n in wanted), "little"), mode


def test_dot_products_and_wide_products():
    a, b = operands(32)
    c = np.roll(a, 3)
    for of in "s32", "u32":
        for by in "s32", "u32":
            parts = [np.ascontiguousarray(x).view(np.int8 if t == "s32" else np.uint8) for x, t in ((a, of), (b, by))]
            total = (parts[0].reshape(-1, 4).astype(np.int64) * parts[1].reshape(-1, 4)).sum(1) + c
            assert (run(f"dp4a.{of}.{by}", a, b, c) == total.astype(U32)).all()
    got = run("mad.wide.s32", a.view(np.int32), b.view(np.int32), np.int64([-5]))
    assert got.tolist() == [(signed(x, 32) * signed(y, 32) - 5) % 2**64 for x, y in zip(a.tolist(), b.tolist())]
    assert run("add.sat.s32", np.int32([2**31 - 1, -(2**31)]), np.int32([1, -1])).tolist() == [2**31 - 1, 2**31]


# ---- conversions ----


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to, of", [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64"), ("bf16", "f64")])
def test_narrowing(to, of, mode):
    x = np.concatenate([SINGLES, near_one(400), random_floats(400), near_one(400) * F32(2.0**-14)]).astype(F64)
    if of == "f64":
        x = np.concatenate([x * (1 + 2.0**-30), x, random_floats(300, F64)])
        x = x[~np.isnan(x)]  # a NaN from f64 keeps its payload
    x = x.astype({"f32": F32, "f64": F64}[of])
    wanted = exactly(to, mode, lambda v: v, lambda v: v, x)
    same(to, run(f"cvt.{mode}.{to}.{of}", x), wanted, f"{to} {of} {mode}")


def test_narrowing_agrees_with_torch():
    x = np.concatenate([SINGLES[~np.isnan(SINGLES)], near_one(3000)])
    for to, dtype in ("f16", torch.float16), ("bf16", torch.bfloat16):
        wanted = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(U16)
        assert (run(f"cvt.rn.{to}.f32", x) == wanted).all()
        pair = run(f"cvt.rn.{to}x2.f32", x, x[::-1])
        assert (pair == (wanted.astype(U32) << 16 | wanted[::-1])).all()  # the first operand is the upper half
    x = np.clip(x, -400, 400)
    for to, dtype in ("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2):
        wanted = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
        assert (run(f"cvt.rn.satfinite.{to}.f32", x, x[::-1]) == (wanted.astype(U16) << 8 | wanted[::-1])).all()


def test_eight_bit_floats_there_and_back():
    every = np.arange(256, dtype=U16)
    for kind, dtype in ("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2):
        wide = run(f"cvt.rn.f16x2.{kind}", every)
        values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16).numpy()
        same("f16", (wide & 0xFFFF).astype(U16), values)
        back = run(f"cvt.rn.satfinite.{kind}.f16x2", wide)
        finite = np.isfinite(values)
        assert (back[finite] == every[finite]).all()
        limit = 0x7E if kind[1] == "4" else 0x7B
        got = run(f"cvt.rn.satfinite.{kind}.f32", F32([1e9, -np.inf]), F32([np.nan, np.inf]))
        assert got.tolist() == [limit << 8 | 0x7F, (limit | 0x80) << 8 | limit]


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("of", ["f16", "f32", "f64"])
def test_float_to_integer_clamps(kind, of):
    width = int(kind[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)
    x = np.concatenate([SINGLES, near_one(200) * F32(100), F32([0.5, 1.5, 2.5, -0.5, -1.5, 254.5, 255.5])])
    x = x.astype({"f16": np.float16, "f32": F32, "f64": F64}[of]) if of != "f32" else x
    operations = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for mode, operation in operations.items():
        got = run(f"cvt.{mode}.{kind}.{of}", x.view(U16) if of == "f16" else x)
        for value, result in zip(x.astype(F64).tolist(), got.tolist()):
            if math.isnan(value):
                wanted = 1 << width - 1 if of == "f64" or width == 64 else 0
            elif math.isinf(value):
                wanted = high if value > 0 else low
            else:
                wanted = min(max(operation(value), low), high)
            assert result % (1 << width) == wanted % (1 << width), (mode, value)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_integer_to_float(kind, mode):
    width = int(kind[1:])
    a = operands(width, 300)[1]
    read = (lambda x: signed(x, width)) if kind[0] == "s" else int
    for to in "f16", "bf16", "f32":
        got = run(f"cvt.{mode}.{to}.{kind}", a.view(find(f"cvt.{mode}.{to}.{kind}").sources[0]))
        same(to, got, [rounded(Fraction(read(x)), *FORMATS[to], mode) if x else 0.0 for x in a.tolist()], to)


def test_integer_to_integer():
    assert run("cvt.s32.s8", np.int8([-1, 127])).tolist() == [0xFFFFFFFF, 127]
    assert run("cvt.s16.s8", np.int8([-1, 127])).tolist() == [-1, 127]
    assert run("cvt.u64.s32", np.int32([-2])).tolist() == [2**64 - 2]
    assert run("cvt.u8.u32", U32([0x1FF])).tolist() == [0xFF]
    assert run("cvt.sat.u8.s32", np.int32([-5, 300, 7])).tolist() == [0, 255, 7]
    assert run("cvt.sat.s64.u64", U64([2**64 - 1])).tolist() == [2**63 - 1]


# ---- comparisons and selection ----


@pytest.mark.parametrize("kind", ["f32", "f64", "f16"])
def test_comparisons_of_floats(kind):
    pool = SINGLES.astype({"f32": F32, "f64": F64, "f16": np.float16}[kind])
    a, b = (x.ravel() for x in np.meshgrid(pool, pool))
    give = (a.view(U16), b.view(U16)) if kind == "f16" else (a, b)
    table = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for x, y, *results in zip(a.tolist(), b.tolist(), *(run(f"setp.{n}.{kind}", *give).tolist() for n in table)):
        assert results == [x == y, x < y, x <= y, x > y, x >= y]
    nan = np.isnan(a) | np.isnan(b)
    assert (run(f"setp.ne.{kind}", *give) == ((a != b) & ~nan)).all()
    assert (run(f"setp.nan.{kind}", *give) == nan).all() and (run(f"setp.num.{kind}", *give) == ~nan).all()
    for name in "eq", "ne", "lt", "le", "gt", "ge":
        assert (run(f"setp.{name}u.{kind}", *give) == (run(f"setp.{name}.{kind}", *give) | nan)).all()


def test_comparisons_combine():
    a, b, c = np.int32([1, 1, 3, 3]), np.int32([2, 2, 2, 2]), np.array([True, False, True, False])
    assert run("setp.lt.and.s32", a, b, c).tolist() == [True, False, False, False]
    p, q = run("setp.lt.and.s32", a, b, c, destinations=2)
    assert p.tolist() == [True, False, False, False] and q.tolist() == [False, False, True, False]
    assert run("setp.lo.u32", U32([1]), U32([0xFFFFFFFF]))[0] and not run("setp.lt.s32", [1], np.int32([-1]))[0]
    low, high = run("setp.lt.f16x2", U32([0x3C000000]), U32([0x00003C00]))
    assert low[0] and not high[0]
    assert run("set.lt.u32.s32", a, b).tolist() == [0xFFFFFFFF] * 2 + [0] * 2
    assert run("set.lt.f16x2.f16x2", U32([0x3C000000]), U32([0x00003C00])).tolist() == [0x3C00]
    assert run("selp.f32", F32([1]), F32([2]), [False]).tolist() == [2]
    assert run("slct.u32.f32", U32([1]), U32([2]), F32([-0.0])).tolist() == [1]


def test_approximate_functions_are_close():
    x = np.abs(near_one(500)) + F32(0.01)
    truth = {"rcp": lambda v: 1 / v, "rsqrt": lambda v: v**-0.5, "sqrt": math.sqrt, "ex2": lambda v: 2**v}
    truth |= {"lg2": math.log2, "sin": math.sin, "cos": math.cos, "tanh": math.tanh}
    for name, function in truth.items():
        assert f"{name}.approx" in APPROXIMATE
        assert np.allclose(run(f"{name}.approx.f32", x), [function(float(v)) for v in x], rtol=1e-6, atol=1e-7)
    assert np.array_equal(run("ex2.approx.f16x2", U32([0x3C004000])), U32([0x40004400]))


def test_broadcasting():
    """Axes of length 1 stay, and meet longer ones."""
    for opcode in "fma.rn.f32", "fma.rn.f16x2", "max.f16", "add.s32", "lop3.b32", "min.f32", "fma.rn.bf16":
        operation = find(opcode)
        shapes = [(4, 1, 1), (1, 3, 1), (1, 1, 32), (1, 1, 1)]
        given = [np.ones(shape, dtype) for shape, dtype in zip(shapes, operation.sources)]
        wanted = np.broadcast_shapes(*(x.shape for x in given))
        assert operation.function(*given).shape == wanted
        ones = [np.ones((1, 1, 1), dtype) for dtype in operation.sources]
        assert operation.function(*ones).shape == (1, 1, 1)


@pytest.mark.parametrize(
    "opcode", ["mov.u32", "ld.global.f32", "bra", "add.f128", "cvt.rn.f16.bf8", "fma.rq.f32", "add.lo"]
)
def test_what_is_not_arithmetic_is_none(opcode):
    assert find(opcode) is None
