"""The roof: the most that this machine can do, measured once per process.

    roof().read     bytes a second that all threads together can read
    roof().copy     bytes a second, read plus written
    roof().flops    float32 operations a second (a multiply-add counts as two)

A machine may change while one works on it, so `roof_again()` reads once more and says whether the roof still holds.
roof_gpu.py does the same for an NVIDIA GPU.
"""

import functools
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lab import machine
from lab.compiler import CompileError, compile_c
from lab.timing import measure, side_by_side

NOISE = 1.10  # two figures of one thing, so far apart: seen on shared machines; beyond it, something has changed
SOURCE = Path(__file__).with_name("roof.c")


@dataclass(frozen=True)
class Roof:
    """A machine's measured limits. `by_threads` holds {threads: (read, copy, flops)}; empty for a GPU."""

    card: str
    read: float  # bytes/s
    copy: float  # bytes/s, read + written
    flops: float  # flop/s in float32; on a GPU: float16 on the tensor cores
    by_threads: dict = field(default_factory=dict)

    def attainable(self, intensity):
        """The most flop/s at this arithmetic intensity (flop per byte read): the roofline itself."""
        return np.minimum(self.flops, self.read * np.asarray(intensity, dtype=float))

    @property
    def ridge(self):
        """The intensity, in flop per byte, from which on arithmetic is the limit and no longer memory."""
        return self.flops / self.read

    def __str__(self):
        return (
            f"{self.card}: reads {self.read / 1e9:.1f} GB/s, copies {self.copy / 1e9:.1f} GB/s, "
            f"{self.flops / 1e9:,.0f} GFLOP/s, ridge at {self.ridge:.1f} flop/byte"
        )


@functools.cache
def _library():
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    try:
        return compile_c(SOURCE, flags=(native,))
    except CompileError:  # some compilers do not know their own processor
        return compile_c(SOURCE)


def probe_bytes():
    """Size of the buffer that is read, in bytes: at least 256 MB and 4 times all last-level caches together, as far as
    the memory allows. Whole megabytes, which is what the probes read at a time."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
    wanted = max(256 << 20, 4 * machine.all_caches_bytes())
    return max(min(wanted, memory // 8), 64 << 20) >> 20 << 20


@functools.cache
def _buffer(name):
    words = np.empty(probe_bytes() // 8, np.uint64)
    words[:] = np.random.default_rng().integers(0, 1 << 63, 1 << 16, dtype=np.uint64).repeat(words.size >> 16)
    return words


def read_probe(threads=None, data=None):
    """(function, bytes): a call that reads `bytes` bytes and does nothing else. For timing beside a kernel.

    data  a uint64 array to read, whole megabytes; default: a buffer that no cache holds
    """
    data, threads = _buffer("from") if data is None else data, threads or machine.thread_count()
    if data.dtype != np.uint64 or data.size == 0 or data.nbytes % (1 << 20):
        raise ValueError(
            f"read_probe: data must be uint64, whole megabytes, got {data.nbytes} bytes of {data.dtype.name}"
        )
    return (lambda: _library().read_all(data, data.size, threads)), data.nbytes


def copy_probe(threads=None):
    """(function, bytes): a call that copies; `bytes` counts those read and those written."""
    data, to, threads = _buffer("from"), _buffer("to"), threads or machine.thread_count()
    return (lambda: _library().copy_all(data, to, data.size, threads)), 2 * data.nbytes


def flops_probe(threads=None, steps=2_000_000):
    """(function, flops): a call that does `flops` float32 operations in registers."""
    threads = threads or machine.thread_count()
    flops = 2 * steps * _library().lanes_times_chains() * threads
    return (lambda: _library().multiply_add(steps, threads)), flops


@functools.cache
def roof():
    """Measure this processor's roof by thread count, print a line for each, and remember it for the process."""
    most = machine.thread_count()
    counts = sorted({1 << p for p in range(most.bit_length()) if 1 << p <= most} | {most})
    print(f"measuring the roof of {machine.card()} on {probe_bytes() >> 20} MB ...")
    by_threads = {}
    for threads in counts:
        probes = {"read": read_probe(threads), "copy": copy_probe(threads), "flops": flops_probe(threads)}
        timed = side_by_side({name: call for name, (call, _) in probes.items()}, seconds=0.5)
        # The best fifth, not the median: a roof is what the machine can do, and ceilings are not noisy upwards.
        read, copy, flops = (amount / timed[name].p20 for name, (_, amount) in probes.items())
        by_threads[threads] = (read, copy, flops)
        print(
            f"  {threads:3d} thread{'s' if threads > 1 else ' '}  read {read / 1e9:6.1f} GB/s   "
            f"copy {copy / 1e9:6.1f} GB/s   {flops / 1e9:7.0f} GFLOP/s"
        )
    return Roof(machine.card(), *(max(v[i] for v in by_threads.values()) for i in range(3)), by_threads)


def roof_again(tries=3):
    """Read once more and hold that against the roof: the same within 10 %, or the machine has changed, and its roof is
    measured anew. Says what it found; returns the roof that holds now.

    The loop and the data are the same both times. What changes is a laptop's clock, what neighbours on a shared server
    do, or where a virtual machine's processors are: two of them in one corner of a large chip share its way to the
    memory, in two corners each has its own.
    """
    found = roof()
    for _ in range(tries):
        threads = max(found.by_threads, key=lambda t: found.by_threads[t][0])
        call, amount = read_probe(threads)
        rate = amount / measure(call, seconds=0.5).p20
        said = f"reading once more: {rate / 1e9:.1f} GB/s, and the roof is {found.read / 1e9:.1f} GB/s"
        if 1 / NOISE <= rate / found.read <= NOISE:
            print(f"{said}: the same within {NOISE - 1:.0%}")
            return found
        print(f"{said}: this machine has changed since, so")
        roof.cache_clear()
        found = roof()
    print(
        "This machine does not keep one speed for a minute. Its figures in GB/s do not compare; shares of the roof do, "
        "since each is timed in turns with a probe."
    )
    return found
