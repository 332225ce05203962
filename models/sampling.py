"""Which token comes next: the same choice wherever the logits are, for the same seed.

probabilities   softmax over the tokens that are let in     (ref.llm.probabilities)
draw            the token at a place on their line          (ref.llm.draw)
uniform         that place: a hash of seed and position, so that it needs no state and no order
"""

import torch

from lab.arguments import expect_count

MASK = 2**64 - 1


def expect_sampling(temperature, top_k, top_p, seed):
    """Raise unless these say how to sample. Returns the seed: a number."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < 1e6:
        raise ValueError(f"generate: temperature must be a number, 0 (the likeliest) or more, got {temperature!r}")
    if top_k is not None:
        expect_count("generate", "top_k", top_k)
    if top_p is not None and (isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 < top_p <= 1):
        raise ValueError(f"generate: top_p must be above 0 and at most 1, got {top_p!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"generate: seed must be a whole number, got {seed!r}")
    return torch.seed() & MASK if seed is None else seed & MASK


def uniform(seed, position):
    """A number in [0, 1), 53 bits of it: SplitMix64's value number `position` behind a seed."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53


def choose(logits, u, temperature=0.0, top_k=None, top_p=None):
    """The next token, an int64 tensor without axes on the device of logits (vocab,) float32.

    u  a number in [0, 1), or a float64 tensor of one; not looked at where temperature is 0
    """
    if temperature == 0:
        return logits.argmax()
    values, order = torch.sort(logits.double(), descending=True, stable=True)
    weights = torch.exp((values - values[0]) / temperature)
    if top_k is not None:
        weights[top_k:] = 0
    weights = weights / weights.sum()
    if top_p is not None:
        before = weights.cumsum(0) - weights
        before[0] = -1  # one token is always let in
        weights = torch.where(before < top_p, weights, 0)
    ends = weights.cumsum(0)
    place = torch.searchsorted(ends, (u * ends[-1]).reshape(1), right=True)
    return order[place.clamp(max=(weights > 0).sum() - 1)][0]
