"""Attention of one new token over its cache: the mix of the values, and four ways to write the whole.

q         (batch, n_heads, head_dim)              one query for each head of each sequence
k, v      (batch, kv_len, n_kv_heads, head_dim)   the cache: each token's heads side by side
kv_lens   (batch,)                                how many tokens of each sequence count; None: all of them
scale     number                                  factor on every q · k; None: head_dim**-0.5
out       (batch, n_heads, head_dim)
lse       (batch, n_heads)                        log of the sum of exp(score): -inf where there is no token

n_heads is a multiple of n_kv_heads: query head h reads kv head h // (n_heads // n_kv_heads). All sums are in float64.
"""

import numpy as np


def attention_mix(att, v):
    """Mix the values by given weights: out[h] = sum over t of att[h, t] · v[t, h's kv head].

    att (n_heads, kv_len), v (kv_len, n_kv_heads, head_dim) → (n_heads, head_dim). No token: zeros.
    """
    att, v = np.asarray(att), np.asarray(v)
    if att.ndim != 2:
        raise ValueError(f"att must have shape (n_heads, kv_len), got {att.shape}")
    if v.ndim != 3 or v.shape[0] != att.shape[1]:
        raise ValueError(f"v must have shape ({att.shape[1]}, n_kv_heads, head_dim), like att's kv_len, got {v.shape}")
    group = _group(len(att), v.shape[1])
    out = np.zeros((len(att), v.shape[2]))
    for g in range(v.shape[1]):
        heads = slice(g * group, (g + 1) * group)
        out[heads] = att[heads].astype(np.float64) @ v[:, g].astype(np.float64)
    return out


def decode_attention(q, k, v, scale=None, *, kv_lens=None):
    """Two passes over the scores, as softmax is defined.

    1. scores      s[t] = scale · q · k[t]
    2. maximum     m = max over t of s[t]
    3. weights     p[t] = exp(s[t] - m)
    4. sum         total = sum over t of p[t]
    5. mix         out = (sum over t of p[t] · v[t]) / total
    """
    q, k, v, scale, kv_lens = _arguments(q, k, v, scale, kv_lens)
    out = np.zeros(q.shape)
    for where, queries, keys, values in _heads(q, k, v, kv_lens):
        s = scale * (queries @ keys.T)  # 1: (group, kv_len)
        m = s.max(axis=1, keepdims=True)  # 2
        p = np.exp(s - m)  # 3
        total = p.sum(axis=1, keepdims=True)  # 4
        out[where] = p @ values / total  # 5
    return out


def decode_online(q, k, v, scale=None, *, kv_lens=None):
    """One pass: no score is kept. What was added up under an older maximum is scaled down to the new one.

    for each token t:
        1. score       s = scale · q · k[t]
        2. maximum     m_new = max(m, s)                m starts at -inf
        3. correction  c = exp(m - m_new)               0 at the first token, 1 where the maximum stays
        4. weight      p = exp(s - m_new)
        5. sum         total = c · total + p
        6. mix         out = c · out + p · v[t]
    7. at the end      out = out / total
    """
    q, k, v, scale, kv_lens = _arguments(q, k, v, scale, kv_lens)
    result = np.zeros(q.shape)
    for where, queries, keys, values in _heads(q, k, v, kv_lens):
        m, total = np.full(len(queries), -np.inf), np.zeros(len(queries))
        out = np.zeros(queries.shape)
        for key, value in zip(keys, values):
            s = scale * (queries @ key)  # 1: (group,)
            m_new = np.maximum(m, s)  # 2
            c = np.exp(m - m_new)  # 3
            p = np.exp(s - m_new)  # 4
            total = c * total + p  # 5
            out = c[:, None] * out + p[:, None] * value  # 6
            m = m_new
        result[where] = out / total[:, None]  # 7
    return result


def partial(q, k, v, scale=None, *, kv_lens=None):
    """Attention over a piece of the cache, and how much weight that piece has. → (out, lse)

    Steps 1 to 5 of decode_attention, and
    6. log-sum     lse = m + log(total), the logarithm of the sum of exp(s[t])

    Here kv_len, and any of kv_lens, may be 0: out is then zeros and lse -inf.
    """
    q, k, v, scale, kv_lens = _arguments(q, k, v, scale, kv_lens, fewest=0)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for where, queries, keys, values in _heads(q, k, v, kv_lens):
        if len(keys):
            s = scale * (queries @ keys.T)  # 1
            m = s.max(axis=1, keepdims=True)  # 2
            p = np.exp(s - m)  # 3
            total = p.sum(axis=1, keepdims=True)  # 4
            out[where] = p @ values / total  # 5
            lse[where] = (m + np.log(total))[:, 0]  # 6
    return out, lse


