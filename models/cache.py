"""Keys and values of one sequence on a card: in 16 bits, or quantised to 8 or 4 as they are written.

Both kinds have: `length`, the tokens so far, and `capacity`; `append` and `advance` as models.prefill wants them;
`layer(index)`, what kernels.llm.rope_append and decode take; `token_bytes`, of a token in all layers; `peaks`, what a
graph of decode goes by beside addresses.
"""

import torch

from kernels import kv_cache
from kernels.kv_cache.layout import TILE

ROLES = ("keys", "values")


def make(config, capacity, dtype, device, bits):
    """A cache for at least so many tokens."""
    if bits == 16:
        return Cache(config, capacity, dtype, device)
    return QuantizedCache(config, capacity, dtype, device, bits)


class Cache:
    """Keys and values, (n_layers, capacity, n_kv_heads, head_dim) each, in the model's own type."""

    peaks = None

    def __init__(self, config, capacity, dtype, device):
        self.length, self.capacity = 0, capacity
        shape = (config.n_layers, capacity, config.n_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in ROLES)

    @property
    def token_bytes(self):
        return (self.keys.nbytes + self.values.nbytes) // self.capacity

    def layer(self, index):
        return self.keys[index], self.values[index]

    def append(self, layer, k, v):
        end = self.length + len(k)
        self.keys[layer, self.length : end], self.values[layer, self.length : end] = k, v
        return self.keys[layer, :end], self.values[layer, :end]

    def advance(self, n):
        self.length += n

    def clear(self):
        self.length = 0

    def take_over(self, old):
        """The tokens of a smaller cache."""
        for new, was in ((self.keys, old.keys), (self.values, old.values)):
            new[:, : old.length] = was[:, : old.length]
        self.length = old.length


class QuantizedCache:
    """For each layer two kernels.kv_cache.QuantizedKV, (1, capacity, n_kv_heads, head_dim), of 8 or 4 bits."""

    def __init__(self, config, capacity, dtype, device, bits):
        self.length, self.capacity = 0, -(-capacity // TILE) * TILE
        sizes = 1, self.capacity, config.n_kv_heads, config.head_dim, bits
        self.layers = [
            tuple(kv_cache.empty(*sizes, role, dtype=dtype, device=device) for role in ROLES)
            for _ in range(config.n_layers)
        ]

    @property
    def token_bytes(self):
        return len(self.layers) * sum(cache.nbytes for cache in self.layers[0]) // self.capacity

    @property
    def peaks(self):
        return tuple(values.peak for _, values in self.layers)

    def layer(self, index):
        return self.layers[index]

    def append(self, layer, k, v):
        """A prompt sees its keys and values as later tokens will: dequantised."""
        end = self.length + len(k)
        for cache, new in zip(self.layers[layer], (k, v)):
            kv_cache.put(cache, new[None].to(cache.dtype), self.length)
        return tuple(kv_cache.first(cache, end).dequantize()[0] for cache in self.layers[layer])

    def advance(self, n):
        self.length += n

    def clear(self):
        """Scales become 0, so that nothing of an earlier text, NaN say, is ever multiplied by."""
        self.length = 0
        for layer in self.layers:
            for cache in layer:
                cache.scale.zero_()

    def take_over(self, old):
        for layer, before in zip(self.layers, old.layers):
            for new, was in zip(layer, before):
                tiles = was.packed.shape[2]
                new.packed[:, :, :tiles], new.scale[:, :, :tiles] = was.packed, was.scale
                new.peak = was.peak
        self.length = old.length
