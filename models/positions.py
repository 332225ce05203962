"""Tables of the rotary positions, in float32, for any run of tokens (ref.llm.rope says what they are)."""

import torch

from kernels.rotary import rope_frequencies


def rotary_tables(config, begin, end, device=None):
    """(cos, sin), each (end - begin, head_dim / 2) float32: of position · frequency, reckoned in float64."""
    rotary = getattr(config, "rotary", None)
    frequencies = torch.from_numpy(rope_frequencies(config.head_dim, config.theta, config.scaling, rotary))
    angles = torch.arange(begin, end, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x, cos, sin):
    """rope for x (tokens, n_heads, head_dim), with tables of the tokens' positions."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
