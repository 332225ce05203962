"""Latent attention (MLA): heads whose keys and values are made of one short vector a token. And AMLA, which rescales
sums by adding whole numbers to their bits.

q_nope    (batch, n_heads, nope)     what a head asks, apart from places
q_rope    (batch, n_heads, rope)     what it asks of places: turned already, as the cache's last numbers are
w_uk      (n_heads, nope, latent)    up-projection of keys: key of head h for token t = w_uk[h] @ c[t]
w_uv      (n_heads, v_dim, latent)   up-projection of values
cache     (batch, kv_len, latent + rope)    for each token c, which all heads share, then one turned key for all heads
scale     number                     (nope + rope)**-0.5 in the models that have this attention
kv_lens   (batch,)                   tokens of each sequence; None: all of the cache

DeepSeek-V2's sizes are 128 heads, nope 128, rope 64, latent 512, v_dim 128. The two forms, `heads` and `decode`, are
from its paper (arXiv 2405.04434), AMLA is from arXiv 2509.25224. All sums are in float64 but for AMLA's, which are
about float32.
"""

import numpy as np

LATENT = 512
MANTISSA = 23  # bits of a float32 that follow its exponent's eight
LEAST_STEP = -30  # of an exponent at once, in AMLA


def heads(q_nope, q_rope, cache, w_uk, w_uv, *, scale, kv_lens=None):
    """As the model has it: keys and values of every head and token, made anew. → (batch, n_heads, v_dim)

    1. keys      k[t, h] = (w_uk[h] @ c[t], the token's turned key)
    2. values    v[t, h] = w_uv[h] @ c[t]
    3. attention of each head, as ever: softmax(scale · (q_nope, q_rope) · k) v
    """
    latent = w_uk.shape[2]
    out = np.zeros((*q_nope.shape[:2], w_uv.shape[1]))
    for b, n in enumerate(_lengths(cache, kv_lens)):
        c, turned = cache[b, :n, :latent].astype(np.float64), cache[b, :n, latent:].astype(np.float64)
        for h in range(q_nope.shape[1]):
            k = np.concatenate([c @ w_uk[h].T, turned], axis=1)  # 1: (tokens, nope + rope)
            v = c @ w_uv[h].T  # 2: (tokens, v_dim)
            q = np.concatenate([q_nope[b, h], q_rope[b, h]]).astype(np.float64)
            out[b, h] = softmax(scale * (k @ q)) @ v  # 3
    return out


def absorb(q_nope, q_rope, w_uk):
    """Queries that look at the cache itself, (batch, n_heads, latent + rope):

    q_nope · (w_uk @ c) = (q_nope @ w_uk) · c, so the up-projection of keys goes into the query, once for all tokens.
    """
    return np.concatenate([np.einsum("bhd,hdl->bhl", q_nope, w_uk, dtype=np.float64), q_rope], axis=2)


def project(latents, w_uv):
    """Heads' results of weighted latent vectors, (batch, n_heads, latent) → (batch, n_heads, v_dim): the weighted mean
    of w_uv @ c is w_uv @ the weighted mean of c."""
    return np.einsum("bhl,hvl->bhv", latents, w_uv, dtype=np.float64)


def decode(q, cache, *, kv_lens=None, scale, latent=LATENT):
    """Absorbed: all heads look at one cache, which is their keys, and with its first `latent` numbers their values.

    q (batch, n_heads, latent + rope) → weighted latent vectors (batch, n_heads, latent). A sequence without tokens, and
    a head whose scores are all -inf, gets zeros.

    1. scores    s[h, t] = scale · q[h] · cache[t]      over all latent + rope numbers
    2. weights   softmax over tokens
    3. mix       out[h] = sum over t of p[h, t] · cache[t, :latent]
    """
    out = np.zeros((*q.shape[:2], latent))
    for b, n in enumerate(_lengths(cache, kv_lens)):
        rows = cache[b, :n].astype(np.float64)
        s = scale * (q[b].astype(np.float64) @ rows.T)  # 1: (n_heads, tokens)
        out[b] = softmax(s) @ rows[:, :latent]  # 2, 3
    return out


def softmax(s):
    """Along the last axis; zeros where all scores are -inf, or there is none."""
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = p.sum(axis=-1, keepdims=True)
    return p / np.where(total == 0, 1, total)


# AMLA


