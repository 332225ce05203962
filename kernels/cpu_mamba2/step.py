"""One token of a Mamba-2, or of its hybrid, on the processor: chapter 02's products, and the states' own step.

The steps of ref.mamba2. Weights are NumPy arrays in the type in which they are stored (bfloat16 as uint16), states and
all between are float32, a hybrid's keys and values float16.
"""

import numpy as np

from kernels import cpu_llm
from kernels.cpu_llm.step import norm, product, rotate
from kernels.cpu_mamba2 import state_step
from kernels.rotary import rope_frequencies


def token_logits(config, weights, x, conv, ssm, keys=None, values=None, position=0, *, threads=None):
    """Logits (vocab,), float32, of what follows one token; the states take it in, and its keys and values the cache.

    config    as models.mamba2_config.Config has it: sizes, eps, dt_limit, ngroups, ffn; n_heads to scaling of a hybrid
    weights   .layers: for each the arrays that models/mamba2.py names (a matrix may be a list of matrices one above
              another, as kernels.cpu_llm.step takes them); .norm, .head
    x         (hidden,) float32: the token's row of the embedding
    conv      (Mamba-2 layers, width - 1, channels) float32, written
    ssm       (Mamba-2 layers, nheads, headdim, dstate) float32, written
    keys, values   (attention layers, n_kv_heads, room, head_dim) float16, of the `position` tokens before, and room for
                   one more; None where no layer has attention
    """
    c, of_mamba, of_attention = config, 0, 0
    for layer in weights.layers:
        normed = norm(x, layer.norm, c.eps)
        if layer.kind == "mamba":
            x = x + block(c, layer, normed, conv[of_mamba], ssm[of_mamba], threads)
            of_mamba += 1
        else:
            x = x + attend(c, layer, normed, keys[of_attention], values[of_attention], position, threads)
            of_attention += 1
        if c.ffn:
            both = product(layer.W_glu, norm(x, layer.ffn_norm, c.eps), threads)
            x = x + product(layer.W_down, silu(both[: c.ffn]) * both[c.ffn :], threads)
    return product(weights.head, norm(x, weights.norm, c.eps), threads)


def block(c, layer, u, conv, ssm, threads=None):
    """A Mamba-2 block for one token: u (hidden,) → (hidden,). conv (width - 1, channels) and ssm (nheads, headdim,
    dstate) are written."""
    projected = product(layer.W_in, u, threads)  # 1
    if layer.b_in is not None:
        projected += layer.b_in
    z, xBC, dt = np.split(projected, (c.d_inner, c.d_inner + c.channels))
    summed = np.einsum("wc,cw->c", conv, layer.conv_weight[:, :-1]) + xBC * layer.conv_weight[:, -1]  # 2
    conv[:-1] = conv[1:].copy()
    conv[-1] = xBC
    xBC = silu(summed if layer.conv_bias is None else summed + layer.conv_bias)
    x, B, C = np.split(xBC, (c.d_inner, c.d_inner + c.ngroups * c.dstate))
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        dt = np.logaddexp(dt + layer.dt_bias, np.float32(0)).clip(*c.dt_limit).astype(np.float32)
    B, C = B.reshape(c.ngroups, c.dstate), C.reshape(c.ngroups, c.dstate)
    x = x.reshape(c.nheads, c.headdim)
    y = state_step(ssm, x, dt, layer.A, B, C, layer.D, threads=threads)  # 3
    groups = (y.reshape(-1) * silu(z)).reshape(c.ngroups, -1)  # 4
    normed = norm(groups, layer.gated_norm.reshape(groups.shape), c.eps).reshape(-1)
    out = product(layer.W_out, normed, threads)  # 5
    return out if layer.b_out is None else out + layer.b_out


def attend(c, layer, normed, keys, values, position, threads=None):
    """A hybrid's attention for one token, whose key and value go into the cache: (hidden,) → (hidden,)."""
    angles = position * rope_frequencies(c.head_dim, c.theta, c.scaling, c.rotary)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    heads = product(layer.Wqkv, normed, threads).reshape(-1, c.head_dim)
    q, k, v = heads[: c.n_heads], heads[c.n_heads : -c.n_kv_heads], heads[-c.n_kv_heads :]
    keys[:, position], values[:, position] = rotate(k, cos, sin), v
    mixed = cpu_llm.attention(rotate(q, cos, sin), keys, values, position + 1, threads=threads)
    return product(layer.Wo, mixed.reshape(-1), threads)


def silu(x):
    with np.errstate(over="ignore"):  # of exp: the quotient is then 0, as it should be
        return x / (1 + np.exp(-x))
