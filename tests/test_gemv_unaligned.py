"""GEMV of rows that begin at any element, on the SIMT machine: right wherever W and x begin, nothing outside of them is
read, what is not finite stays in its row, and no race."""

import re
import shutil
import sys

import pytest
import torch
from guarded_tensors import fences_stand
from hypothesis import given, settings
from hypothesis import strategies as some
from test_gemv import DTYPES, ROOM, close, problem

import simt
from kernels import gemv
from kernels.gemv.plan import plan
from kernels.gemv.unaligned_plan import LEAST_BYTES, is_unaligned, unaligned_plan, unaligned_ring_plan
from lab import cuda
from lab.cuda import disassembly
from lab.stream import still_running

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
BITS_16 = [torch.float16, torch.bfloat16]


def least(dtype):
    """Columns of the shortest rows that are read so."""
    return LEAST_BYTES // dtype.itemsize


FEW = 9  # multiprocessors: one phase of rows that begin anywhere has two blocks, each other has one


def ring(monkeypatch):
    """A card of few multiprocessors."""
    monkeypatch.setattr(gemv, "_room", lambda device: (FEW, ROOM))


# Right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_wherever_rows_begin(dtype):
    """W at every place in a word and x at another, and all numbers of columns from whole words to the next."""
    most = 16 // dtype.itemsize
    for skip in range(most):
        rows, cols = 3 + 5 * skip, least(dtype) + skip  # the first is whole words: only W or x is not at one
        W, _, out = problem(rows, cols, dtype, skip)
        _, x, _ = problem(rows, cols, dtype, (3 * skip + 1) % most)
        before = W.clone(), x.clone()
        assert gemv.gemv(W, x, out=out) is out
        close(out, W, x)
        assert fences_stand(out)
        assert torch.equal(W, before[0]) and torch.equal(x, before[1])


ROWS = [1, 2, 7, 8, 9, 31, 33]


