"""One decoder layer for one token, and the pieces of it that a kernel can do in one launch. Attention is left out.

x            (hidden,)          the residual stream, where the layer finds it
norm_weight  (hidden,)          weight of an RMSNorm; eps is added to the mean square
Wq, Wk, Wv   (q_rows, hidden), (kv_rows, hidden) twice: n_heads · head_dim and n_kv_heads · head_dim rows
Wo           (hidden, q_rows)
W_gate, W_up (ffn, hidden)      the gated feed-forward block, on its way in
W_down       (hidden, ffn)      and out
h            (hidden,)          the residual stream between attention and the feed-forward block

All sums are in float64, and nothing between two steps is rounded.
"""

import numpy as np


def rmsnorm(x, norm_weight, eps=1e-5):
    """x over the root of its mean square, times a weight for each element. x (hidden,) → (hidden,)."""
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean() + eps) * np.asarray(norm_weight, np.float64)


def silu(x):
    """x · sigmoid(x). exp of a large number may overflow to infinity: the quotient is then 0, as it should be."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gemv_residual(W, x, residual):
    """residual + W x. W (rows, cols), x (cols,), residual (rows,) → (rows,)."""
    return np.asarray(residual, np.float64) + np.asarray(W, np.float64) @ np.asarray(x, np.float64)


down_residual = gemv_residual  # the same operation, with W_down (hidden, ffn) and ffn columns


def norm_qkv(x, norm_weight, Wq, Wk, Wv, eps=1e-5):
    """Queries, keys and values of the normed x, one after another: (q_rows + k_rows + v_rows,)."""
    normed = rmsnorm(x, norm_weight, eps)
    return np.concatenate([np.asarray(W, np.float64) @ normed for W in (Wq, Wk, Wv)])


def norm_glu(x, norm_weight, W_gate, W_up, eps=1e-5):
    """The gated half of the feed-forward block: silu(W_gate · normed x) · (W_up · normed x) → (ffn,)."""
    normed = rmsnorm(x, norm_weight, eps)
    return silu(np.asarray(W_gate, np.float64) @ normed) * (np.asarray(W_up, np.float64) @ normed)


def feed_forward(h, norm_weight, W_gate, W_up, W_down, eps=1e-5):
    """h + W_down · glu(norm(h)). h (hidden,) → (hidden,)."""
    return down_residual(W_down, norm_glu(h, norm_weight, W_gate, W_up, eps), h)


def decoder_layer(x, attention_norm, Wq, Wk, Wv, Wo, ffn_norm, W_gate, W_up, W_down, eps=1e-5):
    """The layer with the queries in the place of attention's output, which has their shape. → (y, qkv).

    1. norm, queries, keys, values    qkv = [Wq; Wk; Wv] · norm(x)
    2. output projection, residual    h = x + Wo · q
    3. norm, gate, up                 a = silu(W_gate · norm(h)) · (W_up · norm(h))
    4. down projection, residual      y = h + W_down · a
    """
    qkv = norm_qkv(x, attention_norm, Wq, Wk, Wv, eps)  # 1
    q = qkv[: len(Wq)]
    h = gemv_residual(Wo, q, x)  # 2
    a = norm_glu(h, ffn_norm, W_gate, W_up, eps)  # 3
    y = down_residual(W_down, a, h)  # 4
    return y, qkv


def rmsnorm_folded(x, norm_weight, W, eps=1e-5):
    """W · rmsnorm(x) with the root taken last: (W · (x · norm_weight)) / sqrt(mean square + eps).

    The divisor is one number for the whole vector, so it comes out of the sum. A kernel that adds up W · x can then
    add up the squares in the same pass, where rmsnorm as it is written needs a pass of its own before.
    """
    x, norm_weight, W = (np.asarray(a, np.float64) for a in (x, norm_weight, W))
    return W @ (x * norm_weight) / np.sqrt((x * x).mean() + eps)
