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


def ring(monkeypatch, multiprocessors=3):
    """A card of so many multiprocessors, and shorter rows in the ring than are worth it."""
    monkeypatch.setattr(gemv, "_room", lambda device: (multiprocessors, ROOM))


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


RINGS = [(97, 8193, 0, 0), (150, 8195, 3, 0), (61, 8200, 1, 4), (67, 9119, 0, 1), (43, 14337, 5, 0)]


@pytest.mark.parametrize("rows, cols, skip_W, skip_x", RINGS)
@pytest.mark.parametrize("dtype", BITS_16, ids=str)
def test_the_ring_is_right(rows, cols, skip_W, skip_x, dtype, monkeypatch):
    ring(monkeypatch)
    assert unaligned_ring_plan(rows, cols, 2, 3, ROOM)
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
    W, x, _ = problem(149, 8195, torch.float16, skip)
    report = gemv.counters("gemv", W, x, pdl=True, check_races=True)
    assert report.grid == (3, 1, 1) and report.block[0] == unaligned_ring_plan(149, 8195, 2, 3, ROOM)[1]


MISTAKES = {  # in a file: (what stands there, what is put in its place)
    "reads the first row's first word": ("begins_matrix(r) ? first_whole() : lead / VEC", "lead / VEC"),
    "reads the last row's last word": ("(ends_matrix(r) ? 0 : VEC - 1)", "VEC - 1"),
    "forgets the fringe": ("if (c < 0 && group.begins_matrix(r)) w[r][k] = load_word<VEC>(fringe);", ""),
    "forgets the other fringe": ("if (c >= 0 && group.ends_matrix(r)) w[r][k] = load_word<VEC>(fringe + VEC);", ""),
    "reads the fringe from one element further on": ("group.start[t - first]", "group.start[t - first + 1]"),
    "reads what is behind the matrix": ("t < group.tail())", "t <= group.tail())"),
    "keeps a neighbour's elements": ("                keep_columns(w[r][k], c, group.cols);\n", ""),
    "keeps one element too many": ("c + i >= cols)", "c + i > cols)"),
    "takes x from one element further on": (
        "load_word<VEC>(at + VEC), group.head()",
        "load_word<VEC>(at + VEC), group.head() ^ 1",
    ),
    "does not move halves of registers": ("8 * (bytes & 2)", "0"),
    "sees too many rows": ("has(r) && j >= low", "j >= low"),
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("pdl", [False, True], ids=["rows", "ring"])
def test_a_mistake_in_what_both_share_would_be_seen(what, pdl, tmp_path):
    """A fault of the machine, or a result that is wrong. W holds ones beside infinity, at the rows' ends."""
    right, wrong = MISTAKES[what]
    kernel, shape, shared = compiled(tmp_path, "unaligned.cuh", right, wrong, pdl)
    W, x, out = problem(37, 8195, torch.float16, skip=3)
    W[4, 0] = W[30, -1] = torch.inf
    W[0, :5] = W[-1, -5:] = 50  # so that a few elements count
    try:
        kernel(*shape, W, x, out, 37, 8195, shared=shared)
    except simt.SimtError:
        return
    rest = [row for row in range(37) if row not in (4, 30)]
    with pytest.raises(AssertionError):
        close(out[rest], W[rest], x)
        assert fences_stand(out)


BARRIERS = {  # file: what is taken out
    "unaligned.cu": ["        copy_async_wait<0>();\n        __syncthreads();", "if (begin > 0) __syncthreads();"],
    "unaligned_ring.cu": [
        "    fringe.store(fringe_words, t);\n    __syncthreads();",
        "    // 5. add up the warps' sums\n    __syncthreads();",
    ],
}


@pytest.mark.parametrize("file, text", [(file, text) for file, texts in BARRIERS.items() for text in texts])
def test_a_missing_barrier_would_be_seen(file, text, tmp_path):
    pdl, cols = file == "unaligned_ring.cu", unaligned_cols(2, torch.float16) if "begin" in text else 8195
    kernel, shape, shared = compiled(tmp_path, file, text, text.replace("__syncthreads();", ";"), pdl, cols)
    W, x, out = problem(37, cols, torch.float16)
    with pytest.raises(simt.SimtError):
        kernel(*shape, W, x, out, 37, cols, shared=shared, check_races=True)


def compiled(folder, file, right, wrong, pdl, cols=8195):
    """(kernel, (grid, block), shared bytes) for 37 rows of fp16, with a change in a file."""
    for name in ("gemv", "device"):
        shutil.copytree(gemv.HERE.parent / name, folder / name, ignore=shutil.ignore_patterns("measured", "*.py"))
    text = (folder / "gemv" / file).read_text()
    assert text.count(right) == 1
    (folder / "gemv" / file).write_text(text.replace(right, wrong))
    if pdl:
        (grid, block, shared, sizes, *more), name = unaligned_ring_plan(37, cols, 2, 3, ROOM), "unaligned_ring.cu"
    else:
        (grid, block, sizes, *more), name, shared = unaligned_plan(37, cols, 2, False), "unaligned.cu", 0
    shape = f"Shape<Sizes<__half, {', '.join(map(str, sizes))}>, {', '.join(map(str, more))}>"
    return cuda.load(folder / "gemv" / name, [f"-DSHAPE={shape}"]).gemv, (grid, block), shared


# How it is launched


def test_what_is_read_so():
    assert is_unaligned(4099, 2, 16) and is_unaligned(4096, 2, 4) and is_unaligned(4098, 2, 16)
    assert (
        not is_unaligned(4096, 2, 16)
        and not is_unaligned(4100, 2, 8)
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
    grid, block, (period, threads, words, each, line), goes, x_first, blocks = unaligned_plan(rows, cols, itemsize, pdl)
    assert block == threads and threads % 32 == 0 and 32 <= threads <= 1024 and blocks * threads <= 1152
    assert goes * threads * words >= needed(cols, itemsize, line) > (goes - 1) * threads * words
    assert (threads * words + 3) * 16 + each * threads // 8 <= 48 * 1024
    assert each in (1, 2, 4, 8) and not (x_first and pdl)
    cover(rows, cols, itemsize, period, each, grid)


@settings(max_examples=300, deadline=None)
@given(**SHAPES, multiprocessors=some.integers(2, 200), room=some.sampled_from([99 * 1024, 163 * 1024, ROOM]))
def test_the_ring_fits_and_holds_every_word(rows, cols, itemsize, multiprocessors, room):
    found = unaligned_ring_plan(rows, cols, itemsize, multiprocessors, room)
    if found is None:
        return
    grid, block, shared, (period, threads, words, each, line), stages, before_x = found
    assert block == threads and threads % 32 == 0 and threads <= 1024
    assert threads * words >= needed(cols, itemsize, line) and 1 <= before_x <= stages and each in (1, 2, 4, 8)
    groups = cover(rows, cols, itemsize, period, each)
    assert 1 <= grid <= groups
    sums = -(-groups // grid) * each * (threads // 32 | 1) * 4
    assert stages * each * words * threads * 16 + (line // 16 + threads * words + 3) * 16 + sums <= shared <= room


def needed(cols, itemsize, line):
    """Words from the start of a line to the end of a row that begins with the line's last element."""
    return -(-(line - itemsize + cols * itemsize) // 16)


def cover(rows, cols, itemsize, period, each, grid=None):
    """Each row is in one of these groups, and each group has one: as unaligned.cuh numbers them."""
    assert period * cols * itemsize % 16 == 0
    span = period * each
    groups = rows // span * period + min(period, rows % span)
    last = (rows - 1) // span * period + (rows - 1) % span % period
    assert last < groups == (groups if grid is None else grid)
    for group in {0, groups - 1, groups // 2}:
        assert group // period * span + group % period < rows
    return groups


@pytest.mark.parametrize("cols", [8195, 14337])
@pytest.mark.parametrize("ring", [False, True], ids=["rows", "ring"])
def test_only_weights_are_read_before_the_wait(cols, ring):
    """In the machine code: ACQBULK waits for the kernel ahead, NA marks what passes by L1, LDGSTS goes past registers;
    both are W alone. The fringe is read by elements (U16)."""
    try:
        disassembly.find_tool()
    except RuntimeError:
        pytest.skip("needs nvdisasm, which comes with Triton")
    if ring:
        *_, sizes, stages, before = unaligned_ring_plan(4096, cols, 2, 132, ROOM)
        kernel = gemv._unaligned("unaligned_ring.cu", torch.float16, sizes, stages, before)
    else:
        _, _, sizes, *more = unaligned_plan(4096, cols, 2, True)
        kernel = gemv._unaligned("unaligned.cu", torch.float16, sizes, *more)
    sass = kernel.module.sass("gemv", arch="sm_90")
    before, after = sass.split("ACQBULK")
    assert before.count("LDG.E.NA.128") == sizes[2] * sizes[3] and ("LDGSTS" in before) is ring
    assert not re.findall(r"LDG\.E\.128", before) and "STG" not in before and "LDG.E.NA" not in after
    assert not re.findall(r"LDGSTS\S* \[[^]]*UR", sass)  # see test_copies.py
