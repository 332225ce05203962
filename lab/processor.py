"""What processor is this? Code that is compiled here is kept by the answer (compiler.py)."""

import contextlib
import functools
import platform
import re
import subprocess
from pathlib import Path


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


@functools.cache
def features():
    """All that tells this processor from others with the same name: code compiled for one may not run on another."""
    with contextlib.suppress(OSError):
        line = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
        if line:
            return f"{cpu_name()} {line[0]}"
    return cpu_name()
