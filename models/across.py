"""A model over several devices by the course's kernels: cards of one host, or devices of the SIMT machine.

Each device has its share of the weights (models/shares.py) and of the cache, and runs the launches of
kernels/llm/step.py on it. What differs from one device: W_o and W_down, whose sums go to all devices from the epilogue
of the product (kernels.collective.product), and the logits, of which each device makes its rows; or, in one launch,
the same inside of it (kernels/collective/one_launch.py). Sums are the same bits
everywhere, so all devices choose the same token; the host speaks to the first one.
"""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels import llm
from kernels.collective.one_launch import OneLaunches, OneLaunchShare
from kernels.llm.one_launch import refusal
from kernels.llm.step import Step
from models import gpu
from models.cache import Cache
from models.config import BadModel
from models.prefill import CARD_CHUNK, prefill
from models.shares import ShareLoader, expect_divisible, rows_of, share_of


class AllLogits:
    """What a share's step has beside its own: all_logits (vocab,), those of all devices, once they have been added up.
    logits: its own, a part of these."""

    def make_room(self, config, rank, count):
        self.all_logits = torch.zeros(config.vocab, dtype=self.logits.dtype, device=self.device)
        self.logits = self.all_logits[slice(*rows_of(config.vocab, rank, count))]

    def choose(self):
        llm.greedy(self.all_logits, self.token, self.kv_len, self.state, pdl=self.pdl)


class ShareStep(AllLogits, Step):
    """One device's launches of a token, but for the two that exchange."""

    def __init__(self, config, weights, dtype, device, rank, count, **options):
        super().__init__(share_of(config, rank, count), weights, dtype, device, **options)
        self.make_room(config, rank, count)

    def begin(self):
        """Step 1; and zeros for the other devices' logits, so that a sum brings them all. In front of the first
        launch, which waits for it."""
        self.all_logits.zero_()
        super().begin()

    def parts(self, cache):
        """As for one device, but for the launches that wait for others."""
        layer = self.weights.layers[0]
        yield from (self.begin, self.end, functools.partial(self.attend, layer, *cache.layer(0)))
        yield from (functools.partial(self.project, layer), functools.partial(self.feed, layer))


class WholeStep(AllLogits, OneLaunchShare):
    """One device's one launch of a token."""

    def __init__(self, config, weights, dtype, device, rank, count, **options):
        super().__init__(share_of(config, rank, count), weights, dtype, device, rank, count, **options)
        self.make_room(config, rank, count)


class Steps:
    """One token's launches on all devices of this process. steps: a ShareStep for each."""

    kind = ShareStep

    def __init__(self, steps, exchange, pdl=True):
        self.steps, self.exchange, self.pdl = steps, exchange, pdl
        self.token, self.kv_len, self.logits = steps[0].token, steps[0].kv_len, steps[0].all_logits

    def launch(self, cache):
        """From token and kv_len of each device to the logits on each; the same order of launches on all."""
        for step in self.steps:
            step.begin()
        for index in range(len(self.steps[0].weights.layers)):
            layers = [step.weights.layers[index] for step in self.steps]
            for step, layer, part in zip(self.steps, layers, cache.parts):
                step.project(layer)
                step.attend(layer, *part.layer(index))
            self._product([layer.Wo for layer in layers], [s.mixed.view(-1) for s in self.steps], "x", "h")
            for step, layer in zip(self.steps, layers):
                step.feed(layer)
            self._product([layer.W_down for layer in layers], [s.glu for s in self.steps], "h", "x")
        for step in self.steps:
            step.end()
        self.exchange.all_reduce([step.all_logits for step in self.steps], self.pdl)

    def _product(self, Ws, xs, residual, out):
        """out = residual + the sum of W x over devices: steps 6 and 8."""
        residuals, outs = ([getattr(step, name) for step in self.steps] for name in (residual, out))
        self.exchange.product(Ws, xs, residuals, outs, self.pdl)

    def parts(self, cache):
        for step, part in zip(self.steps, cache.parts):
            yield from step.parts(part)

    def choose(self):
        for step in self.steps:
            step.choose()


