"""What chapter 05 tries beside its ladders (`python -m kernels.trials fusion`), bf16, Mistral-7B's shapes.

Gate and up with other hints on the copies that bring their weights, and the whole layer in one launch without the three
barriers of the grid. What the latter computes is wrong, so it is not checked; what it takes is the price of all else.
"""

import functools
import math

import torch

from kernels import benching
from kernels.fusion import bench, norm_glu
from kernels.fusion.launches import HERE, layer_plan, plan, shape_of
from lab import cuda, cuda_timing
from lab.check import Verdict
from lab.source import inlined
from ref.roofline import MISTRAL_7B

MODEL, DTYPE, EPS = MISTRAL_7B, torch.bfloat16, bench.EPS
OWN, HINT, BARRIER = "kernels/fusion/trials.py", "cache_hint.L2::128B", "    grid_barrier(barrier);\n"
HINTS = {"128 bytes at once": HINT, "256 bytes at once": "cache_hint.L2::256B", "no hint": "cache_hint"}
COPY = ("kernels/fusion/norm_glu.cu", bench.PLAN)


def ladders(seconds=0.1):
    """The variants, timed side by side with the kernels that they vary. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of fusion")
    return [_hints(seconds), _barriers(seconds)]


def tables():
    """There are none."""
    return []


def _hints(seconds):
    """Gate and up by what a copy of 16 bytes asks the cache to fetch."""
    benching.empty()
    rows, cols = MODEL.ffn, MODEL.hidden
    device = benching.DEVICE
    x, norm = torch.randn(cols, device=device).to(DTYPE), (1 + torch.randn(cols, device=device) / 10).to(DTYPE)
    both = (torch.randn(2, rows, cols, device=device) * cols**-0.5).to(DTYPE)
    copies = cuda_timing.cold_copies(both)
    inputs = [(x, norm, *copy) for copy in copies]
    normed = x.double() * norm.double() / (x.double().square().mean() + EPS).sqrt()
    gate, up = (W.double() @ normed for W in both)
    facts = {"bytes": both.nbytes + 2 * x.nbytes + 2 * rows, "flops": 2 * both.numel(), "verdict": Verdict()}
    facts |= {"wanted": torch.nn.functional.silu(gate) * up, "tolerance": 2 * torch.finfo(DTYPE).eps}
    found = []
    for title, hint in HINTS.items():
        run, sources = (norm_glu, COPY) if hint == HINT else (functools.partial(_hinted, hint), (*COPY, OWN))
        found.append(benching.our_row(title, run, inputs, x.new_empty(rows), sources=sources, **facts))
    return benching.ladder_of(f"trial: norm, gate and up, bf16, {rows} × {cols}", found, seconds)


def _hinted(hint, x, norm, W_gate, W_up, *, out):
    grid, threads, shared, *sizes = plan(x.device, len(W_gate), len(x), 2)
    kernel = hinted(hint, x.dtype, *sizes)
    kernel(grid, threads, x, norm, W_gate, W_up, out, len(W_gate), len(x), EPS, shared=shared)
    return out


@functools.cache
def hinted(hint, dtype, *sizes):
    """norm_glu with another hint on cp.async."""
    return variant("norm_glu.cu", HINT, hint, dtype, sizes).norm_glu


def _barriers(seconds):
    """A layer in one launch, as it is and without barriers between its steps."""
    benching.empty()
    layers = [bench.random_layer(MODEL, DTYPE, benching.DEVICE)]
    moved, flops = layers[0].work()
    layers += [
        bench.random_layer(MODEL, DTYPE, benching.DEVICE)
        for _ in range(max(1, math.ceil(cuda_timing.COLD / moved) - 1))
    ]
    x = torch.randn(MODEL.hidden, device=benching.DEVICE).to(DTYPE)
    found = []
    for pdl in (False, True):
        for title, run, sources in (
            ("1 launch", type(layers[0]).one_launch, ()),
            ("1 launch, without its barriers", without_barriers, (OWN,)),
        ):
            calls = [functools.partial(run, it, x, pdl=pdl) for it in layers]
            facts = {"bytes": moved, "flops": flops, "sources": ("kernels/fusion/layer.cu", bench.PLAN, *sources)}
            found.append(benching.Row(f"{title}, PDL" if pdl else title, calls, **facts))
    return benching.ladder_of("trial: decoder layer without attention, bf16, barriers", found, seconds)


def without_barriers(layer, x, *, pdl=False):
    """one_launch, but no block waits for another: what a step reads may not have been written."""
    hidden, kv_rows, ffn = len(layer.attention_norm), len(layer.Wk), len(layer.W_gate)
    grid, threads, shared, *sizes = layer_plan(x.device, hidden, kv_rows, ffn)
    weights = [getattr(layer, name) for name in layer.names]
    args = (x, *weights, layer.qkv, layer.h, layer.a, layer.y, layer.barrier, hidden, kv_rows, ffn, EPS)
    unordered(x.dtype, *sizes)(grid, threads, *args, shared=shared, pdl=pdl)
    return layer.y


@functools.cache
def unordered(dtype, *sizes):
    """layer.cu without barriers of the grid; those of a block stay."""
    return variant("layer.cu", BARRIER, "    __syncthreads();\n", dtype, sizes, times=3).layer


def variant(name, old, new, dtype, sizes, times=1):
    """The module of a source, its headers and all, in which a piece, found so many times, is replaced."""
    source = inlined(HERE / name)
    if source.count(old) != times:
        raise RuntimeError(f"{name} must have {old!r} {times} times: the trial replaces it")
    return cuda.compile(source.replace(old, new), [f"-DSHAPE={shape_of(dtype, *sizes)}"], name=name)
