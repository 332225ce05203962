"""The exercises of chapter 08: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_tools import expect_one_verdict, expect_rejected, printed
from wrong.flash_decoding import ONLINE, RIGHT, STALE, WRONG, changed

from exercises.checks import flash_decoding as checks

NAME = "08_flash_decoding"
ANSWERS = {1: "stream_mean", 2: "merge", 3: "share", 4: "best_splits", 5: "stale_source", 6: "online_source"}
RUNS_ALREADY = 5  # the stub of "find the bug" is code that runs


def judge(number, answer):
    return getattr(checks, f"exercise_{number}")(answer)


@pytest.mark.parametrize("number", ANSWERS)
def test_stub_is_not_done_yet(number, stubs, capsys):
    exercise = judge(number, stubs[ANSWERS[number]])
    assert not exercise.passed
    if number == RUNS_ALREADY:
        assert exercise.message.endswith("out[0] is 2.25, expected 3")
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


def test_the_bugs_author_saw_nothing(stubs):
    """With a query of zeros, as the statement says, the kernel with the two defects is right to five digits."""
    kernel = checks.compiled(stubs["stale_source"], "stale")
    for kv_len in (8, 1000):
        inputs = checks._inputs(np.random.default_rng(), 1, kv_len, "all equal")
        checks._stale(kernel, *inputs, "", 1e-5)


def test_each_of_the_two_defects_shows_alone():
    for mistake in ("only the sums are merged right", "half of the channels are not corrected"):
        assert not judge(5, WRONG[5][mistake][0]).passed


@pytest.mark.parametrize("number", ANSWERS)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    expect_one_verdict(lambda: judge(number, solutions[ANSWERS[number]]), 3 if number < 5 else 2, capsys)


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


@pytest.mark.parametrize(
    "given", [None, 3, "x", lambda: 0, lambda *args: None, lambda *args: "x", lambda *args: (1, 2, 3)]
)
def test_a_check_bears_whatever_it_is_given(given, capsys):
    for number in ANSWERS:
        exercise = judge(number, given)
        assert not exercise.passed and exercise.message.startswith("not yet: ")


def test_an_endless_loop_ends(capsys):
    assert "is there an endless loop?" in judge(6, changed(ONLINE, ("t++", "t += 0"))).message


# Right answers that are not the solution's


def shifted_by_the_first(pairs):
    """Sums in logarithms: the largest score is never kept."""
    lse, mean = -np.inf, 0.0
    for s, value in pairs:
        if s > -np.inf:
            new = np.logaddexp(lse, s)
            mean = mean + np.exp(s - new) * (value - mean)
            lse = new
    return mean


def in_lists(pairs):
    """Without NumPy, and without a correction where the maximum stays."""
    highest, total, mixed = -np.inf, 0.0, None
    for s, value in pairs:
        mixed = mixed or [0.0] * len(value)
        if s > highest:
            correction, highest = np.exp(highest - s), s
            total, mixed = total * correction, [m * correction for m in mixed]
        p = np.exp(s - highest) if s > -np.inf else 0.0
        total, mixed = total + p, [m + p * v for m, v in zip(mixed, value)]
    return [m / total for m in mixed]


def by_logarithms(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    if lse == -np.inf:
        return np.zeros_like(out_a), -np.inf
    return np.exp(lse_a - lse) * out_a + np.exp(lse_b - lse) * out_b, lse


def long_ones_first(kv_len, splits, i):
    each, rest = divmod(-(-kv_len // 16), splits)
    first = each * i + min(i, rest)
    return min(kv_len, 16 * first), min(kv_len, 16 * (first + each + (i < rest)))


def by_numpy(kv_len, heads, room, step, merge):
    splits = np.arange(1, kv_len + 1)
    return int(np.argmin(-(-heads * splits // room) * -(-kv_len // splits) * step + splits * merge)) + 1


ALWAYS_CORRECTED = changed(STALE, ("if (s > m + 8) {", "if (s > m) {"))
TWO_TOKENS = changed(  # float2 words: half of the requests, 8 sectors each
    ONLINE,
    (
        "float q0 = q[head * 64 + lane], q1 = q[head * 64 + lane + 32];",
        "float2 u = ((const float2 *)q)[head * 32 + lane];",
    ),
    (
        "        float s = q0 * key[lane] + q1 * key[lane + 32];",
        "        float2 a = ((const float2 *)key)[lane], b = ((const float2 *)value)[lane];\n"
        "        float s = u.x * a.x + u.y * a.y;",
    ),
    ("value[lane];", "b.x;"),
    ("value[lane + 32];", "b.y;"),
    ("out[head * 64 + lane] =", "out[head * 64 + 2 * lane] ="),
    ("out[head * 64 + lane + 32] =", "out[head * 64 + 2 * lane + 1] ="),
)


@pytest.mark.parametrize(
    "number, answer",
    [
        (1, shifted_by_the_first),
        (1, in_lists),
        (2, by_logarithms),
        (3, long_ones_first),
        (4, by_numpy),
        (5, ALWAYS_CORRECTED),
        (6, TWO_TOKENS),
    ],
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message


def test_the_notebook_prints_what_the_checks_say():
    said = printed("exercises", NAME)
    assert len(said) == len(ANSWERS)
    assert all(text.count("\n") == 1 for text in said.values())
    assert sum("not done yet" in text for text in said.values()) == len(ANSWERS) - 1
