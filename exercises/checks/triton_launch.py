"""Run a learner's Triton kernel in Triton's interpreter, and see what it reads and writes.

    counts = launched(kernel, "x y n BLOCK", (grid,), {"x": x, "y": y}, n, 64)
    counts.read["x"]           elements of x that were loaded, one that is loaded twice counted twice

A load or store outside all tensors is a sentence, and not a crash. Where a mask is false and tl.load is given no
`other`, a card may have anything: here it is NaN, and -1 in whole numbers.
"""

import contextlib
from collections import Counter
from types import SimpleNamespace

import numpy as np
from triton.runtime import interpreter as of_triton
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from exercises.checks import shown
from kernels.ssd.launching import interpreter
from lab.exercise import NOT_DONE, Wrong

ENDLESS = "still running after"  # of exercises.checks.time_limit


def launched(kernel, arguments, grid, tensors, *rest):
    """kernel[grid](*tensors, *rest) on CPU tensors. Returns what it `read` and `wrote`, by tensor.

    arguments  the names that the kernel must have, in one string
    """
    if not isinstance(kernel, (JITFunction, InterpretedFunction)):
        raise Wrong(f"expected a kernel, a function with @triton.jit, got {shown(kernel)}")
    if list(kernel.arg_names) != arguments.split():
        raise Wrong(f"the kernel's arguments must be {', '.join(arguments.split())}, got {', '.join(kernel.arg_names)}")
    counts = SimpleNamespace(read=Counter(), wrote=Counter())
    try:
        with _watched(tensors, counts), interpreter(kernel) as run, np.errstate(all="ignore"):
            run[(*grid, 1, 1)[:3]](*tensors.values(), *rest)
    except InterpreterError as error:
        _tell(error)
    return counts


def _tell(error):
    """What went wrong in the kernel, as it would be told of a plain function."""
    said = str(error)
    if NOT_DONE in said:
        raise NotImplementedError(NOT_DONE) from None
    cause = error.__cause__ or error
    if isinstance(cause, Wrong):
        raise cause from None
    raise Wrong(f"the kernel stopped: {type(cause).__name__}: {shown(str(cause), 200)}") from None


class _Watch:
    """Triton's loads and stores, looked at on their way."""

    def __init__(self, real, tensors, counts):
        self._real, self._counts = real, counts
        self._places = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in tensors.items()}

    def __getattr__(self, name):
        return getattr(self._real, name)

    def load(self, pointers, mask, *rest):
        self._look("read", pointers, mask, self._counts.read)
        return self._real.load(pointers, mask, *rest)

    def store(self, pointers, value, mask):
        self._look("wrote", pointers, mask, self._counts.wrote)
        return self._real.store(pointers, value, mask)

    def _look(self, did, pointers, mask, counts):
        asked = np.asarray(pointers)[np.broadcast_to(np.asarray(mask), np.shape(pointers)).astype(bool)]
        found = np.zeros(asked.shape, bool)
        for name, (begin, end) in self._places.items():
            inside = (asked >= begin) & (asked < end)
            counts[name] += int(inside.sum())
            found |= inside
        if not found.all():
            place = int(asked[~found][0])
            name = min(self._places, key=lambda n: min(abs(place - edge) for edge in self._places[n]))
            begin, end = self._places[name]
            far = f"{begin - place} bytes before the first" if place < begin else f"{place - end} bytes behind the last"
            raise Wrong(f"the kernel {did} outside all arrays, {far} element of {name}; is a mask missing?")


def _without_other(load):
    """create_masked_load of Triton's interpreter, which has 0 for what is not loaded, with all bits set instead."""

    def masked_load(builder, pointers, mask, other, *rest):
        if other is None:
            element = pointers.get_element_ty()
            kind = np.dtype(of_triton._get_np_dtype(element))
            bits = np.full(np.shape(pointers.data), -1, f"i{kind.itemsize}")
            other = of_triton.TensorHandle(bits.view(kind), element)
        return load(builder, pointers, mask, other, *rest)

    return masked_load


@contextlib.contextmanager
def _watched(tensors, counts):
    real, builder = of_triton._interpreter, of_triton.InterpreterBuilder
    load = builder.create_masked_load
    of_triton._interpreter = _Watch(real, tensors, counts)
    builder.create_masked_load = _without_other(load)
    try:
        yield
    finally:
        of_triton._interpreter, builder.create_masked_load = real, load
