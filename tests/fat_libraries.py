"""Device code for tests: a kernel of the course and a small one, for several architectures, compiled once and kept."""

import functools
from pathlib import Path

from simt import nvrtc

ARCHES = "sm_80", "sm_90", "sm_90a", "sm_100", "sm_120"
KERNELS = "gemv", "zero"
SOURCE = (Path(__file__).resolve().parent.parent / "kernels" / "gemv" / "naive.cu").read_text()
SOURCE += """
__device__ __noinline__ T nothing(T value) { return (T)((float)value * 0.0f); }
extern "C" __global__ void zero(T *y) { y[threadIdx.x] = nothing(y[threadIdx.x]); }
"""


@functools.cache
def cubins():
    """{"sm_90": the machine code}"""
    return {arch: nvrtc.compile_to_cubin(SOURCE, (), arch, "naive.cu") for arch in ARCHES}


@functools.cache
def ptx():
    return nvrtc.compile_to_ptx(SOURCE, (), "sm_90", "naive.cu").encode()


def parts():
    """What a container of these holds: PTX for what comes later, last."""
    return [("elf", arch, image) for arch, image in cubins().items()] + [("ptx", "sm_90", ptx())]
