"""Measure the matmul ladder at 1024 cubed; the Python loops at 96 cubed, where they take a fifth of a second."""

import numpy as np

import ref.matmul
from kernels.cpu_matmul import RUNGS, work
from lab import Ladder, check, hostile_shapes

SIZE, PYTHON_SIZE = 1024, 96


def ladders(seconds=1.0):
    """Check, then time, every rung; NumPy's `A @ B` is the peer. Returns a list of one Ladder."""
    ladder = Ladder(f"matmul {SIZE} × {SIZE} × {SIZE}, float32", bound="flops")
    for rung in RUNGS:
        slow = rung.name == "python_loops"
        size = PYTHON_SIZE if slow else SIZE
        title = f"{rung.title} (at {size} cubed)" if slow else rung.title
        shapes = hostile_shapes(3, long=67 if slow else 1023)
        verdict = check(rung.function, ref.matmul.matmul, _inputs, shapes, out=_out)
        A, B, C = _matrices(size)
        moved, flops = work(size, size, size)
        call = lambda run=rung.function, A=A, B=B, C=C: run(A, B, out=C)  # noqa: E731 - one closure a rung
        ladder.plan(title, call, bytes=moved, flops=flops, verdict=verdict, sources=rung.sources)
    A, B, C = _matrices(SIZE)
    moved, flops = work(SIZE, SIZE, SIZE)
    ladder.plan("NumPy A @ B", lambda: np.matmul(A, B, out=C), bytes=moved, flops=flops)
    return [ladder.again(seconds)]


def _matrices(size):
    rng = np.random.default_rng()
    return [rng.standard_normal((size, size), np.float32) for _ in range(3)]


def _inputs(rng, m, n, k):
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)


def _out(m, n, k):
    return (m, n), np.float32
