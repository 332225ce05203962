"""Floating-point instructions of PTX: f32, f64, f16, bf16 and the packed pairs f16x2 and bf16x2.

PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions". Values of 16 bits are decoded to
float32, which holds them exactly; results are rounded once.
"""

from dataclasses import replace

import numpy as np

from simt.arithmetic import comparisons
from simt.arithmetic.comparisons import REGISTER
from simt.arithmetic.rounding import (
    BFLOAT16,
    F32,
    F64,
    FLOAT16,
    FLOAT32,
    U16,
    U32,
    U64,
    canonical,
    decode,
    encode,
    encode_exact,
    exactly,
    flush,
    flush_half,
    odd_sum,
    round_to,
)
from simt.ptx.types import broadcast

MODES = ("rn", "rz", "rm", "rp")
FORMATS = {"f32": FLOAT32, "f16": FLOAT16, "bf16": BFLOAT16}

TURN = 2 * np.pi

# Computed here in float64 and rounded once. The hardware's own results may differ in the last bits.
APPROXIMATE = {
    "div.approx": lambda a, b: a / b,
    "div.full": lambda a, b: a / b,
    "rcp.approx": lambda a: 1 / a,
    "sqrt.approx": np.sqrt,
    "rsqrt.approx": lambda a: 1 / np.sqrt(a),
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
    "tanh.approx": np.tanh,
    "sin.approx.2pi": lambda a: np.sin(TURN * np.remainder(a, 1)),
    "cos.approx.2pi": lambda a: np.cos(TURN * np.remainder(a, 1)),
}


def find(name, modifiers, kind):
    """-> (function, sources, destinations) of a floating-point instruction, or None.

    "fma.rn.ftz.f32" is find("fma", ["rn", "ftz"], "f32").
    """
    if kind not in REGISTER:
        return None
    modifiers = list(modifiers)
    options = {m for m in ("ftz", "sat", "relu", "NaN", "abs", "xorsign", "noftz") if m in modifiers}
    modes = [m for m in modifiers if m in MODES]
    variants = [m for m in modifiers if m in ("approx", "full", "2pi")]
    if len(options) + len(modes) + len(variants) != len(modifiers) or options & {"abs", "xorsign"}:
        return None
    options.discard("noftz")
    if variants:
        return _approximate(".".join([name, *variants]), options, kind)
    mode = modes[0] if modes else "rn"
    pair = kind.endswith("x2")
    function = _one(name, mode, options, kind.removesuffix("x2"))
    if function is None:
        return None
    function, count = function
    return (paired(function) if pair else function), (REGISTER[kind],) * count, (REGISTER[kind],)


def paired(function):
    """A function on uint16 bits -> the same on both halves of uint32 registers."""

    def apply(*words):
        shape = np.broadcast_shapes(*(w.shape for w in words))
        halves = [np.ascontiguousarray(broadcast(w, shape)).view(U16) for w in words]
        return function(*halves).view(U32)

    return apply


def _one(name, mode, options, kind):
    """-> (function, number of arguments) or None."""
    ftz = "ftz" in options
    if name in ("neg", "abs"):
        return (comparisons.sign_change(name, kind, ftz), 1) if options <= {"ftz"} else None
    if name in ("min", "max"):
        return (comparisons.extreme(name, kind, ftz, "NaN" in options), 2) if options <= {"ftz", "NaN"} else None
    count = ARGUMENTS.get(name)
    if count is None or (name == "mad" and kind not in ("f32", "f64")):
        return None
    name = "fma" if name == "mad" else name
    if kind == "f64":
        function = _double(name, mode) if not options else None
    elif kind == "f32":
        function = _finish_single(name, mode, options)
    else:
        function = _finish_half(name, kind, options) if mode == "rn" and name in ("add", "sub", "mul", "fma") else None
    return (function, count) if function else None


ARGUMENTS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "mad": 3, "sqrt": 1, "rcp": 1}


# ---- what surrounds the arithmetic ----


def saturate(value):
    """.sat: into [0, 1]; NaN and -0 become +0."""
    value = np.minimum(np.fmax(value, value.dtype.type(0)), value.dtype.type(1))
    return np.abs(value)


def rectify(value):
    """.relu: max(value, +0), NaN stays NaN."""
    return np.maximum(value, value.dtype.type(0)) + value.dtype.type(0)


def _finish_single(name, mode, options):
    """.ftz and .sat. A result that rounds up to the smallest normal number may still have been tiny: see `_tiny`."""
    function = _single(name, mode)
    if not options:
        return function

    def apply(*x):
        if "ftz" in options:
            x = [flush(v) for v in x]
        result = function(*x)
        if "ftz" in options:
            result = canonical(flush(result))
            edge = np.abs(result) == F32(2.0**-126)
            if edge.any():
                tiny = _tiny(name, mode, FLOAT32, [v.astype(F64) for v in _pick(edge, x)])
                result[edge] = np.where(tiny, result[edge] * F32(0), result[edge])
        return saturate(result) if "sat" in options else result

    return apply


