"""What stands beside the ladders of Mamba-2, as a table: what states of 32, 16 and 8 bits are off by after so many
tokens, for heads that remember 10 tokens to 10,000."""

import functools

import torch

from kernels import benching, mamba2
from kernels.mamba2 import stepping
from lab import cuda_timing
from lab.table import Table

TOKENS = 1000, 10_000, 100_000
MEMORIES = 10, 100, 1000, 10_000  # tokens after which a state has decayed by e
HEADS, HEADDIM, DSTATE, STEP = 4, 16, 128, 0.0625  # heads of each memory; the size of their steps
PIECE = 1000  # tokens of a graph
KINDS = {
    "32 bits": lambda h: h.float(), "16 bits": lambda h: h.half(), "8 bits": lambda h: mamba2.QuantizedState.of(h)
}  # fmt: skip


def tables():
    """All of them."""
    cuda_timing.expect_gpu("the studies of Mamba-2")
    return [precision()]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this topic's

    return trials.store("mamba2", roof, versions)


def precision(tokens=TOKENS, piece=PIECE, device=None):
    """A Table: by the norm, how far states are from those in float64. Inputs are random, and new with every token; a
    state is rounded to the nearest with every token."""
    device = device or benching.DEVICE
    nheads = HEADS * len(MEMORIES)
    memory = torch.tensor(MEMORIES, device=device, dtype=torch.float64).repeat_interleave(HEADS)
    A = (-1 / (memory * STEP)).float()
    half = functools.partial(torch.empty, dtype=torch.float16, device=device)
    inputs = x, B, C = half(piece, nheads, HEADDIM), half(piece, 1, DSTATE), half(piece, 1, DSTATE)
    dt, out = half(1, nheads).fill_(STEP), half(1, nheads, HEADDIM)
    truth = torch.zeros(1, nheads, HEADDIM, DSTATE, dtype=torch.float64, device=device)
    decay = torch.exp(A.double() * STEP)[None, :, None, None]
    states = {name: make(truth) for name, make in KINDS.items()}

    def run():
        for t in range(piece):
            for state in states.values():
                mamba2.state_step(state, x[t, None], dt, A, B[t, None], C[t, None], out=out)
            truth.mul_(decay).add_(STEP * x[t, None, :, :, None].double() * B[t].double())

    call, errors = _graph(run, [truth, *states.values()]) if str(device) != "cpu" else run, {}
    for done in range(piece, max(tokens) + 1, piece):
        for tensor in inputs:
            tensor.normal_()
        call()
        if done in tokens:
            errors[done] = {name: _errors(state, truth) for name, state in states.items()}
    rows = {}
    for name in KINDS:
        rows[name] = {f"after {n:,} tokens": errors[n][name][0] for n in errors}
        last = errors[max(errors)][name][1]
        rows[name] |= {f"memory of {m:,} tokens": float(error) for m, error in zip(MEMORIES, last)}
    sources = (*stepping.SOURCES, "kernels/mamba2/studies.py")
    return Table("What a state is off by: 32, 16 and 8 bits", rows, sources)


def _errors(state, truth):
    """(of all heads, of the heads of each memory)."""
    found = state.dequantize() if isinstance(state, mamba2.QuantizedState) else state
    by_memory = lambda t: t.reshape(len(MEMORIES), -1)  # noqa: E731
    off = by_memory(found.double() - truth).norm(dim=1) / by_memory(truth).norm(dim=1)
    return float((found.double() - truth).norm() / truth.norm()), off.tolist()


def _graph(run, states):
    """run as a CUDA graph, with all states 0 before its first replay."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with cuda_timing.no_garbage_collected(), torch.cuda.graph(graph):
        run()
    for state in states:
        for tensor in (state.codes, state.scale) if isinstance(state, mamba2.QuantizedState) else (state,):
            tensor.zero_()
    return graph.replay
