"""simt.expect: what a launch may cost, as one line of somebody's test."""

import numpy as np
import pytest

import simt

TRANSPOSE = r"""
extern "C" __global__ void transpose(const float* x, float* y) {
    __shared__ float tile[32][32];
    tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
    if (threadIdx.x == 0) atomicAdd(y + threadIdx.y * 33, 1.0f);
}"""
STORES = "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"


def launch():
    x = np.arange(1024, dtype=np.float32)
    return simt.compile(TRANSPOSE)["transpose"](1, (32, 32), x, np.zeros_like(x))


@pytest.fixture(scope="module")
def report():
    return launch()


def test_what_is_so_passes(report):
    simt.expect(report, global_loads=32, global_stores=32, global_atomics=32, shared_loads=32, shared_stores=32)
    simt.expect(report, {STORES: 128}, sectors_per_load=4, sectors_per_store=4.0)
    simt.expect(report, wavefronts_per_shared_load=32, wavefronts_per_shared_store=1, bank_conflicts=32 * 31)
    simt.expect(report, bank_conflicts=(992, None), threads_per_instruction=(20, 31.99), global_loads=(None, 32))


def test_lines_are_looked_at_alone(report):
    simt.expect(report, bank_conflicts=0, shared_stores=32, shared_loads=0, line=4)
    simt.expect(report, {STORES: 128}, bank_conflicts=992, line="y[threadIdx.y * 32")
    simt.expect(report, shared_loads=32, shared_stores=32, line="tile[threadIdx.")  # two lines together
    simt.expect(report, threads_per_instruction=32, line="tile[threadIdx.")


@pytest.mark.parametrize(
    ("wanted", "line", "message"),
    [
        ({"bank_conflicts": 0}, None, "transpose: expected bank_conflicts to be 0; got 992\n    992 by line 6 `y["),
        ({"bank_conflicts": (0, 991)}, None, "to be 0 to 991; got 992"),
        ({"bank_conflicts": (None, 991)}, None, "to be 991 or less; got 992"),
        ({"sectors_per_load": (4.5, None)}, None, "to be 4.5 or more; got 4\n    4 by line 4 `tile["),
        ({"shared_loads": 1, "bank_conflicts": 7}, None, "got 32\n    32 by line 6 `"),
        ({"shared_loads": 1, "bank_conflicts": 7}, None, "\ntranspose: expected bank_conflicts to be 7"),
        ({"bank_conflicts": 1}, 4, "transpose, line 4: expected bank_conflicts to be 1; got 0"),
        ({STORES: 129}, "y[threadIdx.y * 32", f"lines with 'y[threadIdx.y * 32': expected {STORES} to be 129; got 128"),
        ({"threads_per_instruction": 32}, None, "got 28.125\n    11.3333 by line 7 `if ("),
    ],
)
def test_what_is_not_so_fails_with_the_lines_that_did_it(report, wanted, line, message):
    with pytest.raises(AssertionError) as error:
        simt.expect(report, wanted, line=line)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("wanted", "line", "kind", "message"),
    [
        ({}, None, ValueError, "nothing is expected"),
        ({"bank_conflict": 0}, None, ValueError, "'bank_conflict' is no counter of this launch"),
        ({"bank_conflicts": "0"}, None, TypeError, "bank_conflicts must be a number or a pair"),
        ({"bank_conflicts": (0, 1, 2)}, None, TypeError, "a pair"),
        ({"bank_conflicts": (None, None)}, None, TypeError, "a pair"),
        ({"bank_conflicts": True}, None, TypeError, "got True"),
        ({"bank_conflicts": float("nan")}, None, TypeError, "got nan"),
        ({"bank_conflicts": 0}, 3, ValueError, "has run no instruction on line 3"),
        ({"bank_conflicts": 0}, "tile[7]", ValueError, "has no such line in its source: 'tile"),
        ({"bank_conflicts": 0}, "__shared__", ValueError, "has run no instruction on such a line"),
        ({"bank_conflicts": 0}, "", TypeError, "line must be"),
        ({"bank_conflicts": 0}, 0, TypeError, "line must be"),
    ],
)
def test_what_means_nothing_is_an_error_of_the_test(report, wanted, line, kind, message):
    with pytest.raises(kind, match=message.replace("[", r"\[")):
        simt.expect(report, wanted, line=line)


def test_only_a_launch_that_was_counted_can_be_looked_at(report):
    with pytest.raises(TypeError, match="report must be what a launch returned, a simt.Report; got dict"):
        simt.expect(report.counters, bank_conflicts=0)
    with simt.uncounted():
        nothing = launch()
    with pytest.raises(simt.LaunchError, match="ran within simt.uncounted"):
        simt.expect(nothing, bank_conflicts=0)
