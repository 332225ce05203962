"""The exercises of chapter 15: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
from exercise_contract import ExerciseContract
from wrong.fused_ssd import RIGHT, WRONG

from exercises.checks import fused_ssd as checks


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "15_fused_ssd", checks, RIGHT, WRONG
    answers = {1: "cut_line", 2: "chunks_that_count"}


judge = TestExercises.judge


def test_an_array_of_shares_passes(capsys):
    exercise = judge(1, lambda *args: np.array(RIGHT[1](*args)))
    assert exercise.passed, exercise.message
