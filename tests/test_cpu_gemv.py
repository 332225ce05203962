"""Every rung of the GEMV ladder, with every instruction set of this processor and several thread counts."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ref.gemv
from kernels.cpu_gemv import RUNGS, gemv, half, work
from lab import check, hostile_shapes, machine, results

THREADS = (1, 2, 3, 7)
ISAS = machine.isas()
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
BEST = [("gemv", gemv, np.float32), ("gemv", gemv, np.float16)]
ALL = [(r.name, r.function, np.float16 if r.name == "half" else np.float32) for r in RUNGS] + BEST
every_rung = pytest.mark.parametrize(("name", "rung", "dtype"), ALL, ids=[f"{n}-{np.dtype(d)}" for n, _, d in ALL])
every_isa = pytest.mark.parametrize("isa", ISAS)


def inputs(dtype):
    return lambda rng, rows, cols: (
        rng.standard_normal((rows, cols)).astype(dtype),
        rng.standard_normal(cols).astype(np.float32),
    )


def out(rows, cols):
    return (rows,), np.float32


def ones(dtype, rows=11, cols=37):
    return np.ones((rows, cols), dtype), np.ones(cols, np.float32)


@every_isa
@every_rung
def test_right_on_hostile_shapes_with_every_thread_count(name, rung, dtype, isa):
    for threads in THREADS:

        def run(W, x, out, threads=threads):
            return rung(W, x, out=out, threads=threads, isa=isa)

        verdict = check(run, ref.gemv.gemv, inputs(dtype), [*hostile_shapes(2), (8, 64), (9, 65)], out=out)
        assert verdict, f"{threads} threads: {verdict}"


@every_rung
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 80), st.sampled_from(ISAS), st.sampled_from(THREADS), st.integers(0, 1 << 32))
def test_right_on_any_shape(name, rung, dtype, rows, cols, isa, threads, seed):
    def run(W, x, out):
        return rung(W, x, out=out, threads=threads, isa=isa)

    verdict = check(run, ref.gemv.gemv, inputs(dtype), [(rows, cols)], out=out, seed=seed)
    assert verdict, str(verdict)


@every_rung
def test_whole_numbers_are_exact(name, rung, dtype):
    rng = np.random.default_rng()
    W, x = rng.integers(-9, 10, (67, 259)).astype(dtype), rng.integers(-9, 10, 259).astype(np.float32)
    for isa in ISAS:
        assert np.array_equal(rung(W, x, isa=isa), ref.gemv.gemv(W, x))


@every_rung
def test_the_result_is_out_or_a_new_float32_array(name, rung, dtype):
    W, x = ones(dtype)
    y = np.full(11, np.nan, np.float32)
    assert rung(W, x, out=y) is y and (y == 37).all()
    fresh = rung(W, x)
    assert fresh.dtype == np.float32 and fresh.shape == (11,) and (fresh == 37).all() and fresh is not rung(W, x)


@every_rung
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty(name, rung, dtype, shape):
    y = np.full(shape[0], np.nan, np.float32)
    W, x = ones(dtype, *shape)
    assert np.array_equal(rung(W, x, out=y), np.zeros(shape[0], np.float32)) and rung(W, x).shape == (shape[0],)


@every_isa
@every_rung
def test_nan_and_infinity_reach_their_rows_and_no_others(name, rung, dtype, isa):
    for column in (0, 20, 31, 32, 36):  # in a vector and among the last few
        W, x = ones(dtype, 21)
        W[3, column], W[9, column], W[20, column] = np.nan, np.inf, -np.inf
        wanted = np.full(21, 37.0)
        wanted[[3, 9, 20]] = np.nan, np.inf, -np.inf
        np.testing.assert_array_equal(rung(W, x, isa=isa), wanted)
        W, x = ones(dtype, 21)
        x[column] = np.inf
        W[5, column], W[6, column] = 0, -1
        wanted = np.full(21, np.inf)
        wanted[[5, 6]] = np.nan, -np.inf
        np.testing.assert_array_equal(rung(W, x, isa=isa), wanted)
        x[column] = np.nan
        assert np.isnan(rung(W, x, isa=isa)).all()


def same_bits(got, wanted):
    """Equal to the bit; of a NaN only that it is one."""
    nan = np.isnan(wanted)
    return np.array_equal(np.isnan(got), nan) and np.array_equal(
        got[~nan].view(np.uint32), wanted[~nan].view(np.uint32)
    )


@pytest.fixture(scope="module")
def every_half():
    """All halves as float32, as a sum that begins at zero gives them: -0 becomes 0, all else stays."""
    with np.errstate(invalid="ignore"):
        return HALVES.astype(np.float32) + np.float32(0)


@every_isa
def test_every_half_is_converted_exactly(every_half, isa):
    W, x = HALVES[:, None].copy(), np.ones(1, np.float32)
    assert same_bits(half(W, x, isa=isa), every_half)
    # a subnormal half times 2^100 is an ordinary float: none may have been flushed to zero on the way
    with np.errstate(invalid="ignore"):
        scaled = every_half * np.float32(2.0**100)
    assert same_bits(half(W, x * np.float32(2.0**100), isa=isa), scaled)


@every_isa
@pytest.mark.parametrize("shift", [0, 5])
def test_every_half_is_converted_exactly_in_every_lane(every_half, isa, shift):
    lanes, rows = 16, np.arange(1 << 16)
    W = np.zeros((1 << 16, lanes), np.float16)
    W[rows, (rows + rows // lanes + shift) % lanes] = HALVES
    assert same_bits(half(W, np.ones(lanes, np.float32), isa=isa), every_half)


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_nothing_outside_the_arrays_is_touched():
    command = [sys.executable, "tests/fences.py", "cpu_gemv"]
    path = os.pathsep.join([str(results.ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=results.ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, f"ended with {done.returncode} at: " + "\n".join(done.stderr.splitlines()[-8:])
    assert done.stdout == "no fence was touched\n"


# Bad input


def bad_calls(dtype):
    """{what: (changed arguments, the error, parts of its message)}; W is (4, 6)."""
    other = np.dtype("float64")
    W = np.ones((4, 6), dtype)
    x = np.ones(6, np.float32)
    shared = np.ones(4 * 6 * 4 + 64, np.uint8)
    inside_W = shared[: W.nbytes].view(dtype).reshape(4, 6)
    inside_x = shared[:24].view(np.float32)
    tail = shared[8:24].view(np.float32)
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    floats = "float32"
    return {
        "W of another dtype": (dict(W=W.astype(other)), TypeError, ["W must be", W.dtype.name, "got float64 (4, 6)"]),
        "W of integers": (dict(W=W.astype(np.int32)), TypeError, ["W must be", "got int32"]),
        "W a list": (dict(W=W.tolist()), TypeError, ["W must be a NumPy", "got list"]),
        "W of one dimension": (dict(W=W[0]), ValueError, ["W must have 2 dimension(s), (rows, cols)", "(6,)"]),
        "W of three dimensions": (dict(W=W[None]), ValueError, ["W must have 2 dimension(s)", "(1, 4, 6)"]),
        "W by columns": (dict(W=np.asfortranarray(W)), ValueError, ["W must be C-contiguous", "strides"]),
        "W with gaps": (dict(W=np.ones((4, 12), dtype)[:, ::2]), ValueError, ["W must be C-contiguous", "(4, 6)"]),
        "W upside down": (dict(W=W[::-1]), ValueError, ["W must be C-contiguous"]),
        "W of big-endian numbers": (dict(W=W.astype(W.dtype.newbyteorder(">"))), TypeError, ["W must be", "got >f"]),
        "x of another dtype": (dict(x=x.astype(other)), TypeError, ["x must be", floats, "got float64 (6,)"]),
        "x of halves": (dict(x=x.astype(np.float16)), TypeError, ["x must be", floats, "got float16 (6,)"]),
        "x a list": (dict(x=x.tolist()), TypeError, ["x must be a NumPy float32 array of shape (6,), got list"]),
        "x too short": (dict(x=x[:5]), ValueError, ["x must be", "shape (6,)", "got float32 (5,)"]),
        "x too long": (dict(x=np.ones(7, np.float32)), ValueError, ["x must be", "shape (6,)", "got float32 (7,)"]),
        "x as long as W is high": (dict(x=np.ones(4, np.float32)), ValueError, ["x must be", "(6,)", "(4,)"]),
        "x a column": (dict(x=x[:, None]), ValueError, ["x must have 1 dimension(s), (6,)", "(6, 1)"]),
        "x with gaps": (dict(x=np.ones(12, np.float32)[::2]), ValueError, ["x must be C-contiguous"]),
        "x None": (dict(x=None), TypeError, ["x must be", "got NoneType"]),
        "out of another dtype": (dict(out=np.zeros(4)), TypeError, ["out must be", floats, "got float64 (4,)"]),
        "out of W's width": (dict(out=np.zeros(6, np.float32)), ValueError, ["out must be", "(4,)", "(6,)"]),
        "out a column": (dict(out=np.zeros((4, 1), np.float32)), ValueError, ["out must have 1 dimension(s)"]),
        "out with gaps": (dict(out=np.zeros(8, np.float32)[::2]), ValueError, ["out must be C-contiguous"]),
        "out read-only": (dict(out=read_only), ValueError, ["out must be writeable, got a read-only array"]),
        "out a list": (dict(out=[0.0] * 4), TypeError, ["out must be a NumPy", "got list"]),
        "out inside W": (dict(W=inside_W, out=tail), ValueError, ["out must not share memory with W"]),
        "out inside x": (dict(x=inside_x, out=tail), ValueError, ["out must not share memory with x"]),
        "no threads": (dict(threads=0), ValueError, ["threads must be between 1 and 256, got 0"]),
        "threads below none": (dict(threads=-1), ValueError, ["threads must be between 1 and 256, got -1"]),
        "too many threads": (dict(threads=257), ValueError, ["threads must be between 1 and 256, got 257"]),
        "threads True": (dict(threads=True), TypeError, ["threads must be a whole number, got True"]),
        "threads 1.5": (dict(threads=1.5), TypeError, ["threads must be a whole number, got 1.5"]),
        "threads a text": (dict(threads="2"), TypeError, ["threads must be a whole number, got '2'"]),
        "an unknown isa": (dict(isa="sse9"), ValueError, ["isa must be one of", "portable", "got 'sse9'"]),
        "isa a number": (dict(isa=2), ValueError, ["isa must be one of", "got 2"]),
    }  # fmt: skip


@every_rung
@pytest.mark.parametrize("kind", bad_calls(np.float32))
def test_bad_input_is_refused_and_out_is_untouched(name, rung, dtype, kind):
    changed, error, said = bad_calls(dtype)[kind]
    if name == "gemv" and kind == "W of another dtype":
        said = ["W must be", "float32 or float16", "got float64 (4, 6)"]
    arguments = dict(W=np.ones((4, 6), dtype), x=np.ones(6, np.float32), out=np.full(4, -7, np.float32)) | changed
    out = arguments["out"]
    before = list(out) if isinstance(out, list) else out.copy()
    with pytest.raises(error) as caught:
        rung(**arguments)
    message = str(caught.value)
    called = {name} if name != "gemv" else {"gemv", "prefetch", "half"}  # the best rung hands over to one of these
    assert message.split(":")[0] in called
    assert all(part in message for part in said), message
    assert np.array_equal(out, before)


@pytest.mark.parametrize("rung", [r for r in RUNGS if r.name != "half"], ids=lambda r: r.name)
def test_halves_are_refused_by_the_float32_rungs_and_the_other_way_round(rung):
    with pytest.raises(TypeError, match="W must be a float32 array .*got float16"):
        rung.function(*ones(np.float16))
    with pytest.raises(TypeError, match="W must be a float16 array .*got float32"):
        RUNGS[-1].function(*ones(np.float32))


@pytest.mark.skipif(len(ISAS) == 3, reason="this processor has every instruction set")
def test_an_instruction_set_that_is_not_there_is_refused():
    for isa in set(machine.ISA_FLAGS) - set(ISAS):
        with pytest.raises(ValueError, match="on this processor"):
            gemv(*ones(np.float32), isa=isa)


def test_the_best_rung_goes_by_dtype(monkeypatch):
    assert [r.name for r in RUNGS] == ["naive", "openmp", "simd", "rows", "prefetch", "half"]
    with pytest.raises(TypeError, match="gemv: W must be a float32 or float16 array"):
        gemv(np.ones((2, 2)), np.ones(2, np.float32))


def test_read_only_inputs_are_fine():
    for rung in RUNGS:
        W, x = ones(np.float16 if rung.name == "half" else np.float32)
        W.flags.writeable = x.flags.writeable = False
        assert (rung.function(W, x) == 37).all()


def test_work_counts_bytes_and_flops():
    assert work(np.ones((3, 5), np.float32)) == (4 * (15 + 5 + 3), 30)
    assert work(np.ones((3, 5), np.float16)) == (2 * 15 + 4 * (5 + 3), 30)


def test_every_rung_names_sources_that_exist():
    for rung in RUNGS:
        assert rung.sources and all((results.ROOT / s).is_file() for s in rung.sources)
        for source in rung.sources:
            includes = [s for s in ("vec.h",) if f'#include "{s}"' in (results.ROOT / source).read_text()]
            assert all(f"kernels/{s}" in rung.sources for s in includes)