class WholeSteps(Steps):
    """One launch of a token on each device, and a sum of their logits. steps: a WholeStep for each."""

    kind = WholeStep

    def __init__(self, steps, exchange, pdl=True):
        super().__init__(steps, exchange, pdl)
        self.launches = OneLaunches(steps, exchange.group, exchange.meet)

    def launch(self, cache):
        for step in self.steps:
            step.all_logits.zero_()
        self.launches.launch(cache.parts)
        self.exchange.all_reduce([step.all_logits for step in self.steps], self.pdl)

    def parts(self, cache):
        """Nothing is launched ahead: it would wait. But compiled it can be."""
        for step in self.steps:
            if step.device.type == "cuda":
                yield functools.partial(step.kernel._function, step.device.index)


class Caches:
    """Each device's part of a cache: its kv heads. All have the same tokens."""

    peaks = None

    def __init__(self, parts):
        self.parts = parts

    @property
    def length(self):
        return self.parts[0].length

    @length.setter
    def length(self, length):
        for part in self.parts:
            part.length = length

    @property
    def capacity(self):
        return self.parts[0].capacity

    @property
    def token_bytes(self):
        """Of one device."""
        return self.parts[0].token_bytes

    def advance(self, n):
        self.length += n

    def clear(self):
        self.length = 0

    def take_over(self, old):
        for new, was in zip(self.parts, old.parts):
            new.take_over(was)


class Engine(gpu.Engine):
    """Steps of one sequence over the devices of an exchange (models/exchanges.py). `device`, `token`, `kv_len` and
    `logits` are the first one's of this process; bytes are those of one device."""

    def __init__(self, config, checkpoint, progress, exchange, pdl=True, engine="graph"):
        self.config, self.exchange, self.bits, self.kv_bits = config, exchange, 16, 16
        expect_divisible(config, exchange.count)
        if engine == "one_launch":
            _expect_one_launch(config, exchange)
        self.device, self.dtype = exchange.where[0], gpu._dtype(checkpoint)
        if config.head_dim % 8 or config.head_dim > 256:
            raise BadModel(f"load: head_dim must be a multiple of 8 and at most 256 there, got {config.head_dim}")
        self.places = list(zip(exchange.where, exchange.ranks))
        for device, rank in self.places:
            _expect_room(config, rank, exchange.count, device)
        self.cache, self.compiling, self.told = None, [], False
        how = checkpoint, progress, self.dtype
        loaders = [ShareLoader(config, *how, device, rank, exchange.count) for device, rank in self.places]
        self.shares = [loader.all() for loader in loaders]
        self.weights = self.shares[0]
        self.read_bytes = self.weights.read_bytes
        kind = WholeSteps if engine == "one_launch" else Steps
        steps = [
            kind.kind(config, weights, self.dtype, device, rank, exchange.count, pdl=pdl)
            for weights, (device, rank) in zip(self.shares, self.places)
        ]
        self.token_step = kind(steps, exchange, pdl)
        self.token, self.kv_len, self.logits = self.token_step.token, self.token_step.kv_len, self.token_step.logits
        self.reset()
        if exchange.on_cards:
            self._compile_ahead()

    def make_cache(self, capacity):
        share = share_of(self.config, 0, self.exchange.count)
        return Caches([Cache(share, capacity, self.dtype, device) for device in self.exchange.where])

    def _compiled(self):
        jobs, self.compiling = self.compiling, []
        for job in jobs:
            job.result()
        if jobs:
            self.exchange.synchronize()

    def prefill(self, tokens, every=False):
        """As on one device: each runs the prompt on its share, and their parts meet behind W_o and W_down.

        What is compiled ahead is waited for: nothing is loaded onto a card while a kernel there waits for another."""
        self._compiled()
        self._reserve(self.cache.length + len(tokens))
        self.told = False
        streams = (
            [torch.cuda.current_stream(device) for device in self.exchange.where] if self.exchange.on_cards else []
        )
        meeting = Meeting(len(self.places), self.exchange.add_up)
        parts = meeting.run(lambda n: self._prompt(n, tokens, every, meeting, streams))
        first = rows_of(self.config.vocab, self.places[0][1], self.exchange.count)[0]
        with torch.inference_mode():
            return self.exchange.gather(parts, self.config.vocab, first)

    def _prompt(self, n, tokens, every, meeting, streams):
        """The n-th device's logits of its rows of the head: in a thread of its own, if there are several."""
        device, rank = self.places[n]

        def product(x, W, add=None):
            part = gpu._product(x, W)
            return part if add is None else meeting.add_up(n, part).add_(add)

        how = {"dtype": self.dtype, "chunk": CARD_CHUNK} if self.exchange.on_cards else {}
        config = share_of(self.config, rank, self.exchange.count)
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            for stream in [*streams[:n], *streams[n + 1 :], *streams[n : n + 1]]:  # the last one's device is current
                stack.enter_context(torch.cuda.stream(stream))
            return prefill(
                config, self.shares[n], tokens.to(device), self.cache.parts[n], every=every, product=product, **how
            )  # fmt: skip

    def step(self, token):
        logits = super().step(token)
        self._expect_all_came()
        return logits

    def write(self, *arguments):
        """As on one device. A token of a step in which a device has waited in vain is not given out."""
        for token in super().write(*arguments):
            self._expect_all_came()
            yield token

    def _expect_all_came(self):
        """PeerTimeout if not: what was read has waited for all that ran before, and graphs look at nothing."""
        if self.exchange.group is not None:
            self.exchange.group.check("step")

    def launch(self):
        """One token's launches, behind what the host has said."""
        self._compiled()
        self._tell()
        self.token_step.launch(self.cache)

    def _tell(self):
        """The other devices get the first one's token and length."""
        steps = self.token_step.steps
        for name in ("token", "kv_len"):
            mine, *others = [getattr(step, name) for step in steps]
            self.exchange.pass_on(mine, others)

    def _replay(self, greedy=False):
        """The step as CUDA graphs, one for each card, replayed by turns; on the SIMT machine, launch by launch. With
        the choice of the likeliest token at its end each device knows the next one itself."""
        if not self.exchange.on_cards:
            return self._launch(greedy)
        self.exchange.check()
        if not (greedy and self.told):
            self._tell()
        if greedy not in self.graphs:
            before = [(tensor, tensor.clone()) for tensor in self.changed_by_a_step()]
            self.graphs[greedy] = self.exchange.graph(functools.partial(self._launches, greedy))
            for tensor, was in before:
                tensor.copy_(was)
        self.graphs[greedy].replay()
        self.told = greedy
        return None

    def _launches(self, greedy):
        self.token_step.launch(self.cache)
        if greedy:
            self.token_step.choose()

    def changed_by_a_step(self):
        return [tensor for step in self.token_step.steps for tensor in (step.token, step.kv_len)]


