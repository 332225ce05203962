"""A prompt's tokens at once through the layers of a Mamba-2 model on a card.

step 1   residual += what the layer before gives, RMSNorm     add_norm
step 2   in_proj                                              torch.mm, whose rows begin at lines of L2
step 3   causal convolution and silu of x, B, C               conv1d, where in_proj left them
step 4   the scan                                             kernels.ssd.fused, where conv1d left them
step 5   gated norm                                           gated_norm
step 6   out_proj                                             torch.nn.functional.linear

The card is at its limit of power in the products: whatever is saved beside them also leaves it less time at less
power, and the products' clock falls. Tried on an H200, and slower for whole prompts, though each moves fewer bytes: the
residual stream and the norms in the products' own tiles (2 %), the convolution, too (5 %).
"""

import torch
import torch.nn.functional as F

from kernels import mamba2, ssd

LINE = 128  # bytes


def layers(config, weights, residual, state=None, *, attend=None, product=F.linear, cu_seqlens=None):
    """All layers for a run of tokens of one sequence: residual (n, hidden), float32 or like the weights, is written in
    place. Returns the model's last norm of it, (n, hidden) like the weights.

    config, weights   as kernels/mamba2/step.py says
    state             .conv[i] (1, width - 1, channels) and .ssm[i] (1, nheads, headdim, dstate) float32 of the i-th
                      Mamba-2 layer, written in place; None: zeros, and nothing is kept
    attend            attend(layer, i, normed) → (n, hidden): the i-th attention layer of a hybrid
    product           product(x, W) = x Wᵀ; in_proj of 16 bits is torch.mm's where its rows are no whole lines
    cu_seqlens        (sequences + 1,) int32: several sequences end to end, each from its beginning; then .conv[i] is
                      (sequences, width - 1, channels), .ssm[i] (sequences, nheads, headdim, dstate), only written. A
                      hybrid's attend must know of it
    """
    more, seen = None, {"mamba": 0, "attention": 0}
    for layer in weights.layers:
        index = seen[layer.kind]
        seen[layer.kind] += 1
        normed = mamba2.add_norm(more, residual, layer.norm, config.eps, pdl=True)
        if layer.kind == "attention":
            more = attend(layer, index, normed)
        else:
            states = (None, None) if state is None else (state.conv[index], state.ssm[index])
            more = block(config, layer, normed, *states, product, cu_seqlens)
        if config.ffn:
            normed = mamba2.add_norm(more, residual, layer.ffn_norm, config.eps, pdl=True)
            gate, up = product(normed, layer.W_glu).chunk(2, dim=1)
            more = product(F.silu(gate) * up, layer.W_down)
    return mamba2.add_norm(more, residual, weights.norm, config.eps, pdl=True)


def block(config, layer, u, conv_state=None, ssm_state=None, product=F.linear, cu_seqlens=None):
    """A Mamba-2 block for a run of tokens, u (n, hidden) → like u. States are written; None: zeros, not kept.

    cu_seqlens (sequences + 1,) int32: where several sequences begin that lie end to end, each at its own beginning;
    states are then one for each, and only written. conv_state then (sequences, width - 1, channels), and so ssm_state.
    """
    c = config
    projected = project(u, layer.W_in, product)
    if layer.b_in is not None:
        projected += layer.b_in
    z, xBC, dt = projected[None].split((c.d_inner, c.channels, c.nheads), dim=-1)
    initial = None if cu_seqlens is not None else conv_state
    xBC, last = mamba2.conv1d(
        xBC, layer.conv_weight, layer.conv_bias, initial_state=initial, cu_seqlens=cu_seqlens, pdl=True
    )
    if conv_state is not None:
        conv_state.copy_(last)
    out = product(_scan(c, layer, z, xBC, dt, ssm_state, cu_seqlens), layer.W_out)
    return out if layer.b_out is None else out + layer.b_out


def project(u, W, product=F.linear):
    """product(u, W), u (n, hidden), W (rows, hidden) → (n, rows). Of numbers of 16 bits each row begins at a line of
    L2, 128 bytes, though rows are no multiple of that: else who reads a part of each row asks for a line more."""
    per_line = LINE // 2
    if not isinstance(W, torch.Tensor) or W.itemsize != 2 or len(W) % per_line == 0:
        return product(u, W)  # quantized weights, too, which are none of torch's tensors
    return torch.mm(u, W.T, out=u.new_empty(len(u), -(-len(W) // per_line) * per_line)[:, : len(W)])


def _scan(c, layer, z, xBC, dt, ssm_state, cu_seqlens=None):
    """Steps 4 and 5, (n, d_inner): the state is written, if one is given."""
    n, kept, varlen = xBC.shape[1], ssm_state is not None, cu_seqlens is not None
    x, B, C = xBC.split((c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate), dim=-1)
    B, C = (t.view(1, n, c.ngroups, c.dstate) for t in (B, C))
    y = ssd.fused(
        x.view(1, n, c.nheads, c.headdim), dt, layer.A, B, C, D=layer.D, dt_bias=layer.dt_bias, dt_softplus=True,
        dt_limit=c.dt_limit, initial_states=None if varlen else ssm_state, cu_seqlens=cu_seqlens,
        return_final_states=kept and not varlen, return_varlen_states=kept and varlen,
    )  # fmt: skip
    if kept:
        y, final = y
        ssm_state.copy_(final)
    return mamba2.gated_norm(y.view(n, -1), z[0], layer.gated_norm, c.eps, ngroups=c.ngroups, pdl=True)
