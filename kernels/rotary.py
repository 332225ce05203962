"""How fast rotary positions turn: what the kernels of a language model want to know of them, on any machine."""

import numpy as np


def rope_frequencies(head_dim, theta=10000.0, scaling=None, rotary=None):
    """(head_dim / 2,) float64: radians per token by which each pair of numbers turns, theta^(-2i / head_dim).

    theta, scaling   of a checkpoint; scaling: None, ("linear", factor) or ("llama3", factor, low, high, original), as
                     ref.llm.rope_frequencies explains them
    rotary           only so many numbers of a head turn: the frequencies of as wide a head, and 0 for the other pairs.
                     Rows of queries and keys are then in the order of `rotary_order`
    """
    if rotary not in (None, head_dim):
        return np.append(rope_frequencies(rotary, theta, scaling), np.zeros((head_dim - rotary) // 2))
    turned = float(theta) ** -(np.arange(head_dim // 2) * 2 / head_dim)
    if scaling is None:
        return turned
    if scaling[0] == "linear":
        return turned / scaling[1]
    _, factor, low, high, original = scaling
    kept = ((original * turned / (2 * np.pi) - low) / (high - low)).clip(0, 1)
    return turned * (kept + (1 - kept) / factor)


def rotary_order(n_heads, head_dim, rotary):
    """(n_heads · head_dim,) int64: an order of the rows of Wq and Wk in which number i of a head turns with number
    i + head_dim/2, where they come with only the first `rotary` numbers of a head turning, i with i + rotary/2. Scores
    stay what they are, as q and k change alike."""
    half, rest = rotary // 2, (head_dim - rotary) // 2
    a, b, c, d = np.split(np.arange(head_dim), [half, rotary, rotary + rest])
    head = np.concatenate([a, c, b, d])
    return (np.arange(n_heads)[:, None] * head_dim + head).reshape(-1)
