"""Chapter 06's weights and first three rungs on the CPU: the codes of ref/lowbit.py bit for bit, products on hostile
shapes, the counters and the machine code that the chapter states, no race, and errors before anything is written."""

import contextlib
import copy
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

from kernels import lowbit
from kernels.lowbit.rungs import HERE
from lab import cuda
from lab.tensors import DTYPES
from ref import lowbit as truth

of_digits = sys.modules["kernels.lowbit.digits"]  # the module; the package has the function by its name
pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

BITS, GROUPS = (8, 4, 2), (None, 32, 64, 128)
X_DTYPES = (torch.float16, torch.bfloat16)
INSTRUCTIONS = "smsp__inst_executed.sum"
quick = settings(max_examples=30, deadline=None)
every_bits = pytest.mark.parametrize("bits", BITS)
every_rung = pytest.mark.parametrize("name", ["shift", "magic"])
every_x = pytest.mark.parametrize("dtype", X_DTYPES, ids=str)


def run(name, *args, **options):
    return getattr(lowbit, name)(*args, **options)


def draw(*shape, dtype=torch.float16, seed=0):
    rng = torch.Generator().manual_seed(seed + sum((i + 1) * n for i, n in enumerate(shape)))
    return torch.randn(*shape, generator=rng).to(dtype)


def named(dtype):
    return str(dtype).removeprefix("torch.")


def problem(rows, cols, bits, group, m, dtype, scale_dtype=None, skip=0):
    """(Wq, x, out): x between NaNs, out full of NaN between fences; m None: x (cols,)."""
    W = draw(rows, cols, dtype=torch.float32) * 0.3 + 0.05
    Wq = lowbit.quantize(W.to(dtype), bits, group, scale_dtype=scale_dtype)
    lead = () if m is None else (m,)
    out = torch.full((*lead, rows), torch.nan, dtype=dtype)
    return Wq, between(draw(*lead, cols, dtype=dtype, seed=5), skip=skip), between(out, FENCE)


def close(out, Wq, x):
    """Against the product with the dequantised weights: what float32 sums and one rounding lose."""
    q, scale, zero = Wq.codes().numpy(), Wq.scale.double().numpy(), Wq.zero.double().numpy()
    wanted = truth.gemv_lowbit(q, scale, zero, x.double().numpy())
    lost = truth.float32_bound(q, scale, zero, x.double().numpy())
    off = np.abs(out.double().numpy() - wanted)
    eps = torch.finfo(out.dtype).eps / 2
    assert (off <= 1.01 * (eps * (np.abs(wanted) + lost) + lost) + 1e-7).all()


# Quantising: the reference, bit for bit


