"""A language model of the Llama family from a folder on disk: load it, ask for logits, let it write.

Llama 2 and 3, Mistral, Qwen2 and Qwen3, as Hugging Face lays them out: config.json, safetensors, tokenizer.json.
ref/llm.py says what is computed. Where: on the processor by chapter 02's kernels (models/cpu.py).
"""

import torch

from lab.arguments import expect_count
from models.config import read_config
from models.sampling import choose, expect_sampling, uniform
from models.weights import Checkpoint


def load(folder, *, device=None, bits=16, kv_bits=16, progress=None):
    """The model of a folder.

    device    "cpu"; None: that, too
    bits      of a weight: 16 (as they are stored: bf16, fp16 or fp32)
    kv_bits   of a number of the cache: 16
    progress  called with (bytes so far, bytes in all) while weights are read; None: nothing is shown

    models.config.BadModel, a ValueError, says what a folder lacks or holds otherwise than its config says.
    """
    _expect_place(device, bits, kv_bits)
    config = read_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        from models.cpu import Engine

        return Model(config, Engine(config, checkpoint, _counting(checkpoint.bytes, progress)))


class Model:
    """A loaded model. config: a models.config.Config."""

    def __init__(self, config, engine):
        self.config, self.engine = config, engine

    def logits(self, tokens):
        """What the model expects after each token: (len(tokens), vocab) float32, on the CPU.

        tokens  ids, from 1 to config.context of them
        """
        ids = self._expect_tokens("logits", tokens)
        self.engine.reset()
        return self.engine.prefill(torch.tensor(ids), every=True)

    def generate(self, tokens, max_tokens, *, temperature=0.0, top_k=None, top_p=None, seed=None):
        """An iterator of the token ids that follow, at most max_tokens; it ends before an id of config.stops.

        temperature  0: always the likeliest; above: logits are divided by it, and a token is drawn
        top_k        only the so many likeliest tokens are drawn from
        top_p        only the fewest likeliest ones whose probabilities sum to so much
        seed         the same seed gives the same ids; None: a new one each time

        It also ends when the context is full. ValueError or TypeError at the call names what is wrong.
        """
        ids = self._expect_tokens("generate", tokens)
        max_tokens = expect_count("generate", "max_tokens", max_tokens, low=0)
        seed = expect_sampling(temperature, top_k, top_p, seed)
        return self._generate(ids, max_tokens, seed, temperature, top_k, top_p)

    def step_bytes(self, position):
        """Bytes that the step of the token at a position must read, with the types that are kept here."""
        return self.config.step_bytes(position, self.engine.weight_bytes, self.engine.kv_bytes)

    def _generate(self, ids, max_tokens, seed, *sampling):
        engine = self.engine
        engine.reset()
        logits = engine.prefill(torch.tensor(ids))[0] if max_tokens else None
        for count in range(max_tokens):
            token = int(choose(logits, uniform(seed, len(ids) + count), *sampling))
            if token in self.config.stops:
                return
            yield token
            if count + 1 == max_tokens or len(ids) + count >= self.config.context:
                return
            logits = engine.step(token)

    def _expect_tokens(self, where, tokens):
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        if not ids:
            raise ValueError(f"{where}: tokens must hold at least one token id, got none")
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"{where}: tokens must be whole numbers, got {token!r} at place {place}")
            if not 0 <= token < self.config.vocab:
                raise ValueError(f"{where}: token ids must be below {self.config.vocab}, got {token} at place {place}")
        if len(ids) > self.config.context:
            raise ValueError(f"{where}: this model takes at most {self.config.context} tokens, got {len(ids)}")
        return ids


def _expect_place(device, bits, kv_bits):
    if device not in (None, "cpu"):
        raise ValueError(f"load: device must be 'cpu' or None, got {device!r}")
    if bits != 16 or isinstance(bits, bool):
        raise ValueError(f"load: bits must be 16 on the CPU, where weights are read as they are stored, got {bits!r}")
    if kv_bits != 16 or isinstance(kv_bits, bool):
        raise ValueError(f"load: kv_bits must be 16 on the CPU, got {kv_bits!r}")


def _counting(total, progress):
    done = 0

    def add(bytes_):
        nonlocal done
        done += bytes_
        if progress is not None:
            progress(done, total)

    return add
