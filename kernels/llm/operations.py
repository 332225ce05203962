"""embed and rope_append: looks at their arguments, and their launches."""

import functools
from pathlib import Path

import torch

from kernels.fusion.arguments import expect_eps
from kernels.kv_cache import QuantizedKV
from kernels.kv_cache.fixed import PEAK
from kernels.llm.arguments import HALVES, expect_heads
from lab import cuda
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_apart, expect_first, expect_no_gradient, output

HERE = Path(__file__).resolve().parent
PER_BLOCK = 1024  # logits that a block of greedy looks at, about
EMBED = Calls("embed")
GREEDY = Calls("greedy", outs=3)
APPEND = Calls("rope_append", outs=3)  # the queries, and the cache's k and v
APPEND_QUANTIZED = Calls("rope_append", outs=5)  # the queries, and codes and scales of both caches


def embed(E, token, *, out=None, pdl=False):
    """E[token]: E (vocab, hidden) float16 or bfloat16, token (1,) int64 → (hidden,). Moves 4 · hidden bytes."""
    if (done := EMBED.run((bool(pdl),), out, E, token)) is not None:
        return done
    result = expect_embed(E, token, out)
    vocab, hidden = E.shape
    with EMBED.preparing((bool(pdl),), (out,), (result,), (E, token)):
        _kernel("embed", E.dtype).embed(-(-hidden // 256), 256, E, token, result, vocab, hidden, pdl=pdl)
    return result


def expect_embed(E, token, out=None):
    """Raise unless embed can be called so. Returns the tensor to write to."""
    expect_first("embed", "E", E, ("vocab", "hidden"), HALVES)
    expect("embed", "token", token, E, (1,), (torch.int64,))
    return output("embed", out, E, (E.shape[1],), E=E, token=token)


def greedy(logits, token, kv_len, state, *, pdl=False):
    """token[0] = argmax of logits, the first of equal ones; kv_len[0] += 1. Returns token.

    logits (vocab,) float16 or bfloat16, token (1,) int64, kv_len (1,) int32, state (2,) int64: zeros, and zeros again
    when it is done; apart from each other. Moves 2 · vocab bytes.
    """
    others = token, kv_len, state
    if GREEDY.run((bool(pdl),), *others, logits) is not None:
        return token
    expect_greedy(logits, token, kv_len, state)
    blocks = -(-logits.numel() // PER_BLOCK)
    with GREEDY.preparing((bool(pdl),), others, others, (logits,)):
        kernel = _kernel("greedy", logits.dtype).greedy
        kernel(min(blocks, 1024), 256, logits, token, kv_len, state, logits.numel(), pdl=pdl)
    return token


def expect_greedy(logits, token, kv_len, state, *, memory=True):
    """Raise unless greedy can be called so. memory: see expect_rope_append."""
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
        expect_no_gradient(where, tensor, name)
        if memory:
            expect_apart(where, name, tensor, **others)


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
    others = qkv, turns, kv_len, bias, q_norm, k_norm
    calls, options, places = _kind(k, v, eps, pdl)
    if calls is not None and (done := calls.run(options, out, *places, *others)) is not None:
        return done[0]
    result, n_kv_heads = expect_rope_append(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, out)
    with calls.preparing(options, (out, *places), (result, *places), others):
        _launch(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, result, n_kv_heads, places, pdl)
    return result


def _kind(k, v, eps, pdl):
    """(the prepared calls for such caches, all that decides beside the tensors, the tensors that are written to); of
    what is no cache, (None, None, None)."""
    if isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV):
        caches = (*_facts(k), *_facts(v), v.peak >= PEAK)
        return APPEND_QUANTIZED, (eps, bool(pdl), *caches), (k.packed, k.scale, v.packed, v.scale)
    if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return APPEND, (eps, bool(pdl)), (k, v)
    return None, None, None


def _facts(cache):
    return cache.shape, cache.form, cache.dtype


def expect_rope_append(
    qkv, turns, kv_len, k, v, bias=None, q_norm=None, k_norm=None, eps=1e-6, out=None, *, memory=True
):  # fmt: skip
    """Raise unless rope_append can be called so. Returns (the tensor to write to, n_kv_heads). memory: whether the
    tensors have any, so that it can be seen whether they share it."""
    where = "rope_append"
    expect_eps(where, eps)
    n_heads, n_kv_heads, _, places = expect_heads(where, qkv, turns, kv_len, k, v, bias, q_norm, k_norm)
    head_dim = qkv.shape[1]
    inputs = {"qkv": qkv, "turns": turns, "kv_len": kv_len, "bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    for name, place in places.items():
        expect_no_gradient(where, place, name)
        others = {other: tensor for other, tensor in (places | inputs).items() if other != name}
        if memory:
            expect_apart(where, name, place, **others)
    inputs |= places
    return output(where, out, qkv, (n_heads, head_dim), **(inputs if memory else {})), n_kv_heads


def _launch(qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, out, n_kv_heads, places, pdl):
    heads, head_dim = qkv.shape
    tensors = (qkv, bias, q_norm, k_norm, turns, kv_len, out, *places)
    sizes = (heads - 2 * n_kv_heads, n_kv_heads, k.shape[-3])
    if isinstance(k, QuantizedKV):
        sizes += k.packed.shape[2], v.packed.shape[2]
        kernel = _kernel("rope_append_quantized", qkv.dtype, HEAD_DIM=head_dim, BITS=k.bits, GROUP=k.group)
        kernel = kernel.rope_append_quantized
    else:
        kernel = _kernel("rope_append", qkv.dtype, HEAD_DIM=head_dim).rope_append
    kernel(-(-heads // 4), 128, *tensors, *sizes, float(eps), pdl=pdl)


@functools.cache
def _kernel(name, dtype, **sizes):
    return cuda.load(HERE / f"{name}.cu", [f"-DDTYPE={DTYPES[dtype]}", *(f"-D{n}={size}" for n, size in sizes.items())])
