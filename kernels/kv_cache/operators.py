"""decode on two QuantizedKV as an operator of torch.library, which takes their parts: kv_cache_decode.

torch.compile looks through the objects. It compiles anew when a cache has moved to more memory, or its largest scale
has changed; kv_len it learns to take as a number.
"""

import torch

from kernels import attention
from kernels.attention.arguments import expect_scale
from kernels.attention.operators import expect_lengths
from kernels.kv_cache import decoding
from kernels.kv_cache.quantization import QuantizedKV, expect_how
from lab.operators import operator

CACHE = "Tensor {0}_codes, Tensor {0}_scale, str {0}_format, float {0}_peak"
INPUTS = f"Tensor q, {CACHE.format('k')}, {CACHE.format('v')}, SymInt[] shape, float? scale=None"
INPUTS += ", Tensor? kv_lens=None, bool pdl=False"


def _caches(shape, parts):
    if len(shape) != 4:
        raise ValueError(f"decode: shape must be (batch, kv_len, n_kv_heads, head_dim), got {tuple(shape)}")
    kinds = "codes", "scale", "format", "peak"
    return [_cache(name, *(parts.pop(f"{name}_{kind}") for kind in kinds), shape) for name in "kv"]


def _cache(name, packed, scale, form, peak, shape):
    """What `decode` needs of a QuantizedKV, from what it reads; form: "bits axis group role"."""
    bits, axis, group, role = _read_format(name, form, shape[3])
    return QuantizedKV.of_parts("decode", name, packed, scale, shape, bits, axis, group, role, peak)


def _read_format(name, form, head_dim):
    try:
        bits, axis, group, role = form.split()
        found = bits if bits == "fp8" else int(bits), axis, int(group), role
        expect_how("decode", *found[:3], role, head_dim)
    except ValueError as error:
        raise ValueError(f'decode: {name}_format must be "bits axis group role", got {form!r}: {error}') from None
    if role != {"k": "keys", "v": "values"}[name]:
        raise ValueError(f"decode: {name}_format must end in the role that {name} has in decode, got {form!r}")
    return found


def _call(q, shape, **how):
    found = decoding.run_parts(q, shape, **how)
    if found is None:
        k, v = _caches(shape, how)
        found = decoding.decode(q, k, v, **how)
    return found


def _fake(q, shape, kv_lens=None, **how):
    expect_scale("decode", how.pop("scale", None), q.shape[-1])
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
    parts = k.packed, k.scale, k.form, k.peak, v.packed, v.scale, v.form, v.peak
    return operators(q, *parts, list(k.shape), scale, kv_lens=kv_lens, out=out, pdl=pdl)


decode = operator("kv_cache_decode", INPUTS, fake=_fake, unpack=_unpack, call=_call)(decoding.decode)
