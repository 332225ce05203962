"""The newer of two assemblers. Triton's wheel carries ptxas, and a later one for Blackwell, as ptxas-blackwell.

ptxas 12.8, which Triton 3.6 takes for Hopper, writes wrong wgmma (float32_scores.py). A kernel that wants wgmma is
compiled with the other, if that is of 13.1 or later: `newer(kernel)` in place of the kernel, and OPTIONS with its own.
"""

import contextlib
import functools

import torch
from triton import knobs

FROM = 13, 1  # whose wgmma was right wherever it was tried


@functools.cache
def tool():
    """A ptxas of FROM or later that Triton has, as a knobs.NvidiaTool; None if there is none."""
    for name in ("ptxas", "ptxas_blackwell"):
        with contextlib.suppress(AttributeError, OSError, RuntimeError):  # not of this Triton, or not there
            found = getattr(knobs.nvidia, name)
            if _version(found) >= FROM:
                return found
    return None


@functools.cache
def _takes(index):
    """Whether CUDA device `index` is Hopper, and its driver takes what a ptxas of version 13 writes."""
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    return torch.cuda.get_device_capability(index) == (9, 0) and not error and version >= 1000 * FROM[0]


def wgmma(x):
    """Whether kernels of x, a tensor, may use wgmma."""
    return x.is_cuda and tool() is not None and _takes(x.device.index)


def options():
    """{"ptx_version": ...} for a launch with `newer`. Triton caches what it compiled under its options, of which the
    assembler is none: a version of PTX that the older one does not take tells the two apart."""
    major, minor = _version(tool())
    return {"ptx_version": 90 + 10 * (major - 13) + minor}


def _version(found):
    return tuple(int(part) for part in found.version.split("."))


class newer:
    """A Triton kernel that is compiled by `tool()`, for launching.launch; what is compiled is launched as ever."""

    def __init__(self, kernel):
        self.kernel, self.fn = kernel, kernel.fn

    def __getitem__(self, grid):
        return functools.partial(self._compile, grid)

    def _compile(self, grid, *arguments, **options):
        with knobs.nvidia.scope():
            knobs.nvidia.ptxas = tool().path
            return self.kernel[grid](*arguments, **options)