def add_to_exponent(x, n):
    """x · 2**n by an addition of whole numbers: bits(x) + n · 2**23, as 32-bit numbers that wrap around.

    Right for normal numbers that stay normal. What breaks it: 0, whose exponent is no exponent; subnormal numbers;
    results below 2**-126, which borrow from the sign; results from 2**128 on, which become inf, NaN or carry into it.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        return (x.view(np.int32) + np.asarray(n, np.int32) * np.int32(1 << MANTISSA)).view(np.float32)


def breaks(x, n):
    """Whether add_to_exponent(x, n) is wrong, by the exponent's bits e of x: (x is 0 or subnormal) or the new one is
    none of a normal number. Nothing to add breaks nothing."""
    exponent = np.asarray(x, np.float32).view(np.int32) >> MANTISSA & 255
    moved = exponent + np.asarray(n, np.int64)
    return (np.asarray(n) != 0) & ((exponent == 0) | (moved < 1) | (moved > 254))


def bfloat16(x):
    """Rounded to bfloat16, the nearest, ties to even; as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def flash(q, cache, *, scale, tile=64, latent=LATENT, rounded=bfloat16):
    """One sequence, tile by tile, as kernels do it: sums in float32, weights rounded; the rescale is a product.

    q (n_heads, latent + rope), cache (kv_len, latent + rope) → (n_heads, latent), float32

    for each tile:
        1. scores      s = scale · q · k
        2. maximum     m' = max(m, s)
        3. weights     p = rounded(exp(s - m')),  total = exp(m - m') total + sum of exp(s - m')
        4. rescale     o = exp(m - m') o
        5. mix         o = o + p c
    6. divide          out = o / total
    """
    m, total, o = _nothing(len(q), latent)
    for s, c in _tiles(q, cache, scale, tile, latent):  # 1
        before, m = m, np.maximum(m, s.max(axis=1, keepdims=True))  # 2
        p, less = np.exp(s - m), np.exp(before - m)  # 3
        total = less * total + p.sum(axis=1, keepdims=True)
        o = less * o  # 4
        o = o + rounded(p) @ c  # 5
    return o / total  # 6


def amla(q, cache, *, scale, tile=64, latent=LATENT, rounded=bfloat16, compensate=True, at_zero="keep"):
    """The same, where the rescale is an addition of whole numbers (AMLA). Step 4 in place of flash's:

    for each tile:
        1. scores      s = scale · q · k
        2. maximum     m' = max(m, s)
        3. reference   n = rint(-m' / ln 2): sums are kept times 2**n, so that it is a power of two that changes
                       c = exp((m' / ln 2 + n) ln 2), from 2**-0.5 to 2**0.5: what is left of exp(m')
        4. weights     p = rounded(exp(s - m') c16),  c16 = bfloat16(c)
                       total = exp(m - m') total + sum of exp(s - m')
        5. compensate  cof = c / c16: all that o holds is too small by it. eps = 1.5 (cof_before / cof - 1) + 1e-6
        6. rescale     N = rint((max(n - n_before, -30) + eps) · 2**23);  bits(o) = bits(o) + N
        7. mix         o = o + p @ values
    8. divide          out = o / (total c16)

    Step 6 is an addition for two things: the power of two goes to the exponent, exactly, and eps to the mantissa, which
    it multiplies by 1 + eps / f, where 1 <= f < 2 is the mantissa's value. The 1.5, the mean of f, makes up for that on
    average.

    compensate   False: eps is 0, and step 5 is left out
    at_zero      "keep": where o is 0 nothing is added, as a kernel must see to; "add": as the formula has it
    """
    m, total, o = _nothing(len(q), latent)
    n = cof = None
    for s, c in _tiles(q, cache, scale, tile, latent):  # 1
        before, m = m, np.maximum(m, s.max(axis=1, keepdims=True))  # 2
        n_before, n = n, np.rint(-m / np.float32(np.log(2)))  # 3
        factor = np.exp((m.astype(np.float64) / np.log(2) + n) * np.log(2)).astype(np.float32)
        factor16 = bfloat16(factor)
        p = np.exp(s - m)  # 4
        total = np.exp(before - m) * total + p.sum(axis=1, keepdims=True)
        cof_before, cof = cof, factor / factor16  # 5
        if n_before is not None:
            eps = 1.5 * (cof_before / cof - 1) + 1e-6 if compensate else 0.0
            add = np.rint((np.maximum(n - n_before, LEAST_STEP) + eps) * 2.0**MANTISSA).astype(np.int32)  # 6
            moved = (o.view(np.int32) + add).view(np.float32)
            o = moved if at_zero == "add" else np.where(o == 0, o, moved)
        o = o + rounded(p * factor16) @ c  # 7
    return o / (total * factor16)  # 8


def merge_in_place(outs, maxima, sums):
    """Parts of rows become one sum in one place, to which each part is added: no part waits for another's numbers, but
    all for the highest of their maxima, so that nothing that lies there has to be rescaled.

    outs (parts, rows, latent) not divided, maxima (parts, rows) in units of log 2, sums (parts, rows): as `flash` has
    o, m / ln 2 and total before its step 6 → (rows, latent)

    1. maxima      m[i] of each part
    2. agree       m = the highest of all m[i]
    3. align       o[i] and its sum times 2**(m[i] - m)
    4. add         to the one sum, in any order
    5. divide      by the sum of all sums; a row whose sum is 0 is 0
    """
    highest = maxima.max(axis=0)  # 1, 2
    by = np.exp2(maxima - highest)  # 3
    total = (by * sums).sum(axis=0)  # 4
    return (by[..., None] * outs).sum(axis=0) / np.where(total == 0, 1, total)[:, None]  # 5


def _nothing(n_heads, latent):
    """(m, total, o) before the first tile."""
    return (
        np.full((n_heads, 1), -np.inf, np.float32),
        np.zeros((n_heads, 1), np.float32),
        np.zeros((n_heads, latent), np.float32),
    )


def _tiles(q, cache, scale, tile, latent):
    """(scores, values) of each tile, float32."""
    for begin in range(0, len(cache), tile):
        rows = cache[begin : begin + tile].astype(np.float32)
        yield np.float32(scale) * (q.astype(np.float32) @ rows.T), rows[:, :latent]


def _lengths(cache, kv_lens):
    return [cache.shape[1]] * len(cache) if kv_lens is None else kv_lens
