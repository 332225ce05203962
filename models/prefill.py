"""A prompt's tokens at once, by PyTorch's own products and attention: steps 1 to 9 of ref.llm for many tokens.

Both ways to run use it, on their own weights and cache. What a model keeps for it:

    weights.embedding (vocab, hidden), weights.norm (hidden,), weights.head (vocab, hidden), weights.layers: for each
    attention_norm, ffn_norm (hidden,), Wqkv (q_rows + 2 · kv_rows, hidden), bqkv or None, q_norm and k_norm or None,
    Wo (hidden, q_rows), W_glu (2 · ffn, hidden): gate above up, W_down (hidden, ffn)
"""

import torch
import torch.nn.functional as F

from models.positions import rotary_tables, rotate

CHUNK = 512  # tokens at a time: bounds the memory that scores and the feed-forward block take


def prefill(config, weights, tokens, cache, *, every=False, product=F.linear):
    """Run tokens through the model behind those of the cache, and add them to it.

    tokens   (n,) int64, on the weights' device
    cache    .length: tokens so far; .append(layer, k, v): of the next tokens, (n, n_kv_heads, head_dim) each, returns
             all keys and values so far, like k; .advance(n)
    every    True: logits after every token, (n, vocab); False: after the last, (1, vocab). float32
    product  product(x, W) = x Wᵀ
    """
    found = []
    for part in tokens.split(CHUNK):
        x = _layers(config, weights, part, cache, product)
        if every or part[-1:].data_ptr() == tokens[-1:].data_ptr():
            x = x if every else x[-1:]
            found.append(product(norm(x, weights.norm, config.eps), weights.head).float())  # 9
    return torch.cat(found)


def _layers(config, weights, tokens, cache, product):
    """Steps 1 to 8 of some tokens: their residual streams (n, hidden), float32."""
    n, begin = len(tokens), cache.length
    cos, sin = rotary_tables(config, begin, begin + n, tokens.device)
    x = weights.embedding[tokens].float()  # 1
    for index, layer in enumerate(weights.layers):
        qkv = product(norm(x, layer.attention_norm, config.eps), layer.Wqkv).float()  # 2
        if layer.bqkv is not None:
            qkv = qkv + layer.bqkv
        q, k, v = (
            part.reshape(n, -1, config.head_dim)
            for part in qkv.split((config.q_rows, config.kv_rows, config.kv_rows), dim=1)
        )
        if layer.q_norm is not None:  # 3
            q, k = norm(q, layer.q_norm, config.eps), norm(k, layer.k_norm, config.eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # 4
        keys, values = cache.append(index, k, v)
        mixed = causal_attention(q, keys, values, begin, config.window)  # 5
        x = x + product(mixed, layer.Wo).float()  # 6
        gate, up = product(norm(x, layer.ffn_norm, config.eps), layer.W_glu).float().chunk(2, dim=1)  # 7
        x = x + product(F.silu(gate) * up, layer.W_down).float()  # 8
    cache.advance(n)
    return x


def norm(x, weight, eps):
    """x over the root of its mean square, times a weight, in x's type. x (n, hidden)."""
    return F.rms_norm(x, weight.shape, weight.float(), eps)


def causal_attention(q, keys, values, begin, window):
    """Causal attention of the tokens from `begin` on. q (n, n_heads, head_dim), keys, values (begin + n, n_kv_heads,
    head_dim) → (n, n_heads · head_dim), float32."""
    n, n_heads, _ = q.shape
    q, keys, values = (t.to(keys.dtype).transpose(0, 1)[None] for t in (q, keys, values))
    rows = torch.arange(begin, begin + n, device=q.device)[:, None]
    columns = torch.arange(keys.shape[2], device=q.device)
    seen = columns <= rows
    if window:
        seen &= columns > rows - window
    mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=n_heads != keys.shape[1])
    return mixed[0].transpose(0, 1).reshape(n, -1).float()
