"""Chapter 13's ladder in Triton, from the published design to two-pass segments: one launch each, one signature.

    rung(x, dt, A, B, C, *, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
         dt_limit=(0, inf), return_final_states=False, out=None)

Arguments, results and errors: kernels.ssd.calls. What is new in each, the bytes that it moves, and how it is launched
stand at the head of its file.
"""

from kernels.ssd.calls import FILES
from kernels.ssd.overlap import fused_overlap
from kernels.ssd.published import fused_published
from kernels.ssd.registers import fused_registers
from kernels.ssd.segments import fused_segments
from kernels.ssd.tuned import fused_tuned
from lab import Rung


def _rung(title, function, *files):
    return Rung(function.__name__, title, function, tuple(f"kernels/ssd/{name}.py" for name in (*FILES, *files)))


RUNGS = [
    _rung("published design", fused_published, "published"),
    _rung("work before the wait", fused_overlap, "published", "overlap"),
    _rung("state in registers", fused_registers, "registers"),
    _rung("two-pass segments", fused_segments, "registers", "segments", "workspace"),
    _rung("loads ahead, dt once", fused_tuned, "registers", "segments", "tuned", "workspace"),
]
