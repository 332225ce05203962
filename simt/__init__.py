"""The SIMT machine: unchanged CUDA C++ on the CPU, counting what Nsight Compute counts. No GPU is needed.

    module = simt.compile(source)                  CUDA C++ -> NVRTC -> PTX
    report = module["gemv"](grid, block, W, x, y)  PTX -> NumPy, for all threads at once
    print(report)                                  sectors, wavefronts, divergence, line by line

It counts, it does not time: how long a launch takes here says nothing about a GPU. There is no cache: sectors are
what the L1 cache is asked for, not what memory delivers.

Its rooms, each of which imports only from those before it: ptx (the text), arithmetic (arrays in, arrays out), memory
(addresses and what they cost), hopper (asynchronous instructions), execute (who runs next), translate (PTX to Python).
README.md says in which order to read them. The machine imports NumPy and the NVRTC binding; it knows nothing of the
course.
"""

from simt.arithmetic.lanes import shuffle
from simt.counting import uncounted
from simt.devices import Devices, together
from simt.errors import (
    AsyncFault,
    BarrierFault,
    CompileError,
    CompilerMissing,
    Deadlock,
    LaneFault,
    LaunchError,
    MemoryFault,
    ScopeFault,
    SimtError,
    StepLimit,
    Trap,
    UnsetRegister,
    Unsupported,
)
from simt.expecting import expect
from simt.hopper.tensor_map import TensorMap
from simt.kernel import Buffer, Kernel, Module, Pointers, compile, load
from simt.memory.ahead import Ahead
from simt.memory.races import RaceError
from simt.memory.sectors import sectors_per_warp
from simt.report import Report

__version__ = "0.1.0"  # pyproject.toml's, beside this file

__all__ = [
    "Ahead",
    "AsyncFault",
    "BarrierFault",
    "Buffer",
    "CompileError",
    "CompilerMissing",
    "Deadlock",
    "Devices",
    "Kernel",
    "LaneFault",
    "LaunchError",
    "MemoryFault",
    "Module",
    "Pointers",
    "RaceError",
    "Report",
    "ScopeFault",
    "SimtError",
    "StepLimit",
    "TensorMap",
    "Trap",
    "UnsetRegister",
    "Unsupported",
    "compile",
    "expect",
    "load",
    "sectors_per_warp",
    "shuffle",
    "together",
    "uncounted",
]
