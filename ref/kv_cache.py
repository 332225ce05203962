"""A cache of keys or values in 8 or 4 bits: the format written out, down to the last bit.

kv      (batch, kv_len, n_kv_heads, head_dim)   numbers to be stored: float16, float32, or bfloat16 given as float32
codes   the same shape                          int8 from -127 to 127, int8 from -8 to 7, or bytes of e4m3
scale   float16, one for each group             stored number = code · scale

axis="token"     a group is `group` channels of one token and head:
                 scale (batch, kv_len, n_kv_heads, head_dim / group)
axis="channel"   a group is `group` tokens of one channel and head, the last group of a sequence may be shorter:
                 scale (batch, ceil(kv_len / group), n_kv_heads, head_dim)

Unlike the other references this one calculates in float32: which code a number gets is part of the format, and a
kernel that does the same operations finds the same bits.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

LARGEST = {8: 127, 4: 8, "fp8": 448}  # the magnitude of a code that the largest number of a group is given
E4M3_SMALLEST = 2.0**-6  # the smallest normal number; the spacing below it is 2**-9


@dataclass(frozen=True)
class Quantized:
    """What `quantize` returns; `recent` holds the exact tokens of the last, unfinished group (axis="channel")."""

    codes: np.ndarray
    scale: np.ndarray
    bits: int | str
    axis: str
    group: int
    recent: np.ndarray

    @property
    def shape(self):
        return self.codes.shape


def default_group(bits, axis, head_dim):
    """8 bits: all channels of a token and head, or 128 tokens. 4 bits: 32 of either (fewer if 32 does not divide)."""
    if bits == 4:
        return gcd(32, head_dim) if axis == "token" else 32
    return head_dim if axis == "token" else 128


def quantize(kv, bits, *, axis="token", group=None):
    """Round kv (batch, kv_len, n_kv_heads, head_dim) to codes of `bits`: 8, 4 or "fp8" (e4m3).

    1. largest     m = the number of the largest magnitude in each group
    2. scale       |m| / 127, |m| / 8 or |m| / 448, rounded up to float16; in 4 bits with the sign of -m,
                   so that the code of m is -8
    3. codes       x / scale, rounded to the nearest code (ties to even)

    Four signed bits reach from -8 to 7. With the sign of the scale free the 16th code is not lost, as it is where the
    scale is |m| / 7. A group of zeros has scale 0 and codes 0.

    ValueError: bits, axis or group that are not offered; NaN or infinity, or a number too large for a float16 scale
    (each with the first index).
    """
    if bits not in tuple(LARGEST):
        raise ValueError(f"bits must be 8, 4 or 'fp8', got {bits!r}")
    if axis not in ("token", "channel"):
        raise ValueError(f"axis must be 'token' or 'channel', got {axis!r}")
    given = np.asarray(kv)
    if given.ndim != 4 or 0 in given.shape:
        raise ValueError(f"kv must have shape (batch, kv_len, n_kv_heads, head_dim), none of it 0, got {given.shape}")
    batch, kv_len, n_kv_heads, head_dim = given.shape
    group = default_group(bits, axis, head_dim) if group is None else group
    if isinstance(group, bool) or not isinstance(group, int | np.integer) or group < 1:
        raise ValueError(f"group must be a whole number of 1 or more, got {group!r}")
    if axis == "token" and head_dim % group:
        raise ValueError(f"group must divide head_dim, {head_dim}, with axis='token', got {group}")
    _expect_storable(given, bits)

    x = given.astype(np.float32)
    low, high = _reduce(np.minimum, x, axis, group), _reduce(np.maximum, x, axis, group)
    m = np.where(-low >= high, low, high)  # 1
    scale = round_up_to_half(np.abs(m) / np.float32(LARGEST[bits]))  # 2
    if bits == 4:
        scale = np.where(m > 0, -scale, scale)
    spread = _spread(scale.astype(np.float32), x.shape, axis, group)
    y = np.divide(x, spread, out=np.zeros_like(x), where=spread != 0)
    if bits == "fp8":
        codes = e4m3(y)  # 3
    else:
        codes = np.clip(np.rint(y), -8 if bits == 4 else -127, 7 if bits == 4 else 127).astype(np.int8)
    unfinished = kv_len % group if axis == "channel" else 0
    return Quantized(codes, scale, bits, axis, int(group), given[:, kv_len - unfinished :].copy())


def dequantize(quantized):
    """The numbers that the codes stand for, float32 (batch, kv_len, n_kv_heads, head_dim): code · scale, exactly."""
    values = E4M3[quantized.codes] if quantized.bits == "fp8" else quantized.codes.astype(np.float32)
    return values * _spread(quantized.scale.astype(np.float32), quantized.shape, quantized.axis, quantized.group)


def append(quantized, kv_new):
    """The cache with more tokens: bit for bit what quantizing all of them at once would give.

    kv_new (batch, n, n_kv_heads, head_dim), n at least 1. With axis="token" its codes are put behind the others. With
    axis="channel" a new token may change the scale of the group that it falls into, so the unfinished group is
    quantized again from its exact numbers. Finished groups stay as they are.
    """
    kv_new = np.asarray(kv_new)
    batch, _, n_kv_heads, head_dim = quantized.shape
    if kv_new.ndim != 4 or kv_new.shape[::2] != (batch, n_kv_heads) or kv_new.shape[3] != head_dim or 0 in kv_new.shape:
        wanted = f"({batch}, n, {n_kv_heads}, {head_dim})"
        raise ValueError(f"kv_new must have shape {wanted}, like the cache, n at least 1, got {kv_new.shape}")
    _expect_storable(kv_new, quantized.bits, "kv_new")
    end = quantized.shape[1] - quantized.recent.shape[1]  # tokens in finished groups
    tail = np.concatenate([quantized.recent, kv_new], axis=1)
    tail = quantize(tail, quantized.bits, axis=quantized.axis, group=quantized.group)
    groups = end // quantized.group if quantized.axis == "channel" else end
    return Quantized(
        np.concatenate([quantized.codes[:, :end], tail.codes], axis=1),
        np.concatenate([quantized.scale[:, :groups], tail.scale], axis=1),
        *(quantized.bits, quantized.axis, quantized.group, tail.recent),
    )


def error_bound(kv, quantized):
    """The most by which each number of dequantize(quantized) may differ from kv (same shape).

    8 bits   half a step: scale / 2
    4 bits   half a step where x / scale is at most 7.5; up to a whole one for numbers whose code would be 8, and is 7
    e4m3     1/16 of the number while x / scale is a normal number; half the spacing below, scale · 2**-10

    That x / scale is itself rounded, to float32, costs nothing: the numbers halfway between two codes, times a scale
    of 11 bits, are float32 numbers, so no other float32 number is mistaken for one of them.
    """
    scale = _spread(quantized.scale.astype(np.float64), quantized.shape, quantized.axis, quantized.group)
    x = np.asarray(kv, np.float64)
    if quantized.bits == "fp8":
        bound = np.maximum(np.abs(x) / 16, scale * 2.0**-10)
    elif quantized.bits == 4:
        clipped = x * np.sign(scale) > 7.5 * np.abs(scale)
        bound = np.abs(scale) * np.where(clipped, 1, 0.5)
    else:
        bound = scale / 2
    return bound


def round_up_to_half(x):
    """The smallest float16 that is not below x (0 or more). Past 65504: infinity.

    Not to the nearest: a scale that is rounded down where float16 is coarse would clip the largest number of its
    group, or be 0 although the group is not.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(np.inf)), half)


