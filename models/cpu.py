"""A model on the processor: chapter 02's products, a token at a time, at the speed of memory.

Weights stay in the checkpoint's own file and type (fp32, fp16 or bf16): they are mapped, and read where they lie. The
cache is fp16. Everything between is float32.
"""

from types import SimpleNamespace

import numpy as np
import torch

from kernels.cpu_llm import fused, step
from lab import machine
from models.prefill import linear, prefill
from models.sampling import choose, uniform
from models.weights import expect_finite

FIRST_ROOM = 256  # tokens that a cache has room for before it first grows


class Cache:
    """Keys and values in fp16, (n_layers, n_kv_heads, room, head_dim) each; room doubles when it is full."""

    def __init__(self, config, room=FIRST_ROOM):
        self.config, self.length = config, 0
        shape = (2, config.n_layers, config.n_kv_heads, min(room, config.context), config.head_dim)
        self._both = np.empty(shape, np.float16)

    @property
    def keys(self):
        return self._both[0]

    @property
    def values(self):
        return self._both[1]

    def reserve(self, tokens):
        """Have room for so many tokens in all."""
        room = self._both.shape[3]
        if tokens > room:
            shape = list(self._both.shape)
            shape[3] = min(max(tokens, 2 * room), max(self.config.context, tokens))
            larger = np.empty(shape, np.float16)
            larger[:, :, :, : self.length] = self._both[:, :, :, : self.length]
            self._both = larger

    def append(self, layer, k, v):
        """As models.prefill wants it: float32 tensors of the keys and values so far come back."""
        n = len(k)
        self.reserve(self.length + n)
        both = self._both[:, layer, :, : self.length + n]
        both[0, :, self.length :], both[1, :, self.length :] = k.transpose(0, 1).numpy(), v.transpose(0, 1).numpy()
        return tuple(torch.from_numpy(t.astype(np.float32)).transpose(0, 1) for t in both)

    def advance(self, n):
        self.length += n


class Engine:
    """Steps of one sequence. `logits` and `step` add to its cache; `reset` empties it."""

    way = None  # the module of kernels.cpu_llm that a step is: fused, where it takes the weights

    def __init__(self, config, checkpoint, progress, threads=None):
        self.config, self.threads = config, machine.thread_count() if threads is None else threads
        self.weights = self.read(checkpoint, progress)
        self.read_bytes = self.weights.read_bytes
        self.reset()

    def read(self, checkpoint, progress):
        """The weights, as `prefill` wants them, and their arrays, as `step` does."""
        return _weights(self.config, checkpoint, progress)

    @property
    def context(self):
        """Tokens, the most."""
        return self.config.context

    state_bytes = 0  # that a step reads and writes, whatever the position: a Mamba-2's

    @property
    def token_bytes(self):
        """Bytes of a token's keys and values, in all layers."""
        return 2 * 2 * self.config.n_layers * self.config.kv_rows

    def reset(self):
        """Forget all tokens."""
        self.cache = Cache(self.config)
        self.text = object()  # whoever writes one knows by it whether another has begun

    def write(self, ids, max_tokens, seed, *sampling):
        """An iterator of the token ids that follow, at most max_tokens, while the context has room."""
        self.reset()
        logits, text = self.prefill(torch.tensor(ids))[0], self.text
        for count in range(max_tokens):
            token = int(choose(logits, uniform(seed, len(ids) + count), *sampling))
            yield token
            if count + 1 == max_tokens or len(ids) + count >= self.context:
                return
            if self.text is not text:
                raise RuntimeError("generate: this model has begun another text since, and keeps one at a time")
            logits = self.step(token)

    @torch.inference_mode()
    def prefill(self, tokens, every=False):
        """Logits (n, vocab) or (1, vocab), float32, on the CPU."""
        return prefill(self.config, self.weights, tokens, self.cache, every=every, product=product)

    def step(self, token):
        """Logits (vocab,), float32, of what follows one token: the steps of ref.llm."""
        weights, cache = self.weights, self.cache
        cache.reserve(cache.length + 1)
        x = weights.embedding[token].float().numpy()  # 1
        if self.way is None:
            self.way = fused if fused.takes(weights.arrays) else step
        found = self.way.token_logits(
            self.config, weights.arrays, x, cache.keys, cache.values, cache.length, threads=self.threads
        )  # fmt: skip
        cache.advance(1)
        return torch.from_numpy(found)


class Stack:
    """Matrices one above another that stay where they are: a product with a stack is one with each of them."""

    def __init__(self, *parts):
        self.parts = parts

    def arrays(self):
        return [as_array(part) for part in self.parts]


def product(x, W, add=None):
    """linear in float32, for prefill: a matrix of 16 bits is widened while it is used, a stack's one by one."""
    if isinstance(W, Stack):
        return torch.cat([product(x, part) for part in W.parts], dim=1)
    return linear(x, W.float(), add)


def _weights(config, checkpoint, progress):
    """What models.prefill says, as tensors that are still in the file; and the same as arrays, for the steps."""

    def take(name):
        nonlocal read_bytes
        tensor = checkpoint[name]
        expect_finite(name, tensor)
        progress(tensor.nbytes)
        read_bytes += tensor.nbytes
        return tensor

    layers, arrays, read_bytes = [], [], 0
    embedding = take("model.embed_tokens.weight")
    for index in range(config.n_layers):
        layer = _layer(config, lambda name, at=f"model.layers.{index}.": take(at + name))
        layers.append(layer)
        arrays.append(SimpleNamespace(**{name: as_array(value) for name, value in vars(layer).items()}))
    norm = take("model.norm.weight").float()
    head = embedding if config.tied else take("lm_head.weight")
    return SimpleNamespace(
        embedding=embedding, layers=layers, norm=norm, head=head,
        arrays=SimpleNamespace(layers=arrays, norm=norm.numpy(), head=as_array(head)),
        read_bytes=read_bytes - (0 if config.tied else embedding.nbytes),
    )  # fmt: skip


def _layer(config, take):
    names = [f"self_attn.{name}_proj" for name in "qkv"]
    return SimpleNamespace(
        attention_norm=take("input_layernorm.weight").float(),
        Wqkv=Stack(*(take(name + ".weight") for name in names)),
        bqkv=torch.cat([take(name + ".bias").float() for name in names]) if config.biases else None,
        q_norm=take("self_attn.q_norm.weight").float() if config.head_norms else None,
        k_norm=take("self_attn.k_norm.weight").float() if config.head_norms else None,
        Wo=take("self_attn.o_proj.weight"),
        ffn_norm=take("post_attention_layernorm.weight").float(),
        W_glu=Stack(take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")),
        W_down=take("mlp.down_proj.weight"),
    )


def as_array(value):
    """A tensor's own memory as an array, bfloat16 as uint16; a Stack's as a list of them."""
    if value is None or isinstance(value, (list, str)):
        return value
    if isinstance(value, Stack):
        return value.arrays()
    return (value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy()
