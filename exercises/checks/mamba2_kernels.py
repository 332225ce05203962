"""Checks of chapter 18, exercises 5 and 6: the state step, and the gate within the norm.

The learner's CUDA C++ runs on the SIMT machine, whose counters say what each kernel moves.
"""

import numpy as np

from exercises.checks import time_limit
from exercises.checks.launches import blocks_for, by_warp, compiled, launched, near, requests, unchanged
from lab.check import unset
from lab.exercise import Exercise
from ref.mamba2 import gated_norm, state_step

WARPS, BLOCK = 8, 256
BANKS = "l1tex__data_bank_conflicts_pipe_lsu.sum"
THREADS = "simt__threads_mem_global_op_st.sum"  # that store, by warp


def sectors(report, op):
    return report.counters[f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum"]


def at_most(exercise, made, most, what, at, why):
    exercise.require(
        made <= most, f"right, but at {at} the warps {what.format(f'{made:,}')}; {most:,} are enough: {why}"
    )


def _no_atomics(exercise, report, at):
    made = requests(report, "red") + requests(report, "atom")
    exercise.require(not made, f"right, but at {at} the warps make {made:,} atomic requests; wanted: none")


# Exercise 5: the state step

# batch, nheads, headdim, dstate, ngroups
STEPS = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 33, 1),
    (1, 1, 9, 32, 1),
    (1, 2, 3, 5, 1),
    (1, 4, 8, 64, 2),
    (2, 3, 7, 40, 3),
    (3, 2, 16, 31, 1),
]
LARGE = (2, 4, 16, 128, 2)


def exercise_5(source):
    """CUDA source of state_step."""
    exercise = Exercise("Exercise 5: the state step")
    rng, praise = np.random.default_rng(), ""
    drawn = (int(rng.integers(1, 3)), 2, int(rng.integers(1, 20)), int(rng.integers(1, 140)), 2)
    with exercise, time_limit(60):
        kernel = compiled(source, "state_step")
        for sizes in (*STEPS, drawn):
            _stepped(kernel, rng, *sizes)
        praise = _states_once(exercise, kernel, rng)
    return exercise.report(f"right in {len(STEPS) + 2} cases; {praise}")


def _stepped(kernel, rng, batch, nheads, headdim, dstate, ngroups, **how):
    """Two tokens, one after the other: the report of the second. how: of the launches, besides"""
    at = f"batch = {batch}, nheads = {nheads}, headdim = {headdim}, dstate = {dstate}, ngroups = {ngroups}"
    state = rng.standard_normal((batch, nheads, headdim, dstate)).astype(np.float32)
    A, D = -rng.uniform(0.1, 16, nheads).astype(np.float32), rng.standard_normal(nheads).astype(np.float32)
    for token in range(2):
        x = rng.standard_normal((batch, nheads, headdim)).astype(np.float32)
        dt = rng.uniform(0.001, 0.2, (batch, nheads)).astype(np.float32)
        dt.flat[rng.integers(dt.size)] = (0, 30)[token]  # keeps all; forgets all
        B, C = rng.standard_normal((2, batch, ngroups, dstate)).astype(np.float32)
        wanted, after = state_step(state, x, dt, A, B, C, D=D)
        given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
        before, y = {name: a.copy() for name, a in given.items()}, unset(x.shape)
        sizes = (np.int32(n) for n in (nheads, headdim, dstate, ngroups))
        grid = blocks_for(headdim, WARPS), nheads, batch
        how["check_races"] = state.size < 5000
        report = launched(kernel, grid, BLOCK, state, *given.values(), y, *sizes, at=at, **how)
        near("state", state, after, 1e-5, at)
        near("y", y, wanted, 1e-5, at, size=_size_of_sums(after, C, D, x))
        unchanged(given, before, at)
        state = after.astype(np.float32)
    return report


