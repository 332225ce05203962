"""Tensor-core instructions: operands laid out element by element as the PTX ISA draws them, sums against Fractions."""

from fractions import Fraction

import numpy as np
import pytest

from simt.arithmetic import mma

RNG = np.random.default_rng(5)
SHAPES = [
    ("m16n8k16.row.col.f32.f16.f16.f32", "f16", 16),
    ("m16n8k8.row.col.f32.f16.f16.f32", "f16", 8),
    ("m16n8k16.row.col.f16.f16.f16.f16", "f16", 16),
    ("m16n8k16.row.col.f32.bf16.bf16.f32", "bf16", 16),
    ("m16n8k8.row.col.f32.bf16.bf16.f32", "bf16", 8),
    ("m16n8k8.row.col.f32.tf32.tf32.f32", "tf32", 8),
    ("m16n8k4.row.col.f32.tf32.tf32.f32", "tf32", 4),
    ("m16n8k32.row.col.s32.s8.s8.s32", "s8", 32),
    ("m16n8k16.row.col.s32.u8.u8.s32", "u8", 16),
    ("m16n8k32.row.col.f32.e4m3.e4m3.f32", "e4m3", 32),
    ("m16n8k32.row.col.f32.e5m2.e5m2.f32", "e5m2", 32),
]


def to_bits(kind, x):
    """Small whole numbers -> bits of one element each."""
    single = x.astype(np.float32).view(np.uint32)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return (single >> 16).astype(np.uint16)
    if kind == "tf32":
        return single
    if kind in ("s8", "u8"):
        return x.astype(np.int8).view(np.uint8)
    half = x.astype(np.float16).view(np.uint16)
    if kind == "e5m2":
        return (half >> 8).astype(np.uint8)
    return np.where(x == 0, 0, (half >> 8 & 0x80) | ((half & 0x7FFF) >> 7) - (8 << 3)).astype(np.uint8)


def fragments(matrix_bits, rows):
    """(rows, K) elements -> registers, by the ISA's formulas for the row and the column of element i of lane `lane`."""
    per_word = 4 // matrix_bits.dtype.itemsize
    count = rows * matrix_bits.shape[1] // (32 * per_word)
    registers = np.zeros((count, 32, per_word), matrix_bits.dtype)
    for register in range(count):
        for lane in range(32):
            group, place = lane // 4, lane % 4
            row = group + (8 * (register % 2) if rows == 16 else 0)
            block = register // 2 if rows == 16 else register
            for i in range(per_word):
                registers[register, lane, i] = matrix_bits[row, (block * 4 + place) * per_word + i]
    return [r.reshape(-1).view(np.uint32) for r in registers]


