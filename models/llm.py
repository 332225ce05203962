"""A language model from a folder on disk: load it, ask for logits, let it write.

Llama 2 and 3, Mistral, Qwen2 and Qwen3, as Hugging Face lays them out: config.json, safetensors, tokenizer.json; and
Mamba-2, as mamba_ssm or transformers lays it out, and Bamba, its hybrid. ref/llm.py and ref/mamba2.py say what is
computed. Where: on the processor by chapter 02's kernels (models/cpu.py, models/mamba2_cpu.py), on a card by those of
chapters 04, 05, 08, 15 and 18 (models/gpu.py, models/mamba2_gpu.py), or, for small models, by the same on the SIMT
machine.
"""

import torch

from lab.arguments import expect_count
from models import several
from models.config import BadModel, read_config
from models.mamba2_config import Config as Mamba2Config
from models.sampling import expect_sampling
from models.weights import Checkpoint

ENGINES = "graph", "one_launch"
MOST = 16  # texts at once: rows that products in few bits take


def load(folder, *, device=None, bits=16, kv_bits=16, engine="graph", progress=None, gpus=1):
    """The model of a folder.

    device    "cpu": the processor; "cuda" or "cuda:1": a card; "simt": the card's kernels on the SIMT machine; None: a
              card where there is one, else the processor
    bits      of a weight: 16, 8 (a scale for each row) or 4 (a scale and a zero for each 128 columns), quantised as
              they are read. On the processor 16: weights stay as they are stored, fp32 too; on a card fp32 becomes bf16
    kv_bits   of a number of the cache: 16, or on a card 8 (a scale for each token and head) or 4 (one for 32 channels,
              or 16), quantised as they are written; head_dim is then a multiple of 16
    engine    on a card, how a token runs: "graph", a CUDA graph of launches, or "one_launch", a single one, for weights
              and a cache of 16 bits on compute capability 9.0 and newer (kernels/llm/one_launch.py says what else)
    progress  called with (bytes so far, bytes in all) while weights are read; None: nothing is shown
    gpus      over how many cards, 2 to 8 of this host that reach each other's memory, by heads and columns
              (models/shares.py): a number, which divides those of heads, kv heads and ffn; or a
              models.exchanges.Processes, where each process of torch.distributed has one. In 16 bits, for
              models without states; one text at a time

    models.config.BadModel, a ValueError, says what a folder lacks or holds otherwise than its config says.
    """
    if type(gpus) is not int or gpus != 1:
        return _over_several(folder, device, bits, kv_bits, engine, progress, gpus)
    device = _expect_place(device, bits, kv_bits, engine)
    config = read_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        counting = _counting(checkpoint.bytes, progress)
        if device == "cpu":
            return Model(config, _processor(config)(config, checkpoint, counting))
        where = torch.device("cpu" if device == "simt" else device)
        return Model(config, _card(config)(config, checkpoint, counting, where, bits, kv_bits, engine=engine))


def _over_several(folder, device, bits, kv_bits, engine, progress, gpus):
    """The model of a folder over several devices."""
    from models import across, exchanges, shares

    if isinstance(gpus, exchanges.Processes):
        device, exchange = "cuda" if gpus.on_cards else "simt", gpus
    else:
        device = _expect_place(device or ("cuda" if torch.cuda.is_available() else "simt"), bits, kv_bits, engine)
        exchange = exchanges.several(gpus, device)
    config = read_config(folder)
    if engine not in ENGINES:
        raise ValueError(f"load: engine must be {' or '.join(map(repr, ENGINES))}, got {engine!r}")
    shares.expect_divisible(config, exchange.count, bits, kv_bits)
    with Checkpoint(folder, config) as checkpoint:
        parts = [shares.CheckpointShare(checkpoint, rank, exchange.count) for rank in exchange.ranks]
        total = sum(part.bytes(exchange.on_cards) for part in parts)
        return Model(config, across.Engine(config, checkpoint, _counting(total, progress), exchange, engine=engine))


def _processor(config):
    """The kind of engine that runs such a model on the processor. What runs the others is not imported."""
    if isinstance(config, Mamba2Config):
        from models.mamba2_cpu import Engine
    else:
        from models.cpu import Engine
    return Engine


def _card(config):
    """The same on a card, or its kernels on the SIMT machine."""
    if isinstance(config, Mamba2Config):
        from models.mamba2_gpu import Engine
    else:
        from models.gpu import Engine
    return Engine


