"""Launch a Triton kernel where its tensors are: compiled on a card, in Triton's interpreter on the CPU.

A launch through Triton looks at every argument anew, which takes longer than most kernels here do. So what it compiled
is kept under all that it depends on, and launched directly when the same comes again.
"""

import contextlib

import numpy as np
import torch

from lab.interpreter import LANGUAGE, interpreter

_compiled = {}  # what a launch depends on -> what Triton compiled for it


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
                with LANGUAGE:
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
