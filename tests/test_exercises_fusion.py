"""The exercises of chapter 05: stubs say so, solutions pass, planted wrong answers are rejected."""

import pytest
from exercise_tools import expect_one_verdict, expect_rejected, load, printed
from wrong import fusion as wrong

from exercises.checks import fusion as checks

NAME = "05_fusion"
ANSWERS = {
    1: ("unfused_cost", "fused_cost", "tokens_for_half"),
    2: ("bias_residual_source",),
    3: ("add_norm_source",),
    4: ("norm_residual_source",),
    5: ("layer_norm_gemv_source",),
}
RUNS_ALREADY = 4  # the stub of "find the bug" is code that runs
WRONG = wrong.WRONG


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
        assert exercise.message.startswith("not yet: at n = 1: kernel norm_residual: race on")
        assert "partial" in exercise.message
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


@pytest.mark.parametrize("place", range(3))
def test_each_part_of_exercise_1_counts(place, stubs, solutions, capsys):
    answer = [*solutions[1]]
    answer[place] = stubs[1][place]
    assert judge(1, *answer).message == "not done yet"


@pytest.mark.parametrize("number", ANSWERS)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    expect_one_verdict(lambda: judge(number, *solutions[number]), 3, capsys)


@pytest.mark.parametrize("number, mistake", [(n, mistake) for n in WRONG for mistake in WRONG[n]])
def test_wrong_answer_is_rejected(number, mistake, capsys):
    answer, says = WRONG[number][mistake]
    expect_rejected(judge(number, *answer), says)


@pytest.mark.parametrize("number", ANSWERS)
def test_enough_wrong_answers_are_planted(number):
    assert len(WRONG[number]) >= 3


RIGHT = {2: wrong.BIAS_RESIDUAL, 3: wrong.ADD_NORM, 4: wrong.NORM_RESIDUAL, 5: wrong.LAYER_NORM}


@pytest.mark.parametrize("number", RIGHT)
def test_what_the_wrong_answers_are_made_of_is_right(number, capsys):
    """Otherwise they might be rejected for something else."""
    exercise = judge(number, RIGHT[number])
    assert exercise.passed, exercise.message


def test_the_numbers_of_the_statement(solutions):
    unfused, fused, half = solutions[1]
    assert (unfused(1, 1, 1, 1), fused(1, 1, 1, 1), half(1, 1)) == ((7, 20), (2, 10), 1)


@pytest.mark.parametrize("given", [None, 3, b"int x;", "", "not CUDA at all", "/* no end", lambda: 0])
def test_a_check_bears_whatever_a_source_is(given, capsys):
    for number in RIGHT:
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


@pytest.mark.parametrize("given", [None, 3, "two", (1,), (7, None), (7.0, 20), (True, 20), [], (7, 20, 1)])
def test_a_check_bears_whatever_a_cost_is(given, solutions, capsys):
    exercise = judge(1, lambda hidden, ffn, tokens, size: given, *solutions[1][1:])
    assert not exercise.passed and exercise.message.startswith("not yet: ")
    assert "raised" not in exercise.message


# Right answers that are not the solution's

SHARED = """
extern "C" __global__ void add_norm(float *h, float *delta, const float *weight, int cols, float eps) {
    __shared__ float partial[32], kept[4096];
    size_t base = (size_t)blockIdx.x * cols;
    float squares = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        float sum = h[base + c] + delta[base + c];
        h[base + c] = kept[c] = sum;
        squares += sum * sum;
    }
    float scale = 1 / sqrtf(block_sum(squares, partial) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) delta[base + c] = kept[c] * (scale * weight[c]);
}
"""
SHIFTED = wrong.changed(
    wrong.LAYER_NORM,
    ("    float wxg", "    float first = x[0];\n    float wxg"),
    ("v = x[c]", "v = x[c] - first"),
)[0]  # subtracts a guess of the mean: no digits are lost
TWO_WARPS = wrong.changed(
    wrong.BIAS_RESIDUAL,
    ("int r = blockIdx.x * 32 + lane;", "int r = blockIdx.x * 32 + lane, last = blockDim.x / 32 - 1;"),
    ("warp == 0 &&", "warp == last &&"),
)[0]

IN_SHARED = wrong.changed(
    wrong.BIAS_RESIDUAL,
    (
        wrong.EPILOGUE,
        """    int r = blockIdx.x * 32 + lane;
    if (warp == 0) sums[lane] = r < rows ? h[r] + bias[r] : 0;
    __syncthreads();
    if (lane == 0) atomicAdd(sums + warp, sum);
    __syncthreads();
    if (warp == 0 && r < rows) h[r] = sums[lane];
""",
    ),
)[0]  # atomics on shared memory are no requests


@pytest.mark.parametrize(
    "number, source",
    [(3, wrong.ADD_NORM[: wrong.ADD_NORM.index('extern "C"')] + SHARED), (5, SHIFTED), (2, TWO_WARPS), (2, IN_SHARED)],
)
def test_other_ways_pass(number, source, capsys):
    exercise = judge(number, source)
    assert exercise.passed, exercise.message


def test_the_notebook_prints_what_the_checks_say():
    said = printed("exercises", NAME)
    assert len(said) == len(ANSWERS)
    assert all(text.count("\n") == 1 for text in said.values())
    assert sum("not done yet" in text for text in said.values()) == len(ANSWERS) - 1
