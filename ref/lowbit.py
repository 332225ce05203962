"""Weights in 8, 4 or 2 bits: quantising by groups, packing, and turning codes into numbers with a magic number.

W      (rows, cols)              the weights; `group` neighbouring columns of a row share a scale and a zero point
q      (rows, cols) uint8        codes from 0 to L = 2**bits - 1
scale  (rows, cols / group)      float64, 0 or more
zero   (rows, cols / group)      float64, whole numbers from 0 to L: the code of the weight 0
x      (cols,) or (m, cols)      activations;   y (rows,) or (m, rows), y = W x for each

W ~ (q - zero) · scale. Which code a weight gets is part of the format: kernels that do the same operations in float64
find the same codes.
"""

import numpy as np

BITS = (8, 4, 2)
SCALE_DTYPES = ("float64", "float32", "float16", "bfloat16")
# A number whose exponent makes the last bit of its mantissa worth 1: (its bits, its value, bits of the mantissa)
MAGIC = {"float16": (0x6400, 1024, 10), "bfloat16": (0x4300, 128, 7)}
MAGIC32, VALUE32 = 0x4B000000, 1 << 23  # the same in float32


def quantize(W, bits, group=None, *, scale_dtype="float64"):
    """Round W (rows, cols) to codes of `bits`. Returns (q, scale, zero). group=None: one for each row.

    1. range   from the least to the largest weight of the group, and 0
    2. scale   range / L, rounded up to `scale_dtype`; where all weights of a group are equal, the range itself, so that
               they are one step from 0, and exact
    3. zero    -least / scale, rounded
    4. codes   W / scale, rounded, + zero, kept within 0 and L

    Rounding is to the nearest, ties to even. The range holds 0, so that `zero` is one of the codes and a weight of 0
    stays 0. Scales are rounded up because a smaller one would not reach the ends of the range.

    ValueError: bits or group that are not offered, NaN or infinity (with the first index), a scale beyond its dtype.
    """
    L = _largest(bits)
    W, group = _expect_weights(W, group)
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype must be one of {', '.join(SCALE_DTYPES)}, got {scale_dtype!r}")
    grouped = W.reshape(len(W), -1, group)
    least, largest = grouped.min(2), grouped.max(2)
    low, high = np.minimum(least, 0), np.maximum(largest, 0)  # 1
    with np.errstate(over="ignore"):
        scale = round_up((high - low) / np.where(least == largest, 1, L), scale_dtype)  # 2
    if not np.isfinite(scale).all():
        raise ValueError(f"W must have scales within {scale_dtype}, got one beyond it")
    zero = np.rint(_divide(0 - low, scale))  # 3; 0 - low, as -low may be -0
    q = np.clip(np.rint(_divide(grouped, scale[..., None])) + zero[..., None], 0, L)  # 4
    return q.astype(np.uint8).reshape(W.shape), scale, zero


def ternary(W, scale=None):
    """Weights -1, 0 and 1 times one scale, as in BitNet b1.58: 2 bits whose fourth code is not used. (q, scale, zero).

    The scale is the mean magnitude of all of W, or the one that is given; zero is 1, so q is 0, 1 or 2. A row is a
    group: the scale stands once for each.
    """
    W, _ = _expect_weights(W, None)
    scale = np.float64(np.abs(W).mean() if scale is None else scale)
    q = np.clip(np.rint(_divide(W, scale)), -1, 1) + 1
    return q.astype(np.uint8), np.full((len(W), 1), scale), np.ones((len(W), 1))


def dequantize(q, scale, zero):
    """The weights that the codes stand for, float64 (rows, cols)."""
    grouped = np.asarray(q, np.float64).reshape(*scale.shape, -1)
    return ((grouped - zero[..., None]) * scale[..., None]).reshape(q.shape)


# Packing


