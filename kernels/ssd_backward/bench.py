"""Measure the SSD layer's training step on a GPU: forward and backward of the Mamba-2 2.7B model's layer, 2K to 128K.

80 heads, headdim 64, dstate 128, one group, batch 1, dt_bias and softplus, D; inputs as kernels.ssd.bench draws them.
Beside ours stand mamba_ssm's kernels (peers.py), tuned at each length and at their best chunk size, in a CUDA graph and
as called. Bytes and flops are what the layer asks for (`least`), so that percentages of the roof compare. The gradient
of x of each row is held against float64 before it is timed and after; all gradients in the table of errors.

One ladder more is of a whole training step, 64 layers at 8K (training.py). Tables: peak memory above the inputs, of
which all counts that the allocator ever held, results too; and how far each gradient is off, over several draws.
"""

import functools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from kernels import running
from kernels.benching import Row, empty, ladder_of, peer_rows, short
from kernels.ssd import bench as prefill
from kernels.ssd import fused as forward
from kernels.ssd.bench import told
from kernels.ssd.fused import SOURCES as FORWARD
from kernels.ssd_backward import few, fused, peers, plain, training
from kernels.ssd_backward.few import SOURCES as FEW
from kernels.ssd_backward.fused import SOURCES as FUSED
from kernels.ssd_backward.plain import SOURCES as PLAIN
from kernels.ssd_backward.plain import wide_gradients
from kernels.ssd_backward.work import least
from lab import cuda_timing
from lab.table import Table

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (8192, 131072, 2048, 32768)  # the most telling first: a run may be ended early
ALONE = 8192  # tokens of the ladders of the backward pass alone
ACCURATE = 4096  # tokens of the table of errors
DRAWS = 4  # of its inputs: dA is one number for each head, and of one draw a few heads decide
PEER_CHUNKS = (256, 128)  # what mamba_ssm's layers ask for, and what may be faster
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the gradient of x, ‖found − ref‖ / ‖ref‖
COPIES, FEW_COPIES = 24, 2  # of the inputs, at most; and for rungs that move many times as much as L2 holds
PEER = "mamba_ssm"


class Entry(NamedTuple):
    """A row of ours: a rung of the backward pass."""

    title: str
    function: object
    sources: tuple
    both: bool = True  # whether it is timed behind the forward, too


RUNGS = [
    Entry("plain", plain, PLAIN, both=False),
    Entry("few", few, FEW),
    Entry("fused", fused, FUSED),
]


class Case(NamedTuple):
    """What a ladder is about."""

    kind: str  # of DTYPES
    seqlen: int
    both: bool = True  # forward and backward, or backward alone

    @property
    def title(self):
        return f"SSD {'forward and ' if self.both else ''}backward, 2.7B, {self.kind}, {short(self.seqlen)}"


CASES = [  # ladders of one dtype and length follow each other: mamba_ssm is tuned once for them
    Case(kind, n, both) for kind in DTYPES for n in LENGTHS for both in ((True, False) if n == ALONE else (True,))
]


def ladders(seconds=0.03, parts=()):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the SSD backward ladders")
    cases = [case for case in CASES if running.wants(case.title)]
    kinds = {case.kind for case in cases} | ({"bf16"} if running.wants(training.TITLE) else set())
    told("compiling ahead", compile_ahead, sorted(kinds))
    found = [told(case.title, measure, case, seconds) for case in cases]
    return found + told("whole training steps", training.ladders)


def tables():
    """Peak memory, and errors of the gradients."""
    return [told("peak memory", memory), *(told(f"errors, {kind}", errors, kind) for kind in DTYPES)]


def compile_ahead(kinds):
    """Compile ours and mamba_ssm's on all cores, in processes of their own, which leave it in Triton's cache."""
    jobs = [("peer", kind, part) for part in range(len(peers.PARTS)) for kind in kinds]
    if peers.peers.mamba() is None:
        jobs = []
    jobs += [("ours", kind, 0) for kind in kinds]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # of threads that wait for processes
        list(pool.map(_apart, jobs))


def _apart(job, seconds=90):
    """What fails here is compiled later, and fails there."""
    command = [sys.executable, "-m", "kernels.ssd_backward.bench", *map(str, job)]
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(command[2:])}: no result within {seconds} seconds")


def _compile(what, kind, part):
    call = inputs(ALONE, DTYPES[kind])
    if what == "peer":
        peers.compile_part(call, PEER_CHUNKS[0], part)
    else:
        few(**call)


def inputs(seqlen, dtype, slow=False):
    """Random arguments of a backward call by name, on the card."""
    call = prefill.inputs(seqlen, dtype=dtype, slow=slow)
    return {"dy": torch.randn_like(call["x"])} | call


def copies(call):
    """The call's arguments, several times over, so that each call finds its cache cold."""
    count = min(COPIES, math.ceil(cuda_timing.COLD / call["x"].nbytes))
    again = ("dy", "x", "dt", "B", "C")
    return [call, *({k: v.clone() if k in again else v for k, v in call.items()} for _ in range(count - 1))]


