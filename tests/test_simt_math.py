"""CUDA's mathematics on the SIMT machine, against NumPy's and Python's float64.

One function or more of each family of the compiler's sequences, which all of CUDA's mathematics is made of.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

import simt

X = np.concatenate([np.linspace(0.02, 0.98, 20), np.linspace(-0.95, -0.03, 12)])  # here every function has a value
Y = np.concatenate([np.geomspace(1.5, 2e4, 20), np.linspace(1, 12, 12)])


def bessel(n, x):
    """The mean of cos(n t - x sin t) over a turn: of so smooth a function some hundred points give all digits."""
    t = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    return np.cos(n * t - x[:, None] * np.sin(t)).mean(axis=1)


def expressions(x, y):
    """{an expression of x, y and the type T: what it must be}"""
    gamma, error = np.vectorize(math.lgamma), np.vectorize(math.erfc)
    mantissa, exponent = np.frexp(y)
    return {
        "tan(x)": np.tan(x),
        "tan(y)": np.tan(y),
        "asin(x)": np.arcsin(x),
        "atan2(x, y)": np.arctan2(x, y),
        "exp10(x)": 10**x,
        "pow(y, T(8) * x)": y ** (8 * x),
        "log(y)": np.log(y),
        "log2(y)": np.log2(y),
        "log10(y)": np.log10(y),
        "log1p(x)": np.log1p(x),
        "tanh(x)": np.tanh(x),
        "acosh(y)": np.arccosh(y),
        "rsqrt(y)": 1 / np.sqrt(y),
        "cbrt(x)": np.cbrt(x),
        "hypot(x, y)": np.hypot(x, y),
        "erfc(x)": error(x),
        "erf(erfinv(x))": x,
        "lgamma(x)": gamma(x),
        "j1(x)": bessel(1, x),
        "fmod(y, x)": np.fmod(y, x),
        "nextafter(x, y)": None,
        "T(llrint(y))": np.rint(y),
        "[&] { int e; T m = frexp(y, &e); return m + e; }()": mantissa + exponent,
        "[&] { T s, c; sincospi(x, &s, &c); return s + 2 * c; }()": np.sin(np.pi * x) + 2 * np.cos(np.pi * x),
    }


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), [("float", np.float32, 4e-7), ("double", np.float64, 3e-14)])
def test_functions_of_numbers(kind, dtype, tolerance):
    x, y = X.astype(dtype), Y.astype(dtype)
    wanted = expressions(x.astype(np.float64), y.astype(np.float64))
    wanted["nextafter(x, y)"] = np.nextafter(x, y)
    lines = "\n".join(f"    out[{n} * 32 + i] = {text};" for n, text in enumerate(wanted))
    module = simt.compile(f"""\
