"""Triton kernels as Triton compiles them for a card, on the SIMT machine."""

import numpy as np
import pytest

import simt

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from lab import triton_on_simt
from lab.interpreter import interpreter


@triton.jit
def scaled(x, y, n, factor, BLOCK: tl.constexpr, PLUS: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n, other=0) * factor + PLUS, at < n)


@triton.jit
def handed_on(x, flag, ORDER: tl.constexpr):
    at, chunk = tl.arange(0, 32), tl.program_id(0)
    while tl.atomic_add(flag, 0, sem="acquire") < chunk:
        pass
    tl.store(x + at, tl.load(x + at) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flag, chunk + 1, sem=ORDER)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_it_runs_what_triton_compiled(dtype):
    x, y = np.arange(100, dtype=dtype), np.full(104, -1, dtype)
    given = {"x": x, "y": y, "n": np.int32(100), "factor": np.float32(2), "BLOCK": 32}
    triton_on_simt.run(scaled, 4, given, num_warps=1)
    assert (y[:100] == 2 * x + 1).all() and (y[100:] == -1).all()
    report = triton_on_simt.run(scaled, 4, given | {"PLUS": 3}, num_warps=1)
    assert (y[:100] == 2 * x + 3).all() and report.counters["smsp__inst_executed.sum"] > 0


def test_it_sees_the_order_that_the_interpreter_does_not():
    for order in ("release", "relaxed"):
        x, flag = torch.zeros(32), torch.zeros(1, dtype=torch.int32)
        with interpreter(handed_on) as run:
            run[(3,)](x, flag, ORDER=order)
        assert (x == 3).all()
    given = {"x": np.zeros(32, np.float32), "flag": np.zeros(1, np.int32), "ORDER": "release"}
    triton_on_simt.run(handed_on, 3, given, num_warps=1, check_races=True)  # after the interpreter, in one process
    assert (given["x"] == 3).all()
    with pytest.raises(simt.RaceError, match="no release covers it"):
        triton_on_simt.run(handed_on, 3, given | {"flag": np.zeros(1, np.int32), "ORDER": "relaxed"}, num_warps=1,
                           check_races=True)  # fmt: skip


def test_what_it_cannot_take_is_named():
    with pytest.raises(TypeError, match="scaled: y is missing, got x"):
        triton_on_simt.compiled(scaled, {"x": np.zeros(4, np.float32)})
    with pytest.raises(TypeError, match="scaled: x must be of float16, float32, int32 or int64, got float64"):
        triton_on_simt.compiled(scaled, {"x": np.zeros(4)})
    with pytest.raises(TypeError, match="scaled: it has no arguments named z, BLOK"):
        triton_on_simt.compiled(scaled, {"x": np.zeros(4, np.float32), "z": 1, "BLOK": 2})
