"""A million exchanges at uneven times, and a look at every sum: python -m kernels.collective.stress

    --devices 2          cards 0 and 1; on the CPU with --cpu
    --exchanges 1000000  of each rung and size

Each device computes its message from its rank and the message's number, sleeps for up to 16 µs now and then, takes
part, and looks at every number of the sum. Exchanges are replayed in CUDA graphs of 100, as dependent launches. On the
CPU the devices take random turns. A wrong sum, or a peer that did not come, ends the run with an error.
"""

import argparse
import time

import torch

from kernels import collective
from kernels.collective.group import module

IN_GRAPH = 100
RUNGS = {
    "pull": collective.pull, "pull_once": collective.pull_once, "ll": collective.ll, "sentinel": collective.sentinel,
    "direct": collective.direct, "two_shot": collective.two_shot,
}  # fmt: skip
SIZES = 8192, 262144  # bytes


def run(where, rung, nbytes, exchanges, *, dtype=torch.bfloat16, in_graph=IN_GRAPH, turns="forward", races=False):
    """(sums that were wrong, exchanges made) of one rung: `exchanges` of them, rounded up to whole graphs."""
    group = collective.Group(where, races)
    group.devices.turns = turns
    devices, n = group.devices, nbytes // dtype.itemsize
    made = module("stress", dtype, len(group), group.blocks)
    xs, counts, wrong = devices.zeros(n, dtype), devices.zeros(1, torch.int32), devices.zeros(1, torch.int64)

    def step():
        for _ in range(in_graph):
            devices.launch([(made["fill"], 1, 512, (xs[r], counts[r], r, n)) for r in group.ranks], pdl=True)
            RUNGS[rung](xs, group=group, pdl=True)
            checks = [(made["check"], 1, 512, (xs[r], counts[r], wrong[r], r, n)) for r in group.ranks]
            devices.launch(checks, pdl=True)

    graph, replays = devices.graph(step), -(-exchanges // in_graph)
    for k in range(replays):
        graph.replay()
        if k % 100 == 99:
            group.synchronize()
    group.synchronize()
    return sum(int(w) for w in wrong), int(counts[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--exchanges", type=int, default=1_000_000)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    where = ["cpu" if options.cpu else f"cuda:{d}" for d in range(options.devices)]
    if not options.cpu and torch.cuda.device_count() < options.devices:
        got = torch.cuda.device_count()
        raise SystemExit(f"stress needs {options.devices} cards that reach each other's memory, and there are {got}")
    for rung in RUNGS:
        for nbytes in SIZES:
            if options.cpu:
                nbytes //= 16
            begin = time.perf_counter()
            wrong, made = run(where, rung, nbytes, options.exchanges, turns=1 if options.cpu else "forward")
            took = time.perf_counter() - begin
            print(f"{rung}, {nbytes:,} bytes: {made:,} exchanges, {wrong} numbers wrong, {took:.0f} s", flush=True)
            if wrong:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
