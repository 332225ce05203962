"""decode on two QuantizedKV as an operator of torch.library, which takes their parts: kv_cache_decode.

torch.compile looks through the objects. It compiles anew when a cache has moved to more memory, or its largest scale
has changed; kv_len it learns to take as a number.
"""

import torch

from kernels import attention
from kernels.attention.operators import expect_lengths
from kernels.kv_cache import decoding
from kernels.kv_cache.quantization import QuantizedKV
from lab.operators import operator

CACHE = "Tensor {0}_codes, Tensor {0}_scale, str {0}_format, float {0}_peak"
INPUTS = f"Tensor q, {CACHE.format('k')}, {CACHE.format('v')}, SymInt[] shape, float? scale=None"
INPUTS += ", Tensor? kv_lens=None, bool pdl=False"


def _caches(shape, parts):
    kinds = "codes", "scale", "format", "peak"
    return [_cache(*(parts.pop(f"{name}_{kind}") for kind in kinds), shape) for name in "kv"]


def _cache(packed, scale, form, peak, shape):
    """What `decode` needs of a QuantizedKV, from what it reads; form: "bits axis group role"."""
    cache = QuantizedKV.__new__(QuantizedKV)
    bits, cache.axis, group, cache.role = form.split()
    cache.bits, cache.group, cache.peak = bits if bits == "fp8" else int(bits), int(group), peak
    cache.packed, cache.scale, cache.shape, cache.device = packed, scale, torch.Size(shape), packed.device
    return cache


def _call(q, shape, **how):
    k, v = _caches(shape, how)
    return decoding.decode(q, k, v, **how)


def _fake(q, shape, kv_lens=None, **how):
    decoding.expect_fit(q, *_caches(shape, how))
    expect_lengths("decode", kv_lens, q)
    return q.new_empty(q.shape)


def _unpack(operators, q, k, v, scale=None, *, kv_lens=None, out=None, pdl=False):
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return attention.decode(q, k, v, scale, kv_lens=kv_lens, out=out, pdl=pdl)
    decoding.expect_caches(k, v)
    if tuple(k.shape) != tuple(v.shape):
        raise ValueError(f"decode: v must have shape {tuple(k.shape)}, got {tuple(v.shape)}")
    for cache, role in ((k, "keys"), (v, "values")):
        if cache.role != role:  # laying it out anew changes the cache, and nothing that is traced may do so
            raise RuntimeError(
                f"decode: a cache must lie as {role} before torch.compile, got one that lies as {cache.role}: call "
                f"decode once before, or quantize(..., role={role!r})"
            )
    parts = k.packed, k.scale, _format(k), k.peak, v.packed, v.scale, _format(v), v.peak
    return operators(q, *parts, list(k.shape), scale, kv_lens=kv_lens, out=out, pdl=pdl)


def _format(cache):
    return f"{cache.bits} {cache.axis} {cache.group} {cache.role}"


decode = operator("kv_cache_decode", INPUTS, fake=_fake, unpack=_unpack, call=_call)(decoding.decode)
