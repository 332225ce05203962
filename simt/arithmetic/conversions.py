"""cvt: conversions between number formats (PTX ISA, "Data Movement and Conversion Instructions: cvt").

    integer -> integer     the lower bits; .sat clamps
    integer -> float       rounded once, rn rz rm rp
    float -> integer       rni rzi rmi rpi; clamped to the range; NaN becomes 0, or 100..0 where 64 bits are involved
    float -> float         rounded once; rni ... round to a whole number
    pairs                  cvt.rn.f16x2.f32 d, a, b: a becomes the upper half

Types narrower than their register: the caller gives the lower bits and extends the result (s8 and s16 come back
signed).
"""

import numpy as np

from simt.arithmetic.floats import rectify, saturate
from simt.arithmetic.integers import SIGNED, UNSIGNED, integer_type
from simt.arithmetic.rounding import (
    BFLOAT16,
    E4M3,
    E5M2,
    F32,
    F64,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    TO_WHOLE,
    U8,
    U16,
    U32,
    U64,
    canonical,
    decode,
    encode,
    encode_exact,
    exactly,
    flush,
    odd_whole,
    round_to,
)

I64 = np.int64
FORMATS = {"f32": FLOAT32, "f16": FLOAT16, "bf16": BFLOAT16, "tf32": TFLOAT32, "e4m3": E4M3, "e5m2": E5M2}
STORED = {"f16": U16, "bf16": U16, "f32": F32, "f64": F64, "tf32": U32}
OPTIONS = ("ftz", "sat", "relu", "satfinite")


def find(modifiers):
    """The parts after "cvt": ["rn", "f16", "f32"] -> (function, sources, destinations) or None."""
    if len(modifiers) < 2:
        return None
    *modifiers, to, of = modifiers
    options = {m for m in modifiers if m in OPTIONS}
    modes = [m for m in modifiers if m not in OPTIONS]
    if len(modes) > 1 or (modes and modes[0] not in ("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")):
        return None
    mode = modes[0] if modes else None
    if to.endswith("x2") or of.endswith("x2"):
        return _pair(to, of, mode, options)
    whole_to, whole_of = integer_type(to), integer_type(of)
    if whole_to and whole_of:
        return _whole_to_whole(whole_to, whole_of, options) if mode is None and options <= {"sat"} else None
    if whole_to:
        return _float_to_whole(whole_to, of, mode, options) if of in STORED and mode in ROUND_WHOLE else None
    if whole_of:
        return _whole_to_float(to, whole_of, mode, options) if to in STORED and mode in TO_WHOLE else None
    return _float_to_float(to, of, mode, options) if of in STORED and to in STORED else None


ROUND_WHOLE = {mode + "i": TO_WHOLE[mode] for mode in ("rn", "rz", "rm", "rp")}


def _type(width, signed):
    return (SIGNED if signed else UNSIGNED)[width]


def _result(width, signed):
    return _type(width, signed and width < 32)


def _whole_to_whole(to, of, options):
    target, source, stored = _type(*to), _type(*of), _result(*to)

    def saturated(x):
        low, high = np.iinfo(target).min, np.iinfo(target).max
        own = np.iinfo(source)
        return np.clip(x, source(max(low, own.min)), source(min(high, own.max))).astype(target).view(stored)

    def plain(x):
        return x.astype(target).view(stored)

    return (saturated if "sat" in options else plain), (source,), (stored,)


def _widen(kind, x):
    """A register of this kind -> float32 or float64."""
    return decode(kind, x) if kind in ("f16", "bf16") else x


