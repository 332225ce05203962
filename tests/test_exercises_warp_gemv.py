"""The exercises of chapter 04: stubs say so, solutions pass, planted wrong answers are rejected."""

import pytest
from exercise_contract import SourceContract
from wrong.warp_gemv import ADD, GEMV, RIGHT, RMSNORM, SOFTMAX, SQUARES, TRANSPOSE, WRONG, changed

from exercises.checks import warp_gemv as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "04_warp_gemv", checks, RIGHT, WRONG
    answers = {
        1: "warp_max_source",
        2: "softmax_source",
        3: "gemv_source",
        4: "row_squares_source",
        5: "transpose_source",
        6: "rmsnorm_source",
    }
    runs_already = {3: ("not yet: at rows = 1, cols = 1, 1 block: kernel gemv, line ", "the mask names lanes 1-31")}


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs, monkeypatch, capsys):
    """On the cases that the statement names, the kernel with the two defects is right, races looked for."""
    kernel = checks.compiled(stubs["gemv_source"], "gemv")
    for rows, grid in ((8, 1), (32, 4), (64, 8)):
        for cols in (32, 45, 128):
            W, x = checks.np.ones((rows, cols), "f4"), checks.np.ones(cols, "f4")
            checks._gemv(kernel, W, x, grid, "")


def test_an_endless_loop_ends(capsys):
    source = changed(SQUARES, ("i += 32", "i += 0"))
    assert "is there an endless loop?" in judge(4, source).message


# Right answers that are not the solution's

IN_LANE_ZERO = """
__device__ float warp_max(float value) {
    for (int far = 1; far < 32; far *= 2) value = fmaxf(value, __shfl_down_sync(0xffffffff, value, far));
    return __shfl_sync(0xffffffff, value, 0);
}"""
CONST_INLINE = """
static __device__ __forceinline__ float warp_max(const float value) {
    float most = value;
    for (int far = 16; far; far >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, far));
    return most;
}"""
WIDE = changed(
    SOFTMAX,
    (
        "    for (int c = lane; c < cols; c += 32) most = fmaxf(most, from[c]);",
        """    bool wide = cols % 4 == 0; // then every row starts at a multiple of 16 bytes
    const float4 *words = (const float4 *)from;
    for (int c = lane; wide && c < cols / 4; c += 32) {
        float4 v = words[c];
        most = fmaxf(most, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
    }
    for (int c = lane; !wide && c < cols; c += 32) most = fmaxf(most, from[c]);""",
    ),
)
WIDE_NORM = changed(
    RMSNORM,
    (
        "    for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += from[c] * from[c];",
        """    bool wide = cols % 4 == 0;
    for (int c = threadIdx.x; wide && c < cols / 4; c += blockDim.x) {
        float4 v = ((const float4 *)from)[c];
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    for (int c = threadIdx.x; !wide && c < cols; c += blockDim.x) sum += from[c] * from[c];""",
    ),
)
ONLINE = """
extern "C" __global__ void softmax(const float *x, float *y, int rows, int cols) {
    int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (row >= rows) return;
    x += (long long)row * cols, y += (long long)row * cols;
    float most = -3e38f, sum = 0;
    for (int c = lane; c < cols; c += 32) { // maximum and sum in one walk
        float larger = fmaxf(most, x[c]);
        sum = sum * expf(most - larger) + expf(x[c] - larger);
        most = larger;
    }
    for (int far = 1; far < 32; far *= 2) {
        float theirs = __shfl_xor_sync(0xffffffff, most, far), larger = fmaxf(most, theirs);
        sum = sum * expf(most - larger) + __shfl_xor_sync(0xffffffff, sum, far) * expf(theirs - larger);
        most = larger;
    }
    for (int c = lane; c < cols; c += 32) y[c] = expf(x[c] - most) / sum;
}"""
TWO_ARRAYS = changed(
    GEMV, ("sums[8]", "sums[2][8]"), ("int row = first", "int turn = first / (gridDim.x * 8) & 1, row = first")
)
TWO_ARRAYS = changed(TWO_ARRAYS, ("sums[warp]", "sums[turn][warp]"), ("sums[threadIdx.x]", "sums[turn][threadIdx.x]"))
TWO_ARRAYS = changed(TWO_ARRAYS, ("__syncthreads(); // 2", ""))  # two arrays in turns need one barrier
ELEMENTWISE_ENDS = changed(
    SQUARES,
    ("int head = (4 - (unsigned long long)from / 4 % 4) % 4;", "int head = -(int)((unsigned long long)from / 4) & 3;"),
    ("if (head > cols) head = cols;", "head = min(head, cols);"),
    ("if (lane < head) sum", "for (int c = lane; c < head; c += 32) sum"),
    ("from[lane] * from[lane]", "from[c] * from[c]"),
)
SKEWED = changed(
    TRANSPOSE, ("[33]", "[32]"), ("tile[k][x]", "tile[k][(x + k) % 32]"), ("tile[x][k]", "tile[x][(k + x) % 32]")
)
IN_WARP_ZERO = changed(
    RMSNORM,
    ("    sum = lane < blockDim.x", "    __shared__ float total;\n    if (warp == 0) {\n    sum = lane < blockDim.x"),
    (
        "    float scale",
        "    if (lane == 0) total = sum;\n    }\n    __syncthreads();\n    sum = total;\n    float scale",
    ),
)


@pytest.mark.parametrize(
    "number, source",
    [
        (1, IN_LANE_ZERO),
        (1, CONST_INLINE),
        (2, ONLINE),
        (2, WIDE),
        (3, TWO_ARRAYS),
        (4, ELEMENTWISE_ENDS),
        (5, SKEWED),
        (6, IN_WARP_ZERO),
        (6, WIDE_NORM),
    ],
)
def test_other_right_answers_pass(number, source, capsys):
    exercise = judge(number, source)
    assert exercise.passed, exercise.message


def test_the_sum_of_the_text_is_the_chapters():
    assert ADD in RMSNORM and ADD in GEMV and ADD in SQUARES
