"""What a whole language model needs on a card beside products and attention: a launch each.

    embed         the residual stream's beginning: a row of the embedding
    rope_append   biases, norms of heads, rotary positions, and the new token's place in the cache

Token and length lie on the card, so that a CUDA graph of a whole step can be replayed while they change. CUDA tensors
run on their card, CPU tensors on the SIMT machine. pdl= as in kernels/fusion: both wait before they read anything.

TypeError or ValueError names the argument, what was expected and what came, before anything is written. What lies on
the card is not looked at: a token outside of the table gives NaN, a length outside of the cache writes nothing.
"""

import functools
from pathlib import Path

import torch

from lab import cuda
from lab.tensors import DTYPES, expect, expect_first, output

HERE = Path(__file__).resolve().parent
HALVES = (torch.float16, torch.bfloat16)


def embed(E, token, *, out=None, pdl=False):
    """E[token]: E (vocab, hidden) float16 or bfloat16, token (1,) int64 → (hidden,). Moves 4 · hidden bytes."""
    expect_first("embed", "E", E, ("vocab", "hidden"), HALVES)
    expect("embed", "token", token, E, (1,), (torch.int64,))
    out = output("embed", out, E, (E.shape[1],), E=E, token=token)
    vocab, hidden = E.shape
    _kernel("embed", E.dtype).embed(-(-hidden // 256), 256, E, token, out, vocab, hidden, pdl=pdl)
    return out


def rope_append(
    qkv, turns, kv_len, k, v, *, bias=None, q_norm=None, k_norm=None, eps=1e-6, out=None, pdl=False
):  # fmt: skip
    """Queries at the new token's position; its keys and values go into the cache.

    qkv      (n_heads + 2 · n_kv_heads, head_dim) float16 or bfloat16: queries, keys and values of one token
    turns    (head_dim / 2,) float64: turns per token of each pair of numbers, ref.llm.rope_frequencies / 2π
    kv_len   (1,) int32: tokens in the cache, this one among them; its position is kv_len - 1
    k, v     (capacity, n_kv_heads, head_dim), like qkv: written at that position
    bias     like qkv, added first
    q_norm, k_norm   (head_dim,), like qkv: RMSNorms of each head, with eps; both or neither
    → (n_heads, head_dim)

    Moves 4 · (n_heads + 2 · n_kv_heads) · head_dim bytes.
    """
    where = "rope_append"
    expect_first(where, "qkv", qkv, ("n_heads + 2 n_kv_heads", "head_dim"), HALVES)
    heads, head_dim = qkv.shape
    if head_dim % 2 or head_dim > 512:
        raise ValueError(f"{where}: head_dim must be even and at most 512, got {head_dim}")
    expect(where, "turns", turns, qkv, (head_dim // 2,), (torch.float64,))
    expect(where, "kv_len", kv_len, qkv, (1,), (torch.int32,))
    expect(where, "k", k, qkv, ("capacity", "n_kv_heads", head_dim))
    expect(where, "v", v, qkv, tuple(k.shape))
    capacity, n_kv_heads, _ = k.shape
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
    inputs = {"qkv": qkv, "turns": turns, "kv_len": kv_len, "bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    output(where, k, qkv, tuple(k.shape), v=v, **inputs)
    output(where, v, qkv, tuple(k.shape), **inputs)
    out = output(where, out, qkv, (n_heads, head_dim), k=k, v=v, **inputs)
    tensors = (qkv, bias, q_norm, k_norm, turns, kv_len, out, k, v)
    kernel = _kernel("rope_append", qkv.dtype, head_dim).rope_append
    kernel(-(-heads // 4), 128, *tensors, n_heads, n_kv_heads, capacity, float(eps), pdl=pdl)
    return out


@functools.cache
def _kernel(name, dtype, head_dim=None):
    options = [f"-DDTYPE={DTYPES[dtype]}"] + ([f"-DHEAD_DIM={head_dim}"] if head_dim else [])
    return cuda.load(HERE / f"{name}.cu", options)
