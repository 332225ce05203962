"""The exercises of chapter 20: stubs say so, solutions pass, planted wrong answers are rejected."""

from exercise_contract import ExerciseContract
from exercise_tools import expect_each_part_counts
from wrong.in_your_torch import RIGHT, WRONG

from exercises.checks import in_your_torch as checks


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "20_in_your_torch", checks, RIGHT, WRONG
    answers = {1: "arch_table", 2: ("write", "reread"), 3: "taken", 4: "keep", 5: "kernels_of"}
    draws = 3


def test_each_half_of_a_container_counts(stubs, solutions, capsys):
    for part in TestExercises.answers[2]:
        expect_each_part_counts(TestExercises.judge, 2, part, TestExercises.answers[2], stubs, solutions)
