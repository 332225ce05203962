"""Models to be measured: their sizes, random weights of them, a filled cache, and what a token's logits must be.

Weights are random, as speed does not depend on them, and keep the size of what passes through them, so that the logits
can be held to those of float64.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kernels import kv_cache, lowbit
from kernels.lowbit import fused
from kernels.rotary import rope_frequencies


@dataclass(frozen=True)
class Shape:
    """What kernels.llm.step takes as config, and the type of its numbers."""

    name: str
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    dtype: torch.dtype
    tied: bool = False
    eps: float = 1e-5
    theta: float = 1e6
    scaling: tuple = None

    @property
    def kv_rows(self):
        return self.n_kv_heads * self.head_dim

    @property
    def q_rows(self):
        return self.n_heads * self.head_dim


MISTRAL_7B = Shape("Mistral-7B", 4096, 32, 32, 8, 128, 14336, 32000, torch.float16)
LLAMA_1B = Shape("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256, torch.bfloat16, tied=True)


def random_weights(shape, bits=16, device="cuda"):
    """What kernels.llm.step takes as weights; `bytes`: of what a token reads."""
    total = 0

    def counted(weights):
        nonlocal total
        total += weights.nbytes
        return weights

    def matrix(rows, cols):
        return counted(random_matrix(rows, cols, bits, shape.dtype, device))

    def norm():
        return counted((1 + torch.randn(shape.hidden, device=device) / 10).to(shape.dtype))

    layers = []
    for _ in range(shape.n_layers):
        layer = SimpleNamespace(bqkv=None, bias_rows=None, q_norm=None, k_norm=None)
        layer.attention_norm, layer.ffn_norm = norm(), norm()
        layer.Wqkv, layer.Wo = (
            matrix(shape.q_rows + 2 * shape.kv_rows, shape.hidden),
            matrix(shape.hidden, shape.q_rows),
        )
        layer.W_glu, layer.W_down = matrix(2 * shape.ffn, shape.hidden), matrix(shape.hidden, shape.ffn)
        if bits == 16:
            layer.Wq, layer.Wk, layer.Wv = layer.Wqkv.split((shape.q_rows, shape.kv_rows, shape.kv_rows))
            layer.W_gate, layer.W_up = layer.W_glu.split(shape.ffn)
        layers.append(layer)
    last = norm()
    if shape.tied and bits == 16:
        head = matrix(shape.vocab, shape.hidden)
        embedding = head
    else:
        head = matrix(shape.vocab, shape.hidden)
        embedding = torch.randn(shape.vocab, shape.hidden, device=device).to(shape.dtype)
    total += shape.hidden * embedding.element_size()  # a row of it
    return SimpleNamespace(embedding=embedding, layers=layers, norm=last, head=head, bytes=total)


def in_pairs(weights):
    """The same weights in few bits as kernels.llm.step.FewBits takes them."""
    layers = [SimpleNamespace(**vars(layer) | {"W_glu": fused.Paired.of(layer.W_glu)}) for layer in weights.layers]
    return SimpleNamespace(**vars(weights) | {"layers": layers})


def random_matrix(rows, cols, bits, dtype, device):
    """(rows, cols), a tensor or a QuantizedWeight as models.load makes it, whose numbers have a deviation of
    1 / sqrt(cols)."""
    if bits == 16:
        return torch.empty(rows, cols, dtype=dtype, device=device).normal_(0, cols**-0.5)
    group = None if bits == 8 else 128
    groups, middle = 1 if group is None else cols // group, 2 ** (bits - 1)
    codes = torch.randint(0, 2**bits, (rows, cols), dtype=torch.uint8, device=device)
    deviation = ((4**bits - 1) / 12) ** 0.5  # of the codes
    scale = torch.full((rows, groups), cols**-0.5 / deviation, dtype=dtype, device=device)
    scale *= 1 + torch.rand_like(scale) / 10
    return lowbit.QuantizedWeight(codes, scale, torch.full_like(scale, middle), bits, group, dtype)


class RandomCache:
    """Keys and values of so many tokens, random, with room for more: the tensors of a models.cache."""

    def __init__(self, shape, length, capacity, bits=16, device="cuda"):
        self.length, self.bits = length, bits
        size = (capacity, shape.n_kv_heads, shape.head_dim)
        both = torch.empty((2, shape.n_layers, *size), dtype=shape.dtype, device=device).normal_()
        self.layers = list(zip(*both))
        if bits != 16:
            for index, pair in enumerate(self.layers):
                roles = ("keys", "values")
                new = [kv_cache.empty(1, *size, bits, role, dtype=shape.dtype, device=device) for role in roles]
                for cache, numbers in zip(new, pair):
                    kv_cache.put(cache, numbers[None], 0)
                self.layers[index] = tuple(new)
        one = self.layers[0][0]
        token = one.nbytes // capacity if bits == 16 else one.nbytes // one.shape[1]
        self.bytes = 2 * shape.n_layers * token * length  # that a token reads

    def layer(self, index):
        return self.layers[index]

    def numbers(self, index):
        """Keys and values of the first `length` tokens, (length, n_kv_heads, head_dim), float64."""
        whole = (t if self.bits == 16 else t.dequantize()[0] for t in self.layers[index])
        return [t[: self.length].double() for t in whole]


def wanted_logits(shape, weights, cache, token):
    """Logits (vocab,), float64, of a token whose keys and values are the cache's last. The cache is not written to: as
    its newest keys and values those count that the kernels write."""
    c, at = shape, cache.length - 1
    turn = at * torch.from_numpy(rope_frequencies(c.head_dim, c.theta, c.scaling)).to(weights.norm.device)
    cos, sin = turn.cos(), turn.sin()

    def product(W, x):
        return (W.dequantize(torch.float64) if isinstance(W, lowbit.QuantizedWeight) else W.double()) @ x

    def norm(x, weight):
        return x / (x.square().mean() + c.eps).sqrt() * weight.double()

    def turned(x):
        a, b = x.chunk(2, dim=1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    x = weights.embedding[token].double()
    for index, layer in enumerate(weights.layers):
        qkv = product(layer.Wqkv, norm(x, layer.attention_norm)).view(-1, c.head_dim)
        q, k, v = qkv.split((c.n_heads, c.n_kv_heads, c.n_kv_heads))
        keys, values = cache.numbers(index)
        keys[at], values[at] = turned(k), v
        q = turned(q).view(c.n_kv_heads, -1, c.head_dim)
        weight = torch.einsum("hgd,thd->hgt", q, keys).mul(c.head_dim**-0.5).softmax(-1)
        x = x + product(layer.Wo, torch.einsum("hgt,thd->hgd", weight, values).reshape(-1))
        gate, up = product(layer.W_glu, norm(x, layer.ffn_norm)).chunk(2)
        x = x + product(layer.W_down, gate / (1 + (-gate).exp()) * up)
    return product(weights.head, norm(x, weights.norm))
