"""How an example is launched: its file compiled, its arguments made, its results compared."""

from pathlib import Path

import numpy as np

import simt


def source(name):
    """The CUDA C++ of an example."""
    return Path(__file__).with_name(f"{name}.cu").read_text(encoding="utf-8")


class Launcher:
    """Compiles one file, launches its kernels by name, and counts the launches.

    launch("saxpy", grid, block, n, a, x, y): Python's ints and floats are int and float to the kernel.
    """

    def __init__(self, name, instances=(), seed=0):
        self.name = name
        self.module = simt.compile(source(name), name=f"{name}.cu", instances=instances)
        self.random = np.random.default_rng([seed, *name.encode()])
        self.launches, self.launched = 0, set()

    def __call__(self, kernel, grid, block, *args, **how):
        given = [np.int32(a) if type(a) is int else np.float32(a) if type(a) is float else a for a in args]
        self.launches += 1
        self.launched.add(kernel)
        return self.module[kernel](grid, block, *given, **{"check_races": True, **how})

    def floats(self, *shape):
        """Normally distributed float32."""
        return self.random.standard_normal(shape, dtype=np.float32)

    def ints(self, low, high, *shape):
        """int32 from low on, below high."""
        return self.random.integers(low, high, shape, np.int32)


def unset(*shape, dtype=np.float32):
    """An output before the launch: NaN, or what no result is."""
    return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max, dtype)


def blocks(n, block):
    """How many blocks cover n."""
    return -(-n // block)


def close(what, got, wanted, tolerance=1e-5):
    """AssertionError unless `got` is `wanted`, a float64 array, but for rounding: relative to the largest element."""
    wanted = np.asarray(wanted, np.float64)
    scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
    error = np.abs(np.asarray(got, np.float64) - wanted)
    at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape) if error.size else ()
    wrong = error.size and not error[at] <= tolerance * scale
    assert not wrong, (
        f"{what}: expected {wanted[at]:.9g} at {[int(i) for i in at]}; got {float(np.asarray(got)[at]):.9g}"
    )


def same(what, got, wanted):
    """AssertionError unless the arrays are equal, element by element."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape, f"{what}: expected shape {wanted.shape}; got {got.shape}"
    wrong = np.argwhere(got != wanted)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(f"{what}: expected {wanted[at]} at {list(at)}; got {got[at]} ({len(wrong)} are wrong)")