class Meeting:
    """Where the devices' parts of a sum meet: threads, one for each device, bring theirs, and one of them adds up."""

    def __init__(self, count, add_up):
        self.count, self.parts = count, [None] * count
        self.barrier = threading.Barrier(count, action=lambda: add_up(self.parts))

    def run(self, work):
        """[work(0), work(1), ...], side by side. What one raises ends all of them, and is raised here."""
        if self.count == 1:
            return [work(0)]
        with ThreadPoolExecutor(self.count) as pool:
            jobs = [pool.submit(self._guarded, work, n) for n in range(self.count)]
        errors = [job.exception() for job in jobs if job.exception() is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [job.result() for job in jobs]

    def _guarded(self, work, n):
        try:
            return work(n)
        except BaseException:
            self.barrier.abort()
            raise

    def add_up(self, n, part):
        """The n-th device's part, which has become the sum of all."""
        self.parts[n] = part
        self.barrier.wait()
        return part


def _expect_one_launch(config, exchange):
    if exchange.group is None:
        raise BadModel("load: engine must be 'graph' where devices exchange messages, got 'one_launch'")
    why = refusal(share_of(config, 0, exchange.count), device=exchange.where[0])
    if why is not None:
        raise BadModel(
            f"load: engine='one_launch' does not run this model over {exchange.count} devices, as engine='graph' does: "
            f"{why}"
        )


def _expect_room(config, rank, count, device):
    if device.type != "cuda":
        return
    share = share_of(config, rank, count)
    need = gpu.bytes_needed(share, 16) + 2 * (config.vocab - share.vocab) * config.hidden
    need += 2 * config.hidden * (config.q_rows + config.ffn)  # W_o and W_down of a layer, until they are cut
    free, _ = torch.cuda.mem_get_info(device)
    if need > free:
        there = f"{device} has {free / 1e9:.1f} GB free"
        raise BadModel(f"load: {there}, and a share of this model needs {need / 1e9:.1f} GB there")