def _float_to_whole(to, of, mode, options):
    width, signed = to
    target, stored, rounded = _type(*to), _result(*to), ROUND_WHOLE[mode]
    limits = np.iinfo(target)
    for_nan = 1 << (width - 1) if of == "f64" or width == 64 else 0
    for_nan = np.array(for_nan, U64).astype(UNSIGNED[width]).view(target)

    def convert(x):
        x = _widen(of, x)
        x = rounded(flush(x) if "ftz" in options and of == "f32" else x).astype(F64)
        nan = np.isnan(x)
        if width == 64:  # the largest is not a float64: clamp by hand
            result = np.where(x < float(limits.max), x, 0.0)
            result = np.where(result > float(limits.min), result, float(limits.min)).astype(target)
            result = np.where(x >= float(limits.max), target(limits.max), result)
        else:
            result = np.clip(x, float(limits.min), float(limits.max)).astype(I64 if width == 32 else np.int32)
            result = result.astype(target)
        if nan.any():
            result = np.where(nan, for_nan, result)
        return result.view(stored)

    return convert, (STORED[of],), (stored,)


def _whole_to_float(to, of, mode, options):
    source = _type(*of)
    if to == "tf32":
        return None
    if to == "f64":
        convert = _whole_to_double(mode) if mode != "rn" and of[0] == 64 else lambda x: x.astype(F64)
    elif to == "f32" and mode == "rn":
        convert = lambda x: x.astype(F32)  # noqa: E731
    else:
        widen = odd_whole if of[0] == 64 else (lambda x: x.astype(F64))

        def convert(x):
            return encode_exact(to, round_to(widen(x), FORMATS[to], mode))

    if "sat" in options:
        if to not in ("f32", "f64"):
            return None
        return (lambda x: saturate(convert(x))), (source,), (STORED[to],)
    return convert, (source,), (STORED[to],)


