"""The machine code that NVIDIA's compiler made, as text, and what it costs. None of it needs a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def find_tool(name="nvdisasm"):
    """The path of a binary tool of CUDA: from Triton's package, which carries them, else from an installed toolkit."""
    spec = importlib.util.find_spec("triton")
    places = [Path(spec.origin).parent / "backends" / "nvidia" / "bin"] if spec and spec.origin else []
    places += [Path(os.environ[home]) / "bin" for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    places += [Path("/usr/local/cuda/bin")]
    tool = next((str(place / name) for place in places if (place / name).is_file()), None) or shutil.which(name)
    if tool is None:
        raise RuntimeError(
            f"machine code is shown by {name}, which comes with Triton (Linux) or with the CUDA toolkit, and was not "
            "found; module.ptx() needs neither"
        )
    return tool


def sass(cubin, kernel=None):
    """The instructions of one kernel in a cubin, or of all: text, without the sections that hold no code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([find_tool(), "--print-code", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip() or done.stdout.strip() or done.returncode}")
    parts = {}
    for part in re.split(r"^\s*\.section\s+(?=\.text\.)", done.stdout, flags=re.M)[1:]:
        name = re.match(r"\.text\.([\w$]+)", part)[1]
        lines = re.findall(r"^(?: +/\*[0-9a-f]+\*/.*|\.L_\w+:)$", part, flags=re.M)  # instructions and labels
        while lines and ("NOP" in lines[-1] or lines[-1].startswith(".")):  # padding
            lines.pop()
        parts[name] = "\n".join([f"{name}:", *lines, ""])
    return parts[kernel] if kernel else "\n".join(parts.values())


def resources(log):
    """{kernel: {"registers", "shared", "stack", "spill_stores", "spill_loads"}} from the words of ptxas -v."""
    found = {}
    for part in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'([^']*)'", part)[1]

        def number(pattern, part=part):
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        found[name] = {
            "registers": number(r"Used (\d+) registers"),
            "shared": number(r"(\d+) bytes smem"),
            "stack": number(r"(\d+) bytes stack frame"),
            "spill_stores": number(r"(\d+) bytes spill stores"),
            "spill_loads": number(r"(\d+) bytes spill loads"),
        }
    return found
