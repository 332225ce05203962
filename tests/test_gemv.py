"""The GEMV ladder on the SIMT machine: right on hostile shapes, the counters that the chapter states, no race, and
an error before anything is written for whatever the contract does not allow."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some

import ref.gemv
import simt
from kernels import gemv
from kernels.gemv.ring_plan import ring_plan
from lab import cuda, results
from lab.cuda import disassembly
from lab.stream import still_running

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

NAMES = [rung.name for rung in gemv.RUNGS]
DTYPES = list(gemv.DTYPES)
# rows, cols: words of 2, 4, 8 and 16 bytes, one and several words of a row for a thread, and rows read in several goes
SHAPES = [(7, 97), (1, 1), (31, 1), (1, 33), (97, 7), (257, 31), (33, 258), (1, 257), (9, 516), (5, 1032)]
ROOM = 227 * 1024  # bytes of shared memory that a block may have on an H200
LONG = [(3, 4099), (2, 4104)]  # for the last two rungs only: the others have one loop, whatever the length
REQUESTS, SECTORS = ("l1tex__t_" + what + "_pipe_lsu_mem_global_op_{}.sum" for what in ("requests", "sectors"))
SHARED = "smsp__inst_executed_op_shared_{}.sum"


def run(name, *args, **options):
    return getattr(gemv, name)(*args, **options)


def problem(rows, cols, dtype, skip=0, seed=0):
    """W and x between NaNs, out full of NaN between fences."""
    rng = torch.Generator().manual_seed(seed + 1000 * rows + cols)
    W, x = torch.randn(rows, cols, generator=rng).to(dtype), torch.randn(cols, generator=rng).to(dtype)
    return (
        between(W, skip=skip),
        between(x, skip=skip),
        between(torch.full((rows,), torch.nan, dtype=dtype), FENCE, skip),
    )


def close(out, W, x):
    """Near the reference: by the norm, two roundings of the dtype or what sums in fp32 lose."""
    wanted = ref.gemv.gemv(W.double().numpy(), x.double().numpy())
    allowed = max(torch.finfo(out.dtype).eps, 1e-5)
    error = np.linalg.norm(out.double().numpy() - wanted)
    assert error <= allowed * max(np.linalg.norm(wanted), np.sqrt(wanted.size * max(1, len(x)))), error


# Right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_right_on_hostile_shapes(name, dtype):
    for rows, cols in SHAPES + LONG * (name in ("vector", "gemv")):
        W, x, out = problem(rows, cols, dtype)
        before = W.clone(), x.clone()
        assert run(name, W, x, out=out) is out
        close(out, W, x)
        assert fences_stand(out)
        assert torch.equal(W, before[0]) and torch.equal(x, before[1])


@pytest.mark.parametrize("name", NAMES)
def test_without_out_a_new_tensor_comes_back(name):
    W, x, _ = problem(33, 97, torch.float16)
    y = run(name, W, x)
    assert y.shape == (33,) and y.dtype == W.dtype and y.device == W.device and y.is_contiguous()
    close(y, W, x)


@pytest.mark.parametrize("name", ["vector", "gemv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_at_any_alignment(name, dtype):
    for skip in (1, 2, 4):
        W, x, out = problem(9, 264, dtype, skip)
        run(name, W, x, out=out)
        close(out, W, x)
        assert fences_stand(out)
        run(name, W.clone(), x, out=out.fill_(torch.nan))  # only one of the two is off
        close(out, W, x)


@pytest.mark.parametrize("name", ["vector", "gemv"])
def test_memory_that_numpy_laid_out(name):
    """What counts is the address: here an aligned view in a storage that is not."""
    home = torch.from_numpy(np.ones(1000, np.float32)[2:])
    for first in (1, 2, 3, 6):
        W = home[first : first + 40].view(5, 8)
        assert run(name, W, torch.ones(8)).tolist() == [8] * 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pdl_gives_the_same(dtype):
    for name, rows, cols in (("rows", 7, 97), ("ring", 9, 516), ("gemv", 3, 4104)):
        W, x, out = problem(rows, cols, dtype)
        still_running(writes=(x, out))
        run(name, W, x, out=out, pdl=True)
        close(out, W, x)
        assert fences_stand(out)


RINGS = [(1057, 4096), (1061, 4104), (529, 8192), (270, 14336)]  # rows, cols that ring.cu is for, with a ragged end
PRODUCTS = [*(("gemv", *shape) for shape in RINGS), ("ring", *RINGS[2])]  # tensor cores but for the last two


@pytest.mark.parametrize("name, rows, cols", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_ring_is_right(name, rows, cols, dtype):
    assert ring_plan(rows, cols, 2, 16, 132, ROOM)
    W, x, out = problem(rows, cols, dtype)
    W[3, -1], W[rows - 1, 0] = torch.inf, torch.nan
    still_running(writes=(x, out))
    run(name, W, x, out=out, pdl=True)
    assert out[3].isinf() and out[-1].isnan() and fences_stand(out)
    rest = torch.tensor([row for row in range(rows - 1) if row != 3])
    close(out[rest], W[rest], x)


def test_the_ring_has_no_race():
    W, x, _ = problem(1061, 4104, torch.float16)
    report = gemv.counters("gemv", W, x, pdl=True, check_races=True)
    assert report.grid == (132, 1, 1) and report.block[0] == ring_plan(1061, 4104, 2, 16, 132, ROOM)[1]


# On a card of three multiprocessors: slots are used again, but for the second, whose ring is just filled.
ROUNDS = [(149, 4096), (93, 4096), (111, 4104), (43, 14336)]


@pytest.mark.parametrize("rows, cols", ROUNDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_ring_goes_round(rows, cols, dtype, monkeypatch):
    """With three multiprocessors a block owns many groups of rows, or just as many as it can hold."""
    monkeypatch.setattr(gemv, "_room", lambda device: (3, ROOM))
    *_, ROWS, STAGES, BEFORE_X = ring_plan(rows, cols, 2, 16, 3, ROOM)
    owned = -(-rows // (3 * ROWS))
    assert (
        (owned == STAGES + 1 and BEFORE_X == STAGES - 1) if rows == 93 else (owned > STAGES + 1 and BEFORE_X == STAGES)
    )
    W, x, out = problem(rows, cols, dtype)
    gemv.gemv(W, x, out=out, pdl=True)
    close(out, W, x)
    assert fences_stand(out)
    assert gemv.counters("gemv", W, x, pdl=True, check_races=True).grid == (3, 1, 1)
    W[:], x[5], x[-1] = -1, torch.inf, torch.inf  # times a zero past the end of a row, or in another's sum: NaN
    gemv.gemv(W, x, out=out, pdl=True)
    assert (out == -torch.inf).all() and fences_stand(out)


MISTAKES = {  # in ring.cu or a header: (file, rows, what stands there, what is put in its place)
    "waits for one group too few": ("device/ring.cuh", 149, "STAGES * PARTS - 1 - PART", "STAGES * PARTS - PART"),
    "leaves out empty groups": (
        "gemv/ring.cu",
        149,
        "}\n        ring.filled(); // with nothing, too",
        "ring.filled(); }",
    ),
    "asks into the slot that is read next": (
        "gemv/ring.cu",
        149,
        "prefetch(ring.slot);\n        ring.advance();",
        "ring.advance();\n        prefetch(ring.slot);",
    ),
    "forgets what comes behind x": (
        "gemv/ring.cu",
        93,
        "for (int slot = S::STAGES_BEFORE_X; slot < S::STAGES; slot++) weights.prefetch(slot);",
        "",
    ),
    "adds up without a barrier": ("gemv/ring.cu", 149, "__syncthreads();", ""),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_the_machine_would_see_a_mistake_in_the_ring(what, tmp_path):
    file, rows, right, wrong = MISTAKES[what]
    for folder in ("gemv", "device"):
        shutil.copytree(gemv.HERE.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("measured", "*.py"))
    text = (tmp_path / file).read_text()
    assert text.count(right) == 1
    (tmp_path / file).write_text(text.replace(right, wrong))
    W, x, out = problem(rows, 4096, torch.float16)
    grid, block, shared, *constants = ring_plan(rows, 4096, 2, 16, 3, ROOM)
    shape = ", ".join(map(str, (block, *constants)))
    kernel = cuda.load(tmp_path / "gemv/ring.cu", [f"-DSHAPE=Shape<__half, {shape}>"]).gemv
    with pytest.raises(simt.SimtError):  # a race, or a read of shared memory that has not come yet
        kernel(grid, block, W, x, out, rows, 4096, shared=shared, check_races=True)


def test_right_when_the_word_of_x_comes_first():
    """Two words of a row for each thread: the only case in which gemv asks for x before it asks for W."""
    W, x, out = problem(3, 2 * 256 * 8, torch.float16)
    assert gemv.plan("gemv", *W.shape, 2)[-1] == 1 and gemv.plan("gemv", *W.shape, 2, pdl=True)[-1] == 0
    gemv.gemv(W, x, out=out)
    close(out, W, x)


@pytest.mark.parametrize("name", NAMES)
def test_empty_shapes(name):
    for dtype in DTYPES:
        assert run(name, torch.empty(0, 5, dtype=dtype), torch.ones(5, dtype=dtype)).shape == (0,)
        out = torch.full((3,), torch.nan, dtype=dtype)
        assert run(name, torch.empty(3, 0, dtype=dtype), torch.empty(0, dtype=dtype), out=out) is out
        assert out.tolist() == [0, 0, 0]
        assert run(name, torch.empty(0, 0, dtype=dtype), torch.empty(0, dtype=dtype)).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_in_their_rows(name, dtype):
    W, x, out = problem(37, 67, dtype)
    W[3, 66], W[20, 0], W[36, 33] = torch.nan, torch.inf, -torch.inf
    x[:] = 1
    run(name, W, x, out=out)
    special = [3, 20, 36]
    assert out[3].isnan() and out[20] == torch.inf and out[36] == -torch.inf
    rest = [row for row in range(37) if row not in special]
    close(out[rest], W[rest], x)
    x[5], W[:, 5] = torch.inf, -1  # in a row's padding to a word, infinity times 0 would be NaN
    W[[3, 20, 36]] = -1
    run(name, W, x, out=out)
    assert (out == -torch.inf).all()


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_wider_than_the_result(name):
    W, x = torch.ones(3, 288, dtype=torch.float16), torch.ones(288, dtype=torch.float16)
    W[0, :2] = torch.tensor([2048, 2])  # 2048 + 1 is no fp16, so whoever keeps a sum in fp16 loses some of the ones
    W[1], W[2, :144], W[2, 144:] = 30000, 30000, -30000  # more than an fp16 can be: at the end, and only on the way
    assert run(name, W, x).tolist() == [2048 + 2 + 286, torch.inf, 0]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_tracked_unless_there_is_out(name):
    W, x = torch.randn(7, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    y = run(name, W, x)
    close(y.detach(), W.detach(), x.detach())
    for found, wanted in zip(torch.autograd.grad(y.sum(), (W, x)), torch.autograd.grad((W @ x).sum(), (W, x))):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert not run(name, W, x, out=torch.empty(7)).requires_grad
    with torch.no_grad():
        assert not run(name, W, x).requires_grad


# Counters


def counted(name, rows, cols, dtype, **options):
    W, x, _ = problem(rows, cols, dtype)
    return gemv.counters(name, W, x, **options)


def requests(report, op="ld"):
    return report.counters[REQUESTS.format(op)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_naive_touches_a_sector_for_each_thread(dtype):
    report = counted("naive", 64, 256, dtype)
    loads = 64 * 256 // 32  # of W, and as many of x, in which all lanes want the same element
    assert requests(report) == 2 * loads
    assert report.counters[SECTORS.format("ld")] == 32 * loads + 1 * loads
    assert requests(report, "st") == 2 and report.sectors_per_request("st") == dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_warp_reads_whole_sectors_and_stores_one_result_at_a_time(dtype):
    report = counted("warp", 64, 256, dtype)
    assert requests(report) == 2 * 64 * 256 // 32
    assert report.sectors_per_request("ld") == dtype.itemsize  # 4 of 4 in fp32
    assert requests(report, "st") == 64 and report.sectors_per_request("st") == 1
    assert report.counters[SHARED.format("ld")] == report.counters[SHARED.format("st")] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_stores_32_results_at_a_time(dtype):
    report, warp = (counted(name, 64, 256, dtype) for name in ("wide", "warp"))
    assert requests(report, "st") == 2 and report.sectors_per_request("st") == dtype.itemsize  # 4 in fp32
    for key in (REQUESTS, SECTORS):
        assert report.counters[key.format("ld")] == warp.counters[key.format("ld")]
    assert report.counters[SHARED.format("st")] == 64 and report.counters[SHARED.format("ld")] == 2
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vector_asks_for_16_bytes_a_lane(dtype):
    report, wide = (counted(name, 64, 1024, dtype) for name in ("vector", "wide"))
    assert report.sectors_per_request("ld") == 16
    elements = 16 // dtype.itemsize  # of a word: a quarter of the requests in fp32, an eighth in 16 bits
    assert elements * requests(report) == requests(wide)
    assert requests(report, "st") == 64 // 8
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("skip, cols, wanted", [(0, 1028, 4), (4, 1024, 4), (0, 1026, 2), (2, 1024, 2), (1, 1024, 1)])
def test_vector_takes_the_widest_word_that_fits(skip, cols, wanted):
    W, x, _ = problem(8, 1024, torch.float16, skip)
    assert gemv.plan("vector", 8, cols, 2, min(16, 2 * skip or 16))[2] == wanted
    if cols == 1024:
        assert requests(gemv.counters("vector", W, x)) == 2 * 8 * 1024 // wanted // 32


def test_gemv_reads_a_word_of_x_once_for_all_rows_of_a_block():
    for rows, cols, dtype, pdl in ((16, 4096, torch.float16, True), (16, 4096, torch.float32, False)):
        report = counted("gemv", rows, cols, dtype, pdl=pdl)
        grid, block, VEC, WORDS, ROWS, _ = gemv.plan("gemv", rows, cols, dtype.itemsize, 16, pdl)
        assert ROWS > 1 and grid == rows // ROWS
        of_W = rows * cols // VEC // 32
        assert requests(report) == of_W + of_W // ROWS
        assert report.sectors_per_request("ld") == 16
        assert requests(report, "st") == grid
        assert report.bank_conflicts == 0


def test_gemv_conflicts_in_the_banks_only_with_eight_rows_a_block():
    """sums[8][8] has rows of 8 words: 8 rows lie in 4 banks, so each of the few requests of a block goes twice."""
    report = counted("gemv", 16, 1024, torch.float16)
    assert gemv.plan("gemv", 16, 1024, 2)[4] == 8
    assert report.bank_conflicts == sum(report.counters[SHARED.format(op)] for op in ("ld", "st"))


@pytest.mark.parametrize("name", NAMES)
def test_counters_launches_what_the_rung_launches(name):
    W, x, _ = problem(41, 130, torch.bfloat16)
    report = gemv.counters(name, W, x)
    grid, block, *_ = gemv.plan(name, 41, 130, 2, 4 if name in ("vector", "gemv") else 16)
    assert (report.kernel, report.grid, report.block) == ("gemv", (grid, 1, 1), (block, 1, 1))
    assert report.counters == gemv.counters(name, torch.nn.Parameter(W), x).counters


def test_counters_errors():
    W, x, _ = problem(3, 4, torch.float32)
    with pytest.raises(
        ValueError, match=r"counters: rung must be one of naive, warp, wide, vector, gemv, rows, ring, got 'best'"
    ):
        gemv.counters("best", W, x)
    with pytest.raises(ValueError, match=r"counters: W must have at least one row and one column, got \(0, 4\)"):
        gemv.counters("warp", W[:0], x)
    with pytest.raises(ValueError, match=r"warp: x must have shape \(4,\), got \(3,\)"):
        gemv.counters("warp", W, x[:3])
    with pytest.raises(ValueError, match="vector: pdl must be False, got True"):
        gemv.counters("vector", W, x, pdl=True)


# Races


@pytest.mark.parametrize("name", NAMES)
def test_no_race(name):
    shapes = [(70, 300, torch.float32), (9, 516, torch.float16), (2, 4104, torch.bfloat16)]
    for shape in shapes[: 3 if name in ("vector", "gemv") else 2]:
        counted(name, *shape, check_races=True)


@pytest.mark.parametrize("name", ["wide", "vector", "gemv"])
def test_the_race_check_would_see_a_missing_barrier(name):
    text = (gemv.HERE / f"{name}.cu").read_text()
    assert text.count("__syncthreads();") == 1
    W, x, out = problem(40, 600, torch.float32)
    grid, block, *constants = gemv.plan(name, 40, 600, 4)
    options = [f"-D{key}={value}" for key, value in zip(("VEC", "WORDS", "ROWS"), constants) if value]
    options.append(f"-I{gemv.HERE}")
    kernel = cuda.compile(text.replace("__syncthreads();", ""), options).gemv
    with pytest.raises(simt.SimtError):  # a race, or a read of shared memory that nothing was written to
        kernel(grid, block, W, x, out, 40, 600, check_races=True)


# How it is launched


@settings(max_examples=300, deadline=None)
@given(
    rows=some.integers(1, 1 << 33),
    cols=some.integers(1, 1 << 20) | some.integers(1, 300),
    itemsize=some.sampled_from([2, 4]),
    alignment=some.sampled_from([4, 8, 16]),
    pdl=some.booleans(),
)
def test_plans_cover_every_element_within_the_kernels_limits(rows, cols, itemsize, alignment, pdl):
    for name, each in (("naive", 256), ("warp", 8), ("wide", 32), ("vector", 8)):
        grid, block, VEC, *_ = gemv.plan(name, rows, cols, itemsize, alignment)
        assert (grid - 1) * each < rows <= grid * each
        assert block == (each if name == "naive" else 32 * each)
    grid, block, VEC, WORDS, ROWS, X_FIRST = gemv.plan("gemv", rows, cols, itemsize, alignment, pdl)
    assert (grid - 1) * ROWS < rows <= grid * ROWS
    assert VEC * itemsize <= alignment and cols % VEC == 0
    assert VEC * itemsize == alignment or cols % (2 * VEC)  # the widest
    assert block % 32 == 0 and 32 <= block <= 256 and 1 <= WORDS <= 8
    assert ROWS in (1, 2, 4, 8) and ROWS * WORDS <= 32
    assert not (X_FIRST and pdl)
    words = cols // VEC
    goes = -(-words // (block * WORDS))
    assert goes == -(-words // (256 * 8))  # no more of them than the longest batch needs
    assert goes * block * WORDS - words < goes * WORDS * 32  # threads without a word: less than a warp's in each batch


@settings(max_examples=300, deadline=None)
@given(
    rows=some.integers(1, 1 << 33),
    cols=some.integers(1, 20000) | some.integers(500, 2100).map(lambda words: 8 * words),
    itemsize=some.sampled_from([2, 4]),
    alignment=some.sampled_from([4, 8, 16]),
    multiprocessors=some.integers(2, 200),
    room=some.sampled_from([99 * 1024, 163 * 1024, ROOM]),
)
def test_the_ring_fits_and_holds_every_word(rows, cols, itemsize, alignment, multiprocessors, room):
    found = ring_plan(rows, cols, itemsize, alignment, multiprocessors, room)
    if itemsize != 2 or alignment < 16 or cols % 8:
        assert found is None
    if found is None:
        return
    grid, block, shared, WORDS, ROWS, STAGES, BEFORE_X = found
    assert block % 32 == 0 and block <= 512 and block * WORDS >= cols // 8 > block * WORDS - 32 * WORDS
    assert ROWS in (2, 4, 8) and ROWS <= rows and ROWS * WORDS <= 8 and 1 <= BEFORE_X <= STAGES
    groups = -(-rows // ROWS)
    owned = -(-groups // grid) * ROWS  # rows of a block
    assert grid * ROWS <= rows + ROWS - 1 and shared <= room
    assert STAGES * ROWS * WORDS * block * 16 + owned * (block // 32 | 1) * 4 <= shared


@pytest.mark.parametrize("cols", [4096, 14336])
def test_the_ring_reads_only_weights_before_the_wait(cols):
    """In the machine code: ACQBULK waits for the kernel ahead; what goes past the registers (LDGSTS) is W alone."""
    try:
        disassembly.find_tool()
    except RuntimeError:
        pytest.skip("needs nvdisasm, which comes with Triton")
    _, block, _, WORDS, ROWS, *stages = ring_plan(4096, cols, 2, 16, 132, ROOM)
    for product, has_mma in (("MultiplyAdds", False), ("TensorCores", True)):
        shape = ", ".join(map(str, ("__half", block, WORDS, ROWS, *stages, product)))
        sass = cuda.load(gemv.HERE / "ring.cu", [f"-DSHAPE=Shape<{shape}>"], arch="sm_90").sass("gemv")
        before, after = sass.split("ACQBULK")
        assert len(re.findall(r"LDG\.E\S*128", before)) == before.count("LDG.E.NA.128") == ROWS * WORDS
        assert "LDGSTS" in before and "STG" not in before
        assert len(re.findall(r"LDG\.E\S*128", after)) == WORDS and "LDG.E.NA" not in after
        assert ("HMMA" in sass) is has_mma


def test_the_plan_is_a_source_of_the_rungs_that_it_shapes():
    assert {rung.name for rung in gemv.RUNGS if "kernels/gemv/plan.py" in rung.sources} == {"vector", "gemv"}
    for rung in gemv.RUNGS:
        assert f"kernels/gemv/{rung.name}.cu" in rung.sources
        assert all((gemv.HERE.parent.parent / source).is_file() for source in rung.sources)


@pytest.mark.parametrize("cols", [4096, 14336])
def test_only_weights_are_read_before_the_wait(cols):
    """In the machine code: ACQBULK waits for the kernel ahead, NA marks what passes by L1, which is W alone."""
    try:
        disassembly.find_tool()
    except RuntimeError:
        pytest.skip("needs nvdisasm, which comes with Triton")
    *_, VEC, WORDS, ROWS, X_FIRST = gemv.plan("gemv", 4096, cols, 2, 16, True)
    options = ["-DDTYPE=__half", f"-DVEC={VEC}", f"-DWORDS={WORDS}", f"-DROWS={ROWS}", f"-DX_FIRST={X_FIRST}"]
    sass = cuda.load(gemv.HERE / "gemv.cu", options, arch="sm_90").sass("gemv")
    before, after = sass.split("ACQBULK")
    loads = r"\bLD\S*\.128\S*"
    assert len(re.findall(loads, before)) == before.count("LDG.E.NA.128") == ROWS * WORDS
    assert len(re.findall(loads, after)) == WORDS and "LDG.E.NA" not in after
    assert "STG" not in before and after.count("STG") == 1


def test_the_bytes_and_flops_of_a_call():
    W = torch.empty(5, 7, dtype=torch.float16)
    assert gemv.work(W) == (2 * (35 + 7 + 5), 70)


# Errors, before anything is written

W, x, out = torch.ones(5, 8), torch.ones(8), torch.zeros(5)
joint = torch.ones(100)
odd = torch.frombuffer(bytearray(400), dtype=torch.float32, offset=1, count=40)
ANY, LIKE = "torch.float32 or torch.float16 or torch.bfloat16", "like the first tensor"
BAD = {  # what is passed: (arguments, the error, its words)
    "W a NumPy array": ((W.numpy(), x), TypeError, "W must be a torch tensor, got ndarray"),
    "W a list": (([[1.0]], x), TypeError, "W must be a torch tensor, got list"),
    "x a NumPy array": ((W, x.numpy()), TypeError, "x must be a torch tensor, got ndarray"),
    "out a NumPy array": ((W, x, out.numpy()), TypeError, "out must be a torch tensor, got ndarray"),
    "W float64": ((W.double(), x.double()), TypeError, f"W must be of {ANY}, got torch.float64"),
    "W int32": ((W.int(), x.int()), TypeError, f"W must be of {ANY}, got torch.int32"),
    "x of another dtype": ((W, x.half()), TypeError, f"x must be of torch.float32, {LIKE}, got torch.float16"),
    "W of another dtype": ((W.bfloat16(), x), TypeError, f"x must be of torch.bfloat16, {LIKE}, got torch.float32"),
    "out of another dtype": ((W, x, out.half()), TypeError, f"out must be of torch.float32, {LIKE}, got torch.float16"),
    "W a vector": ((x, x), ValueError, "W must have shape (rows, cols), got (8,)"),
    "W of rank 3": ((W[None], x), ValueError, "W must have shape (rows, cols), got (1, 5, 8)"),
    "x a matrix": ((W, x[None]), ValueError, "x must have shape (8,), got (1, 8)"),
    "x a scalar": ((W, x[0]), ValueError, "x must have shape (8,), got ()"),
    "x too short": ((W, x[:7]), ValueError, "x must have shape (8,), got (7,)"),
    "x as long as rows": ((W, x[:5]), ValueError, "x must have shape (8,), got (5,)"),
    "out too long": ((W, x, torch.zeros(8)), ValueError, "out must have shape (5,), got (8,)"),
    "out a column": ((W, x, out[:, None]), ValueError, "out must have shape (5,), got (5, 1)"),
    "W transposed": ((torch.ones(8, 5).T, x), ValueError, "W must be contiguous, got shape (5, 8) with strides (1, 5)"),
    "W a block": (
        (torch.ones(5, 9)[:, :8], x),
        ValueError,
        "W must be contiguous, got shape (5, 8) with strides (9, 1)",
    ),
    "x strided": ((W, torch.ones(16)[::2]), ValueError, "x must be contiguous, got shape (8,) with strides (2,)"),
    "x expanded": ((W, torch.ones(1).expand(8)), ValueError, "x must be contiguous, got shape (8,) with strides (0,)"),
    "out strided": ((W, x, torch.zeros(10)[::2]), ValueError, "out must be contiguous, got shape (5,)"),
    "W unaligned": ((odd.view(5, 8), x), ValueError, "W must be aligned to its element size"),
    "x unaligned": ((W, odd[:8]), ValueError, "x must be aligned to its element size"),
    "out unaligned": ((W, x, odd[:5]), ValueError, "out must be aligned to its element size"),
    "W sparse": ((W.to_sparse(), x), ValueError, "W must be a dense tensor, got layout torch.sparse_coo"),
    "W on meta": ((W.to("meta"), x), ValueError, "W must be on the CPU or on a CUDA device, got a tensor on meta"),
    "x on meta": ((W, x.to("meta")), ValueError, "x must be on cpu, like the first tensor, got one on meta"),
    "out on meta": ((W, x, out.to("meta")), ValueError, "out must be on cpu, like the first tensor, got one on meta"),
    "out is x": ((torch.ones(8, 8), x, x), ValueError, "out must not share memory with x"),
    "out in W": ((joint[:40].view(5, 8), x, joint[35:40]), ValueError, "out must not share memory with W"),
    "out overlaps x": ((W, joint[:8], joint[7:12]), ValueError, "out must not share memory with x"),
    "out with gradients": ((W, x, torch.zeros(5, requires_grad=True)), ValueError, "out must not require gradients"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_allowed_is_named(what, monkeypatch):
    args, error, words = BAD[what]
    monkeypatch.setattr(gemv, "_launch", lambda *args, **options: pytest.fail("it was launched"))
    before = [a.clone() if isinstance(a, torch.Tensor) else None for a in args]
    for name in NAMES:
        with pytest.raises(error, match=re.escape(words)) as caught:
            run(name, *args[:2], **({"out": args[2]} if len(args) > 2 else {}))
        assert str(caught.value).startswith(f"{name}: ")
    for now, then in zip(args, before):
        if isinstance(now, torch.Tensor) and now.device.type == "cpu" and now.layout is torch.strided:
            assert torch.equal(now, then)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_these_may_not_start_early(name):
    y = torch.full((5,), 7.0)
    with pytest.raises(ValueError, match=f"{name}: pdl must be False, got True: only rows, ring and gemv wait"):
        run(name, W, x, out=y, pdl=True)
    assert (y == 7).all()
    with pytest.raises(ValueError, match="pdl must be False"):
        run(name, W[:0], x, pdl=True)  # where nothing would be launched, too


def test_neighbours_are_apart():
    home = torch.ones(53)
    y = run("gemv", home[:40].view(5, 8), home[40:48], out=home[48:])
    assert y.tolist() == [8] * 5 and (home[:48] == 1).all()


def test_the_kernel_of_the_whole_program_is_right_and_its_host_code_takes_the_steps_that_it_numbers():
    path = results.ROOT / "kernels/gemv/program.cu"
    for rows, cols in ((300, 77), (1, 1), (256, 3)):
        W, x, out = problem(rows, cols, torch.float32)
        cuda.load(path).gemv(-(-rows // 256), 256, W, x, out, rows, cols)
        close(out, W, x)
    host = path.read_text().split("\n#ifndef __CUDACC_RTC__\n")[1]
    calls = re.findall(r"\bcudaMalloc|\bcudaMemcpyHostToDevice|<<<|\bcudaGetLastError|\bcudaDeviceSynchronize", host)
    assert list(dict.fromkeys(calls)) == [
        "cudaMalloc", "cudaMemcpyHostToDevice", "<<<", "cudaGetLastError", "cudaDeviceSynchronize"
    ]  # fmt: skip
    assert not re.findall(r"^\s*cuda\w+\(", host, re.M)  # none whose error code is thrown away
