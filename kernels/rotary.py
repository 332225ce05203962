"""How fast rotary positions turn: what the kernels of a language model want to know of them, on any machine."""

import numpy as np


def rope_frequencies(head_dim, theta=10000.0, scaling=None):
    """(head_dim / 2,) float64: radians per token by which each pair of numbers turns, theta^(-2i / head_dim).

    theta, scaling   of a checkpoint; scaling: None, ("linear", factor) or ("llama3", factor, low, high, original), as
                     ref.llm.rope_frequencies explains them
    """
    turned = float(theta) ** -(np.arange(head_dim // 2) * 2 / head_dim)
    if scaling is None:
        return turned
    if scaling[0] == "linear":
        return turned / scaling[1]
    _, factor, low, high, original = scaling
    kept = ((original * turned / (2 * np.pi) - low) / (high - low)).clip(0, 1)
    return turned * (kept + (1 - kept) / factor)
