"""The exercises of chapter 01: stubs say so, solutions pass, planted wrong answers are rejected."""

from fractions import Fraction

import numpy as np
import pytest
from exercise_tools import draw_the_same, printed
from wrong.roofline import WRONG

from exercises.checks import roofline

NAME = "01_roofline"
EXERCISES = {  # number: the functions that its check takes
    1: ["gemv_intensity"],
    2: ["kv_cache_bytes", "sequences_that_fit"],
    3: ["smallest_batch"],
    4: ["bytes_per_token"],
    5: ["expected_expert_bytes"],
}
RUNS_ALREADY = 4  # the stub of "find the bug" is code that runs


def judge(number, names):
    return getattr(roofline, f"exercise_{number}")(*(names[name] for name in EXERCISES[number]))


@pytest.mark.parametrize("number", EXERCISES)
def test_stub_is_not_done_yet(number, stubs, capsys, monkeypatch):
    draw_the_same(monkeypatch)
    exercise = judge(number, stubs)
    assert not exercise.passed
    assert "raised" not in exercise.message
    if number == RUNS_ALREADY:
        assert exercise.message.startswith("not yet: Mistral-7B")
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


@pytest.mark.parametrize("number", EXERCISES)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    verdicts = set()
    for _ in range(20):
        exercise = judge(number, solutions)
        assert exercise.passed, exercise.message
        verdicts.add(capsys.readouterr().out)
    (verdict,) = verdicts  # the same on every run: notebooks are compared
    assert verdict.count("\n") == 1 and len(verdict) < 170


@pytest.mark.parametrize("number, mistake", [(n, mistake) for n in WRONG for mistake in WRONG[n]])
def test_wrong_answer_is_rejected(number, mistake, solutions, monkeypatch, capsys):
    repeats = 5
    draw_the_same(monkeypatch)
    if mistake == "it never ends":
        limit, repeats = roofline.time_limit, 1
        monkeypatch.setattr(roofline, "time_limit", lambda *_: limit(0.2))
    for _ in range(repeats):
        exercise = judge(number, {**solutions, **WRONG[number][mistake]})
        assert not exercise.passed
        assert exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message and "Traceback" not in exercise.message
        assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("number", EXERCISES)
@pytest.mark.parametrize("given", [None, "4", [1, 2], float("nan"), float("inf"), 1j, True, np.ones(3), 10**400])
def test_a_check_bears_whatever_comes_back(number, given, solutions, capsys):
    for name in EXERCISES[number]:
        exercise = judge(number, {**solutions, name: lambda *args, **named: given})
        assert not exercise.passed and exercise.message.startswith("not yet: ")


@pytest.mark.parametrize("number", EXERCISES)
def test_an_exception_is_reported_with_its_line(number, solutions):
    def broken(*args, **named):
        return {}["no such key"]

    exercise = judge(number, {**solutions, EXERCISES[number][-1]: broken})
    assert exercise.message == "not yet: your code raised KeyError: 'no such key', at `return {}[\"no such key\"]`"


def test_renamed_arguments_are_named(solutions):
    def kv_cache_bytes(n_layers, heads, head_dim, context, batch, bits):
        return 2 * n_layers * heads * head_dim * context * batch * bits // 8

    exercise = judge(2, {**solutions, "kv_cache_bytes": kv_cache_bytes})
    assert exercise.message == (
        "not yet: the check calls kv_cache_bytes(layers=1, n_kv_heads=1, head_dim=1, context=1, batch=1, bits=8), "
        "but your function takes (n_layers, heads, head_dim, context, batch, bits) (missing a required argument: "
        "'n_layers'). Keep the arguments and their names as in the stub"
    )


def test_a_type_error_inside_the_answer_is_its_own(solutions):
    exercise = judge(3, {**solutions, "smallest_batch": lambda w, b, f: len(w)})
    assert "your code raised TypeError: object of type 'int' has no len()" in exercise.message


def test_other_right_answers_pass():
    def smallest_batch(weight_bytes_per_weight, bandwidth, flops):
        batch = 1
        while 2 * batch / Fraction(weight_bytes_per_weight) * bandwidth < flops:
            batch += 1
        return np.int64(batch)

    def gemv_intensity(rows, cols, weight_bytes, vector_bytes=4):
        return np.float64(2) / (weight_bytes + vector_bytes / rows + vector_bytes / cols)

    def expected_expert_bytes(n_experts, top_k, bytes_per_expert, batch):
        read = 0.0
        for _ in range(batch):  # each expert that is not read yet is picked with probability top_k / n_experts
            read += (n_experts - read) * top_k / n_experts
        return read * bytes_per_expert

    assert roofline.exercise_1(gemv_intensity).passed
    assert roofline.exercise_3(smallest_batch).passed
    assert roofline.exercise_5(expected_expert_bytes).passed


def test_enumeration_and_simulation_agree():
    rng = np.random.default_rng(7)
    for n_experts, top_k, batch in [(3, 1, 2), (4, 2, 3), (5, 3, 2)]:
        exact, _ = roofline.every_outcome(n_experts, top_k, batch)
        mean, error = roofline.simulated(rng, n_experts, top_k, batch)
        assert abs(mean - exact) < 6 * error


def test_the_notebooks_own_check_cells():
    ids = [f"ex{number}-check" for number in EXERCISES]
    solved, unsolved = printed("solutions", NAME), printed("exercises", NAME)
    assert list(solved) == list(unsolved) == ids
    assert all(": passed: " in text for text in solved.values())
    assert not any("passed" in text for text in unsolved.values())


def test_every_exercise_has_wrong_answers():
    assert set(WRONG) == set(EXERCISES)
    assert all(len(answers) >= 3 for answers in WRONG.values())
