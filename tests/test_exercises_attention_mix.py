"""The exercises of chapter 07: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
import torch
from exercise_contract import SourceContract
from wrong.attention_mix import BUG, CARDS, GROUPED, ORDERED, PUBLISHED, RIGHT, SHARE, SPLIT, WRONG, changed

from exercises.checks import attention_mix as checks
from kernels.attention import mix

LOADS = tuple(f"l1tex__t_{what}_pipe_lsu_mem_global_op_ld.sum" for what in ("requests", "sectors"))


class TestExercises(SourceContract):
    name, checks, right, wrong = "07_attention_mix", checks, RIGHT, WRONG
    answers = {1: "loads", 2: "split_source", 3: "bug_source", 4: "ordered_source", 5: "group_source"}
    runs_already = {
        3: ("not yet: wrong at 1 token, 2 warps, head_dim = 32, with att and v all ones", "out[0, 0] is 0, expected 1")
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
    ],
)
def test_other_right_answers_pass(number, source, capsys):
    exercise = judge(number, source)
    assert exercise.passed, exercise.message
