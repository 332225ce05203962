"""Floating-point instructions that do not round: sign, minimum and maximum, comparisons, testp.

PTX ISA, "Floating Point Instructions" (neg, abs, min, max, testp), "Comparison and Selection Instructions".
"""

import numpy as np

from simt.arithmetic.rounding import F32, F64, NAN16, U16, U32, U64, canonical, decode, flush, flush_half

REGISTER = {"f32": F32, "f64": F64, "f16": U16, "bf16": U16, "f16x2": U32, "bf16x2": U32}
BITS = {F32: U32, F64: U64, U16: U16, U32: U32}
INFINITY = {"f16": U16(0x7C00), "bf16": U16(0x7F80)}


# ---- sign, minimum, maximum ----


def sign_change(name, kind, ftz):
    """neg and abs change the sign bit; a NaN becomes the hardware's, only f64 keeps its payload and sign."""
    bits = BITS[REGISTER[kind]]
    sign = bits(1 << (bits().itemsize * 8 - 1))

    def change(x):
        word = x.view(bits)
        return (word ^ sign if name == "neg" else word & ~sign).view(x.dtype)

    def single(x):
        return canonical(change(flush(x) if ftz else x))

    def double(x):
        result, nan = change(x), np.isnan(x)
        if nan.any():
            result.view(U64)[nan] = x.view(U64)[nan] | U64(1 << 51)  # quiet
        return result

    def half(x):
        result = change(flush_half(x) if ftz else x)
        nan = result & U16(0x7FFF) > INFINITY[kind]
        return np.where(nan, NAN16, result) if nan.any() else result

    return {"f32": single, "f64": double}.get(kind, half)


def extreme(name, kind, ftz, propagate):
    """min and max: of a number and a NaN the number; .NaN (`propagate`): the NaN."""
    function = extreme_half(name, kind, propagate) if kind in INFINITY else extreme_wide(name, propagate)
    if not ftz:
        return function
    prepare = flush if kind == "f32" else flush_half
    return lambda a, b: function(prepare(a), prepare(b))


def extreme_wide(name, propagate):
    """NumPy's fmin and fmax ignore a NaN, minimum and maximum keep it; -0 < +0 is mended here."""
    smaller = name == "min"
    operation = (np.minimum if smaller else np.maximum) if propagate else (np.fmin if smaller else np.fmax)
    join = np.bitwise_or if smaller else np.bitwise_and  # of the sign of two zeros

    def apply(a, b):
        result = operation(a, b)
        if not result.all():
            bits = BITS[result.dtype.type]
            zeros = (result == 0) & (a == b)
            np.copyto(result, join(a.view(bits), b.view(bits)).view(result.dtype), where=zeros)
        return canonical(result) if result.dtype == F32 else result

    return apply


def extreme_half(name, kind, propagate):
    """On the bits: as whole numbers, floats are in order once those below zero are flipped."""
    infinity = INFINITY[kind]
    operation = np.minimum if name == "min" else np.maximum

    def key(x):
        x = x.view(np.int16)
        return x ^ ((x >> np.int16(15)) & np.int16(0x7FFF))

    def apply(a, b):
        result = operation(key(a), key(b))
        result = (result ^ ((result >> np.int16(15)) & np.int16(0x7FFF))).view(U16)
        nan_a, nan_b = ((x & U16(0x7FFF)) > infinity for x in (a, b))
        if nan_a.any() or nan_b.any():
            keep = np.where(nan_a, NAN16 if propagate else b, a)
            keep = np.where(nan_b if propagate else nan_a & nan_b, NAN16, keep)
            result = np.where(nan_a | nan_b, keep, result)
        return result

    return apply


# ---- comparisons ----

ORDERED = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
    "neu": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}


def comparison(name, kind, ftz):
    """-> function of two registers of this kind -> bool (for a pair: of shape (..., lanes, 2), low half first)."""
    compare = ORDERED.get(name)
    if compare is None or kind not in REGISTER:
        return None
    if kind in ("f32", "f64"):
        return (lambda a, b: compare(flush(a), flush(b))) if ftz and kind == "f32" else compare
    pair, kind = kind.endswith("x2"), kind.removesuffix("x2")

    def half(a, b):
        if ftz:
            a, b = flush_half(a), flush_half(b)
        return compare(decode(kind, a), decode(kind, b))

    if not pair:
        return half
    return lambda a, b: half(*(np.stack([x & U32(0xFFFF), x >> U32(16)], -1).astype(U16) for x in (a, b)))


def classify(name, kind):
    """testp: -> function or None."""
    tiny = {"f32": 2.0**-126, "f64": 2.0**-1022}.get(kind)
    if tiny is None:
        return None
    return {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= tiny) | (x == 0)),  # zero counts as normal
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }.get(name)
