"""The checks of chapter 21: a scan from behind, a decay's gradient, states computed again, a chunked way back.

Smallest cases come first, then random ones that are new each time.
"""

import weakref

import numpy as np

from exercises.checks import array_from, counted, number_from, shown, time_limit
from exercises.checks.costs import garbage_in_empty
from exercises.checks.ssd_math import EXACT, _array, _cost, _quietly
from lab.exercise import Exercise, Wrong
from ref import ssd_backward_forms


def _pair(got, at, what):
    """The two parts of what a function gave."""
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise Wrong(f"{at} your function gave {shown(got)}, expected a pair ({what})")
    return got


# Exercise 1: the reverse scan


def _from_behind(a, reads, d_final):
    """By sums over all later tokens, one at a time."""
    d_h = np.zeros(reads.shape)
    for t in range(len(a)):
        factor, d_h[t] = 1.0, reads[t]
        for later in range(t + 1, len(a)):
            factor *= a[later]
            if factor == 0 and (a[t + 1 : later + 1] == 0).any():
                break  # another sequence: nothing of it, whatever it is
            d_h[t] += factor * reads[later]
        else:
            d_h[t] += factor * d_final
    return d_h, np.zeros(d_final.shape) if a[0] == 0 else a[0] * d_h[0]


def exercise_1(state_gradients):
    """state_gradients(a, reads, d_final) -> (d_h, d_start)"""
    exercise = Exercise("Exercise 1: the reverse scan")
    rng, nan = np.random.default_rng(), np.nan

    def drawn(L, n, low=0.0):
        return rng.uniform(low, 1, L), rng.standard_normal((L, n)), rng.standard_normal(n)

    a, reads, final = drawn(12, 2, 0.5)
    borders = np.where(np.isin(np.arange(12), (5, 9)), 0, a)
    spoiled = reads.copy()
    spoiled[7] = nan
    cases = {
        "1 token, a = [0.5], reads = [[1]], d_final = [0]": ([0.5], [[1.0]], [0.0]),
        "1 token, a = [0.5], reads = [[1]], d_final = [4]": ([0.5], [[1.0]], [4.0]),
        "a = [0.5, 0.25], reads = [[1], [2]], d_final = [4]": ([0.5, 0.25], [[1.0], [2.0]], [4.0]),
        "a = [0.5, 1, 0.25], reads = [[0], [0], [1]], d_final = [0]": ([0.5, 1.0, 0.25], [[0.0], [0], [1]], [0.0]),
        "a[2] = 0 of 4 tokens": ([1.0, 1, 0, 1], [[1.0], [1], [1], [1]], [1.0]),
        "a[0] = 0": ([0.0, 0.5], [[1.0], [1]], [1.0]),
        "NaN behind a decay of 0": ([1.0, 1, 0, 1], [[1.0], [1], [1], [nan]], [1.0]),
        "NaN in d_final behind a decay of 0": ([1.0, 0.0], [[1.0], [1]], [nan]),
        "NaN between decays of 0": (borders, spoiled, final),
        "decays of 1e-300": (np.full(5, 1e-300), rng.standard_normal((5, 2)), rng.standard_normal(2)),
        "17 tokens of 3 numbers": drawn(17, 3),
        "200 tokens of 2 numbers": drawn(200, 2, 0.9),
    }
    with exercise, time_limit(), _quietly():
        for name, given in cases.items():
            given = [np.array(v, float) for v in given]
            wanted, before = _from_behind(*given), [v.copy() for v in given]
            with garbage_in_empty():
                got = state_gradients(*given)
            at = f"with {name}:"
            d_h, d_start = _pair(got, at, "d_h, d_start")
            _array(d_h, wanted[0], at, "d_h")
            _array(d_start, wanted[1], at, "d_start")
            same = all(np.array_equal(one, other, equal_nan=True) for one, other in zip(given, before))
            exercise.require(same, f"{at} your function changed an argument")
    return exercise.report(f"right in {len(cases)} cases; nothing comes back through a decay of 0")


# Exercise 2: what a decay answers for