def _finish_half(name, kind, options):
    function = _half(name, kind)
    if not options:
        return function

    def apply(*x):
        if "ftz" in options:
            x = [flush_half(v) for v in x]
        result = function(*x)
        if "ftz" in options:
            result = flush_half(result)
            edge = result & U16(0x7FFF) == U16(0x0400)
            if edge.any():
                tiny = _tiny(name, "rn", FLOAT16, [decode(kind, v).astype(F64) for v in _pick(edge, x)])
                result[edge] = np.where(tiny, result[edge] & U16(0x8000), result[edge])
        if "sat" in options:
            result = encode(kind, saturate(decode(kind, result)))
        return encode(kind, rectify(decode(kind, result))) if "relu" in options else result

    return apply


def _tiny(name, mode, target, x):
    """Is the result below the normal range when it is rounded as if exponents had no end? Then .ftz flushes it."""
    unbounded = replace(target, lowest=-1000)
    return np.abs(round_to(_exact_single(name)(*x), unbounded, mode)) < 2.0**target.lowest


def _pick(where, arrays):
    return [broadcast(x, where.shape)[where] for x in arrays]


# ---- f32 ----


def _fma_single(a, b, c):
    """a * b + c, rounded once.

    The product is exact in float64. The sum is rounded there and again to float32: wrong only where float64 landed in
    the middle between two float32, or below the normal range, where the middles lie elsewhere. Those few are done
    again.
    """
    wide = a.astype(F64) * b.astype(F64)
    wide = np.add(wide, c.astype(F64), out=wide) if wide.size >= c.size else wide + c
    result = wide.astype(F32)
    middle = (wide.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    size = result.view(U32) << U32(1)  # without the sign
    size -= U32(1)  # zero becomes the largest
    if size.min() < U32(0x01000000):
        middle |= size < U32(0x01000000)
    if np.count_nonzero(middle):
        a, b, c = (x.astype(F64) for x in _pick(middle, (a, b, c)))
        result[middle] = round_to(odd_sum(a * b, c), FLOAT32)
    return canonical(result)


def _exact_single(name):
    """-> function of float64 arguments that gives the result, exact or rounded so that rounding again is right."""
    # A quotient or root of float32 that is not itself a float32, or the middle of two, differs from those by more
    # than float64 can miss.
    return {
        "add": odd_sum,
        "sub": lambda a, b: odd_sum(a, -b),
        "mul": np.multiply,
        "fma": lambda a, b, c: odd_sum(a * b, c),
        "div": np.divide,
        "rcp": lambda a: 1 / a,
        "sqrt": np.sqrt,
    }[name]


def _single(name, mode):
    if mode == "rn":
        if name == "fma":
            return _fma_single
        plain = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}
        operation = plain.get(name) or (lambda a: F32(1) / a)
        return lambda *x: canonical(operation(*x))
    operation = _exact_single(name)

    def apply(*x):
        wide = [v.astype(F64) for v in x]
        result = operation(*wide)
        if mode == "rm" and name in ("add", "sub", "fma"):
            result = _zero_down(name, result, *wide)
        return canonical(round_to(result, FLOAT32, mode).astype(F32))

    return apply


def _zero_down(name, result, *x):
    """Towards minus infinity, a sum that cancels is -0."""
    first, second = (x[0] * x[1], x[2]) if name == "fma" else x
    negative = np.signbit(first) | (np.signbit(second) ^ (name == "sub"))
    return np.where(result == 0, np.where(negative, -0.0, 0.0), result)


# ---- f64 ----


def _double(name, mode):
    plain = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "sqrt": np.sqrt,
        "rcp": lambda a: 1 / a,
        "fma": lambda a, b, c: a * b + c,
    }[name]
    if mode == "rn":
        return _fma_double if name == "fma" else plain
    if name == "sqrt":
        return lambda a: _root_double(a, mode)
    exact = exactly(_FRACTIONS[name], mode)

    def apply(*x):
        start = plain(*x)
        if mode == "rm" and name in ("add", "sub", "fma"):
            start = _zero_down(name, start, *x)
        return exact(start, *x)

    return apply


_FRACTIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b if b else 0,
    "rcp": lambda a: 1 / a if a else 0,
    "fma": lambda a, b, c: a * b + c,
}


def _root_double(a, mode):
    """The root that is nearest, one step on where it lies on the wrong side of the exact one."""
    root = np.sqrt(a)
    error = _fma_double(-root, root, a)  # its sign is that of a - root * root, exactly
    wrong = (error > 0) if mode == "rp" else (error < 0)
    return np.where(wrong, np.nextafter(root, np.inf if mode == "rp" else 0.0), root)


