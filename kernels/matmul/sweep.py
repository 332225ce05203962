"""Which sizes are fastest? `python -m kernels.matmul.sweep [seconds [file]]` (needs an H100 or H200; four minutes).

All variants of variants.py on square matrices, and on the rows of a prefill: each is held against float64, then timed
in graphs on cold inputs, in turns with cuBLAS. Of each shape the SHOWN fastest are printed, TFLOP/s and the ratio to
cuBLAS; all are in the file, as soon as they are measured. No result is stored.

A kernel that never ends, or touches what it must not, takes its process with it. So a process of its own does the work,
and tells what it begins; one that is silent for SILENCE seconds is killed, and the next goes on behind what it was at.
Of each shape clusters come last; where two of a kind give no result, the others of the kind are left out. When the time
is over (default 240 seconds), all ends in order, and what is measured is printed.
"""

import functools
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter

import torch
import torch.nn.functional as F

from kernels.benching import empty
from kernels.matmul import bench, work
from kernels.matmul.variants import FEW, LARGE, MANY, SOURCE, Variant, changed
from lab import cuda, cuda_timing
from lab.tensors import DTYPES

DTYPE = torch.bfloat16
CHOSEN = Variant("as planned")  # what plan.py chooses
SHAPES = [  # m, n, k, variants
    (4096, 4096, 4096, LARGE),
    (8192, 8192, 8192, LARGE),
    *((512, n, k, FEW) for n, k in bench.LAYERS),
    *((m, n, k, MANY) for m in (2048, 4096, 8192) for n, k in bench.LAYERS if (m, n, k) != (4096, 4096, 4096)),
    *((1024, n, k, [*MANY, *FEW]) for n, k in bench.LAYERS),
    (64, 4096, 4096, FEW),
    (256, 4096, 14336, FEW),
]
TURNS, SHOWN = 3, 5
START, SILENCE = 40.0, 12.0  # seconds until a process has begun a shape, and at most for a variant
MOST_LOST = 2  # variants with one kind of cluster that give no result: the others of the kind are left out
WORKER = sys.executable, "-m", "kernels.matmul.sweep", "worker"


def sources(device):
    """What all variants are compiled from: [(source, options)], each once."""
    found, text = {}, functools.cache(changed)
    for m, n, k, variants in SHAPES:
        for v in [CHOSEN, *variants]:
            if v.fits(m, n, k, device):
                p = v.plan(m, n, k, device)
                shape = p.shape(DTYPES[DTYPE], "Partial" if p.splits > 1 else v.output or "ThroughTma")
                found[text(v.changes), f"-DSHAPE={shape}"] = None
    return list(found)


def compile_one(source, option):
    """For the processes to come, which find it in kept files."""
    try:
        cuda.compile(source, (option,), SOURCE.rpartition("/")[2], "sm_90a").cubin()
    except Exception as error:  # of any kind: the variant's own turn says so
        print(f"{option}: {error}", flush=True)


