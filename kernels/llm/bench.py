"""Measure a token of a whole model on a GPU: random weights in the shapes of Mistral-7B and Llama-3.2-1B.

The rungs are the steps of kernels/llm/step.py: one token, at a fixed place in its text, from the token to the logits.
In a CUDA graph a rung is what a text costs a token; as called, what its launches cost from Python. Its bytes are those
of every weight, of a row of the embedding, and of the keys and values of the tokens so far. Peers are whole programs
(kernels/llm/peers), timed by their own clock, one after another, alone on the card.
"""

import functools
import importlib.util
import itertools

import numpy as np
import torch

from kernels import benching, kv_cache, running
from kernels.attention import decoding
from kernels.gemv import RING
from kernels.llm import attending, peers, shapes
from kernels.llm.step import OneOperationEach, TorchOperations, best
from kernels.lowbit import SOURCES as LOWBIT
from kernels.lowbit import fused
from lab import Ladder, cuda_timing
from lab.check import Verdict
from lab.figure import Figure

MODELS = [(shapes.MISTRAL_7B, 16), (shapes.MISTRAL_7B, 8), (shapes.MISTRAL_7B, 4), (shapes.LLAMA_1B, 16)]
ROOMS = {128: 1024, 4096: 5120}  # tokens so far, and for how many there is room, as models.gpu makes it
TOKEN = 17
NUMBERS = {16: {torch.float16: "fp16", torch.bfloat16: "bf16"}, 8: "int8", 4: "int4"}
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of the logits: all layers round, one after another

HERE = "kernels/llm/"
STEP = (HERE + "step.py", HERE + "embed.cu", HERE + "rope_append.cu", *decoding.SOURCES)
FUSION = tuple(f"kernels/fusion/{name}" for name in ("norm_qkv.cu", "norm_glu.cu", "gemv_residual.cu", "launches.py"))
ATTEND = attending.SOURCES
ELEMENTS = ("kernels/fusion/rmsnorm.cu", "kernels/fusion/elementwise.cu")
GEMV = ("kernels/gemv/gemv.cu", "kernels/gemv/plan.py")
KV_SOURCES = (*kv_cache.SOURCES, HERE + "rope_append_quantized.cu")
FUSED = {16: (*STEP, *FUSION), 8: (*STEP, *fused.SOURCES), 4: (*STEP, *fused.SOURCES)}
APART = {16: (*STEP, *ELEMENTS, *GEMV), 8: (*STEP, *ELEMENTS, *LOWBIT), 4: (*STEP, *ELEMENTS, *LOWBIT)}


def ladders(seconds=0.2):
    """Check, then time, every rung and peer. Returns a Ladder for each model, bits of a weight, and length.

    Ours come first, while nothing else runs on the card. Then peers make themselves ready, those of a length at once,
    which takes a minute or two, and are timed one after another.
    """
    cuda_timing.expect_gpu("the ladder of a whole model")
    cases = [case for case in _cases() if running.wants(title(*case))]
    found = {}
    for (shape, bits), group in itertools.groupby(cases, key=lambda case: case[:2]):
        benching.empty()
        weights = shapes.random_weights(shape, bits, benching.DEVICE)
        for case in group:
            found[case] = ladder_of(*case, weights, seconds)
        del weights
    benching.empty()
    if not running.only_called():
        beside_peers(found)
    return list(found.values())


def beside_peers(found):
    """Put peers' rows into these ladders: {(shape, bits, length): Ladder}. Those of a length at a time, as each holds
    weights of its own on the card."""
    for length in ROOMS:
        ladders = {case: ladder for case, ladder in found.items() if case[2] == length}
        with peers.started(ladders) as beside:
            peers.wait(beside)
            for case, ladder in ladders.items():
                if others := [figure for peer in beside[case] if (figure := _figure(peer, ladder))]:
                    ladder.figures += others
                    running.done(ladder)


def _cases():
    return [(shape, bits, length) for shape, bits in MODELS for length in ROOMS]


def title(shape, bits, length):
    """Of a model's ladder."""
    return f"{shape.name}, {numbers_of(shape, bits)}, a token behind {length - 1}"


