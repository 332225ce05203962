"""Look at the tensors of an SSD call before anything is launched, and say what is wrong in one sentence.

    L seqlen   Q chunk_size   P headdim   N dstate   H nheads   G ngroups

All that is looked at, but the contents of seq_idx and cu_seqlens, are shapes, strides, dtypes and devices: calls that
agree in these are looked at once.
"""

import functools
import math
import numbers
from typing import NamedTuple

import torch

from lab.tensors import expect_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of x, B, C and z
MOST_STRIDE = 1 << 24  # elements from a token to the next: kernels count tiles of them in 32 bits
MOST_HEADDIM, MOST_DSTATE, LEAST_CHUNK, MOST_CHUNK = 128, 256, 16, 512
MOST_SEQLEN = (1 << 31) - 512  # kernels count tokens in 32 bits, and look a few chunks ahead
MOST_SEQUENCES = 65535  # of a batch: what a grid has along z; and heads and groups, along y
OPTIONS = ("D", "z", "dt_bias", "initial_states", "seq_idx", "cu_seqlens")  # tensors that may be None
NO_LIMIT = (0.0, math.inf)


class Problem(NamedTuple):
    """The sizes of a call that has been looked at. chunk_size and nchunks are None if no chunk size was given."""

    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    chunk_size: int
    nchunks: int


