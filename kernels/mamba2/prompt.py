"""A prompt's tokens at once through the layers of a Mamba-2 model on a card: products by cuBLAS, the rest by ours.

step 1   residual += what the layer before gives, RMSNorm     add_norm
step 2   in_proj                                              torch.nn.functional.linear
step 3   causal convolution and silu of x, B, C               conv1d, where in_proj left them
step 4   the scan                                             kernels.ssd.fused, where conv1d left them
step 5   gated norm                                           gated_norm
step 6   out_proj                                             torch.nn.functional.linear
"""

import torch.nn.functional as F

from kernels import mamba2, ssd


def layers(config, weights, residual, state=None, *, attend=None, product=F.linear):
    """All layers for a run of tokens of one sequence: residual (n, hidden), float32 or like the weights, is written in
    place. Returns the model's last norm of it, (n, hidden) like the weights.

    config, weights   as kernels/mamba2/step.py says
    state             .conv[i] (1, width - 1, channels) and .ssm[i] (1, nheads, headdim, dstate) float32 of the i-th
                      Mamba-2 layer, written in place; None: zeros, and nothing is kept
    attend            attend(layer, i, normed) → (n, hidden): the i-th attention layer of a hybrid
    product           product(x, W) = x Wᵀ
    """
    more, seen = None, {"mamba": 0, "attention": 0}
    for layer in weights.layers:
        index = seen[layer.kind]
        seen[layer.kind] += 1
        normed = mamba2.add_norm(more, residual, layer.norm, config.eps)
        if layer.kind == "attention":
            more = attend(layer, index, normed)
        else:
            states = (None, None) if state is None else (state.conv[index], state.ssm[index])
            more = block(config, layer, normed, *states, product)
        if config.ffn:
            normed = mamba2.add_norm(more, residual, layer.ffn_norm, config.eps)
            gate, up = product(normed, layer.W_glu).chunk(2, dim=1)
            more = product(F.silu(gate) * up, layer.W_down)
    return mamba2.add_norm(more, residual, weights.norm, config.eps)


def block(config, layer, u, conv_state=None, ssm_state=None, product=F.linear):
    """A Mamba-2 block for a run of tokens, u (n, hidden) → like u. States are written; None: zeros, not kept."""
    c, n = config, len(u)
    projected = product(u, layer.W_in)
    if layer.b_in is not None:
        projected += layer.b_in
    z, xBC, dt = projected[None].split((c.d_inner, c.channels, c.nheads), dim=-1)
    xBC, last = mamba2.conv1d(xBC, layer.conv_weight, layer.conv_bias, initial_state=conv_state)
    x, B, C = xBC.split((c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate), dim=-1)
    B, C = (t.view(1, n, c.ngroups, c.dstate) for t in (B, C))
    y = ssd.fused(
        x.view(1, n, c.nheads, c.headdim), dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, dt_softplus=True,
        dt_limit=c.dt_limit, initial_states=ssm_state, return_final_states=ssm_state is not None,
    )  # fmt: skip
    if ssm_state is not None:
        y, final = y
        conv_state.copy_(last), ssm_state.copy_(final)
    normed = mamba2.gated_norm(y.view(n, -1), z[0], layer.gated_norm, c.eps, ngroups=c.ngroups)
    out = product(normed, layer.W_out)
    return out if layer.b_out is None else out + layer.b_out
