"""The checks of chapter 12: bytes between kernels, a running sum, a chunk's state and outputs, a layer with bugs.

Kernels are Triton, run in its interpreter. Smallest cases come first, then random ones that are new each time.
"""

import math
import warnings

import numpy as np
import torch

from exercises.checks import call_text, counted, number_from, time_limit
from exercises.checks.triton_launch import guarded, launched, near, output
from lab.exercise import Exercise
from ref import ssd

TILE = 64  # exercise 1
ROUNDING = 2e-3  # of products of fp16 factors
LIMIT = 60  # seconds


def _between(L, Q, H, P, N, G):
    tiles = Q // TILE * (Q // TILE + 1) // 2
    return 8 * 3 * L * H + 2 * 4 * G * (L // Q) * tiles * TILE * TILE + 4 * 4 * (L // Q) * H * P * N


def exercise_1(between):
    """between(L, Q, H, P, N, G) -> bytes"""
    exercise = Exercise("Exercise 1: what lies between")
    rng = np.random.default_rng()
    cases = [(64, 64, 1, 1, 1, 1), (128, 128, 1, 1, 1, 1), (65536, 256, 80, 64, 128, 1)]
    for _ in range(20):
        Q = 64 << rng.integers(4)
        H, G = (2 ** rng.integers(1, 6, 2)).tolist()
        cases.append(
            (int(Q * rng.integers(1, 50)), int(Q), H * G, int(rng.integers(1, 128)), int(rng.integers(1, 200)), G)
        )
    with exercise, time_limit():
        for case in cases:
            got, wanted = number_from(between, *case, whole=True), _between(*case)
            exercise.require(got == wanted, f"{call_text(between, *case)} gave {got:,}, expected {wanted:,}")
    return exercise.report(f"right on {len(cases)} shapes")


# Kernels


def _layer(rng, L, Q, P, N, rate, chunked=True):
    """A head: x, dt, A, B, C as fp16 or fp32 tensors between NaNs, and the steps of the reference, in float64."""
    x, B, C = (rng.standard_normal(shape).astype(np.float16) for shape in ((L, P), (L, N), (L, N)))
    dt = rng.uniform(0.01, 1, L).astype(np.float32)
    A = np.array([-rate], np.float32)
    dA_cumsum, steps = ref_steps = ssd.chunk_cumsum(dt[None, :, None], A, Q)
    cum = dA_cumsum[0, 0] * math.log2(math.e)
    return x, dt, A, B, C, ref_steps, cum, steps[0, 0]


def _fours(array):
    """(L, n) as the reference wants it: (1, L, 1, n)."""
    return array.astype(np.float64)[None, :, None]


def _cases(rng):
    """(seqlen, chunk_size, headdim, dstate, rate of decay), smallest first."""
    named = [
        (1, 16, 16, 16, 1),
        (16, 16, 16, 16, 1),
        (17, 16, 16, 32, 1),
        (50, 32, 32, 16, 0.1),
        (40, 16, 16, 16, 2000),
    ]
    return [*named, *((int(rng.integers(1, 150)), 32, 16, 32, float(rng.uniform(0, 3))) for _ in range(3))]


def _at(L, Q, rate):
    return f"with {counted(L, 'token')} in chunks of {Q}, A = {-rate:.3g}"


def _seed():
    warnings.simplefilter("ignore")
    return np.random.default_rng()


def exercise_2(kernel):
    """cumsum_kernel(dt, A, cum, seqlen, nheads, Q) on a grid of (chunks, nheads)"""
    exercise = Exercise("Exercise 2: running sums")
    with exercise, time_limit(LIMIT), warnings.catch_warnings():
        rng = _seed()
        for L, Q, H in [
            (16, 16, 1),
            (1, 16, 1),
            (16, 16, 3),
            (33, 16, 2),
            (100, 64, 5),
            (int(rng.integers(1, 200)), 32, 4),
        ]:
            dt = rng.uniform(0.01, 1, (L, H)).astype(np.float32)
            A = -rng.uniform(0.1, 4, H).astype(np.float32)
            chunks = -(-L // Q)
            cum = output(H, chunks, Q)
            tensors = {"dt": guarded(dt), "A": guarded(A), "cum": cum}
            counts = launched(kernel, "dt A cum seqlen nheads Q", (chunks, H), tensors, L, H, Q)
            wanted = ssd.chunk_cumsum(dt[None], A, Q)[0][0] * math.log2(math.e)
            at = f"with {counted(L, 'token')}, {counted(H, 'head')}, chunks of {Q}"
            near(cum, wanted, at, "cum", 1e-5)
            read = counts.read["dt"]
            exercise.require(read <= L * H, f"{at}: {read} elements of dt were read, expected {L * H}, each once")
    return exercise.report("right on 6 shapes, each dt read once")


def exercise_3(kernel):
    """state_kernel(x, B, dt, cum, states, seqlen, P, N, Q) on a grid of (chunks,)"""
    exercise = Exercise("Exercise 3: what a chunk adds")
    with exercise, time_limit(LIMIT), warnings.catch_warnings():
        rng = _seed()
        cases = _cases(rng)
        for L, Q, P, N, rate in cases:
            x, dt, A, B, _, (dA_cumsum, steps), cum, dts = _layer(rng, L, Q, P, N, rate)
            chunks = -(-L // Q)
            states = output(chunks, P, N)
            tensors = {
                "x": guarded(x, torch.float16), "B": guarded(B, torch.float16), "dt": guarded(dts),
                "cum": guarded(cum), "states": states,
            }  # fmt: skip
            counts = launched(kernel, "x B dt cum states seqlen P N Q", (chunks,), tensors, L, P, N, Q)
            wanted = ssd.chunk_state(_fours(B), _fours(x), steps, dA_cumsum)[0, :, 0]
            at = _at(L, Q, rate)
            near(states, wanted, at, "states", ROUNDING)
            for name, size in (("x", P), ("B", N)):
                read = counts.read[name]
                exercise.require(read <= L * size, f"{at}: {read} elements of {name} were read, expected {L * size}")
    return exercise.report(f"right on {len(cases)} shapes, x and B read once")


def exercise_4(kernel):
    """scan_kernel(x, C, CB, dt, cum, states, y, seqlen, P, N, Q) on a grid of (chunks,)"""
    exercise = Exercise("Exercise 4: the outputs of a chunk")
    with exercise, time_limit(LIMIT), warnings.catch_warnings():
        rng = _seed()
        cases = _cases(rng)
        for L, Q, P, N, rate in cases:
            x, dt, A, B, C, (dA_cumsum, steps), cum, dts = _layer(rng, L, Q, P, N, rate)
            table = ssd.chunk_bmm(_fours(C), _fours(B), Q)
            states = rng.standard_normal((1, -(-L // Q), 1, P, N)).astype(np.float32)
            wanted = ssd.chunk_scan(table, _fours(x), steps, dA_cumsum, _fours(C), states.astype(float))[0, :, 0]
            triangle = np.where(np.tri(Q, dtype=bool), table[0, :, 0], np.nan)  # above it, nothing was written
            y = output(L, P)
            tensors = {
                "x": guarded(x, torch.float16), "C": guarded(C, torch.float16), "CB": guarded(triangle),
                "dt": guarded(dts), "cum": guarded(cum), "states": guarded(states[0, :, 0]), "y": y,
            }  # fmt: skip
            counts = launched(kernel, "x C CB dt cum states y seqlen P N Q", (-(-L // Q),), tensors, L, P, N, Q)
            at = _at(L, Q, rate)
            near(y, wanted, at, "y", ROUNDING)
            for name, count in (("x", L * P), ("states", states.size)):
                read = counts.read[name]
                exercise.require(read <= count, f"{at}: {read} elements of {name} were read, expected {count}")
    return exercise.report(f"right on {len(cases)} shapes, x and states read once")


def exercise_5(kernel):
    """layer_kernel(x, B, C, dt, cum, y, final, seqlen, P, N, Q) on a grid of one program"""
    exercise = Exercise("Exercise 5: find the bug")
    with exercise, time_limit(LIMIT), warnings.catch_warnings():
        rng = _seed()
        cases = _cases(rng)
        fixed = [(32, 16, 16, 16, 0.1), (16, 16, 16, 16, 300), (3, 16, 16, 16, 1)]
        for case in fixed:  # always the same numbers: the notebook shows what is said of the stub
            _run_layer(kernel, np.random.default_rng(12), *case)
        for case in cases:
            _run_layer(kernel, rng, *case)
    return exercise.report(f"right on {len(fixed) + len(cases)} shapes")


def _run_layer(kernel, rng, L, Q, P, N, rate, tolerance=ROUNDING):
    x, dt, A, B, C, _, cum, dts = _layer(rng, L, Q, P, N, rate)
    y, final = output(L, P), output(P, N)
    tensors = {
        "x": guarded(x), "B": guarded(B), "C": guarded(C), "dt": guarded(dt), "cum": guarded(cum.reshape(-1)[:L]),
        "y": y, "final": final,
    }  # fmt: skip
    launched(kernel, "x B C dt cum y final seqlen P N Q", (1,), tensors, L, P, N, Q)
    wanted, last = ssd.ssd_recurrent(_fours(x), dt[None, :, None].astype(float), A.astype(float), _fours(B), _fours(C))
    at = _at(L, Q, rate)
    near(y, wanted[0, :, 0], at, "y", tolerance)
    near(final, last[0, 0], at, "final", tolerance)