def merge(outs, lses):
    """Put pieces together. outs (pieces, ..., head_dim), lses (pieces, ...) → (out, lse) of their union.

    1. maximum     m = max over i of lse[i]
    2. weights     w[i] = exp(lse[i] - m)               0 for a piece without tokens
    3. mix         out = (sum over i of w[i] · out[i]) / (sum over i of w[i])
    4. log-sum     lse = m + log(sum over i of w[i])

    The out of an empty piece (lse -inf) is not looked at. Where all pieces are empty the result is
    empty too. The result is a piece like any other: merging is associative and commutative, up to
    rounding.
    """
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    if lses.ndim == 0 or len(lses) == 0:
        raise ValueError(f"lses must hold at least one piece, got shape {lses.shape}")
    if outs.shape[:-1] != lses.shape:
        wanted = f"the shape of lses, {lses.shape}, and head_dim after it"
        raise ValueError(f"outs must have {wanted}, got {outs.shape}")
    m = lses.max(axis=0)  # 1
    all_empty = m == -np.inf
    w = np.exp(lses - np.where(all_empty, 0, m))  # 2: never -inf - -inf, which is NaN
    total = np.where(all_empty, 1, w.sum(axis=0))
    out = (w[..., None] * np.where(lses[..., None] == -np.inf, 0, outs)).sum(axis=0) / total[..., None]  # 3
    return out, m + np.log(total)  # 4


def split_bounds(kv_len, splits):
    """The first token of each of `splits` pieces, and kv_len at the end: no token is left over, pieces may be empty."""
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    return [i * kv_len // splits for i in range(splits + 1)]


def decode_split(q, k, v, splits, scale=None, *, kv_lens=None):
    """Cut the cache into pieces of (nearly) the same length, attend to each alone, merge.

    Where a sequence is shorter than the cache, its last pieces are empty.
    """
    q, k, v, scale, kv_lens = _arguments(q, k, v, scale, kv_lens)
    bounds = split_bounds(k.shape[1], splits)
    pieces = []
    for begin, end in zip(bounds, bounds[1:]):
        lens = np.clip(kv_lens - begin, 0, end - begin)
        pieces.append(partial(q, k[:, begin:end], v[:, begin:end], scale, kv_lens=lens))
    out, _ = merge(*zip(*pieces))
    return out


def _heads(q, k, v, kv_lens):
    """For each sequence and kv head: where its outputs go, its queries (group, head_dim), keys and values in float64.

    One head at a time, so that a long cache is never held in float64 as a whole. Tokens past the length are not read.
    """
    group = q.shape[1] // k.shape[2]
    for b, kv_len in enumerate(kv_lens):
        for g in range(k.shape[2]):
            heads = slice(g * group, (g + 1) * group)
            yield (b, heads), *(a.astype(np.float64) for a in (q[b, heads], k[b, :kv_len, g], v[b, :kv_len, g]))


def _group(n_heads, n_kv_heads):
    """How many query heads read one kv head."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(
            f"n_heads must be a multiple of n_kv_heads, got {n_heads} query heads and {n_kv_heads} kv heads"
        )
    return n_heads // n_kv_heads


def _arguments(q, k, v, scale, kv_lens, fewest=1):
    """q, k, v as arrays, scale as a number and kv_lens as an array, or ValueError. fewest: tokens of a sequence."""
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q must have shape (batch, n_heads, head_dim), none of it 0, got {q.shape}")
    batch, n_heads, head_dim = q.shape
    if k.ndim != 4 or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"k must have shape ({batch}, kv_len, n_kv_heads, {head_dim}), like q, got {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"v must have shape {k.shape}, like k, got {v.shape}")
    _group(n_heads, k.shape[2])
    kv_len = k.shape[1]
    if kv_len < fewest:
        raise ValueError("k and v must hold at least one token, got an empty cache")
    lens = np.full(batch, kv_len) if kv_lens is None else np.asarray(kv_lens)
    if lens.shape != (batch,) or lens.dtype.kind not in "iu":
        raise ValueError(f"kv_lens must be whole numbers of shape ({batch},), got {lens.dtype} of shape {lens.shape}")
    outside = lens[(lens < fewest) | (lens > kv_len)]
    if len(outside):
        raise ValueError(f"kv_lens must be from {fewest} to kv_len, {kv_len}, got {outside[0]}")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if not np.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return q, k, v, scale, lens.astype(np.int64)
