"""How many bytes and flops one token costs, and how fast memory and arithmetic let it be.

A decoder generates one token at a time, and for each token it reads every weight once and the whole cache of keys and
values once. These functions count, by the model's configuration.

    hidden           width of the residual stream               layers    number of decoder layers
    ffn              width inside the feed-forward block         vocab     number of tokens in the vocabulary
    n_heads          query heads                                 context   tokens already in the cache
    n_kv_heads       key and value heads (fewer: grouped)        head_dim  numbers per head
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ModelConfig:
    """The widths of a Llama-style decoder: gated feed-forward, RMSNorm, no biases, untied output matrix."""

    name: str
    layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrix_weights(self):
        """Weights of the matrices that every token reads: all layers and the output matrix. Not the embedding table."""
        q_and_o = 2 * self.hidden * self.n_heads * self.head_dim
        k_and_v = 2 * self.hidden * self.n_kv_heads * self.head_dim
        gate_up_down = 3 * self.hidden * self.ffn
        return self.layers * (q_and_o + k_and_v + gate_up_down) + self.vocab * self.hidden

    @property
    def norm_weights(self):
        """Weights of the RMSNorms: two in each layer and one before the output."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def embedding_weights(self):
        """Weights of the embedding table, of which a token reads one row."""
        return self.vocab * self.hidden

    @property
    def parameters(self):
        """All weights of the model."""
        return self.matrix_weights + self.norm_weights + self.embedding_weights


MISTRAL_7B = ModelConfig("Mistral-7B", 32, 4096, 14336, 32, 8, 128, 32000)
LLAMA_2_7B = ModelConfig("Llama-2-7B", 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_3_8B = ModelConfig("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_3_70B = ModelConfig("Llama-3-70B", 80, 8192, 28672, 64, 8, 128, 128256)


def weight_bytes(model, weight_bits, norm_bits=None, whole_embedding=False):
    """Bytes of weights read for one token.

    weight_bits      bits of a matrix weight: 32, 16, 8, 4 ...
    norm_bits        bits of a norm weight; default: as the matrices
    whole_embedding  True: count the whole embedding table as read, besides the token's one row of it
    """
    norm_bits = weight_bits if norm_bits is None else norm_bits
    embedding = model.hidden + (model.embedding_weights if whole_embedding else 0)
    return ((model.matrix_weights + embedding) * weight_bits + model.norm_weights * norm_bits) // 8


def kv_cache_bytes(model, kv_bits, context, batch=1):
    """Bytes of keys and values read for one step: each sequence of the batch has a cache of its own."""
    per_position = 2 * model.layers * model.n_kv_heads * model.head_dim  # a key and a value, every layer, every head
    return batch * context * per_position * kv_bits // 8


def bytes_per_token(model, weight_bits=16, kv_bits=16, context=4096, norm_bits=None, whole_embedding=False):
    """Bytes read to generate one token: the weights once, and the cache once."""
    return weight_bytes(model, weight_bits, norm_bits, whole_embedding) + kv_cache_bytes(model, kv_bits, context)


def flops_per_token(model, context=4096):
    """Floating-point operations for one token: a multiply and an add for each weight, and the two products of
    attention (scores and mix) for each position of the cache and each query head."""
    return 2 * model.matrix_weights + 2 * 2 * context * model.layers * model.n_heads * model.head_dim


def tokens_per_second(bytes_read, bandwidth):
    """The most tokens a second if each reads this many bytes at this many bytes a second."""
    return bandwidth / bytes_read


def attainable(intensity, bandwidth, flops):
    """The roofline: the most flop/s for a kernel that does `intensity` flops for each byte it moves."""
    return np.minimum(flops, bandwidth * np.asarray(intensity, dtype=float))
