"""What the launches between a layer's first product and its attention look at: TypeError or ValueError names the
argument, what was expected and what came, and nothing has been written by then."""

import torch

from kernels.kv_cache import QuantizedKV
from kernels.kv_cache.fixed import PEAK
from kernels.kv_cache.rounding import default_group
from lab.tensors import expect, expect_first

HALVES = (torch.float16, torch.bfloat16)


def expect_heads(where, qkv, turns, kv_len, k, v, bias, q_norm, k_norm):
    """Raise unless these are heads of a token, its place, and a cache for them. Returns (n_heads, n_kv_heads, capacity,
    the cache's tensors by name)."""
    expect_first(where, "qkv", qkv, ("n_heads + 2 n_kv_heads", "head_dim"), HALVES)
    heads, head_dim = qkv.shape
    if head_dim % 2 or head_dim > 512:
        raise ValueError(f"{where}: head_dim must be even and at most 512, got {head_dim}")
    expect(where, "turns", turns, qkv, (head_dim // 2,), (torch.float64,))
    expect(where, "kv_len", kv_len, qkv, (1,), (torch.int32,))
    quantised = isinstance(k, QuantizedKV) or isinstance(v, QuantizedKV)
    if quantised:
        expect_quantised(where, k, v, qkv)
        places = {"k.packed": k.packed, "k.scale": k.scale, "v.packed": v.packed, "v.scale": v.scale}
    else:
        expect(where, "k", k, qkv, ("capacity", "n_kv_heads", head_dim))
        expect(where, "v", v, qkv, tuple(k.shape))
        places = {"k": k, "v": v}
    capacity, n_kv_heads, _ = k.shape[-3:]
    n_heads = heads - 2 * n_kv_heads
    if n_heads < 1 or n_heads % n_kv_heads:
        wanted = f"n_heads + 2 · {n_kv_heads} rows, n_heads a multiple of {n_kv_heads}"
        raise ValueError(f"{where}: qkv must have {wanted}, got {heads}")
    if bias is not None:
        expect(where, "bias", bias, qkv, tuple(qkv.shape))
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{where}: q_norm and k_norm must both be given, or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            expect(where, name, weight, qkv, (head_dim,))
    return n_heads, n_kv_heads, capacity, places


def expect_quantised(where, k, v, qkv):
    """Raise unless these are two caches that rope_append_quantized.cu can write to."""
    for name, cache, role in (("k", k, "keys"), ("v", v, "values")):
        if not isinstance(cache, QuantizedKV):
            raise TypeError(
                f"{where}: k and v must be two tensors or two QuantizedKV, got {type(cache).__name__} as {name}"
            )
        capacity, n_kv_heads, head_dim = cache.shape[1:]
        if cache.shape[0] != 1 or head_dim != qkv.shape[1]:
            raise ValueError(
                f"{where}: {name} must have shape (1, capacity, n_kv_heads, {qkv.shape[1]}), got {tuple(cache.shape)}"
            )
        if cache.shape != k.shape or cache.bits != k.bits:
            raise ValueError(f"{where}: v must be like k, {k!r}, got {v!r}")
        group = default_group(cache.bits, "token", head_dim) if cache.bits in (8, 4) else None
        if group is None or (cache.axis, cache.group, cache.role) != ("token", group, role):
            wanted = f"of 8 or 4 bits, with axis='token', their default group, and role={role!r}"
            raise ValueError(f"{where}: {name} must be {wanted}, got {cache!r}")
        if role == "values" and cache.peak < PEAK:
            raise ValueError(f"{where}: v must be made for scales up to {PEAK:g}, as kernels.kv_cache.empty makes it")
        if (cache.dtype, cache.device) != (qkv.dtype, qkv.device):
            wanted, got = f"{qkv.dtype} on {qkv.device}", f"{cache.dtype} on {cache.device}"
            raise TypeError(f"{where}: {name} must be of {wanted}, like qkv, got {got}")
