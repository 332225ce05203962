"""A Mamba-2, or its hybrid, on a card by the course's kernels; on the SIMT machine, the same kernels, for small models.

One token is the launches of kernels/mamba2/step.py, or the one of kernels/mamba2/one_launch.py, replayed as a CUDA
graph for every token; a prompt goes through kernels/mamba2/prompt.py in pieces. What a text leaves behind it is as
large after a million tokens as after one, but for a hybrid's cache of its attention layers.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from kernels import lowbit
from kernels.mamba2 import one_launch, prompt
from kernels.mamba2.one_launch import OneLaunch
from kernels.mamba2.step import OneOperationEach, Step
from models import cache, gpu, mamba2_torch, mamba2_weights
from models.config import BadModel
from models.mamba2 import State, cache_sizes, prefill
from models.positions import rotary_tables, rotate
from models.prefill import causal_attention

PIECE = 32768  # tokens of a prompt at a time: bounds the memory that the activations of a layer take
ATTENTION_PIECE = 512  # the same in a hybrid, whose scores are as long as the text
OPS = SimpleNamespace(
    product=gpu._product, ssd=mamba2_torch.ssd, conv1d=mamba2_torch.conv1d, gated_norm=mamba2_torch.gated_norm
)


class Memory:
    """What a text has left behind it: the states, and of a hybrid keys and values. `conv` and `ssm` are those of
    models.mamba2.State; `length`, tokens so far; `capacity`, tokens that the cache has room for."""

    peaks = None

    def __init__(self, config, capacity, dtype, device):
        self.state = State(config, device, dtype)
        self.cache = None
        if config.attention_layers:
            self.cache = cache.Cache(cache_sizes(config), capacity, dtype, device)
        self.capacity = capacity if config.attention_layers else config.context
        self.conv, self.ssm = self.state.conv, self.state.ssm

    @property
    def length(self):
        return self.state.length

    @length.setter
    def length(self, length):
        self.state.length = length
        if self.cache is not None:
            self.cache.length = length

    @property
    def token_bytes(self):
        return 0 if self.cache is None else self.cache.token_bytes

    def advance(self, n):
        self.length += n

    def clear(self):
        self.state.clear()
        self.length = 0

    def take_over(self, old):
        """All that a memory with a smaller cache holds."""
        self.state.take(old.state)
        if self.cache is not None:
            self.cache.take_over(old.cache)

    def apart(self, whole=False):
        """Memory of one Mamba-2 layer, or of all: for launches that compile, and must not touch a text."""
        made, layers = object.__new__(Memory), slice(None if whole else 1)
        made.conv, made.ssm = self.conv[layers].clone(), self.ssm[layers].clone()
        made.cache = self.cache
        return made


class Engine(gpu.Engine):
    """Steps of one sequence on a device: a card, or the CPU for the SIMT machine. engine: as models.load has it."""

    def __init__(self, config, checkpoint, progress, device, bits=16, kv_bits=16, pdl=True, engine="graph"):
        self.config, self.device, self.bits, self.kv_bits = config, device, bits, kv_bits
        self.dtype = gpu._dtype(checkpoint)
        if kv_bits != 16:
            raise BadModel(f"load: kv_bits must be 16 for a model with states, got {kv_bits}")
        if engine == "one_launch" and (why := one_launch.refusal(config, bits, device)) is not None:
            raise BadModel(f"load: engine='one_launch' does not run this model there, as engine='graph' does: {why}")
        if config.attention_layers and (config.head_dim % 8 or config.head_dim > 256):
            raise BadModel(f"load: head_dim must be a multiple of 8 and at most 256 there, got {config.head_dim}")
        self._expect_room()
        self.weights = mamba2_weights.Loader(config, checkpoint, progress, self.dtype, bits, device).all()
        self.read_bytes = self.weights.read_bytes
        self.whole = engine == "one_launch"
        kind = OneLaunch if self.whole else Step if bits == 16 else OneOperationEach
        self.token_step = kind(config, self.weights, self.dtype, device, pdl=pdl)
        self.token, self.kv_len, self.logits = self.token_step.token, self.token_step.kv_len, self.token_step.logits
        self.cache, self.compiling = None, []
        self.reset()
        if device.type == "cuda":
            self._compile_ahead()

    def _expect_room(self):
        if self.device.type != "cuda":
            return
        c, (free, _) = self.config, torch.cuda.mem_get_info(self.device)
        need = int(c.weights * self.bits / 8 + 4 * c.state_numbers)
        if need > free:
            there = f"{self.device} has {free / 1e9:.1f} GB free"
            raise BadModel(f"load: {there}, and this model needs {need / 1e9:.1f} GB in {self.bits} bits")

    @property
    def state(self):
        """The models.mamba2.State of the text so far."""
        return self.cache.state

    @property
    def state_bytes(self):
        """Bytes of the states that a step reads and writes."""
        return 2 * self.state.nbytes

    def parts_ahead(self):
        """What `_compile_ahead` launches."""
        return list(self.token_step.parts(self.cache.apart(self.whole), once=True))

    def changed_by_a_step(self):
        return [self.token, self.kv_len, self.cache.conv, self.cache.ssm]

    def make_cache(self, capacity):
        return Memory(self.config, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, tokens, every=False):
        """Logits (n, vocab) or (1, vocab), float32, on the device."""
        self._reserve(self.cache.length + len(tokens))
        c, memory = self.config, self.cache
        if self.device.type == "cpu":
            return prefill(c, self.weights, tokens, memory.state, memory.cache, every=every, ops=OPS)
        found, tokens = [], tokens.to(self.device)
        pieces = tokens.split(ATTENTION_PIECE if c.attention_layers else PIECE)
        with torch.cuda.device(self.device):
            for number, piece in enumerate(pieces):
                residual = self.weights.embedding[piece].to(self.token_step.residual.dtype)
                x = prompt.layers(c, self.weights, residual, memory, attend=self._attend, product=_product)
                memory.advance(len(piece))
                if every or number == len(pieces) - 1:
                    found.append(_product(x if every else x[-1:], self.weights.head).float())
        return torch.cat(found)

    def _attend(self, layer, index, normed):
        c, begin, n = self.config, self.cache.length, len(normed)
        qkv = _product(normed, layer.Wqkv).float()
        q, k, v = (part.reshape(n, -1, c.head_dim) for part in qkv.split((c.q_rows, c.kv_rows, c.kv_rows), dim=1))
        cos, sin = rotary_tables(c, begin, begin + n, normed.device)
        keys, values = self.cache.cache.append(index, rotate(k, cos, sin), v)
        mixed = causal_attention(rotate(q, cos, sin), keys, values, begin, None)
        return _product(mixed.to(normed.dtype), layer.Wo)


def _product(x, W):
    """x Wᵀ in W's type; few bits are widened to it while they are used."""
    if isinstance(W, lowbit.QuantizedWeight):
        W = W.dequantize()
    return F.linear(x, W)
