"""A prompt's tokens at once, by PyTorch's own products and attention: steps 1 to 9 of ref.llm for many tokens.

Both ways to run use it, on their own weights and cache: on the processor with float32 between the steps, on a card with
the weights' own 16 bits. What a model keeps for it:

    weights.embedding (vocab, hidden), weights.norm (hidden,), weights.head (vocab, hidden), weights.layers: for each
    attention_norm, ffn_norm (hidden,), Wqkv (q_rows + 2 · kv_rows, hidden), bqkv or None, q_norm and k_norm or None,
    Wo (hidden, q_rows), W_glu (2 · ffn, hidden): gate above up, W_down (hidden, ffn)
"""

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from models.positions import rotary_tables, rotate

CHUNK = 512  # tokens at a time: bounds the memory that scores and the feed-forward block take
CARD_CHUNK = 4096  # on a card, where attention keeps no scores


def linear(x, W, add=None):
    """x Wᵀ, or add + x Wᵀ."""
    return F.linear(x, W) if add is None else torch.addmm(add, x, W.T)


def prefill(config, weights, tokens, cache, *, every=False, product=linear, dtype=torch.float32, chunk=CHUNK):
    """Run tokens through the model behind those of the cache, and add them to it.

    tokens   (n,) int64, on the weights' device
    cache    .length: tokens so far; .append(layer, k, v): of the next tokens, (n, n_kv_heads, head_dim) each, returns
             all keys and values so far, like k; .advance(n)
    every    True: logits after every token, (n, vocab); False: after the last, (1, vocab). float32
    product  product(x, W) = x Wᵀ, and product(x, W, add) = add + x Wᵀ, in x's type
    dtype    of what lies between the steps
    chunk    tokens at a time
    """
    found = []
    for part in tokens.split(chunk):
        x = _layers(config, weights, part, cache, product, dtype)
        if every or part[-1:].data_ptr() == tokens[-1:].data_ptr():
            x = x if every else x[-1:]
            found.append(product(norm(x, weights.norm, config.eps), weights.head).float())  # 9
    return torch.cat(found)


def _layers(config, weights, tokens, cache, product, dtype):
    """Steps 1 to 8 of some tokens: their residual streams (n, hidden)."""
    n, begin, heads = len(tokens), cache.length, config.n_heads + config.n_kv_heads
    cos, sin = rotary_tables(config, begin, begin + n, tokens.device)
    seen = seen_by(n, begin, config.window, tokens.device)
    x = weights.embedding[tokens].to(dtype)  # 1
    for index, layer in enumerate(weights.layers):
        qkv = product(norm(x, layer.attention_norm, config.eps), layer.Wqkv)  # 2
        if layer.bqkv is not None:
            qkv = qkv + layer.bqkv
        qkv = qkv.view(n, -1, config.head_dim)
        qk, v = qkv[:, :heads], qkv[:, heads:]
        if layer.q_norm is not None:  # 3
            parts = zip(qk.split((config.n_heads, config.n_kv_heads), dim=1), (layer.q_norm, layer.k_norm))
            qk = torch.cat([norm(part, weight, config.eps) for part, weight in parts], dim=1)
        q, k = rotate(qk, cos, sin).split((config.n_heads, config.n_kv_heads), dim=1)  # 4
        keys, values = cache.append(index, k, v)
        x = product(attention(q, keys, values, seen).to(dtype), layer.Wo, x)  # 5 and 6
        gate, up = product(norm(x, layer.ffn_norm, config.eps), layer.W_glu).chunk(2, dim=1)  # 7
        x = product(F.silu(gate).mul_(up), layer.W_down, x)  # 8
    cache.advance(n)
    return x


def norm(x, weight, eps):
    """x over the root of its mean square, times a weight, in x's type. x (n, hidden)."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def seen_by(n, begin, window, device):
    """What n tokens see that stand behind `begin` others, as attention's options; None: all that came before. A mask,
    and scores in memory with it, there is for a window alone."""
    if window and begin + n > window:
        rows = torch.arange(begin, begin + n, device=device)[:, None]
        columns = torch.arange(begin + n, device=device)
        return {"attn_mask": (columns <= rows) & (columns > rows - window)}
    if n == 1:
        return {}
    return None if begin else {"is_causal": True}


def attention(q, keys, values, seen):
    """Attention of the last tokens. q (n, n_heads, head_dim), keys, values (begin + n, n_kv_heads, head_dim) →
    (n, n_heads · head_dim), in the keys' type."""
    n, n_heads, _ = q.shape
    q, keys, values = (t.to(keys.dtype).transpose(0, 1)[None] for t in (q, keys, values))
    groups = n_heads != keys.shape[1]
    if seen is None:
        mixed = _behind_others(q, keys, values, groups)
    else:
        mixed = F.scaled_dot_product_attention(q, keys, values, **seen, enable_gqa=groups)
    return mixed[0].transpose(0, 1).reshape(n, -1)


def _behind_others(q, keys, values, groups):
    """Causal attention of the last tokens. Asked for by its own name, flash attention counts from the last key; the
    module that would choose it, torch.nn.attention.bias, takes three seconds to import."""
    if q.is_cuda and can_use_flash_attention(SDPAParams(q, keys, values, None, 0.0, False, groups)):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, is_causal=True)[0]
    n, all_ = q.shape[2], keys.shape[2]
    seen = torch.ones(n, all_, dtype=torch.bool, device=q.device).tril(all_ - n)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=groups)


def causal_attention(q, keys, values, begin, window=None):
    """Attention of the tokens from `begin` on, the last ones of the keys', as `attention` has it."""
    return attention(q, keys, values, seen_by(len(q), begin, window, q.device))
