"""Look at the tensors of an attention call before anything is launched, and say what is wrong in one sentence."""

import functools
import math
import numbers

import torch

from lab.tensors import DTYPES, expect, expect_first, expect_memory, output

HEAD_DIMS = range(8, 257, 8)  # what every rung takes


def expect_decode(where, q, k, v, scale=None, kv_lens=None, out=None, *, alignment=16):
    """Check one call of decode attention. Returns (scale as a float, the tensor to write to).

    where      the function's name, for messages
    q          (batch, n_heads, head_dim)
    k, v       (batch, kv_len, n_kv_heads, head_dim), like q in dtype and device, kv_len at least 1
    scale      None (head_dim**-0.5) or a finite number
    kv_lens    None or int32 (batch,) on q's device, from 1 to kv_len. Looked into on the CPU only: on a card that would
               wait for it, so there the kernel clamps
    out        None (a new tensor) or a tensor like q, apart from all inputs
    alignment  bytes that the addresses of q, k and v must be divisible by

    TypeError or ValueError names the argument, what was expected and what came.
    """
    if not _all_well(q, k, v, alignment):
        _say_what_is_wrong(where, q, k, v, alignment)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect_memory(where, name, tensor)
    if kv_lens is not None:
        expect_kv_lens(where, kv_lens, q, k.shape[0], k.shape[1])
    return expect_scale(where, scale, q.shape[2]), output(where, out, q, q.shape, q=q, k=k, v=v, kv_lens=kv_lens)


def _all_well(q, k, v, alignment):
    """What _say_what_is_wrong looks for, without the words: a third of the time, at every call."""
    if not type(q) is type(k) is type(v) is torch.Tensor:
        return False
    dtype, device = q.dtype, q.device
    return (
        dtype in DTYPES
        and dtype is k.dtype is v.dtype
        and device == k.device == v.device
        and (q.is_cuda or q.is_cpu)
        and q.layout is k.layout is v.layout is torch.strided
        and q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and _go_together(q.shape, k.shape, v.shape)
        and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % max(alignment, dtype.itemsize)
    )


@functools.lru_cache(maxsize=1024)
def _go_together(q, k, v):
    """Whether q, k and v can have these shapes."""
    return (
        len(q) == 3
        and len(k) == 4
        and k == v
        and (q[0], q[2]) == (k[0], k[3])
        and 0 not in q
        and 0 not in k
        and q[1] % k[2] == 0
        and q[2] in HEAD_DIMS
    )


def _say_what_is_wrong(where, q, k, v, alignment):
    expect_first(where, "q", q, ("batch", "n_heads", "head_dim"))
    batch, n_heads, head_dim = q.shape
    expect(where, "k", k, q, (batch, "kv_len", "n_kv_heads", head_dim))
    expect(where, "v", v, q, tuple(k.shape))
    n_kv_heads = k.shape[2]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{where}: head_dim must be a multiple of 8 and at most 256, got {head_dim}")
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{where}: n_heads must be a multiple of n_kv_heads, got {n_heads} query heads and {n_kv_heads} kv heads"
        )
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.data_ptr() % alignment:
            raise ValueError(
                f"{where}: {name} must start at an address divisible by {alignment}, got {value.data_ptr():#x}"
            )


def expect_scale(where, scale, head_dim):
    """The scale as a float. A tensor cannot be one: to look into it on a card breaks a capture."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{where}: scale must be a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"{where}: scale must be finite, got {scale}")
    return float(scale)


def expect_kv_lens(where, kv_lens, like, batch, kv_len):
    """Raise unless these can be the lengths of the sequences in a cache of kv_len tokens."""
    expect(where, "kv_lens", kv_lens, like, (batch,), (torch.int32,))
    if kv_lens.is_cpu:
        low, high = int(kv_lens.min()), int(kv_lens.max())
        if low < 1 or high > kv_len:
            bad = low if low < 1 else high
            raise ValueError(f"{where}: kv_lens must be from 1 to kv_len, {kv_len}, got {bad}")