def truth(call):
    """All gradients in float64. → Gradients"""
    dy, rest = call["dy"], {name: value for name, value in call.items() if name != "dy"}
    return wide_gradients(dy, **rest, wide=torch.float64)


def measure(case, seconds):
    """The rungs, and mamba_ssm at its best chunk size. Returns the Ladder."""
    empty()
    call = inputs(case.seqlen, DTYPES[case.kind])
    moved, flops = least(case.seqlen, case.both)
    facts = {"wanted": truth(call).x, "bytes": moved, "flops": flops, "tolerance": TOLERANCE[DTYPES[case.kind]]}
    every = copies(call)
    rows = [
        Row(title, calls, sources=sources, **facts)
        for title, calls, sources in (_ours(entry, every, case.both) for entry in RUNGS if entry.both or not case.both)
    ]
    if peers.peers.mamba() is not None:
        peers.tune_quickly(anew=case.both)
        modes = {f"chunk {q}": functools.partial(_theirs, every, q, case.both) for q in PEER_CHUNKS}
        rows += peer_rows([(PEER, modes)], ladder=case.title, **facts)
    return ladder_of(case.title, rows, seconds)


def _ours(entry, every, both):
    if not both:
        every = every[: len(every) if entry.both else FEW_COPIES]
        return entry.title, [functools.partial(_backward, entry.function, each) for each in every], entry.sources
    calls = [functools.partial(_both, entry.function, each) for each in every]
    return f"fused forward, {entry.title} backward", calls, (*FORWARD, *entry.sources)


def _backward(function, call):
    return function(**call).x


def _both(function, call):
    forward(**{name: value for name, value in call.items() if name != "dy"})
    return function(**call).x


def _theirs(every, chunk_size, both):
    make = peers.forward_and_backward if both else peers.backward
    return [functools.partial(_first, make(each, chunk_size)) for each in every]


def _first(call):
    return call().x


def _steps(call):
    """{row: a function that goes forward and backward}"""
    found = {f"fused forward, {e.title} backward": functools.partial(_both, e.function, call) for e in RUNGS if e.both}
    if peers.peers.mamba() is not None:
        found |= {f"{PEER}, chunk {q}": peers.forward_and_backward(call, q) for q in PEER_CHUNKS}
    return found


def memory():
    """MB above the inputs that a forward and a backward ask for at the same time, results among them."""
    rows = {}
    for seqlen in sorted(LENGTHS):
        empty()
        call = inputs(seqlen, torch.bfloat16)
        for name, step in _steps(call).items():
            step()  # tunes, and makes what stays
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            rows.setdefault(name, {})[short(seqlen)] = round((torch.cuda.max_memory_allocated() - before) / 1e6)
    sources = dict.fromkeys((*FORWARD, *FEW, *FUSED, "kernels/ssd_backward/bench.py"))
    return Table("SSD forward and backward, 2.7B, bf16: peak memory above the inputs, MB", rows, (*sources,))


def errors(kind):
    """‖found − truth‖ / ‖truth‖ of each gradient over DRAWS of the inputs, of ours and mamba_ssm's, with the usual and
    with slow decays; and whether three runs gave the same bits."""
    rows = {}
    for slow in (False, True):
        sums = {}
        for _ in range(DRAWS):
            empty()
            call = inputs(ACCURATE, DTYPES[kind], slow)
            wanted = truth(call)
            functions = {entry.title: functools.partial(entry.function, **call) for entry in RUNGS}
            if peers.peers.mamba() is not None:
                functions[PEER] = peers.backward(call, PEER_CHUNKS[0])
            for name, function in functions.items():
                _add(sums.setdefault(f"{name}, slow decay" if slow else name, {}), function, wanted)
        for name, found in sums.items():
            same = found.pop("the same bits")
            rows[name] = {k: math.sqrt(off / size) for k, (off, size) in found.items()} | {"the same bits": same}
    sources = dict.fromkeys((*PLAIN, *FEW, *FUSED, "kernels/ssd_backward/bench.py"))
    return Table(f"SSD backward, 2.7B, {kind}, {short(ACCURATE)}: errors against float64", rows, (*sources,))


def _add(sums, function, wanted):
    """Add to ‖found − truth‖² and ‖truth‖² of each gradient."""
    function()  # tunes, where that is needed: some of mamba_ssm's kernels add to what the last try has left
    found, *again = (function() for _ in range(3))
    same = all(torch.equal(a, b) for more in again for a, b in zip(found, more) if a is not None)
    sums["the same bits"] = "yes" if same and sums.get("the same bits") != "no" else "no"
    for name, right in wanted._asdict().items():
        if right is not None:
            off, size = sums.get(name, (0.0, 0.0))
            off += float((getattr(found, name).double() - right).square().sum())
            sums[name] = off, size + float(right.square().sum())


if __name__ == "__main__":
    _compile(sys.argv[1], sys.argv[2], int(sys.argv[3]))