@every_bits
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_codes_of_the_reference(dtype, scale_dtype, bits):
    for rows, cols, group in ((7, 97, None), (5, 256, 128), (3, 96, 32), (1, 1, None), (2, 128, 64)):
        W = draw(rows, cols, dtype=torch.float32) * 2.0 ** torch.randint(-12, 8, (rows, 1))
        W[0] = W[0].abs() + 1
        W[-1, : cols // 2] = 0.3
        W = W.to(dtype)
        before = W.clone()
        Wq = lowbit.quantize(W, bits, group, scale_dtype=scale_dtype)
        q, scale, zero = truth.quantize(W.double().numpy(), bits, group, scale_dtype=named(scale_dtype))
        assert torch.equal(W, before)
        assert Wq.codes().numpy().tolist() == q.tolist() and Wq.codes().dtype == torch.uint8
        assert Wq.scale.dtype == Wq.zero.dtype == scale_dtype and Wq.scale.is_contiguous() and Wq.zero.is_contiguous()
        assert Wq.scale.double().tolist() == scale.tolist() and Wq.zero.double().tolist() == zero.tolist()
        assert (Wq.shape, Wq.bits, Wq.group, Wq.dtype) == ((rows, cols), bits, group, dtype)
        wanted = torch.from_numpy(truth.dequantize(q, scale, zero))
        assert torch.equal(Wq.dequantize(), wanted.to(dtype)) and Wq.dequantize().dtype == dtype
        assert torch.equal(Wq.dequantize(torch.float64), wanted)


@every_bits
@quick
@given(some.integers(1, 5), some.integers(1, 70), some.integers(0, 1 << 32), some.floats(-24, 10), some.floats(0, 3))
def test_the_codes_of_any_size(bits, rows, cols, seed, size, shift):
    """Down to scales that are subnormal float16, and far from 0."""
    rng = np.random.default_rng(seed)
    W = ((rng.standard_normal((rows, cols)) + shift) * 2.0**size).astype(np.float32)
    Wq = lowbit.quantize(torch.from_numpy(W), bits, scale_dtype=torch.float16)
    q, scale, zero = truth.quantize(W, bits, scale_dtype="float16")
    assert Wq.codes().tolist() == q.tolist()
    assert Wq.scale.double().tolist() == scale.tolist() and Wq.zero.double().tolist() == zero.tolist()


def test_many_slices_are_as_one(monkeypatch):
    W, whole = draw(37, 96), []
    for step in (1 << 24, 5 * 96, 1):
        monkeypatch.setattr("kernels.lowbit.weights.SLICE", step)
        Wq = lowbit.quantize(W, 4, 32)
        whole.append((Wq.codes(), Wq.scale, Wq.zero, Wq.dequantize(), lowbit.ternary(W).codes()))
        W[20, 3] = torch.nan
        with pytest.raises(ValueError, match=r"W must be finite, got nan at \(20, 3\)"):
            lowbit.quantize(W, 4, 32)
        W[20, 3] = 0
    W[20, 3] = 0
    assert all(torch.equal(a, b) for other in whole[2:] for a, b in zip(whole[1], other))


@every_bits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_weights_are_exact_and_zero_stays_zero(dtype, bits):
    W = torch.tensor([0.1, -3.3, 6e-8, 0.0, -0.0, 6e4]).to(dtype)[:, None].repeat(1, 64)
    W[0, 40] = 0
    Wq = lowbit.quantize(W, bits, 32)
    assert torch.equal(Wq.dequantize()[1:], W[1:]) and torch.equal(Wq.dequantize()[0, :32], W[0, :32])
    assert Wq.dequantize()[0, 40] == 0 and (Wq.scale[3:5] == 0).all() and not Wq.zero.signbit().any()


@every_bits
def test_the_largest_weights_of_float16(bits):
    W = torch.tensor([[-65504.0, 65504.0, 0.0, 1.0], [0.0, 65504.0, 1.0, 65504.0]]).half()
    back = lowbit.quantize(W, bits).dequantize().double()  # a scale that is rounded up reaches past 65504
    assert back.isfinite().all() and (back - W.double()).abs().max() <= 1.01 * 65504 / (2**bits - 1)


def test_ternary():
    W = draw(9, 50) * 0.02
    Wq = lowbit.ternary(W)
    gamma = W.double().abs().mean().half()
    q, *_ = truth.ternary(W.double().numpy(), gamma.double().item())
    assert Wq.codes().tolist() == q.tolist() and (Wq.scale == gamma).all() and (Wq.zero == 1).all()
    assert (Wq.bits, Wq.group, Wq.scale.shape, Wq.dtype) == (2, None, (9, 1), torch.float16)
    given_scale = 0.75 * torch.randint(-1, 2, (5, 33)).half()
    assert torch.equal(lowbit.ternary(given_scale, 0.75).dequantize(), given_scale)
    assert lowbit.ternary(W, 0.75, scale_dtype=torch.float32).scale.dtype == torch.float32
    assert not lowbit.ternary(torch.zeros(2, 3)).dequantize().any()


@every_bits
def test_codes_from_elsewhere(bits):
    codes = torch.randint(0, 1 << bits, (5, 96), dtype=torch.uint8)
    scale, zero = torch.rand(5, 3).bfloat16(), torch.randint(0, 1 << bits, (5, 3)).bfloat16()
    Wq = lowbit.from_codes(codes, scale, zero, bits)
    assert torch.equal(Wq.codes(), codes) and (Wq.group, Wq.dtype) == (32, torch.bfloat16)
    wanted = truth.dequantize(codes.numpy(), scale.double().numpy(), zero.double().numpy())
    assert Wq.dequantize(torch.float64).tolist() == wanted.tolist()
    scale.zero_(), zero.zero_(), codes.zero_()  # it has its own
    assert Wq.dequantize(torch.float64).tolist() == wanted.tolist()
    one = lowbit.from_codes(codes[:, :5].contiguous(), scale[:, :1].contiguous(), zero[:, :1].contiguous(), bits)
    assert one.group is None and lowbit.from_codes(codes, scale, zero, bits, torch.float32).dtype == torch.float32


@every_bits
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 97])
def test_row_major_words_are_the_reference_s(bits, cols):
    Wq = lowbit.quantize(draw(3, cols), bits)
    words, found = truth.pack(Wq.codes().numpy(), bits), Wq.row_major()
    assert found.dtype == torch.int32 and found.is_contiguous() and found.shape == (3, -(-cols // 16) * bits // 2)
    found = found.numpy().view(np.uint32)
    assert found[:, : words.shape[1]].tolist() == words.tolist() and not found[:, words.shape[1] :].any()
    assert Wq.row_major() is Wq.row_major()


def test_bytes_of_a_matrix():
    for bits in BITS:
        Wq = lowbit.quantize(draw(64, 512), bits, 128)
        assert Wq.nbytes == 64 * 512 * bits // 8 + 64 * 4 * 2 * 2
        assert lowbit.work(Wq, draw(3, 512)) == (Wq.nbytes + 2 * 3 * (64 + 512), 2 * 3 * 64 * 512)
    assert f"bits=2 group=128 on {Wq.device}" in repr(Wq)
    other = copy.deepcopy(Wq)
    assert other.packed.data_ptr() != Wq.packed.data_ptr() and torch.equal(other.dequantize(), Wq.dequantize())


# Right

# rows, cols, group, m, dtype of the scales (None: that of x)
SHAPES = [
    (7, 97, None, None, torch.float32),  # a tail
    (1, 1, None, 1, None),
    (17, 128, 128, None, None),  # one more than a block has rows
    (5, 1056, 32, 1, torch.bfloat16),  # three turns of a warp, the last of 32 columns
    (3, 576, 64, 3, None),
    (9, 34, None, 2, torch.float16),
    (2, 513, None, None, None),  # a turn of a warp, and one column
]


@every_bits
@every_x
@every_rung
def test_right_on_hostile_shapes(name, dtype, bits):
    some_of_them = {torch.float16: 1 if name == "magic" else 2, torch.bfloat16: 3}[dtype]  # the loop is one
    for rows, cols, group, m, scale_dtype in SHAPES[::some_of_them]:
        Wq, x, out = problem(rows, cols, bits, group, m, dtype, scale_dtype)
        before = x.clone(), Wq.packed.clone(), Wq.scale.clone(), Wq.zero.clone()
        assert run(name, Wq, x, out=out) is out
        close(out, Wq, x)
        assert fences_stand(out)
        assert all(torch.equal(a, b) for a, b in zip((x, Wq.packed, Wq.scale, Wq.zero), before))


@pytest.mark.parametrize(("name", "bits"), [("magic", 8), ("magic", 2), ("shift", 4)])
def test_sixteen_rows_of_x(name, bits):
    Wq, x, out = problem(6, 160, bits, 32, 16, torch.float16)
    run(name, Wq, x, out=out)
    close(out, Wq, x)
    assert fences_stand(out)
    for r in (0, 15):  # a row alone gives the same bits
        assert torch.equal(run(name, Wq, x[r].clone()), out[r])


@pytest.mark.parametrize("skip", [1, 2, 4])
@every_rung
def test_any_alignment_of_x(name, skip):
    for cols, m in ((48, 2), (50, 1)):
        Wq, x, out = problem(5, cols, 4, None, m, torch.bfloat16, skip=skip)
        run(name, Wq, x, out=out)
        close(out, Wq, x)


@given(some.integers(1, 20), some.integers(1, 70), some.sampled_from(BITS))
@settings(max_examples=10, deadline=None)
def test_any_shape(rows, cols, bits):
    Wq, x, out = problem(rows, cols, bits, None, None, torch.float16)
    run("magic", Wq, x, out=out)
    close(out, Wq, x)
    assert torch.equal(run("shift", Wq, x), out)


@every_bits
@every_x
def test_magic_gives_the_bits_that_shift_gives(dtype, bits):
    """Every code with every zero, in one row each: both conversions are exact, and the rest is the same."""
    L = (1 << bits) - 1
    zeros = torch.arange(0, L + 1, max(1, L // 5))
    codes = torch.arange(0, 1 << 8).remainder(L + 1).to(torch.uint8).repeat(len(zeros), 1)
    scale = torch.ones(len(zeros), 1, dtype=torch.float32)
    Wq = lowbit.from_codes(codes, scale, zeros[:, None].float(), bits)
    for at in (0, 1, L // 2, L, 255):  # one weight at a time: x is 0 elsewhere
        x = torch.zeros(256, dtype=dtype)
        x[at] = 1
        for name in ("shift", "magic"):
            assert run(name, Wq, x).tolist() == (at % (L + 1) - zeros).tolist()
    x = draw(256, dtype=dtype)
    assert torch.equal(lowbit.shift(Wq, x), lowbit.magic(Wq, x))


@every_rung
def test_nan_and_infinity_in_x_show(name):
    Wq, x, out = problem(5, 64, 4, 32, 2, torch.float16)
    x[1, 63] = torch.nan
    run(name, Wq, x, out=out)
    assert out[0].isfinite().all() and out[1].isnan().all()


@every_rung
def test_a_group_of_zeros_gives_zero(name):
    W = draw(3, 64)
    W[:, :32] = 0
    x = draw(64)
    out = run(name, lowbit.quantize(W, 2, 32), x)
    x[:32] = 999
    assert torch.equal(run(name, lowbit.quantize(W, 2, 32), x), out)


@every_rung
def test_without_out_a_new_tensor_comes_back(name):
    Wq, x, _ = problem(5, 32, 8, None, 2, torch.bfloat16)
    x.requires_grad_()
    y = run(name, Wq, x)
    assert y.shape == (2, 5) and y.dtype == torch.bfloat16 and not y.requires_grad
    assert run(name, Wq, x[0]).shape == (5,)


@every_bits
@every_rung
def test_no_race(name, bits):
    for m in (None, 2):
        Wq, x, _ = problem(6, 544, bits, 32, m, torch.float16)
        lowbit.counters(name, Wq, x, check_races=True)


# Digits: one row of x, 4 bits, groups of 128, whole tiles


@pytest.mark.parametrize("rows, cols", [(16, 256), (48, 384), (32, 2176)])
def test_digits_on_its_shapes(rows, cols):
    """More and fewer units than a block has warps; between them those that none has. A warp that has two writes the
    digits of the second where it has read those of the first."""
    Wq, x, out = problem(rows, cols, 4, 128, None, torch.float16)
    before = x.clone(), Wq.packed.clone(), Wq.factors.clone()
    assert lowbit.digits(Wq, x, out=out) is out
    close(out, Wq, x)
    assert fences_stand(out) and all(map(torch.equal, (x, Wq.packed, Wq.factors), before))
    assert torch.equal(lowbit.digits(Wq, x[None]), out[None])
    lowbit.counters("digits", Wq, x, check_races=True)


@pytest.mark.parametrize("size", [6e4, 1.0, 1e-6])
def test_digits_of_x_of_any_size(size):
    Wq, x, out = problem(16, 512, 4, 128, None, torch.float16)
    scale = Wq.scale / 64 if size > 1 else Wq.scale
    Wq = lowbit.QuantizedWeight(Wq.codes(), scale, Wq.zero, 4, 128, torch.float16)
    x.copy_(torch.rand(512) * 2 - 1).mul_(size)
    x[128:256] = 0  # a unit of nothing
    close(lowbit.digits(Wq, x, out=out), Wq, x)


@pytest.mark.parametrize("at", [0, 5, 31, 64, 127, 130, 255])
def test_digits_weigh_each_column_alone(at):
    """y is a column of the dequantised weights: every code where it belongs, whatever the other columns hold."""
    Wq, _, _ = problem(32, 256, 4, 128, None, torch.float16)
    for value in (1.0, -1.0, 0.37, 2047.0):
        x = torch.zeros(256, dtype=torch.float16)
        x[at] = value
        wanted = Wq.dequantize(torch.float64)[:, at] * x[at].double()
        assert torch.equal(lowbit.digits(Wq, x), wanted.half())


def test_digits_let_nan_and_infinity_show():
    Wq, x, _ = problem(16, 256, 4, 128, None, torch.float16)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[200] = bad
        assert lowbit.digits(Wq, x).isnan().all()


def test_counters_of_digits():
    """Each byte of the weights once, x once a block, no bank conflict, no race; four products of a warp for a unit."""
    Wq, x, _ = problem(48, 2048, 4, 128, None, torch.float16)
    report = lowbit.counters("digits", Wq, x, check_races=True)
    assert report.grid == (3, 1, 1) and report.block == (512, 1, 1) and report.bank_conflicts == 0
    sectors = report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    assert sectors == (Wq.packed.nbytes + Wq.factors.nbytes + 3 * x.nbytes) // 32
    code = of_digits._kernel().module.sass("gemv")
    assert len(re.findall(r"\bIMMA\b", code)) == 4 and not re.search(r"\bI2F\S*U8", code)
    used = of_digits._kernel().module.resources()["gemv"]
    assert used["registers"] <= 64 and used["spill_loads"] == used["spill_stores"] == 0


def test_what_digits_do_not_take():
    Wq, x, out = problem(32, 256, 4, 128, 1, torch.float16)

    def other(rows=32, cols=256, bits=4, group=128, scale_dtype=None):
        return problem(rows, cols, bits, group, None, torch.float16, scale_dtype)[:2]

    cases = [
        (lambda: lowbit.digits(Wq, x, out=out, pdl=True), ValueError, "digits: pdl must be False, got True"),
        (lambda: lowbit.digits(*other(bits=8)), ValueError, "Wq must have 4 bits and groups of 128, got 8 and 128"),
        (lambda: lowbit.digits(*other(group=64)), ValueError, "4 bits and groups of 128, got 4 and 64; gemv takes it"),
        (lambda: lowbit.digits(*other(group=None)), ValueError, "4 bits and groups of 128, got 4 and None"),
        (lambda: lowbit.digits(*other(cols=128)), ValueError, "Wq must have more than one group in a row, got 128 col"),
        (lambda: lowbit.digits(*other(rows=33)), ValueError, "Wq must have a multiple of 16 rows, got 33; gemv takes"),
        (lambda: lowbit.digits(Wq, x.repeat(2, 1)), ValueError, "x must be one row, got 2; gemv takes it"),
        (lambda: lowbit.digits(Wq, x.bfloat16()), TypeError, "x must be of torch.float16, got torch.bfloat16; gemv"),
        (
            lambda: lowbit.digits(*other(scale_dtype=torch.float32)),
            TypeError,
            "Wq.scale must be of torch.float16, got torch.float32",
        ),
        (
            lambda: lowbit.digits(Wq, between(x, skip=1), out=out),
            ValueError,
            "x must lie at a multiple of 8 bytes, got one 2 beyond",
        ),
        (lambda: lowbit.digits(Wq, x[:, :63]), ValueError, r"digits: x must have shape \(m, 256\)"),
        (lambda: lowbit.digits(x, x), TypeError, "digits: Wq must be a QuantizedWeight, got Tensor"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    assert out.isnan().all() and fences_stand(out)


# Counters: what the chapter states


def a_weight(name, bits, dtype):
    """Instructions that one lane executes for each weight, as columns become more."""
    counted = []
    for cols in (1024, 3072):
        Wq, x, _ = problem(16, cols, bits, 128, None, dtype)
        counted.append(lowbit.counters(name, Wq, x).counters[INSTRUCTIONS])
    return (counted[1] - counted[0]) * 32 / (16 * 2048)


@every_bits
@every_x
def test_instructions_of_a_weight(dtype, bits):
    naive, magic = (a_weight(name, bits, dtype) for name in ("shift", "magic"))
    assert 7 < naive < 9 and 5.5 < magic < 7.25 and naive - magic > 1


@every_rung
def test_each_byte_of_codes_is_read_once_and_half_the_bits_are_half_the_sectors(name):
    sectors = {}
    for bits in BITS:
        Wq, x, _ = problem(16, 1024, bits, None, None, torch.float16)
        report = lowbit.counters(name, Wq, x)
        assert report.bank_conflicts == 0 and report.grid == (1, 1, 1) and report.block == (128, 1, 1)
        sectors[bits] = report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    whole = 16 * 1024 // 32  # of 8 bits
    assert sectors[8] - sectors[4] == whole // 2 and sectors[4] - sectors[2] == whole // 4


# Machine code: what the chapter shows


def module(name, bits, dtype, m=1):
    options = {"DTYPE": DTYPES[dtype], "SCALE": DTYPES[dtype], "BITS": bits, "M": m}
    return cuda.load(HERE / f"{name}.cu", [f"-D{key}={value}" for key, value in options.items()])


def operations(name, bits, dtype):
    try:
        code = module(name, bits, dtype).sass("gemv")
    except RuntimeError:  # no disassembler here
        pytest.skip("no disassembler")
    return [op.split(".")[0] for op in re.findall(r"\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9]+[.\w]*)", code)]


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float16), (4, torch.float16), (2, torch.bfloat16)], ids=str)
def test_only_shift_converts_integers(bits, dtype):
    naive, magic = (operations(name, bits, dtype) for name in ("shift", "magic"))
    assert naive.count("I2F") + naive.count("I2FP") == 64  # 16 codes of 4 rows
    assert magic.count("I2F") == magic.count("I2FP") == 0
    assert len(magic) < len(naive) - 64
    assert magic.count("FFMA") >= 64 <= naive.count("FFMA")


@every_bits
@every_rung
def test_nothing_spills(name, bits):
    for dtype, m in ((torch.float16, 1), (torch.bfloat16, 1), (torch.float16, 16)):
        found = module(name, bits, dtype, m).resources()["gemv"]
        assert found["registers"] <= 128 and found["spill_loads"] == found["spill_stores"] == found["stack"] == 0


# Bad input


@every_rung
def test_errors_name_the_argument(name):
    Wq, x, out = problem(5, 64, 4, 32, 2, torch.float16)
    cases = [
        (lambda: run(name, draw(5, 64), x), TypeError, "Wq must be a QuantizedWeight, got Tensor"),
        (
            lambda: run(name, Wq, x.numpy()),
            TypeError,
            r"x must be a torch tensor of shape \(64,\) or \(m, 64\), got nda",
        ),
        (lambda: run(name, Wq, x[:, :63]), ValueError, r"x must have shape \(m, 64\), none of it 0, got \(2, 63\)"),
        (lambda: run(name, Wq, x[0, :63]), ValueError, r"x must have shape \(64,\), none of it 0, got \(63,\)"),
        (lambda: run(name, Wq, x[None]), ValueError, r"x must be .* or \(m, 64\), got shape \(1, 2, 64\)"),
        (lambda: run(name, Wq, x[:0]), ValueError, r"x must have shape \(m, 64\), none of it 0, got \(0, 64\)"),
        (
            lambda: run(name, Wq, x.float()),
            TypeError,
            "x must be of torch.float16 or torch.bfloat16, got torch.float32",
        ),
        (lambda: run(name, Wq, draw(64, 2).T), ValueError, "x must be contiguous"),
        (lambda: run(name, Wq, x.to("meta")), ValueError, "x must be on cpu, like the first tensor, got one on meta"),
        (
            lambda: run(name, Wq, draw(17, 64)),
            ValueError,
            r"at most 16 rows, got 17; .* x @ Wq.dequantize\(x.dtype\).T",
        ),
        (lambda: run(name, Wq, x, out=out[0]), ValueError, r"out must have shape \(2, 5\)"),
        (lambda: run(name, Wq, x, out=out.float()), TypeError, "out must be of torch.float16, like"),
        (lambda: run(name, Wq, x, out=x[:, :5]), ValueError, "out must be contiguous"),
        (lambda: run(name, Wq, x, out=x.view(-1)[:10].view(2, 5)), ValueError, "out must not share memory with x"),
        (lambda: run(name, Wq, x, out=Wq.scale.view(-1)[:10].view(2, 5)), ValueError, "share memory with Wq.scale"),
        (lambda: run(name, Wq, x, out=out, pdl=True), ValueError, f"{name}: pdl must be False, got True: only gemv"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    assert out.isnan().all() and fences_stand(out)


@pytest.mark.parametrize("bits", [1, 3, 16, 4.0, True, None, "4"])
def test_bits_that_are_not_offered(bits):
    with pytest.raises(ValueError, match="quantize: bits must be 8, 4 or 2, got"):
        lowbit.quantize(draw(2, 32), bits)


def test_calls_of_quantize_that_do_not_fit():
    W = draw(3, 96)
    not_finite = W.clone()
    not_finite[1, 5] = not_finite[2, 0] = -torch.inf
    cases = [
        (lambda: lowbit.quantize(W.numpy(), 4), TypeError, "quantize: W must be a torch tensor, got ndarray"),
        (lambda: lowbit.quantize(W.int(), 4), TypeError, "quantize: W must be of torch.float32 or .*, got torch.int32"),
        (lambda: lowbit.quantize(W[0], 4), ValueError, r"quantize: W must have shape \(rows, cols\), none of it 0"),
        (lambda: lowbit.quantize(W[:0], 4), ValueError, r"quantize: W must have shape .* got \(0, 96\)"),
        (lambda: lowbit.quantize(W.T, 4), ValueError, "quantize: W must be contiguous"),
        (lambda: lowbit.quantize(W.to("meta"), 4), ValueError, "quantize: W must be on the CPU or on a CUDA device"),
        (lambda: lowbit.quantize(W, 4, 64), ValueError, "group must be None .* a divisor of cols, 96, got 64"),
        (lambda: lowbit.quantize(W, 4, 48), ValueError, "group must be None .*, or 32, 64 or 128 .*, got 48"),
        (lambda: lowbit.quantize(W, 4, 0), ValueError, "group must be .* got 0"),
        (lambda: lowbit.quantize(W, 4, 32.0), ValueError, "group must be .* got 32.0"),
        (lambda: lowbit.quantize(W, 4, scale_dtype=torch.int8), TypeError, "scale_dtype must be None or one of .*int8"),
        (lambda: lowbit.quantize(not_finite, 4), ValueError, r"quantize: W must be finite, got -inf at \(1, 5\)"),
        (lambda: lowbit.ternary(not_finite), ValueError, r"ternary: W must be finite, got -inf at \(1, 5\)"),
        (lambda: lowbit.ternary(W, -1.0), ValueError, "ternary: scale must be None or a number of 0 or more, got -1.0"),
        (lambda: lowbit.ternary(W, float("nan")), ValueError, "ternary: scale must be .* got nan"),
        (lambda: lowbit.ternary(W, 1e9), ValueError, "ternary: scale must have scales within torch.float16"),
        (
            lambda: lowbit.ternary(torch.full((2, 3), 1e6), scale_dtype=torch.float16),
            ValueError,
            "ternary: W must have scales within torch.float16, got one beyond it in row 0",
        ),
        (
            lambda: lowbit.ternary(torch.full((2, 3), 1e-9), scale_dtype=torch.float16),
            ValueError,
            "W must have a mean magnitude that torch.float16 does not round to 0, got 1e-09; a wider scale_dtype",
        ),
        (
            lambda: lowbit.ternary(W, 1e-9),
            ValueError,
            "scale must have a number that torch.float16 does not round to 0",
        ),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()
    large = torch.tensor([[1.0, 2.0], [0.0, 3 * 65504.1]])
    with pytest.raises(ValueError, match="W must have scales within torch.float16, got one beyond it in row 1"):
        lowbit.quantize(large, 2, scale_dtype=torch.float16)
    lowbit.quantize(large, 2)
    assert not lowbit.ternary(W, 0).dequantize().any() and not lowbit.ternary(W * 0).dequantize().any()
    tiny = torch.full((2, 3), 1e-9)
    assert torch.equal(lowbit.ternary(tiny).dequantize(), tiny)


@every_bits
def test_scales_that_a_product_could_not_take(bits):
    """Beyond 2**80 float32 sums of whole numbers times a scale could be infinite where the result is not."""
    L = (1 << bits) - 1
    codes, zero = torch.zeros(16, 256, dtype=torch.uint8), torch.full((16, 2), float(L))
    scale = torch.ones(16, 2)
    for bad in (2.0**100, -(2.0**100)):
        scale[3, 1] = bad
        words = f"from_codes: scale must have scales of at most 2**80 (1.21e+24), got {bad:.3g} in row 3"
        with pytest.raises(ValueError, match=re.escape(words)):
            lowbit.from_codes(codes, scale, zero, bits)
    W = torch.tensor([[0.0, 1.0], [0.0, 2.0**100 * L]])
    with pytest.raises(ValueError, match="quantize: W must have scales of at most .* in row 1"):
        lowbit.quantize(W, bits)
    with pytest.raises(ValueError, match="ternary: W must have scales of at most .* in row 0"):
        lowbit.ternary(W.bfloat16())


@every_bits
@pytest.mark.parametrize("m", [1, 6])
def test_the_largest_scale_is_right(bits, m):
    """Tiny x, so that y is of the order of 1, and zeros as far from the codes as can be, both ways."""
    L, cols = (1 << bits) - 1, 14336
    codes, zero = torch.full((16, cols), L, dtype=torch.uint8), torch.zeros(16, cols // 32)
    codes[8:], zero[8:] = 0, L
    Wq = lowbit.from_codes(codes, torch.full((16, cols // 32), 2.0**80), zero, bits)
    x = torch.full((m, cols), 2.0**-90, dtype=torch.bfloat16)
    close(lowbit.gemv(Wq, x), Wq, x)


def test_calls_of_from_codes_that_do_not_fit():
    codes, scale, zero = torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 2), torch.zeros(3, 2)
    half, beyond = zero.clone(), zero.clone()
    half[1, 1], beyond[2, 0] = 0.5, 4
    cases = [
        (lambda: lowbit.from_codes(codes.int(), scale, zero, 2), TypeError, "codes must be of torch.uint8"),
        (
            lambda: lowbit.from_codes(codes + 4, scale, zero, 2),
            ValueError,
            "codes must be from 0 to 3 with bits=2, got 4",
        ),
        (lambda: lowbit.from_codes(codes, scale[:2], zero, 2), ValueError, r"scale must have shape \(3, groups\)"),
        (lambda: lowbit.from_codes(codes, scale.double(), zero, 2), TypeError, "scale must be of torch.float32 or"),
        (lambda: lowbit.from_codes(codes, scale, zero[:, :1].clone(), 2), ValueError, r"zero must have shape \(3, 2\)"),
        (lambda: lowbit.from_codes(codes, scale, zero.half(), 2), TypeError, "zero must be of torch.float32, got"),
        (lambda: lowbit.from_codes(codes, scale, half, 2), ValueError, r"zero must hold whole .*, got 0.5 at \(1, 1\)"),
        (
            lambda: lowbit.from_codes(codes, scale, beyond, 2),
            ValueError,
            r"zero must hold .* 0 to 3, got 4.0 at \(2, 0\)",
        ),
        (lambda: lowbit.from_codes(codes, scale * torch.inf, zero, 2), ValueError, "scale must have scales within"),
        (lambda: lowbit.from_codes(codes, torch.ones(3, 4), torch.ones(3, 4), 2), ValueError, "got 4 for 64"),
        (lambda: lowbit.from_codes(codes, scale, zero, 2, torch.int8), TypeError, "dtype must be None or one of"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def test_what_a_graph_cannot_capture(monkeypatch):
    """As on a card whose stream is being captured: nothing is laid out, and the error says what to do."""
    Wq, on_card = lowbit.quantize(draw(3, 64), 4, 32), SimpleNamespace(is_cuda=True, device="cuda:1")
    devices = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: devices.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "row_major: a graph cannot capture the first call, which lays out the codes of Wq anew; call the rung once "
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=words + "before the capture"):
        patch.setattr(Wq, "packed", on_card)
        Wq.row_major()
    assert devices == ["cuda:1"]  # it is the stream of that card that counts
    assert Wq.row_major() is Wq.row_major()  # on the CPU nothing is captured


def test_weights_made_by_hand_that_do_not_fit():
    codes, scale, zero = torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 2), torch.zeros(3, 2)
    fits = dict(codes=codes, scale=scale, zero=zero, bits=4, group=32, dtype=torch.float16)
    cases = [
        ({"codes": codes.int()}, TypeError, "QuantizedWeight: codes must be of torch.uint8, got torch.int32"),
        ({"codes": codes[0]}, ValueError, r"codes must have shape \(rows, cols\)"),
        ({"scale": scale[:, :1].clone()}, ValueError, r"scale must have shape \(3, 2\), none of it 0, got \(3, 1\)"),
        ({"scale": 1.0}, TypeError, "scale must be a torch tensor, got float"),
        ({"zero": zero.half()}, TypeError, "zero must be of torch.float32, got torch.float16"),
        ({"zero": zero.to("meta")}, ValueError, "zero must be on cpu, like the first tensor, got one on meta"),
        ({"bits": 3}, ValueError, "bits must be 8, 4 or 2, got 3"),
        ({"group": 48}, ValueError, "group must be .* got 48"),
        ({"group": 128}, ValueError, "a divisor of cols, 64, got 128"),
        ({"dtype": torch.int8}, TypeError, "dtype must be one of .*, got torch.int8"),
    ]
    assert not lowbit.QuantizedWeight(**fits).dequantize().any()
    for change, kind, words in cases:
        with pytest.raises(kind, match=words):
            lowbit.QuantizedWeight(**fits | change)


@pytest.mark.parametrize("dtype", ["x", torch.int8, torch.complex64, float])
def test_dtypes_that_weights_cannot_become(dtype):
    with pytest.raises(
        TypeError, match="dequantize: dtype must be None or one of torch.float32, .* or torch.float64, got"
    ):
        lowbit.quantize(draw(2, 32), 4).dequantize(dtype)


def test_counters_need_a_rung_s_name_and_the_cpu():
    Wq, x, _ = problem(2, 32, 4, None, None, torch.float16)
    with pytest.raises(ValueError, match="counters: rung must be one of shift, magic, digits, gemv, got 'naive'"):
        lowbit.counters("naive", Wq, x)
    with pytest.raises(ValueError, match="x must have shape"):
        lowbit.counters("magic", Wq, x[:5])
