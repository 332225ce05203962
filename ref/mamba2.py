"""Mamba-2 as a whole language model, in NumPy: its block, a prompt at once and a token at a time; and a hybrid.

    D  hidden      width of the residual stream       d_inner   H · P, width of x and z
    H  nheads      P  headdim                         channels  d_inner + 2 · G · N: x, B and C, one behind another
    N  dstate      G  ngroups                         W  width  tokens that a channel of the convolution sees

A block takes u (batch, L, D), the normed stream, and two states, which are all that it keeps of a text of any length:

    1. in_proj        z, xBC, dt = W_in u                       (d_inner,), (channels,), (H,) for each token
    2. conv1d, silu   xBC_t = silu(b + sum over w of K_w · xBC_{t - W + 1 + w})   before the first token: conv state
    3. SSD            h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_tᵀ,  y_t = h_t C_t + D x_t,  dt = softplus(dt + dt_bias)
    4. gated norm     g = norm(y · silu(z)) · weight            in each of G groups of d_inner / G numbers
    5. out_proj       W_out g

    conv state  (batch, W - 1, channels)   the last inputs of step 2, the oldest first; zeros where there are none yet
    SSM state   (batch, H, P, N)           h

A model embeds a token, adds block(norm(x)) to the stream x in every layer, and ends with norm and head. The hybrid
(Bamba) has attention in some layers in place of the block, steps 2 to 6 of ref.llm with the first `rotary` numbers of
each head turned, and behind either a feed-forward block, steps 7 and 8 of ref.llm. A = -exp(A_log) is below 0.

All sums are in float64, and nothing between two steps is rounded. Sources: Tri Dao and Albert Gu, "Transformers are
SSMs", 2024; for the order of rows and the norm behind the gate, mamba_ssm's Mamba2.
"""

from dataclasses import dataclass

import numpy as np

from ref import llm
from ref.attention import decode_attention
from ref.fusion import norm_glu, rmsnorm
from ref.ssd import ssd_chunked, ssd_recurrent
from ref.ssd_arguments import array, runs_of
from ref.ssd_steps import silu


@dataclass(frozen=True)
class Config(llm.Heads):
    """Sizes of a model. attention_layers: indices of the layers with attention, (): none; n_heads to scaling are
    theirs, and rotary says how many numbers of a head turn; ffn is the feed-forward block's width, 0: there is none."""

    hidden: int
    n_layers: int
    nheads: int
    headdim: int
    dstate: int
    vocab: int
    ngroups: int = 1
    width: int = 4
    chunk_size: int = 256
    eps: float = 1e-5
    dt_limit: tuple = (0.0, np.inf)
    attention_layers: tuple = ()
    n_heads: int = 0
    n_kv_heads: int = 0
    head_dim: int = 0
    rotary: int = 0
    theta: float = 10000.0
    scaling: tuple | None = None
    ffn: int = 0

    @property
    def d_inner(self):
        return self.nheads * self.headdim

    @property
    def channels(self):
        """What the convolution runs over: x, B and C."""
        return self.d_inner + 2 * self.ngroups * self.dstate

    @property
    def in_rows(self):
        """Rows of in_proj: z, x, B, C and dt."""
        return self.d_inner + self.channels + self.nheads


@dataclass
class Block:
    """Weights of one Mamba-2 block; biases that a checkpoint does not have are None."""

    W_in: np.ndarray  # (d_inner + channels + H, D): rows of z, xBC, dt
    conv_weight: np.ndarray  # (channels, W)
    conv_bias: np.ndarray | None  # (channels,)
    dt_bias: np.ndarray  # (H,)
    A: np.ndarray  # (H,)
    D: np.ndarray  # (H,)
    gated_norm: np.ndarray  # (d_inner,)
    W_out: np.ndarray  # (D, d_inner)
    b_in: np.ndarray | None = None  # (d_inner + channels + H,)
    b_out: np.ndarray | None = None  # (D,)


@dataclass
class Attention:
    """Weights of an attention layer, as ref.llm.attention_inputs takes them."""

    attention_norm: np.ndarray  # (D,): the layer's norm
    Wq: np.ndarray
    Wk: np.ndarray
    Wv: np.ndarray
    Wo: np.ndarray
    bq: None = None
    bk: None = None
    bv: None = None
    q_norm: None = None
    k_norm: None = None


@dataclass
class Layer:
    """norm (D,), a Block or an Attention, and, where the model has feed-forward blocks, one: three matrices."""

    norm: np.ndarray
    mixer: Block | Attention
    ffn_norm: np.ndarray | None = None
    W_gate: np.ndarray | None = None
    W_up: np.ndarray | None = None
    W_down: np.ndarray | None = None


