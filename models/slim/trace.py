"""Which device code does a workload load? A library that the driver loads (inject.c) is told of every module."""

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from lab.compiler import NoCompiler, compile_c
from lab.fatbin import elf
from models.slim import cut, running, tree
from models.slim.problems import Problem, why

SOURCE = Path(__file__).resolve().parent / "inject.c"
LAZY = {"CUDA_MODULE_LOADING": "LAZY"}  # eager, everything is loaded, and nothing is learnt


def injection():
    """The path of the compiled library. Problem where there is no compiler."""
    try:
        return compile_c(SOURCE, flags=("-pthread", "-ldl"), openmp=False).path
    except NoCompiler as error:
        raise Problem(f"trace: expected a C compiler and found none ({error})") from None


def cupti(folder):
    """The path of libcupti.so: the one that SLIM_CUPTI names, else the environment's, else CUDA's. Problem if none."""
    named = os.environ.get("SLIM_CUPTI")
    if named:
        if not os.path.isfile(named):
            raise Problem(f"trace: expected SLIM_CUPTI to name libcupti.so and found no such file: {named}")
        return named
    found = [file.path for file in tree.libraries(folder) if file.path.name.startswith("libcupti.so")]
    found.sort(key=lambda path: ("triton" in path.parts, path.as_posix()))  # Triton's is of another CUDA
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            places = [Path(home) / "lib64", Path(home) / "extras" / "CUPTI" / "lib64"]
            found += [path for place in places for path in sorted(place.glob("libcupti.so*"))]
    if not found:
        raise Problem(
            "trace: expected libcupti.so in ENVIRONMENT or in CUDA_HOME and found none: "
            "install nvidia-cuda-cupti, or name it with SLIM_CUPTI"
        )
    return str(found[0])


def gather(folder, command, where=None, by=None):
    """(Run, [cubin, ...], launched names, failed [(error, name), ...]) of a command in an environment, or in `where`, a
    copy of it. by: the path of libcupti.so, if it is known. Problem if no process was traced."""
    here = where or folder
    with tempfile.TemporaryDirectory(prefix="slim-") as notes:
        variables = {"CUDA_INJECTION64_PATH": str(injection()), "SLIM_CUPTI": by or cupti(folder), "SLIM_TRACE": notes}
        done = running.run(running.command_in(command, folder, here), here, variables | LAZY)
        lines = [line for path in sorted(Path(notes).glob("*.log")) for line in path.read_text().splitlines()]
        if "began" not in lines:
            words = [line.removeprefix("error ") for line in lines if line.startswith("error ")]
            last = (done.errors.strip().splitlines() or ["nothing"])[-1]
            raise Problem(
                f"trace: expected a command that uses a card and found that no process did: "
                f"{words[0].strip() if words else f'it ended with {done.code}, and its last word was {last!r}'}"
            )
        if any(line.startswith("lost") for line in lines):
            raise Problem(f"trace: expected room for what is loaded in {tempfile.gettempdir()} and found it full")
        cubins = {path.read_bytes() for path in Path(notes).glob("*.cubin")}
    launched = sorted({line.removeprefix("launched ") for line in lines if line.startswith("launched ")})
    failed = sorted({tuple(line.split(" ", 2)[1:]) for line in lines if line.startswith("failed ")})
    return done, sorted(cubins), launched, failed


def match(cubins, code):
    """({name: {entry.at, ...}}, [cubin, ...]): the entries that hold these cubins; those that none holds.

    code  {tree.File: [Entry, ...]}. Only entries of a fitting size are unpacked.
    """
    places, found, used = defaultdict(list), set(), {}
    for cubin in cubins:
        places[len(cubin)].append(cubin)
    for file, entries in code.items():
        used[file.name] = set()
        for entry in entries:
            sizes = [entry.size] if entry.compression else range(entry.size - 7, entry.size + 1)
            likely = [cubin for size in sizes for cubin in places.get(size, ())]
            if entry.kind == "elf" and likely and (image := entry.image()) in likely:
                used[file.name].add(entry.at)
                found.add(image)
    return used, [cubin for cubin in cubins if cubin not in found]


def record(folder, command, cubins, launched, code):
    """A trace, as JSON has it. Every library with device code is in it, with the hash by which it is known again."""
    used, others = match(cubins, code)
    now = cut.hashes(code)
    libraries = {f.name: {"sha256": now[f.name], "used": sorted(used[f.name])} for f in code}
    others = [elf.Bytes(cubin, "a module") for cubin in others if cubin[:4] == elf.MAGIC]
    elsewhere = [{"bytes": cubin.size, "kernels": list(elf.kernels(cubin))} for cubin in others]
    return {
        "schema": cut.SCHEMA, "from": str(folder), "command": list(command), "modules": len(cubins),
        "libraries": libraries, "elsewhere": elsewhere, "kernels": launched,
    }  # fmt: skip


def trace(folder, command, out, say=print):
    """Run a command and write to `out` what of the environment's device code it loaded. Returns the record.

    Problem where nothing can be traced, or the command fails: what it did not reach would be missing.
    """
    folder, out = tree.folder_of(folder), Path(out)
    if not out.parent.is_dir():
        raise Problem(f"--out: expected a folder to write it in and found none: {out.parent}")
    code, damaged = cut.device_code(folder)
    for sentence in damaged:
        say(f"notice: {sentence}")
    done, cubins, launched, _ = gather(folder, command)
    sys.stdout.buffer.write(done.output), sys.stdout.flush()
    if done.code:
        sys.stderr.write(done.errors)
        raise Problem(f"trace: expected a command that succeeds and found one that ended with {done.code}")
    found = record(folder, command, cubins, launched, code)
    try:
        out.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise Problem(f"--out: expected a file that can be written and found {out}: {why(error)}") from None
    return found