def exercise_2(decay_gradients):
    """decay_gradients(flows, crosses, dt, Q) -> (d_log, d_A)"""
    exercise = Exercise("Exercise 2: what a decay answers for")
    rng, single = np.random.default_rng(), np.float32

    def drawn(L, Q, loud=()):
        K = -(-L // Q)
        flows, crosses = rng.standard_normal(L), rng.standard_normal(K)
        for k in loud:  # a chunk whose numbers are far larger than the others'
            flows[k * Q : k * Q + Q] *= 1e7
        return flows, crosses, rng.uniform(0.5, 1, L), Q

    cases = {
        "flows = [3], crosses = [4], dt = [1], Q = 1": ([3], [4], [1], 1),
        "flows = [3], crosses = [4], dt = [0.5], Q = 2": ([3], [4], [0.5], 2),
        "flows = [1, 2], crosses = [8], dt = [1, 1], Q = 2": ([1, 2], [8], [1, 1], 2),
        "flows = [1, 2], crosses = [8, 16], dt = [1, 1], Q = 1": ([1, 2], [8, 16], [1, 1], 1),
        "flows = [1, 2, 4], crosses = [8, 16], dt = [1, 1, 1], Q = 2": ([1, 2, 4], [8, 16], [1, 1, 1], 2),
        "flows = [1, 2, 4, 8], crosses = [0, 0], dt = [1, 2, 3, 4], Q = 2": ([1, 2, 4, 8], [0, 0], [1, 2, 3, 4], 2),
        "12 tokens in chunks of 4, the last one's flows around 1e7": drawn(12, 4, (2,)),
        "30 tokens in chunks of 7, one's flows around 1e7": drawn(30, 7, (3,)),
        "64 tokens in chunks of 64": drawn(64, 64),
        "200 tokens in chunks of 16": drawn(200, 16),
    }
    with exercise, time_limit(), _quietly():
        for name, (flows, crosses, dt, Q) in cases.items():
            flows, crosses, dt = (np.array(v, single) for v in (flows, crosses, dt))
            wanted, largest = np.zeros(len(flows)), np.zeros(len(flows))
            for t in range(len(flows)):
                end = t // Q * Q + Q
                wanted[t] = flows[t:end].astype(float).sum() + float(crosses[t // Q])
                largest[t] = max(1, np.abs(flows[t // Q * Q : end]).sum())
            given = flows.copy(), crosses.copy(), dt.copy(), Q
            with garbage_in_empty():
                got = decay_gradients(*given)
            at = f"with {name}:"
            d_log, d_A = _pair(got, at, "d_log, d_A")
            d_log = array_from(d_log, wanted.shape, at, "d_log")
            _array(np.asarray(d_log, float), wanted, at, "d_log", 1e-6, largest)
            sum_of = (wanted * dt).sum()
            d_A = number_from(lambda d_A=d_A: d_A)
            near = abs(d_A - sum_of) <= 1e-5 * max(1, np.abs(wanted * dt).sum())
            exercise.require(near, f"{at} d_A is {float(d_A):.6g}, expected {sum_of:.6g}")
            same = all(np.array_equal(one, other) for one, other in zip(given, (flows, crosses, dt)))
            exercise.require(same, f"{at} your function changed an argument")
        L, Q = 4096, 16
        flows, crosses, dt, _ = drawn(L, Q)
        given = tuple(v.astype(single) for v in (flows, crosses, dt))
        _cost(decay_gradients, (*given, Q), 4 * L // Q + 100, 20 * 8 * L, f"{L:,} tokens", "a few for each chunk")
    return exercise.report(f"right for {len(cases)} rows of chunks, each chunk to its own digits")


# Exercise 3: memory against time


class _State:
    """A state that counts how many of its kind are alive."""

    __slots__ = ("__weakref__", "number", "value")

    def __init__(self, row, number, value):
        self.number, self.value = number, value
        row.alive.add(self)
        row.most = max(row.most, len(row.alive))


class _Row:
    """Steps over K states, watched."""

    def __init__(self, K, at):
        self.K, self.at, self.alive, self.most, self.steps, self.backs = K, at, weakref.WeakSet(), 0, 0, []

    def step(self, k, h):
        self.expect(k, h, "step")
        self.steps += 1
        return _State(self, k + 1, np.sin(h.value + k))

    def back(self, k, h, d):
        self.expect(k, h, "back")
        wanted = self.K - 1 - len(self.backs)
        if k != wanted:
            raise Wrong(f"{self.at} back was called for step {k}, expected step {wanted}: the last one first")
        self.backs.append(k)
        return np.cos(h.value + k) * d

    def expect(self, k, h, what):
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 0 <= k < self.K:
            raise Wrong(f"{self.at} {what} was called for step {shown(k)}; steps are 0 to {self.K - 1}")
        if not isinstance(h, _State):
            raise Wrong(f"{self.at} {what}({k}, ...) was given {shown(h)}, expected a state")
        if h.number != k:
            raise Wrong(f"{self.at} {what}({k}, ...) was given the state before step {h.number}")


def exercise_3(back_through):
    """back_through(step, back, h0, K, s, d_last) -> the gradient of h0"""
    exercise = Exercise("Exercise 3: memory against time")
    rng = np.random.default_rng()
    cases = [(1, 1), (2, 1), (2, 2), (3, 2), (1, 4), (4, 2), (5, 2), (6, 3), (7, 3), (5, 9), (16, 4), (100, 10)]
    cases += [(64, 1), (64, 64), (97, 10)]
    with exercise, time_limit():
        for K, s in cases:
            at = f"with K = {K} and s = {s}:"
            row, h, d = _Row(K, at), rng.standard_normal(3), rng.standard_normal(3)
            values = [h]
            for k in range(K):
                values.append(np.sin(values[-1] + k))
            wanted = d
            for k in reversed(range(K)):
                wanted = np.cos(values[k] + k) * wanted
            got = back_through(row.step, row.back, _State(row, 0, h), K, s, d.copy())
            exercise.require(
                len(row.backs) == K, f"{at} back was called for {counted(len(row.backs), 'step')}, expected {K}"
            )
            _array(got, wanted, at, "the gradient of h0", 1e-9, 1e-30)
            most = -(-K // s) + s + 1
            exercise.require(
                row.most <= most, f"{at} {counted(row.most, 'state')} were alive at once; wanted: at most {most}"
            )
            exercise.require(
                row.steps <= 2 * K, f"{at} step was called {counted(row.steps, 'time')}; wanted: at most {2 * K}"
            )
    return exercise.report(f"right for {len(cases)} rows; 100 steps with 21 states or fewer")


# Exercise 4: find the bug


def _recurrence(dy, x, A, dt, B, C):
    """dx, dB, dC and d(A dt) of one head, token by token."""
    (L, P), N = x.shape, B.shape[1]
    nothing = np.zeros((1, P, N))
    head = dy[None], x[None], dt[None], A, B[None], C[None], nothing, nothing, np.zeros((1, L), int)
    found = ssd_backward_forms.recurrent(ssd_backward_forms.Head(*head))
    return found.x[0], found.B[0], found.C[0], found.log_decay[0]


def exercise_4(chunked_back):
    """chunked_back(dy, x, dA, dt, B, C, Q) -> dx, dB, dC, d(A dt)"""
    exercise = Exercise("Exercise 4: find the bug")
    rng = np.random.default_rng()
    cases = [(1, 1, 1.0), (2, 2, np.log(2)), (2, 1, np.log(2)), (3, 1, np.log(2)), (4, 2, np.log(2)), (3, 2, np.log(2))]
    cases += [(64, 16, 0.01), (70, 16, 0.01), (33, 1, 0.1), (40, 7, 0.0), (130, 64, 1.0), (50, 10, 3.0)]
    cases += [(int(rng.integers(1, 60)), int(rng.integers(1, 20)), float(rng.uniform(0, 0.2))) for _ in range(8)]
    with exercise, time_limit(), _quietly():
        for L, Q, rate in cases:
            small, (P, N) = L <= 4, (1, 1) if L <= 4 else (3, 2)
            dt = np.ones(L) if small else rng.uniform(0.5, 1.5, L)
            dy, x = np.ones((2, L, P)) if small else rng.standard_normal((2, L, P))
            B, C = np.ones((2, L, N)) if small else rng.standard_normal((2, L, N))
            wanted, arrays = _recurrence(dy, x, -rate, dt, B, C), (dy, x, -rate * dt, dt, B, C)
            given = [v.copy() for v in arrays]
            with garbage_in_empty():
                got = chunked_back(*given, Q)
            at = f"with {counted(L, 'token')} in chunks of {Q}, A dt about {-rate:.2g}:"
            if not isinstance(got, (tuple, list)) or len(got) != 4:
                raise Wrong(f"{at} your function gave {shown(got)}, expected dx, dB, dC and d(A dt)")
            for name, one, right in zip(("dx", "dB", "dC", "d(A dt)"), got, wanted):
                _array(one, right, at, name, EXACT, max(1, np.abs(right).max()))
            same = all(np.array_equal(one, other) for one, other in zip(given, arrays))
            exercise.require(same, f"{at} your function changed an argument")
        L, Q = 1024, 16
        arrays = [rng.standard_normal((L, n)) for n in (3, 3, 2, 2)]
        dt = rng.uniform(0.5, 1.5, L)
        _cost(chunked_back, (*arrays[:2], -0.1 * dt, dt, *arrays[2:], Q), 40 * L // Q + 400, 20 * 8 * L * Q,
              f"{L:,} tokens in chunks of {Q}", f"a few for each of the {L // Q} chunks")  # fmt: skip
    return exercise.report(f"right in {len(cases)} cases, across any border")
