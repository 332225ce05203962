"""Arm processors of 64 bits: C rungs compile for Linux and macOS by clang, and what stands on NEON runs, by qemu.

It takes a compiler for them (ziglang from pip, or aarch64-linux-gnu-gcc) and qemu-aarch64-static. Where a machine is an
Arm itself, all tests of CPU chapters are this test.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.compiler import BASE_FLAGS, PRELUDE

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for path in sorted(ROOT.glob("kernels/cpu_*/*.c")) if path.name != "token.c"]  # which flags complete
PROGRAM = ROOT / "tests" / "arm_program.c"
FLAGS = [flag for flag in BASE_FLAGS if flag not in ("-shared", "-fPIC")]
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def compilers():
    """{target: command} of what is installed."""
    found = {}
    try:
        import ziglang

        zig = [str(Path(ziglang.__file__).with_name("zig")), "cc", "-target"]
        found = {"linux": [*zig, "aarch64-linux-musl"], "macos": [*zig, "aarch64-macos"]}
    except ImportError:
        if gcc := shutil.which("aarch64-linux-gnu-gcc"):
            found["linux"] = [gcc]
    return found


COMPILERS = compilers()


def built(target, text, folder, *options):
    """A source compiled, as lab/compiler.py completes it; its path."""
    source, made = folder / "source.c", folder / "made"
    source.write_text(PRELUDE + text, encoding="utf-8")
    said = subprocess.run(
        [*COMPILERS[target], *FLAGS, *options, str(source), "-o", str(made)], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    return made


@pytest.mark.parametrize("target", ["linux", "macos"])
def test_c_rungs_compile(target, tmp_path):
    if target not in COMPILERS:
        pytest.skip("needs a compiler for Arm: pip install ziglang")
    for path in [*SOURCES, ROOT / "lab" / "roof.c"]:
        built(target, path.read_text(encoding="utf-8"), tmp_path, f"-I{path.parent}", f"-I{ROOT / 'kernels'}", "-c")


def test_neon_is_right(tmp_path):
    if sys.platform != "linux" or "linux" not in COMPILERS or not QEMU:
        pytest.skip("needs a compiler for Arm and qemu-aarch64-static")
    includes = '#include "cpu_matmul/block.h"\n#include "cpu_llm/bfloat.h"\n'
    text = includes + PROGRAM.read_text(encoding="utf-8")
    program = built("linux", text, tmp_path, f"-I{ROOT / 'kernels'}", "-static", "-lm")
    said = subprocess.run([QEMU, str(program)], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0 and said.stdout == "", said.stdout or said.stderr
