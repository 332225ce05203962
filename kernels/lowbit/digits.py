"""The third rung, digits.cu: written to be read, so it takes one row of x and one format."""

import functools
from pathlib import Path

import torch

from kernels.lowbit.arguments import expect_all
from lab import cuda

HERE = Path(__file__).resolve().parent
BLOCK = 32 * 16  # threads


def digits(Wq, x, *, out=None, pdl=False):
    """Rung 3: x as signed bytes, on integer tensor cores, for one row of x.

    x and scales are float16, codes have 4 bits and groups of 128, of which a row has more than one; rows is a multiple
    of 16, and x lies at a multiple of 8 bytes. TypeError or ValueError says what is something else: `gemv` takes all.
    Of each 128 columns, x is rounded to multiples of 2**(e - 21), where 2**e is above the largest of them.
    """
    _, out = expect_all("digits", Wq, x, out)
    launch(Wq, x, out, pdl)
    return out


def launch(Wq, x, out, pdl=False, **options):
    """One call whose arguments are those of a rung; what this one does not take is refused. Returns the machine's
    report, or None on a card."""
    expect_fit(Wq, x, pdl)
    rows, cols = Wq.shape
    return _kernel()(rows // 16, BLOCK, Wq.packed, Wq.factors, x, out, cols, **options)


def expect_fit(Wq, x, pdl):
    """Raise for what `gemv` takes and this rung does not."""
    rows, cols = Wq.shape
    _expect(not pdl, f"pdl must be False, got {pdl!r}: only gemv waits for the kernel before it")
    _expect(Wq.bits == 4 and Wq.group == 128, f"Wq must have 4 bits and groups of 128, got {Wq.bits} and {Wq.group}")
    _expect(cols > 128, f"Wq must have more than one group in a row, got {cols} columns")
    _expect(rows % 16 == 0, f"Wq must have a multiple of 16 rows, got {rows}")
    _expect(x.numel() == cols, f"x must be one row, got {x.numel() // cols}")
    for name, tensor in (("x", x), ("Wq.scale", Wq.scale)):
        _expect(tensor.dtype == torch.float16, f"{name} must be of torch.float16, got {tensor.dtype}", TypeError)
    _expect(x.data_ptr() % 8 == 0, f"x must lie at a multiple of 8 bytes, got one {x.data_ptr() % 8} beyond")


def _expect(fits, what, kind=ValueError):
    if not fits:
        raise kind(f"digits: {what}; gemv takes it")


@functools.cache
def _kernel():
    return cuda.load(HERE / "digits.cu").gemv
