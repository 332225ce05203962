"""The SIMT machine: unchanged CUDA C++ on the CPU, counting what Nsight Compute counts. No GPU is needed.

    module = simt.compile(source)                  CUDA C++ -> NVRTC -> PTX
    report = module["gemv"](grid, block, W, x, y)  PTX -> NumPy, for all threads at once
    print(report)                                  sectors, wavefronts, divergence, line by line

It counts, it does not time: how long a launch takes here says nothing about a GPU. There is no cache: sectors are
what the L1 cache is asked for, not what memory delivers.

Read it in this order: ptx.py (the text), flow.py (blocks), integers.py and memory.py (what registers and addresses
are), translate.py (a block as a Python function), machine.py (who runs next). Hopper's asynchronous instructions have
barriers.py, bulk.py with tensor_map.py, and warpgroup.py. ahead.py knows of launches that overlap, waiting.py says who
waits for whom. This room imports NumPy and the NVRTC binding; it knows
nothing of the course.
"""

from simt.ahead import Ahead
from simt.errors import (
    AsyncFault,
    BarrierFault,
    CompileError,
    CompilerMissing,
    Deadlock,
    LaneFault,
    LaunchError,
    MemoryFault,
    SimtError,
    StepLimit,
    Trap,
    UnsetRegister,
    Unsupported,
)
from simt.kernel import Buffer, Kernel, Module, compile, load
from simt.races import RaceError
from simt.tensor_map import TensorMap

__all__ = [
    "Ahead",
    "AsyncFault",
    "BarrierFault",
    "Buffer",
    "CompileError",
    "CompilerMissing",
    "Deadlock",
    "Kernel",
    "LaneFault",
    "LaunchError",
    "MemoryFault",
    "Module",
    "RaceError",
    "SimtError",
    "StepLimit",
    "TensorMap",
    "Trap",
    "UnsetRegister",
    "Unsupported",
    "compile",
    "load",
]
