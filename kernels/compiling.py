"""torch.compile as a peer, at its best: with programmatic dependent launch and without, the best of TRIES compiles.

What it tunes differs from one compile to the next: the same product takes 8 µs or 11. So each way is compiled anew
several times, and the fastest counts. Tuning takes seconds, most of them on one core: `ahead` tunes in processes of
their own, on all cores. They share the card, so only one at a time may measure. Each keeps what it chose in a folder
of its own, and there the bench finds it. What is not found is tuned then.

    Way(ladder, name, function, bind)   what is compiled; `bind(run)` gives a call for each copy of its arguments
    modes(way)                          {mode: make}, as kernels.benching.peer_rows takes them
    ahead("kernels.gemv.bench")         tunes the module's `ways()`: {title of a ladder: function that gives its Ways}

The process that tunes a way also times it, alone on the card, in a graph and on copies that no cache holds. Of six
compiles the bench then makes only the fastest again.
"""

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kernels import running
from lab import cuda_timing

TRIES = 3
PDL = {"without PDL": False, "with PDL": True}
PATIENCE = 240, 60  # seconds of a process that tunes, at most: for its first compile, and for each further one
SECONDS = "seconds"  # the file beside a compile's choices that says how fast it was
HOME = "COMPILED_PEERS"  # of the processes that tune: the folder of the bench that started them


class Way(NamedTuple):
    """A way to write a peer. By the ladder and its name in there its choices are found."""

    ladder: str
    name: str
    function: object
    bind: object
    tuned: bool = True  # with torch.compile's widest search


def modes(way):
    """{mode: make} of this way; make() returns the calls of the fastest compile. Where all were timed as they were
    tuned, only the fastest mode, but for a run that only calls, which knows its modes."""
    timed = {mode: _timed(way, mode) for mode in PDL}
    names = list(PDL)
    if all(timed.values()) and not running.only_called():
        names = [min(PDL, key=lambda mode: min(timed[mode].values()))]
    return {mode: functools.partial(_fastest, way, mode) for mode in names}


def _attempts(way):
    return range(TRIES if way.tuned else 1)


def _timed(way, mode):
    """{attempt: seconds} as the processes that tuned found them; empty if one of them found none."""
    found = {}
    for attempt in _attempts(way):
        try:
            found[attempt] = float((_folder(way, mode, attempt) / SECONDS).read_text())
        except (OSError, ValueError):
            return {}
    return found


def _fastest(way, mode):
    if timed := _timed(way, mode):
        return compiled(way, mode, min(timed, key=timed.get))
    found = []
    for attempt in _attempts(way):
        calls = compiled(way, mode, attempt)
        found.append((float(np.median(cuda_timing.Graph(calls).turn())), calls))
    return min(found, key=lambda item: item[0])[1]


def compiled(way, mode, attempt):
    """The calls of one compile, which are ready to be timed."""
    from torch._inductor import list_mode_options
    from torch._inductor.utils import clear_caches

    options = list_mode_options("max-autotune-no-cudagraphs") if way.tuned else {}
    options = {**options, "triton.enable_pdl": PDL[mode]}
    calls = way.bind(torch.compile(_twin(way.function, attempt), dynamic=False, options=options))
    with _choices_in(_folder(way, mode, attempt)):
        clear_caches()  # or it would take what it has in memory of the last compile, and tune nothing
        for call in calls[:1]:
            call()
    return calls


def _folder(way, mode, attempt):
    """Where the choices of one compile are kept."""
    return _home() / re.sub(r"\W+", "_", f"{way.ladder} {way.name} {mode} {attempt}")


def _twin(function, number):
    """The function once more, as code of its own: of the same code torch.compile keeps one result."""
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{number}")
    return types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


@contextlib.contextmanager
def _choices_in(folder):
    """Have torch.compile keep its choices here, and what Triton compiles where all find it."""
    from triton import knobs

    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)  # torch.compile would take another folder
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@functools.cache
def _home():
    """Where choices are kept: in the bench's folder, which is gone when it ends."""
    if HOME in os.environ:
        return Path(os.environ[HOME])
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def ahead(module, meanwhile=lambda: None):
    """Tune what this run measures of a bench, on all cores. This process does `meanwhile`. What fails here is tuned
    later, and fails there. The first compiles come first: what they leave in Triton's cache saves the others most of
    their time."""
    titles, _ = [title for title in importlib.import_module(module).ways() if running.wants(title)], _home()
    jobs = [(title, mode, attempt) for attempt in range(TRIES) for title in titles for mode in _asked(title)]
    cores = os.cpu_count()
    with ThreadPoolExecutor(cores) as pool:
        waiting = pool.map(functools.partial(_apart, module), filter(None, (jobs[n::cores] for n in range(cores))))
        begin = time.perf_counter()
        meanwhile()
        list(waiting)
    print(f"{module}: torch.compile tuned {len(jobs)} times in {time.perf_counter() - begin:.1f} s", flush=True)


def _asked(title):
    """The modes of a ladder that are measured: of a run that only calls, those that its rows have."""
    names = [figure.name for figure in running.stored(title).figures] if running.only_called() else ()
    return [mode for mode in PDL if not names or any(name.endswith(f": {mode}") for name in names)]


def _apart(module, jobs):
    from triton import knobs

    found = os.environ | {HOME: str(_home()), "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", knobs.cache.dir)}
    found["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a process of threads of its own for each of these would be too many
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first, further = PATIENCE
    command, patience = [sys.executable, "-m", "kernels.compiling", module], first + further * (len(jobs) - 1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, input=json.dumps(jobs).encode(), env=found, timeout=patience, **quiet)


def _tune(module, jobs):
    """Compiles of a bench's ways, (title, mode, attempt) each, for which no other process disturbs what is measured."""
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = benchmarker.benchmark_gpu

    def alone(*args, **options):
        with _alone():
            return measure(*args, **options)

    benchmarker.benchmark_gpu = alone
    for title, mode, attempt in jobs:
        for way in importlib.import_module(module).ways()[title]():
            if attempt in _attempts(way):
                try:
                    _tune_one(way, mode, attempt)
                except Exception:  # of any kind; it fails in the bench, too, which says so
                    traceback.print_exc()


def _tune_one(way, mode, attempt):
    calls = compiled(way, mode, attempt)
    for call in calls:  # outside: the first call of all may load what another one compiled
        call()
    with _alone():
        graph = cuda_timing.Graph(calls)
        taken = min(float(np.median(graph.turn())) for _ in range(3))
    (_folder(way, mode, attempt) / SECONDS).write_text(str(taken))


@contextlib.contextmanager
def _alone():
    """While no other process that tunes measures."""
    with open(_home() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        yield


if __name__ == "__main__":
    _tune(sys.argv[1], json.load(sys.stdin))
