"""The exercises of chapter 03: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.first_cuda_kernel import RIGHT, WRONG, grid

from exercises.checks import first_cuda_kernel as checks
from lab.check import unset
from lab.exercise import Wrong


class TestExercises(SourceContract):
    name, checks, right, wrong = "03_first_cuda_kernel", checks, RIGHT, WRONG
    answers = {
        1: ("grid_for", "scale_rows_source"),
        2: "axpy_source",
        3: "scale4_source",
        4: "fetch_rows_source",
        5: "gemv_t_source",
    }
    runs_already = {4: ("not yet: at n = 1, cols = 1, blocks of 16 × 16: kernel fetch_rows, line ", "reads ids[1]")}

    def around(self, number, source):
        return (grid, source) if number == 1 else (source,)


judge = TestExercises.judge


@pytest.mark.parametrize("half", ["grid_for", "scale_rows_source"])
def test_each_half_of_exercise_1_counts(half, stubs, solutions, capsys):
    names = {**solutions, half: stubs[half]}
    assert judge(1, names["grid_for"], names["scale_rows_source"]).message == "not done yet"


@pytest.mark.parametrize("given", [None, 3, "two", (1,), (0, None), (0.0, 1.0), (True, 2), (0, 1), [], (1, 70000)])
def test_a_check_bears_whatever_grid_for_gives(given, solutions, capsys):
    exercise = judge(1, lambda rows, cols: given, solutions["scale_rows_source"])
    assert not exercise.passed and exercise.message.startswith("not yet: grid_for(")


def test_the_learners_line_is_shown(capsys):
    source = 'extern "C" __global__ void axpy(float a, const float *x, float *y, int n) {\n    y[0] = nowhere;\n}'
    message = judge(2, source).message
    assert "axpy.cu" in message and "line 2" in message or "axpy.cu(2)" in message or "axpy.cu:2" in message
    assert "nowhere" in message


def test_what_printf_writes_is_seen(solutions, capsys):
    source = solutions["axpy_source"].replace(
        "long long threads", 'if (n == 33 && !threadIdx.x) printf("hello\\n"); long long threads'
    )
    assert judge(2, source).passed
    assert capsys.readouterr().out.startswith("printf at n = 33, 1 block of 32:\nhello\n")


def test_a_long_printf_is_cut(solutions, capsys):
    source = solutions["axpy_source"].replace("long long threads", 'printf("hello\\n"); long long threads')
    for _ in range(2):  # each check begins anew
        assert judge(2, source).passed
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "printf at n = 1, 1 block of 32:" and lines.count("hello") == 20
        assert lines[-2].startswith("(The rest of what printf wrote is left out.")


# Right answers that are not the solution's

RANGES = """
extern "C" __global__ void gemv_t(const float *Wt, const float *x, float *partial, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    int begin = blockIdx.y * cols / gridDim.y, end = (blockIdx.y + 1) * cols / gridDim.y;
    if (r < rows) {
        float even = 0, odd = 0;
        for (int c = begin; c < end; c += 2) {
            even += Wt[c * rows + r] * x[c];
            if (c + 1 < end) odd += Wt[(c + 1) * rows + r] * x[c + 1];
        }
        partial[blockIdx.y * rows + r] = even + odd;
    }
}"""
WHOLE_BLOCKS = """
extern "C" __global__ void axpy(float a, const float *x, float *y, int n) {
    for (int first = blockIdx.x * blockDim.x; first < n; first += gridDim.x * blockDim.x) {
        int i = first + threadIdx.x;
        if (i < n) y[i] = fmaf(a, x[i], y[i]);
    }
}"""
QUADS = """
extern "C" __global__ void scale4(const float *x, float *y, float factor, int n) {
    int q = blockIdx.x * blockDim.x + threadIdx.x, full = n / 4;
    if (q < full) {
        float4 v = ((const float4 *)x)[q];
        ((float4 *)y)[q] = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    } else if (q == full) {
        for (int i = 4 * full; i < n; i++) y[i] = x[i] * factor;
    }
}"""


@pytest.mark.parametrize("number, source", [(5, RANGES), (2, WHOLE_BLOCKS), (3, QUADS)])
def test_other_ways_pass(number, source, capsys):
    exercise = judge(number, source)
    assert exercise.passed, exercise.message


def test_size_t_is_64_bits_too(solutions, capsys):
    assert judge(4, solutions["fetch_rows_source"].replace("long long", "size_t")).passed


# What stands around the checks


def test_compare_tells_unwritten_from_wrong():
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    checks.compare("C", wanted.copy(), wanted, "n = 6")
    got = wanted.copy()
    got[1, 2] = 7
    with pytest.raises(Wrong, match=r"wrong at n = 6: 1 of 6 elements of C differ. C\[1, 2\] is 7, expected 5"):
        checks.compare("C", got, wanted, "n = 6")
    got[1, 1] = unset(1)[0]
    with pytest.raises(Wrong, match=r"2 of 6 elements of C differ. C\[1, 1\] was never set"):
        checks.compare("C", got, wanted, "n = 6")
