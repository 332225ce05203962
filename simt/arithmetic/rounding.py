"""Rounding once: from exact values to float32, float16, bfloat16, tf32 and the 8-bit floats.

float64 holds every product of two narrower floats exactly. A sum may not fit; it is then *rounded to odd*: cut off,
with the last bit set to say "and something more". Rounding that to a narrow format gives what rounding the exact
sum gives, in every mode, because at least two bits are dropped (Boldo and Melquiond, 2008).

    format     bits  precision  exponents      its name in PTX
    FLOAT32     32      24      -126 .. 127    f32
    TFLOAT32    32      11      -126 .. 127    tf32, the 13 lowest bits zero
    FLOAT16     16      11       -14 .. 15     f16
    BFLOAT16    16       8      -126 .. 127    bf16
    E5M2         8       3       -14 .. 15     e5m2
    E4M3         8       4        -6 .. 8      e4m3, no infinity
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

F32, F64, U8, U16, U32, U64 = np.float32, np.float64, np.uint8, np.uint16, np.uint32, np.uint64
NAN32, NAN16 = U32(0x7FFFFFFF), U16(0x7FFF)  # what the hardware returns for every NaN it makes


@dataclass(frozen=True)
class Format:
    precision: int  # significant bits, the hidden one included
    lowest: int  # exponent of the smallest normal number
    largest: float


FLOAT32 = Format(24, -126, float(np.finfo(F32).max))
TFLOAT32 = Format(11, -126, (2 - 2.0**-10) * 2.0**127)
FLOAT16 = Format(11, -14, 65504.0)
BFLOAT16 = Format(8, -126, (2 - 2.0**-7) * 2.0**127)
E5M2 = Format(3, -14, 57344.0)
E4M3 = Format(4, -6, 448.0)

TO_WHOLE = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": lambda x: np.trunc(x + np.copysign(0.5, x)),  # ties away from zero; exact below 2^52
}


def round_to(x, target, mode="rn"):
    """float64 -> the float64 that `target` can hold, in mode rn, rz, rm, rp or rna. NaN stays NaN."""
    exponent = np.maximum(np.frexp(x)[1], target.lowest + 1) - target.precision
    result = np.ldexp(TO_WHOLE[mode](np.ldexp(x, -exponent)), exponent)
    over = (np.abs(result) > target.largest) & np.isfinite(x)
    if over.any():
        away = {"rz": np.zeros_like(over), "rm": x < 0, "rp": x > 0}.get(mode, over)
        result = np.where(over, np.copysign(np.where(away, np.inf, target.largest), x), result)
    return np.where(np.isfinite(x), result, x)


def odd_sum(x, y):
    """x + y of float64, rounded to odd. The error of the nearest sum is Knuth's TwoSum."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    return (bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)).view(F64)


def odd_whole(x):
    """int64 or uint64 -> float64, rounded to odd."""
    low = x & x.dtype.type(0x7FF)
    long = np.abs(x.astype(F64)) >= 2.0**53
    return np.where(long, ((x >> x.dtype.type(11)) | (low != 0)).astype(F64) * 2048.0, x.astype(F64))


# ---- between values and bits ----

HALF = np.arange(1 << 16, dtype=U16).view(np.float16).astype(F32)  # the float32 of every float16
HALF.view(U32)[np.isnan(HALF)] = NAN32


def decode(name, bits):
    """Bits of f16 or bf16 (uint16), e4m3 or e5m2 (uint8) -> float32."""
    if name == "bf16":
        return (bits.astype(U32) << U32(16)).view(F32)
    if name == "f16":
        return HALF.take(bits)
    return _eight_bits(name).take(bits)


@functools.cache
def _eight_bits(name):
    bits = np.arange(256, dtype=U16)
    if name == "e5m2":
        return HALF.take(bits << U16(8))
    value = ((bits & U16(0x7F)).astype(U32) << U32(20)).view(F32) * F32(2.0**120)  # bias 7 instead of 127
    value[[0x7F, 0xFF]] = np.nan
    return np.where(bits & U16(0x80), -value, value)


def encode(name, value):
    """float32 or float64 -> bits of f16 or bf16, to nearest even. NaN becomes 0x7fff."""
    if name == "f16":
        bits = value.astype(np.float16).view(U16)
    elif value.dtype == F64:
        bits = (round_to(value, BFLOAT16).astype(F32).view(U32) >> U32(16)).astype(U16)
    else:
        word = value.view(U32)
        last = word >> U32(16)
        last &= U32(1)
        last += word
        last += U32(0x7FFF)  # half a unit less one, and one more where the last bit is odd
        last >>= U32(16)
        bits = last.astype(U16)
    if np.isnan(value.min()):
        bits[np.isnan(value)] = NAN16
    return bits


def encode_exact(name, value):
    """A float64 that the format holds (from `round_to`) -> its bits; f32 gives the float32 itself."""
    if name in ("f32", "tf32"):
        return canonical(value.astype(F32))
    if name in ("f16", "bf16"):
        return encode(name, value if name == "f16" else value.astype(F32))
    if name == "e5m2":
        bits = value.astype(np.float16).view(U16) >> U16(8)
    else:
        bits = (np.abs(value) * 2.0**-120).astype(F32).view(U32) >> U32(20)  # bias 127 instead of 7
        bits = np.where(np.signbit(value), bits | U32(0x80), bits)
    return np.where(np.isnan(value), 0x7F, bits).astype(U8)


def canonical(value):
    """Make every NaN of a float32 result the hardware's. Changes `value` in place."""
    least = value.min()  # one fast pass: min of anything and NaN is NaN
    if least != least:
        value.view(U32)[np.isnan(value)] = NAN32
    return value


def flush(value):
    """.ftz: subnormal -> zero of the same sign, for float32."""
    return value * (np.abs(value) >= F32(2.0**-126))


def flush_half(bits):
    """.ftz for the bits of float16."""
    return np.where(bits & U16(0x7C00), bits, bits & U16(0x8000))


# ---- exact, one element at a time: for the rare cases ----


def exactly(operation, mode="rn"):
    """operation(Fractions) -> Fraction, as a function of arrays -> float64, rounded once. Slow, and always right.

    For finite arguments; where one is not, or the exact result is zero, the caller's value `plain` is kept.
    """

    def one(plain, *x):
        if not all(map(math.isfinite, x)):
            return plain
        exact = operation(*map(Fraction, x))
        return plain if exact == 0 else nearest(exact, mode)

    def apply(plain, *x):
        arrays = np.broadcast_arrays(plain, *x)
        flat = [one(*row) for row in zip(*(a.ravel().tolist() for a in arrays))]
        return np.array(flat, F64).reshape(arrays[0].shape)

    return apply


def nearest(exact, mode="rn"):
    """Fraction -> float in mode rn, rz, rm or rp."""
    try:
        value = exact.numerator / exact.denominator  # Python rounds this correctly, subnormals too
        error = (exact > Fraction(value)) - (exact < Fraction(value))
    except OverflowError:
        value, error = (math.inf, -1) if exact > 0 else (-math.inf, 1)
    if mode == "rn":
        return value
    direction = {"rm": -1, "rp": 1, "rz": -1 if exact > 0 else 1}[mode]
    return math.nextafter(value, direction * math.inf) if error == direction else value
