"""torch.compile as a peer, at its best: with programmatic dependent launch and without, the best of TRIES compiles.

What it tunes differs from one compile to the next: the same product takes 8 µs or 11. So each way is compiled anew
several times, and the fastest counts. Tuning takes seconds, most of them on one core: `ahead` tunes in processes of
their own, on all cores. They share the card, so only one at a time may measure. Each keeps what it chose in a folder
of its own, and there the bench finds it. What is not found is tuned then.

    Way(ladder, name, function, bind)   what is compiled; `bind(run)` gives a call for each copy of its arguments
    modes(way)                          {mode: make}, as kernels.benching.peer_rows takes them
    ahead("kernels.gemv.bench")         tunes all of the module's `ways()`: functions that each give a list of Ways
"""

import atexit
import contextlib
import fcntl
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lab import cuda_timing

TRIES = 3
PDL = {"without PDL": False, "with PDL": True}
SECONDS = 240  # of a process that tunes, at most
HOME = "COMPILED_PEERS"  # of the processes that tune: the folder of the bench that started them


class Way(NamedTuple):
    """A way to write a peer. By the ladder and its name in there its choices are found."""

    ladder: str
    name: str
    function: object
    bind: object
    tuned: bool = True  # with torch.compile's widest search


def modes(way):
    """{mode: make} of this way; make() returns the calls of the fastest compile."""
    return {mode: functools.partial(_fastest, way, mode) for mode in PDL}


def _fastest(way, mode):
    found = []
    for attempt in range(TRIES if way.tuned else 1):
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
    with _choices_in(_home() / re.sub(r"\W+", "_", f"{way.ladder} {way.name} {mode} {attempt}")):
        clear_caches()  # or it would take what it has in memory of the last compile, and tune nothing
        for call in calls[:1]:
            call()
    return calls


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
    """Tune all ways of a bench, on all cores. This process does `meanwhile`. What fails here is tuned later, and fails
    there. The first compiles come first: what they leave in Triton's cache saves the others most of their time."""
    ways, _ = importlib.import_module(module).ways(), _home()  # made once, before there are threads
    jobs = [(case, mode, attempt) for attempt in range(TRIES) for case in range(len(ways)) for mode in PDL]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = pool.map(functools.partial(_apart, module), jobs)
        meanwhile()
        list(waiting)


def _apart(module, job):
    from triton import knobs

    command = [sys.executable, "-m", "kernels.compiling", module, *map(str, job)]
    found = os.environ | {HOME: str(_home()), "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", knobs.cache.dir)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(subprocess.TimeoutExpired):
        # a process of threads of its own for each of these would be too many
        subprocess.run(command, env=found | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}, timeout=SECONDS, **quiet)


def _tune(module, case, mode, attempt):
    """One compile of each way of a case, for which no other process disturbs what it measures."""
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = benchmarker.benchmark_gpu

    def alone(*args, **options):
        with open(_home() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
            return measure(*args, **options)

    benchmarker.benchmark_gpu = alone
    for way in importlib.import_module(module).ways()[case]():
        if way.tuned:
            compiled(way, mode, attempt)


if __name__ == "__main__":
    _tune(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