def compile_ahead(device):
    """All variants, on all cores."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(compile_one, sources(device), chunksize=1)


def say(**facts):
    print(json.dumps(facts), flush=True)


def worker(done):
    """Time what is not done, {(index of a shape, title)}; a line of JSON when a variant begins, and when it ends."""
    for index, (m, n, k, variants) in enumerate(SHAPES):
        waiting = [v for v in _in_order(variants) if (index, v.title) not in done]
        if waiting:
            say(index=index, begins="cuBLAS")
            sweep(index, m, n, k, waiting)


def _in_order(variants):
    """Without a cluster, with, and what is planned; no title twice."""
    unlike = {v.title: v for v in variants}.values()
    return [*sorted(unlike, key=lambda v: _cluster(v) != (1, 1)), CHOSEN]


def _cluster(variant):
    found = dict(variant.chosen).get("cluster", 1)
    return (found, 1) if isinstance(found, int) else found


def _alike(title):
    """All that has the cluster of this variant, on all shapes; nothing where it has none."""
    kinds = {v.title: _cluster(v) for *_, variants in SHAPES for v in variants}
    kind = kinds.get(title, (1, 1))
    return kind, {(i, t) for i in range(len(SHAPES)) for t in kinds if kind != (1, 1) and kinds[t] == kind}


def sweep(index, m, n, k, variants):
    """Check these variants on one shape, and time each in turns with cuBLAS."""
    empty()
    inputs = bench.inputs_of(DTYPE, m, n, k)
    wanted = inputs[0][0].double() @ inputs[0][1].double().T
    norm = float(torch.linalg.vector_norm(wanted))
    outs = [torch.empty(m, n, dtype=DTYPE, device=bench.DEVICE) for _ in inputs]
    cublas = cuda_timing.Graph([functools.partial(F.linear, x, W) for x, W in inputs])
    for variant in variants:
        if not variant.fits(m, n, k, wanted.device):
            continue
        say(index=index, begins=variant.title)
        try:
            calls = [variant.prepare(x, W, y) for (x, W), y in zip(inputs, outs)]
            outs[0].fill_(torch.nan)
            calls[0]()
            error = float(torch.linalg.vector_norm(outs[0].double() - wanted)) / norm
            if not error <= bench.tolerance(DTYPE):  # NaN too
                say(index=index, title=variant.title, wrong=f"WRONG, relative error {error:.2g}")
                continue
            ours, theirs, graph = [], [], cuda_timing.Graph(calls)
            for _ in range(TURNS):
                theirs.append(statistics.median(cublas.turn()))
                ours.append(statistics.median(graph.turn()))
            p = variant.plan(m, n, k, wanted.device)
        except Exception as failed:  # of any kind: the others are still of use
            say(index=index, title=variant.title, wrong=(str(failed) or repr(failed)).splitlines()[0])
            if bench.DEVICE == "cuda":
                torch.cuda.synchronize()  # where the card refuses everything from now on, this process ends
            continue
        taken = statistics.median(ours), statistics.median(theirs)
        say(index=index, title=variant.title, ours=taken[0], theirs=taken[1], plan=_told(p))


def _told(p):
    """A plan in few words."""
    sizes = f"{p.rows}x{p.columns}x{p.consumers} cluster {p.cluster[0]}x{p.cluster[1]} band {p.group}"
    return f"{sizes} stages {p.stages} splits {p.splits} units {p.units} blocks {p.blocks}"


def messages(command, done, silence, end):
    """What a worker says, as dicts, until it ends, is silent for too long, or the time is over. The last tells why."""
    process = subprocess.Popen([*command, json.dumps(sorted(done))], stdout=subprocess.PIPE, text=True)
    lines = queue.SimpleQueue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = max(START, silence)
    try:
        while True:
            left = end - time.perf_counter()
            line = lines.get(timeout=max(0.0, min(patience, left)))
            if line is None:
                yield {"ended": process.wait(timeout=silence)}
                return
            if line.startswith("{"):
                yield (told := json.loads(line))
                patience = max(START, silence) if told.get("begins") == "cuBLAS" else silence
    except (queue.Empty, subprocess.TimeoutExpired):
        over = time.perf_counter() >= end
        yield {"ended": "the time is over" if over else f"silent for {patience:.0f} s, killed"}
    finally:
        process.kill()


def main(seconds=240.0, path=None, command=WORKER, silence=SILENCE):
    """Measure for so long, print, and write all to the file. Returns {index of a shape: messages with times}."""
    cuda_timing.expect_gpu("the sweep")
    begin = time.perf_counter()
    end, done, found = begin + seconds, set(), {}
    compile_ahead(torch.device(bench.DEVICE, 0))
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    with open(path or os.devnull, "w") as file:
        fruitless, lost = 0, Counter()
        while fruitless < 3 and time.perf_counter() < end:
            now = None
            for told in messages(command, done, silence, end):
                if "begins" in told:
                    now = told["index"], told["begins"]
                elif "ended" not in told:
                    done.add((told["index"], told["title"]))
                    _note(told, found, file)
            if told["ended"] == 0 or told["ended"] == "the time is over":
                break
            print(f"a process ended at {now}: {told['ended']}", flush=True)
            if now is None or now[1] == "cuBLAS":
                fruitless += 1
                continue
            fruitless = 0
            if now not in done:
                _note({"index": now[0], "title": now[1], "wrong": f"NO RESULT, {told['ended']}"}, found, file)
            done |= {(index, now[1]) for index in range(len(SHAPES))}  # not again, on no shape
            kind, alike = _alike(now[1])
            lost[kind] += 1
            if alike and lost[kind] == MOST_LOST:
                print(f"no more clusters of {kind}", flush=True)
                done |= alike
    for index in sorted(found):
        _print(index, found[index])
    return found


def _note(told, found, file):
    m, n, k, _ = SHAPES[told["index"]]
    if "wrong" in told:
        print(f"  {m} {n} {k} {told['title']}: {told['wrong']}", flush=True)
        print(f"{m} {n} {k}  {told['title']}: {told['wrong']}", file=file, flush=True)
    else:
        found.setdefault(told["index"], []).append(told)
        print(f"{m} {n} {k}{_line(told)}  | {told['plan']}", file=file, flush=True)


def _line(told):
    m, n, k, _ = SHAPES[told["index"]]
    rate = work(m, n, k)[1] / told["ours"] / 1e12
    return f"  {rate:6.1f} TFLOP/s  {told['theirs'] / told['ours']:5.3f}  {told['title']}"


def _print(index, measured):
    m, n, k, _ = SHAPES[index]
    theirs = statistics.median(told["theirs"] for told in measured)
    rate = work(m, n, k)[1] / theirs / 1e12
    print(f"{m} × {k} times {n} × {k}: cuBLAS {theirs * 1e6:.1f} us, {rate:.1f} TFLOP/s")
    for place, told in enumerate(sorted(measured, key=lambda told: told["ours"] / told["theirs"])):
        if place < SHOWN or told["title"] == CHOSEN.title:
            print(_line(told) + (f"  | {told['plan']}" if told["title"] == CHOSEN.title else ""))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker({(index, title) for index, title in json.loads(sys.argv[2])})
    else:
        main(float((sys.argv[1:] or [240])[0]), *sys.argv[2:])