@dataclass
class Model:
    """embedding, head (vocab, D): one matrix where they are tied; norm (D,); a Layer for each layer."""

    config: Config
    embedding: np.ndarray
    layers: list
    norm: np.ndarray
    head: np.ndarray


@dataclass
class State:
    """What a model keeps of the tokens so far: for each layer (conv state, SSM state) of a batch of 1, or lists of the
    keys and values of all tokens, (n_kv_heads, head_dim) each."""

    layers: list
    length: int = 0

    @classmethod
    def empty(cls, config):
        shapes = (1, config.width - 1, config.channels), (1, config.nheads, config.headdim, config.dstate)
        make = lambda index: ([], []) if index in config.attention_layers else tuple(map(np.zeros, shapes))  # noqa: E731
        return cls([make(index) for index in range(config.n_layers)])


# The block


def conv1d(xBC, weight, bias=None, initial_state=None, *, seq_idx=None, cu_seqlens=None):
    """Step 2: each channel's own sum over W tokens, its own the last, then silu. → (like xBC, final state)

    xBC (batch, L, channels), weight (channels, W), bias (channels,), states (batch, W - 1, channels); seq_idx
    (batch, L): where it changes another sequence begins, which sees nothing of what stands before it. cu_seqlens
    (sequences + 1,), in its place, batch 1: where each begins; states are then each sequence's own, (sequences, W - 1,
    channels).
    """
    xBC, weight = array("xBC", xBC), array("weight", weight)
    if cu_seqlens is not None:
        each = []
        for number, (begin, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:])):
            state = None if initial_state is None else initial_state[number, None]
            each.append(conv1d(xBC[:, begin:end], weight, bias, state))
        return tuple(np.concatenate(parts, axis=axis) for axis, parts in zip((1, 0), zip(*each)))
    (batch, L, channels), W = xBC.shape, weight.shape[1]
    state = np.zeros((batch, W - 1, channels)) if initial_state is None else initial_state
    state = array("initial_state", state, (batch, W - 1, channels))
    runs = runs_of(seq_idx, batch, L)
    seen = np.concatenate([state, xBC], axis=1)  # (batch, W - 1 + L, channels)
    of = np.concatenate([np.zeros((batch, W - 1), int), runs], axis=1)  # whose each is; the state is the first's
    out = np.zeros(xBC.shape) if bias is None else np.broadcast_to(array("bias", bias, (channels,)), xBC.shape).copy()
    for w in range(W):
        same = (of[:, w : w + L] == runs)[..., None]
        out += np.where(same, weight[:, w] * seen[:, w : w + L], 0)
    same = (of == runs[:, -1:])[..., None] if L else np.ones((1, 1, 1), bool)
    return silu(out), np.where(same, seen, 0)[:, L:]


def gated_norm(y, z, weight, eps=1e-5, ngroups=1):
    """Step 4: y · silu(z), over the root of its mean square within each group, times a weight. y, z (..., d_inner)."""
    gated = array("y", y) * silu(array("z", z))
    groups = gated.reshape(*gated.shape[:-1], ngroups, -1)
    normed = groups / np.sqrt((groups * groups).mean(-1, keepdims=True) + eps)
    return normed.reshape(gated.shape) * array("weight", weight)


def state_step(state, x, dt, A, B, C, **options):
    """Step 3 for one token: x (batch, H, P), dt (batch, H), B, C (batch, G, N), state (batch, H, P, N) → (y, state).

    options: D, z, dt_bias, dt_softplus, dt_limit, as ref.ssd says; z is (batch, H, P) here.
    """
    if options.get("z") is not None:
        options["z"] = np.asarray(options["z"])[:, None]
    x, dt, B, C = (np.asarray(t)[:, None] for t in (x, dt, B, C))
    y, state = ssd_recurrent(x, dt, A, B, C, initial_states=state, **options)
    return y[:, 0], state


def block_inputs(config, block, u):
    """Step 1: z (..., d_inner), xBC (..., channels), dt (..., H)."""
    found = array("u", u) @ array("W_in", block.W_in).T
    if block.b_in is not None:
        found = found + block.b_in
    return np.split(found, [config.d_inner, config.d_inner + config.channels], axis=-1)


