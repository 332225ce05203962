"""Look at tensors of this topic before anything is launched: TypeError or ValueError names the argument, what was
expected and what came."""

import math
import numbers

import torch

from kernels.mamba2.launches import HALVES
from lab.tensors import expect, expect_memory, expect_no_gradient

WIDTHS = range(2, 9)  # taps of the convolution
FLOAT = (torch.float32,)


def expect_rows_of(where, name, value, like, shape, dtypes=None):
    """Raise unless this is a tensor whose last axes are one piece, as of one projection's output: all strides but the
    first `loose` ones are those of a contiguous tensor. shape as for lab.tensors.expect; of `like` in dtype and device.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    dtypes = dtypes or (like.dtype,)
    if value.dtype not in dtypes:
        raise TypeError(f"{where}: {name} must be of {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: {name} must be on the CPU or on a CUDA device, got a tensor on {value.device}")
    if value.device != like.device:
        raise ValueError(f"{where}: {name} must be on {like.device}, like the first tensor, got one on {value.device}")
    have = tuple(value.shape)
    if len(have) != len(shape) or any(not n or (n != m and not isinstance(m, str)) for n, m in zip(have, shape)):
        raise ValueError(f"{where}: {name} must have shape ({', '.join(map(str, shape))}), none of it 0, got {have}")
    expect_memory(where, name, value)


def expect_inner(where, name, value, loose):
    """Raise unless all axes but the first `loose` lie side by side."""
    step = 1
    for n, stride in reversed(tuple(zip(value.shape, value.stride()))[loose:]):
        if n != 1 and stride != step:
            raise ValueError(
                f"{where}: {name} must be contiguous along its last {value.ndim - loose} axes, got shape "
                f"{tuple(value.shape)} with strides {value.stride()}; {name}.contiguous() makes a contiguous copy"
            )
        step *= n
    if any(stride < 0 or (stride == 0 and n > 1) for n, stride in zip(value.shape[:loose], value.stride()[:loose])):
        raise ValueError(f"{where}: {name} must not repeat its memory, got strides {value.stride()}")


def expect_taps(where, weight, bias, like, channels):
    """Raise unless these are the convolution's float32 weight (channels, width) and bias (channels,) or None. Returns
    the width."""
    expect(where, "weight", weight, like, (channels, "width"), FLOAT)
    width = weight.shape[1]
    if width not in WIDTHS:
        raise ValueError(f"{where}: weight must have from {WIDTHS[0]} to {WIDTHS[-1]} taps a channel, got {width}")
    if bias is not None:
        expect(where, "bias", bias, like, (channels,), FLOAT)
    return width


def expect_begins(where, cu_seqlens, seq_idx, xBC, memory=True):
    """Raise unless these say where sequences of one row of tokens begin, (sequences + 1,) int32; their values are
    looked at on the CPU. Returns how many sequences there are."""
    if seq_idx is not None:
        raise ValueError(f"{where}: seq_idx and cu_seqlens must not both be given")
    expect(where, "cu_seqlens", cu_seqlens, xBC, ("sequences + 1",), (torch.int32,))
    batch, seqlen, _ = xBC.shape
    if batch != 1:
        raise ValueError(f"{where}: xBC must have batch 1 where cu_seqlens is given, got {batch}")
    if len(cu_seqlens) < 2:
        raise ValueError(f"{where}: cu_seqlens must have 2 numbers or more, got {len(cu_seqlens)}")
    if memory and cu_seqlens.device.type == "cpu":
        begins = cu_seqlens.tolist()
        if begins[0] != 0 or begins[-1] != seqlen or sorted(begins) != begins:
            raise ValueError(f"{where}: cu_seqlens must go from 0 to {seqlen}, never falling, got {begins}")
    return len(cu_seqlens) - 1


def expect_half(where, name, value):
    """Raise unless this is a tensor of 16-bit numbers."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.dtype not in HALVES:
        raise TypeError(f"{where}: {name} must be of {' or '.join(map(str, HALVES))}, got {value.dtype}")


def expect_written(where, name, value, **others):
    """Raise where a tensor that is written in place asks for a gradient, or lies in the memory of another."""
    expect_no_gradient(where, value, name)
    begin, end = span(value)
    for other, tensor in others.items():
        if tensor is None:
            continue
        first, last = span(tensor)
        if first < end and begin < last:
            raise ValueError(f"{where}: {name} must not share memory with {other}, got a tensor that does")


def span(tensor):
    """The addresses of a tensor with gaps: (its first byte, one past its last)."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def expect_limit(where, limit):
    """Raise unless this is (lowest, highest) of dt. Returns two floats."""
    limit = tuple(limit) if isinstance(limit, (tuple, list)) else (limit,)
    if len(limit) != 2 or not all(isinstance(n, numbers.Real) and not isinstance(n, bool) for n in limit):
        raise TypeError(f"{where}: dt_limit must be two numbers, got {limit!r}")
    if not limit[0] <= limit[1] or math.isnan(limit[0]):
        raise ValueError(f"{where}: dt_limit must be (lowest, highest), got {limit!r}")
    return float(limit[0]), float(limit[1])
