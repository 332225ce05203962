"""What is looked at before a cache is made or put together. TypeError or ValueError names the argument, what was
expected and what came."""

import torch

from kernels.kv_cache.rounding import BITS

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
AXES, ROLES = ("token", "channel"), ("keys", "values")
STEP = 32  # tokens that decode.cu takes at a time, at most; also what groups of tokens are multiples of


def expect_how(where, bits, axis, group, role, head_dim):
    """Raise unless a cache can be quantised so, and lie so (role None: either way)."""
    expect_bits_and_axis(where, bits, axis)
    expect_head_dim(where, head_dim)
    unit, whole = (16, head_dim) if axis == "token" else (STEP, group)
    fits = isinstance(group, int) and not isinstance(group, bool) and group > 0
    if not fits or group % unit or whole % group:
        divisor = f" and a divisor of head_dim, {head_dim}," if axis == "token" else ""
        raise ValueError(f"{where}: group must be a multiple of {unit}{divisor} with axis={axis!r}, got {group!r}")
    if role not in (None, *ROLES) or (axis == "channel" and role == "values"):
        raise ValueError(f"{where}: role must be 'keys', or 'values' with axis='token', or None, got {role!r}")


def expect_bits_and_axis(where, bits, axis):
    if isinstance(bits, bool) or bits not in tuple(BITS):
        raise ValueError(f"{where}: bits must be 8, 4 or 'fp8', got {bits!r}")
    if axis not in AXES:
        raise ValueError(f"{where}: axis must be 'token' or 'channel', got {axis!r}")


def expect_head_dim(where, head_dim):
    if head_dim % 16 or head_dim > 256:
        raise ValueError(f"{where}: head_dim must be a multiple of 16, 256 at most, got {head_dim}")


def expect_kv(where, name, kv, shape):
    if not isinstance(kv, torch.Tensor):
        raise TypeError(f"{where}: {name} must be a torch tensor, got {type(kv).__name__}")
    if kv.dtype not in DTYPES:
        raise TypeError(f"{where}: {name} must be of {' or '.join(map(str, DTYPES))}, got {kv.dtype}")
    if kv.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: {name} must be on the CPU or on a CUDA device, got a tensor on {kv.device}")
    if kv.layout is not torch.strided:
        raise ValueError(f"{where}: {name} must be a dense tensor, got layout {kv.layout}")
    fits = len(kv.shape) == 4 and 0 not in kv.shape
    if not fits or any(n != m and not isinstance(m, str) for n, m in zip(kv.shape, shape)):
        raise ValueError(
            f"{where}: {name} must have shape ({', '.join(map(str, shape))}), none of it 0, got {tuple(kv.shape)}"
        )
