"""The exercises of chapter 09: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.kv_quantization import FLIGHT, NEXT, NOW, PACKING, RIGHT, SCORES, WRONG, append
from wrong.warp_gemv import changed

from exercises.checks import kv_quantization as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "09_kv_quantization", checks, RIGHT, WRONG
    answers = {
        1: "quantize_rows",
        2: "packing_source",
        3: "scores_source",
        4: "flight_source",
        5: "scores",
        6: "append",
    }
    runs_already = {
        4: ("not yet: at kv_len = 1, capacity = 1: kernel mix, line ", "now[b] = v[(slice + 8 * b) * 32 + lane]")
    }


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """In a large cache full of zeros the kernel that reads past the end is right."""
    kernel = checks.compiled(stubs["flight_source"], "mix")
    for kv_len in (64, 128, 300):
        checks._flight(kernel, np.random.default_rng(), kv_len, 4096, beyond=0)


@pytest.mark.parametrize(
    "given", [lambda *_: 3, lambda *_: (3, 4), lambda *_: "", lambda *_: np.zeros(3), lambda *_: {}]
)
def test_a_check_bears_whatever_a_function_gives(given, capsys):
    for number in (1, 5, 6):
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


def test_the_check_of_appends_puts_back_what_it_watched():
    before = append.__globals__["quantize_group"]
    assert checks.exercise_6(append).passed and append.__globals__["quantize_group"] is before


def test_an_endless_loop_ends(capsys):
    source = changed(SCORES, ("i += 32", "i += 0"))
    assert "is there an endless loop?" in judge(3, source).message


# Right answers that are not the solution's


def in_turns(q, codes, scale, group):
    """All scales times q first, then a token at a time."""
    weights = scale * np.float64(q)
    return np.array([codes[t] @ weights[t // group] for t in range(len(codes))])


def by_where(x):
    largest = np.abs(x).max(axis=1, keepdims=True)
    codes = np.zeros(x.shape, np.int8)
    np.copyto(codes, np.rint(np.divide(127 * x, largest, out=np.zeros_like(x), where=largest > 0)), casting="unsafe")
    return codes, (largest[:, 0] / 127).astype(np.float32)


BY_PARTS = changed(
    PACKING,
    (
        "uint2 eight = ((const uint2 *)codes)[i];",
        "char4 *none = 0; uint2 eight = ((const uint2 *)codes)[i]; (void)none;",
    ),
    ("((int)(word << (28 - 4 * j)) >> 28) & 255", "((word >> 4 * j & 15 ^ 8) - 8) & 255"),  # the sign by xor and minus
)
GUARDED = changed(
    FLIGHT,
    (
        "now[b] = token < kv_len ? v[token * 32 + lane] : __half2();",
        "now[b] = __half2(); if (token < kv_len) now[b] = v[token * 32 + lane];",
    ),
)
UNUSED = changed(  # what is not loaded is not used either
    FLIGHT,
    (NOW, "if (token < kv_len) now[b] = v[token * 32 + lane];"),
    (NEXT, "if (token < kv_len) next[b] = v[token * 32 + lane];"),
    ("float a = token < kv_len ? att[token] : 0;", "if (token >= kv_len) break;\n            float a = att[token];"),
)
WITHOUT_NEXT = """
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256, 4)
mix(const float *att, const __half2 *v, float2 *out, int kv_len) {
    __shared__ float2 sums[8][32];
    int lane = threadIdx.x, slice = threadIdx.y;
    float2 sum = {0, 0};
    for (int t = slice; t < kv_len; t += 64) {
        __half2 now[8];
        float a[8];
#pragma unroll
        for (int b = 0; b < 8; b++) {
            bool there = t + 8 * b < kv_len;
            now[b] = there ? v[(t + 8 * b) * 32 + lane] : __half2();
            a[b] = there ? att[t + 8 * b] : 0;
        }
#pragma unroll
        for (int b = 0; b < 8; b++) {
            float2 pair = __half22float2(now[b]);
            sum.x += a[b] * pair.x, sum.y += a[b] * pair.y;
        }
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0) return;
    for (int s = 1; s < 8; s++) sum.x += sums[s][lane].x, sum.y += sums[s][lane].y;
    out[lane] = sum;
}"""


@pytest.mark.parametrize(
    "number, answer", [(1, by_where), (2, BY_PARTS), (4, GUARDED), (4, UNUSED), (4, WITHOUT_NEXT), (5, in_turns)]
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