def c_fragments(c, kind):
    registers = [np.zeros(32, c.dtype) for _ in range(4)]
    for i in range(4):
        for lane in range(32):
            registers[i][lane] = c[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
    if kind == "f16":
        return [np.stack(registers[i : i + 2], 1).reshape(-1).view(np.uint32) for i in (0, 2)]
    return [r.view(np.uint32) for r in registers]


@pytest.mark.parametrize("opcode, kind, depth", SHAPES)
def test_whole_numbers_come_out_exactly(opcode, kind, depth):
    low = 0 if kind == "u8" else -4
    a, b, c = (RNG.integers(low, 5, shape) for shape in ((16, depth), (8, depth), (16, 8)))
    target = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[opcode.split(".")[3]]
    function = mma.mma("mma.sync.aligned." + opcode)
    given = fragments(to_bits(kind, a), 16), fragments(to_bits(kind, b), 8), c_fragments(c.astype(target), opcode[-3:])
    result = function(*given)
    wanted = c_fragments((a @ b.T + c).astype(target), opcode[-3:])
    assert all((x == y).all() for x, y in zip(result, wanted, strict=True))
    # many warps at once, one of which gives its operand for all
    batch = [[np.broadcast_to(r, (2, 3, 32)) for r in given[0]], [r[None, None] for r in given[1]], given[2]]
    assert all((x == y).all() and x.shape == (2, 3, 32) for x, y in zip(function(*batch), wanted))
    # ... or two of them for all
    batch = [[r[None] for r in given[0]], [r[None] for r in given[1]], [np.broadcast_to(r, (3, 32)) for r in given[2]]]
    assert all((x == y).all() and x.shape == (3, 32) for x, y in zip(function(*batch), wanted))


def exponent(x):
    return np.frexp(float(x))[1] - 1 if x else -1000


def test_sums_are_cut_as_the_hardware_cuts_them():
    """One element at a time, by Fractions: 25 bits below the largest exponent, then towards zero to 24 bits."""
    a, b = (RNG.integers(-2047, 2048, (n, 16)) * 2.0 ** RNG.integers(-16, -8, (n, 16)) for n in (16, 8))
    c = (RNG.standard_normal((16, 8)) * 2.0 ** RNG.integers(-8, 8, (16, 8))).astype(np.float32)
    a, b = a.astype(np.float16), b.astype(np.float16)
    function = mma.mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    result = function(fragments(a.view(np.uint16), 16), fragments(b.view(np.uint16), 8), c_fragments(c, "f32"))
    wanted, nearest = np.zeros((16, 8), np.float32), 0
    for i in range(16):
        for j in range(8):
            terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[j])] + [Fraction(float(c[i, j]))]
            exponents = [exponent(x) + exponent(y) for x, y in zip(a[i], b[j])] + [exponent(c[i, j])]
            unit = Fraction(2) ** (max(exponents) - 25)
            total = sum(int(t / unit) for t in terms) * unit
            last = Fraction(2) ** (exponent(total) - 23)
            wanted[i, j] = float(int(total / last) * last)
            nearest += wanted[i, j] != np.float32(float(sum(terms)))
    assert all((x == y).all() for x, y in zip(result, c_fragments(wanted, "f32")))
    assert nearest > 10  # so this is not rounding to nearest


def test_special_values():
    function = mma.mma("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32")
    one, c = np.zeros((16, 8), np.uint16), np.zeros((16, 8), np.float32)
    one[:, 0], one[1, 0] = 0x3C00, 0x7C00
    b = np.zeros((8, 8), np.uint16)
    b[0, 0], b[1, 0], b[2, 0] = 0x7C00, 0x8000, 0xFC00
    c[0, 0] = -np.inf
    with np.errstate(all="ignore"):
        d = function(fragments(one, 16), fragments(b, 8), c_fragments(c, "f32"))
    assert d[0][0] == 0x7FFFFFFF  # inf - inf
    assert d[0][4] == 0x7F800000  # inf * inf
    assert d[1][4] == 0x7FFFFFFF  # inf * -0
    assert d[0][1] == 0xFF800000


def test_integers_wrap_around_or_saturate():
    a, b = np.full((16, 32), 127), np.full((8, 32), 127)
    c = np.full((16, 8), 2**31 - 5, np.int32)
    given = fragments(to_bits("s8", a), 16), fragments(to_bits("s8", b), 8), c_fragments(c, "s32")
    wraps = mma.mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")(*given)
    clamps = mma.mma("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32")(*given)
    assert (wraps[0] == (2**31 - 5 + 32 * 127 * 127) % 2**32).all() and (clamps[3] == 2**31 - 1).all()


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
        "mma.sync.aligned.m16n8k32.row.col.f32.s8.s8.f32",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
    ],
)
def test_what_is_not_covered_is_none(opcode):
    assert mma.mma(opcode) is None


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_and_stmatrix(count, trans):
    rows = RNG.integers(0, 1 << 16, (3, 32, 8)).astype(np.uint16)
    registers = mma.ldmatrix(rows, trans, count)
    assert len(registers) == count
    for m, register in enumerate(registers):
        assert register.shape == (3, 32) and register.dtype == np.uint32
        for lane in range(32):
            matrix = rows[1, 8 * m : 8 * m + 8]
            matrix = matrix.T if trans else matrix
            low, high = (int(matrix[lane // 4, lane % 4 * 2 + i]) for i in (0, 1))
            assert register[1, lane] == low | high << 16
    assert (mma.stmatrix(registers, trans) == rows[:, : 8 * count]).all()


def test_movmatrix_transposes():
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    (register,) = mma.ldmatrix(matrix)
    (wanted,) = mma.ldmatrix(matrix, trans=True)
    assert (mma.movmatrix(register) == wanted).all()
