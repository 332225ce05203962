"""What processor is this, and which of its vector instructions may we use?"""

import functools
import os
import platform
import re
import subprocess
from pathlib import Path

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


@functools.cache
def cpu_name():
    """The processor's name as the system gives it, for example "AMD EPYC 7702P"."""
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
        return re.sub(r"\s*(\(R\)|\(TM\)|CPU|Processor|\d+-Core|@.*)", "", name).strip()
    except (OSError, TypeError, subprocess.SubprocessError):
        return platform.processor() or platform.machine()


def thread_count():
    """How many threads this process may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def cache_bytes():
    """Sizes of one core's data caches in bytes, {1: L1, 2: L2, 3: L3}; empty where the system does not tell."""
    sizes = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            kind, level, size = ((index / f).read_text().strip() for f in ("type", "level", "size"))
            if kind != "Instruction":
                sizes[int(level)] = int(size.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}[size[-1]]
        except (OSError, KeyError, ValueError):
            continue
    return dict(sorted(sizes.items()))


@functools.cache
def isas():
    """The instruction sets that run on this processor, best first: some of "avx512", "avx2", "portable"."""
    from lab.compiler import compile_c  # the compiler needs this file for its cache key

    found = compile_c(PROBE, name="isa.c", openmp=False).isa()
    return ("portable",) if found == 0 else ("avx2", "portable") if found == 1 else ("avx512", "avx2", "portable")


def card():
    """The name under which this processor's measured figures are stored, for example "AMD EPYC, 2 threads"."""
    return f"{cpu_name()}, {thread_count()} thread{'s' if thread_count() > 1 else ''}"


def describe():
    """Say which processor this is and which vector instructions the C rungs will use."""
    caches = ", ".join(f"L{level} {_size(b)}" for level, b in cache_bytes().items()) or "caches unknown"
    print(f"{card()}; {caches}\nvector instructions: {ISA_NAMES[isas()[0]]}")


def _size(n):
    return f"{n >> 20} MB" if n >= 1 << 20 else f"{n >> 10} KB"
