"""A prompt's tokens at once through a Mamba-2 or its hybrid, and the state that both ways to run keep between calls.

The steps of ref.mamba2, in PyTorch. What a model keeps for it, as models/mamba2_weights.py reads it:

    weights.embedding (vocab, hidden), weights.norm (hidden,), weights.head (vocab, hidden), weights.layers: each
    has kind, "mamba" or "attention", and norm (hidden,);
    a Mamba-2 block's W_in (in_rows, hidden): rows of z, x, B, C, dt; b_in or None; conv_weight (channels, width),
    conv_bias (channels,) or None, dt_bias, A, D (nheads,): float32; gated_norm (d_inner,), W_out (hidden, d_inner),
    b_out or None;
    attention's Wqkv (q_rows + 2 · kv_rows, hidden), its rows of q and k in kernels.rotary.rotary_order, Wo;
    in a hybrid ffn_norm (hidden,), W_glu (2 · ffn, hidden): gate above up, W_down (hidden, ffn)
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from models.positions import rotary_tables, rotate
from models.prefill import causal_attention, norm

PIECE = 512  # tokens at a time, unless another number is asked for: bounds the memory between two steps


def cache_sizes(config):
    """What a cache of keys and values wants to know of a hybrid: it keeps those of its attention layers alone."""
    sizes = {name: getattr(config, name) for name in ("n_kv_heads", "head_dim", "kv_rows", "context")}
    return SimpleNamespace(n_layers=len(config.attention_layers), **sizes)


class State:
    """What one sequence has left behind it, as large after one token as after a million.

    conv    (Mamba-2 layers, 1, width - 1, channels)        the convolutions' last inputs, the oldest first
    ssm     (Mamba-2 layers, 1, nheads, headdim, dstate)    float32
    length  tokens so far
    """

    def __init__(self, config, device="cpu", dtype=torch.float32):
        c, layers = config, len(config.mamba_layers)
        self.config, self.length = config, 0
        self.conv = torch.zeros(layers, 1, c.width - 1, c.channels, dtype=dtype, device=device)
        self.ssm = torch.zeros(layers, 1, c.nheads, c.headdim, c.dstate, device=device)

    @property
    def nbytes(self):
        return self.conv.nbytes + self.ssm.nbytes

    def clear(self):
        """As before the first token; the tensors stay where they are."""
        self.conv.zero_(), self.ssm.zero_()
        self.length = 0

    def copy(self):
        """A state of its own that says the same."""
        found = State.__new__(State)
        found.config, found.length, found.conv, found.ssm = (
            self.config,
            self.length,
            self.conv.clone(),
            self.ssm.clone(),
        )
        return found

    def take(self, other):
        """Become what another state says. TypeError or ValueError, before anything is written, where that one is of
        another model, batch, dtype or device."""
        if not isinstance(other, State):
            raise TypeError(f"take: state must be a State, got {type(other).__name__}")
        for name in ("conv", "ssm"):
            mine, its = getattr(self, name), getattr(other, name)
            if its.shape != mine.shape:
                raise ValueError(f"take: {name} must have shape {tuple(mine.shape)}, got {tuple(its.shape)}")
            if its.dtype != mine.dtype:
                raise TypeError(f"take: {name} must be {mine.dtype}, got {its.dtype}")
            if its.device != mine.device:
                raise ValueError(f"take: {name} must be on {mine.device}, got {its.device}")
        self.conv.copy_(other.conv), self.ssm.copy_(other.ssm)
        self.length = other.length


def prefill(config, weights, tokens, state, cache=None, *, every=False, ops, piece=PIECE):
    """Run tokens through the model behind those of the state, which takes them in.

    tokens   (n,) int64, on the weights' device
    state    a State of this model on that device
    cache    a hybrid's, of its attention layers in their order, as models.prefill takes one; its length is the state's
    every    True: logits after every token, (n, vocab); False: after the last, (1, vocab). float32
    ops      product(x, W) = x Wᵀ, and conv1d, ssd and gated_norm as models.mamba2_torch has them; kernels.mamba2 and
             kernels.ssd offer the same
    piece    tokens at a time; a multiple of the chunk size where the states of every piece are to be those of one run
    """
    found = []
    for part in tokens.split(piece):
        x = _layers(config, weights, part, state, cache, ops)
        if every or part[-1:].data_ptr() == tokens[-1:].data_ptr():
            x = x if every else x[-1:]
            found.append(ops.product(norm(x, weights.norm, config.eps), weights.head).float())
    return torch.cat(found)


def _layers(config, weights, tokens, state, cache, ops):
    """All layers for some tokens: their residual streams (n, hidden), float32."""
    x = weights.embedding[tokens].float()
    counts = {"mamba": 0, "attention": 0}
    for layer in weights.layers:
        normed, index = norm(x, layer.norm, config.eps), counts[layer.kind]
        counts[layer.kind] += 1
        if layer.kind == "mamba":
            x = x + block(config, layer, normed, state.conv[index], state.ssm[index], ops).float()
        else:
            x = x + _attend(config, layer, normed, state.length, cache, index, ops).float()
        if config.ffn:
            normed = norm(x, layer.ffn_norm, config.eps)
            gate, up = ops.product(normed, layer.W_glu).float().chunk(2, dim=1)
            x = x + ops.product(F.silu(gate) * up, layer.W_down).float()
    state.length += len(tokens)
    if cache is not None:
        cache.advance(len(tokens))
    return x


def block(config, layer, u, conv_state, ssm_state, ops):
    """A Mamba-2 block for a run of tokens, u (n, hidden) → like u; both states are written."""
    c, n = config, len(u)
    projected = ops.product(u, layer.W_in)  # 1
    if layer.b_in is not None:
        projected = projected + layer.b_in
    z, xBC, dt = projected[None].split([c.d_inner, c.channels, c.nheads], dim=-1)
    xBC, last = ops.conv1d(xBC, layer.conv_weight, layer.conv_bias, initial_state=conv_state)  # 2
    conv_state.copy_(last)
    x, B, C = xBC.split([c.d_inner, c.ngroups * c.dstate, c.ngroups * c.dstate], dim=-1)
    B, C = (t.view(1, n, c.ngroups, c.dstate) for t in (B, C))
    y, last = ops.ssd(  # 3
        x.view(1, n, c.nheads, c.headdim), dt, layer.A, B, C, chunk_size=c.chunk_size, D=layer.D,
        dt_bias=layer.dt_bias, dt_softplus=True, dt_limit=c.dt_limit, initial_states=ssm_state,
        return_final_states=True,
    )  # fmt: skip
    ssm_state.copy_(last)
    normed = ops.gated_norm(y.reshape(z.shape), z, layer.gated_norm, c.eps, ngroups=c.ngroups)  # 4
    out = ops.product(normed[0], layer.W_out)  # 5
    return out if layer.b_out is None else out + layer.b_out


def _attend(config, layer, normed, begin, cache, index, ops):
    """A hybrid's attention for a run of tokens, behind those of its cache."""
    c, n = config, len(normed)
    qkv = ops.product(normed, layer.Wqkv).float()
    q, k, v = (part.reshape(n, -1, c.head_dim) for part in qkv.split((c.q_rows, c.kv_rows, c.kv_rows), dim=1))
    cos, sin = rotary_tables(c, begin, begin + n, normed.device)
    keys, values = cache.append(index, rotate(k, cos, sin), v)
    return ops.product(causal_attention(rotate(q, cos, sin), keys, values, begin, None), layer.Wo)