def _whole_to_double(mode):
    exact = exactly(lambda a, b: a + b, mode)

    def convert(x):  # float64 holds the upper and the lower 32 bits exactly
        upper, lower = (x >> x.dtype.type(32)).astype(F64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(F64)
        return exact(upper + lower, upper, lower)

    return convert


def _float_to_float(to, of, mode, options):
    if "tf32" in (to, of):
        fits = (to, of) == ("tf32", "f32") and mode in ("rna", "rn", "rz") and options <= {"relu", "satfinite"}
        return (_to_tf32(mode, options), (F32,), (U32,)) if fits else None
    if mode in ROUND_WHOLE:
        operation = _to_whole_float(to, ROUND_WHOLE[mode]) if to == of else None
    elif to == of or _wider(to, of):
        operation = _widening(to, of, "ftz" in options) if mode is None else None
    else:
        operation = _narrow(to, of, mode) if mode in ("rn", "rz", "rm", "rp") else None
    if operation is None:
        return None

    def convert(x):
        result = operation(flush(x) if "ftz" in options and of == "f32" else x)
        if "ftz" in options and to == "f32":
            result = canonical(flush(result)) if of != "f64" else flush(result)
        for option, change in ("sat", saturate), ("relu", rectify):
            if option in options:
                result = encode(to, change(decode(to, result))) if to in ("f16", "bf16") else change(result)
        return _finite(to, result) if "satfinite" in options else result

    return (convert if options else operation), (STORED[of],), (STORED[to],)


def _to_whole_float(kind, rounded):
    if kind in ("f16", "bf16"):
        return lambda x: encode(kind, rounded(decode(kind, x)))
    return (lambda x: canonical(rounded(x))) if kind == "f32" else rounded


def _widening(to, of, ftz):
    """To the same or a wider format. What happens to a NaN is the hardware's: some forms keep its payload."""
    if to == of:
        return (lambda x: encode(to, decode(to, x))) if to in ("f16", "bf16") else lambda x: x.copy()
    if of == "f16" and to == "f64":
        return lambda x: _with_nan(decode("f16", x).astype(F64), _half_nan(x))
    if of == "f32" and ftz:
        return lambda x: canonical(x).astype(F64)
    return lambda x: _widen(of, x).astype(STORED[to], copy=False)


def _half_nan(bits):
    """float16 NaN -> float64 NaN with the same sign and payload, quiet."""
    wide = bits.astype(U64)
    sign, payload = (wide & U64(0x8000)) << U64(48), (wide & U64(0x3FF)) << U64(42)
    return (sign | payload | U64(0x7FF8 << 48)).view(F64)


def _with_nan(value, nan):
    return np.where(np.isnan(value), nan, value)


def _wider(to, of):
    return to == "f64" or (to == "f32" and of != "f64")


def _narrow(to, of, mode):
    """-> function: a register of kind `of` -> bits of f16 or bf16, or a float32; rounded once.

    Coming from f64, a NaN keeps its sign and the upper bits of its payload.
    """
    if of == "f64":
        return lambda x: _keep_nan(to, x, encode_exact(to, round_to(x, FORMATS[to], mode)))
    if mode == "rn":
        return lambda x: encode(to, _widen(of, x))
    return lambda x: encode_exact(to, round_to(_widen(of, x).astype(F64), FORMATS[to], mode))


def _keep_nan(to, x, result):
    nan = np.isnan(x)
    if nan.any():
        word = x.astype(F32).view(U32)[nan]
        if to == "f16":
            word = (word >> U32(16) & U32(0x8000)) | U32(0x7C00) | (word >> U32(13) & U32(0x3FF))
        bits = result.view(U32 if to == "f32" else U16)
        bits[nan] = word >> U32(16) if to == "bf16" else word
    return result


def _finite(to, bits):
    """.satfinite on bits of f16 or bf16: infinity becomes the largest number."""
    infinite = U16(0x7C00 if to == "f16" else 0x7F80)
    return np.where(bits & U16(0x7FFF) == infinite, bits - U16(1), bits)


def _to_tf32(mode, options):
    def convert(x):
        wide = x.astype(F64)
        wide = rectify(wide) if "relu" in options else wide
        result = round_to(wide, TFLOAT32, mode)
        if "satfinite" in options:
            result = np.clip(result, -TFLOAT32.largest, TFLOAT32.largest)
        result, nan = result.astype(F32).view(U32), np.isnan(x)
        if nan.any():  # rna cuts the payload off, and takes one from it under satfinite: so the hardware does
            cut = (x.view(U32) & U32(0xFFFFE000)) - U32(0x2000 if "satfinite" in options else 0)
            result = np.where(nan, cut if mode == "rna" else U32(0x7FFFE000), result)
        return result

    return convert


# ---- pairs ----

EIGHT = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _pair(to, of, mode, options):
    if to in ("f16x2", "bf16x2") and of == "f32" and mode in ("rn", "rz"):
        one = _float_to_float(to[:-2], "f32", mode, options)
        return (lambda high, low: _join(one[0](high), one[0](low))), (F32, F32), (U32,)
    if to in EIGHT and of in ("f32", "f16x2") and mode == "rn" and "satfinite" in options:
        encode_one = _to_eight(EIGHT[to], options)
        if of == "f32":
            return (lambda high, low: _join(encode_one(high), encode_one(low))), (F32, F32), (U16,)

        def narrow(x):
            low, high = (decode("f16", (x >> U32(s)).astype(U16)) for s in (0, 16))
            return _join(encode_one(high), encode_one(low))

        return narrow, (U32,), (U16,)
    if to == "f16x2" and of in EIGHT and mode == "rn" and options <= {"relu"}:
        kind = EIGHT[of]

        def widen(x):
            low, high = (decode(kind, (x >> U16(s)).astype(U8)) for s in (0, 8))
            if "relu" in options:
                low, high = rectify(low), rectify(high)
            return _join(encode("f16", high), encode("f16", low))

        return widen, (U16,), (U32,)
    return None


def _join(high, low):
    wide = {U8: U16, U16: U32}[low.dtype.type]
    return (high.astype(wide) << wide(low.dtype.itemsize * 8)) | low


def _to_eight(kind, options):
    target = FORMATS[kind]

    def encode_one(x):
        x = rectify(x) if "relu" in options else x
        return encode_exact(kind, np.clip(round_to(x.astype(F64), target), -target.largest, target.largest))

    return encode_one