def block_prefill(config, block, u, conv_state, ssm_state):
    """The block for a run of tokens. u (batch, L, D) → (like u, conv state, SSM state)."""
    c = config
    z, xBC, dt = block_inputs(c, block, u)  # 1
    xBC, conv_state = conv1d(xBC, block.conv_weight, block.conv_bias, conv_state)  # 2
    x, B, C = np.split(xBC, [c.d_inner, c.d_inner + c.ngroups * c.dstate], axis=-1)
    heads, groups = (*u.shape[:2], c.nheads, c.headdim), (*u.shape[:2], c.ngroups, c.dstate)
    y, ssm_state = ssd_chunked(  # 3
        x.reshape(heads), dt, block.A, B.reshape(groups), C.reshape(groups), chunk_size=c.chunk_size, D=block.D,
        dt_bias=block.dt_bias, dt_softplus=True, dt_limit=c.dt_limit, initial_states=ssm_state,
    )  # fmt: skip
    normed = gated_norm(y.reshape(z.shape), z, block.gated_norm, c.eps, c.ngroups)  # 4
    return _out(block, normed), conv_state, ssm_state  # 5


def block_step(config, block, u, conv_state, ssm_state):
    """The block for one token more. u (batch, D) → (like u, conv state, SSM state)."""
    c = config
    z, xBC, dt = block_inputs(c, block, u)  # 1
    seen = np.concatenate([conv_state, xBC[:, None]], axis=1)  # (batch, W, channels): 2
    summed = (seen * block.conv_weight.T).sum(axis=1)
    xBC = silu(summed if block.conv_bias is None else summed + block.conv_bias)
    x, B, C = np.split(xBC, [c.d_inner, c.d_inner + c.ngroups * c.dstate], axis=-1)
    y, ssm_state = state_step(  # 3
        ssm_state, x.reshape(-1, c.nheads, c.headdim), dt, block.A, B.reshape(-1, c.ngroups, c.dstate),
        C.reshape(-1, c.ngroups, c.dstate), D=block.D, dt_bias=block.dt_bias, dt_softplus=True, dt_limit=c.dt_limit,
    )  # fmt: skip
    normed = gated_norm(y.reshape(z.shape), z, block.gated_norm, c.eps, c.ngroups)  # 4
    return _out(block, normed), seen[:, 1:], ssm_state  # 5


def _out(block, normed):
    out = normed @ array("W_out", block.W_out).T
    return out if block.b_out is None else out + block.b_out


# The model


def attend(config, layer, x, position, keys, values):
    """The hybrid's attention for one token x (D,), whose key and value are appended to the lists: → (D,)."""
    q, k, v = llm.attention_inputs(config, layer.mixer, x, position)
    keys.append(k)
    values.append(v)
    mixed = decode_attention(q[None], np.stack(keys)[None], np.stack(values)[None])[0]
    return array("Wo", layer.mixer.Wo) @ mixed.reshape(-1)


def feed_forward(config, layer, x):
    """x, and where the layer has a feed-forward block, x + W_down · glu(norm(x)). x (D,)."""
    if layer.W_down is None:
        return x
    return x + array("W_down", layer.W_down) @ norm_glu(x, layer.ffn_norm, layer.W_gate, layer.W_up, config.eps)


def prefill(model, tokens, state):
    """Run tokens through the model behind those of the state, which takes them in. → logits (len(tokens), vocab)."""
    c = model.config
    x = array("embedding", model.embedding)[np.asarray(tokens)]  # (L, D)
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mixer, Block):
            normed = np.stack([rmsnorm(row, layer.norm, c.eps) for row in x])
            out, *states = block_prefill(c, layer.mixer, normed[None], *state.layers[index])
            x, state.layers[index] = x + out[0], tuple(states)
        else:
            x = x + [attend(c, layer, row, state.length + i, *state.layers[index]) for i, row in enumerate(x)]
        x = np.stack([feed_forward(c, layer, row) for row in x])
    state.length += len(x)
    return np.stack([array("head", model.head) @ rmsnorm(row, model.norm, c.eps) for row in x])


def step(model, token, state):
    """The logits (vocab,) of what follows `token`, which the state takes in."""
    c = model.config
    x = array("embedding", model.embedding)[token]
    for index, layer in enumerate(model.layers):
        if isinstance(layer.mixer, Block):
            out, *states = block_step(c, layer.mixer, rmsnorm(x, layer.norm, c.eps)[None], *state.layers[index])
            x, state.layers[index] = x + out[0], tuple(states)
        else:
            x = x + attend(c, layer, x, state.length, *state.layers[index])
        x = feed_forward(c, layer, x)
    state.length += 1
    return array("head", model.head) @ rmsnorm(x, model.norm, c.eps)


def logits(model, tokens):
    """The logits (len(tokens), vocab) after each of the tokens, all at once from an empty state."""
    return prefill(model, tokens, State.empty(model.config))
