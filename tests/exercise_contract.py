"""What the tests of every chapter's exercises share: stubs say so, solutions pass, planted wrong answers are rejected.

A test module inherits its exercises' tests, which conftest.py spreads over exercises and wrong answers:

    class TestExercises(ExerciseContract):
        name, checks, right, wrong = "04_warp_gemv", checks, RIGHT, WRONG
        answers = {1: "warp_max_source", 2: ("one", "another")}
        runs_already = {3: ("not yet: at rows = 1", "the mask names")}

    answers       exercise -> the name that its cells define and its check takes, or several
    runs_already  exercise whose stub is code that runs ("find the bug") -> how what its check says begins, and what is
                  in it besides
    right         exercise -> the answer that wrong ones were made from; none for exercises without
    wrong         exercise -> {mistake: (answer, what the check says)}
    draws         how often a solution is judged: checks draw fresh inputs

Where answers are texts in C or CUDA C++, whose names end in "_source", it inherits a SourceContract.
"""

import numpy as np
import pytest
from exercise_tools import draw_the_same, expect_one_verdict, expect_rejected, printed

from exercises.checks import launches

NO_ANSWERS = None, 3, "x", lambda: 0, lambda *_: None, lambda *_: "x", lambda *_: (1, 2, 3), lambda *_: np.array(3)


class ExerciseContract:
    right, runs_already, draws = {}, {}, 2

    @classmethod
    def judge(cls, number, *answers):
        """What the check of this exercise says: a lab.exercise.Exercise. A tuple stands for several answers."""
        if len(answers) == 1 and isinstance(answers[0], tuple):
            (answers,) = answers
        return getattr(cls.checks, f"exercise_{number}")(*answers)

    def answer(self, number, names):
        """The answer to an exercise, of the names that a notebook defined."""
        wanted = self.answers[number]
        return names[wanted] if isinstance(wanted, str) else tuple(names[name] for name in wanted)

    def test_stub_is_not_done_yet(self, number, stubs, capsys, monkeypatch):
        draw_the_same(monkeypatch)
        exercise = self.judge(number, self.answer(number, stubs))
        assert not exercise.passed
        if number in self.runs_already:
            begins, *more = self.runs_already[number]
            assert exercise.message.startswith(begins) and all(words in exercise.message for words in more)
        else:
            assert exercise.message == "not done yet"
        assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"

    def test_solution_passes_whatever_is_drawn(self, number, solutions, capsys):
        expect_one_verdict(lambda: self.judge(number, self.answer(number, solutions)), self.draws, capsys)

    def test_what_the_wrong_answers_were_made_from_is_right(self, made_from, capsys):
        exercise = self.judge(made_from, self.right[made_from])
        assert exercise.passed, exercise.message

    def test_wrong_answer_is_rejected(self, number, mistake, capsys, monkeypatch):
        answer, says = self.wrong[number][mistake]
        draw_the_same(monkeypatch)
        if "endless loop" in says:
            monkeypatch.setattr(launches, "STEPS", launches.STEPS // 10)
        expect_rejected(self.judge(number, answer), says)

    @pytest.mark.parametrize("given", NO_ANSWERS)
    def test_a_check_bears_whatever_it_is_given(self, given, solutions, capsys):
        for number, wanted in self.answers.items():
            for name in (wanted,) if isinstance(wanted, str) else wanted:
                exercise = self.judge(number, self.answer(number, {**solutions, name: given}))
                assert not exercise.passed and exercise.message.startswith("not yet: "), (name, exercise.message)

    def test_enough_wrong_answers_are_planted(self, number):
        assert len(self.wrong[number]) >= 3

    def test_the_notebook_prints_what_the_checks_say(self):
        said = printed("exercises", self.name)
        assert len(said) == len(self.answers)
        assert all(text.count("\n") == 1 for text in said.values())
        assert sum("not done yet" in text for text in said.values()) == len(self.answers) - len(self.runs_already)


class SourceContract(ExerciseContract):
    def around(self, number, source):
        """What the check of this exercise takes, if its source is this one."""
        return (source,)

    @pytest.mark.parametrize("given", [None, 3, b"int x;", "", "not C at all", "/* no end", lambda: 0])
    def test_a_check_bears_whatever_a_source_is(self, given, capsys):
        sources = [number for number, names in self.answers.items() if "_source" in str(names)]
        assert sources
        for number in sources:
            exercise = self.judge(number, *self.around(number, given))
            assert not exercise.passed and exercise.message.startswith("not yet: ")
            assert "raised" not in exercise.message