def _fma_double(a, b, c):
    """a * b + c, rounded once: Boldo and Melquiond's algorithm; near overflow and underflow, by fractions."""
    product = a * b
    high_a, low_a = _split(a)
    high_b, low_b = _split(b)
    error = ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b
    mid, low = _two_sum(c, error)
    high, mid = _two_sum(product, mid)
    result = high + odd_sum(mid, low)
    safe = (np.abs(product) > 2.0**-900) & (np.abs(product) < 2.0**990) & (np.abs(c) < 2.0**990)
    safe &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
    if not safe.all():
        plain = product + c  # right where a factor is zero or something is not finite
        rare = ~safe & (a != 0) & (b != 0) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        result = np.where(safe, result, plain)
        if rare.any():
            result[rare] = exactly(_FRACTIONS["fma"])(plain[rare], *_pick(rare, (a, b, c)))
    return result


def _split(x):
    """The upper 26 bits and the rest (Veltkamp)."""
    t = x * 134217729.0
    high = t - (t - x)
    return high, x - high


def _two_sum(x, y):
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


# ---- f16, bf16 ----


def _half(name, kind):
    """Bits -> bits. float32 has more than twice the bits of float16, so rounding its sums again is harmless.

    A product of two float16 is exact in float32, and float64 holds enough of a float16 fma that rounding it again is
    right: where it is not exact, one operand is too small to matter.
    """
    if kind == "bf16" and name in ("mul", "fma"):
        return (lambda a, b: _fma_bfloat(a, b, np.full((1,) * a.ndim, 0x8000, U16))) if name == "mul" else _fma_bfloat
    if name == "fma":
        return lambda a, b, c: encode(kind, np.add(decode(kind, a) * decode(kind, b), decode(kind, c), dtype=F64))
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
    return lambda a, b: encode(kind, operation(decode(kind, a), decode(kind, b)))


def _fma_bfloat(a, b, c):
    """The product of two bfloat16 has 16 bits. In float32 it is exact, unless it is tiny or overflows.

    The sum is rounded to float32 and again to bfloat16: to be done again where float32 landed in the middle between
    two bfloat16 (whatever made it inexact leads there), and where it is not finite.
    """
    product, addend = decode("bf16", a) * decode("bf16", b), decode("bf16", c)
    total = product + addend
    word = total.view(U32)
    doubtful = word << U32(16) == U32(0x80000000)
    if not np.isfinite(total.min() + total.max()):
        doubtful |= ~np.isfinite(total)
    if not total.all():  # a product too small for float32 still has a sign
        doubtful |= (total == 0) & ((a & U16(0x7FFF)) != 0) & ((b & U16(0x7FFF)) != 0)
    result = encode("bf16", total)
    if doubtful.any():
        a, b, c = (decode("bf16", x).astype(F64) for x in _pick(doubtful, (a, b, c)))
        result[doubtful] = encode_exact("bf16", round_to(odd_sum(a * b, c), BFLOAT16))
    return result


# ---- approximate functions ----


def _approximate(name, options, kind):
    function = APPROXIMATE.get(name)
    if function is None:
        return None
    pair, kind = kind.endswith("x2"), kind.removesuffix("x2")
    count = 2 if name.startswith("div") else 1

    def single(*x):
        if "ftz" in options and kind == "f32":
            x = [flush(v) for v in x]
        result = canonical(function(*(v.astype(F64) for v in x)).astype(F32))
        if "ftz" in options and kind == "f32":
            result = canonical(flush(result))
        return saturate(result) if "sat" in options else result

    def half(*x):
        wide = function(*(decode(kind, v).astype(F64) for v in x))
        return encode(kind, wide)

    if kind == "f64":
        return (_gross(function, "ftz" in options), (F64,), (F64,)) if name in GROSS else None
    if kind == "f32":
        return single, (F32,) * count, (F32,)
    return (paired(half), (U32,) * count, (U32,)) if pair else (half, (U16,) * count, (U16,))


GROSS = ("rcp.approx", "rsqrt.approx")  # the only ones for f64


def _gross(function, ftz):
    """rcp and rsqrt of f64, where the compiler's sequences start: with .ftz the lower 32 bits count for nothing."""

    def apply(a):
        if not ftz:
            return function(a)
        result = function(_upper(a)) + 0.0
        return _upper((result.view(U64) + np.where(np.isfinite(result), U64(0x80000000), U64(0))).view(F64))

    return apply


def _upper(x):
    """The upper 32 bits, 20 of the mantissa; subnormal -> zero of the same sign."""
    cut = (x.view(U64) & U64(0xFFFFFFFF00000000)).view(F64)
    nan = np.isnan(x)
    return np.where(nan, np.nan, np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), cut))
