"""Look at tensors before anything is launched, and say what is wrong in one sentence."""

import math
import numbers

import torch

DTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # and what CUDA C++ calls them


def expect_vector(where, name, value):
    """The first tensor of a call: its dtype and device are what the others must have."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{where}: {name} must be of {' or '.join(map(str, DTYPES))}, got {value.dtype}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: {name} must be on the CPU or on a CUDA device, got a tensor on {value.device}")
    expect(where, name, value, value, ("n",))


def expect(where, name, value, like, shape):
    """Raise unless this is a contiguous tensor like the first one, of this shape: an int exactly, a str any length."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.dtype != like.dtype:
        raise TypeError(f"{where}: {name} must be of {like.dtype}, like the first tensor, got {value.dtype}")
    if value.device != like.device:
        raise ValueError(f"{where}: {name} must be on {like.device}, like the first tensor, got one on {value.device}")
    fits = value.dim() == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, value.shape))
    if not fits or 0 in value.shape:
        wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{where}: {name} must have shape {wanted}, none of it 0, got {tuple(value.shape)}")
    if value.layout is not torch.strided:
        raise ValueError(f"{where}: {name} must be a dense tensor, got layout {value.layout}")
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: {name} must be contiguous, got shape {tuple(value.shape)} with strides {value.stride()}; "
            f"{name}.contiguous() makes a contiguous copy"
        )
    if value.data_ptr() % value.element_size():  # from torch.frombuffer, say: a kernel cannot read it
        raise ValueError(f"{where}: {name} must start at an even address, got {value.data_ptr():#x}")


def expect_eps(where, eps):
    """Raise unless this can be added to a mean square. A tensor cannot: to look into one on a card breaks a capture."""
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"{where}: eps must be a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{where}: eps must be 0 or more, and finite, got {eps}")


def memory(tensor):
    """The addresses of a contiguous tensor: (its first byte, one past its last)."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def output(where, out, like, shape, **inputs):
    """The tensor to write to: a new one, or `out` once it has been looked at."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    expect(where, "out", out, like, shape)
    if out.requires_grad:
        raise ValueError(f"{where}: out must not require gradients, got a tensor that does")
    out_begin, out_end = memory(out)
    for name, value in inputs.items():
        begin, end = memory(value)
        if begin < out_end and out_begin < end:
            raise ValueError(f"{where}: out must not share memory with {name}, got a tensor that does")
    return out
