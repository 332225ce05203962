"""What chapters 12 and 13 try beside their ladders (`python -m kernels.trials ssd`), on the 2.7B model's layer.

- `chunk_scan` with loads ahead of their use, and with a program for a whole or half a chunk where programs are few;
- rung 4 with dt made once, the first of rung 5's two changes, alone;
- rung 1 without its barriers, many times: how often are its bits other ones?
- kernels that go on for seconds, with the card's clock and power beside them.
"""

import functools
import math
import subprocess
import time
import types

import numpy as np
import torch
import triton

from kernels.attention import bench
from kernels.attention.bench import Row, ladder_of, short
from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, published, registers, segments, state_passing
from kernels.ssd.bench import LONG, TOLERANCE, checked, copies, inputs, truth
from kernels.ssd.calls import prepare
from kernels.ssd.five import CHUNK, SOURCES, five, least, work
from kernels.ssd.fused import SOURCES as FUSED
from kernels.ssd.fused import fused
from kernels.ssd.rungs import RUNGS
from kernels.ssd.tiles import chunk_decay_once
from lab import cuda_timing
from lab.table import Table

HERE = "kernels/ssd/trials.py"
LAYER = 80, 64, 1, 128  # heads, headdim, groups, dstate
FEW_TOKENS = 2048  # where chunks of 256 make no more than chunk_scan.FEW programs
STAGES = (2, 3)
RUNS = 200
SECONDS, REST = 2.5, 1.0  # of each kernel that goes on, and of the card before it
BEGINNING, END = 0.02, 0.5  # seconds: what counts as its beginning, and as its end
QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--loop-ms=20"]


def with_names(kernel, **names):
    """A Triton function that finds other functions behind these names of its module."""
    function = kernel.fn
    return triton.jit(types.FunctionType(function.__code__, function.__globals__ | names, function.__name__))


walk_chunks_once = with_names(registers.walk_chunks, chunk_decay=chunk_decay_once)
walk_once = with_names(segments.walk, chunk_decay=chunk_decay_once, walk_chunks=walk_chunks_once)


def fused_once(x, dt, A, B, C, *, chunk_size=None, **options):
    """Rung 4 with dt made once. Arguments and results: kernels.ssd.calls."""
    call = prepare("fused_once", x, dt, A, B, C, chunk_size, **options)
    return segments.run_segments("fused_once", walk_once, call, None, segments.STOP, None, None)


