"""Tensor-core instructions on registers: mma.sync, ldmatrix, stmatrix, movmatrix; the sums of wgmma.

A matrix of 8 rows of four 32-bit words lies across a warp: lane 4 g + q holds word q of row g. A word is two f16 or
bf16, four 8-bit numbers or one tf32. All operands are made of such pieces (PTX ISA, "Matrix Fragments for
mma.m16n8k16" and its neighbours):

    A  16 x K, by rows      registers: rows 0-7 words 0-3, rows 8-15 words 0-3, rows 0-7 words 4-7, rows 8-15 words 4-7
    B  K x 8, by columns    registers: words 0-3, words 4-7 of each column
    C, D  16 x 8            lane 4 g + q holds columns 2q and 2q + 1 of row g, then those of row g + 8

Floats are added as an H200 adds them, bit for bit (the ISA leaves it open, other generations differ): all products of
one instruction and c are cut off at 25 bits below the largest exponent, added exactly, and cut off to float32. Hence a
tensor core rounds towards zero, not to nearest. 8-bit floats go in two steps, see `_eight_bits`.

Every register is an array (..., 32) of uint32.
"""

import functools

import numpy as np

from simt.arithmetic.rounding import F32, F64, U8, U16, U32, canonical, decode, encode
from simt.ptx.types import broadcast

KINDS = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}  # bytes of an element


@functools.cache
def mma(opcode):
    """ "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" -> function, or None if it is not covered.

    function(a, b, c) takes the three operands' registers, a list of arrays each, and returns the list for d.
    """
    parts = opcode.split(".")
    if parts[:3] != ["mma", "sync", "aligned"] or parts[4:6] != ["row", "col"] or len(parts) < 10:
        return None
    saturate = parts[6] == "satfinite"
    shape, (d, a, b, c) = parts[3], parts[-4:]
    if shape == "m8n8k16" and {a, b} <= {"s8", "u8"}:
        return _upper_half(".".join((*parts[:3], "m16n8k16", *parts[4:])))
    if len(parts) != 10 + saturate or d != c or not {a, b} <= KINDS.keys() or not shape.startswith("m16n8k"):
        return None
    words = int(shape[6:]) * KINDS[a] // 4  # 32-bit words in a row of A
    groups = [{"f16"}, {"bf16"}, {"tf32"}, {"s8", "u8"}, {"e4m3", "e5m2"}]
    whole = {a, b} <= {"s8", "u8"}
    fits = words in ((8,) if "e4m3" in (a, b) or "e5m2" in (a, b) else (4, 8)) and any({a, b} <= g for g in groups)
    if not fits or d not in (("s32",) if whole else ("f32", "f16") if a == "f16" else ("f32",)) or saturate > whole:
        return None
    multiply = product(a, d, saturate)
    if whole:
        spread, collect = _spread_whole, _collect_whole
    else:
        spread, collect = (_spread_half, _collect_half) if d == "f16" else (_spread_single, _collect_single)

    def apply(registers_a, registers_b, registers_c):
        left, right = _numbers(a, _gather(registers_a, 2)), _numbers(b, _gather(registers_b, 1))
        return collect(multiply(left, right, spread(np.broadcast_arrays(*registers_c))))

    return apply


def _upper_half(opcode):
    """Of a product of 16 rows, rows 0 to 7: that of 8 rows, as Turing has it for bytes."""
    whole = mma(opcode)

    def apply(registers_a, registers_b, registers_c):
        nothing = np.zeros_like(registers_c[0])
        return whole([*registers_a, np.zeros_like(registers_a[0])], registers_b, [*registers_c, nothing, nothing])[:2]

    return whole and apply


# ---- the sums: left (..., 16, K), right (..., 8, K), c (..., 16, 8), all float64 ----

LOWEST = {"f16": -14, "bf16": -126, "tf32": -126}  # exponent of the smallest normal number, and of all below it
NONE = -100_000


