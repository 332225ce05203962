"""Small CUDA C++ launches whose hardware counters were read on a GPU: what the SIMT machine has to reproduce.

memory.py, compute.py   the launches, each a few lines of CUDA C++ with its inputs and expected outputs
measure.py              runs them on a GPU under Nsight Compute and writes h200.json
h200.json               the counters and outputs that an H200 gave
hopper.py               runs the tests of Hopper's instructions (tests/test_simt_hopper.py) on a GPU
h200_hopper.json        checksums of what an H200 wrote in them
"""

import zlib
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Launch:
    """One launch of one kernel.

    name      unique, says what is asked: "load_stride_2_float"
    source    device-only CUDA C++; the kernel is extern "C"
    kernel    its name
    grid      blocks, an int or a tuple of up to 3;  block  threads, likewise;  shared  bytes of dynamic shared memory
    args      NumPy arrays (buffers in global memory) and NumPy scalars, in the order of the kernel's parameters
    outputs   positions in `args` of the buffers that it writes
    expected  expected(*args) -> the list of arrays those buffers must hold afterwards, by NumPy alone
    exact     False where the order of additions is not fixed: then outputs are compared to 1e-5
    options   compiler options, as for NVRTC
    """

    name: str
    source: str
    kernel: str
    grid: object
    block: object
    args: list
    outputs: tuple
    expected: object
    exact: bool = True
    shared: int = 0
    options: tuple = field(default_factory=tuple)


def random(name, shape, dtype=np.float32):
    """Random inputs that are the same on every machine, by the launch's name: floats around 0, whole integers."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 1 << 15, shape).astype(dtype)
