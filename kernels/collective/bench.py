"""Measure sums over devices on several cards of one host: python -m kernels.collective.bench [--devices 2] [--quick]

Needs cards that reach each other's memory, and says so plainly where there are none. Every rung is timed in CUDA
graphs, one for each card, of many exchanges each, replayed by turns: the median over replays and cards of what one
exchange takes. Before and behind, its sums are looked at. Peers run in the same command, one process a card (peers.py).
Stored as tables in kernels/collective/measured/<card>_x<devices>.json: microseconds by message size.
"""

import argparse
import functools

import numpy as np
import torch

import ref.collective as ref
from kernels import collective
from kernels.bench import versions
from kernels.collective import peers
from kernels.collective.group import HERE
from kernels.collective.peers import size_text
from lab import gpu_roof, results
from lab.table import Table

SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
ROWS, HIDDEN = (1, 8, 32, 128), 4096
PRODUCTS = {"W_o": (4096, 4096), "W_down": (4096, 14336)}  # of Mistral-7B; columns are split
REPLAYS = 9
COMMON = "kernels/collective/launches.py", "kernels/collective/group.py", "lab/cuda/devices.py"


def calls_in_graph(nbytes):
    return 128 if nbytes <= 256 << 10 else 32 if nbytes <= 4 << 20 else 8


def timed(devices, step, calls):
    """Seconds of one step(): the median over replays and cards."""
    graph = devices.graph(lambda: [step() for _ in range(calls)])
    marks = {d: [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)] for d in devices.where}
    for k in range(-2, REPLAYS):
        for device, one in zip(devices.where, graph.graphs):
            with torch.cuda.device(device):
                if k == 0:
                    marks[device][0].record()
                one.replay()
                if k >= 0:
                    marks[device][k + 1].record()
    devices.synchronize()
    taken = [a.elapsed_time(b) for events in marks.values() for a, b in zip(events, events[1:])]
    return 1e-3 * float(np.median(taken)) / calls


def messages(devices, shape, dtype=torch.bfloat16):
    """Whole numbers, whose sums are exact: replayed sums would grow, so they are made anew for each look."""
    return [torch.randint(-8, 8, shape, device=d).to(dtype) for d in devices.where]


def expect_right(rung, group, nbytes, pdl):
    xs = messages(group.devices, (nbytes // 2,))
    want = ref.all_reduce([x.double().cpu().numpy() for x in xs])[0]
    rung(xs, group=group, pdl=pdl)
    group.synchronize()
    for x in xs:
        if not np.array_equal(x.double().cpu().numpy(), want):
            raise RuntimeError(f"{rung.__name__}, {nbytes} bytes: wrong sums on {x.device}")


def copies_timed(group, nbytes, calls=20):
    """Rung 1 as called, since a graph of one card takes no copy that another orders: events around calls on end."""
    xs, begin, end = messages(group.devices, (nbytes // 2,)), *(torch.cuda.Event(enable_timing=True) for _ in "be")
    taken = []
    for _ in range(5):
        collective.copies(xs)
        with torch.cuda.device(group.devices.where[0]):
            begin.record()
            for _ in range(calls):
                collective.copies(xs)
            end.record()
        group.synchronize()
        taken.append(begin.elapsed_time(end))
    return 1e-3 * float(np.median(taken)) / calls


def rungs(group, sizes):
    """{row: {size: µs}} of every rung, as ordinary launches and as dependent ones."""
    found = {"copies, as called": {size_text(s): 1e6 * copies_timed(group, s) for s in sizes}}
    names = "pull", "pull_once", "ll", "sentinel", "direct", "two_shot", "all_reduce"
    for name in names:
        rung = getattr(collective, name)
        for pdl in (False, True):
            row = found.setdefault(f"{name}, PDL" if pdl else name, {})
            for nbytes in sizes:
                if name in ("ll", "sentinel", "direct") and nbytes > 4 << 20:
                    continue
                expect_right(rung, group, nbytes, pdl)
                xs = messages(group.devices, (nbytes // 2,))
                step = functools.partial(rung, xs, group=group, pdl=pdl)
                row[size_text(nbytes)] = 1e6 * timed(group.devices, step, calls_in_graph(nbytes))
                expect_right(rung, group, nbytes, pdl)
            print(f"{name}{', PDL' if pdl else ''}: {row}", flush=True)
    return found


def fused(group):
    """{row: {rows: µs}}: with the residual and the norm in one launch, and in a product's epilogue."""
    devices, norm, product = group.devices, {}, {}
    for rows in ROWS:
        xs, residuals = (messages(devices, (rows, HIDDEN)) for _ in range(2))
        weights, out = messages(devices, (HIDDEN,)), [torch.empty_like(x) for x in xs]
        residuals = [residuals[0].to(d) for d in devices.where]
        for pdl in (False, True):
            step = functools.partial(
                collective.all_reduce_norm, xs, residuals, weights, out=out, group=group, pdl=pdl
            )  # fmt: skip
            norm.setdefault(f"all_reduce_norm{', PDL' if pdl else ''}", {})[str(rows)] = 1e6 * timed(devices, step, 64)
    for name, (rows, cols) in PRODUCTS.items():
        cols //= len(group)
        copies = max(1, (1 << 28) // (rows * cols * 2))  # weights that no cache holds
        Ws = [messages(devices, (rows, cols)) for _ in range(copies)]
        xs, residuals = messages(devices, (cols,)), messages(devices, (rows,))
        out = [torch.empty_like(r) for r in residuals]

        def step(Ws=Ws, xs=xs, residuals=residuals, out=out):
            for W in Ws:
                collective.product(W, xs, residuals, out=out, group=group, pdl=True)

        product.setdefault("product, PDL", {})[name] = 1e6 * timed(devices, step, 4) / copies
    group.synchronize()
    return norm, product


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="four sizes, nothing stored")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.devices:
        there = torch.cuda.device_count()
        raise SystemExit(
            f"the bench needs {options.devices} cards that reach each other's memory, and there are {there}"
        )
    sizes = SIZES[:4] if options.quick else SIZES
    group = collective.Group([f"cuda:{d}" for d in range(options.devices)])
    ours, (norm, product) = rungs(group, sizes), fused(group)
    theirs, their_norm = peers.measure(options.devices, sizes, ROWS, HIDDEN)
    what = f"bf16, {options.devices} × {torch.cuda.get_device_name(0)}, µs"
    sources = tuple(dict.fromkeys(s for rung in collective.RUNGS for s in rung.sources)) + COMMON[2:]
    fused_sources = ("kernels/collective/residual_norm.cu", "kernels/collective/fused.py", *COMMON)
    tables = [
        Table(f"all-reduce, {what} by bytes", ours | theirs, sources),
        Table(f"all-reduce + residual + RMSNorm, {what} by rows of {HIDDEN}", norm | their_norm, fused_sources),
        Table(f"product with an exchange, {what}", product, ("kernels/collective/product.cu", *COMMON)),
    ]
    print(*tables, sep="\n\n")
    if not options.quick:
        print(results.save(HERE, [], gpu_roof(), versions(), tables=tables, name=f"x{options.devices}"))


if __name__ == "__main__":
    main()
