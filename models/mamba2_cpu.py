"""A Mamba-2, or its hybrid, on the processor: a token at a time by kernels/cpu_mamba2, at the speed of memory.

Weights stay in the checkpoint's own file and type, as in models/cpu.py; states are float32, a hybrid's cache is fp16.
"""

from types import SimpleNamespace

import torch

from kernels.cpu_mamba2 import fused, step
from models import cpu, mamba2_torch, mamba2_weights
from models.mamba2 import State, cache_sizes, prefill
from models.weights import expect_finite


def ssd(*arguments, chunk_size, **options):
    """As models.mamba2_torch has it: by short chunks, as half of a chunk's matrix is computed in vain."""
    return mamba2_torch.ssd(*arguments, chunk_size=min(chunk_size, mamba2_torch.CHUNK), **options)


OPS = SimpleNamespace(product=cpu.product, ssd=ssd, conv1d=mamba2_torch.conv1d, gated_norm=mamba2_torch.gated_norm)


class Engine(cpu.Engine):
    """Steps of one sequence. `prefill` and `step` go on from its state, and from a hybrid's cache; `reset` empties
    both, and `state.take` goes on from another place."""

    def __init__(self, config, checkpoint, progress, threads=None):
        self.state = State(config)
        super().__init__(config, checkpoint, progress, threads)

    def read(self, checkpoint, progress):
        loader = Mapped(self.config, checkpoint, progress)
        weights = loader.all()
        arrays = [SimpleNamespace(**{k: cpu.as_array(v) for k, v in vars(layer).items()}) for layer in weights.layers]
        weights.arrays = SimpleNamespace(
            layers=arrays, norm=cpu.as_array(weights.norm), head=cpu.as_array(weights.head)
        )  # fmt: skip
        return weights

    @property
    def state_bytes(self):
        """Bytes of the states that a step reads and writes."""
        return 2 * self.state.nbytes

    @property
    def token_bytes(self):
        return 2 * 2 * len(self.config.attention_layers) * self.config.kv_rows

    def reset(self):
        """Forget all tokens."""
        self.state.clear()
        self.cache = cpu.Cache(cache_sizes(self.config)) if self.config.attention_layers else None
        self.text = object()

    @torch.inference_mode()
    def prefill(self, tokens, every=False):
        """Logits (n, vocab) or (1, vocab), float32, on the CPU."""
        return prefill(self.config, self.weights, tokens, self.state, self.cache, every=every, ops=OPS)

    def step(self, token):
        """Logits (vocab,), float32, of what follows one token: the steps of ref.mamba2."""
        weights, state, cache = self.weights, self.state, self.cache
        x = weights.embedding[token].float().numpy()
        states = state.conv[:, 0].numpy(), state.ssm[:, 0].numpy()
        if cache is not None:
            cache.reserve(cache.length + 1)
            states += cache.keys, cache.values, cache.length
        way = fused if fused.takes(self.config, weights.arrays) else step
        found = way.token_logits(self.config, weights.arrays, x, *states, threads=self.threads)
        state.length += 1
        if cache is not None:
            cache.advance(1)
        return torch.from_numpy(found)


class Mapped(mamba2_weights.Loader):
    """Weights where they lie: matrices and the embedding stay in the file and its type; the rest is float32."""

    def __init__(self, config, checkpoint, progress):
        super().__init__(config, checkpoint, progress, torch.float32, 16, torch.device("cpu"))

    def take(self, *names):
        parts = [self.checkpoint[name] for name in names]
        for name, part in zip(names, parts):
            expect_finite(name, part)
            self.progress(part.nbytes)
        return parts[0] if len(parts) == 1 else torch.cat(parts), parts

    taken = take

    def vector(self, *names):
        return super().vector(*names).float()

    def matrix(self, *names):
        return super().matrix(*names) if len(names) == 1 else (cpu.Stack(*(self.matrix(n)[0] for n in names)), names)
