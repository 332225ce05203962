"""What chapter 07 tries beside its second ladder (`python -m kernels.trials kv_cache`): words of `mix_flight`.

The rung asks for batches of 8 words of 16 bytes. Here it has smaller batches, and narrower words, on the values of the
ladder at 32,768 tokens. A variant is compiled from the rung's source with its own options.
"""

import functools

import torch

from kernels import benching
from kernels.attention import bench
from kernels.kv_cache import rungs
from lab import Rung, cuda, cuda_timing

TOKENS = 32768
WORDS = [(8, 8), (8, 4), (8, 2), (8, 1), (4, 8), (2, 8)]  # (VEC, halves in a word; BATCH, words asked for together)
SOURCES = "kernels/kv_cache/mix_flight.cu", "kernels/kv_cache/rungs.py", "kernels/kv_cache/trials.py"


def mix_flight(vec, batch, att, v, *, out=None):
    """Rung 7 with batches of so many words of so many halves. The words must fit head_dim and the address of v."""
    out = rungs._expect_all("mix_flight", att, v, out)
    if vec > rungs.words(v):
        raise ValueError(f"mix_flight: v allows words of {rungs.words(v)} halves at most, got {vec}")
    (kv_len, n_kv_heads, head_dim), n_heads = v.shape, att.shape[0]
    module(vec, batch).mix(*rungs.plan(n_heads, head_dim), att, v, out, n_heads, n_kv_heads, kv_len, head_dim)
    return out


@functools.cache
def module(vec, batch):
    """The module of a variant."""
    return cuda.load(rungs.HERE / "mix_flight.cu", [f"-DVEC={vec}", f"-DBATCH={batch}"])


def title(vec, batch):
    """What a variant is called."""
    return f"{batch} word{'s' * (batch > 1)} of {2 * vec} bytes"


def ladders(seconds=0.1):
    """All variants, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of the quantised cache")
    benching.empty()
    variants = [
        Rung(f"mix_flight_{vec}_{batch}", title(vec, batch), functools.partial(mix_flight, vec, batch), SOURCES)
        for vec, batch in WORDS
    ]
    inputs = bench.random_mixes(torch.float32, torch.float16, TOKENS)
    rows = bench.mix_rows(variants, inputs, *rungs.work(*inputs[0]))
    return [benching.ladder_of(f"trial: attention mix, fp16 cache, {TOKENS} tokens", rows, seconds)]


def tables():
    """There are none."""
    return []
