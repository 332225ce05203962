"""The exercises of chapter 12: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from wrong.five_kernels import CUMSUM, LAYER, RIGHT, SCAN, STATE, WRONG, from_source, kernel

from exercises.checks import five_kernels as checks
from exercises.checks.triton_launch import launched


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "12_five_kernels", checks, RIGHT, WRONG
    answers = {1: "between", 2: "cumsum_kernel", 3: "state_kernel", 4: "scan_kernel", 5: "layer_kernel"}
    runs_already = {5: ("not yet: with 16 tokens in chunks of 16, A = -300: y[0, 0] is nan",)}


judge = TestExercises.judge


def test_the_bugs_author_saw_nothing(stubs):
    """With whole chunks and a slow decay, as the statement says, the kernel with two defects is right to 5 digits."""
    for L, Q in ((64, 16), (64, 32), (256, 16), (256, 32)):
        checks._run_layer(stubs["layer_kernel"], np.random.default_rng(), L, Q, 16, 16, 0.1, 1e-5)


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
