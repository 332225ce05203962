"""A whole language model of the Llama family, in NumPy: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

    hidden      width of the residual stream          n_layers, vocab      as they say
    n_heads     query heads                           n_kv_heads           heads of keys and values
    head_dim    width of one head                     ffn                  width of the feed-forward block
    eps         added to the mean square of a norm    theta, scaling       of the rotary positions (rope_frequencies)

A model is a Model of weights: matrices (outputs, inputs), as torch.nn.Linear holds them. One token's step is

    1. embedding                        x = E[token]
    and in each layer
    2. norm, queries, keys, values      q, k, v = [Wq; Wk; Wv] · norm(x) (+ biases: Qwen2)
    3. norms of each head               q, k = norm(q), norm(k)                          (Qwen3)
    4. positions                        q, k = rope(q), rope(k); k, v go into the cache
    5. attention                        a = softmax(q · Kᵀ / √head_dim) · V              over all tokens so far
    6. output projection, residual      x = x + Wo · a
    7. norm, gate, up                   g = silu(W_gate · norm(x)) · (W_up · norm(x))
    8. down projection, residual        x = x + W_down · g
    at the end
    9. norm and head                    logits = W_head · norm(x)

All sums are in float64, and nothing between two steps is rounded.
"""

from dataclasses import dataclass

import numpy as np

from ref.attention import decode_attention
from ref.fusion import norm_glu, rmsnorm


class Heads:
    """What follows from n_heads, n_kv_heads and head_dim: how many rows Wq has, and Wk and Wv."""

    @property
    def q_rows(self):
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self):
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class Config(Heads):
    """The sizes of a model. scaling: None, or what `rope_frequencies` says; window: tokens that attention sees, or
    None for all of them (Mistral 0.1)."""

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float = 1e-5
    theta: float = 10000.0
    scaling: tuple | None = None
    window: int | None = None

    @property
    def rotary(self):
        """How many numbers of a head turn: all."""
        return self.head_dim


@dataclass
class Layer:
    """Weights of one layer. Biases are Qwen2's (or None), head norms (head_dim,) Qwen3's (or None)."""

    attention_norm: np.ndarray  # (hidden,)
    Wq: np.ndarray  # (n_heads · head_dim, hidden)
    Wk: np.ndarray  # (n_kv_heads · head_dim, hidden)
    Wv: np.ndarray  # (n_kv_heads · head_dim, hidden)
    Wo: np.ndarray  # (hidden, n_heads · head_dim)
    ffn_norm: np.ndarray  # (hidden,)
    W_gate: np.ndarray  # (ffn, hidden)
    W_up: np.ndarray  # (ffn, hidden)
    W_down: np.ndarray  # (hidden, ffn)
    bq: np.ndarray | None = None  # (n_heads · head_dim,)
    bk: np.ndarray | None = None  # (n_kv_heads · head_dim,)
    bv: np.ndarray | None = None  # (n_kv_heads · head_dim,)
    q_norm: np.ndarray | None = None  # (head_dim,)
    k_norm: np.ndarray | None = None  # (head_dim,)


@dataclass
class Model:
    """embedding, head (vocab, hidden): one matrix where they are tied; norm (hidden,); a Layer for each layer."""

    config: Config
    embedding: np.ndarray
    layers: list
    norm: np.ndarray
    head: np.ndarray


def rope_frequencies(head_dim, theta=10000.0, scaling=None):
    """Radians per token by which each pair of numbers turns: theta^(−2i / head_dim), i = 0 … head_dim/2 − 1.

    scaling, for contexts beyond those of the first training:
      ("linear", factor)                        every pair turns slower by the factor
      ("llama3", factor, low, high, original)   pairs that turn fewer than `low` times in `original` tokens are slower
                                                by the factor, pairs that turn more than `high` times stay, and between
                                                the two the weight of either goes with the number of turns
    """
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies
    kind, factor, *rest = scaling
    if kind == "linear":
        return frequencies / factor
    low, high, original = rest
    turns = original * frequencies / (2 * np.pi)
    stays = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (stays + (1 - stays) / factor)


def rope(x, positions, frequencies):
    """Turn pairs of numbers by the angle position · frequency. x (..., n_heads, head_dim), positions (...) → like x.

    The pair of number i is number i + head_dim/2, as Hugging Face lays weights out. `rope_interleaved` pairs
    neighbours, as the first Llama did: the same up to the order of Wq's and Wk's rows. Fewer frequencies than
    head_dim/2, n of them, turn the first 2 n numbers, in pairs of i and i + n, and leave the others (Bamba).
    """
    x = np.asarray(x, np.float64)
    angles = np.asarray(positions, np.float64)[..., None, None] * frequencies
    n = len(frequencies)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    return np.concatenate([*turned, rest], axis=-1)


