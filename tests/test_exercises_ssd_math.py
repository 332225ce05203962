"""The exercises of chapter 11: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_tools import draw_the_same, expect_one_verdict, expect_rejected, printed
from wrong.ssd_math import RIGHT, WRONG

from exercises.checks import ssd_math as checks

NAME = "11_ssd_math"
EXERCISES = {  # number: the functions that its check takes
    1: ["segment_sums"],
    2: ["matrix_form"],
    3: ["combine", "states_before"],
    4: ["chunk_flops", "best_chunk"],
    5: ["chunked"],
}
RUNS_ALREADY = 5  # the stub of "find the bug" is code that runs


def judge(number, names):
    return getattr(checks, f"exercise_{number}")(*(names[name] for name in EXERCISES[number]))


@pytest.mark.parametrize("number", EXERCISES)
def test_stub_is_not_done_yet(number, stubs, capsys, monkeypatch):
    draw_the_same(monkeypatch)
    exercise = judge(number, stubs)
    assert not exercise.passed
    if number == RUNS_ALREADY:
        wanted = "y has 1.73287 at [1, 0], expected 1.55958"
        assert exercise.message == f"not yet: with 2 tokens in chunks of 2, no initial state: {wanted}"
    else:
        assert exercise.message == "not done yet"
    assert capsys.readouterr().out == f"{exercise.title}: {exercise.message}\n"


def test_the_bugs_author_saw_nothing(stubs):
    """One dt for all tokens: what the statement says that the author tried."""
    rng = np.random.default_rng()
    for L in (64, 4096):
        x, dt, B, C = rng.standard_normal((L, 3)), np.full(L, 0.4), *rng.standard_normal((2, L, 2))
        given = x, dt, -0.7, B, C, 16, 0.3, rng.standard_normal((3, 2))
        for found, wanted in zip(stubs["chunked"](*given), RIGHT[5]["chunked"](*given)):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("number", EXERCISES)
def test_solution_passes_whatever_is_drawn(number, solutions, capsys):
    expect_one_verdict(lambda: judge(number, solutions), 10, capsys)


@pytest.mark.parametrize("number", EXERCISES)
def test_what_the_wrong_answers_were_made_from_is_right(number, capsys):
    exercise = judge(number, RIGHT[number])
    assert exercise.passed, exercise.message


@pytest.mark.parametrize("number, mistake", [(n, mistake) for n in WRONG for mistake in WRONG[n]])
def test_wrong_answer_is_rejected(number, mistake, solutions, capsys, monkeypatch):
    functions, says = WRONG[number][mistake]
    draw_the_same(monkeypatch)
    for _ in range(5):
        expect_rejected(judge(number, solutions | functions), says)


@pytest.mark.parametrize("number", EXERCISES)
def test_enough_wrong_answers_are_planted(number):
    assert len(WRONG[number]) >= 3


@pytest.mark.parametrize("number", EXERCISES)
@pytest.mark.parametrize("given", [None, "4", [1, 2], {}, np.nan, np.inf, 1j, (1, 2), (None, None), np.ones(3), 10**30])
def test_a_check_bears_whatever_comes_back(number, given, solutions, capsys):
    for name in EXERCISES[number]:
        exercise = judge(number, solutions | {name: lambda *args: given})
        assert not exercise.passed and exercise.message.startswith("not yet: ")
        assert "raised" not in exercise.message


def test_an_endless_loop_ends(solutions, monkeypatch):
    def endless(*args):
        while True:
            pass

    limit = checks.time_limit
    monkeypatch.setattr(checks, "time_limit", lambda *_: limit(0.2))
    assert "Is there a loop that never ends?" in judge(1, {"segment_sums": endless}).message


# Right answers that are not the solution's


def by_windows(a, width):
    """The last terms of each token, newest first, added up along them."""
    padded = np.concatenate([np.zeros(width), a])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)[1:, ::-1]
    sums = np.concatenate([np.zeros((len(a), 1)), np.cumsum(windows, axis=1)[:, :-1]], axis=1)
    return np.where(np.arange(width) <= np.arange(len(a))[:, None], sums, -np.inf)


def by_sequence(A, dt, B, C, seq_idx):
    """Each sequence's block alone."""
    M = np.zeros((len(dt), len(dt)))
    for number in np.unique(seq_idx):
        own = np.flatnonzero(seq_idx == number)
        for i in own:
            for j in own[own <= i]:
                M[i, j] = (C[i] @ B[j]) * np.exp(A * dt[j + 1 : i + 1].sum()) * dt[j]
    return M


def in_place_by_halves(combine, decays, adds, initial):
    """A scan by halves, in place, all places of a round at once."""
    K = len(decays)
    d, s = np.concatenate([[1.0], decays[:-1]]), np.concatenate([initial[None], adds[:-1]])
    width = 1
    while width < K:
        right = np.flatnonzero(np.arange(K) // width % 2)  # the right half of each pair of blocks
        left = right // width * width - 1  # the last place of the left half
        d[right], s[right] = combine((d[left], s[left]), (d[right], s[right]))
        width *= 2
    return s


def chunk_by_chunk(L, Q, H, P, N):
    lengths = [min(Q, L - begin) for begin in range(0, L, Q)]
    return sum(q * (q + 1) * (N + P * H) + 4 * P * N * H * q + 2 * P * N * H for q in lengths)


def chunk_after_chunk(x, dt, A, B, C, Q, dt_bias, initial):
    """A loop over chunks; the last one may be shorter."""
    h, y, dt = initial, np.zeros(x.shape), np.logaddexp(0, dt + dt_bias)
    for first in range(0, len(x), Q):
        own = slice(first, first + Q)
        a = np.cumsum(A * dt[own])
        seen = np.tri(len(a), dtype=bool)
        M = C[own] @ B[own].T * np.exp(np.where(seen, a[:, None] - a, -np.inf)) * dt[own]
        y[own] = M @ x[own] + np.exp(a)[:, None] * (C[own] @ h.T)
        h = np.exp(a[-1]) * h + (np.exp(a[-1] - a) * dt[own] * x[own].T) @ B[own]
    return [y, h]


@pytest.mark.parametrize(
    "number, functions",
    [
        (1, {"segment_sums": by_windows}),
        (2, {"matrix_form": by_sequence}),
        (3, {"states_before": in_place_by_halves}),
        (4, {"chunk_flops": chunk_by_chunk}),
        (5, {"chunked": chunk_after_chunk}),
    ],
)
def test_other_right_answers_pass(number, functions, solutions, capsys):
    exercise = judge(number, solutions | functions)
    assert exercise.passed, exercise.message


def test_the_notebooks_print_what_the_checks_say():
    ids = [f"ex{number}-check" for number in EXERCISES]
    solved, unsolved = printed("solutions", NAME), printed("exercises", NAME)
    assert list(solved) == list(unsolved) == ids
    assert all(text.count("\n") == 1 for text in (solved | unsolved).values())
    assert all(": passed: " in text for text in solved.values())
    assert sum("not done yet" in text for text in unsolved.values()) == len(EXERCISES) - 1