typedef {kind} T;
extern "C" __global__ void all(const T* xs, const T* ys, T* out) {{
    int i = threadIdx.x; T x = xs[i], y = ys[i];
{lines}
}}""")
    out = np.zeros((len(wanted), 32), dtype)
    module["all"](1, 32, x, y, out)
    error = {text: np.abs(o - w) / np.maximum(np.abs(w), 1e-2) for (text, w), o in zip(wanted.items(), out)}
    assert not {text: e.max() for text, e in error.items() if not e.max() < tolerance}


HALVES = {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: 10**x, "log": np.log, "log2": np.log2, "log10": np.log10,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x, "sin": np.sin, "cos": np.cos,
    "tanh": np.tanh, "ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "rint": np.rint,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "pair", "unit"), [("__half", "__half2", 2**-10), ("__nv_bfloat16", "__nv_bfloat162", 2**-7)]
)
def test_functions_of_halves(kind, pair, unit):
    """hexp(x), and h2exp of two at once: to a unit in the last place."""

    def number(bits):
        return (bits.view(np.float16) if kind == "__half" else (bits.astype(np.uint32) << 16).view(np.float32)).astype(
            float
        )

    x = np.linspace(0.3, 4, 64).astype(np.float32)
    bits = x.astype(np.float16).view(np.uint16) if kind == "__half" else (x.view(np.uint32) >> 16).astype(np.uint16)
    lines = [f"    y[{n * 64} + i] = h{f}(x[i]);" for n, f in enumerate(HALVES)]
    lines += [f"    if (i < 32) z[{n * 32} + i] = h2{f}((({pair}*)x)[i]);" for n, f in enumerate(HALVES)]
    module = simt.compile(
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
        f'extern "C" __global__ void all({kind}* x, {kind}* y, {pair}* z) {{\n    int i = threadIdx.x;\n'
        + "\n".join(lines)
        + "\n}"
    )
    y, z = np.zeros((2, len(HALVES), 64), np.uint16)
    module["all"](1, 64, bits, y, z)
    for f, single, double in zip(HALVES, number(y), number(z)):
        wanted = HALVES[f](number(bits))
        assert np.allclose(single, wanted, rtol=unit, atol=unit / 4), f
        assert np.allclose(double, wanted, rtol=unit, atol=unit / 4), f


def test_functions_of_integers():
    """The ones that are instructions of their own, on bytes and halves of a word too."""
    a, b, c = np.random.default_rng(0).integers(0, 1 << 32, (3, 32), dtype=np.uint32)
    wide, signed = np.uint64, a.view(np.int32).astype(np.int64)
    bytes_, others = (v.view(np.uint8).reshape(32, 4).astype(int) for v in (a, b))
    far = abs(bytes_ - others).astype(np.uint8)
    halves = a.view(np.int16).reshape(32, 2), b.view(np.int16).reshape(32, 2)
    wanted = {
        "__clz(a)": [32 - int(v).bit_length() for v in a],
        "__popc(a)": np.bitwise_count(a),
        "__brev(a)": [int(f"{v:032b}"[::-1], 2) for v in a],
        "__ffs(a)": [(int(v) & -int(v)).bit_length() for v in a],
        "__umulhi(a, b)": a.astype(wide) * b >> wide(32),
        "__umul64hi((unsigned long long)a << 32, b)": a.astype(wide) * b >> wide(32),
        "__byte_perm(a, b, 0x5410)": (a & 0xFFFF) | (b << 16),
        "__funnelshift_l(a, b, 8)": (b << 8) | (a >> 24),
        "__usad(a, b, c)": (np.maximum(a, b) - np.minimum(a, b)) + c,
        "__vabsdiffu4(a, b)": far.view(np.uint32)[:, 0],
        "__vsadu4(a, b)": far.sum(axis=1),
        "__vimax_s32_relu(a, b)": np.maximum(np.maximum(signed, b.view(np.int32)), 0),
        "__vimin_s16x2_relu(a, b)": np.maximum(np.minimum(*halves), 0).view(np.uint32)[:, 0],
    }
    lines = "\n".join(f"    out[{n} * 32 + i] = {text};" for n, text in enumerate(wanted))
    module = simt.compile(f"""\
extern "C" __global__ void all(const unsigned* as, const unsigned* bs, const unsigned* cs, unsigned* out) {{
    int i = threadIdx.x; unsigned a = as[i], b = bs[i], c = cs[i];
{lines}
}}""")
    out = np.zeros((len(wanted), 32), np.uint32)
    module["all"](1, 32, a, b, c, out)
    wrong = [text for (text, w), o in zip(wanted.items(), out) if o.tolist() != np.asarray(w).tolist()]
    assert not wrong


def test_a_root_rounded_in_every_mode():
    x = np.float64([2, 3, 4, 5e-324, 1e300, 0.1, 9, 0])
    source = """
extern "C" __global__ void roots(const double* x, double* y) {
    int i = threadIdx.x;
    y[i] = __dsqrt_rz(x[i]); y[8 + i] = __dsqrt_rd(x[i]); y[16 + i] = __dsqrt_ru(x[i]);
}"""
    down, floor, up = out = np.zeros((3, 8))
    simt.compile(source)["roots"](1, 8, x, out)
    for v, low, same, high in zip(x, down, floor, up):
        assert low == same and Fraction(low) ** 2 <= Fraction(v) <= Fraction(high) ** 2
        assert high == low if Fraction(low) ** 2 == Fraction(v) else high == math.nextafter(low, math.inf)