def _size_of_sums(h, C, D, x):
    """The largest sum of y's addends without their signs, which may cancel."""
    of_heads = np.repeat(np.abs(C), h.shape[1] // C.shape[1], axis=1)
    sums = (np.abs(h) * of_heads[:, :, None]).sum(axis=-1) + np.abs(D[:, None] * x)
    return float(sums.max())


def _states_once(exercise, kernel, rng):
    batch, nheads, headdim, dstate, ngroups = LARGE
    report = _stepped(kernel, rng, *LARGE, by_warp=True)
    at = f"batch = {batch}, nheads = {nheads}, headdim = {headdim}, dstate = {dstate}"
    rows = batch * nheads * headdim
    of_states = rows * dstate // 8
    most = of_states + 2 * of_states + 4 * rows
    loads, stores = sectors(report, "ld"), sectors(report, "st")
    _no_atomics(exercise, report, at)
    at_most(
        exercise, loads, most, "load {} sectors", at,
        f"{of_states:,} of the states, as many of B and of C, and four numbers for each row",
    )  # fmt: skip
    at_most(
        exercise, stores, of_states + rows, "store {} sectors", at,
        f"{of_states:,} of the states, and one for each y",
    )  # fmt: skip
    at_most(
        exercise, int(by_warp(report, THREADS).sum()), rows * dstate + rows, "store with {} threads", at,
        "one for each number of the states, and one for each y",
    )  # fmt: skip
    conflicts = report.counters.get(BANKS, 0)
    exercise.require(not conflicts, f"right, but at {at} there are {conflicts:,} bank conflicts; wanted: none")
    return f"{loads:,} sectors loaded and {stores:,} stored, {of_states:,} of each the states'"


# Exercise 6: the gate within the norm

# tokens, d_inner, ngroups
NORMS = [(1, 1, 1), (1, 33, 1), (2, 256, 1), (3, 300, 1), (2, 96, 3), (1, 1030, 2), (2, 2048, 8)]
WIDE = (3, 2048, 2)


def exercise_6(source):
    """CUDA source of gated_norm."""
    exercise = Exercise("Exercise 6: the gate within the norm")
    rng, praise = np.random.default_rng(), ""
    drawn = (2, 3 * int(rng.integers(1, 400)), 3)
    with exercise, time_limit(60):
        kernel = compiled(source, "gated_norm")
        for sizes in (*NORMS, drawn):
            _normed(kernel, rng, *sizes)
        praise = _read_once(exercise, kernel, rng)
    return exercise.report(f"right in {len(NORMS) + 2} cases; {praise}")


def _normed(kernel, rng, tokens, d_inner, ngroups):
    at = f"{tokens} tokens, d_inner = {d_inner}, ngroups = {ngroups}"
    y = (rng.standard_normal((tokens, d_inner)) * rng.choice([1e-3, 1, 100], (tokens, 1))).astype(np.float32)
    z, weight = 3 * rng.standard_normal((tokens, d_inner)), rng.uniform(0.5, 2, d_inner).astype(np.float32)
    z = z.astype(np.float32)
    z.flat[rng.integers(z.size)] = -100  # whose exp(100) is no float
    given, out = {"y": y, "z": z, "weight": weight}, unset(y.shape)
    before = {name: a.copy() for name, a in given.items()}
    wanted = gated_norm(y, z, weight, 1e-5, ngroups)
    sizes = np.int32(d_inner), np.int32(ngroups), np.float32(1e-5)
    report = launched(kernel, (ngroups, tokens), BLOCK, *given.values(), out, *sizes, at=at, check_races=y.size < 700)
    near("out", out, wanted, 1e-5, at)
    unchanged(given, before, at)
    return report


def _read_once(exercise, kernel, rng):
    tokens, d_inner, ngroups = WIDE
    report, at = _normed(kernel, rng, *WIDE), f"{tokens} tokens, d_inner = {d_inner}, ngroups = {ngroups}"
    _no_atomics(exercise, report, at)
    once = tokens * d_inner // 8
    loads, stores = sectors(report, "ld"), sectors(report, "st")
    at_most(exercise, loads, 3 * once, "load {} sectors", at, "y, z and weight once for each number")
    at_most(exercise, stores, once, "store {} sectors", at, "each result once, and nothing between")
    conflicts = report.counters.get(BANKS, 0)
    exercise.require(not conflicts, f"right, but at {at} there are {conflicts:,} bank conflicts; wanted: none")
    return f"{loads + stores:,} sectors, where a gate and a norm of their own would move {loads + stores + 2 * once:,}"
