"""Measure a token of a whole model on the CPU: random weights in the shape of Llama-3.2-1B, fp16 and bf16.

Its bytes are those of every weight and of the keys and values of the tokens so far. The peer is the same by PyTorch's
products of bfloat16 and float32.
"""

import functools
from types import SimpleNamespace

import numpy as np
import torch

import ref.llm
from kernels.cpu_llm import fused
from kernels.cpu_llm.fused import aligned
from kernels.cpu_llm.step import token_logits
from lab import Ladder, machine
from lab.check import Verdict

SIZES = {"hidden": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "head_dim": 64, "ffn": 8192, "vocab": 128256}
MODEL = SimpleNamespace(name="Llama-3.2-1B", eps=1e-5, theta=5e5, scaling=None, window=None, **SIZES)
LENGTH = 128  # tokens, with this one
HERE = "kernels/cpu_llm/"
SOURCES = (HERE + "step.py", HERE + "attention.c", "kernels/vec.h")
ONE_CALL = (HERE + "fused.py", HERE + "token.c")
PRODUCT = {"fp16": "kernels/cpu_gemv/half.c", "bf16": HERE + "bfloat.c"}
TOLERANCE = 5e-3


def ladders(seconds=2.0, model=MODEL):
    """Check, then time, both ways, in both types. Returns one Ladder a type."""
    return [ladder_of(name, model, seconds) for name in PRODUCT]


def ladder_of(name, model, seconds):
    """The ladder of a type of weights: "fp16" or "bf16"."""
    weights = random_weights(model, name)
    x = np.random.default_rng(1).standard_normal(model.hidden, np.float32)
    cache = np.random.default_rng(2).standard_normal((2, model.n_layers, model.n_kv_heads, LENGTH + 8, model.head_dim))
    cache = cache.astype(np.float16)
    matrices = [m for layer in weights.layers for m in (layer.Wqkv, layer.Wo, layer.W_glu, layer.W_down)]
    numbers = sum(matrix.size for matrix in (*matrices, weights.head))
    mix = 4 * model.n_layers * model.n_heads * LENGTH * model.head_dim
    token = 2 * 2 * model.n_layers * model.n_kv_heads * model.head_dim
    facts = {"bytes": 2 * numbers + token * LENGTH, "flops": 2 * numbers + mix}
    ladder = Ladder(f"{model.name}, {name}, a token behind {LENGTH - 1}", bound="read")
    every, truth = machine.thread_count(), wanted(model, weights, x, cache)
    ways = [("an operation at a time", token_logits, every, (*SOURCES, PRODUCT[name]))]
    ways += [("one call", fused.token_logits, threads, ONE_CALL) for threads in dict.fromkeys((1, every))]
    for way, function, threads, sources in ways:
        call = functools.partial(function, model, weights, x, *cache, LENGTH - 1, threads=threads)
        error = float(np.linalg.norm(call() - truth) / np.linalg.norm(truth))
        verdict = Verdict(shapes=1, error=error)
        if not error <= TOLERANCE:
            raise ValueError(f"{ladder.title}: is not right, so it is not timed: relative error {error:.2g}")
        title = f"{way}, {'one thread' if threads == 1 else f'{threads} threads'}"
        ladder.plan(title, call, verdict=verdict, sources=sources, **facts)
    if name == "bf16":
        ladder.plan("PyTorch's operations, bf16", lambda: by_torch(model, weights, x, cache), **facts)
    ladder.again(seconds)
    ladder.calls.clear()
    return ladder


def random_weights(model, name):
    """Arrays as kernels.cpu_llm.step takes them: float16, or uint16 that holds bfloat16."""
    made = torch.Generator().manual_seed(0)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]

    def matrix(rows, cols):
        found = in_large_pages(rows, cols)
        torch.from_numpy(found).view(dtype).normal_(0, cols**-0.5, generator=made)
        return found if name == "fp16" else found.view(np.uint16)

    def norm():
        return (1 + torch.randn(model.hidden, generator=made) / 10).numpy()

    q_rows, kv_rows = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    layers = [
        SimpleNamespace(
            attention_norm=norm(), Wqkv=matrix(q_rows + 2 * kv_rows, model.hidden), bqkv=None, q_norm=None, k_norm=None,
            Wo=matrix(model.hidden, q_rows), ffn_norm=norm(), W_glu=matrix(2 * model.ffn, model.hidden),
            W_down=matrix(model.hidden, model.ffn),
        )
        for _ in range(model.n_layers)
    ]  # fmt: skip
    return SimpleNamespace(layers=layers, norm=norm(), head=matrix(model.vocab, model.hidden))


