"""The exercises of chapter 05: stubs say so, solutions pass, planted wrong answers are rejected."""

import pytest
from exercise_contract import SourceContract
from wrong import fusion as wrong

from exercises.checks import fusion as checks

COSTS = "unfused_cost", "fused_cost", "tokens_for_half"


class TestExercises(SourceContract):
    name, checks = "05_fusion", checks
    wrong, right = wrong.WRONG, {2: wrong.BIAS_RESIDUAL, 3: wrong.ADD_NORM, 4: wrong.NORM_RESIDUAL, 5: wrong.LAYER_NORM}
    answers = {
        1: COSTS,
        2: "bias_residual_source",
        3: "add_norm_source",
        4: "norm_residual_source",
        5: "layer_norm_gemv_source",
    }
    runs_already = {4: ("not yet: at n = 1: kernel norm_residual: race on", "partial")}
    draws = 2


judge = TestExercises.judge


@pytest.mark.parametrize("part", COSTS)
def test_each_part_of_exercise_1_counts(part, stubs, solutions, capsys):
    names = {**solutions, part: stubs[part]}
    assert judge(1, *(names[name] for name in COSTS)).message == "not done yet"


def test_the_numbers_of_the_statement(solutions):
    unfused, fused, half = (solutions[name] for name in COSTS)
    assert (unfused(1, 1, 1, 1), fused(1, 1, 1, 1), half(1, 1)) == ((7, 20), (2, 10), 1)


@pytest.mark.parametrize("given", [None, 3, "two", (1,), (7, None), (7.0, 20), (True, 20), [], (7, 20, 1)])
def test_a_check_bears_whatever_a_cost_is(given, solutions, capsys):
    exercise = judge(1, lambda hidden, ffn, tokens, size: given, *(solutions[name] for name in COSTS[1:]))
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
