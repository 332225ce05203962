"""What the benches of all topics stand on: rows that are checked, timed in turns, and checked again.

A row is a kernel of ours or a peer. Ours must be right, or nothing is timed; a peer that is wrong, or refuses, is left
out with a printed sentence. Each ladder says where its seconds went. What a run measures: kernels/running.py.
"""

import dataclasses
import functools
import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kernels import running
from lab import Ladder, as_called, cuda_timing
from lab.check import Verdict

DEVICE = "cuda"
BOUND = {"bound": "read", "device": "cuda"}
GUARD = 64  # elements of NaN on each side of an input
SLOWER = 1.05  # so many times must a peer's way be slower as called than another one, for that to have a row, too


@dataclass
class Row:
    """A row to be: its calls, one for each copy of its inputs, what they must give, and what a ladder wants to know."""

    title: str
    calls: list
    wanted: torch.Tensor = None  # float64; None for a row that is not checked
    tolerance: float = 0.0
    bytes: int = 0
    flops: int = 0
    outs: list = ()  # what the calls write to, if they take `out`
    verdict: Verdict = None
    sources: tuple = ()
    error: float = 0.0  # a peer's, the last time that it was looked at


def ladder_of(title, rows, seconds, sustain=(), **limit):
    """Check and time these rows in turns; check again. Returns the Ladder. sustain: as for Ladder.again; limit: bound,
    where reading is not what limits them

    ValueError if a row of ours is wrong; a peer that is wrong is left out with a printed sentence.
    """
    begin, ladder = time.perf_counter(), Ladder(title, **(BOUND | limit))
    made = begin - _since.pop("", begin)
    rows = [row for row in rows if row.sources or _peer_is_right(title, row)]
    for row in rows:
        verdict = None
        if row.wanted is not None:
            verdict = Verdict() if row.verdict is None else dataclasses.replace(row.verdict)
            error = _error(title, row) if row.sources else row.error
            verdict.error, verdict.shapes = max(verdict.error, error), verdict.shapes + 1
        facts = {"bytes": row.bytes, "flops": row.flops, "verdict": verdict, "sources": row.sources}
        ladder.plan(row.title, row.calls, **facts)
        for out in row.outs:
            out.fill_(torch.nan)
    checked = time.perf_counter()
    measure(ladder, seconds, sustain=sustain)
    timed = time.perf_counter()
    for row in rows:
        if not row.sources:
            if not _peer_is_right(title, row):
                ladder.figures = [figure for figure in ladder.figures if figure.name != row.title]
        elif row.wanted is not None:
            _error(title, row, results=row.outs or None)
    ladder.calls.clear()  # they hold the inputs
    end = time.perf_counter()
    print(
        f"{title}: {len(rows)} rows in {end - begin:.1f} s (checks {checked - begin + end - timed:.1f}, "
        f"timing {timed - checked:.1f}), made in {made:.1f} s",
        flush=True,
    )
    return running.done(ladder)


def measure(ladder, seconds, sustain=()):
    """Time a planned ladder as this run wants it: in graphs and as called, or as called alone. Then its figures are the
    stored ones with these times; rows that are not stored have none."""
    gc.freeze()  # what was made for this ladder, too
    if not running.only_called():
        ladder.again(seconds, sustain=sustain)
        return
    stored = running.stored(ladder.title)
    found = ladder.as_called([f.name for f in stored.figures if f.name in ladder.calls])
    ladder.figures = [dataclasses.replace(f, **found[f.name]) for f in stored.figures if f.name in found]


def _peer_is_right(title, row):
    """Whether a peer is right; where it is not, a sentence says that it is left out. Its error is noted."""
    try:
        row.error = _error(title, row, results=None) if row.wanted is not None else 0.0
    except ValueError as error:
        print(f"{error}; it is left out")
        return False
    return True