def expect_ssd(
    where, x, dt, A, B, C, chunk_size=None, *, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    cu_seqlens=None, dt_limit=NO_LIMIT, return_varlen_states=False, out=None, state_dtype=torch.float32,
    lacks=(), most_chunk=MOST_CHUNK, most_headdim=MOST_HEADDIM, most_dstate=MOST_DSTATE,
):  # fmt: skip
    """Check one call of a rung of the SSD ladder. Returns its sizes, a Problem.

    where           the function's name, for messages
    x, z            (batch, L, H, P), of one of DTYPES; dt (batch, L, H) of the same dtype or float32
    A               (H,) float32
    B, C            (batch, L, G, N), like x in dtype; H is a multiple of G
    chunk_size      a power of two, or None: the caller will choose
    D               (H,) or (H, P), dt_bias (H,): float32 or the dtype of x
    initial_states  (batch, H, P, N), float32 or the dtype of x
    seq_idx         (batch, L) int32, never falling along L
    cu_seqlens      (sequences + 1,) int32 or int64, from 0 to L, never falling; batch is 1 then
    dt_limit        (lowest, highest) of dt
    out             a tensor like x, which shares no memory with the others
    state_dtype     of the states between kernels: float32, or the dtype of x
    lacks           names of options that the caller does not have: NotImplementedError, if they are given
    most_...        the largest chunk_size, headdim and dstate that the caller can do

    The last axis of each tensor is contiguous, and all axes of A, D, dt_bias, initial_states, seq_idx, cu_seqlens and
    out; else strides are free, as x, B and C are often views of one projection. All tensors are on one device. On the
    CPU seq_idx and cu_seqlens are looked into; on a card that would wait for it.

    TypeError, ValueError or NotImplementedError names the argument, what was expected and what came.
    """
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, out
    seen = tuple(_seen(tensor) for tensor in tensors)
    for name, tensor in zip(("x", "dt", "A", "B", "C", *OPTIONS, "out"), tensors):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            expect_memory(where, name, tensor)
    if chunk_size is not None:
        _expect_whole_number(where, chunk_size)
    try:
        limit, lacks = tuple(dt_limit), tuple(lacks)
    except TypeError:
        raise TypeError(f"{where}: dt_limit must be two numbers, got {dt_limit!r}") from None
    problem = _look(
        where, seen, chunk_size, limit, bool(return_varlen_states), state_dtype, lacks,
        (most_chunk, most_headdim, most_dstate),
    )  # fmt: skip
    if x.is_cpu:
        _look_into(where, problem, seq_idx, cu_seqlens)
    if out is not None:
        inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
        expect_apart(where, out, **inputs, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    return problem


def expect_step(where, like, **tensors):
    """Check the tensors of one step: name=(tensor or None, shape, dtypes); contiguous, on the device of `like`."""
    for name, (tensor, shape, dtypes) in tensors.items():
        if tensor is not None:
            device = like.device if isinstance(like, torch.Tensor) else None
            _expect(where, name, _seen(tensor), shape, dtypes, device, whole=True)
            if tensor.is_cpu and tensor.dtype is torch.bfloat16:
                raise NotImplementedError(
                    f"{where}: {name} must not be bfloat16 on the CPU; kernels.ssd.five widens it"
                )


def expect_sizes(where, **sizes):
    """Check nheads with ngroups, headdim, dstate, chunk_size, and seqlen with chunk_size and nchunks: those given."""
    _expect_sizes(where, sizes, MOST_HEADDIM, MOST_DSTATE)
    if "chunk_size" in sizes:
        _expect_whole_number(where, sizes["chunk_size"])
        _expect_chunk(where, sizes["chunk_size"], MOST_CHUNK)
    if "nchunks" in sizes and sizes["nchunks"] != (wanted := -(-sizes["seqlen"] // sizes["chunk_size"])):
        raise ValueError(
            f"{where}: nchunks must be {wanted}, for {sizes['seqlen']} tokens in chunks of {sizes['chunk_size']}, "
            f"got {sizes['nchunks']}"
        )


class Seen(NamedTuple):
    """What can be wrong with a tensor, its contents aside."""

    type: type
    shape: tuple
    strides: tuple
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def _seen(tensor):
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return Seen(type(tensor), (), (), None, None, True)
    if tensor.layout is not torch.strided:
        return Seen(tensor.layout, (), (), None, None, True)
    aligned = tensor.data_ptr() % tensor.element_size() == 0
    return Seen(torch.Tensor, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned)


@functools.lru_cache(maxsize=4096, typed=True)  # a chunk_size of 16.0 is not the one of 16
def _look(where, seen, chunk_size, dt_limit, varlen_states, state_dtype, lacks, most):
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, out = seen
    _expect(where, "x", x, ("batch", "seqlen", "nheads", "headdim"), DTYPES, None)
    dtype, device, (batch, seqlen, nheads, headdim) = x.dtype, x.device, x.shape
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: x must be on the CPU or on a CUDA device, got a tensor on {device}")
    either = (dtype,) if dtype is torch.float32 else (dtype, torch.float32)
    _expect(where, "dt", dt, (batch, seqlen, nheads), either, device)
    _expect(where, "A", A, (nheads,), (torch.float32,), device, whole=True)
    _expect(where, "B", B, (batch, seqlen, "ngroups", "dstate"), (dtype,), device)
    ngroups, dstate = B.shape[2:]
    _expect(where, "C", C, tuple(B.shape), (dtype,), device)
    sizes = dict(nheads=nheads, ngroups=ngroups, batch=batch, seqlen=seqlen, headdim=headdim, dstate=dstate)
    _expect_sizes(where, sizes, most[1], most[2])
    if D is not None:
        _expect(where, "D", D, (nheads, headdim) if len(D.shape) == 2 else (nheads,), either, device, whole=True)
    if z is not None:
        _expect(where, "z", z, tuple(x.shape), (dtype,), device)
    if dt_bias is not None:
        _expect(where, "dt_bias", dt_bias, (nheads,), either, device, whole=True)
    if initial_states is not None:
        states = batch, nheads, headdim, dstate
        _expect(where, "initial_states", initial_states, states, either, device, whole=True)
    if seq_idx is not None:
        _expect(where, "seq_idx", seq_idx, (batch, seqlen), (torch.int32,), device, whole=True)
    if cu_seqlens is not None:
        whole_numbers = torch.int32, torch.int64
        _expect(where, "cu_seqlens", cu_seqlens, ("sequences + 1",), whole_numbers, device, whole=True)
        if batch != 1:
            raise ValueError(f"{where}: cu_seqlens needs a batch of 1, with all sequences in a row, got {batch}")
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"{where}: cu_seqlens must have 2 elements or more, got {cu_seqlens.shape[0]}")
    if varlen_states and cu_seqlens is None:
        raise ValueError(f"{where}: return_varlen_states needs cu_seqlens, which was not given")
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("z", z)):
        if tensor is not None and tensor.strides[1] > MOST_STRIDE:
            raise ValueError(
                f"{where}: {name} must have at most {MOST_STRIDE} elements from a token to the next, "
                f"got a stride of {tensor.strides[1]}; {name}.contiguous() makes a contiguous copy"
            )
    expect_limit(where, dt_limit)
    if state_dtype not in either:
        raise TypeError(f"{where}: state_dtype must be {' or '.join(map(str, either))}, got {state_dtype}")
    if out is not None:
        _expect(where, "out", out, tuple(x.shape), (dtype,), device, whole=True)
    given = dict(zip(OPTIONS, seen[5:11])) | {"return_varlen_states": varlen_states or None}
    for name in lacks:
        if given[name] is not None:
            raise NotImplementedError(f"{where}: {name} is not supported here; kernels.ssd.five has it")
    nchunks = None
    if chunk_size is not None:
        _expect_chunk(where, chunk_size, most[0])
        nchunks = -(-seqlen // chunk_size)
    return Problem(batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, nchunks)


def _expect(where, name, seen, shape, dtypes, device, whole=False):
    """Raise unless the tensor has this shape (an int is an exact length, a str a free one; none is 0) and dtype.

    device  None: any;  whole  True: all of it must be contiguous, and not its last axis alone
    """
    if seen is None or seen.type is not torch.Tensor:
        got = "None" if seen is None else getattr(seen.type, "__name__", str(seen.type))
        raise TypeError(f"{where}: {name} must be a dense torch tensor, got {got}")
    if seen.dtype not in dtypes:
        raise TypeError(f"{where}: {name} must be of {' or '.join(map(str, dtypes))}, got {seen.dtype}")
    if device is not None and seen.device != device:
        raise ValueError(f"{where}: {name} must be on {device}, like x, got a tensor on {seen.device}")
    have = tuple(seen.shape)
    if len(have) != len(shape) or any(not n or (n != m and not isinstance(m, str)) for n, m in zip(have, shape)):
        wanted = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{where}: {name} must have shape {wanted}, none of it 0, got {have}")
    if (not _contiguous(have, seen.strides)) if whole else (seen.strides[-1] != 1 and have[-1] != 1):
        what = "contiguous" if whole else "contiguous along its last axis"
        raise ValueError(
            f"{where}: {name} must be {what}, got shape {have} with strides {tuple(seen.strides)}; "
            f"{name}.contiguous() makes a contiguous copy"
        )
    if not seen.aligned:
        raise ValueError(f"{where}: {name} must be aligned to its element size, got an address that is not")


def _contiguous(shape, strides):
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def _expect_sizes(where, sizes, most_headdim, most_dstate):
    if "ngroups" in sizes and sizes["nheads"] % sizes["ngroups"]:
        heads, groups = sizes["nheads"], sizes["ngroups"]
        raise ValueError(f"{where}: nheads must be a multiple of ngroups, got {heads} heads and {groups} groups")
    limits = dict(
        batch=MOST_SEQUENCES, seqlen=MOST_SEQLEN, nheads=MOST_SEQUENCES, headdim=most_headdim, dstate=most_dstate
    )
    for name, most in limits.items():
        if sizes.get(name, 0) > most:
            raise ValueError(f"{where}: {name} must be at most {most}, got {sizes[name]}")


def _expect_whole_number(where, chunk_size):
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"{where}: chunk_size must be a whole number or None, got {chunk_size!r}")


def _expect_chunk(where, chunk_size, most):
    if not LEAST_CHUNK <= chunk_size <= most or chunk_size & (chunk_size - 1):
        raise ValueError(f"{where}: chunk_size must be a power of two from {LEAST_CHUNK} to {most}, got {chunk_size}")


def expect_limit(where, limit):
    """Check dt_limit, a tuple."""
    if len(limit) != 2 or not all(isinstance(n, numbers.Real) and not isinstance(n, bool) for n in limit):
        raise TypeError(f"{where}: dt_limit must be two numbers, got {limit!r}")
    if not limit[0] <= limit[1]:
        raise ValueError(f"{where}: dt_limit must be (lowest, highest), got {limit!r}")


def _look_into(where, problem, seq_idx, cu_seqlens):
    """On the CPU: whether these can number, or end, sequences."""
    if seq_idx is not None and bool((seq_idx.diff(dim=1) < 0).any()):
        raise ValueError(f"{where}: seq_idx must never fall along the sequence, got one that does")
    if cu_seqlens is not None:
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        falls = bool((cu_seqlens.diff() < 0).any())
        if (first, last) != (0, problem.seqlen) or falls:
            got = f"{first} to {last}" + ", falling between" * falls
            raise ValueError(
                f"{where}: cu_seqlens must go from 0 to seqlen, {problem.seqlen}, and never fall, got {got}"
            )


def expect_apart(where, out, **inputs):
    """Check that nothing of out, which is contiguous, is also an input's; and that it asks for no gradients."""
    if out.requires_grad:
        raise ValueError(f"{where}: out must not require gradients, got a tensor that does")
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, value in inputs.items():
        if value is None:
            continue
        first = value.data_ptr()
        reach = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))  # elements, gaps included
        if first < end and begin < first + reach * value.element_size():
            raise ValueError(f"{where}: out must not share memory with {name}, got a tensor that does")
