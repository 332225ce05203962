"""What chapters 12, 13 and 15 try beside their ladders (`python -m kernels.trials ssd`), on the 2.7B model's layer.

- `chunk_scan` with loads ahead of their use, and with a program for a whole or half a chunk where programs are few;
- rung 4 with dt made once, the first of rung 5's two changes, alone;
- fused.cu with pairs by themselves and in bundles, on long sequences;
- rung 1 without its barriers, many times: how often are its bits other ones?
- kernels that go on for seconds, with the card's clock and power beside them.
"""

import contextlib
import functools
import importlib
import math
import multiprocessing
import subprocess
import threading
import time
import types
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
import triton

from kernels.attention import bench
from kernels.attention.bench import Row, ladder_of, short
from kernels.ssd import chunk_bmm, chunk_cumsum, chunk_scan, chunk_state, published, registers, segments, state_passing
from kernels.ssd.arguments import NO_LIMIT, expect_ssd
from kernels.ssd.bench import LONG, TOLERANCE, copies, inputs, row_of, truth
from kernels.ssd.calls import prepare
from kernels.ssd.five import CHUNK, SOURCES, five, least, work
from kernels.ssd.fused import SOURCES as FUSED
from kernels.ssd.fused import fused
from kernels.ssd.rungs import RUNGS
from kernels.ssd.tiles import chunk_decay_once
from lab import Rung, cuda_timing
from lab.table import Table

fused_module = importlib.import_module("kernels.ssd.fused")  # kernels.ssd.fused is the function
HERE = "kernels/ssd/trials.py"
LAYER = 80, 64, 1, 128  # heads, headdim, groups, dstate
BUNDLED = 128 << 10  # tokens
FEW_TOKENS = 2048  # where chunks of 256 make no more than chunk_scan.FEW programs
STAGES = (2, 3)
RUNS = 200
SECONDS, REST = 2.5, 1.0  # of each kernel that goes on, and of the card before it
BEGINNING, END = 0.02, 0.5  # seconds: what counts as its beginning, and as its end
QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]


def with_names(kernel, **names):
    """A Triton function that finds other functions behind these names of its module."""
    function = kernel.fn
    made = types.FunctionType(function.__code__, function.__globals__ | names, function.__name__, function.__defaults__)
    made.__annotations__ = function.__annotations__  # which arguments are constants
    return triton.jit(made)


walk_chunks_once = with_names(registers.walk_chunks, chunk_decay=chunk_decay_once)
walk_once = with_names(segments.walk, chunk_decay=chunk_decay_once, walk_chunks=walk_chunks_once)


def fused_once(x, dt, A, B, C, *, chunk_size=None, **options):
    """Rung 4 with dt made once. Arguments and results: kernels.ssd.calls."""
    call = prepare("fused_once", x, dt, A, B, C, chunk_size, **options)
    return segments.run_segments("fused_once", walk_once, call, None, segments.STOP, None, None)


