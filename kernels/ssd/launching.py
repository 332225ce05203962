"""Launch a Triton kernel where its tensors are: compiled on a card, in Triton's interpreter on the CPU.

A launch through Triton looks at every argument anew, which takes longer than most kernels here do. So what it compiled
is kept under all that it depends on, and launched directly when the same comes again.
"""

import builtins
import contextlib
import threading

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as of_triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_compiled = {}  # what a launch depends on -> what Triton compiled for it
_interpreted = {}  # function -> the kernel for the interpreter
_interpreting = threading.RLock()  # modules are changed while it is held


def launch(kernel, grid, tensors, numbers, constants=(), **options):
    """kernel[grid](*tensors, *numbers, *constants), which must be all of the kernel's arguments, in their order.

    grid       three whole numbers
    tensors    on one device; None for one that is not there
    numbers    ints and floats: what differs from shape to shape, but not from call to call
    constants  of tl.constexpr
    options    of Triton: num_warps and others
    """
    first = tensors[0]
    if first.is_cuda:
        facts = [(t.dtype, t.data_ptr() & 15 == 0) if t is not None else None for t in tensors]
        key = kernel.fn, first.device.index, numbers, constants, *options.items(), *facts
        found = _compiled.get(key)
        with _on(first.device.index):
            if found is None:
                _compiled[key] = kernel[grid](*tensors, *numbers, *constants, **options)
            else:
                found[grid](*tensors, *numbers, *constants)
    else:
        with (
            interpreter(kernel) as run,
            np.errstate(all="ignore"),
        ):  # NaN and infinity pass without a word, as on a card
            run[grid](*tensors, *numbers, *constants)


def filled_up(n):
    """Of an axis of n: the size of a tile, a power of two and at least 16. (triton.next_power_of_2 takes 5 µs.)"""
    return max(16, 1 << (n - 1).bit_length())


def _on(index):
    return contextlib.nullcontext() if index == torch.cuda.current_device() else torch.cuda.device(index)


@contextlib.contextmanager
def interpreter(kernel):
    """The kernel as Triton's interpreter runs it, whether or not TRITON_INTERPRET was set when Triton was imported.

    What it calls is then interpreted as well: the functions of its own module and of those that it imports from, and
    those of Triton that are written in Triton (tl.max and others). `range` gets whole numbers: of Triton 3.6's scalars
    NumPy has made none since 2.4. Threads take turns.
    """
    with _interpreting, _interpretable(kernel):
        yield _for_interpreter(kernel)


@contextlib.contextmanager
def _interpretable(kernel):
    own = _modules(kernel)
    before = [(space, name, value) for space in (*own, vars(tl)) for name, value in space.items() if _is_jit(value)]
    spaces = *own, vars(of_triton)  # tl.range asks for `range` there
    try:
        for space, name, value in before:
            if value is not kernel:
                space[name] = _for_interpreter(value)
        for space in spaces:
            space["range"] = _range
        yield
    finally:
        for space, name, value in before:
            space[name] = value
        for space in spaces:
            space.pop("range", None)


def _modules(kernel):
    """What is defined beside the kernel, and beside each kernel that stands there."""
    found, left = {}, [kernel]
    while left:
        function = left.pop().fn
        if id(function.__globals__) not in found and not function.__module__.startswith("triton."):
            found[id(function.__globals__)] = function.__globals__
            left += [value for value in function.__globals__.values() if _is_jit(value)]
    return list(found.values())


def _is_jit(value):
    return isinstance(value, JITFunction)


def _for_interpreter(function):
    if isinstance(function, InterpretedFunction):  # TRITON_INTERPRET was set
        return function
    if function.fn not in _interpreted:
        _interpreted[function.fn] = InterpretedFunction(function.fn)
    return _interpreted[function.fn]


def _range(*bounds, **_):
    return builtins.range(*(b.handle.data.item() if isinstance(b, tl.tensor) else int(b) for b in bounds))
