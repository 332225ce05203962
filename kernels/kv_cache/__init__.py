"""A cache of keys and values in 8 or 4 bits, and decode attention that reads it as it is.

    quantize(kv, bits, *, axis="token", group=None) -> QuantizedKV      bits: 8 (int8), 4 (int4) or "fp8" (e4m3)
    decode(q, k, v, scale=None, *, kv_lens=None, out=None, pdl=False)   k and v: two QuantizedKV, or two plain tensors
    empty(batch, capacity, n_kv_heads, head_dim, bits, role, *, dtype, device) -> QuantizedKV       for CUDA graphs: all
    put(cache, kv, position), first(cache, tokens)                      its memory is there, and kv_lens says how far
    rungs.mix_fp32, mix_fp16, mix_half2, mix_flight                     chapter 07's last rungs: values of 16 bits

head_dim is any multiple of 16 up to 256, and sequences may have lengths of their own (kv_lens).

The cost of a decoding step is that of reading its cache, so half the bits are half the time. No tensor of dequantised
numbers is ever made: `decode` turns codes into float16 in registers, and multiplies queries and weights by the scales.
torch.compile takes `decode` as an operator, with caches that lie as keys and values already.
"""

from kernels.kv_cache.decoding import SOURCES, counters
from kernels.kv_cache.fixed import empty, first, put
from kernels.kv_cache.operators import decode
from kernels.kv_cache.quantization import QuantizedKV, quantize

__all__ = ["SOURCES", "QuantizedKV", "counters", "decode", "empty", "first", "put", "quantize"]
