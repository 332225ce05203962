"""Which sizes are fastest? `python -m kernels.matmul.sweep [seconds [file]]` (needs an H100 or H200; four minutes).

All variants of variants.py on square matrices and on few rows, each held against float64, then timed in graphs on cold
inputs, in turns with cuBLAS: one line for each, TFLOP/s and the ratio to cuBLAS, and at the end the fastest of each
shape. Of few rows the SHOWN fastest are printed; all are in the file. No result is stored. It begins no new shape when
its time is over (default 240 seconds), so that a run of limited length ends in order.
"""

import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F

from kernels.benching import empty
from kernels.matmul import bench, linear, work
from kernels.matmul.variants import FEW, LARGE, compiled
from lab import cuda_timing
from lab.tensors import DTYPES

DTYPE = torch.bfloat16
SHAPES = [  # m, n, k, variants
    (4096, 4096, 4096, LARGE),
    (8192, 8192, 8192, LARGE),
    (512, 4096, 4096, FEW),
    (512, 14336, 4096, FEW),
    (1024, 14336, 4096, FEW),
    (512, 4096, 14336, FEW),
    (1024, 4096, 4096, FEW),
    (2048, 4096, 4096, FEW),
    (64, 4096, 4096, FEW),
    (256, 4096, 14336, FEW),
]
TURNS, SHOWN = 3, 10


def compile_ahead(device):
    """All variants at once, on all cores."""

    def one(variant, shape):
        p = variant.plan(*shape, device)
        output = "Partial" if p.splits > 1 else variant.output or "ThroughTma"
        compiled(p.shape(DTYPES[DTYPE], output), variant.changes).module.cubin()

    jobs = [(v, shape) for *shape, variants in SHAPES for v in variants if v.fits(*shape, device)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: one(*job), jobs))


def timed(calls):
    """{name: seconds} of calls in graphs, the median over turns; a name that fails is left out with a sentence."""
    graphs = {}
    for name, listed in calls.items():
        try:
            graphs[name] = cuda_timing.Graph(listed)
        except Exception as error:  # of any kind: the others are still of use
            print(f"  {name}: {(str(error) or repr(error)).splitlines()[0]}", flush=True)
    taken = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            taken[name].append(np.median(graph.turn()))
    return {name: float(np.median(found)) for name, found in taken.items()}


def sweep(m, n, k, variants, shown=None, file=None):
    """Time these variants on one shape, and print."""
    empty()
    inputs = bench.inputs_of(DTYPE, m, n, k)
    wanted = inputs[0][0].double() @ inputs[0][1].double().T
    norm = float(torch.linalg.vector_norm(wanted))
    outs = [torch.empty(m, n, dtype=DTYPE, device=bench.DEVICE) for _ in inputs]
    calls = {
        "cuBLAS": [functools.partial(F.linear, x, W) for x, W in inputs],
        "linear": [functools.partial(linear, x, W, out=y) for (x, W), y in zip(inputs, outs)],
    }
    for variant in (v for v in variants if v.fits(m, n, k, wanted.device)):
        prepared = [variant.prepare(x, W, y) for (x, W), y in zip(inputs, outs)]
        outs[0].fill_(torch.nan)
        prepared[0]()
        error = float(torch.linalg.vector_norm(outs[0].double() - wanted)) / norm
        if not error <= bench.tolerance(DTYPE):
            print(f"  {variant.title}: WRONG, relative error {error:.2g}", flush=True)
            continue
        calls[variant.title] = prepared
    del wanted
    _, flops = work(m, n, k)
    found = timed(calls)
    print(f"{m} × {k} times {n} × {k}: cuBLAS {found['cuBLAS'] * 1e6:.1f} us")
    ranked = sorted(found, key=found.get)
    for place, name in enumerate(ranked):
        line = f"  {flops / found[name] / 1e12:6.1f} TFLOP/s  {found['cuBLAS'] / found[name]:5.3f}  {name}"
        if shown is None or place < shown or name in ("cuBLAS", "linear"):
            print(line, flush=True)
        if file:
            print(f"{m} {n} {k}{line}", file=file, flush=True)
    return ranked[0]


def main(seconds=240.0, path=None):
    cuda_timing.expect_gpu("the sweep")
    begin = time.perf_counter()
    compile_ahead(torch.device(bench.DEVICE, 0))
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    best = {}
    with open(path or os.devnull, "w") as file:
        for m, n, k, variants in SHAPES:
            if time.perf_counter() - begin < seconds:
                best[m, n, k] = sweep(m, n, k, variants, SHOWN if variants is FEW else None, file)
    for shape, name in best.items():
        print(f"{shape}: {name}")


if __name__ == "__main__":
    main(float((sys.argv[1:] or [240])[0]), *sys.argv[2:])
