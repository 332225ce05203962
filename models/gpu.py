"""A model on a card by the course's kernels; on the SIMT machine, the same kernels, for small models.

One token is the launches of kernels/llm/step.py, or the one of kernels/llm/one_launch.py. Everything a step needs lies
on the card, the token and the length too, so that one CUDA graph of it is replayed for every token.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from kernels import lowbit
from kernels.llm import one_launch
from kernels.llm.step import best
from kernels.lowbit.fused import Paired
from models import cache
from models.config import BadModel
from models.gpu_weights import Loader
from models.prefill import CARD_CHUNK, linear, prefill
from models.sampling import choose, uniform

COMPILERS = 4  # threads
ROOM = 1024  # a cache's capacity is a multiple of so many tokens


class Engine:
    """Steps of one sequence on a device: a card, or the CPU for the SIMT machine. engine: as models.load has it."""

    def __init__(self, config, checkpoint, progress, device, bits=16, kv_bits=16, pdl=True, engine="graph"):
        self.config, self.device, self.bits, self.kv_bits = config, device, bits, kv_bits
        self.dtype = _dtype(checkpoint)
        if config.head_dim % 8 or config.head_dim > 256:
            raise BadModel(f"load: head_dim must be a multiple of 8 and at most 256 there, got {config.head_dim}")
        if kv_bits != 16 and config.head_dim % 16:
            raise BadModel(f"load: head_dim must be a multiple of 16 for kv_bits={kv_bits}, got {config.head_dim}")
        if engine == "one_launch" and (why := one_launch.refusal(config, bits, kv_bits, device)) is not None:
            raise BadModel(f"load: engine='one_launch' does not run this model there, as engine='graph' does: {why}")
        _expect_room(config, bits, kv_bits, device)
        self.cache, self.compiling = None, []
        self.weights = Loader(config, checkpoint, progress, self.dtype, bits, device).all()
        self.read_bytes = self.weights.read_bytes
        make = one_launch.OneLaunch if engine == "one_launch" else best(self.weights)
        self.token_step = make(config, self.weights, self.dtype, device, pdl=pdl)
        self.token, self.kv_len, self.logits = self.token_step.token, self.token_step.kv_len, self.token_step.logits
        self.reset()
        if device.type == "cuda":
            self._compile_ahead()

    def _compile_ahead(self):
        """Begin to compile what a step launches, on some threads, while the prompt is worked on. They launch it once,
        on a cache without tokens: nothing that counts is written."""
        pool = ThreadPoolExecutor(COMPILERS)
        self.compiling = [pool.submit(self._once, part) for part in self.parts_ahead()]
        pool.shutdown(wait=False)

    def parts_ahead(self):
        """What `_compile_ahead` launches."""
        return self.token_step.parts(self.cache)

    def _once(self, part):
        with torch.cuda.device(self.device), torch.inference_mode():
            part()

    def _compiled(self):
        """Wait for what is compiled ahead; what failed there fails here."""
        jobs, self.compiling = self.compiling, []
        for job in jobs:
            job.result()
        if jobs:
            torch.cuda.synchronize(self.device)

    @property
    def context(self):
        """Tokens, the most: a window is as far as this goes, as attention here sees all there are."""
        return min(self.config.context, self.config.window or self.config.context)

    state_bytes = 0  # that a step reads and writes, whatever the position: a Mamba-2's

    @property
    def token_bytes(self):
        """Bytes of a token's keys and values, in all layers."""
        return self.cache.token_bytes

    def reset(self, tokens=1):
        """Forget all tokens, and have room for so many."""
        room = min(-(-tokens // ROOM) * ROOM, self.context)
        if self.cache is None or self.cache.capacity < tokens:
            self.cache = None
            self.cache = self.make_cache(max(room, tokens))
            self.graphs = {}  # they hold the old one's addresses
        self.cache.clear()
        self.text = object()  # whoever writes one knows by it whether another has begun

    def make_cache(self, capacity):
        """An empty cache for at least so many tokens."""
        return cache.make(self.config, capacity, self.dtype, self.device, self.kv_bits)

    def _reserve(self, tokens):
        if tokens > self.cache.capacity:
            old = self.cache
            self.cache = None
            self.reset(max(tokens, min(2 * old.capacity, self.context)))
            self.cache.take_over(old)

    @torch.inference_mode()
    def prefill(self, tokens, every=False):
        """Logits (n, vocab) or (1, vocab), float32, on the device."""
        self._reserve(self.cache.length + len(tokens))
        return prompt(self.config, self.weights, tokens.to(self.device), self.cache, self.dtype, every=every)

    @torch.inference_mode()
    def step(self, token):
        """Logits (vocab,), float32, on the CPU, of what follows one token."""
        self._reserve(self.cache.length + 1)
        self.cache.advance(1)
        self._compiled()  # as in `write`
        self.token.fill_(token)
        self.kv_len.fill_(self.cache.length)
        self.launch()
        return self.logits.float().cpu()

    def launch(self):
        """One token's launches: from self.token at position self.kv_len - 1 to self.logits."""
        self._compiled()
        self.token_step.launch(self.cache)

    @torch.inference_mode()
    def write(self, ids, max_tokens, seed, *sampling):
        """An iterator of the token ids that follow; on a card, the next step is under way while one is looked at."""
        last = min(len(ids) + max_tokens - 1, self.context)  # tokens that the cache will hold
        self.reset(max(last, len(ids)))
        logits = self.prefill(torch.tensor(ids))[0]
        places = [uniform(seed, len(ids) + count) for count in range(last - len(ids) + 1)]
        places = torch.tensor(places, dtype=torch.float64, device=self.device)
        self.token.copy_(choose(logits, places[0], *sampling).reshape(1))
        yield_, text, greedy = _Outbox(self.device), self.text, sampling[0] == 0
        yield_.put(self.token)
        yield yield_.get()  # at once: the step may have to be compiled yet, and a graph to be made of it
        for position in range(len(ids), last):
            if self.text is not text:
                raise RuntimeError("generate: this model has begun another text since, and keeps one at a time")
            if position == len(ids):
                self._compiled()  # what is compiled ahead is launched, too, and would write where a length says
                self.kv_len.fill_(len(ids) + 1)
            self._replay(greedy)
            if not greedy:
                place = places[position - len(ids) + 1]
                self.token.copy_(choose(self.logits.float(), place, *sampling).reshape(1))
                self.kv_len += 1
            yield_.put(self.token)
            if position > len(ids):
                self.cache.length = position
                yield yield_.get()
        if len(ids) < last:
            if self.text is not text:
                raise RuntimeError("generate: this model has begun another text since, and keeps one at a time")
            self.cache.length = last
            yield yield_.get()

    def _replay(self, greedy=False):
        """The step as one CUDA graph, with the choice of the likeliest token at its end if greedy; on the SIMT machine,
        launch by launch."""
        if self.device.type != "cuda":
            return self._launch(greedy)
        key = self.cache.peaks, greedy
        with torch.cuda.device(self.device):
            if key not in self.graphs:
                before = [(tensor, tensor.clone()) for tensor in self.changed_by_a_step()]
                self._launch(greedy)  # compile, and make what is made once
                for tensor, was in before:
                    tensor.copy_(was)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(self.device)):
                    self._launch(greedy)
                self.graphs = {k: g for k, g in self.graphs.items() if k[0] == key[0]} | {key: graph}  # peaks only rise
            self.graphs[key].replay()

    def changed_by_a_step(self):
        """What a step must not find changed by a launch that was made to compile it."""
        return [self.token, self.kv_len]

    def _launch(self, greedy):
        self.launch()
        if greedy:
            self.token_step.choose()


class _Outbox:
    """Numbers on their way from the card to the host, in order."""

    def __init__(self, device):
        self.card, self.waiting = device.type == "cuda", []

    def put(self, tensor):
        if not self.card:
            self.waiting.append((tensor.clone(), None))
            return
        there, event = torch.empty(1, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
        there.copy_(tensor, non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        self.waiting.append((there, event))

    def get(self):
        there, event = self.waiting.pop(0)
        if event is not None:
            event.synchronize()
        return int(there)


def prompt(config, weights, tokens, cache, dtype, *, every=False):
    """models.prefill of this card's weights; on the SIMT machine's side of things in float32, as a processor multiplies
    16 bits slowly."""
    on_card = tokens.device.type == "cuda"
    how = {"dtype": dtype, "chunk": CARD_CHUNK} if on_card else {}
    return prefill(config, weights, tokens, cache, every=every, product=_product, **how)


def _product(x, W, add=None):
    """linear of weights that may have few bits: they are widened while they are used."""
    if isinstance(W, (lowbit.QuantizedWeight, Paired)):
        W = W.dequantize()
    return linear(x, W.to(x.dtype), add)


def _dtype(checkpoint):
    """float16 or bfloat16: as it is stored; float32 becomes bfloat16, whose range is the same."""
    return torch.float16 if checkpoint.dtypes == {torch.float16} else torch.bfloat16


def bytes_needed(config, bits, kv_bits=16):
    """Bytes of weights and a first cache: matrices in so many bits, the embedding in 16, a cache of ROOM tokens."""
    matrices = config.weights * (bits / 8 + (0.03125 if bits == 4 else 0))  # a scale and a zero for 128 columns
    embedding = 0 if config.tied and bits == 16 else 2 * config.vocab * config.hidden
    # A scale for a head in 8 bits, for 16 channels or more in 4
    token = config.kv_rows * kv_bits / 8 + {16: 0, 8: 2 * config.n_kv_heads, 4: config.kv_rows / 8}[kv_bits]
    return int(matrices + embedding + 2 * config.n_layers * token * ROOM)


def _expect_room(config, bits, kv_bits, device):
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    need = bytes_needed(config, bits, kv_bits)
    if need > free:
        fit = [str(fewer) for fewer in (8, 4) if fewer < bits and bytes_needed(config, fewer, kv_bits) <= free]
        hint = f"; bits={fit[0]} would fit" if fit else ""
        there = f"{device} has {free / 1e9:.1f} GB free"
        raise BadModel(f"load: {there}, and this model needs {need / 1e9:.1f} GB in {bits} bits{hint}")
