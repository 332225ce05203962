"""What a learner's Python costs, counted and not timed: steps, memory, multiplications. And memory full of garbage."""

import contextlib
import ctypes
import os
import sys
import tracemalloc

import numpy as np

from lab.exercise import Wrong

OF_NUMPY = os.path.dirname(np.__file__) + os.sep


@contextlib.contextmanager
def limited_steps(most, told):
    """Raise Wrong(told) as soon as Python has made more steps: lines and calls, but for those within NumPy.

    A loop over tokens shows, and one operation on an array of them is one step.
    """
    made = 0

    def count():
        nonlocal made
        made += 1
        if made == most + 1:
            raise Wrong(told)

    def line(frame, event, _):
        if event == "line":
            count()
        return line

    def call(frame, event, _):
        if frame.f_code.co_filename.startswith(OF_NUMPY):
            return None
        count()
        return line

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
    if made > most:  # the learner's code has caught it
        raise Wrong(told)


@contextlib.contextmanager
def counted_memory():
    """Gives a function that says by how many bytes memory had grown at most, since the start."""
    running = tracemalloc.is_tracing()
    if not running:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        if not running:
            tracemalloc.stop()


@contextlib.contextmanager
def garbage_in_empty():
    """np.empty and np.empty_like give what they promise: anything. (Often it is zeros, by luck.)"""
    real = np.empty, np.empty_like

    def filled(make):
        def empty(*args, **named):
            array = make(*args, **named)
            if not array.dtype.hasobject:
                ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)  # NaN, or -1
            return array

        return empty

    np.empty, np.empty_like = map(filled, real)
    try:
        yield
    finally:
        np.empty, np.empty_like = real


class Watched(np.ndarray):
    """An array whose products are counted: elements that came out of multiplications with it, in `Watched.products`."""

    products = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **named):
        plain = [a.view(np.ndarray) if isinstance(a, Watched) else a for a in inputs]
        if out is not None:
            named["out"] = tuple(a.view(np.ndarray) if isinstance(a, Watched) else a for a in out)
        result = getattr(ufunc, method)(*plain, **named)
        if ufunc is np.multiply:
            Watched.products += np.size(result)
        return result

    def __array_function__(self, function, types, args, named):
        if function is np.einsum:  # each element of the largest operand is multiplied by all others
            arrays = [a for a in args if isinstance(a, np.ndarray)]
            Watched.products += max(a.size for a in arrays)
        return super().__array_function__(function, types, args, named)
