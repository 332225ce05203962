"""What every rung looks at before it launches: TypeError or ValueError names the argument, what was expected and what
came, and nothing has been written by then."""

import torch

from kernels.lowbit.weights import QuantizedWeight
from lab.tensors import expect, expect_memory, output

X_DTYPES = (torch.float16, torch.bfloat16)
MOST = 16  # rows of x


def expect_weight(where, Wq):
    if not isinstance(Wq, QuantizedWeight):
        raise TypeError(f"{where}: Wq must be a QuantizedWeight, got {type(Wq).__name__}; quantize(W, bits) makes one")


def expect_all(where, Wq, x, out=None):
    """Raise unless a rung can be called so. Returns (m, the tensor to write to)."""
    expect_weight(where, Wq)
    for name, tensor in (("Wq.packed", Wq.packed), ("Wq.factors", Wq.factors)):
        expect_memory(where, name, tensor)
    rows, cols = Wq.shape
    if not isinstance(x, torch.Tensor) or x.ndim not in (1, 2):
        got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        kind = ValueError if isinstance(x, torch.Tensor) else TypeError
        raise kind(f"{where}: x must be a torch tensor of shape ({cols},) or (m, {cols}), got {got}")
    m = 1 if x.ndim == 1 else x.shape[0]
    shape = x.shape  # as it should be, at less host time than to say how
    if not m or shape[-1] != cols:
        shape = (cols,) if x.ndim == 1 else ("m", cols)
    expect(where, "x", x, Wq.packed, shape, X_DTYPES)
    if m > MOST:
        raise ValueError(
            f"{where}: x must have at most {MOST} rows, got {m}; for more use x @ Wq.dequantize(x.dtype).T, "
            "which torch multiplies at the speed of arithmetic"
        )
    shape = (rows,) if x.ndim == 1 else (m, rows)
    if out is None:
        return m, output(where, None, x, shape)
    held = {"Wq": Wq.packed, "Wq.scale": Wq.scale, "Wq.zero": Wq.zero, "Wq.factors": Wq.factors}
    return m, output(where, out, x, shape, x=x, **held)