def in_large_pages(rows, cols):
    """A float16 array, not set. NumPy asks the system for pages of 2 MB where an array is large, as the roof's is, and
    Linux maps a checkpoint's file so where it can. PyTorch gets pages of 4 KB: reading alone is slower then."""
    return aligned(-(-rows * cols // 2)).view(np.float16)[: rows * cols].reshape(rows, cols)


def widened(matrix):
    """An array of random_weights as float32."""
    if matrix.dtype == np.uint16:
        return torch.from_numpy(matrix).view(torch.bfloat16).float().numpy()
    return matrix.astype(np.float32)


def wanted(model, weights, x, cache):
    """The same logits by NumPy in float32, whose sums are long, one matrix widened at a time."""
    at = LENGTH - 1
    angles = at * ref.llm.rope_frequencies(model.head_dim, model.theta, model.scaling)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + model.eps) * weight

    def turned(x):
        a, b = np.split(x, 2, axis=1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)

    x = x.astype(np.float64)
    for layer, k_cache, v_cache in zip(weights.layers, *cache):
        qkv = (widened(layer.Wqkv) @ norm(x, layer.attention_norm).astype(np.float32)).astype(np.float64)
        heads = qkv.reshape(-1, model.head_dim)
        q, k, v = np.split(heads, (model.n_heads, model.n_heads + model.n_kv_heads))
        keys, values = k_cache[:, : at + 1].astype(np.float64), v_cache[:, : at + 1].astype(np.float64)
        keys[:, at], values[:, at] = turned(k), v
        q = turned(q).reshape(model.n_kv_heads, -1, model.head_dim)
        scores = np.einsum("hgd,htd->hgt", q, keys) * model.head_dim**-0.5
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hgt,htd->hgd", weight / weight.sum(-1, keepdims=True), values).reshape(-1)
        x = x + widened(layer.Wo) @ mixed.astype(np.float32)
        gate, up = np.split((widened(layer.W_glu) @ norm(x, layer.ffn_norm).astype(np.float32)).astype(np.float64), 2)
        x = x + widened(layer.W_down) @ (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    return widened(weights.head) @ norm(x, weights.norm).astype(np.float32)


def by_torch(model, weights, x, cache):
    """A token by PyTorch's products of bfloat16 matrices."""
    tensors = getattr(weights, "tensors", None)
    if tensors is None:  # views, made once
        as_tensor = lambda m: torch.from_numpy(m).view(torch.bfloat16) if m.dtype == np.uint16 else torch.from_numpy(m)  # noqa: E731
        layers = [{k: as_tensor(v) for k, v in vars(layer).items() if v is not None} for layer in weights.layers]
        tensors = weights.tensors = layers, as_tensor(weights.norm), as_tensor(weights.head)
    layers, last, head = tensors
    functional, at = torch.nn.functional, LENGTH - 1
    angles = at * torch.from_numpy(ref.llm.rope_frequencies(model.head_dim, model.theta, model.scaling))
    cos, sin = angles.cos().float(), angles.sin().float()

    def turned(t):
        a, b = t.float().chunk(2, dim=1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    def normed(x, weight):
        return functional.rms_norm(x, weight.shape, weight, model.eps).bfloat16()

    with torch.inference_mode():
        x = torch.from_numpy(x)
        for layer, k_cache, v_cache in zip(layers, *cache):
            qkv = torch.mv(layer["Wqkv"], normed(x, layer["attention_norm"])).view(-1, model.head_dim)
            q, k, v = qkv.split((model.n_heads, model.n_kv_heads, model.n_kv_heads))
            k_cache[:, at], v_cache[:, at] = turned(k).numpy(), v.float().numpy()
            keys, values = (torch.from_numpy(t[:, : at + 1]).float()[None] for t in (k_cache, v_cache))
            mixed = functional.scaled_dot_product_attention(turned(q)[None, :, None], keys, values, enable_gqa=True)
            x = x + torch.mv(layer["Wo"], mixed.reshape(-1).bfloat16())
            gate, up = torch.mv(layer["W_glu"], normed(x, layer["ffn_norm"])).float().chunk(2)
            x = x + torch.mv(layer["W_down"], (functional.silu(gate) * up).bfloat16())
        return torch.mv(head, normed(x, last))
