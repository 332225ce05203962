"""Tables of the rotary positions, in float32, for any run of tokens (ref.llm.rope says what they are)."""

import torch

from kernels.rotary import rope_frequencies


def rotary_tables(config, begin, end, device=None):
    """(cos, sin), each (end - begin, head_dim / 2) float32: of position · frequency, reckoned in float64."""
    rotary = getattr(config, "rotary", None)
    frequencies = torch.from_numpy(rope_frequencies(config.head_dim, config.theta, config.scaling, rotary)).to(device)
    angles = torch.arange(begin, end, dtype=torch.float64, device=device)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    """rope for x (tokens, n_heads, head_dim), with tables of the tokens' positions. float32"""
    (a, b), cos, sin = x.chunk(2, dim=-1), cos[:, None], sin[:, None]
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = turned.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return turned
