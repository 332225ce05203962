"""The workbench: compile, check, time, find the roof, and draw the ladder.

Nothing in here knows a particular kernel: kernels, exercises and notebooks stand on this room, and it never
imports them. Each file is one tool and fits in a screen or two:

    arguments   clear errors for wrong arrays          check      is it right, on shapes that hurt?
    compiler    C source -> a callable function        timing     medians, side by side
    machine     threads, caches, vector instructions   roof       what is possible here? roof_gpu: and on the GPU
    ladder      rungs as a table, bars, a roofline     results    measured figures, stored with source hashes
    widgets     sliders that redraw a picture          exercise   "not done yet", "right on 12 shapes"
    cache       a model that counts fetched lines      plots      the pictures, in one style
    cuda        one launch call: on a GPU if     cuda_timing  medians on a GPU, in a CUDA graph and
                the tensors are there, else on                as called from Python
                the SIMT machine                       interpreter  a Triton kernel on CPU tensors, for once
    prepared    calls prepared once for each kind, and then launched at the driver's cost
    operators   a function as an operator of torch.library, for torch.compile
    law         what a step takes, from its bytes and its launches
    fatbin      device code inside libraries: entries read, unpacked and written
    triton_on_simt  a Triton kernel as it is compiled for a card, on the SIMT machine
"""

import os

from lab.arguments import expect_array, expect_count
from lab.check import check, hostile_shapes
from lab.compiler import CompileError, NoCompiler, compile_c, kept_in
from lab.exercise import Exercise
from lab.figure import Rung
from lab.ladder import Ladder
from lab.machine import describe
from lab.roof import Roof, roof, roof_again
from lab.roof_gpu import gpu_roof
from lab.source import show
from lab.timing import Timing, measure, side_by_side
from lab.widgets import explore

os.environ.setdefault("SIMT_KEEP_IN", str(kept_in() / "simt"))  # where simt keeps what it compiled

__all__ = [
    "CompileError",
    "Exercise",
    "Ladder",
    "NoCompiler",
    "Roof",
    "Rung",
    "Timing",
    "check",
    "compile_c",
    "describe",
    "expect_array",
    "expect_count",
    "explore",
    "gpu_roof",
    "hostile_shapes",
    "measure",
    "roof",
    "roof_again",
    "show",
    "side_by_side",
]
