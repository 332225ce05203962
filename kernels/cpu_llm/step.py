"""One token of a language model on the processor: chapter 02's products and chapter 08's attention, one after another.

Steps 1 to 9 of ref.llm. Weights are NumPy arrays in the type in which they are stored (bfloat16 as uint16), the cache
is float16, all between is float32.
"""

import numpy as np

from kernels import cpu_llm
from kernels.rotary import rope_frequencies


def token_logits(config, weights, x, keys, values, position, *, threads=None):
    """Logits (vocab,), float32, of what follows one token; its keys and values go into the cache.

    config    n_heads, n_kv_heads, head_dim, eps, theta, scaling, window (tokens that attention sees, or None)
    weights   .layers: for each the arrays attention_norm, Wqkv, bqkv or None, q_norm and k_norm or None, Wo, ffn_norm,
              W_glu (gate above up), W_down; .norm, .head. A matrix may be a list of matrices one above another
    x         (hidden,) float32: the token's row of the embedding
    keys, values   (n_layers, n_kv_heads, room, head_dim) float16, of the `position` tokens before; room for one more
    """
    c = config
    angles = position * rope_frequencies(c.head_dim, c.theta, c.scaling)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first = max(0, position + 1 - c.window) if c.window else 0
    for layer, k_cache, v_cache in zip(weights.layers, keys, values):
        qkv = product(layer.Wqkv, norm(x, layer.attention_norm, c.eps), threads)  # 2
        if layer.bqkv is not None:
            qkv += layer.bqkv
        heads = qkv.reshape(-1, c.head_dim)
        q, k, v = heads[: c.n_heads], heads[c.n_heads : -c.n_kv_heads], heads[-c.n_kv_heads :]
        if layer.q_norm is not None:  # 3
            q, k = norm(q, layer.q_norm, c.eps), norm(k, layer.k_norm, c.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # 4
        k_cache[:, position], v_cache[:, position] = k, v
        if first:  # a window: the kernel takes whole tensors, so its tokens are copied together
            k_cache, v_cache = (np.ascontiguousarray(t[:, first : position + 1]) for t in (k_cache, v_cache))
        mixed = cpu_llm.attention(q, k_cache, v_cache, position + 1 - first, threads=threads)  # 5
        x = x + product(layer.Wo, mixed.reshape(-1), threads)  # 6
        both = product(layer.W_glu, norm(x, layer.ffn_norm, c.eps), threads)  # 7
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        x = x + product(layer.W_down, gate / (1 + np.exp(-gate)) * up, threads)  # 8
    return product(weights.head, norm(x, weights.norm, c.eps), threads)  # 9


def product(W, x, threads):
    """W x; where W is several matrices one above another, a list, their results one after another."""
    if isinstance(W, list):
        return np.concatenate([product(part, x, threads) for part in W])
    return cpu_llm.gemv(W, x, threads=threads)


def norm(x, weight, eps):
    mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
    return x / np.sqrt(mean + np.float32(eps)) * weight


def rotate(x, cos, sin):
    """rope of one token's heads (n_heads, head_dim)."""
    half = x.shape[1] // 2
    a, b, turned = x[:, :half], x[:, half:], np.empty_like(x)
    turned[:, :half] = a * cos - b * sin
    turned[:, half:] = b * cos + a * sin
    return turned