def ladders(seconds=0.1):
    """Trials that are times. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of SSD")
    compile_ahead()
    scans = [_scan(LONG, seconds), _scan(FEW_TOKENS, seconds)]
    return [*scans, _once(seconds), _bundles(False, seconds), _bundles(True, seconds)]


def compile_ahead():
    """What Triton compiles, in processes of their own: one after another would take minutes. What fails there is
    compiled later, and fails there."""
    apart = multiprocessing.get_context("spawn")
    with contextlib.suppress(Exception), ProcessPoolExecutor(len(WARM), apart) as pool:
        list(pool.map(_warm, WARM))


def _warm(name):
    with contextlib.suppress(Exception):
        WARM[name](inputs(LONG))
        torch.cuda.synchronize()


def _variants(seqlen):
    """{name: options of chunk_scan.run}"""
    if seqlen == FEW_TOKENS:
        return {"as it is": {}, "a whole chunk a program": {"share": CHUNK}}  # as it is, half of one
    return {"as it is": {}} | {f"num_stages={n}": {"num_stages": n} for n in STAGES}


def _before_scan(call):
    """What chunk_scan reads besides x, C and D, as it takes them: C Bᵀ, dt, cum, states, strange."""
    x, B, C = (call[name] for name in ("x", "B", "C"))
    sizes, cum = chunk_cumsum.chunk_cumsum(call["dt"], call["A"], CHUNK, dt_bias=call["dt_bias"], dt_softplus=True)
    CB = chunk_bmm.chunk_bmm(B, C, CHUNK)
    added, strange = chunk_state.chunk_state(x, B, sizes, cum)
    starts, _ = state_passing.state_passing(added, cum, x.shape[1])
    return CB, sizes, cum, starts, strange


def _scanned(call, **options):
    out = torch.empty_like(call["x"])
    return chunk_scan.run(call["x"], call["C"], *_before_scan(call), call["D"], None, None, out, **options)


def _scan(seqlen, seconds):
    """chunk_scan as it is and otherwise: with loads ahead, and by whole and half chunks."""
    bench.empty()
    call = inputs(seqlen)
    x, C, D = (call[name] for name in ("x", "C", "D"))
    CB, sizes, cum, starts, strange = _before_scan(call)
    moved, flops = work(1, seqlen, *LAYER, CHUNK)["chunk_scan"]
    facts = {"wanted": truth(call), "tolerance": TOLERANCE[x.dtype], "bytes": moved, "flops": flops}
    rows, cold = [], math.ceil(cuda_timing.COLD / (8 * x.nbytes))
    for name, options in _variants(seqlen).items():
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
    once = Rung("once", "two-pass segments, dt once", fused_once, (*four.sources, HERE))
    rows = [row_of(rung, copies(call), **facts) for rung in (four, once, five_)]
    return ladder_of(f"trial: SSD prefill, 2.7B, {short(LONG)}", rows, seconds)


def _bundles(slow, seconds):
    """fused.cu with pairs of heads by themselves, and with two and four side by side."""
    bench.empty()
    call = inputs(BUNDLED, slow=slow)
    moved, flops = least(1, BUNDLED, *LAYER)
    facts = {"wanted": truth(call), "tolerance": TOLERANCE[torch.float16], "bytes": moved, "flops": flops}
    rows = []
    for together in (1, 2, 4):
        every = copies(call)
        outs = [torch.full_like(each["x"], torch.nan) for each in every]
        calls = [in_bundles(together, each, out) for each, out in zip(every, outs)]
        name = "pairs by themselves" if together == 1 else f"{together} pairs in a bundle"
        rows.append(Row(name, calls, outs=outs, sources=(*FUSED, HERE), **facts))
    return ladder_of(f"trial: bundles, 2.7B, {short(BUNDLED)}{', slow decay' if slow else ''}", rows, seconds)


def in_bundles(together, call, out):
    """A function that launches fused.cu for this call, with so many pairs in a bundle; it writes to `out`."""
    x, dt, A, B, C, D, dt_bias = (call[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias"))
    problem = expect_ssd("trial", x, dt, A, B, C, D=D, dt_bias=dt_bias)
    how = False, call["dt_softplus"], NO_LIMIT, fused_module.STOP  # one sequence
    ready = fused_module._prepare(problem, x, dt, B, C, D, None, dt_bias, None, *how, together=together)

    def launch():
        fused_module._launch(ready, dt, A, D, dt_bias, None, out, None)
        return out

    return launch


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
    graph, done, seen = cuda_timing.Graph(calls), threading.Event(), []
    torch.cuda.synchronize()
    time.sleep(REST)
    watch = threading.Thread(target=_watch, args=(done, seen))
    watch.start()
    ends = np.cumsum([0, *graph.replays(math.ceil(SECONDS / graph.seconds))])
    done.set()
    watch.join()
    return summary(ends, graph.calls, seen)


def _watch(done, seen):
    """Append (MHz, W) to `seen`, again and again until it is done. Where nobody can say it, nothing is appended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while not done.is_set():
            said = subprocess.run(QUERY, capture_output=True, text=True).stdout
            clock, power = said.splitlines()[0].split(",")
            seen.append((float(clock), float(power)))


def summary(ends, calls, seen):
    """A row of kept_up. ends: seconds at which replays of so many calls had ended, from 0 on; seen: (MHz, W) meanwhile,
    or nothing."""
    took = 1e3 * np.diff(ends) / calls
    row = {
        "at first, ms": float(np.median(took[ends[1:] <= max(BEGINNING, ends[1])])),
        "at the end, ms": float(np.median(took[ends[1:] >= ends[-1] - END])),
    }
    if seen:
        clocks, power = np.array(seen[:-1] or seen).T  # the last may have been asked for at the end
        last = max(1, int(len(clocks) * END / ends[-1]))
        row["clock at most, MHz"] = int(clocks.max())
        row["clock at the end, MHz"] = int(np.median(clocks[-last:]))
        row["power at the end, W"] = int(np.median(power[-last:]))
    return row


WARM = {  # what compile_ahead calls
    **{f"chunk_scan {name}": functools.partial(_scanned, **options) for name, options in _variants(LONG).items()},
    "half a chunk": functools.partial(_scanned, share=CHUNK // 2),
    "rung 4": lambda call: RUNGS[3].function(**call),
    "dt once": lambda call: fused_once(**call),
    "rung 5": lambda call: RUNGS[4].function(**call),
    "with barriers": lambda call: published.fused_published(**call),
    "without": lambda call: published.fused_published(**call, barrier=False),
}