def rope_interleaved(x, positions, frequencies):
    """The same turn of the pairs (0, 1), (2, 3), … of the last axis."""
    x = np.asarray(x, np.float64)
    angles = np.asarray(positions, np.float64)[..., None, None] * frequencies
    a, b = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., 1::2] = b * np.cos(angles) + a * np.sin(angles)
    return turned


class Cache:
    """Keys (after rope) and values of the tokens so far: a list of (n_kv_heads, head_dim) for each layer."""

    def __init__(self, config):
        self.keys = [[] for _ in range(config.n_layers)]
        self.values = [[] for _ in range(config.n_layers)]

    def __len__(self):
        """How many tokens have been seen: the position of the next one."""
        return len(self.keys[0]) if self.keys else 0


def attention_inputs(config, layer, x, position):
    """Steps 2 to 4 for one token: x (hidden,) → q (n_heads, head_dim), k and v (n_kv_heads, head_dim)."""
    normed = rmsnorm(x, layer.attention_norm, config.eps)  # 2
    q, k, v = (np.asarray(W, np.float64) @ normed for W in (layer.Wq, layer.Wk, layer.Wv))
    if layer.bq is not None:
        q, k, v = q + layer.bq, k + layer.bk, v + layer.bv
    q, k, v = q.reshape(-1, config.head_dim), k.reshape(-1, config.head_dim), v.reshape(-1, config.head_dim)
    if layer.q_norm is not None:  # 3
        q = np.stack([rmsnorm(head, layer.q_norm, config.eps) for head in q])
        k = np.stack([rmsnorm(head, layer.k_norm, config.eps) for head in k])
    frequencies = rope_frequencies(config.rotary, config.theta, config.scaling)  # 4
    return rope(q, position, frequencies), rope(k, position, frequencies), v


def step(model, token, cache):
    """The logits (vocab,) of what follows `token`, which is added to the cache."""
    config = model.config
    position = len(cache)
    x = np.asarray(model.embedding[token], np.float64)  # 1
    for index, layer in enumerate(model.layers):
        q, k, v = attention_inputs(config, layer, x, position)  # 2, 3, 4
        cache.keys[index].append(k)
        cache.values[index].append(v)
        seen = slice(-config.window if config.window else None, None)
        keys, values = np.stack(cache.keys[index][seen]), np.stack(cache.values[index][seen])
        mixed = decode_attention(q[None], keys[None], values[None])[0]  # 5
        x = x + np.asarray(layer.Wo, np.float64) @ mixed.reshape(-1)  # 6
        g = norm_glu(x, layer.ffn_norm, layer.W_gate, layer.W_up, config.eps)  # 7
        x = x + np.asarray(layer.W_down, np.float64) @ g  # 8
    return np.asarray(model.head, np.float64) @ rmsnorm(x, model.norm, config.eps)  # 9


def logits(model, tokens):
    """The logits (len(tokens), vocab) after each of the tokens, one step after another from an empty cache."""
    cache = Cache(model.config)
    return np.stack([step(model, token, cache) for token in tokens])


def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """What a token is drawn from: softmax(logits / temperature) over those that are let in, (vocab,) → (vocab,).

    top_k lets in the k largest; top_p then the fewest, largest first, whose probabilities sum to at least p (always
    one). Of equal logits the one with the smaller index comes first. temperature 0: all on the first of the largest.
    """
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        found = np.zeros(len(logits))
        found[order[0]] = 1
        return found
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    if top_k is not None:
        weights[top_k:] = 0
    weights /= weights.sum()
    if top_p is not None:
        before = np.cumsum(weights) - weights
        weights[1:][before[1:] >= top_p] = 0
        weights /= weights.sum()
    found = np.empty(len(logits))
    found[order] = weights
    return found


def draw(probabilities, u):
    """The token at u in [0, 1) on the line on which each token, largest first, has the length of its probability."""
    order = np.argsort(-np.asarray(probabilities), kind="stable")
    ends = np.cumsum(np.asarray(probabilities, np.float64)[order])
    return int(order[min(np.searchsorted(ends, u * ends[-1], side="right"), np.count_nonzero(probabilities) - 1)])