def product(kind, sums, saturate=False):
    """function(left, right, c) for operands of `kind` and sums of "f32", "f16" or "s32"."""
    if sums == "s32":
        return _whole_product(saturate)
    if KINDS[kind] == 1:
        return _eight_bits
    return functools.partial(_product, lowest=LOWEST[kind], half=sums == "f16")


def _exponent(x, lowest):
    return np.where(x == 0, NONE, np.maximum(np.frexp(x)[1] - 1, lowest))


def _product(left, right, c, lowest, half=False):
    """left @ right.T + c as one instruction: float32 values, or with `half` what is to be rounded to float16.

    K comes first and the warps last, so that NumPy works on long rows. c may have more warps than left and right.
    """
    warps = np.broadcast_shapes(left.shape[:-2], right.shape[:-2], c.shape[:-2])
    left, right, c = (broadcast(x, (*warps, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (left, right, c))
    left, right = left.transpose(2, 1, 0).copy()[:, :, None], right.transpose(2, 1, 0).copy()[:, None]
    c = c.transpose(1, 2, 0).copy()
    exponents = _exponent(left, lowest) + _exponent(right, lowest)
    largest = np.maximum(exponents.max(axis=0), _exponent(c, LOWEST["f16"] if half else -126))
    scale = np.ldexp(1.0, 25 - np.clip(largest, -500, 500))
    products = left * scale
    products *= right
    total = np.trunc(products, out=products).sum(axis=0) + np.trunc(c * scale)
    total /= scale
    total = np.ascontiguousarray(total.transpose(2, 0, 1)).reshape(*warps, *total.shape[:2])
    return total if half else _cut(total)


def accumulate(left, right, c, lowest, half=False):
    """What `_product` gives, for many large matrices: left (n, M, K), right (n, N, K), c (n, M, N), as float64.

    K after K, so that what is worked on stays in cache. -> float32, or with `half` float64 still to be rounded.
    """
    out = np.empty(c.shape, F64 if half else F32)
    for one, (a, b, c_) in enumerate(zip(left, right, c)):
        a, b = np.ascontiguousarray(a.T)[:, :, None], np.ascontiguousarray(b.T)[:, None, :]
        exponents_a, exponents_b = (np.maximum(_exponent(x, lowest), -500).astype(np.int16) for x in (a, b))
        largest = np.maximum(_exponent(c_, LOWEST["f16"] if half else -126), -500).astype(np.int16)
        both = np.empty_like(largest)
        for e, f in zip(exponents_a, exponents_b):
            np.maximum(largest, np.add(e, f, out=both), out=largest)
        scale = np.ldexp(1.0, 25 - largest.astype(np.int32))
        total = np.trunc(c_ * scale)
        product = np.empty_like(total)
        for x, y in zip(a, b):
            np.multiply(x, y, out=product)
            np.multiply(product, scale, out=product)
            np.add(total, np.trunc(product, out=product), out=total)
        total /= scale
        out[one] = total if half else _cut(total)
    return out


def _cut(x):
    """float64 -> float32 towards zero; beyond the largest float32 is infinity."""
    result = x.astype(F32)
    too_large = (np.abs(result.astype(F64)) > np.abs(x)) & (np.abs(x) < 2.0**128)
    return canonical((result.view(U32) - too_large).view(F32))


def _eight_bits(left, right, c):
    """ptxas turns the bytes into f16: the first two of each word are multiplied, then the others; then c is added."""
    first = np.arange(left.shape[-1]) % 4 < 2
    zero = np.zeros((1, 1))
    low = _product(left[..., first], right[..., first], zero, LOWEST["f16"])
    both = _product(left[..., ~first], right[..., ~first], low.astype(F64), LOWEST["f16"])
    return canonical(both + c.astype(F32))


def _whole_product(saturate):
    def multiply(left, right, c):
        total = np.matmul(left, right.swapaxes(-1, -2)) + c  # below 2^53, so exact
        return np.clip(total, -(2.0**31), 2.0**31 - 1) if saturate else total

    return multiply


# ---- between registers and matrices ----


def _gather(registers, stacked):
    """Registers -> (..., 8 * stacked rows, words): pieces of 8 x 4 words, `stacked` of them one above the other."""
    pieces = [r.reshape(*r.shape[:-1], 8, 4) for r in np.broadcast_arrays(*registers)]
    columns = [np.concatenate(pieces[i : i + stacked], axis=-2) for i in range(0, len(pieces), stacked)]
    return np.ascontiguousarray(np.concatenate(columns, axis=-1))


def _numbers(kind, words):
    if kind in ("f32", "s32"):
        return words.view(F32 if kind == "f32" else np.int32).astype(F64)
    if kind == "tf32":
        return (words & U32(0xFFFFE000)).view(F32).astype(F64)  # the 13 lowest bits are not looked at
    if KINDS[kind] == 2:
        return decode(kind, words.view(U16)).astype(F64)
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else U8).astype(F64)
    return decode(kind, words.view(U8)).astype(F64)


def _spread(registers):
    """Four registers, one number each -> (..., 16, 8)."""
    rows = [np.stack(r, axis=-1).reshape(*r[0].shape[:-1], 8, 8) for r in (registers[:2], registers[2:])]
    return np.concatenate(rows, axis=-2)


def _spread_single(registers):
    return _spread(registers).view(F32).astype(F64)


def _spread_whole(registers):
    return _spread(registers).view(np.int32).astype(F64)


def _spread_half(registers):
    """Two registers, two f16 each."""
    halves = [(r >> U32(s) & U32(0xFFFF)).astype(U16) for r in registers for s in (0, 16)]
    return decode("f16", _spread(halves)).astype(F64)


def _collect(matrix):
    """(..., 16, 8) -> four registers, one number each."""
    halves = matrix.reshape(*matrix.shape[:-2], 2, 32, 2)
    return [np.ascontiguousarray(halves[..., i, :, j]) for i in (0, 1) for j in (0, 1)]


def _collect_single(matrix):
    return _collect(matrix.view(U32))


def _collect_whole(matrix):
    return _collect(matrix.astype(np.int64).astype(U32))


def _collect_half(matrix):
    parts = [r.astype(U32) for r in _collect(encode("f16", matrix))]
    return [parts[0] | parts[1] << U32(16), parts[2] | parts[3] << U32(16)]


# ---- 8 x 8 matrices of 16-bit elements between shared memory and registers ----


def ldmatrix(rows, trans=False, count=None):
    """What the lanes hold after ldmatrix.m8n8.x{count}.b16.

    rows   (..., 32, 8) uint16: the 16 bytes at each lane's address. Lanes 0-7 give the rows of the first matrix,
           8-15 of the second, and so on
    count  1, 2 or 4 matrices (default: as many as there are rows for)

    -> a list of `count` registers: lane 4 g + q holds elements 2q and 2q + 1 of row g (of column g if `trans`).
    """
    count = rows.shape[-2] // 8 if count is None else count
    matrices = (rows[..., 8 * i : 8 * i + 8, :] for i in range(count))
    return [_to_register(m.swapaxes(-1, -2) if trans else m) for m in matrices]


def stmatrix(registers, trans=False):
    """stmatrix: the opposite of ldmatrix. -> (..., 8 * count, 8) uint16, what goes to each lane's address."""
    matrices = [_to_matrix(r) for r in np.broadcast_arrays(*registers)]
    return np.concatenate([m.swapaxes(-1, -2) if trans else m for m in matrices], axis=-2)


def movmatrix(register):
    """movmatrix.sync.aligned.m8n8.trans.b16: the matrix transposed, across the warp."""
    return _to_register(_to_matrix(register).swapaxes(-1, -2))


def _to_register(matrix):
    return np.ascontiguousarray(matrix).view(U32).reshape(*matrix.shape[:-2], 32)


def _to_matrix(register):
    return np.ascontiguousarray(register).view(U16).reshape(*register.shape[:-1], 8, 8)
