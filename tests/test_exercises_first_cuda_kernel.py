"""The exercises of chapter 03: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_tools import expect_one_verdict, expect_rejected, load, printed
from wrong.first_cuda_kernel import WRONG, grid

from exercises.checks import first_cuda_kernel as checks
from lab.exercise import Wrong

NAME = "03_first_cuda_kernel"
ANSWERS = {
    1: ("grid_for", "scale_rows_source"),
    2: ("axpy_source",),
    3: ("scale4_source",),
    4: ("fetch_rows_source",),
    5: ("gemv_t_source",),
}
RUNS_ALREADY = 4  # the stub of "find the bug" is code that runs


@pytest.fixture(scope="module")
def solutions():
    names = load("solutions", NAME)
    return {number: [names[n] for n in wanted] for number, wanted in ANSWERS.items()}


@pytest.fixture(scope="module")
def stubs():
    names = load("exercises", NAME)
    return {number: [names[n] for n in wanted] for number, wanted in ANSWERS.items()}


def judge(number, *answer):
    return getattr(checks, f"exercise_{number}")(*answer)


@pytest.mark.parametrize("number", ANSWERS)
def test_stub_is_not_done_yet(number, stubs, capsys):
    exercise = judge(number, *stubs[number])
    assert not exercise.passed
    if number == RUNS_ALREADY:
        assert exercise.message.startswith("not yet: at n = 1, cols = 1, blocks of 16 × 16: kernel fetch_rows, line ")
        assert "reads ids[1]" in exercise.message
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


def test_each_half_of_exercise_1_counts(stubs, solutions, capsys):
    for grid_for, source in ((stubs[1][0], solutions[1][1]), (solutions[1][0], stubs[1][1])):
        assert judge(1, grid_for, source).message == "not done yet"


@pytest.mark.parametrize("number", ANSWERS)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    expect_one_verdict(lambda: judge(number, *solutions[number]), 2, capsys)


@pytest.mark.parametrize("number, mistake", [(n, mistake) for n in WRONG for mistake in WRONG[n]])
def test_wrong_answer_is_rejected(number, mistake, capsys):
    answer, says = WRONG[number][mistake]
    expect_rejected(judge(number, *answer), says)


@pytest.mark.parametrize("number", ANSWERS)
def test_enough_wrong_answers_are_planted(number):
    assert len(WRONG[number]) >= 3


@pytest.mark.parametrize("given", [None, 3, b"int x;", "", "not CUDA at all", "/* no end", lambda: 0])
def test_a_check_bears_whatever_a_source_is(given, capsys):
    for number in ANSWERS:
        exercise = judge(number, *([grid] if number == 1 else []), given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


@pytest.mark.parametrize("given", [None, 3, "two", (1,), (0, None), (0.0, 1.0), (True, 2), (0, 1), [], (1, 70000)])
def test_a_check_bears_whatever_grid_for_gives(given, solutions, capsys):
    exercise = judge(1, lambda rows, cols: given, solutions[1][1])
    assert not exercise.passed and exercise.message.startswith("not yet: grid_for(")


def test_the_learners_line_is_shown(capsys):
    source = 'extern "C" __global__ void axpy(float a, const float *x, float *y, int n) {\n    y[0] = nowhere;\n}'
    message = judge(2, source).message
    assert "axpy.cu" in message and "line 2" in message or "axpy.cu(2)" in message or "axpy.cu:2" in message
    assert "nowhere" in message


def test_what_printf_writes_is_seen(solutions, capsys):
    source = solutions[2][0].replace(
        "long long threads", 'if (n == 33 && !threadIdx.x) printf("hello\\n"); long long threads'
    )
    assert judge(2, source).passed
    assert capsys.readouterr().out.startswith("printf at n = 33, 1 block of 32:\nhello\n")


def test_a_long_printf_is_cut(solutions, capsys):
    source = solutions[2][0].replace("long long threads", 'printf("hello\\n"); long long threads')
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
    assert judge(4, solutions[4][0].replace("long long", "size_t")).passed


# What stands around the checks


def test_compare_tells_unwritten_from_wrong():
    wanted = np.arange(6, dtype=np.float32).reshape(2, 3)
    checks.compare("C", wanted.copy(), wanted, "n = 6")
    got = wanted.copy()
    got[1, 2] = 7
    with pytest.raises(Wrong, match=r"wrong at n = 6: 1 of 6 elements of C differ. C\[1, 2\] is 7, expected 5"):
        checks.compare("C", got, wanted, "n = 6")
    got[1, 1] = np.nan
    with pytest.raises(Wrong, match=r"2 of 6 elements of C differ. C\[1, 1\] was never written"):
        checks.compare("C", got, wanted, "n = 6")


def test_the_notebook_prints_what_the_checks_say():
    said = printed("exercises", NAME)
    assert len(said) == len(ANSWERS)
    assert all(text.count("\n") == 1 for text in said.values())
    assert sum("not done yet" in text for text in said.values()) == len(ANSWERS) - 1
