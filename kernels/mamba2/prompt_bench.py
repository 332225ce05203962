"""A whole prompt on a GPU, as a ladder of chapter 18: ours beside mamba_ssm's layers, and beside all products alone,
which both run on cuBLAS: what nobody who takes them from there can be faster than (kernels/mamba2/bench.py)."""

import functools
import time

import torch
import torch.nn.functional as F

from kernels import benching, running
from kernels.mamba2 import peers, prompt, shapes
from kernels.ssd import peers as ssd_peers
from kernels.ssd.fused import SOURCES as SSD
from kernels.ssd.stack import IN_A_GRAPH, timed, work
from lab import Ladder, cuda_timing
from lab.figure import Figure

MODEL, LENGTHS = shapes.MAMBA2_2_7B, (8192, 131072)
CHUNK = 256  # of mamba_ssm's five kernels: what its layers ask for, and faster than 128 at both lengths
PRODUCTS = "the products alone, on cuBLAS"
FEW = 4  # layers in which mamba_ssm's kernels are tuned
TOLERANCE = 5e-3  # between ours and mamba_ssm's whole prompt, by the norm
HERE = "kernels/mamba2/"
SOURCES = (
    tuple(HERE + name for name in ("prompt.py", "conv1d.cu", "convolution.py", "add_norm.cu", "gated_norm.cu")) + SSD
)


def title_of(seqlen):
    return f"{MODEL.name}, prefill, {benching.short(seqlen)}"


def prefill(seqlen):
    """All layers of a prompt and the last norm, without embedding and head: mamba_ssm's, with its five kernels, and
    ours; and in_proj and out_proj of all layers, and nothing else. Compared, then timed in turns."""
    begin, title = time.perf_counter(), title_of(seqlen)
    ssd_peers.tune_anew()
    weights = shapes.random_weights(MODEL, benching.DEVICE)
    for layer in weights.layers:  # so that the residual stays of one size
        layer.W_out /= MODEL.n_layers**0.5
    hidden = torch.randn(1, seqlen, MODEL.hidden, device=benching.DEVICE).to(MODEL.dtype)
    ours = functools.partial(_ours, weights, hidden)
    calls, said = {"ours": ours}, {"ours": "against mamba_ssm's"}
    if (theirs := peers.prompt_call(MODEL, weights, hidden, CHUNK)) is not None:
        theirs(FEW)
        wanted, found = theirs(), ours()
        off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        if not off <= TOLERANCE:
            raise ValueError(f"{title}: ours is off by {off:.2g} from mamba_ssm's, allowed are {TOLERANCE:.2g}")
        said = {peers.PROMPT: f"chunk {CHUNK}", "ours": f"{off:.1e} from mamba_ssm's"}
        calls = {peers.PROMPT: theirs} | calls
        del wanted, found
    gated = torch.randn(seqlen, MODEL.d_inner, device=benching.DEVICE).to(MODEL.dtype)
    calls[PRODUCTS], said[PRODUCTS] = functools.partial(_products, weights, hidden[0], gated), "not checked"
    rests_on = {"ours": SOURCES, PRODUCTS: (HERE + "prompt_bench.py",)}
    facts = dict.fromkeys(calls, work(seqlen)) | {PRODUCTS: _work_of_products(seqlen)}
    figures = [
        Figure(
            name=name, bytes=facts[name][0], flops=facts[name][1], timing=timing, called=called, bound="flops",
            checked=said[name], share=facts[name][1] / cuda_timing.flops_probe()[1] / ratio,
            sources=rests_on.get(name, ()),
        )
        for name, (timing, called, ratio) in timed(calls, seqlen <= IN_A_GRAPH).items()
    ]  # fmt: skip
    ladder = Ladder(title, "flops", figures, device="cuda")
    print(f"{title}: {len(figures)} rows in {time.perf_counter() - begin:.1f} s", flush=True)
    return running.done(ladder)


@torch.inference_mode()
def _ours(weights, hidden):
    return prompt.layers(MODEL, weights, hidden[0].float())


def _work_of_products(seqlen):
    """(bytes, flops) of in_proj and out_proj of all layers."""
    c = MODEL
    weights = c.hidden * (c.in_rows + c.d_inner)
    through = 2 * c.hidden + c.in_rows + c.d_inner  # numbers of a token that are read or written
    return c.n_layers * 2 * (weights + seqlen * through), c.n_layers * 2 * seqlen * weights


@torch.inference_mode()
def _products(weights, hidden, gated):
    for layer in weights.layers:
        F.linear(hidden, layer.W_in), F.linear(gated, layer.W_out)
