"""The exercises of chapter 09: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import SourceContract
from wrong.kv_quantization import PACKING, RIGHT, SCORES, WRONG, append
from wrong.warp_gemv import changed

from exercises.checks import kv_quantization as checks


class TestExercises(SourceContract):
    name, checks, right, wrong = "09_kv_quantization", checks, RIGHT, WRONG
    answers = {
        1: "quantize_rows",
        2: "packing_source",
        3: "scores_source",
        4: "scores",
        5: "append",
    }
    runs_already = {}


judge = TestExercises.judge


@pytest.mark.parametrize(
    "given", [lambda *_: 3, lambda *_: (3, 4), lambda *_: "", lambda *_: np.zeros(3), lambda *_: {}]
)
def test_a_check_bears_whatever_a_function_gives(given, capsys):
    for number in (1, 4, 5):
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


def test_the_check_of_appends_puts_back_what_it_watched():
    before = append.__globals__["quantize_group"]
    assert checks.exercise_5(append).passed and append.__globals__["quantize_group"] is before


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


@pytest.mark.parametrize("number, answer", [(1, by_where), (2, BY_PARTS), (4, in_turns)])
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
