"""The first two rungs of chapter 06, on row-major codes: shift and magic. See the package for their arguments."""

import functools
from pathlib import Path

from kernels.lowbit.arguments import expect_all
from kernels.lowbit.weights import TAKE
from lab import cuda
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
WARPS = 4  # of a block; a warp has 4 rows for one row of x, and 1 for more
MOST_AT_ONCE = 8  # numbers of x that one load may bring: 16 bytes


def shift(Wq, x, *, out=None, pdl=False):
    """Rung 1: shift, mask, convert the integer."""
    return run("shift", Wq, x, out, pdl)


def magic(Wq, x, *, out=None, pdl=False):
    """Rung 2: magic numbers instead of conversions."""
    return run("magic", Wq, x, out, pdl)


def run(rung, Wq, x, out, pdl):
    _, out = expect_all(rung, Wq, x, out)
    launch(rung, Wq, x, out, pdl)
    return out


def launch(rung, Wq, x, out, pdl=False, **options):
    """One call whose arguments have been looked at. Returns the machine's report, or None on a card."""
    if pdl:
        raise ValueError(f"{rung}: pdl must be False, got {pdl!r}: only gemv waits for the kernel before it")
    rows, cols = Wq.shape
    step = x.data_ptr() | cols * x.element_size()
    at_once = min((step & -step) // x.element_size(), MOST_AT_ONCE)
    m = x.numel() // cols
    kernel = _kernel(rung, x.dtype, Wq.scale.dtype, Wq.bits, Wq.group or 0, m, at_once, int(cols % TAKE > 0))
    blocks = -(-rows // (WARPS * (4 if m == 1 else 1)))
    return kernel(blocks, 32 * WARPS, Wq.row_major(), Wq.scale, Wq.zero, x, out, rows, cols, **options)


@functools.cache
def _kernel(rung, dtype, scale, bits, group, m, at_once, tail):
    chosen = {
        "DTYPE": DTYPES[dtype],
        "SCALE": DTYPES[scale],
        "BITS": bits,
        "GROUP": group,
        "M": m,
        "VEC": at_once,
        "TAIL": tail,
    }
    return cuda.load(HERE / f"{rung}.cu", [f"-D{name}={value}" for name, value in chosen.items()]).gemv
