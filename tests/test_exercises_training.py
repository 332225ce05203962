"""The exercises of chapter 21: stubs say so, solutions pass, planted wrong answers are rejected."""

import numpy as np
import pytest
from exercise_contract import ExerciseContract
from wrong.training import RIGHT, WRONG

from exercises.checks import training as checks


class TestExercises(ExerciseContract):
    name, checks, right, wrong = "21_training", checks, RIGHT, WRONG
    answers = {1: "state_gradients", 2: "decay_gradients", 3: "back_through", 4: "chunked_back"}
    runs_already = {4: ("not yet: with 3 tokens in chunks of 1, A dt about -0.69:", "expected")}


judge = TestExercises.judge


# What the statements say


def test_the_numbers_of_the_examples(solutions):
    a, reads, final = np.array([0.5, 0.25]), np.array([[1.0], [2.0]]), np.array([4.0])
    d_h, d_start = solutions["state_gradients"](a, reads, final)
    assert d_h.tolist() == [[2.5], [6]] and d_start.tolist() == [1.25]
    d_log, d_A = solutions["decay_gradients"](np.array([1.0, 2, 4]), np.array([8.0, 16]), np.ones(3), 2)
    assert d_log.tolist() == [11, 10, 20] and d_A == 41


def test_the_example_of_checkpoints(solutions):
    said = []

    def step(k, h):
        said.append(f"step({k})")
        return h + 1

    def back(k, h, d):
        assert h == k
        said.append(f"back({k})")
        return d

    solutions["back_through"](step, back, 0, 3, 2, 1.0)
    assert said == ["step(0)", "step(1)", "step(2)", "back(2)", "step(0)", "back(1)", "back(0)"]


@pytest.mark.parametrize("L, Q, rate, seen", [(4096, 64, 1.0, False), (50, 64, 0.01, False), (640, 64, 0.01, True)])
def test_the_author_of_the_bug_saw_nothing(L, Q, rate, seen, stubs):
    rng = np.random.default_rng(0)
    dy, x, B, C = rng.standard_normal((4, L, 3))
    dt = rng.uniform(0.8, 1.2, L)
    found = stubs["chunked_back"](dy, x, -rate * dt, dt, B, C, Q)
    wanted = RIGHT[4](dy, x, -rate * dt, dt, B, C, Q)
    assert all(np.allclose(one, other, rtol=1e-9, atol=1e-9) for one, other in zip(found, wanted)) != seen


# Right answers that are not the solutions'


def by_matrix(a, reads, d_final):
    """A row for each state, from all that comes behind it."""
    L = len(a)
    d_h = np.array(reads, float)
    for t in range(L):
        factor, whole = 1.0, True
        for later in range(t + 1, L):
            if a[later] == 0:
                whole = False
                break
            factor = factor * a[later]
            d_h[t] += factor * reads[later]
        if whole:
            d_h[t] += factor * d_final
    return [d_h, a[0] * d_h[0] if a[0] else np.zeros(len(d_final))]


def in_wide_sums(flows, crosses, dt, Q):
    """Chunk by chunk, in float64."""
    parts = [flows[i : i + Q].astype(float) for i in range(0, len(flows), Q)]
    d_log = np.concatenate([part[::-1].cumsum()[::-1] + c for part, c in zip(parts, crosses)])
    return d_log, float(d_log @ dt)


def with_a_dictionary(step, back, h0, K, s, d_last):
    kept, h, d = {0: h0}, h0, d_last
    for k in range((K - 1) // s * s):
        h = step(k, h)
        if (k + 1) % s == 0:
            kept[k + 1] = h
    del h, h0
    while kept:
        first, h = kept.popitem()
        states = {first: h}
        del h
        for k in range(first + 1, min(first + s, K)):
            states[k] = step(k - 1, states[k - 1])
        while states:
            k, h = states.popitem()
            d = back(k, h, d)
            del h
    return d


def chunk_after_chunk(dy, x, dA, dt, B, C, Q):
    """Loops over chunks, the last of which may be shorter; sums of rectangles in place of differences."""
    L, P, N = *x.shape, B.shape[1]
    bounds = [slice(i, min(i + Q, L)) for i in range(0, L, Q)]
    starts, h = [], np.zeros((P, N))
    for own in bounds:
        starts.append(h)
        a = np.cumsum(dA[own])
        h = np.exp(a[-1]) * h + (np.exp(a[-1] - a) * dt[own] * x[own].T) @ B[own]
    dx, dB, dC, d_log, g = np.zeros(x.shape), np.zeros(B.shape), np.zeros(C.shape), np.zeros(L), np.zeros((P, N))
    for own, h in zip(reversed(bounds), reversed(starts)):
        a = np.cumsum(dA[own])
        decay = np.exp(np.where(np.tri(len(a), dtype=bool), a[:, None] - a, -np.inf))
        up, down = np.exp(a)[:, None], np.exp(a[-1] - a)[:, None]
        CB, W = C[own] @ B[own].T, dy[own] @ x[own].T
        u = dt[own, None] * x[own]
        dx[own] = dt[own, None] * ((CB * decay).T @ dy[own] + down * (B[own] @ g.T))
        R = W * decay * dt[own]
        dC[own] = R @ B[own] + up * (dy[own] @ h)
        dB[own] = R.T @ C[own] + down * (u @ g)
        T = np.tril(R * CB, -1)
        read = (dy[own] * (up * (C[own] @ h.T))).sum(1)
        left = (B[own] * (down * (u @ g))).sum(1)
        below = T[::-1].cumsum(0)[::-1]
        d_log[own] = np.tril(below, -1).sum(1) + read[::-1].cumsum()[::-1] + left.cumsum() - left
        d_log[own] += np.exp(a[-1]) * (g * h).sum()
        g = np.exp(a[-1]) * g + (up * dy[own]).T @ C[own]
    return dx, dB, dC, d_log


@pytest.mark.parametrize(
    "number, answer", [(1, by_matrix), (2, in_wide_sums), (3, with_a_dictionary), (4, chunk_after_chunk)]
)
def test_other_right_answers_pass(number, answer, capsys):
    exercise = judge(number, answer)
    assert exercise.passed, exercise.message
