"""A whole prompt on a GPU, as a ladder of chapter 18: ours beside mamba_ssm's layers (kernels/mamba2/bench.py)."""

import functools
import time

import torch

from kernels import benching, running
from kernels.mamba2 import peers, prompt, shapes
from kernels.ssd import peers as ssd_peers
from kernels.ssd.fused import SOURCES as SSD
from kernels.ssd.stack import IN_A_GRAPH, seconds, timed, work
from lab import Ladder, cuda_timing
from lab.figure import Figure

MODEL, LENGTHS = shapes.MAMBA2_2_7B, (8192, 131072)
CHUNKS = (256, 128)  # of mamba_ssm's five kernels: what its layers ask for, and what may be faster
FEW = 4  # layers in which the faster is found
TOLERANCE = 5e-3  # between ours and mamba_ssm's whole prompt, by the norm
HERE = "kernels/mamba2/"
SOURCES = (
    tuple(HERE + name for name in ("prompt.py", "conv1d.cu", "operations.py", "add_norm.cu", "gated_norm.cu")) + SSD
)


def title_of(seqlen):
    return f"{MODEL.name}, prefill, {benching.short(seqlen)}"


def prefill(seqlen):
    """All layers of a prompt and the last norm, without embedding and head: mamba_ssm's, with its five kernels at the
    faster of their chunk sizes, and ours. Compared, then timed in turns."""
    begin, title = time.perf_counter(), title_of(seqlen)
    ssd_peers.tune_anew()
    weights = shapes.random_weights(MODEL, benching.DEVICE)
    for layer in weights.layers:  # so that the residual stays of one size
        layer.W_out /= MODEL.n_layers**0.5
    hidden = torch.randn(1, seqlen, MODEL.hidden, device=benching.DEVICE).to(MODEL.dtype)
    ours = functools.partial(_ours, weights, hidden)
    calls, said = {"ours": ours}, {"ours": "against mamba_ssm's"}
    theirs = {chunk: peers.prompt_call(MODEL, weights, hidden, chunk) for chunk in CHUNKS}
    if theirs[CHUNKS[0]] is not None:
        chunk = min(CHUNKS, key=lambda chunk: _seconds_of_few(theirs[chunk]))
        wanted, found = theirs[chunk](), ours()
        off = float((found.double() - wanted.double()).norm() / wanted.double().norm())
        if not off <= TOLERANCE:
            raise ValueError(f"{title}: ours is off by {off:.2g} from mamba_ssm's, allowed are {TOLERANCE:.2g}")
        said = {peers.PROMPT: f"chunk {chunk}, the faster", "ours": f"{off:.1e} from mamba_ssm's"}
        calls = {peers.PROMPT: theirs[chunk]} | calls
        del wanted, found
    moved, flops = work(seqlen)
    figures = [
        Figure(
            name=name, bytes=moved, flops=flops, timing=timing, called=called, bound="flops", checked=said[name],
            share=flops / cuda_timing.flops_probe()[1] / ratio, sources=SOURCES if name == "ours" else (),
        )
        for name, (timing, called, ratio) in timed(calls, seqlen <= IN_A_GRAPH).items()
    ]  # fmt: skip
    ladder = Ladder(title, "flops", figures, device="cuda")
    print(f"{title}: {len(figures)} rows in {time.perf_counter() - begin:.1f} s", flush=True)
    return running.done(ladder)


@torch.inference_mode()
def _ours(weights, hidden):
    return prompt.layers(MODEL, weights, hidden[0].float())


def _seconds_of_few(call):
    """Seconds of a few layers of mamba_ssm's, the least of three times."""
    call(FEW)  # tunes
    return min(seconds(functools.partial(call, FEW)) for _ in range(3))
