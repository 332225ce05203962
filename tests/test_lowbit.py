"""The best rung for low-bit weights on the SIMT machine: its layout, its numbers on hostile shapes, its plan and its
machine code. tests/test_lowbit_rungs.py has the first two rungs, tests/test_ref_lowbit.py the reference."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

import simt
from kernels import lowbit
from kernels.lowbit import layout
from kernels.lowbit.plan import plan
from lab import cuda
from lab.stream import still_running

top = sys.modules["kernels.lowbit.gemv"]  # the module; the package has the function by its name
pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
ROOM = 227 * 1024  # bytes of shared memory that a block may have on an H200
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096)]  # those that are measured
# rows, cols, bits, group, m, dtype of x, of scales: one and less, primes, one past a tile and a unit, several splits
CASES = [
    (1, 1, 8, None, 1, HALF, HALF),
    (1, 32, 2, 32, 16, BRAIN, BRAIN),
    (17, 129, 4, None, 1, BRAIN, HALF),
    (31, 97, 2, None, 3, HALF, SINGLE),
    (16, 128, 4, 128, 1, HALF, HALF),
    (33, 160, 8, 32, 2, HALF, BRAIN),
    (7, 4224, 4, 128, 1, HALF, HALF),
    (37, 1408, 2, 64, 5, BRAIN, SINGLE),
    (49, 4096, 4, 64, 8, HALF, HALF),
    (13, 2080, 4, 32, 9, HALF, HALF),
    (18, 14336, 2, 128, 1, HALF, HALF),
    (5, 14336, 8, None, 1, BRAIN, HALF),
    (21, 6144, 4, 128, 16, HALF, HALF),
    (3, 9000, 8, None, 7, HALF, HALF),
    (2, 40000, 4, 64, 1, HALF, HALF),
    (40, 640, 8, 64, 16, BRAIN, SINGLE),
    (24, 480, 4, 32, 12, BRAIN, BRAIN),
    (19, 896, 4, None, 6, BRAIN, HALF),
]
# A launch under PDL is another kernel. Plain ones are compiled in all of this file: here every other case is under PDL
# instead, and three are both, to the same bits: few rows, many, and splits.
BOTH = (7, 4224), (13, 2080), (2, 40000)
LAUNCHES = [(case, (False, True) if case[:2] in BOTH else (n % 2 == 1,)) for n, case in enumerate(CASES)]


def problem(rows, cols, bits, group, m, dtype=HALF, scale_dtype=HALF, skip=0, seed=0):
    """(Wq, x between NaNs, out full of NaN between fences), random; zeros are any whole numbers."""
    rng = torch.Generator().manual_seed(seed + 1000 * rows + cols + bits)
    groups = cols // group if group else 1
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=rng, dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (rows, groups), generator=rng).to(scale_dtype)
    scale = (torch.rand(rows, groups, generator=rng) / 64 + 2**-8).to(scale_dtype)
    Wq = lowbit.QuantizedWeight(codes, scale, zero, bits, group, dtype)
    Wq.packed, Wq.factors = (guarded(t) for t in (Wq.packed, Wq.factors))
    x = torch.randn(m, cols, generator=rng).to(dtype)
    out = torch.full((m, rows), torch.nan, dtype=dtype)
    if m == 1:
        x, out = x[0], out[0]
    return Wq, between(x, skip=skip), between(out, FENCE)


def guarded(tensor):
    return between(tensor, torch.nan if tensor.is_floating_point() else -1)


def counters(Wq, x, **options):
    """The report of gemv, and not of the kernel that adds up the sums of splits."""
    reports = lowbit.counters("gemv", Wq, x, **options)
    return reports[0] if isinstance(reports, tuple) else reports


def wanted(Wq, x):
    """The product with the weights as they are stored, in float64."""
    scale, zero = (t.double()[:, :, None] for t in (Wq.scale, Wq.zero))
    W = ((Wq.codes().double().unflatten(1, (scale.shape[1], -1)) - zero) * scale).flatten(1)
    return x.double() @ W.T


def close(out, Wq, x):
    """Within one rounding of the dtype, by the norm."""
    right = wanted(Wq, x)
    error = float((out.double() - right).norm() / right.norm().clamp_min(1e-30))
    assert error <= torch.finfo(out.dtype).eps, error


# The layout


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (17, 129), (33, 300), (5, 1024)], ids=str)
def test_codes_come_back(bits, shape):
    q = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    packed = layout.interleave(q, bits)
    tiles, units = -(-shape[0] // 16), -(-shape[1] // 128)
    assert packed.shape == (tiles, units, bits // 2, 32, 4) and packed.dtype == torch.int32
    assert torch.equal(layout.deinterleave(packed, bits, shape), q)


@pytest.mark.parametrize("bits", layout.BITS)
def test_every_code_lies_where_the_instruction_wants_it(bits):
    """Written out for one code after another, from the ISA's picture of the operand A of m16n8k32."""
    rows, cols = 35, 290
    q = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8)
    words = layout.interleave(q, bits).numpy().view(np.uint32)
    for row, col in np.random.default_rng(bits).integers((0, 0), (rows, cols), (400, 2)):
        (tile, r), (unit, k) = divmod(row, 16), divmod(col, 128)
        step, k = divmod(k, 32)
        operand = (r >= 8) + 2 * (k % 8 >= 4)  # a0 .. a3
        lane, byte = 4 * (r % 8) + k // 8, (0, 2, 1, 3)[k % 4]
        word, field = divmod(operand, 8 // bits)
        load, word = divmod(step * (bits // 2) + word, 4)
        found = int(words[tile, unit, load, lane, word]) >> (8 * byte + bits * field)
        assert found % (1 << bits) == q[row, col]


def test_padding_is_zero():
    packed = layout.interleave(torch.full((17, 130), 3, dtype=torch.uint8), 2)
    again = layout.deinterleave(packed, 2, (32, 256))
    assert again[:17, :130].eq(3).all() and again.sum() == 3 * 17 * 130
    factors = layout.interleave_factors(torch.ones(17, 5), torch.ones(17, 5))
    assert factors.shape == (2, 8, 8, 2, 2) and factors.sum() == 2 * 17 * 5


def test_factors_lie_beside_each_other():
    scale = torch.arange(33 * 6.0).view(33, 6)
    factors = layout.interleave_factors(scale, -scale)
    for row, group in ((0, 0), (8, 5), (15, 3), (32, 1), (23, 4)):
        pair = factors[row // 16, group, row % 8, row % 16 // 8]
        assert pair.tolist() == [scale[row, group], -scale[row, group]]
    rows = layout.interleave_factors(scale[:, :1], -scale[:, :1])
    assert rows.shape == (3, 16, 2) and rows[1, 3].tolist() == [scale[19, 0], -scale[19, 0]]


# Right


@pytest.mark.parametrize("case, launches", LAUNCHES, ids=lambda of: "-".join(str(n).removeprefix("torch.") for n in of))
def test_right_on_hostile_shapes(case, launches):
    Wq, x, out = problem(*case)
    before, found = (Wq.packed.clone(), Wq.factors.clone(), x.clone()), []
    for pdl in launches:
        if pdl:
            still_running(writes=(x, out))
        assert lowbit.gemv(Wq, x, out=out.fill_(torch.nan), pdl=pdl) is out
        close(out, Wq, x)
        assert fences_stand(out)
        assert all(map(torch.equal, before, (Wq.packed, Wq.factors, x)))
        found.append(out.clone())
    assert torch.equal(found[0], found[-1])
    assert torch.equal(lowbit.gemv(Wq, x, pdl=pdl), out)


@settings(max_examples=6, deadline=None)
@given(
    heights=some.tuples(some.integers(1, 70), some.integers(1, 70)),  # of two matrices for one kernel
    groups=some.integers(1, 12),
    group=some.sampled_from([32, 64, 128]),
    bits=some.sampled_from([8, 4, 2]),
    m=some.integers(1, 16),
)
def test_right_on_any_shape(heights, groups, group, bits, m):
    for rows in heights:
        Wq, x, out = problem(rows, groups * group, bits, group, m)
        close(lowbit.gemv(Wq, x, out=out), Wq, x)
        assert fences_stand(out)


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_x_may_lie_anywhere(skip):
    Wq, x, out = problem(33, 384, 4, 128, 3, skip=skip)
    close(lowbit.gemv(Wq, x, out=out), Wq, x)


@pytest.mark.parametrize("rows, m, skip", [(1, 5, 0), (37, 5, 2), (30, 6, 1), (48, 16, 0)])
def test_sums_of_splits_of_any_number_go_anywhere(rows, m, skip):
    """Four at a time where their number is a multiple of it, and y is written in larger words where it lies so."""
    Wq, x, _ = problem(rows, 14336, 4, 128, m)
    out = between(torch.full((m, rows), torch.nan, dtype=HALF), FENCE, skip=skip)
    _, merge = top.launch(Wq, x, out, False, check_races=True)
    close(out, Wq, x)
    assert fences_stand(out) and merge.grid[0] == -(-m * rows // 512)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("m", [1, 16])
def test_whole_numbers_come_out_exactly(bits, m):
    """Every code against every position: with whole numbers nothing is rounded, up to the last bit."""
    rows, cols = 48, 512
    rng = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=rng, dtype=torch.uint8)
    codes[0], codes[8] = (1 << bits) - 1, 0
    zero = torch.randint(0, 1 << bits, (rows, 4), generator=rng).half()
    Wq = lowbit.QuantizedWeight(codes, torch.full((rows, 4), 0.5, dtype=HALF), zero, bits, 128, HALF)
    x = torch.randint(-1, 2, (m, cols), generator=rng).half() / 16
    right = wanted(Wq, x)
    assert torch.equal(lowbit.gemv(Wq, x).double(), right.half().double())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_each_weight_alone(bits):
    """x is 1 in one column: y is that column of the dequantised weights, rounded to x's dtype."""
    Wq, _, _ = problem(33, 512, bits, 128, 1)
    columns = [0, 3, 4, 15, 16, 31, 32, 63, 64, 127, 128, 200, 255, 256, 510, 511]
    y = lowbit.gemv(Wq, torch.eye(512, dtype=HALF)[columns])
    assert torch.equal(y.T, wanted(Wq, torch.eye(512)[columns]).T.half())


@pytest.mark.parametrize("dtype, size", [(HALF, 6e4), (HALF, 1e-6), (BRAIN, 1e30), (BRAIN, 1e-30)], ids=str)
@pytest.mark.parametrize("m", [1, 6])
def test_x_of_any_size(dtype, size, m):
    Wq, x, out = problem(20, 512, 4, 128, m, dtype, SINGLE)
    x.copy_(torch.rand(x.shape) * 2 - 1).mul_(size)
    scale = Wq.scale / 64 if size > 1 else Wq.scale * 1e4  # so that the result is neither infinite nor subnormal
    close(lowbit.gemv(Wq := lowbit.QuantizedWeight(Wq.codes(), scale, Wq.zero, 4, 128, dtype), x, out=out), Wq, x)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("m", [1, 16])
def test_outliers_take_no_more_than_promised(bits, m):
    """One number a thousand times the others: as digits, x is rounded to 2**-21 of twice the largest in a slice. More
    rows have float32 sums of a group, of numbers up to 2**(bits + 3) times a column of x."""
    Wq, x, _ = problem(64, 4096, bits, 128, m)
    rows = x.view(m, -1)
    rows[:, 100] = 3000
    slices = rows.double().clone()
    scale, zero = (t.double()[:, :, None] for t in (Wq.scale, Wq.zero))
    W = ((Wq.codes().double().unflatten(1, (32, -1)) - zero) * scale).flatten(1)
    if m == 1:
        slices[:, :256] = (slices[:, :256] * 2**9).round() / 2**9  # the warp that has it owns 256 columns
        rest = 2.0 ** (3 - 21) * W.abs().sum(1)
    else:
        sums = rows.double().abs().view(m, 32, 128).sum(2) @ scale[:, :, 0].T
        rest = 2.0**-22 * 2 ** (bits + 3) * sums
    allowed = (rest + 2.0**-10 * (slices @ W.T).abs() + 2e-3).view(m, -1)
    off = (lowbit.gemv(Wq, x).double().view(m, -1) - slices @ W.T).abs()
    assert (off <= allowed).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_x_of_one_sign(bits, dtype):
    """The most that is added to a sum and taken off again, beside weights that almost cancel."""
    Wq, x, out = problem(48, 512, bits, 128, 16, dtype)
    Wq = lowbit.QuantizedWeight(Wq.codes(), Wq.scale, torch.full_like(Wq.zero, 2 ** (bits - 1)), bits, 128, dtype)
    close(lowbit.gemv(Wq, x.abs_(), out=out), Wq, x)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("m", [1, 6])
def test_codes_close_to_the_zero_and_x_of_one_sign(group, m):
    """A few weights far off make the scale large, so that the others' codes are the zero or next to it: what stays on
    the codes, and is taken off a long sum later, would cost the digits of that sum. Cards cut sums off, too."""
    torch.manual_seed(m)
    W, x = torch.randn(16, 4096), torch.rand(m, 4096) + 0.5
    W[:, 7::128], W[:, 9::128] = 127, -127
    x[:, 7::128] = x[:, 9::128] = 0
    Wq, x = lowbit.quantize(W, 8, group, scale_dtype=torch.float32), x.to(HALF)
    wanted = x.double() @ Wq.dequantize(torch.float64).T
    assert (lowbit.gemv(Wq, x).double() - wanted).norm() / wanted.norm() < 3e-4


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("group", [128, 32, None])
@pytest.mark.parametrize("m", [3, 6])
def test_what_is_not_finite_stays_in_its_row(bad, group, m):
    Wq, x, out = problem(40, 384, 4, group, m)
    x[1, 200] = bad
    lowbit.gemv(Wq, x, out=out)
    assert out[1].isnan().all() if m == 3 or bad != bad else not out[1].isfinite().any()
    close(out[[0, 2]], Wq, x[[0, 2]])


def test_zero_and_nothing():
    Wq, x, out = problem(40, 384, 2, 32, 2)
    x.zero_()
    assert (lowbit.gemv(Wq, x, out=out) == 0).all()
    still = lowbit.QuantizedWeight(Wq.codes(), Wq.scale * 0, Wq.zero, 2, 32, HALF)  # groups of equal weights
    assert (lowbit.gemv(still, torch.ones_like(x)) == 0).all()


def test_a_row_of_x_does_not_see_the_others():
    Wq, x, _ = problem(40, 512, 4, 128, 16)
    whole = lowbit.gemv(Wq, x)
    assert torch.equal(lowbit.gemv(Wq, x.flip(0).contiguous()), whole.flip(0))
    assert torch.equal(lowbit.gemv(Wq, x[:9].contiguous()), whole[:9])


# The ring: on a card of three multiprocessors its slots are used again and again

ROUNDS = [
    (150, 4096, 4, 128, 1),
    (150, 4096, 8, None, 1),
    (120, 4096, 2, 32, 2),
    (210, 1408, 4, 64, 16),
    (130, 1408, 8, None, 11),
    (100, 14336, 4, 128, 3),
]


@pytest.mark.parametrize("case", ROUNDS, ids=str)
def test_the_ring_goes_round(case, monkeypatch):
    monkeypatch.setattr(top, "_room", lambda device: (3, 100 * 1024 if case[-1] < 3 else ROOM))
    Wq, x, out = problem(*case)
    lowbit.gemv(Wq, x, out=out)
    close(out, Wq, x)
    assert fences_stand(out)
    report = counters(Wq, x, check_races=True)
    assert report.grid[0] * report.grid[1] <= 3


def test_many_phases_of_sums():
    Wq, x, out = problem(1700, 256, 4, 128, 1)
    found = plan(1700, 256, 1, 4, 128, 2, 3, ROOM, tiles_in_phase=2)
    assert found.teams > 1
    report = top.kernel(found, HALF, HALF)(
        found.grid, found.block, Wq.packed, Wq.factors, x, out, 1700, 256, 1, shared=found.shared, check_races=True
    )
    assert report.grid == (3, 1, 1)
    close(out, Wq, x)


MISTAKES = {  # where, what stands there, what is put in its place
    "waits for one group too few": ("unit.cuh", "ring.wait_full();", "copy_async_wait<R::STAGES>();"),
    "does not wait for the other lanes' scales": (
        "unit.cuh",
        "ring.wait_full();\n        __syncwarp();",
        "ring.wait_full();",
    ),
    "asks into a slot that is still read": (
        "unit.cuh",
        "prefetch(lane_slot + ring.slot * ",
        "prefetch(lane_slot + (ring.slot < R::STAGES - 1 ? ring.slot + 1 : 0) * ",
    ),
    "adds up without a barrier": ("few_rows.cu", "so one barrier is enough\n        __syncthreads();", ""),
    "has one set of sums": ("few_rows.cu", "set ^= 1", "set ^= 0"),
}


MISTAKES_WITH_X = {  # on its way through the shared memory
    "does not wait for x": (
        "many_rows.cu",
        "<STAGES_BESIDE_X - R::STAGES_BEFORE_WAIT>();",
        "<STAGES_BESIDE_X - R::STAGES_BEFORE_WAIT + 1>();",
    ),
    "does not wait for what the other lanes copied": (
        "many_rows.cu",
        "<STAGES_BESIDE_X - R::STAGES_BEFORE_WAIT>();\n        __syncwarp();",
        "<STAGES_BESIDE_X - R::STAGES_BEFORE_WAIT>();",
    ),
    "asks for weights over another warp's x": (
        "many_rows.cu",
        "        __syncthreads(); // from here on",
        "        // from here on",
    ),
}


def expect_seen(tmp_path, mistake, found, rows, cols, m):
    """The kernel is right with this plan, 4 bits and groups of 128; with a mistake in a copy the machine stops."""
    file, right, wrong = mistake
    text = (top.HERE / file).read_text()
    assert text.count(right) == 1
    shutil.copytree(top.HERE.parent / "device", tmp_path / "device")
    shutil.copytree(top.HERE, tmp_path / "lowbit", ignore=shutil.ignore_patterns("*.py", "measured", "__pycache__"))
    (tmp_path / "lowbit" / file).write_text(text.replace(right, wrong))
    Wq, x, out = problem(rows, cols, 4, 128, m)
    launch = found.grid, found.block, Wq.packed, Wq.factors, x, out, rows, cols, m
    top.kernel(found, HALF, HALF)(*launch, shared=found.shared, check_races=True)
    close(out, Wq, x)
    planted = cuda.load(tmp_path / "lowbit" / found.source, list(found.options("__half", "__half"))).gemv
    with pytest.raises(simt.SimtError):  # a race, or a read of shared memory that has not come yet
        planted(*launch, shared=found.shared, check_races=True)


@pytest.mark.parametrize("what", MISTAKES_WITH_X)
def test_the_machine_would_see_a_mistake_with_x(what, tmp_path):
    found = plan(300, 4096, 16, 4, 128, 2, 3, ROOM, tiles_in_phase=1)
    assert found.x_through_shared and 0 < found.stages_beside_x < found.stages
    expect_seen(tmp_path, MISTAKES_WITH_X[what], found, 300, 4096, 16)


@pytest.mark.parametrize("what", MISTAKES)
def test_the_machine_would_see_a_mistake(what, tmp_path):
    found = plan(200, 2048, 1, 4, 128, 2, 3, ROOM, tiles_in_phase=1, most_stages=2)
    expect_seen(tmp_path, MISTAKES[what], found, 200, 2048, 1)


# The plan, the code and the counters


@pytest.mark.parametrize("m", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("bits, group", [(8, 0), (8, 32), (4, 128), (4, 32), (2, 64), (2, 0)])
def test_a_plan_fits_and_covers(bits, group, m):
    for rows, cols in [*SHAPES, (1, 128), (100000, 256), (17, 131072), (8192, 28672), (3, 8320)]:
        for processors, room in ((132, ROOM), (108, 163 * 1024), (16, 99 * 1024)):
            found = plan(rows, cols, m, bits, group, 2, processors, room)
            assert found.shared <= room and found.block == 32 * found.warps_per_team * found.teams <= 512
            assert found.x_rows >= m and found.stages >= 1
            assert found.stages >= found.stages_beside_x >= found.stages_before_wait
            if found.x_through_shared:  # the first stages and x beside each other
                slot = found.warps * found.stage_units * (256 * bits + (128 // group * 64 if group else 0))
                through = found.warps * found.units * 256 * max(8, found.x_rows)
                assert found.stages_beside_x * slot + through <= found.shared
            assert found.splits * found.warps_per_team * found.units >= -(-cols // 128)
            assert found.grid[0] <= -(-rows // 16) and found.grid[1] == found.splits


# rows, cols, m, bits, group, pdl, room: grid, block, shared memory; warps of a team, teams, units of a warp; units of a
# stage, stages, stages before the wait; tiles in a phase, and stages beside x. As they were when they were measured.
PLANS = {
    (4096, 4096, 1, 4, 128, False, ROOM): ((132, 1), 512, 88992, 16, 1, 2, 2, 2, 0, 2, 2),
    (14336, 4096, 1, 2, 128, True, ROOM): ((132, 1), 512, 153904, 16, 1, 2, 2, 7, 1, 7, 7),
    (4096, 14336, 4, 4, 128, True, ROOM): ((33, 4), 448, 211776, 14, 1, 2, 2, 4, 1, 8, 4),
    (14336, 4096, 2, 8, 0, False, ROOM): ((132, 1), 512, 146784, 16, 1, 2, 1, 3, 0, 7, 3),
    (4096, 4096, 16, 4, 128, False, ROOM): ((132, 1), 512, 200704, 16, 1, 2, 1, 4, 0, 2, 4),
    (4096, 14336, 8, 8, 0, True, ROOM): ((33, 4), 448, 210688, 14, 1, 2, 1, 5, 2, 8, 5),
    (3, 9000, 7, 8, 0, False, ROOM): ((1, 4), 288, 73728, 9, 1, 2, 1, 2, 1, 1, 2),
    (14336, 4096, 16, 8, 0, False, ROOM): ((132, 1), 512, 232448, 16, 1, 2, 1, 4, 1, 2, 3),
    (8192, 28672, 1, 8, 0, False, ROOM): ((33, 4), 448, 130528, 14, 1, 4, 1, 3, 0, 16, 3),
    (8192, 28672, 8, 8, 0, False, ROOM): ((33, 4), 448, 231424, 14, 1, 4, 1, 6, 1, 3, 4),
    (5120, 5120, 4, 4, 128, True, ROOM): ((132, 1), 448, 190912, 14, 1, 3, 3, 2, 0, 3, 2),
    (5120, 5120, 16, 4, 128, True, ROOM): ((33, 4), 320, 149760, 10, 1, 1, 1, 10, 1, 1, 10),
    (4096, 14336, 16, 4, 128, False, ROOM): ((33, 4), 224, 231424, 7, 1, 4, 4, 5, 0, 8, 3),
    (8192, 28672, 16, 2, 128, True, ROOM): ((18, 7), 256, 231424, 8, 1, 4, 4, 8, 1, 4, 5),
    (17, 131072, 9, 4, 32, True, 48 * 1024): ((1, 32), 256, 46080, 8, 1, 4, 1, 2, 1, 1, 2),
}


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_plans_stay_as_they_were_measured(case):
    rows, cols, m, bits, group, pdl, room = case
    of = plan(rows, cols, m, bits, group, 2, 132 if room == ROOM else 16, room, cols % 8 == 0, pdl)
    who = of.warps_per_team, of.teams, of.units
    when = of.stage_units, of.stages, of.stages_before_wait, of.tiles_in_phase, of.stages_beside_x
    assert (of.grid, of.block, of.shared, *who, *when) == PLANS[case]


def test_a_card_too_small_for_a_plan():
    with pytest.raises(ValueError, match="m = 3 needs more shared memory for a block than this card's 16384 bytes"):
        plan(8192, 28672, 3, 4, 32, 2, 16, 16 * 1024)


# Registers go with the bits, and with how many units a warp has: all bits where it has 2, and where 7. The other two
# shapes that are measured differ from the first of these in the stages of the ring and the tiles between two barriers.
ASSEMBLED = [(shape, *bits) for shape in SHAPES[1:3] for bits in ((8, 0), (4, 128), (2, 128))]
ASSEMBLED += [(SHAPES[0], 4, 128), (SHAPES[3], 2, 128)]


@pytest.mark.parametrize("shape, bits, group", ASSEMBLED, ids=str)
def test_registers_are_enough(shape, bits, group):
    for m in (1, 16):
        found = plan(*shape, m, bits, group, 2, 132, ROOM)
        used = top.kernel(found, HALF, HALF).module.resources()["gemv"]
        assert used["registers"] * found.block <= 65536 and used["spill_stores"] <= (0 if m == 1 else 32)


def test_few_instructions_a_weight():
    """The loop of the machine code, from one cp.async wait to its end: what a lane does for its weights."""
    # A weight, with what is done once a unit and once a tile. At 2 bits a unit is short, and the shuffle that keeps
    # NVRTC 13.0 from a wrong copy shows: 1.117 there.
    most = {8: 1.1, 4: 1.1, 2: 1.13}
    for bits, group in ((8, 0), (4, 128), (2, 128)):
        found = plan(14336, 4096, 1, bits, group, 2, 132, ROOM)
        code = top.kernel(found, HALF, HALF).module.sass("gemv")
        lines = [line for line in code.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+\S", line)]
        waits = [i for i, line in enumerate(lines) if "DEPBAR" in line and "LDGDEPBAR" not in line]
        ends = [i for i, line in enumerate(lines) if "BAR.SYNC" in line]
        weights = 64 * found.units  # of a lane, 16 · 128 of a unit for 32 lanes
        count = min(end for end in ends if end > waits[-1]) - waits[0]
        assert count / weights < most[bits], (bits, count)
        assert sum("IMMA" in line for line in lines[waits[0] :]) == 4 * found.units
        assert not any(re.search(r"\b(I2FP?|F2F|PRMT|I2I)\b.*U8", line) for line in lines[waits[0] :])  # no conversion


@pytest.mark.parametrize("rows, cols, m", [(448, 4096, 16), (224, 14336, 11), (448, 4096, 7)])
def test_counters_with_more_rows(rows, cols, m, monkeypatch):
    """Each byte once, x once a block, and no two lanes of a request in one bank."""
    monkeypatch.setattr(top, "_room", lambda device: (4, ROOM))
    Wq, x, _ = problem(rows, cols, 4, 128, m)
    report = counters(Wq, x)
    splits = report.grid[1]
    sectors = report.counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    assert sectors == (Wq.packed.nbytes + Wq.factors.nbytes + report.grid[0] * x.nbytes) // 32
    for way in ("ld", "st"):
        conflicts = report.counters[f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{way}.sum"]
        assert conflicts <= 0.01 * report.counters[f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{way}.sum"], way
    assert report.grid[0] * splits == 4 and (splits > 1) == (cols == 14336)


def test_counters_of_loads():
    Wq, x, _ = problem(528, 4096, 4, 128, 1)
    report = counters(Wq, x)
    requests, sectors = (
        report.counters[f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum"] for what in ("requests", "sectors")
    )
    blocks = report.grid[0]
    weights = Wq.packed.nbytes // 32 + Wq.factors.nbytes // 32
    assert sectors == weights + blocks * x.nbytes // 32  # each byte once, and x once a block
    assert requests == Wq.packed.nbytes // 512 + Wq.factors.nbytes // 128 + blocks * x.nbytes // 256
    assert report.counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] <= 0.1 * requests


def test_counters_of_the_sums_of_splits():
    """Where columns are split, the second kernel is reported, too: it reads every part once and writes y once."""
    Wq, x, _ = problem(64, 40000, 4, 64, 1)
    first, merge = lowbit.counters("gemv", Wq, x)
    splits = first.grid[1]
    assert splits > 1 and merge.grid == (1, 1, 1) and merge.block == (128, 1, 1)
    assert merge.counters["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] == splits
    assert merge.counters["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] == 1
