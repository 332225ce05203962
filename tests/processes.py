"""In how many processes the suite runs: as many as there are cores for them, and memory.

`make test` starts `pytest -n auto`, and conftest.py answers with count(). In a container, what it is allowed counts.
"""

import contextlib
import os
import re
from pathlib import Path

from lab import machine

NEEDED = 3 * 2**30  # bytes for a process that runs tests, which comes to 2.3, and a notebook's kernel beside it
MOST = 16  # the longest file takes most of a minute: beyond this, others would only wait for it
MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
FILES = [("memory.max", "memory.current", "memory.stat")]  # of control groups, versions 2 and 1
FILES += [("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")]


def count():
    return max(1, min(machine.core_count(), free_memory() // NEEDED, MOST))


def free_memory():
    """In bytes: what the system has, or what is left of a container's share."""
    free = []
    with contextlib.suppress(OSError, TypeError):
        free.append(int(re.search(r"MemAvailable:\s*(\d+) kB", MEMINFO.read_text())[1]) * 1024)
    for limit, used, parts in FILES:
        with contextlib.suppress(OSError, TypeError, ValueError):  # "max": no limit
            cached = int(re.search(r"^(?:total_)?inactive_file (\d+)", (CGROUPS / parts).read_text(), re.M)[1])
            free.append(int((CGROUPS / limit).read_text()) - int((CGROUPS / used).read_text()) + cached)
    if not free:  # no Linux: half of what is built in
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(free)