@pytest.mark.parametrize("rows", ROWS)
def test_right_with_any_number_of_rows(rows):
    """The matrix's last row may be any of its group's."""
    for cols in (1025, 1026, 1028, 1289):
        W, x, out = problem(rows, cols, torch.float16, skip=rows % 8)
        gemv.gemv(W, x, out=out)
        close(out, W, x)
        assert fences_stand(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_with_long_rows(dtype):
    """Rows of one go, of more than one, and of one word more than a go."""
    for rows, cols in ((3, 4099), (2, 40001), (1, unaligned_cols(2, dtype))):
        W, x, out = problem(rows, cols, dtype, skip=1)
        gemv.gemv(W, x, out=out)
        close(out, W, x)
        assert fences_stand(out)


def unaligned_cols(goes, dtype):
    """The least number of columns of which unaligned.cu makes so many goes, and no whole words."""
    cols = least(dtype) + 1
    while unaligned_plan(9, cols, dtype.itemsize, False)[3] < goes:
        cols += 2
    return cols


def test_only_one_of_the_two_is_off():
    for skip_W, skip_x in ((1, 0), (0, 1), (4, 0), (0, 4)):
        W, _, out = problem(9, 1032, torch.bfloat16, skip_W)
        _, x, _ = problem(9, 1032, torch.bfloat16, skip_x)
        gemv.gemv(W, x, out=out)
        close(out, W, x)


def test_pdl_gives_the_same():
    for dtype in DTYPES:
        for rows, cols in ((7, least(dtype) + 1), (9, 1289)):
            W, x, out = problem(rows, cols, dtype, skip=1)
            still_running(writes=(x, out))
            gemv.gemv(W, x, out=out, pdl=True)
            close(out, W, x)
            assert fences_stand(out)


RINGS = [(97, 4099, 0, 0), (150, 5123, 3, 0), (61, 8200, 1, 4), (67, 9119, 0, 1), (43, 14337, 5, 0), (200, 4100, 2, 3)]


@pytest.mark.parametrize("rows, cols, skip_W, skip_x", RINGS)
@pytest.mark.parametrize("dtype", BITS_16, ids=str)
def test_the_ring_is_right(rows, cols, skip_W, skip_x, dtype, monkeypatch):
    ring(monkeypatch)
    assert unaligned_ring_plan(rows, cols, 2, FEW, ROOM)
    W, _, out = problem(rows, cols, dtype, skip_W)
    _, x, _ = problem(rows, cols, dtype, skip_x)
    W[3, -1], W[rows - 1, 0] = torch.inf, torch.nan
    still_running(writes=(x, out))
    gemv.gemv(W, x, out=out, pdl=True)
    assert out[3].isinf() and out[-1].isnan() and fences_stand(out)
    rest = torch.tensor([row for row in range(rows - 1) if row != 3])
    close(out[rest], W[rest], x)
    W[:], x[5], x[-1] = -1, torch.inf, torch.inf
    gemv.gemv(W, x, out=out, pdl=True)
    assert (out == -torch.inf).all() and fences_stand(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_rows(dtype):
    """The words at both ends of a row have elements of its neighbours."""
    cols = least(dtype) + 3
    W, x, out = problem(37, cols, dtype, skip=1)
    special = {
        3: (-1, torch.nan),
        20: (0, torch.inf),
        36: (cols // 2, -torch.inf),
        0: (0, torch.nan),
        8: (-1, torch.inf),
    }
    for row, (col, value) in special.items():
        W[row, col] = value
    x[:] = 1
    gemv.gemv(W, x, out=out)
    for row, (_, value) in special.items():
        assert out[row].isnan() if value != value else out[row] == value
    rest = [row for row in range(37) if row not in special]
    close(out[rest], W[rest], x)
    W[:], x[0], x[-1] = -1, torch.inf, torch.inf  # times a zero past the row's end: NaN
    gemv.gemv(W, x, out=out)
    assert (out == -torch.inf).all() and fences_stand(out)


def test_sums_are_wider_than_the_result():
    W, x = torch.ones(3, 1090, dtype=torch.float16), torch.ones(1090, dtype=torch.float16)
    W[0, :2] = torch.tensor([2048, 2])  # 2048 + 1 is no fp16
    W[1], W[2, :545], W[2, 545:] = 30000, 30000, -30000
    assert gemv.gemv(W, x).tolist() == [2048 + 2 + 1088, torch.inf, 0]


# No race, and mistakes that the machine would see


@pytest.mark.parametrize("rows, cols, dtype", [(70, 515, torch.float32), (9, 1289, torch.float16)])
def test_no_race(rows, cols, dtype):
    W, x, _ = problem(rows, cols, dtype, skip=3)
    gemv.counters("gemv", W, x, check_races=True)
    gemv.counters("gemv", W, x, pdl=True, check_races=True)


def test_no_race_where_a_row_takes_several_goes():
    W, x, _ = problem(2, unaligned_cols(2, torch.float32), torch.float32, skip=1)
    gemv.counters("gemv", W, x, check_races=True)


@pytest.mark.parametrize("skip", [0, 3])
def test_the_ring_has_no_race(skip, monkeypatch):
    ring(monkeypatch)
    W, x, _ = problem(149, 4099, torch.float16, skip)
    report = gemv.counters("gemv", W, x, pdl=True, check_races=True)
    assert report.grid == (FEW, 1, 1) and report.block[0] == unaligned_ring_plan(149, 4099, 2, FEW, ROOM)[1]


MISTAKES = {  # in unaligned.cuh: (what stands there, what is put in its place)
    "reads the first row's first word": ("first ? 0 : 1 - VEC", "1 - VEC"),
    "reads the last row's last word": ("last ? cols - VEC + 1 : cols", "cols"),
    "forgets the fringe": ("if (columns.begins_before(0)) w[0][0] = word;", ""),
    "forgets the other fringe": ("if (r == last && columns.ends_behind(k)) w[r][k] = word;", ";"),
    "takes the fringe from one element further on": (
        "(start - lead_of(start) + lane)",
        "(start - lead_of(start) + lane + 1)",
    ),
    "reads what is behind the matrix": ("lane < lead_of(end))", "lane <= lead_of(end))"),
    "reads what is in front of the matrix": ("lane >= lead_of(start) && lane < VEC", "lane < VEC"),
    "puts the fringe in every row": ("if (r == last &&", "if ("),
    "keeps a neighbour's elements": ("w[r][k].bits[i] &= bits[k][i];", ";"),
    "keeps one element too many": (
        "(unsigned)(columns.column(k) + i) < columns.cols",
        "(unsigned)(columns.column(k) + i) <= columns.cols",
    ),
    "takes x from one element further on": ("(low[k], high[k], shift)", "(low[k], high[k], shift ^ 1)"),
    "does not move halves of registers": ("8 * (bytes & 2)", "0"),
    "reads what is behind x": ("c <= cols - VEC)", "c < cols)"),
    "reads what is in front of x": ("if (c >= 0 && c <=", "if (c <="),
    "forgets the last part of x": ("if ((cols + lead) % VEC) load_part", "if (false) load_part"),
    "forgets the first part of x": ("if (lead) load_part", "if (false) load_part"),
    "takes a part of x for low alone": ("if (ahead == k * S::THREADS + 1) high[k] = part;", ""),
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("file", ["unaligned.cu", "unaligned_ring.cu"])
def test_a_mistake_in_what_both_share_would_be_seen(what, file, tmp_path):
    right, wrong = MISTAKES[what]
    assert_seen(file, changed(tmp_path, "unaligned.cuh", right, wrong))


OWN_MISTAKES = [
    ("unaligned.cu", "r < left && ", ""),
    ("unaligned.cu", "ends ? left - 1 : -1)", "ends ? ROWS - 1 : -1)"),
    ("unaligned_ring.cu", "return min(group * ROWS, count - ROWS);", "return group * ROWS;"),
    ("unaligned_ring.cu", "weights.has_last(group) ? ROWS - 1 : -1", "weights.has_last(group) ? 0 : -1"),
]


@pytest.mark.parametrize("file, right, wrong", OWN_MISTAKES)
def test_a_mistake_would_be_seen(file, right, wrong, tmp_path):
    assert_seen(file, changed(tmp_path, file, right, wrong))


def assert_seen(file, folder):
    """A fault of the machine, or a wrong result, with the one number of rows or the other."""
    assert not all(stands(file, folder, rows) for rows in ROWS_OF_MISTAKES)


def stands(file, folder, rows):
    """Whether all is well, with infinity at both ends of a row."""
    kernel, shape, shared = compiled(folder, file, rows)
    W, x, out = problem(rows, MISTAKEN_COLS, torch.float16, skip=3)
    W[4, 0] = W[30, -1] = torch.inf
    W[0, :5] = W[-1, -5:] = x[:5] = x[-5:] = 50  # so that a few elements count
    rest = [row for row in range(rows) if row not in (4, 30)]
    try:
        kernel(*shape, W, x, out, rows, MISTAKEN_COLS, shared=shared)
        close(out[rest], W[rest], x)
    except (simt.SimtError, AssertionError):
        return False
    return fences_stand(out)


ROWS_OF_MISTAKES, MISTAKEN_COLS = (70, 78), 4099  # the last row is the first of its group, and the second


def test_without_a_mistake_nothing_is_seen():
    for file in ("unaligned.cu", "unaligned_ring.cu"):
        assert all(stands(file, gemv.HERE.parent, rows) for rows in ROWS_OF_MISTAKES)


BARRIERS = [  # what is taken out of a file
    ("unaligned.cu", "[warp] = total;\n    __syncthreads();"),
    ("unaligned_ring.cu", "// 5. add up the warps' sums\n    __syncthreads();"),
]


@pytest.mark.parametrize("file, text", BARRIERS)
def test_a_missing_barrier_would_be_seen(file, text, tmp_path):
    folder = changed(tmp_path, file, text, text.replace("__syncthreads();", ""))
    kernel, shape, shared = compiled(folder, file, 70)
    W, x, out = problem(70, MISTAKEN_COLS, torch.float16)
    with pytest.raises(simt.SimtError):
        kernel(*shape, W, x, out, 70, MISTAKEN_COLS, shared=shared, check_races=True)


def changed(folder, file, right, wrong):
    """The kernels in this folder, with a change in a file."""
    for name in ("gemv", "device"):
        shutil.copytree(gemv.HERE.parent / name, folder / name, ignore=shutil.ignore_patterns("measured", "*.py"))
    text = (folder / "gemv" / file).read_text()
    assert text.count(right) == 1
    (folder / "gemv" / file).write_text(text.replace(right, wrong))
    return folder


def compiled(folder, file, rows):
    """(kernel, (grid, block), shared bytes) for so many rows of fp16."""
    cols = MISTAKEN_COLS
    if file == "unaligned_ring.cu":
        grid, block, shared, sizes, *more = unaligned_ring_plan(rows, cols, 2, FEW, ROOM)
    else:
        (grid, block, sizes, *more), shared = unaligned_plan(rows, cols, 2, False), 0
    shape = f"Shape<Sizes<__half, {', '.join(map(str, sizes))}>, {', '.join(map(str, more))}>"
    return cuda.load(folder / "gemv" / file, [f"-DSHAPE={shape}"]).gemv, (grid, block), shared


# How it is launched


def test_what_is_read_so():
    assert all(is_unaligned(cols, 2, at) for cols, at in ((4099, 16), (4096, 4), (4098, 16), (4100, 16), (4096, 8)))
    assert (
        not is_unaligned(4096, 2, 16)
        and not is_unaligned(2052, 2, 8)
        and not is_unaligned(least(torch.float16) - 1, 2, 2)
    )
    for name, taken in (("gemv", True), ("rows", False), ("vector", False)):
        W, x, _ = problem(9, 1289, torch.float16)
        report = gemv.counters(name, W, x)
        grid = (
            unaligned_plan(9, 1289, 2, False)[0] if taken else plan("gemv" if name == "rows" else name, 9, 1289, 2)[0]
        )
        assert report.grid == (grid, 1, 1)


SHAPES = {
    "rows": some.integers(1, 1 << 33),
    "cols": some.integers(300, 20000) | some.integers(1 << 20, (1 << 30) - 1),
    "itemsize": some.sampled_from([2, 4]),
}


@settings(max_examples=300, deadline=None)
@given(**SHAPES, pdl=some.booleans())
def test_every_word_has_a_thread_and_every_row_a_group(rows, cols, itemsize, pdl):
    grid, block, (period, threads, words, each), goes, blocks, product = unaligned_plan(rows, cols, itemsize, pdl)
    assert block == threads and threads % 32 == 0 and 32 <= threads <= 1024 and blocks * threads <= 1152
    assert goes * threads * words >= needed(cols, itemsize) > (goes - 1) * threads * words
    assert each in (1, 2, 4, 8) and (product == "MultiplyAdds" or itemsize == 2 and each > 1)
    assert period * cols * itemsize % 16 == 0
    span = period * each
    assert grid == rows // span * period + min(period, rows % span)
    assert (rows - 1) // span * period + (rows - 1) % span % period < grid  # the last row's group


@settings(max_examples=300, deadline=None)
@given(**SHAPES, multiprocessors=some.integers(2, 200), room=some.sampled_from([99 * 1024, 163 * 1024, ROOM]))
def test_the_ring_fits_and_holds_every_word(rows, cols, itemsize, multiprocessors, room):
    found = unaligned_ring_plan(rows, cols, itemsize, multiprocessors, room)
    if found is None:
        return
    grid, block, shared, (period, threads, words, each), stages, before_x, product = found
    assert block == threads and threads % 32 == 0 and threads <= 1024
    assert threads * words >= needed(cols, itemsize) and 1 <= before_x <= stages and each in (2, 4, 8)
    assert period * cols * itemsize % 16 == 0 and (product == "MultiplyAdds" or itemsize == 2)
    most = 0
    for phase in range(period):
        count, blocks = len(range(phase, rows, period)), len(range(phase, grid, period))
        assert count >= each and 1 <= blocks <= -(-count // each)  # each block has a group
        groups = -(-count // each)
        most = max(most, -(-groups // blocks))
    assert stages * each * words * threads * 16 + most * each * (threads // 32 | 1) * 4 <= shared <= room


def needed(cols, itemsize):
    """Words from the start of a word to the end of a row that begins with the word's last element."""
    return -(-(16 - itemsize + cols * itemsize) // 16)


@pytest.mark.parametrize("cols", [4099, 14337])
@pytest.mark.parametrize("ring", [False, True], ids=["rows", "ring"])
def test_only_weights_are_read_before_the_wait(cols, ring):
    """In the machine code: ACQBULK waits for the kernel ahead, NA marks what passes by L1, LDGSTS goes past registers;
    both are W alone. The fringe is read by elements (U16)."""
    try:
        disassembly.find_tool()
    except RuntimeError:
        pytest.skip("needs nvdisasm, which comes with Triton")
    if ring:
        _, _, _, sizes, *more = unaligned_ring_plan(4096, cols, 2, 132, ROOM)
        kernel = gemv._unaligned("unaligned_ring.cu", torch.float16, sizes, *more)
    else:
        _, _, sizes, *more = unaligned_plan(4096, cols, 2, True)
        kernel = gemv._unaligned("unaligned.cu", torch.float16, sizes, *more)
    sass = kernel.module.sass("gemv", arch="sm_90")
    before, after = sass.split("ACQBULK")
    assert before.count("LDG.E.NA.128") == sizes[2] * sizes[3] and ("LDGSTS" in before) is ring
    assert not re.findall(r"LDG\.E\.128", before) and "STG" not in before and "LDG.E.NA" not in after
    assert not re.findall(r"LDGSTS\S* \[[^]]*UR", sass)  # see test_copies.py
