"""How long a server's step takes: measured parts, and a law between them.

seconds = launches and weights + flops / rate + layers · attention

    launches and weights   a step of one token without attention, measured (kernels/llm, "The law of a step"); or, where
                           they are stored, steps of 1 to 16 texts (models/measure_several.py), and lines between them
    flops / rate           of every further row: tokens that go through the products side by side, and what attention
                           multiplies for a prompt's. The rate is that of measured prompts (kernels/llm)
    attention              of the tokens that are decoded: bytes / rate + a price for a launch, fitted to measured
                           cells (kernels/paged where they are stored, else kernels/attention; of PDL launches)

The law is exact at its ends only: one row of a cache in one piece, and prompts of 512 and 4,096 tokens, which it meets
within 8 %. Over pages a launch has the price of batches, and one row counts for 4 % more. Between the ends it is
pessimistic, unless steps of several texts are stored, since weights are read while rows are multiplied. Those steps are
models/paged.py's: in 16 bits its products of few rows take nearly twice what chapter 17's engine takes for one text.
Sampling and the host count nothing.
"""

from dataclasses import dataclass, replace

import numpy as np

from lab import results
from lab.law import fit
from ref.roofline import MISTRAL_7B

WEIGHTS, FLOPS, READ, PRICE = 3.3e-3, 4.5e14, 4.6e12, 2.4e-6  # about an H200's, where no stored run says it
BLOCKS = 132  # that share attention: an H200's multiprocessors


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of a model in 16 bits, on a card.

    weights  s;  flops  flop/s;  read  bytes/s;  price  s of each layer's attention beyond its bytes;  source  whence
    several  ((rows, s), ...), rising: steps without attention that were measured. More rows take what weights and flops
             say, and no less than the last of these
    """

    weights: float = WEIGHTS
    flops: float = FLOPS
    read: float = READ
    price: float = PRICE
    model: object = MISTRAL_7B  # a ref.roofline.ModelConfig
    blocks: int = BLOCKS
    several: tuple = ()
    source: str = "about an NVIDIA H200: nothing is stored"

    @property
    def token_bytes(self):
        """Of a token's keys and values, in one layer."""
        return 4 * self.model.n_kv_heads * self.model.head_dim

    def step(self, lens, prompts=(), *, fair=True, shared=0):
        """Seconds of a step.

        lens     tokens that each decoded token sees, its own among them
        prompts  (new, behind) of each prompt, or part of one: new tokens behind so many others
        fair     True: blocks share the bytes evenly; False: a block has a request's kv head, and the longest decides
        shared   tokens at the beginning of all of `lens` that are the same, and read once for all; 0: none
        """
        rows = len(lens) + sum(new for new, _ in prompts)
        m = self.model
        scores = sum(m.layers * self._scores(new, behind + (new + 1) / 2) for new, behind in prompts)
        seconds = self.products(rows) + scores / self.flops
        return seconds + m.layers * self.attention(lens, fair, shared) if lens else seconds

    def products(self, rows):
        """Seconds of a step of so many rows without attention."""
        each = 2 * (self.model.matrix_weights - self.model.vocab * self.model.hidden) / self.flops
        if not self.several:
            return self.weights + rows * each
        counts, seconds = zip(*self.several)
        measured = float(np.interp(rows, counts, seconds))
        return measured if rows <= counts[-1] else max(measured, self.weights + rows * each)

    def attention(self, lens, fair=True, shared=0):
        """Seconds of one layer's attention of tokens that are decoded."""
        if shared and len(lens) > 1:
            once = shared + sum(lens) - len(lens) * shared
            multiplying = self._scores(len(lens), shared) / self.flops  # overlaps with the reading of the rest
            return max(once * self.token_bytes / self.read, multiplying) + 2 * self.price  # and merges
        reading = sum(lens) * self.token_bytes / self.read
        if not fair:
            longest = max(lens) * self.token_bytes / self.model.n_kv_heads  # of a block, at its part of the rate
            reading = max(reading, longest * self.blocks / self.read)
        return reading + self.price

    def _scores(self, rows, seen):
        """flops of one layer's attention: scores and mix of so many tokens that see so many."""
        return 4 * rows * seen * self.model.n_heads * self.model.head_dim


def stored_times(card="NVIDIA H200", caches=("paged", "attention")):
    """StepTimes of Mistral-7B in fp16 from the stored runs of a card; what is not stored is about an H200's.

    caches: the topics whose cells say what attention takes, over pages or in one piece: the first that is stored
    """
    llm, found, sources = results.stored_on("llm", card=card), {}, []
    law = llm.table("The law of a step: Mistral-7B, fp16, PDL") if llm else None
    if law:
        found["weights"] = 1e-6 * law.rows["without attention"]["µs"]
        sources.append(law.source)
    prompts = llm.table("Prompts, Mistral-7B, fp16") if llm else None
    if law and prompts:
        found["flops"] = _rate(found["weights"], prompts.rows)
        sources.append(prompts.source)
    for topic in caches:
        run = results.stored_on(topic, card=card)
        cells = _cells(run) if run else []
        if len(cells) > 1:
            found["read"], found["price"] = map(float, fit(cells))
            sources.append(run.source)
            break
    if len(found) == 4:
        found["source"] = "; ".join(dict.fromkeys(sources))
    times, run = StepTimes(**found), results.stored_on("llm", "several", card)
    measured = run.table("A step of several texts: Mistral-7B, fp16") if run else None
    return replace(times, several=_without_attention(times, measured.rows)) if measured else times


def _without_attention(times, rows):
    """((rows, s), ...) of {"4 texts": {"128 tokens, µs": ...}, ...}, less what attention takes of it."""
    found = []
    for name, row in rows.items():
        count = int(name.split()[0])
        found.append((count, 1e-6 * row["128 tokens, µs"] - times.model.layers * times.attention([128] * count)))
    return tuple(sorted(found))


def _rate(weights, prompts):
    """flop/s of prompts' rows, in the mean of {"512 tokens": {"ours, ms": ..., "ours, TFLOP/s": ...}, ...}."""
    rates = []
    for row in prompts.values():
        seconds = 1e-3 * row["ours, ms"]
        rates.append(1e12 * row["ours, TFLOP/s"] * seconds / (seconds - weights))
    return sum(rates) / len(rates)


def _cells(run):
    """(bytes, launches, seconds) of the stored cells of attention with Mistral-7B's heads, 16 bits, up to 4 GB. Not
    those of a shared prefix, whose bytes are counted once, and read once for each request."""
    begins = "decode bf16, batch", "decode bf16, Llama-3.1-8B: 32/8 heads of 128", "paged decode bf16, "
    ladders = [x for x in run.ladders if x.title.startswith(begins) and "prefix" not in x.title]
    figures = [f for x in ladders for f in x.figures if f.name == "decode, PDL" and f.bytes < 4e9]
    return [(f.bytes, 1, f.timing.median) for f in figures]
