"""A cache whose memory is there from the start, for a step in a CUDA graph: its shape says its capacity, and how many
tokens of it count is what `decode` is told by kv_lens, on the card.

Tokens come by `put`, many at once, or by kernels.llm.rope_append, one, inside the graph.
"""

import copy

import torch

from kernels.kv_cache import layout
from kernels.kv_cache.arguments import DTYPES, ROLES, expect_head_dim, expect_kv
from kernels.kv_cache.layout import TILE
from kernels.kv_cache.quantization import QuantizedKV, _peak
from kernels.kv_cache.rounding import codes_of, default_group
from lab.arguments import expect_count

PEAK = 16.0  # the largest scale that decode is made ready for


def empty(batch, capacity, n_kv_heads, head_dim, bits, role, *, dtype, device):
    """A QuantizedKV of shape (batch, capacity, n_kv_heads, head_dim) with axis="token" that no token was put into.

    capacity  tokens, a multiple of 16
    bits      8 (int8) or 4 (int4), grouped as `quantize` does by default
    role      "keys" or "values"
    dtype     of what will be put there: float16, bfloat16 or float32
    Takes 2 bytes of a scale and GROUP · bits / 8 of codes for each group of channels, all 0 at first.

    With kv_lens `decode` sees the tokens that were put, and no others, as long as all are finite: 0 times the scale of
    a NaN is NaN, so such a token must be written over before one goes back behind it. The powers of two that it works
    with go by the largest scale, so that is settled beforehand, as `peak`: scales below 4 · peak, 64, are sure to stay
    in float16's range, so values below 8,128 in 8 bits and 512 in 4. Beyond, its result may be infinite or NaN. `put`
    raises `peak` where it meets larger ones; a graph must then be captured anew.
    """
    where = "empty"
    for name, value in (("batch", batch), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim), ("capacity", capacity)):
        expect_count(where, name, value, low=1)
    if capacity % TILE:
        raise ValueError(f"{where}: capacity must be a multiple of {TILE}, got {capacity}")
    expect_head_dim(where, head_dim)
    if isinstance(bits, bool) or bits not in (8, 4):
        raise ValueError(f"{where}: bits must be 8 or 4, got {bits!r}")
    if role not in ROLES:
        raise ValueError(f"{where}: role must be 'keys' or 'values', got {role!r}")
    if dtype not in DTYPES:
        raise TypeError(f"{where}: dtype must be {' or '.join(map(str, DTYPES))}, got {dtype!r}")
    like = torch.empty(batch, 0, n_kv_heads, head_dim, dtype=dtype, device=device)
    cache = QuantizedKV(like, bits, "token", default_group(bits, "token", head_dim), role, capacity)
    cache.shape, cache.peak = torch.Size((batch, capacity, n_kv_heads, head_dim)), PEAK
    return cache


def put(cache, kv, position):
    """Put tokens kv (batch, n, n_kv_heads, head_dim) at `position` of a cache with axis="token".

    Tokens before keep their codes; what stands behind, up to the end of the last tile of 16, is forgotten. Waits for
    the card, as `quantize` does.

    TypeError or ValueError says which argument is wrong; nothing has been written by then.
    """
    batch, capacity, n_kv_heads, head_dim = cache.shape
    if cache.axis != "token":
        raise ValueError(f"put: cache must have axis='token', got {cache.axis!r}")
    expect_kv("put", "kv", kv, (batch, "n", n_kv_heads, head_dim))
    if (kv.dtype, kv.device) != (cache.dtype, cache.device):
        wanted, got = f"{cache.dtype} on {cache.device}", f"{kv.dtype} on {kv.device}"
        raise TypeError(f"put: kv must be of {wanted}, like the cache, got {got}")
    expect_count("put", "position", position, low=0)
    if position + kv.shape[1] > capacity:
        raise ValueError(f"put: {kv.shape[1]} tokens at {position} must end within {capacity}, the cache's capacity")
    cache.peak = max(cache.peak, _peak("put", "kv", kv, cache.bits))
    begin = position // TILE * TILE
    before = layout.unpack_token_scales(cache.scale[:, :, begin // TILE : begin // TILE + 1], cache.role)
    for b in range(batch):
        codes, scale = codes_of(kv[b : b + 1].detach().float(), cache.bits, "token", cache.group)
        if position > begin:  # of its tile, what stands in front
            codes = torch.cat([layout.unpack(cache.packed, cache.bits, cache.role, b, begin, position), codes], 1)
            scale = torch.cat([before[b : b + 1, : position - begin], scale], 1)
        cache._write(codes, scale, b, begin)


def first(cache, tokens):
    """The first tokens of a cache as a cache, in the same memory: for `dequantize`, `codes` and `nbytes`."""
    expect_count("first", "tokens", tokens, low=1)
    if tokens > cache.shape[1]:
        raise ValueError(f"first: tokens must be at most {cache.shape[1]}, got {tokens}")
    found = copy.copy(cache)
    found.shape = torch.Size((cache.shape[0], tokens, *cache.shape[2:]))
    return found
