"""Run a learner's Triton kernel in Triton's interpreter, and see what it reads and writes.

    counts = launched(kernel, "x y n BLOCK", (grid,), {"x": x, "y": y}, n, 64)
    counts.read["x"]           elements of x that were loaded, one that is loaded twice counted twice

    counts = called(function, {"x": x, "y": y})    # the learner's function launches a kernel itself
    counts.programs            the programs that ran

A load or store outside all tensors is a sentence, and not a crash. Where a mask is false and tl.load is given no
`other`, a card may have anything: here it is NaN, and -1 in whole numbers.
"""

import contextlib
import inspect
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from triton.runtime import interpreter as of_triton
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from exercises.checks import shown
from kernels.ssd.launching import interpreter
from lab.check import differs, unset
from lab.exercise import NOT_DONE, Wrong

ENDLESS = "still running after"  # of exercises.checks.time_limit
FENCE = 1234.0  # what stands beside an output, and must stay
NEAR = 1 << 14  # bytes beside a tensor where a missing mask may lead


def launched(kernel, arguments, grid, tensors, *rest):
    """kernel[grid](*tensors, *rest) on CPU tensors. Returns what it `read` and `wrote`, by tensor.

    arguments  the names that the kernel must have, in one string
    """
    if not isinstance(kernel, (JITFunction, InterpretedFunction)):
        raise Wrong(f"expected a kernel, a function with @triton.jit, got {shown(kernel)}")
    if list(kernel.arg_names) != arguments.split():
        raise Wrong(f"the kernel's arguments must be {', '.join(arguments.split())}, got {', '.join(kernel.arg_names)}")
    with _counted(tensors) as counts, interpreter(kernel) as run:
        run[(*grid, 1, 1)[:3]](*tensors.values(), *rest)
    return counts


def called(function, tensors):
    """function(*tensors), which launches its kernels itself, on CPU tensors. Returns what they `read` and `wrote`, by
    tensor, and how many `programs` ran."""
    if not callable(function) or isinstance(function, (JITFunction, InterpretedFunction)):
        raise Wrong(f"expected a function that launches a kernel, got {shown(function)}")
    with _counted(tensors) as counts, _as_launches(counts):
        function(*tensors.values())
    return counts


@contextlib.contextmanager
def _counted(tensors):
    counts = SimpleNamespace(read=Counter(), wrote=Counter(), programs=0)
    try:
        with _watched(tensors, counts), np.errstate(all="ignore"):
            yield counts
    except InterpreterError as error:
        _tell(error)


def guarded(array, dtype=torch.float32, fence=math.nan):
    """A tensor between guards: NaN, or a number that must stay."""
    tensor = torch.as_tensor(array).to(dtype)
    home = torch.full((tensor.numel() + 64,), fence, dtype=dtype)
    return home[32:-32].view(tensor.shape).copy_(tensor)


def output(*shape):
    """A tensor to be written, unset, between guards."""
    return guarded(unset(shape), fence=FENCE)


def near(got, wanted, at, what, tolerance):
    """Raise Wrong unless the output is near the wanted one, and nothing beside it was written."""
    home = torch.empty(0).set_(got.untyped_storage())
    if not ((home[:32] == FENCE).all() and (home[-32:] == FENCE).all()):
        raise Wrong(f"{at}: something was written beside {what}")
    given, got, wanted = got.numpy(), got.double().numpy(), np.asarray(wanted)
    off = ~(np.abs(got - wanted) <= tolerance * max(1e-30, np.abs(wanted).max()))
    if off.any():
        where = tuple(int(i) for i in np.argwhere(off)[0])
        index = ", ".join(map(str, where))
        raise Wrong(f"{at}: {differs(f'{what}[{index}]', given[where], wanted[where])}")


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
            near_by = begin - NEAR < place < end + NEAR
            why = "is a mask missing?" if near_by else "is an address wrong, or did it get another tensor?"
            raise Wrong(f"the kernel {did} outside all arrays, {far} element of {name}; {why}")


def _without_other(load):
    """create_masked_load of Triton's interpreter, which has 0 for what is not loaded, with all bits set instead.

    But of a single element: there the interpreter takes `other=0`, whose truth it asks for, for none.
    """

    def masked_load(builder, pointers, mask, other, *rest):
        if other is None and np.size(pointers.data) > 1:
            element = pointers.get_element_ty()
            kind = np.dtype(of_triton._get_np_dtype(element))
            bits = np.full(np.shape(pointers.data), -1, f"i{kind.itemsize}")
            other = of_triton.TensorHandle(bits.view(kind), element)
        return load(builder, pointers, mask, other, *rest)

    return masked_load


@contextlib.contextmanager
def _watched(tensors, counts):
    real, builder = of_triton._interpreter, of_triton.InterpreterBuilder
    load, begin = builder.create_masked_load, builder.set_grid_idx

    def program_begins(self, *place):
        counts.programs += 1
        begin(self, *place)

    of_triton._interpreter = _Watch(real, tensors, counts)
    builder.create_masked_load, builder.set_grid_idx = _without_other(load), program_begins
    try:
        yield
    finally:
        of_triton._interpreter, builder.create_masked_load, builder.set_grid_idx = real, load, begin


@contextlib.contextmanager
def _as_launches(counts):
    """What is not kernel[grid](...) of an interpreted kernel is a sentence; Triton would speak from deep inside."""
    run, call, compiled = InterpretedFunction.run, InterpretedFunction.__call__, JITFunction.run

    def with_grid(kernel, *args, grid, **how):
        if not (isinstance(grid, tuple) or callable(grid)):
            raise Wrong(f"a grid is a tuple, such as (3,), got {shown(grid)}")
        try:
            named = {name: value for name, value in how.items() if name in kernel.arg_names}
            inspect.signature(kernel.fn).bind(*args, **named)
        except TypeError as error:
            raise Wrong(f"the launch does not fit the signature of {kernel.fn.__name__}: {error}") from None
        return run(kernel, *args, grid=grid, **how)

    def without_grid(kernel, *args, **how):
        if counts.programs == 0:  # not called by a kernel
            raise Wrong("a kernel is launched with a grid, as in kernel[grid](...); it was called without one")
        return call(kernel, *args, **how)

    def on_a_card(kernel, *args, **how):
        raise Wrong("the tensors are on the CPU: launch the kernel that `interpreter` gives, not the one for a card")

    InterpretedFunction.run, InterpretedFunction.__call__, JITFunction.run = with_grid, without_grid, on_a_card
    try:
        yield
    finally:
        InterpretedFunction.run, InterpretedFunction.__call__, JITFunction.run = run, call, compiled