def numbers_of(shape, bits):
    """What its weights are called: "fp16"."""
    return NUMBERS[16][shape.dtype] if bits == 16 else NUMBERS[bits]


def ladder_of(shape, bits, length, weights, seconds):
    """The ladder of our rungs."""
    cache = shapes.RandomCache(shape, length, ROOMS[length], device=benching.DEVICE)
    wanted = shapes.wanted_logits(shape, weights, cache, TOKEN)
    facts = {"bytes": weights.bytes + cache.bytes, "flops": flops_of(shape, length)}
    ladder = Ladder(title(shape, bits, length), **benching.BOUND)
    steps = dict(rungs(shape, bits, weights, length))
    ours = {name: step for name, (step, _) in steps.items() if not name.startswith("PyTorch")}
    benching.ahead(part for step in ours.values() for part in step.parts(cache))
    for name, (step, sources) in steps.items():
        error = checked(f"{ladder.title}: {name}", step, cache, wanted, shape.dtype)
        verdict = Verdict(shapes=1, error=error)
        ladder.plan(name, functools.partial(step.launch, cache), verdict=verdict, sources=sources, **facts)
    benching.measure(ladder, seconds, sustain=list(ours)[-2:])
    ladder.calls.clear()
    return running.done(ladder)


def rungs(shape, bits, weights, length, device=None):
    """Yield (title, (Step, its sources)), from the slowest on."""

    def step(kind, pdl=False, weights=weights, **options):
        found = kind(shape, weights, shape.dtype, device or benching.DEVICE, pdl=pdl, **options)
        found.token.fill_(TOKEN)
        found.kv_len.fill_(length)
        return found

    if bits == 16:
        yield "PyTorch's operations", (step(TorchOperations, length=length), (HERE + "step.py",))
    for pdl in (False, True):
        ring = RING if pdl and bits == 16 else ()  # gemv has it with PDL alone
        yield f"a kernel for each operation{', PDL' * pdl}", (step(OneOperationEach, pdl), (*APART[bits], *ring))
    ready = weights if bits == 16 else shapes.in_pairs(weights)
    for one in (False, True):
        name = "attention in one launch, too" if one else "norms, GLU and additions in the products"
        for pdl in (False, True):
            sources = (*FUSED[bits], *(ATTEND if one else ()))
            yield name + ", PDL" * pdl, (step(best(ready), pdl, weights=ready, one_attention=one), sources)
    if importlib.util.find_spec("kernels.llm.one_launch"):
        one_launch = importlib.import_module("kernels.llm.one_launch")
        if one_launch.takes(shape, bits):
            yield "one launch", (step(one_launch.OneLaunch), (HERE + "step.py", *one_launch.SOURCES))


def checked(where, step, cache, wanted, dtype):
    """The error of a step's logits by the norm; ValueError if it is wrong."""
    step.logits.fill_(torch.nan)
    step.launch(cache)
    benching.wait()
    error = float((step.logits.double() - wanted).norm() / wanted.norm())
    if not error <= TOLERANCE[dtype]:
        raise ValueError(f"{where} is not right, so it is not timed: relative error {error:.2g}")
    return error


def flops_of(shape, length):
    """Of a token: two for each weight, four for each query head, token and channel."""
    layer = shape.hidden * (2 * shape.q_rows + 2 * shape.kv_rows + 3 * shape.ffn)
    mix = 4 * shape.n_layers * shape.n_heads * length * shape.head_dim
    return 2 * (shape.n_layers * layer + shape.vocab * shape.hidden) + mix


def _figure(peer, ladder):
    """A peer's row beside ours, by the same bytes and the same roof; None, after a sentence, if it has none."""
    if (found := peer.measured()) is None:
        return None
    (name, timing), ours = found, ladder.figures[0]
    roof = float(np.median([figure.roof for figure in ladder.figures if figure.sources]))
    share = ours.bytes / timing.median / roof
    return Figure(name, bytes=ours.bytes, flops=ours.flops, timing=timing, share=share, bound="read")
