"""Weights in 8, 4 or 2 bits, and the matrix–vector product that reads them as they are.

    quantize(W, bits, group=None, *, scale_dtype=None) -> QuantizedWeight   W (rows, cols), as torch.nn.Linear holds it
    ternary(W, scale=None), from_codes(codes, scale, zero, bits)            BitNet's; what somebody else has quantised
    gemv(Wq, x, *, out=None, pdl=False)                                     y = W x, as torch.nn.functional.linear

At batch 1 the bytes of the weights are the time, so 4 bits should take a quarter of 16. No tensor of dequantised
weights is ever made. All rungs take and return torch tensors and have one signature:

    rung(Wq, x, *, out=None, pdl=False)

    Wq     QuantizedWeight: W ~ (codes - zero) · scale, with a scale and a zero for 32, 64 or 128 columns, or for a row
    x      (cols,) or (m, cols), m from 1 to 16, float16 or bfloat16; y is like it, (rows,) or (m, rows). For more rows
           torch's product with Wq.dequantize() is the faster one
    out    a tensor like y to write into; must not overlap Wq or x
    pdl    True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), and, where
           that was launched so too, before the one ahead of that, and so on. None of them may write Wq, which is read
           at once; x is read, and y written, only after all of them have ended. `gemv` only

x and out are contiguous, on Wq's device: on a CUDA card they run there, on the CPU on the SIMT machine. Any numbers of
rows and columns are legal; with groups, cols is a multiple of them. `digits` is written to be read, and takes less: one
row of x, x and scales of float16, 4 bits, groups of 128 and more than one of them, rows a multiple of 16. A call moves
at least Wq.nbytes and the bytes of x and y, and does 2·m·rows·cols flops: reading Wq is the limit.

Beside its own rounding to x's dtype, y is within 1e-3 of x times the dequantised weights, by the norm of a row. What
`digits`, and `gemv` for up to four rows, may lose besides: bits of bfloat16 x below 2**-105; and, where one number of x
is ten thousand times the others and meets weights of 0, so that y owes it nothing (60000 beside ones), some 2e-3 to
4e-3 of y with 4096 columns, and up to 1.2e-2 with 256. With more rows than four, such a number costs codes of 2 bits,
and in float16 of 4, up to 8e-3 of y with 4096 columns, and up to 3e-2 with 256.

TypeError or ValueError names the argument, what was expected and what came, before anything is written. Gradients are
not tracked. The first call of `shift` or `magic` lays a second copy of the codes out, row after row, for both: it waits
for the card, and a graph cannot capture it (RuntimeError). torch.compile takes `gemv` and `digits`, as operators.

`counters` runs a rung on the SIMT machine and returns its report.
"""

from kernels.lowbit import rungs
from kernels.lowbit.arguments import expect_all
from kernels.lowbit.digits import digits, expect_fit
from kernels.lowbit.digits import launch as launch_digits
from kernels.lowbit.gemv import SOURCES, gemv, launch
from kernels.lowbit.operators import of_weights
from kernels.lowbit.quantizing import from_codes, quantize, ternary
from kernels.lowbit.rungs import magic, shift
from kernels.lowbit.weights import QuantizedWeight
from lab import Rung

__all__ = [
    "RUNGS",
    "QuantizedWeight",
    "counters",
    "digits",
    "from_codes",
    "gemv",
    "magic",
    "quantize",
    "shift",
    "ternary",
    "work",
]

digits = of_weights("lowbit_digits", expect_fit=expect_fit)(digits)  # gemv is an operator where it is defined

FIRST = ("kernels/lowbit/rows.cuh", "kernels/lowbit/rungs.py")  # of the first two rungs, beside their own
DIGITS = (*(f"kernels/lowbit/{name}" for name in ("digits.cu", "digits.py", "layout.py")),)
RUNGS = [
    Rung("shift", "shift, mask, convert", shift, ("kernels/lowbit/shift.cu", *FIRST)),
    Rung("magic", "magic numbers", magic, ("kernels/lowbit/magic.cu", *FIRST)),
    Rung("digits", "x as bytes", digits, DIGITS),
    Rung("gemv", "interleaved, tensor cores", gemv, SOURCES),
]


def work(Wq, x):
    """(bytes, flops) that one call must move and do."""
    rows, cols = Wq.shape
    m = x.numel() // cols
    return Wq.nbytes + x.element_size() * m * (rows + cols), 2 * m * rows * cols


def counters(rung, Wq, x, *, pdl=False, check_races=False):
    """Run a rung, by its name, on the SIMT machine, on CPU tensors. Returns the machine's report (simt.report); two
    where gemv splits the columns among blocks: its own, and that of the kernel that adds their sums up.

    With check_races, two threads that touch the same memory with no order between them raise simt.RaceError. Arguments
    and errors as for the rungs.
    """
    names = [known.name for known in RUNGS]
    if rung not in names:
        raise ValueError(f"counters: rung must be one of {', '.join(names)}, got {rung!r}")
    _, out = expect_all(rung, Wq, x)
    if x.device.type != "cpu":
        raise ValueError(f"counters: x must be on the CPU, got a tensor on {x.device}")
    if rung == "gemv":
        return launch(Wq, x, out, bool(pdl), check_races=check_races)
    if rung == "digits":
        return launch_digits(Wq, x, out, pdl, check_races=check_races)
    return rungs.launch(rung, Wq, x, out, pdl, check_races=check_races)
