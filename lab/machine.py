"""What does this machine have: threads, caches, and which vector instructions may we use?"""

import contextlib
import functools
import os
from pathlib import Path

from lab.arguments import expect_count
from lab.compiler import compile_c
from lab.processor import cpu_name

ISA_FLAGS = {  # instruction sets that the C rungs know, best first, and the compiler flags that allow them
    "avx512": ("-mavx512f", "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
ISA_NAMES = {
    "avx512": "AVX-512, 16 floats at a time",
    "avx2": "AVX2 with FMA and F16C, 8 floats at a time",
    "portable": "portable C, whatever the compiler makes of it",
}
# cpuid leaf 1, ecx bit 29 is F16C: __builtin_cpu_supports does not know that name in older compilers.
PROBE = """
#if defined(__x86_64__)
#include <cpuid.h>
int isa(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    __get_cpuid(1, &a, &b, &c, &d);
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !(c >> 29 & 1)) return 0;
    return __builtin_cpu_supports("avx512f") ? 2 : 1;
}
#else
int isa(void) { return 0; }
#endif
"""


def core_count():
    """How many threads may run at once. A container may be allowed fewer processors than it sees: its quota counts."""
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    with contextlib.suppress(OSError, ValueError):  # "200000 100000": 200 ms of processor time in every 100 ms
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        counts.append(max(1, -(-int(quota) // int(period))))
    return min(counts)


def thread_count():
    """How many threads to use: as many as may run at once, or fewer if OMP_NUM_THREADS says so."""
    wish = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # NumPy's library obeys it, so must we
    return min([core_count()] + ([int(wish)] if wish.isdigit() and int(wish) else []))


@functools.cache
def cache_bytes():
    """Sizes of one core's data caches in bytes, {1: L1, 2: L2, 3: L3}; empty where the system does not tell."""
    return {level: size for level, (size, _) in sorted(_caches(0).items())}


@functools.cache
def all_caches_bytes():
    """Size in bytes of all last-level caches that this process's cores have, together: what a buffer must exceed."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]
    last = {max(caches.items()) for core in cores if (caches := _caches(core))}  # one entry for each that is shared
    return sum(size for _, (size, _) in last) or 32 << 20


def _caches(core):
    """{level: (bytes, which cores share it)} of one core's data caches."""
    found = {}
    for index in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            kind, level, size, shared = (
                (index / f).read_text().strip() for f in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                found[int(level)] = int(size.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}[size[-1]], shared
    return found


@functools.cache
def isas():
    """The instruction sets that run on this processor, best first: some of "avx512", "avx2", "portable"."""
    found = compile_c(PROBE, name="isa.c", openmp=False).isa()
    return ("portable",) if found == 0 else ("avx2", "portable") if found == 1 else ("avx512", "avx2", "portable")


def expect_threads_and_isa(where, threads, isa):
    """(threads, isa) with the defaults filled in: all threads, the best instructions. TypeError or ValueError if one
    of them is not to be had."""
    threads = thread_count() if threads is None else expect_count(where, "threads", threads, high=256)
    if isa is not None and isa not in isas():
        raise ValueError(f"{where}: isa must be one of {', '.join(isas())} on this processor, got {isa!r}")
    return threads, isa or isas()[0]


def card():
    """The name under which this processor's measured figures are stored, for example "AMD EPYC, 2 threads"."""
    return f"{cpu_name()}, {thread_count()} thread{'s' if thread_count() > 1 else ''}"


def describe():
    """Say which processor this is and which vector instructions the C rungs will use."""
    caches = ", ".join(f"L{level} {_size(b)}" for level, b in cache_bytes().items()) or "caches unknown"
    print(f"{card()}; {caches}\nvector instructions: {ISA_NAMES[isas()[0]]}")


def _size(n):
    return f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB"
