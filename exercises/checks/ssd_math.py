"""The checks of chapter 11: segment sums in a band, the matrix form's mask, a scan, the best chunk, a chunked form.

Smallest cases come first, then random ones that are new each time.
"""

import warnings
from contextlib import contextmanager
from math import fsum

import numpy as np

from exercises.checks import array_from, call_text, close, counted, number_from, shown, time_limit
from exercises.checks.costs import counted_memory, garbage_in_empty, limited_steps
from lab.check import apart
from lab.exercise import Exercise, Wrong
from ref import ssd

EXACT = 1e-9


@contextmanager
def _quietly():
    """A learner's overflow is judged by what comes out, not by a warning."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _array(got, wanted, at, what="the result", relative=EXACT, least=1.0):
    """Raise Wrong unless these are the wanted numbers, NaN and inf where they belong.

    Each to `relative` of itself, or of `least` where it is smaller (a number, or an array of them).
    """
    array = array_from(got, wanted.shape, at, what)
    finite = np.isfinite(wanted)
    near = np.abs(array - np.where(finite, wanted, 0)) <= relative * np.maximum(least, np.abs(wanted))
    right = np.where(finite, near, (array == wanted) | (np.isnan(array) & np.isnan(wanted)))
    if not right.all():
        first = tuple(int(i) for i in np.argwhere(~right)[0])
        index = ", ".join(map(str, first))
        has, expected = apart(array[first], wanted[first])
        raise Wrong(f"{at} {what} has {has} at [{index}], expected {expected}")


# Exercise 1: segment sums


def exercise_1(segment_sums):
    """segment_sums(a, width) -> (n, width)"""
    exercise = Exercise("Exercise 1: segment sums")
    rng, inf = np.random.default_rng(), np.inf
    named = {
        "[-1], 1": ([-1.0], 1),
        "[-1, -2], 2": ([-1.0, -2.0], 2),
        "[-1, -2, -3], 3": ([-1.0, -2.0, -3.0], 3),
        "[-1, -2, -3], 2": ([-1.0, -2.0, -3.0], 2),
        "[-1, -2], 4": ([-1.0, -2.0], 4),
        "[-1, -inf, -2, -3], 4": ([-1.0, -inf, -2.0, -3.0], 4),
        "[-inf, -2], 2": ([-inf, -2.0], 2),
        "a[1] = -1e15 and small numbers": ([-0.1, -1e15, -0.3, -0.7, -0.001], 5),
        "17 random numbers": (-rng.uniform(0, 1, 17), 17),
        "64 random numbers, some of -1e12": (np.where(rng.random(64) < 0.1, -1e12, -rng.uniform(0, 1, 64)), 40),
        "40 random numbers, some of -inf": (np.where(rng.random(40) < 0.1, -inf, -rng.uniform(0, 1, 40)), 50),
    }
    with exercise, time_limit(), _quietly():
        for name, (a, width) in named.items():
            a = np.array(a)
            wanted = np.full((len(a), width), -inf)
            for i in range(len(a)):
                for d in range(min(i + 1, width)):
                    wanted[i, d] = fsum(a[i - d + 1 : i + 1])
            at = f"with segment_sums({name}):" if "[-" in name else f"with {name}:"
            given = a.copy()
            with garbage_in_empty():
                got = segment_sums(given, width)
            _array(got, wanted, at, "the result", 1e-12, 0)
            exercise.require(np.array_equal(given, a), f"{at} your function changed its argument")
        n, width = 1000, 32
        _cost(segment_sums, (-rng.uniform(0, 1, n), width), 12 * width + 100, 10 * 8 * n * width,
              f"{n:,} numbers and a width of {width}", "a few for each column")  # fmt: skip
    return exercise.report(f"right for {len(named)} lists, each entry to 12 digits, at the price of the band")


def _cost(function, given, steps, room, what, enough):
    """Raise Wrong if a call makes more steps of Python than that, or takes more bytes."""
    with limited_steps(
        steps,
        f"right, but with {what} your function makes more than {steps:,} steps of Python, lines and calls; wanted: "
        f"{enough}, and no loop over what one operation on arrays can do",
    ):
        function(*given)
    with counted_memory() as most:
        function(*given)
        taken = most()
    if taken > room:
        raise Wrong(
            f"right, but with {what} your function took {taken / 1e6:.1f} MB at once; wanted: at most "
            f"{room / 1e6:.1f}, a few arrays as large as the result needs"
        )


# Exercise 2: the mask


def _matrix(A, dt, B, C, seq_idx):
    """M by loops, one entry at a time."""
    M = np.zeros((len(dt), len(dt)))
    for i in range(len(dt)):
        for j in range(i + 1):
            if seq_idx[i] == seq_idx[j]:
                M[i, j] = (C[i] @ B[j]) * np.exp(A * np.sum(dt[j + 1 : i + 1])) * dt[j]
    return M


def exercise_2(matrix_form):
    """matrix_form(A, dt, B, C, seq_idx) -> (L, L)"""
    exercise = Exercise("Exercise 2: the mask")
    rng = np.random.default_rng()

    def case(lengths, N, rate=1.0, even=False, **nan):
        L = sum(lengths)
        dt = np.ones(L) if even else rng.uniform(0.5, 1.5, L)
        B, C = (np.ones((2, L, N))) if even else rng.standard_normal((2, L, N))
        for name, token in nan.items():
            {"dt": dt, "B": B, "C": C}[name][token] = np.nan
        return -rate, dt, B, C, np.repeat(np.arange(len(lengths)), lengths)

    cases = {
        "1 token": case([1], 1),
        "3 tokens, A = -ln 2, all else 1": case([3], 1, np.log(2), even=True),
        "2 tokens": case([2], 1),
        "4 tokens, dstate 3": case([4], 3),
        "2 sequences of 2, all else 1": case([2, 2], 1, np.log(2), even=True),
        "sequences of 3, 1 and 5": case([3, 1, 5], 2),
        "A dt around -1000": case([4], 1, 1000.0),
        "NaN in B of the first of 2 sequences": case([2, 3], 2, B=1),
        "NaN in C of the last of 2 sequences": case([2, 3], 2, C=3),
        "NaN in dt of the first of 2 sequences": case([2, 3], 2, dt=1),
        "NaN in B of the last of 3 tokens": case([3], 2, B=2),
    }
    for count in (1, 2, 3, 4, 5, 6):
        lengths = rng.integers(1, 9, count).tolist()
        cases[f"random sequences of {', '.join(map(str, lengths))}"] = case(lengths, int(rng.integers(1, 5)), 0.3)
    with exercise, time_limit(), _quietly():
        for name, arrays in cases.items():
            wanted = _matrix(*arrays)
            got = matrix_form(*(np.copy(v) if np.ndim(v) else v for v in arrays))
            _array(got, wanted, f"with {name}:", "M", least=wanted != 0)  # what is 0 must be 0 exactly
    return exercise.report(f"right in {len(cases)} cases; nothing passes from one sequence to another")


# Exercise 3: state passing as a scan


def exercise_3(combine, states_before):
    """combine(first, second) -> (decays, adds); states_before(combine, decays, adds, initial) -> (K, n)"""
    exercise = Exercise("Exercise 3: state passing as a scan")
    rng = np.random.default_rng()
    with exercise, time_limit(), _quietly():
        for m, n in ((1, 1), (3, 2), (5, 4)):
            d1, d2 = rng.uniform(0, 1, (2, m))
            s1, s2 = rng.standard_normal((2, m, n))
            got = combine((d1.copy(), s1.copy()), (d2.copy(), s2.copy()))
            at = f"with m = {m} and n = {n}, combine:"
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{at} gave {shown(got)}, expected a pair (decays, adds)")
            _array(got[0], d1 * d2, at, "decays")
            _array(got[1], d2[:, None] * s1 + s2, at, "adds")

        for K in (1, 2, 3, 4, 5, 8, 9, 31, 64, 100):
            decays, adds, initial = rng.uniform(0, 1, K), rng.standard_normal((K, 3)), rng.standard_normal(3) + 1
            most = int(np.ceil(np.log2(K)))
            for what, operation in {"the chapter's operation": _decayed, "plain sums as `combine`": _added}.items():
                wanted = [initial]
                for k in range(K - 1):
                    wanted.append(operation(([1.0], wanted[-1][None]), (decays[k : k + 1], adds[k : k + 1]))[1][0])
                calls = []
                at = f"with K = {K}, {what}:"

                def watched(first, second, operation=operation, calls=calls, at=at):
                    calls.append(None)
                    for decay, add in (first, second):
                        found = np.shape(decay), np.shape(add)
                        if len(found[0]) != 1 or found[1] != (*found[0], 3):
                            shapes = f"{found[0]} and {found[1]}, expected (m,) and (m, 3)"
                            raise Wrong(f"{at} `combine` was given decays and adds of shapes {shapes}")
                    return operation(first, second)

                got = states_before(watched, decays.copy(), adds.copy(), initial.copy())
                _array(got, np.array(wanted), at, "the result")
                made = counted(len(calls), "time")
                exercise.require(
                    len(calls) <= most,
                    f"{counted(K, 'chunk')}: `combine` was called {made}; wanted: at most {most}",
                )
    return exercise.report("right for 10 rows of chunks; 100 chunks in 7 calls")


def _decayed(first, second):
    (d1, s1), (d2, s2) = first, second
    return np.asarray(d1) * d2, np.asarray(d2)[:, None] * s1 + s2


def _added(first, second):
    """Another associative operation, whose answer is a running sum."""
    (d1, s1), (d2, s2) = first, second
    return np.asarray(d1) + d2, np.asarray(s1) + s2


# Exercise 4: the best chunk


def _flops(L, Q, H, P, N):
    total = 0
    for begin in range(0, L, Q):
        q = min(Q, L - begin)
        total += q * (q + 1) // 2 * (2 * N + 2 * P * H) + 4 * P * N * H * q + 2 * P * N * H
    return total


def _seconds(Q, L, H, P, N, bandwidth, rate):
    moved = 2 * (2 * H * P + H + 2 * N) * L + 8 * P * N * H * -(-L // Q)
    return max(_flops(L, Q, H, P, N) / rate, moved / bandwidth)


def exercise_4(chunk_flops, best_chunk):
    """chunk_flops(L, Q, H, P, N) -> flops; best_chunk(L, H, P, N, bandwidth, rate, sizes) -> one of sizes"""
    exercise = Exercise("Exercise 4: the best chunk")
    rng = np.random.default_rng()
    counts = [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1), (2, 1, 1, 1, 1), (3, 2, 1, 1, 1), (3, 4, 1, 1, 1), (4, 2, 3, 1, 1)]
    counts += [(4, 2, 1, 5, 1), (4, 2, 1, 1, 7), (65, 16, 8, 64, 128), (65536, 256, 80, 64, 128)]
    counts += [(10**15 + 1, 10**15, 80, 64, 128)]  # a float cannot hold so many digits
    counts += [tuple(int(n) for n in rng.integers(1, 200, 5)) for _ in range(30)]
    cases = [
        (4, 1, 1, 1, 1e12, 1.0, [1, 2, 4]),  # flops alone
        (64, 1, 8, 8, 1.0, 1e12, [8, 16, 32]),  # bytes alone: the largest
        (64, 1, 8, 8, 1.0, 1e12, [64, 100, 80]),  # all are one chunk: equal
        (65536, 80, 64, 128, 4.26e12, 658e12, [16, 32, 64, 128, 256, 512, 1024]),
        (65536, 80, 64, 128, 4.26e12, 658e12, [1024, 256, 16, 512, 64, 128, 32]),
        (1000, 4, 16, 32, 1e9, 1e10, [100, 7, 50]),
    ]
    for _ in range(40):
        L, H, P, N = (int(n) for n in rng.integers((1, 1, 1, 1), (3000, 20, 100, 200)))
        sizes = rng.choice([1, 2, 3, 4, 8, 16, 24, 32, 64, 100, 128, 256, 512, 1024], 6, replace=False).tolist()
        cases.append((L, H, P, N, 1e9, float(10 ** rng.uniform(9.5, 11.5)), sizes))
    with exercise, time_limit(20):
        for case in counts:
            got, wanted = number_from(chunk_flops, *case, whole=True), _flops(*case)
            exercise.require(got == wanted, f"{call_text(chunk_flops, *case)} gave {got}, expected {wanted}")

        for case in cases:
            *widths, bandwidth, rate, sizes = case
            times = {Q: _seconds(Q, *widths, bandwidth, rate) for Q in sizes}
            got = number_from(best_chunk, *case, whole=True)
            call = call_text(best_chunk, *case)
            exercise.require(got in times, f"{call} gave {got}, which is none of the sizes")
            best = min(times.values())
            longer, shortest = apart(times[got], best)
            exercise.require(
                close(times[got], best),
                f"{call} gave {got}: {longer} s, and {min(times, key=times.get)} takes {shortest} s",
            )
            smallest = min(Q for Q in sizes if close(times[Q], best))
            exercise.require(got == smallest, f"{call} gave {got}; {smallest} takes as long, and is smaller")
    return exercise.report(f"right for {len(counts)} counts and {len(cases)} choices")


# Exercise 5: find the bug


def exercise_5(chunked):
    """chunked(x, dt, A, B, C, Q, dt_bias, initial) -> (y, final state)"""
    exercise = Exercise("Exercise 5: find the bug")
    rng = np.random.default_rng()
    cases = [(1, 1, True), (1, 2, False), (2, 2, False), (3, 2, True), (4, 4, False), (4, 2, True)]
    cases += [(64, 16, True), (70, 16, False), (33, 1, True), (40, 7, True)]
    cases += [(int(rng.integers(1, 60)), int(rng.integers(1, 20)), True) for _ in range(8)]
    with exercise, time_limit(), _quietly():
        for L, Q, starts in cases:
            small = L <= 4  # by hand: softplus(0) is ln 2 and softplus(ln 3) is ln 4, so a token halves or quarters
            P, N = (1, 1) if small else (3, 2)
            x, dt, B, C, A, bias, initial = _layer(rng, L, P, N)
            if small:
                x, B, C = np.ones((L, P)), *np.ones((2, L, N))
                dt, A, bias, initial = np.resize([0, np.log(3), np.log(3)], L), -1.0, 0.0, np.ones((P, N))
            initial *= starts
            y, final = ssd.ssd_recurrent(
                *(x[None, :, None], dt[None, :, None], np.array([A]), B[None, :, None], C[None, :, None]),
                **dict(dt_bias=np.array([bias]), dt_softplus=True, initial_states=initial[None, None]),
            )
            given = x.copy(), dt.copy(), A, B.copy(), C.copy(), Q, bias, initial.copy()
            with garbage_in_empty():
                got = chunked(*given)
            at = f"with {counted(L, 'token')} in chunks of {Q}, {'an' if starts else 'no'} initial state:"
            if not isinstance(got, (tuple, list)) or len(got) != 2:
                raise Wrong(f"{at} your function gave {shown(got)}, expected a pair (y, final state)")
            _array(got[0], y[0, :, 0], at, "y")
            _array(got[1], final[0, 0], at, "the final state")
            same = all(
                np.array_equal(a, b) for a, b in zip((x, dt, B, C, initial), (*given[:2], *given[3:5], given[7]))
            )
            exercise.require(same, f"{at} your function changed an argument")
        L, Q = 1024, 16
        x, dt, B, C, A, bias, initial = _layer(rng, L, 3, 2)
        _cost(chunked, (x, dt, A, B, C, Q, bias, initial), 30 * L // Q + 200, 12 * 8 * L * Q,
              f"{L:,} tokens in chunks of {Q}", f"a few for each of the {L // Q} chunks")  # fmt: skip
    return exercise.report(f"right in {len(cases)} cases, still by chunks")


def _layer(rng, L, P, N):
    x, dt, (B, C) = rng.standard_normal((L, P)), rng.standard_normal(L), rng.standard_normal((2, L, N))
    return x, dt, B, C, float(-rng.uniform(0.2, 2)), float(rng.standard_normal()), rng.standard_normal((P, N))