def ladders(seconds=0.1):
    """Trials that are times. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of SSD")
    return [_scan(LONG, seconds), _scan(FEW_TOKENS, seconds), _once(seconds)]


def _scan(seqlen, seconds):
    """chunk_scan as it is and otherwise: with loads ahead, and by whole and half chunks."""
    bench.empty()
    call = inputs(seqlen)
    x, B, C, D = (call[name] for name in ("x", "B", "C", "D"))
    sizes, cum = chunk_cumsum.chunk_cumsum(call["dt"], call["A"], CHUNK, dt_bias=call["dt_bias"], dt_softplus=True)
    CB = chunk_bmm.chunk_bmm(B, C, CHUNK)
    added, strange = chunk_state.chunk_state(x, B, sizes, cum)
    starts, _ = state_passing.state_passing(added, cum, seqlen)
    variants = {f"num_stages={n}": {"num_stages": n} for n in STAGES}
    if seqlen == FEW_TOKENS:
        variants = {"a whole chunk a program": {"share": CHUNK}}  # as it is, half of one
    moved, flops = work(1, seqlen, *LAYER, CHUNK)["chunk_scan"]
    facts = {"wanted": truth(call), "tolerance": TOLERANCE[x.dtype], "bytes": moved, "flops": flops}
    rows, cold = [], math.ceil(cuda_timing.COLD / (8 * x.nbytes))
    for name, options in ({"as it is": {}} | variants).items():
        outs = [torch.full_like(x, torch.nan) for _ in range(cold)]
        calls = [
            functools.partial(chunk_scan.run, xs, C, CB, sizes, cum, ss, strange, D, None, None, out, **options)
            for xs, ss, out in zip(_copies(x, cold), _copies(starts, cold), outs)
        ]
        rows.append(Row(name, calls, outs=outs, sources=(*SOURCES, HERE), **facts))
    return ladder_of(f"trial: chunk_scan, 2.7B, {short(seqlen)}, chunk {CHUNK}", rows, seconds)


def _copies(tensor, count):
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def _once(seconds):
    """Rungs 4 and 5, and between them rung 4 with the first of the two changes."""
    bench.empty()
    call = inputs(LONG)
    moved, flops = least(1, LONG, *LAYER)
    facts = {"wanted": truth(call), "tolerance": TOLERANCE[torch.float16], "bytes": moved, "flops": flops}
    four, five_ = RUNGS[3:5]
    rows = []
    for title, function, sources in (
        (four.title, four.function, four.sources),
        ("two-pass segments, dt once", fused_once, (*four.sources, HERE)),
        (five_.title, five_.function, five_.sources),
    ):
        every = copies(call)
        outs = [torch.full_like(each["x"], torch.nan) for each in every]
        calls = [functools.partial(function, **each, out=out) for each, out in zip(every, outs)]
        rows.append(Row(title, calls, outs=outs, verdict=checked(function), sources=sources, **facts))
    return ladder_of(f"trial: SSD prefill, 2.7B, {short(LONG)}", rows, seconds)


def tables():
    """Trials that are no times of one call. Returns the Tables."""
    return [without_barriers(), kept_up()]


def without_barriers():
    """Runs of rung 1 on the same inputs, with its barriers and without, and how many differ in a bit from the first."""
    bench.empty()
    call, rows = inputs(LONG), {}
    wanted = published.fused_published(**call)
    for name, barrier in (("with barriers", True), ("without", False)):
        out, differ = torch.empty_like(wanted), 0
        for _ in range(RUNS):
            out.fill_(torch.nan)
            differ += not torch.equal(published.fused_published(**call, barrier=barrier, out=out), wanted)
        rows[name] = {"runs": RUNS, "with other bits": differ}
    title = f"{RUNGS[0].title}, {short(LONG)}: bits of many runs"
    return Table(title, rows, (*RUNGS[0].sources, HERE))


def kept_up():
    """Kernels that run without a pause: a call at their beginning and at their end, the card's clock and power."""
    bench.empty()
    call = inputs(LONG)
    probe, _ = cuda_timing.flops_probe()
    rows = {
        "fused.cu": _kept_up([functools.partial(fused, **each) for each in copies(call)]),
        f"five, chunk {CHUNK}": _kept_up([functools.partial(five, **each, chunk_size=CHUNK) for each in copies(call)]),
        "a product of 8192 × 8192 matrices": _kept_up([probe]),
    }
    return Table(f"SSD, 2.7B, {short(LONG)}, for {SECONDS} seconds", rows, (*SOURCES, *FUSED, HERE))


def _kept_up(calls):
    """One row: a graph of these calls, replayed for SECONDS."""
    graph = cuda_timing.Graph(calls)
    torch.cuda.synchronize()
    with subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True) as watch:
        time.sleep(REST)
        ends = np.cumsum([0, *graph.replays(math.ceil(SECONDS / graph.seconds))])
        watch.terminate()
        lines = watch.stdout.read().splitlines()
    seen = [[float(word) for word in line.split(",")] for line in lines if line.count(",") == 1]
    return summary(ends, graph.calls, seen)


def summary(ends, calls, seen):
    """A row of kept_up. ends: seconds at which replays of so many calls had ended, from 0 on; seen: (MHz, W) while they
    ran."""
    if not seen:
        raise RuntimeError(f"{QUERY[0]} said nothing of clock and power")
    took, (clocks, power) = 1e3 * np.diff(ends) / calls, np.array(seen).T
    last = max(1, int(len(seen) * END / ends[-1]))
    return {
        "at first, ms": float(np.median(took[ends[1:] <= max(BEGINNING, ends[1])])),
        "at the end, ms": float(np.median(took[ends[1:] >= ends[-1] - END])),
        "clock at most, MHz": int(clocks.max()),
        "clock at the end, MHz": int(np.median(clocks[-last:])),
        "power at the end, W": int(np.median(power[-last:])),
    }
