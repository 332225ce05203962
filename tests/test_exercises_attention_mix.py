"""The exercises of chapter 07: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
import torch
from exercise_contract import SourceContract
from wrong.attention_mix import (
    BUG,
    CARDS,
    FLIGHT,
    GROUPED,
    NEXT,
    NOW,
    ORDERED,
    PUBLISHED,
    RIGHT,
    SHARE,
    SPLIT,
    WRONG,
    changed,
)

from exercises.checks import attention_mix as checks
from kernels.attention import mix

LOADS = tuple(f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("requests", "sectors"))


class TestExercises(SourceContract):
    name, checks, right, wrong = "07_attention_mix", checks, RIGHT, WRONG
    answers = {
        1: "loads",
        2: "split_source",
        3: "bug_source",
        4: "ordered_source",
        5: "group_source",
        6: "flight_source",
    }
    runs_already = {
        3: ("not yet: wrong at 1 token, 2 warps, head_dim = 32, with att and v all ones", "out[0, 0] is 0, expected 1"),
        6: ("not yet: at kv_len = 1, capacity = 1: kernel mix, line ", "now[b] = v[(slice + 8 * b) * 32 + lane]"),
    }


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """On the cases that the statement names, the kernel with the two defects is right, races looked for."""
    kernel, rng = checks.compiled(stubs["bug_source"], "mix"), np.random.default_rng()
    for kv_len, warps in ((64, 1), (97, 1), (64, 2), (128, 4), (128, 8), (64, 4), (64, 8)):
        att, v = checks.inputs(rng, 4, 2, kv_len, 32)
        out = np.full((4, 32), np.nan, np.float32)
        sizes = (np.int32(4), np.int32(2), np.int32(kv_len), np.int32(32))
        checks.launched(kernel, 4, (32, warps), att, v, out, *sizes, at="", check_races=True)
        checks.compare("out", out, checks.truth(att, v), "")


def test_the_author_of_the_bug_in_flight_saw_nothing(stubs):
    """In a large cache full of zeros the kernel that reads past the end is right."""
    kernel = checks.compiled(stubs["flight_source"], "mix")
    for kv_len in (64, 128, 300):
        checks._flight(kernel, np.random.default_rng(), kv_len, 4096, beyond=0)


@pytest.mark.parametrize("given", [None, 3, "", lambda: 0])
def test_a_check_bears_whatever_a_function_is(given, capsys):
    exercise = judge(1, given)
    assert not exercise.passed and exercise.message.startswith("not yet: ")


def test_an_endless_loop_ends(capsys):
    source = changed(SPLIT, ("t < last; t++", "t < last; t += 0"))
    assert "is there an endless loop?" in judge(2, source).message


@pytest.mark.parametrize("n_heads, kv_len, head_dim", [(4, 64, 32), (2, 32, 128), (8, 96, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_expected_counts_are_the_machines(n_heads, kv_len, head_dim, dtype):
    att, v = torch.rand(n_heads, kv_len).to(dtype), torch.rand(kv_len, 2, head_dim).to(dtype)
    for along, rungs in (("time", ["mix_naive"]), ("channels", ["mix_split", "mix_shared"])):
        for rung in rungs:
            report = mix.counters(rung, att, v)
            counts = tuple(report.counters[name] for name in LOADS)
            assert counts == checks.loads(n_heads, kv_len, head_dim, dtype.itemsize, along)


# Right answers that are not the solution's

ROUNDED_UP = changed(
    SPLIT,
    (
        SHARE,
        "    int share = (kv_len + gridDim.y - 1) / gridDim.y;\n"
        "    int first = blockIdx.y * share, last = min(kv_len, first + share);\n",
    ),
)
REST_LAST = changed(
    SPLIT,
    (
        SHARE,
        "    int share = kv_len / gridDim.y, first = blockIdx.y * share;\n"
        "    int last = blockIdx.y == gridDim.y - 1 ? kv_len : first + share;\n",
    ),
)
LIKE_CARDS = changed(
    SPLIT, (SHARE, ""), ("int t = first; t < last; t++", "int t = blockIdx.y; t < kv_len; t += gridDim.y")
)
FROM_ZERO = changed(ORDERED, ("float total = partials[i];", "float total = 0;"), ("int y = 1; y", "int y = 0; y"))
ROUNDED = changed(BUG, (CARDS, PUBLISHED), ("kv_len / blockDim.y;", "(kv_len + blockDim.y - 1) / blockDim.y;"))
ROUNDED = changed(ROUNDED, ("(warp + 1) * share &&", "min(kv_len, (warp + 1) * share) &&"))
TWO_SUMS = changed(  # two arrays in turns need no second barrier
    BUG,
    ("float sums[32]", "float both[2][32]"),
    ("if (warp == 0) sums[lane] = 0;", "if (warp == 0) both[0][lane] = both[1][lane] = 0;"),
    ("        float sum = 0;", "        float *sums = both[first / 32 % 2], sum = 0;"),
    ("        __syncthreads(); // 2\n", ""),
)
FLAT = changed(
    GROUPED,
    ("sums[WARPS][GROUP][32]", "sums[GROUP * WARPS * 32]"),
    ("sums[warp][j][lane]", "sums[(j * WARPS + warp) * 32 + lane]"),
    ("sums[w][warp][lane]", "sums[(warp * WARPS + w) * 32 + lane]"),
)
A_ROW_EACH = changed(  # a row of sums for each warp: no atomics
    BUG,
    ("float sums[32]", "float sums[32][32]"),
    ("    if (warp == 0) sums[lane] = 0;\n    __syncthreads();\n", ""),
    ("atomicAdd(&sums[lane], sum);", "sums[warp][lane] = sum;"),
    ("            if (d", "            for (int w = 1; w < blockDim.y; w++) sum += sums[w][lane];\n            if (d"),
    ("= sums[lane];\n            sums[lane] = 0;\n", "= sum;\n"),
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
    "number, source",
    [
        (2, ROUNDED_UP),
        (2, REST_LAST),
        (2, LIKE_CARDS),
        (3, ROUNDED),
        (3, TWO_SUMS),
        (3, A_ROW_EACH),
        (4, FROM_ZERO),
        (5, FLAT),
        (6, GUARDED),
        (6, UNUSED),
        (6, WITHOUT_NEXT),
    ],
)
def test_other_right_answers_pass(number, source, capsys):
    exercise = judge(number, source)
    assert exercise.passed, exercise.message