def _error(title, row, results=None):
    """The largest error of these results, or of all calls made now; ValueError if one is wrong."""
    worst, norm = 0.0, float(torch.linalg.vector_norm(row.wanted))
    for result in results or (call() for call in row.calls):
        off = float(torch.linalg.vector_norm(result.reshape(row.wanted.shape).double() - row.wanted)) / norm
        if not off <= row.tolerance:  # NaN too
            raise ValueError(
                f"{title}: {row.title} is not right, so it is not timed: relative error {off:.2g}, "
                f"allowed are {row.tolerance:.2g}"
            )
        worst = max(worst, off)
    return worst


def our_row(title, function, inputs, out_like, *, verdict, sources, **facts):
    """A row of a kernel of ours: function(*inputs, out=...) for each of the inputs."""
    outs = [torch.full_like(out_like, torch.nan) for _ in inputs]
    calls = [functools.partial(function, *args, out=out) for args, out in zip(inputs, outs)]
    return Row(title, calls, outs=outs, verdict=verdict, sources=sources, **facts)


def peer_rows(families, tolerance, *, ladder="", **facts):
    """Rows for each (name, {mode: make}): of the mode that is fastest in a graph; and of the one that is fastest as
    called, where the first is SLOWER. make() returns a mode's calls.

    A mode that refuses or is wrong is left out with a printed sentence, and a name without modes has no row.
    ladder  its title, by which a run that only calls knows the modes that have rows
    """
    for name, every in families:
        rows = []
        for mode, make in running.modes(ladder, name, every).items():
            try:
                row = Row(f"{name}: {mode}", make(), tolerance=tolerance, **facts)
                if row.wanted is not None:
                    _error(name, row)
                graph = None if running.only_called() else cuda_timing.Graph(row.calls)
                rows.append((float(np.median(graph.turn())) if graph else 0.0, row))
            except Exception as error:  # theirs: of any kind
                print(f"{name}: {mode} is left out: {(str(error) or repr(error)).splitlines()[0]}")
        rows = [row for _, row in sorted(rows, key=lambda item: item[0])]
        yield from rows if running.only_called() else _best_ways(rows)


def _best_ways(rows):
    """Of a peer's rows, the fastest in a graph first: that one, and the fastest as called where it is another."""
    yield from rows[:1]
    if len(rows) > 1:
        taken = as_called.together({row.title: row.calls for row in rows}, seconds=0, least_rounds=5)
        best = min(rows, key=lambda row: taken[row.title].median)
        if taken[rows[0].title].median > SLOWER * taken[best.title].median:
            yield best


_since = {}  # when the making of the next ladder began


def ahead(calls):
    """Make these calls on all cores, for what they compile: one after another would take a minute. One that fails will
    fail again where it is timed, and is told of there."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = [job.exception() for job in [pool.submit(call) for call in calls]]
    wait()
    said = f", {len(failed) - failed.count(None)} of them in vain" if any(failed) else ""
    print(f"{len(failed)} calls ahead in {time.perf_counter() - begin:.1f} s{said}", flush=True)


def between_nans(tensor):
    """A copy on the card that lies between NaNs: what is read too far turns the result into NaN."""
    home = torch.full((tensor.numel() + 2 * GUARD,), torch.nan, device=DEVICE, dtype=tensor.dtype)
    return home[GUARD : GUARD + tensor.numel()].view(tensor.shape).copy_(tensor)


def reading(tensors, moved, flops):
    """A row that only reads these tensors; its flops are those of the others, so that its speed-up compares."""
    calls = cuda_timing.read_calls(tensors)
    return Row("reading the cache only", calls, bytes=moved, flops=flops, sources=("lab/roof_cuda.py",))


def wait():
    """Until the card has done what was asked of it."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def empty():
    """Give back what earlier ladders held: the longest caches need the room in one piece. Ladders begin with this.

    A graph's capture has Python look for garbage among all objects that it may free: those of compilers, by the hundred
    thousand, are taken out of its sight, or they would cost more time than all that is measured.
    """
    _since[""] = time.perf_counter()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def short(tokens):
    """4096 -> "4K", 1048576 -> "1M"."""
    return f"{tokens >> 20}M" if tokens % (1 << 20) == 0 else f"{tokens >> 10}K" if tokens % 1024 == 0 else str(tokens)
