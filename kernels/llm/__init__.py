"""What a whole language model needs on a card beside products and attention: a launch each.

    embed         the residual stream's beginning: a row of the embedding
    rope_append   biases, norms of heads, rotary positions, and the new token's place in the cache, of 16, 8 or 4 bits
    greedy        the likeliest token becomes the next one, and the length counts it
    attend        the same for a cache of 16 bits, and the whole of attention with it

Token and length lie on the card, so that a CUDA graph of a whole step can be replayed while they change. CUDA tensors
run on their card, CPU tensors on the SIMT machine. pdl= as in kernels/fusion: embed and rope_append wait before they
read anything; attend reads the length and the cache of earlier tokens at once.

TypeError or ValueError names the argument, what was expected and what came, before anything is written. What lies on
the card is not looked at: a token outside of the table gives NaN, a length outside of the cache writes nothing.
"""

import functools
from pathlib import Path

import torch

from kernels.kv_cache import QuantizedKV
from kernels.llm.arguments import HALVES, expect_heads
from kernels.llm.attending import attend, attends
from lab import cuda
from lab.tensors import DTYPES, expect, expect_first, output

__all__ = ["attend", "attends", "embed", "greedy", "rope_append"]

PER_BLOCK = 1024  # logits that a block of greedy looks at, about
HERE = Path(__file__).resolve().parent


def embed(E, token, *, out=None, pdl=False):
    """E[token]: E (vocab, hidden) float16 or bfloat16, token (1,) int64 → (hidden,). Moves 4 · hidden bytes."""
    expect_first("embed", "E", E, ("vocab", "hidden"), HALVES)
    expect("embed", "token", token, E, (1,), (torch.int64,))
    out = output("embed", out, E, (E.shape[1],), E=E, token=token)
    vocab, hidden = E.shape
    _kernel("embed", E.dtype).embed(-(-hidden // 256), 256, E, token, out, vocab, hidden, pdl=pdl)
    return out


def greedy(logits, token, kv_len, state, *, pdl=False):
    """token[0] = argmax of logits, the first of equal ones; kv_len[0] += 1. Returns token.

    logits (vocab,) float16 or bfloat16, token (1,) int64, kv_len (1,) int32, state (2,) int64: zeros, and zeros again
    when it is done; apart from each other. Moves 2 · vocab bytes.
    """
    where = "greedy"
    expect_first(where, "logits", logits, ("vocab",), HALVES)
    if not 0 < logits.numel() < 1 << 31:
        raise ValueError(f"{where}: logits must have from 1 to {(1 << 31) - 1} numbers, got {logits.numel()}")
    expect(where, "token", token, logits, (1,), (torch.int64,))
    expect(where, "kv_len", kv_len, logits, (1,), (torch.int32,))
    expect(where, "state", state, logits, (2,), (torch.int64,))
    written = {"token": token, "kv_len": kv_len, "state": state}
    for name, tensor in written.items():
        others = {other: t for other, t in (written | {"logits": logits}).items() if other != name}
        output(where, tensor, tensor, tuple(tensor.shape), **others)
    blocks = -(-logits.numel() // PER_BLOCK)
    _kernel(where, logits.dtype).greedy(min(blocks, 1024), 256, logits, token, kv_len, state, logits.numel(), pdl=pdl)
    return token


def rope_append(
    qkv, turns, kv_len, k, v, *, bias=None, q_norm=None, k_norm=None, eps=1e-6, out=None, pdl=False
):  # fmt: skip
    """Queries at the new token's position; its keys and values go into the cache.

    qkv      (n_heads + 2 · n_kv_heads, head_dim) float16 or bfloat16: queries, keys and values of one token
    turns    (head_dim / 2,) float64: turns per token of each pair of numbers, ref.llm.rope_frequencies / 2π
    kv_len   (1,) int32: tokens in the cache, this one among them; its position is kv_len - 1
    k, v     (capacity, n_kv_heads, head_dim), like qkv: written at that position. Or two QuantizedKV of shape (1,
             capacity, n_kv_heads, head_dim), of 8 or 4 bits as kernels.kv_cache.empty makes them, the first for keys:
             what is written is, bit for bit, what kernels.kv_cache.quantize makes of these numbers in qkv's dtype
    bias     like qkv, added first
    q_norm, k_norm   (head_dim,), like qkv: RMSNorms of each head, with eps; both or neither
    → (n_heads, head_dim)

    Moves 4 · (n_heads + 2 · n_kv_heads) · head_dim bytes; few bits are fewer.
    """
    where = "rope_append"
    n_heads, n_kv_heads, capacity, places = expect_heads(where, qkv, turns, kv_len, k, v, bias, q_norm, k_norm)
    heads, head_dim = qkv.shape
    quantised = isinstance(k, QuantizedKV)
    inputs = {"qkv": qkv, "turns": turns, "kv_len": kv_len, "bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    for name, place in places.items():
        others = {other: tensor for other, tensor in (places | inputs).items() if other != name}
        output(where, place, place, tuple(place.shape), **others)
    out = output(where, out, qkv, (n_heads, head_dim), **places, **inputs)
    tensors = (qkv, bias, q_norm, k_norm, turns, kv_len, out, *places.values())
    sizes = (n_heads, n_kv_heads, capacity)
    if quantised:
        sizes += k.packed.shape[2], v.packed.shape[2]
        kernel = _kernel("rope_append_quantized", qkv.dtype, HEAD_DIM=head_dim, BITS=k.bits, GROUP=k.group)
        kernel = kernel.rope_append_quantized
    else:
        kernel = _kernel("rope_append", qkv.dtype, HEAD_DIM=head_dim).rope_append
    kernel(-(-heads // 4), 128, *tensors, *sizes, float(eps), pdl=pdl)
    return out


@functools.cache
def _kernel(name, dtype, **sizes):
    return cuda.load(HERE / f"{name}.cu", [f"-DDTYPE={DTYPES[dtype]}", *(f"-D{n}={size}" for n, size in sizes.items())])