def pack(q, bits):
    """Codes (..., cols) -> words uint32 (..., ceil(cols · bits / 32)). Code i of a word is its bits from bits · i on.

    What is left of a row's last word is 0.
    """
    _expect_codes(q, bits)
    per_word = 32 // bits
    padded = np.zeros((*q.shape[:-1], -(-q.shape[-1] // per_word) * per_word), np.uint32)
    padded[..., : q.shape[-1]] = q
    fields = padded.reshape(*q.shape[:-1], -1, per_word)
    return np.bitwise_or.reduce(fields << _shifts(bits), axis=-1)


def unpack(words, bits, cols):
    """The codes uint8 (..., cols) of words (..., ceil(cols · bits / 32)): shift each to the right end, mask."""
    fields = np.asarray(words, np.uint32)[..., None] >> _shifts(bits) & np.uint32(_largest(bits))
    return fields.reshape(*words.shape[:-1], -1)[..., :cols].astype(np.uint8)


def sign_extend(fields, bits):
    """The signed numbers that fields of two's complement stand for: flip the sign bit, then subtract what it is worth.

    A field that is only shifted and masked is never negative.
    """
    sign = 1 << (bits - 1)
    return (np.asarray(fields, np.int32) ^ sign) - sign


# Products


def gemv_lowbit(q, scale, zero, x):
    """y for x (cols,) or (m, cols): the weights are made first, and then multiplied."""
    return np.asarray(x, np.float64) @ dequantize(q, scale, zero).T


def gemv_by_groups(q, scale, zero, x, offset=0):
    """The same, and no weight is made. Codes may carry an offset, such as the 1024 of a magic number.

    1. products   Σ (offset + q) · x of each group
    2. sums       Σ x of each group: they serve all rows
    3. groups     y = Σ scale · (products - (offset + zero) · sums)
    """
    x = np.asarray(x, np.float64)
    x_grouped = x.reshape(*x.shape[:-1], 1, scale.shape[1], -1)
    grouped = np.asarray(q, np.float64).reshape(*scale.shape, -1)
    products = ((offset + grouped) * x_grouped).sum(-1)  # 1: (..., rows, groups)
    sums = x_grouped.sum(-1)  # 2: (..., 1, groups)
    return (scale * (products - (offset + zero) * sums)).sum(-1)  # 3


# Codes to numbers


def read(patterns, dtype):
    """What 16-bit patterns stand for, as float32. dtype: "float16" or "bfloat16" (the upper half of a float32)."""
    patterns = np.asarray(patterns, np.uint16)
    if dtype == "float16":
        return patterns.view(np.float16).astype(np.float32)
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def magic_number(bits, dtype, at=0, signed=False):
    """(the pattern to XOR a field with, the number that it then stands for when it is 0).

    float16 0x6400 is 1024 and the next number is 1025, so a field in its lowest bits is added to it. Likewise bfloat16
    0x4300, 128 and 129; its mantissa has room for 7 bits. A signed field has its sign bit flipped too, which adds half
    its range: 0x4302 and 130 for 2 bits. `at`: the field's lowest bit, which makes it count 2**at fold.

    ValueError where the field is longer than the mantissa.
    """
    pattern, value, room = MAGIC[dtype]
    if at + bits > room:
        raise ValueError(f"{bits} bits at bit {at} do not fit into the {room} bits of {dtype}'s mantissa")
    flipped = 1 << (bits - 1 + at) if signed else 0
    return pattern | flipped, value + flipped


def convert(patterns, bits, dtype, at=0, signed=False):
    """The numbers in a field of 16-bit patterns, whatever lies around it: float32, each one a number of `dtype`.

    1. mask       keep the field
    2. magic      XOR puts the exponent over it (and flips the sign bit). One LOP3 does 1 and 2, for two patterns
    3. read       as a floating-point number: the magic value + field · 2**at
    4. subtract   the magic value, and divide by 2**at: one addition, or one FMA, and nothing is rounded
    """
    pattern, value = magic_number(bits, dtype, at, signed)
    field = np.asarray(patterns, np.uint16) & np.uint16(_largest(bits) << at)  # 1
    number = read(field ^ np.uint16(pattern), dtype)  # 2, 3
    return (number - np.float32(value)) * np.float32(2.0**-at)  # 4


def convert_bytes(codes, signed=False):
    """8 bits to bfloat16, by way of float32: the mantissa of bfloat16 has room for 7. Every byte is a bfloat16."""
    flipped = 0x80 if signed else 0
    pattern = np.asarray(codes, np.uint32) ^ np.uint32(MAGIC32 | flipped)  # one byte permutation
    return pattern.view(np.float32) - np.float32(VALUE32 + flipped)


def convert_word(words, bits, dtype, signed=False):
    """The numbers in 32-bit words, float32 (..., 32 / bits), in the order of the fields, as a kernel finds them.

    A word is two 16-bit patterns, converted together: a shift by bits · i brings field i to the end of the lower one
    and field i + 16 / bits to the end of the upper one.
    """
    words = np.asarray(words, np.uint32)
    if bits == 8 and dtype == "bfloat16":
        return convert_bytes(words[..., None] >> _shifts(8) & np.uint32(255), signed)
    shifted = words[..., None] >> _shifts(bits)[: 16 // bits]
    halves = [convert(half, bits, dtype, signed=signed) for half in (shifted & np.uint32(0xFFFF), shifted >> 16)]
    return np.concatenate(halves, axis=-1)


# Errors


def error_bound(W, scale):
    """The most by which each weight of dequantize(quantize(W)) may differ from W: half a step, and float64's rounding.

    The ends of the range lie on codes or at most half a step beyond the last one, since zero is rounded too.
    """
    steps = np.asarray(scale)[..., None]
    W = np.asarray(W, np.float64)
    return (steps / 2 + 2.0**-50 * (np.abs(W.reshape(*scale.shape, -1)) + steps)).reshape(W.shape)


def output_bound(W, scale, x):
    """The most by which y differs from the product with the weights before: Σ of error_bound · |x|."""
    return np.abs(np.asarray(x, np.float64)) @ error_bound(W, scale).T


def float32_bound(q, scale, zero, x, offset=0):
    """The most by which gemv_by_groups, in float32 and in any order, differs from float64 for the same x and scale.

    A sum of n terms errs by at most n · 2**-24 of the sum of their magnitudes (to first order), and an offset adds to
    those: with 1024 and 2-bit codes, where terms are of the size of 1024 · x, three digits are gone.
    """
    cols, groups = q.shape[1], scale.shape[1]
    n = cols // groups + groups + 5  # the terms of a group, the groups, and the operations of step 3
    magnitudes = np.asarray(q, np.float64).reshape(*scale.shape, -1) + zero[..., None] + 2 * offset
    return 1.01 * n * 2.0**-24 * gemv_lowbit(magnitudes.reshape(q.shape), scale, np.zeros_like(zero), np.abs(x))


def round_up(x, dtype):
    """The smallest number of a dtype that is not below x (0 or more), as float64; infinity past the largest."""
    x = np.asarray(x, np.float64)
    if dtype == "float64":
        return x
    with np.errstate(over="ignore"):
        near = x.astype(np.float16 if dtype == "float16" else np.float32)
        near = np.where(near < x, np.nextafter(near, near.dtype.type(np.inf)), near)
    if dtype == "bfloat16":  # the same once more: up to a multiple of the upper half's last bit
        near = (near.view(np.uint32) + np.uint32(0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    return near.astype(np.float64)


def _largest(bits):
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits must be 8, 4 or 2, got {bits!r}")
    return (1 << bits) - 1


def _shifts(bits):
    return np.arange(0, 32, bits, dtype=np.uint32)


def _divide(x, scale):
    """x / scale, and 0 where the scale is 0."""
    scale = np.broadcast_to(scale, np.shape(x))
    return np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)


def _expect_codes(q, bits):
    if q.dtype != np.uint8:
        raise ValueError(f"q must be of uint8, got {q.dtype}")
    if (q > _largest(bits)).any():
        raise ValueError(f"q must be from 0 to {_largest(bits)}, got {q.max()}")


def _expect_weights(W, group):
    """(W as float64, the columns of a group), or a ValueError that says what is wrong."""
    W = np.asarray(W, np.float64)
    if W.ndim != 2 or 0 in W.shape:
        raise ValueError(f"W must have shape (rows, cols), none of it 0, got {W.shape}")
    cols = W.shape[1]
    group = cols if group is None else group
    if isinstance(group, bool) or not isinstance(group, int | np.integer) or group < 1 or cols % group:
        raise ValueError(f"group must be None or a divisor of cols, {cols}, got {group!r}")
    if not np.isfinite(W).all():
        index = tuple(map(int, np.argwhere(~np.isfinite(W))[0]))
        raise ValueError(f"W must be finite, got {W[index]} at {index}")
    return W, int(group)
