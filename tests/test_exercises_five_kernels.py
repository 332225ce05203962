"""The exercises of chapter 12: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_tools import expect_one_verdict, expect_rejected, printed
from wrong.five_kernels import CUMSUM, LAYER, RIGHT, SCAN, STATE, WRONG, from_source, kernel

from exercises.checks import five_kernels as checks
from exercises.checks.triton_launch import launched

NAME = "12_five_kernels"
ANSWERS = {1: "between", 2: "cumsum_kernel", 3: "state_kernel", 4: "scan_kernel", 5: "layer_kernel"}
RUNS_ALREADY = 5  # the stub of "find the bug" is code that runs


def judge(number, answer):
    return getattr(checks, f"exercise_{number}")(answer)


@pytest.mark.parametrize("number", ANSWERS)
def test_stub_is_not_done_yet(number, stubs, capsys):
    exercise = judge(number, stubs[ANSWERS[number]])
    assert not exercise.passed
    if number == RUNS_ALREADY:
        assert exercise.message.startswith("not yet: with 16 tokens in chunks of 16, A = -300: y[0, 0] is nan")
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


def test_the_bugs_author_saw_nothing(stubs):
    """With whole chunks and a slow decay, as the statement says, the kernel with two defects is right to 5 digits."""
    for L, Q in ((64, 16), (64, 32), (256, 16), (256, 32)):
        checks._run_layer(stubs["layer_kernel"], np.random.default_rng(), L, Q, 16, 16, 0.1, 1e-5)


@pytest.mark.parametrize("number", ANSWERS)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    expect_one_verdict(lambda: judge(number, solutions[ANSWERS[number]]), 2, capsys)


@pytest.mark.parametrize("number", ANSWERS)
def test_what_the_wrong_answers_were_made_from_is_right(number, capsys):
    exercise = judge(number, RIGHT[number])
    assert exercise.passed, exercise.message


@pytest.mark.parametrize("number, mistake", [(n, mistake) for n in WRONG for mistake in WRONG[n]])
def test_wrong_answer_is_rejected(number, mistake, capsys):
    answer, says = WRONG[number][mistake]
    expect_rejected(judge(number, answer), says)


@pytest.mark.parametrize("number", ANSWERS)
def test_enough_wrong_answers_are_planted(number):
    assert len(WRONG[number]) >= 3


@pytest.mark.parametrize("given", [None, 3, "x", lambda: 0, lambda *args: None, lambda *args: "x"])
def test_a_check_bears_whatever_it_is_given(given, capsys):
    for number in ANSWERS:
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")


def test_a_kernel_with_other_arguments_is_named(capsys):
    assert "arguments must be dt, A, cum, seqlen, nheads, Q, got x, B" in judge(2, RIGHT[3]).message


def test_a_kernel_that_stops_is_told_in_a_sentence(capsys):
    broken = from_source(CUMSUM, ("tl.cumsum(", "tl.no_such_thing("))
    message = judge(2, broken).message
    assert message.startswith("not yet: the kernel stopped: ") and "no_such_thing" in message and "\n" not in message


def test_an_endless_loop_ends(capsys, monkeypatch):
    monkeypatch.setattr(checks, "LIMIT", 1)
    endless = from_source(
        CUMSUM, ("    q = tl.arange(0, Q)\n", "    q = tl.arange(0, Q)\n    while seqlen > 0:\n        q += 0\n")
    )
    assert "still running after 1 seconds" in judge(2, endless).message


# Right answers that are not the solution's

BY_TRIANGLE = from_source(
    CUMSUM,
    (
        "tl.cumsum(step * tl.load(A + h) * LOG2_E, 0)",
        "tl.sum(tl.where(q[None, :] <= q[:, None], (step * tl.load(A + h) * LOG2_E)[None, :], 0), 1)",
    ),
)
SCALED_B = from_source(
    STATE,
    (
        "tl.dot(tl.trans((xs * scale[:, None]).to(tl.float16)), bs)",
        "tl.dot(tl.trans(xs), (bs * scale[:, None]).to(tl.float16))",
    ),
)
EXPONENT_FIRST = from_source(
    SCAN,
    (
        "weight = table * tl.exp2(sums[:, None] - sums[None, :])",
        "weight = table * tl.exp2(tl.where(q[:, None] >= q[None, :], sums[:, None] - sums[None, :], 0))",
    ),
)
WHOLE_FLOATS = from_source(SCAN, ("tl.dot(weight.to(tl.float16), xs)", "tl.dot(weight, xs.to(tl.float32))"))
NEVER_ABOVE_ONE = from_source(
    SCAN,
    ("tl.exp2(sums[:, None] - sums[None, :])", "tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0))"),
)
LEAST_IS_LAST = from_source(LAYER, ("tl.load(cum + tl.minimum(start + Q, seqlen) - 1)", "tl.min(sums, 0)"))
LAST_GOES_ON = from_source(
    LAYER,
    ("tl.load(cum + token, there, other=0)", "tl.load(cum + tl.minimum(token, seqlen - 1))"),
    ("tl.load(cum + tl.minimum(start + Q, seqlen) - 1)", "tl.sum(tl.where(q == Q - 1, sums, 0), 0)"),
)
SUM_OF_LAST = from_source(
    LAYER,
    (
        "tl.load(cum + tl.minimum(start + Q, seqlen) - 1)",
        "tl.sum(tl.where(token == tl.minimum(start + Q, seqlen) - 1, sums, 0), 0)",
    ),
)


@pytest.mark.parametrize(
    "number, answer",
    [
        (2, BY_TRIANGLE),
        (3, SCALED_B),
        (4, EXPONENT_FIRST),
        (4, NEVER_ABOVE_ONE),
        (4, WHOLE_FLOATS),
        (5, SUM_OF_LAST),
        (5, LEAST_IS_LAST),
        (5, LAST_GOES_ON),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message


def test_launches_are_counted():
    import torch

    counts = launched(
        kernel(
            "@triton.jit\ndef double(x, y, n, BLOCK: tl.constexpr):\n"
            "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
            "    tl.store(y + i, 2 * tl.load(x + i, i < n, other=0), i < n)\n"
        ),
        "x y n BLOCK",
        (2,),
        {"x": torch.arange(20.0), "y": torch.zeros(20)},
        20,
        16,
    )
    assert counts.read == {"x": 20, "y": 0} and counts.wrote == {"x": 0, "y": 20}


def test_the_notebook_prints_what_the_checks_say():
    said = printed("exercises", NAME)
    assert len(said) == len(ANSWERS)
    assert all(text.count("\n") == 1 for text in said.values())
    assert sum("not done yet" in text for text in said.values()) == len(ANSWERS) - 1
