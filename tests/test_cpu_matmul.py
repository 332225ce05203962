"""Every rung of the matmul ladder, with every instruction set of this processor and several thread counts."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ref.matmul
from kernels.cpu_matmul import HEADERS, RUNGS, blocking, matmul, work
from lab import check, hostile_shapes, machine, plots, results
from lab.compiler import compile_c

THREADS = (1, 2, 3, 7)
ISAS = machine.isas()
ALL = [(r.name, r.function) for r in RUNGS] + [("matmul", matmul)]
SLOW = 5_000  # multiply-adds that Python loops are asked for at the most
# past the edges of tiles and panels: p 64 and 384, rows 96 and 192, columns 16, 32, 1024 and 4096
EDGES = [(3, 33, 385), (193, 31, 5), (97, 17, 65), (2, 1025, 64), (1, 4099, 2), (12, 32, 768), (25, 65, 384)]
every_rung = pytest.mark.parametrize(("name", "rung"), ALL, ids=[n for n, _ in ALL])
every_isa = pytest.mark.parametrize("isa", ISAS)


def inputs(rng, m, n, k):
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)


def out(m, n, k):
    return (m, n), np.float32


def shapes(name):
    found = [*hostile_shapes(3), *EDGES]
    return [s for s in found if np.prod(s) <= SLOW] if name == "python_loops" else found


@every_isa
@every_rung
def test_right_on_hostile_shapes_with_every_thread_count(name, rung, isa):
    # only these two share out the work, and compile anew for an instruction set
    for threads in THREADS if name in ("threads", "matmul") else (1, 7):
        if name == "python_loops" and (isa, threads) != (ISAS[0], 1):
            continue

        def run(A, B, out, threads=threads):
            return rung(A, B, out=out, threads=threads, isa=isa)

        verdict = check(run, ref.matmul.matmul, inputs, shapes(name), out=out)
        assert verdict, f"{threads} threads: {verdict}"


@every_rung
@settings(max_examples=25, deadline=None)
@given(*[st.integers(0, 40)] * 3, st.sampled_from(ISAS), st.sampled_from(THREADS), st.integers(0, 1 << 32))
def test_right_on_any_shape(name, rung, m, n, k, isa, threads, seed):
    if name == "python_loops":
        m, n, k = (size % 12 for size in (m, n, k))

    def run(A, B, out):
        return rung(A, B, out=out, threads=threads, isa=isa)

    verdict = check(run, ref.matmul.matmul, inputs, [(m, n, k)], out=out, seed=seed)
    assert verdict, str(verdict)


@every_rung
def test_whole_numbers_are_exact(name, rung):
    rng = np.random.default_rng()
    m, n, k = (9, 8, 7) if name == "python_loops" else (67, 129, 259)
    A, B = rng.integers(-9, 10, (m, k)).astype(np.float32), rng.integers(-9, 10, (k, n)).astype(np.float32)
    for isa in ISAS:
        assert np.array_equal(rung(A, B, isa=isa), ref.matmul.matmul(A, B))


@every_rung
def test_the_result_is_out_or_a_new_float32_array(name, rung):
    A, B = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    C = np.full((3, 5), np.nan, np.float32)
    assert rung(A, B, out=C) is C and (C == 4).all()
    fresh = rung(A, B)
    assert fresh.dtype == np.float32 and fresh.shape == (3, 5) and (fresh == 4).all() and fresh is not rung(A, B)


@every_rung
@pytest.mark.parametrize("shape", [(0, 0, 0), (0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 0)])
def test_empty(name, rung, shape):
    m, n, k = shape
    A, B, C = np.ones((m, k), np.float32), np.ones((k, n), np.float32), np.full((m, n), np.nan, np.float32)
    assert np.array_equal(rung(A, B, out=C), np.zeros((m, n))) and rung(A, B).shape == (m, n)


@every_isa
@every_rung
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's own, in the Python loops
def test_nan_and_infinity_reach_their_rows_and_columns_and_no_others(name, rung, isa):
    m, n, k = (7, 6, 5) if name == "python_loops" else (29, 37, 41)
    if name == "python_loops" and isa != ISAS[0]:
        return
    ones = lambda: (np.ones((m, k), np.float32), np.ones((k, n), np.float32))  # noqa: E731
    for p in (0, k - 1):
        A, B = ones()
        A[2, p], A[m - 1, p] = np.nan, -np.inf
        wanted = np.full((m, n), float(k))
        wanted[2], wanted[m - 1] = np.nan, -np.inf
        np.testing.assert_array_equal(rung(A, B, isa=isa), wanted)
        A, B = ones()
        B[p, 1], B[p, n - 1] = np.nan, np.inf
        wanted = np.full((m, n), float(k))
        wanted[:, 1], wanted[:, n - 1] = np.nan, np.inf
        np.testing.assert_array_equal(rung(A, B, isa=isa), wanted)
        A[3, p] = 0  # 0 · inf
        wanted[3], wanted[3, 1], wanted[3, n - 1] = k - 1, np.nan, np.nan
        np.testing.assert_array_equal(rung(A, B, isa=isa), wanted)


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_nothing_outside_the_arrays_is_touched():
    command = [sys.executable, "tests/fences.py", "cpu_matmul"]
    path = os.pathsep.join([str(results.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=results.ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, f"ended with {done.returncode} at: " + "\n".join(done.stderr.splitlines()[-8:])
    assert done.stdout == "no fence was touched\n"


# Bad input


def bad_calls():
    """{what: (changed arguments, the error, parts of its message)}; A is (4, 6), B is (6, 5)."""
    A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
    shared = np.ones(60, np.float32)
    read_only = np.zeros((4, 5), np.float32)
    read_only.flags.writeable = False
    inside = shared[10:30].reshape(4, 5)
    return {
        "A of another dtype": (dict(A=A.astype(float)), TypeError, ["A must be", "(m, k), got float64 (4, 6)"]),
        "A of halves": (dict(A=A.astype(np.float16)), TypeError, ["A must be a float32", "got float16"]),
        "A a list": (dict(A=A.tolist()), TypeError, ["A must be a NumPy float32", "got list"]),
        "A of one dimension": (dict(A=A[0]), ValueError, ["A must have 2 dimension(s), (m, k)", "(6,)"]),
        "A by columns": (dict(A=np.asfortranarray(A)), ValueError, ["A must be C-contiguous", "strides"]),
        "A with gaps": (dict(A=np.ones((8, 6), np.float32)[::2]), ValueError, ["A must be C-contiguous"]),
        "A of big-endian numbers": (dict(A=A.astype(">f4")), TypeError, ["A must be a float32", "got >f4"]),
        "B of another dtype": (dict(B=B.astype(int)), TypeError, ["B must be a float32", "got int64 (6, 5)"]),
        "B a list": (dict(B=B.tolist()), TypeError, ["B must be a NumPy float32", "got list"]),
        "B of another height": (dict(B=np.ones((5, 6), np.float32)), ValueError, ["B must be", "(6, n)", "(5, 6)"]),
        "B of three dimensions": (dict(B=B[None]), ValueError, ["B must have 2 dimension(s), (6, n)", "(1, 6, 5)"]),
        "B transposed": (dict(B=np.ones((5, 6), np.float32).T), ValueError, ["B must be C-contiguous", "(6, 5)"]),
        "B None": (dict(B=None), TypeError, ["B must be", "got NoneType"]),
        "out of another dtype": (dict(out=np.zeros((4, 5))), TypeError, ["out must be", "got float64 (4, 5)"]),
        "out of another shape": (dict(out=np.zeros((5, 4), np.float32)), ValueError, ["out must be", "(5, 4)"]),
        "out flat": (dict(out=np.zeros(20, np.float32)), ValueError, ["out must have 2 dimension(s)", "(20,)"]),
        "out by columns": (dict(out=np.zeros((5, 4), np.float32).T), ValueError, ["out must be C-contiguous"]),
        "out read-only": (dict(out=read_only), ValueError, ["out must be writeable, got a read-only array"]),
        "out a list": (dict(out=[[0.0] * 5] * 4), TypeError, ["out must be a NumPy", "got list"]),
        "out over A": (dict(A=shared[:24].reshape(4, 6), out=inside), ValueError, ["out must not share memory with A"]),
        "out over B": (dict(B=shared[:30].reshape(6, 5), out=inside), ValueError, ["out must not share memory with B"]),
        "no threads": (dict(threads=0), ValueError, ["threads must be between 1 and 256, got 0"]),
        "threads below none": (dict(threads=-1), ValueError, ["threads must be between 1 and 256, got -1"]),
        "too many threads": (dict(threads=257), ValueError, ["threads must be between 1 and 256, got 257"]),
        "threads True": (dict(threads=True), TypeError, ["threads must be a whole number, got True"]),
        "threads 1.5": (dict(threads=1.5), TypeError, ["threads must be a whole number, got 1.5"]),
        "an unknown isa": (dict(isa="sse9"), ValueError, ["isa must be one of", "portable", "got 'sse9'"]),
        "isa a number": (dict(isa=2), ValueError, ["isa must be one of", "got 2"]),
    }  # fmt: skip


@every_rung
@pytest.mark.parametrize("kind", bad_calls())
def test_bad_input_is_refused_and_out_is_untouched(name, rung, kind):
    changed, error, said = bad_calls()[kind]
    fixed = dict(A=np.ones((4, 6), np.float32), B=np.ones((6, 5), np.float32), out=np.full((4, 5), -7, np.float32))
    arguments = fixed | changed
    out = arguments["out"]
    before = [list(row) for row in out] if isinstance(out, list) else out.copy()
    with pytest.raises(error) as caught:
        rung(**arguments)
    message = str(caught.value)
    assert message.split(":")[0] in ({name} if name != "matmul" else {"matmul", "threads"})
    assert all(part in message for part in said), message
    assert np.array_equal(out, before)


def test_no_memory_for_the_panels_is_a_memory_error(monkeypatch):
    import kernels.cpu_matmul as room

    for name in ("panels", "five_loops", "threads"):
        rung = dict(ALL)[name]
        key = (name, ISAS[0])
        rung(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
        failing = type("Library", (), {"matmul": staticmethod(lambda *_: 1)})
        monkeypatch.setitem(room._libraries, key, failing)
        with pytest.raises(MemoryError, match=f"{name}: no memory"):
            rung(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))


def test_read_only_inputs_are_fine():
    A, B = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    A.flags.writeable = B.flags.writeable = False
    for _, rung in ALL:
        assert (rung(A, B) == 4).all()


def test_work_counts_bytes_and_flops():
    assert work(2, 3, 5) == (4 * (2 * 5 + 5 * 3 + 2 * 3), 2 * 2 * 3 * 5)


@every_isa
def test_the_sizes_of_blocks_and_panels_are_those_of_the_compiled_code(isa):
    sizes, lanes = blocking(isa), {"avx512": 16, "avx2": 8, "portable": 4}[isa]
    assert list(sizes) == ["MR", "NR", "KC", "MC", "NC"] and sizes["NR"] == 2 * lanes
    assert sizes["MC"] % sizes["MR"] == 0 and sizes["NC"] % sizes["NR"] == 0  # else a panel would be cut
    text = (results.ROOT / "kernels/cpu_matmul/block.h").read_text()
    assert f"KC = {sizes['KC']}," in text and f"MR = {sizes['MR']} }}" in text
    with pytest.raises(ValueError, match="blocking: isa must be one of .*, got 'sse9'"):
        blocking("sse9")


def test_the_picture_of_packing_shows_where_pack_a_and_pack_b_put_each_number():
    packing = """#include "block.h"
    void both(const float *A, const float *B, float *to_a, float *to_b, int64_t m, int64_t n, int64_t k) {
        pack_a(A, to_a, k, m, k);
        for (int64_t j = 0; j < n; j += NR) pack_b(B + j, to_b + j * k, n, NR, k);
    }"""
    sizes, steps = blocking("portable"), 5
    m, n = 2 * sizes["MR"], 2 * sizes["NR"]
    A, B = (
        np.arange(m * steps, dtype=np.float32).reshape(m, steps),
        np.arange(steps * n, dtype=np.float32).reshape(-1, n),
    )
    to_a, to_b = np.empty(A.size, np.float32), np.empty(B.size, np.float32)
    library = compile_c(packing, flags=machine.ISA_FLAGS["portable"], headers=HEADERS, name="packing.c")
    library.both(A, B, to_a, to_b, m, n, steps)
    picture = plots.packing_order(m, steps, sizes["MR"], sizes["NR"])
    for axis, matrix, packed in zip(picture.axes, (A, B), (to_a, to_b), strict=True):
        places = [int(text.get_text()) for text in axis.texts]  # row after row
        assert np.array_equal(packed[places], matrix.ravel())


def test_the_picture_of_the_five_loops_has_all_parts_inside_the_matrices():
    picture = plots.cache_blocks(blocking("portable"), 1000)
    for axis, parts in zip(picture.axes[1:], (2, 2, 2), strict=True):
        assert axis.get_xlabel() in "pj" and axis.get_ylabel() in "ip" and len(axis.patches) == parts
        assert all(b.get_x() + b.get_width() <= 1000 and b.get_y() + b.get_height() <= 1000 for b in axis.patches)


def test_every_rung_names_its_sources_and_all_they_include():
    assert [r.name for r in RUNGS] == [
        "python_loops", "naive", "loop_order", "tiled", "registers", "panels", "five_loops", "threads"
    ]  # fmt: skip
    for rung in RUNGS:
        assert rung.sources
        for source in rung.sources:
            included = re.findall(r'#include "(\w+\.h)"', (results.ROOT / source).read_text())
            assert set(included) <= {s.split("/")[-1] for s in rung.sources}