def e4m3(x):
    """The byte of e4m3 nearest to x (ties to even), saturating at ±448: 1 bit of sign, 4 of exponent, 3 of mantissa.

    1. saturate    |x| to at most 448 (there is no infinity; 0x7f is NaN)
    2. spacing     2**(e - 3) for |x| from 2**e to 2**(e + 1); below 2**-6, where numbers are subnormal, 2**-9
    3. round       |x| to a whole number of spacings, from 8 to 16 of them (fewer if subnormal)
    4. pack        a mantissa that was rounded up to 16 carries into the exponent by itself
    """
    x = np.asarray(x, np.float32)
    size = np.minimum(np.abs(x), np.float32(448))  # 1
    _, e = np.frexp(np.maximum(size, np.float32(E4M3_SMALLEST)))  # size = f · 2**e with f from 1/2 to 1
    e = e - 1
    steps = np.rint(np.ldexp(np.nan_to_num(size), 3 - e))  # 2, 3: rint is to even, and even steps are even codes
    code = ((e + 6) << 3) + steps.astype(int)  # 4: 8 steps are mantissa 0 of exponent field e + 7, fewer of field 0
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def _e4m3_values():
    """What each of the 256 bytes stands for, float32. 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    field, mantissa = byte >> 3 & 15, byte & 7
    normal, subnormal = np.ldexp(1 + mantissa / 8, field - 7), np.ldexp(mantissa / 8, -6)
    size = np.where(field > 0, normal, subnormal)
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


E4M3 = _e4m3_values()


def _reduce(ufunc, x, axis, group):
    """ufunc over each group: an array of the shape of `scale`."""
    if axis == "token":
        return ufunc.reduce(x.reshape(*x.shape[:3], -1, group), axis=4)
    return ufunc.reduceat(x, np.arange(0, x.shape[1], group), axis=1)


def _spread(scale, shape, axis, group):
    """Each group's scale repeated for all of its numbers: an array of the shape of kv."""
    if axis == "token":
        return np.repeat(scale, group, axis=3)
    return np.repeat(scale, group, axis=1)[:, : shape[1]]


def _expect_storable(kv, bits, name="kv"):
    """ValueError for the first number that is not finite, or whose scale float16 could not hold."""
    limit = 65504 * LARGEST[bits]
    too_large = np.abs(kv) > np.float32(limit)
    for wrong, wanted in ((~np.isfinite(kv), "be finite"), (too_large, f"not pass {limit} in magnitude")):
        if wrong.any():
            index = tuple(map(int, np.argwhere(wrong)[0]))
            raise ValueError(f"{name} must {wanted}, got {kv[index]} at {index}")
