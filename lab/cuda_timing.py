"""Time calls on an NVIDIA GPU in a CUDA graph, where nothing but the kernels counts. (As called from Python:
lab/as_called.py.)

A call is a list of functions without arguments that do the same on different copies of its weights. A replay goes
through all of them: with 1 GB of copies, no call finds its weights in the L2 cache.

    calls = [functools.partial(gemv, copy, x, out=y) for copy in cold_copies(W)]
    against(read_probe()[0], {"gemv": calls})    # (Timing, ratio) in a graph, beside a kernel that only reads
    sustained(calls)                             # Timing in a graph, of replays on end for more than a second

In a graph each launch waits for the one before it, and follows it without Python in between. A call that launches its
kernel with programmatic dependent launch needs nothing more: the graph keeps that.
"""

import contextlib
import functools
import gc
import math
import time

import numpy as np
import torch

from lab.timing import Timing

COLD = 1 << 30  # bytes of copies: many times the L2 cache of any card
REPLAY = 2e-3  # seconds that a replay lasts at the least: the gap between two is some microseconds
TURN = 0.02  # seconds of timed replays in a turn, one at the least
SETTLE = 5e-3  # seconds of untimed replays before them
SUSTAINED = 1.1  # seconds of replays on end: a card that draws all its power lowers its clock within hundredths of one
READ_SHAPES = (  # of the kernel that only reads: words a step, steps, warps
    (1024, 4, 4),
    (1024, 16, 8),
    (4096, 1, 8),
    (4096, 4, 4),
    (8192, 2, 8),
    (16384, 1, 16),
    (16384, 2, 16),
    (32768, 1, 16),
)


def expect_gpu(where):
    """RuntimeError, in a sentence, where there is no NVIDIA GPU."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError(f"{where} needs an NVIDIA GPU that PyTorch can use, and this machine has none")


def cold_copies(tensor, total=COLD):
    """A tensor and copies of it, `total` bytes or more: when its turn comes again, no cache holds any of it."""
    return [tensor, *(tensor.clone() for _ in range(math.ceil(total / max(1, tensor.nbytes)) - 1))]


class Graph:
    """Calls captured in a CUDA graph: as many rounds of them as last for REPLAY."""

    def __init__(self, calls):
        expect_gpu("timing in a CUDA graph")
        calls, stream = listed(calls), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # what compiles, tunes or loads must have done so before the capture
                call()
        self._replay = _capture(calls, 1, stream)
        self.calls, self.seconds = len(calls), 0.0  # of one replay
        self.replays(1)
        self.seconds = min(self.replays(2))
        rounds = math.ceil(REPLAY / self.seconds)
        if rounds > 1:
            self._replay = _capture(calls, rounds, stream)
            self.calls, self.seconds = rounds * self.calls, rounds * self.seconds

    def turn(self):
        """Let the card settle, then time replays for TURN. Returns the seconds of one call, the mean of each replay."""
        for _ in range(math.ceil(SETTLE / self.seconds)):
            self._replay()
        return [seconds / self.calls for seconds in self.replays(math.ceil(TURN / self.seconds))]

    def replays(self, count):
        """Seconds of each. One more goes ahead, so that the card has work while Python queues the rest."""
        self._replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._replay()
            mark.record()
        marks[-1].synchronize()
        return [1e-3 * begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]


def listed(calls):
    """A call, or several, as a list of functions."""
    return list(calls) if isinstance(calls, (list, tuple)) else [calls]


def _capture(calls, rounds, stream):
    """A function that replays `rounds` rounds of the calls on the current stream."""
    graph = torch.cuda.CUDAGraph()
    with no_garbage_collected(), torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph.replay


@contextlib.contextmanager
def no_garbage_collected():
    """Python collects none meanwhile. An old graph that is collected while a new one is captured spoils it: CUDA
    permits no such thing then."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def against(probe, calls, *, seconds=0.3, least_turns=5):
    """Time calls in turns, each in a graph, and the probe right before each turn. Returns {name: (Timing, ratio)}.

    probe  a call (see above);  calls  {name: call};  seconds  how long to go on, for each
    The ratio is the call's time over the probe's: the median over turns of the two medians of one turn, as on the CPU
    (lab.timing.against). A Timing here counts replays: each gives one time, the mean of its calls.
    """
    beside, graphs = Graph(probe), {name: Graph(call) for name, call in calls.items()}
    taken, ratios = {name: [] for name in calls}, {name: [] for name in calls}
    stop = time.perf_counter() + seconds * len(calls)
    while min(map(len, ratios.values())) < least_turns or time.perf_counter() < stop:
        for name, graph in graphs.items():
            base, turn = np.median(beside.turn()), graph.turn()
            taken[name] += turn
            ratios[name].append(np.median(turn) / base)
    return {name: (Timing.of(taken[name]), float(np.median(ratios[name]))) for name in calls}


def sustained(calls, *, seconds=SUSTAINED):
    """Time calls in a graph that is replayed for so long without a pause, as in a server that is never idle. `against`
    measures hundredths of a second, in turns. Returns a Timing; it counts replays, each of them the mean of its calls.
    """
    graph = Graph(calls)
    return Timing.of([taken / graph.calls for taken in graph.replays(math.ceil(seconds / graph.seconds))])


# Probes


def read_calls(tensors):
    """Calls that read each of these tensors once and do nothing else: what a plain launch over so many bytes costs.
    The fastest of READ_SHAPES; tensors of the same size, a multiple of 16 KB."""
    expect_gpu("the read probe")
    from lab.roof_cuda import _read_all  # brings Triton

    data = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
    found = []
    for block, steps, warps in READ_SHAPES:
        programs, rest = divmod(data[0].numel(), block * steps)
        if not rest:
            sums = torch.empty(programs, dtype=torch.int32, device=data[0].device)
            launch = _read_all[(programs,)]
            calls = [functools.partial(launch, d, sums, block, steps, num_warps=warps) for d in data]
            found.append((np.median(Graph(calls).turn()), calls, sums))
    if not found:
        raise ValueError(f"read_calls: a tensor must be a multiple of 16 KB, got {4 * data[0].numel()} bytes")
    _, calls, sums = min(found, key=lambda item: item[0])
    calls[0]()
    if (int(sums.sum(dtype=torch.int64)) - int(data[0].sum(dtype=torch.int64))) % (1 << 32):
        raise RuntimeError("the read probe's sum is wrong, so its time means nothing")
    return calls


@functools.cache
def read_probe():
    """(call, bytes): one launch that reads `bytes` bytes, 4 GB or 1 on a small card, and does nothing else."""
    expect_gpu("the read probe")
    words = 1 << 30 if torch.cuda.mem_get_info()[0] > 12 << 30 else 1 << 28
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device="cuda")
    return read_calls([data])[0], data.nbytes


@functools.cache
def flops_probe():
    """(call, flops): an 8192 × 8192 × 8192 product of random float16 matrices, as PyTorch hands it to cuBLAS."""
    expect_gpu("the arithmetic probe")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    return (lambda: torch.mm(a, b, out=out)), 2 * 8192**3