class Model:
    """A loaded model. config: a models.config.Config, or a models.mamba2_config.Config."""

    def __init__(self, config, engine):
        self.config, self.engine = config, engine

    @property
    def device(self):
        """The torch device that its weights are on."""
        return self.engine.weights.embedding.device

    @property
    def devices(self):
        """Over how many devices it lies."""
        return self.engine.exchange.count if hasattr(self.engine, "exchange") else 1

    @property
    def simulated(self):
        """Whether the card's kernels run on the SIMT machine."""
        return self.device.type == "cpu" and hasattr(self.engine, "launch")

    def logits(self, tokens):
        """What the model expects after each token: (len(tokens), vocab) float32, on the CPU.

        tokens  ids, from 1 to config.context of them
        """
        ids = self._expect_tokens("logits", tokens)
        self.engine.reset()
        return self.engine.prefill(torch.tensor(ids), every=True).cpu()

    def generate(self, tokens, max_tokens, *, temperature=0.0, top_k=None, top_p=None, seed=None):
        """An iterator of the token ids that follow, at most max_tokens; it ends before an id of config.stops.

        temperature  0: always the likeliest; above: logits are divided by it, and a token is drawn
        top_k        only the so many likeliest tokens are drawn from
        top_p        only the fewest likeliest ones whose probabilities sum to so much
        seed         the same seed gives the same ids; None: a new one each time

        It also ends when the context is full. A model keeps one text at a time: going on with an older iterator, once
        `logits` or `generate` has begun another, is a RuntimeError. ValueError or TypeError at the call names what is
        wrong.
        """
        ids = self._expect_tokens("generate", tokens)
        max_tokens = expect_count("generate", "max_tokens", max_tokens, low=0)
        seed = expect_sampling(temperature, top_k, top_p, seed)
        return self._generate(ids, max_tokens, seed, temperature, top_k, top_p)

    def generate_several(self, texts, max_tokens, *, temperature=0.0, top_k=None, top_p=None, seeds=None, at_once=16):
        """An iterator of (number, token id): what follows each of several texts, as `generate` has it for one.

        texts    sequences of token ids
        seeds    one for each text: with its own, a text is drawn as it is alone; None: new ones each time
        at_once  texts that are worked on at a time, from 1 to 16: the others wait, and enter when one has ended. On a
                 card their caches lie in pages of one pool, and a step of all reads each weight once; on the processor
                 they take turns

        A text ends before an id of config.stops, with max_tokens, or when the context is full. On a card its products
        are not those of `generate`, and logits differ in their last bits; but not by who else is there, so that a text
        is the same, bit for bit, beside any others with the same at_once.

        Not for models with states (Mamba-2): a models.config.BadModel says so.
        """
        texts = [self._expect_tokens("generate_several", text) for text in texts]
        max_tokens = expect_count("generate_several", "max_tokens", max_tokens, low=0)
        if expect_count("generate_several", "at_once", at_once) > MOST:
            raise ValueError(f"generate_several: at_once must be at most {MOST}, got {at_once}")
        seeds = [None] * len(texts) if seeds is None else list(seeds)
        if len(seeds) != len(texts):
            raise ValueError(f"generate_several: seeds must be one for each text, {len(texts)}, got {len(seeds)}")
        seeds = [expect_sampling(temperature, top_k, top_p, seed) for seed in seeds]
        if self.devices > 1:
            raise BadModel(f"generate_several: a model over {self.devices} devices keeps one text at a time")
        if isinstance(self.config, Mamba2Config):
            raise BadModel("generate_several: a model with states keeps one text at a time")
        return self._generate_several(texts, max_tokens, seeds, (temperature, top_k, top_p), at_once)

    def _generate_several(self, texts, max_tokens, seeds, sampling, at_once):
        engine = self.engine
        jobs = [several.Text(number, ids, max_tokens, seed) for number, (ids, seed) in enumerate(zip(texts, seeds))]
        if hasattr(engine, "launch"):
            from models.paged import Pages

            engine.reset()
            places = Pages(engine, at_once, [several.tokens_of(job, engine.context) for job in jobs])
        else:
            places = several.Turns(engine, at_once)
        return several.write(places, jobs, engine.context, self.config.stops, sampling)

    def step_bytes(self, position):
        """Bytes that the step of the token at a position must move: it reads every weight, a row of the embedding, and
        the keys and values of the tokens that attention sees, its own among them, in the cache's bits; it reads and
        writes a Mamba-2's states. Over several devices: each of them."""
        c = self.config
        seen = min(position + 1, c.window or position + 1)
        row = c.hidden * self.engine.weights.embedding.element_size()
        return self.engine.read_bytes + row + self.engine.token_bytes * seen + self.engine.state_bytes

    def _generate(self, ids, max_tokens, *sampling):
        if max_tokens:
            for token in self.engine.write(ids, max_tokens, *sampling):
                if token in self.config.stops:
                    return
                yield token

    def _expect_tokens(self, where, tokens):
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        if not ids:
            raise ValueError(f"{where}: tokens must hold at least one token id, got none")
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"{where}: tokens must be whole numbers, got {token!r} at place {place}")
            if not 0 <= token < self.config.vocab:
                raise ValueError(f"{where}: token ids must be below {self.config.vocab}, got {token} at place {place}")
        if len(ids) > self.engine.context:
            raise ValueError(f"{where}: this model takes at most {self.engine.context} tokens here, got {len(ids)}")
        return ids


def _expect_place(device, bits, kv_bits, engine):
    """Raise unless these are offered. Returns the device by its name."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = isinstance(device, (str, torch.device)) and str(device).split(":")[0] in ("cpu", "cuda", "simt")
    if not known:
        raise ValueError(f"load: device must be 'cpu', 'cuda', 'simt' or None, got {device!r}")
    device = str(device)
    if device in ("cpu:0", "simt:0"):
        device = device[:-2]
    if ":" in device and not device.startswith("cuda"):
        raise ValueError(f"load: there is one {device.split(':')[0]!r}, got {device!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"load: device {device!r} needs an NVIDIA GPU, and PyTorch finds none here")
    offered = (16,) if device == "cpu" else (16, 8, 4)
    for name, value in (("bits", bits), ("kv_bits", kv_bits)):
        if isinstance(value, bool) or value not in offered:
            there = " on the processor" if device == "cpu" else ""
            raise ValueError(f"load: {name} must be {', '.join(map(str, offered))}{there}, got {value!r}")
    if engine not in ENGINES or (device == "cpu" and engine != ENGINES[0]):
        there = f" on a card, {ENGINES[0]!r} on the processor" if device == "cpu" else ""
        raise ValueError(f"load: engine must be {' or '.join(map(repr, ENGINES))}{there}, got {engine!r}")
    return device


def _counting(total, progress):
    done = 0

    def add(bytes_):
        nonlocal done
        done += bytes_
        if progress is not None:
            progress(done, total)

    return add
