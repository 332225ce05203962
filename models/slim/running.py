"""Run a command in an environment, or in its copy; and what the run took."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from models.slim.problems import Problem


@dataclass
class Run:
    """What a command wrote and took. first: seconds to its first byte of output; peak: bytes of its memory, at the
    most; gpu: bytes of the card's, None where nothing tells."""

    code: int
    output: bytes
    errors: str
    seconds: float
    first: float
    peak: int
    gpu: int | None


def environment(tree, extra=()):
    """The variables of a process that finds an environment's programs and packages first."""
    tree, found = Path(tree), {**os.environ, **dict(extra)}
    found.pop("PYTHONHOME", None)
    found["PYTHONDONTWRITEBYTECODE"] = "1"  # a run changes nothing
    if (tree / "bin").is_dir():
        found["PATH"] = f"{tree / 'bin'}{os.pathsep}{found.get('PATH', '')}"
        if (tree / "pyvenv.cfg").is_file():
            found["VIRTUAL_ENV"] = str(tree)
    if not (tree / "pyvenv.cfg").is_file():  # a folder of packages, as `pip install --target` makes them
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), found.get("PYTHONPATH")]))
    return found


def command_in(command, folder, tree):
    """The command's words, with what names the environment `folder` naming `tree` in its place."""
    folder, tree = str(folder), str(tree)
    return [tree + word[len(folder) :] if word == folder or word.startswith(folder + "/") else word for word in command]


# A process begins with the peak of the one that made it, and ours may be a large one. So a small one stands between: it
# starts the command, waits, and writes down what that took.
BETWEEN = """
import json, os, sys, time
notes = os.fdopen(int(sys.argv[1]), "w")
begin = time.monotonic()
try:
    closed = [(os.POSIX_SPAWN_CLOSE, notes.fileno())]
    process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=closed)
except OSError as error:
    sys.exit(json.dump({"error": error.errno}, notes))
print(process, file=notes, flush=True)
_, status, used = os.wait4(process, 0)
json.dump({"begin": begin, "end": time.monotonic(), "status": status, "peak": used.ru_maxrss}, notes)
"""


def run(command, tree, extra=()):
    """The Run of a command's words. Problem if it cannot be started."""
    variables = environment(tree, extra)
    read, write = os.pipe()
    words = [sys.executable, "-I", "-S", "-c", BETWEEN, str(write), *_found(command, variables)]
    with os.fdopen(read) as notes, tempfile.TemporaryFile() as errors, _Card() as card:
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        between = subprocess.Popen(words, **piped, env=variables, pass_fds=[write])
        os.close(write)
        process = notes.readline()
        try:
            output = between.stdout.read(1)
            first = time.monotonic()
            output += between.stdout.read()
            between.wait()
        except BaseException:
            for one in (int(process), between.pid) if process.strip().isdigit() else (between.pid,):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            between.wait()
            raise
        finally:
            between.stdout.close()
        found = json.loads(process if "error" in process else notes.read())
        if "error" in found:
            words = os.strerror(found["error"]).lower()
            raise Problem(f"expected a command that starts and found {command[0]}: {words}")
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    code, begin = os.waitstatus_to_exitcode(found["status"]), found["begin"]
    peak = found["peak"] * (1 if sys.platform == "darwin" else 1024)
    return Run(code, output, text, found["end"] - begin, max(0.0, first - begin), peak, card.peak)


def _found(command, variables):
    """A command whose program is looked for where the process will look, not where we do."""
    for folder in variables.get("PATH", "").split(os.pathsep) if "/" not in command[0] else ():
        if os.access(os.path.join(folder, command[0]), os.X_OK):
            return [os.path.join(folder, command[0]), *command[1:]]
    return command


class _Card:
    """Memory of all cards together, looked at 50 times a second, by the driver's own library (NVML)."""

    EVERY = 0.02

    def __init__(self):
        self.peak, self._stop = None, threading.Event()

    def __enter__(self):
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if self._nvml.nvmlInit_v2():
                raise OSError
            self._before = self._used()
        except OSError:
            self._thread = None
            return self
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _watch(self):
        while not self._stop.wait(self.EVERY):
            self.peak = max(self.peak, self._used() - self._before)

    def _used(self):
        count, total = ctypes.c_uint(), 0
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for n in range(count.value):
            device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
            self._nvml.nvmlDeviceGetHandleByIndex_v2(n, ctypes.byref(device))
            self._nvml.nvmlDeviceGetMemoryInfo(device, memory)
            total += memory[2]
        return total
