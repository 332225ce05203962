"""Measure the GEMV ladder on the shapes of a 7-billion-parameter model: 14336 × 4096 and back, and 32000 × 4096."""

import itertools

import numpy as np

import ref.gemv
from kernels.cpu_gemv import RUNGS, work
from lab import Ladder, check, hostile_shapes, machine

SHAPES = [(14336, 4096), (4096, 14336), (32000, 4096)]


def ladders(seconds=1.0):
    """Check, then time, every rung on every shape; NumPy's `W @ x` is the peer. Returns one Ladder a shape."""
    return [_ladder(*shape, seconds) for shape in SHAPES]


def cold_copies(matrix):
    """Enough copies of a matrix that by the time the first comes round again, no cache holds any of it."""
    wanted = max(256 << 20, 4 * max(machine.cache_bytes().values(), default=0))
    return [matrix, *(matrix.copy() for _ in range(wanted // matrix.nbytes))]


def _ladder(rows, cols, seconds):
    rng = np.random.default_rng()
    single, x = rng.standard_normal((rows, cols), np.float32), rng.standard_normal(cols, np.float32)
    matrices = {np.float32: cold_copies(single), np.float16: cold_copies(single.astype(np.float16))}
    y = np.empty(rows, np.float32)
    ladder = Ladder(f"GEMV {rows} × {cols}", bound="read")
    calls = []
    for rung in RUNGS:
        dtype = np.float16 if rung.name == "half" else np.float32
        verdict = check(rung.function, ref.gemv.gemv, _inputs(dtype), hostile_shapes(2), out=_out)
        calls.append((rung.title, dtype, lambda W, run=rung.function: run(W, x, out=y), verdict, rung.sources))
    calls.append(("NumPy W @ x", np.float32, lambda W: np.matmul(W, x, out=y), None, ()))
    for title, dtype, call, verdict, sources in calls:
        turn = itertools.cycle(matrices[dtype])
        moved, flops = work(matrices[dtype][0])
        run = lambda call=call, turn=turn: call(next(turn))  # noqa: E731 - each rung keeps its own place in the cycle
        ladder.plan(title, run, bytes=moved, flops=flops, verdict=verdict, sources=sources)
    return ladder.again(seconds)


def _inputs(dtype):
    return lambda rng, rows, cols: (
        rng.standard_normal((rows, cols)).astype(dtype),
        rng.standard_normal(cols).astype(np.float32),
    )


def _out(rows, cols):
    return (rows,), np.float32
