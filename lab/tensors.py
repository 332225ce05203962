"""Look at torch tensors before anything is launched, and say what is wrong in one sentence.

TypeError or ValueError names the function, the argument, what was expected and what came.
"""

import torch

DTYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # and their C++ names


def expect_first(where, name, value, shape, dtypes=tuple(DTYPES), *, empty=False):
    """The first tensor of a call: the others must be like it in device and, where that is asked, in dtype."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: {name} must be on the CPU or on a CUDA device, got a tensor on {value.device}")
    expect(where, name, value, value, shape, dtypes, empty=empty)


def expect(where, name, value, like, shape, dtypes=None, *, empty=False):
    """Raise unless this is a contiguous tensor of this shape, on the device of `like`, and of its dtype or of `dtypes`.

    shape: an int is an exact length, a str names a free one; none may be 0 unless `empty`.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(value).__name__}")
    if value.dtype not in (dtypes or (like.dtype,)):
        wanted = " or ".join(map(str, dtypes)) if dtypes else f"{like.dtype}, like the first tensor"
        raise TypeError(f"{where}: {name} must be of {wanted}, got {value.dtype}")
    if value.device != like.device:
        raise ValueError(f"{where}: {name} must be on {like.device}, like the first tensor, got one on {value.device}")
    have = value.shape
    if (have != shape or 0 in have) and not _matches(have, shape, empty):
        wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{where}: {name} must have shape {wanted}{_NONE[empty]}, got {tuple(have)}")
    if value.layout is not torch.strided:
        raise ValueError(f"{where}: {name} must be a dense tensor, got layout {value.layout}")
    if not value.is_contiguous():
        raise ValueError(
            f"{where}: {name} must be contiguous, got shape {tuple(have)} with strides {value.stride()}; "
            f"{name}.contiguous() makes a contiguous copy"
        )
    if value.data_ptr() % value.element_size():  # from torch.frombuffer, say: a kernel cannot read it
        raise ValueError(f"{where}: {name} must be aligned to its element size, got {value.data_ptr():#x}")
    expect_memory(where, name, value)


def expect_resolved(where, name, value):
    """Raise for a view that says "the negative of what is in memory" (x.conj().imag is one): a kernel sees memory."""
    if value.is_neg():
        raise ValueError(
            f"{where}: {name} must have its numbers in memory as they are, got a view that negates them when it is "
            f"read; {name}.resolve_neg() writes them out"
        )


def expect_memory(where, name, value):
    """Raise unless a tensor's memory is there: somebody may have freed it, or made it smaller. (What stands for a
    tensor while code is traced has no address.) And unless it holds the tensor's numbers: see expect_resolved."""
    expect_resolved(where, name, value)
    reach = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))  # elements to its last one
    room, wanted = value.untyped_storage().nbytes(), (value.storage_offset() + reach) * value.element_size()
    if value.numel() and (room < wanted if value.data_ptr() else not room):
        raise ValueError(f"{where}: {name} must have memory of {wanted} bytes behind it, got a storage of {room}")


_NONE = {False: ", none of it 0", True: ""}


def _matches(have, shape, empty):
    """Whether a shape is what `expect` was told."""
    return len(have) == len(shape) and all((n or empty) and (n == m or isinstance(m, str)) for n, m in zip(have, shape))


def memory(tensor):
    """The addresses of a contiguous tensor: (its first byte, one past its last)."""
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes


def expect_no_gradient(where, out, name="out"):
    """Raise where a tensor that is to be written to asks for a gradient."""
    if out.requires_grad:
        raise ValueError(f"{where}: {name} must not require gradients, got a tensor that does")


def output(where, out, like, shape, *, empty=False, **inputs):
    """The tensor to write to: a new one, or `out` once it has been looked at. Inputs that are None are passed over."""
    if out is None:
        return like.new_empty(*shape)  # in half the time of torch.empty(shape, ...)
    expect(where, "out", out, like, shape, empty=empty)
    expect_no_gradient(where, out)
    expect_apart(where, "out", out, **inputs)
    return out


def expect_apart(where, written, out, /, **inputs):
    """Raise where a tensor that is to be written to, the argument of this name, lies in the memory of another."""
    begin, end = memory(out)
    for name, value in inputs.items():
        if value is not None and value.data_ptr() < end and begin < memory(value)[1]:
            raise ValueError(f"{where}: {written} must not share memory with {name}, got a tensor that does")
