"""Write fat binaries, and libraries that hold them."""

import os
import re
import struct
import subprocess
import tempfile
from pathlib import Path

from lab.fatbin.entry import CONTAINER, EXACT, FAMILY, HEAD, KINDS, LZ4, MAGIC, USUAL, ZSTD

NUMBERS = {name: number for number, name in KINDS.items()}
VERSIONS = {"elf": (1, 8), "ptx": (9, 0)}  # as CUDA 13.0 writes them: (major, minor)
OPTIONS = struct.pack("<QQ", HEAD.size + 8, 0)  # of ptxas: where they stand, and none. PTX is not found without them
LIBRARY = """
    .section .nv_fatbin, "a"
    .balign 8
{parts}
    .section .note.GNU-stack, "", @progbits
"""


def container(parts, compression=""):
    """A fat binary's bytes.

    parts        [(kind, arch, image), ...]: ("elf", "sm_90a", a cubin) or ("ptx", "sm_90", PTX text), as bytes
    compression  "zstd" or "lz4" for all of them, "" for none
    """
    if compression not in ("", "zstd", "lz4"):
        raise ValueError(f'container: compression must be "zstd", "lz4" or "", got {compression!r}')
    body = b"".join(_entry(*part, compression) for part in parts)
    return CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(body)) + body


def _entry(kind, arch, image, compression):
    if kind not in NUMBERS:
        raise ValueError(f'container: a kind must be "elf" or "ptx", got {kind!r}')
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch)
    if not match:
        raise ValueError(f'container: an architecture must be such as "sm_90" or "sm_90a", got {arch!r}')
    if not isinstance(image, (bytes, bytearray)):
        raise TypeError(f"container: an image must be bytes, got {type(image).__name__}")
    flags = USUAL | {"a": EXACT, "f": FAMILY, "": 0}[match[2]] | {"zstd": ZSTD, "lz4": LZ4, "": 0}[compression]
    payload = _packed(image, compression)
    padded = payload + bytes(-len(payload) % 8)
    sizes = (len(payload), len(image)) if compression else (0, 0)
    major, minor = VERSIONS[kind]
    options = OPTIONS if kind == "ptx" else b""
    at, size = (HEAD.size if options else 0), HEAD.size + len(options)
    header = HEAD.pack(
        NUMBERS[kind], 0x101, size, len(padded), sizes[0], at, minor, major, int(match[1]), 0, 0, flags, 0, sizes[1]
    )
    return header + options + padded


def _packed(image, compression):
    if compression == "zstd":
        import zstandard

        return zstandard.ZstdCompressor(level=3).compress(image)
    if compression == "lz4":
        import lz4.block

        return lz4.block.compress(image, store_size=False)
    return bytes(image)


def library(path, containers, source="", gap=0):
    """Make a shared library that holds these containers in its section .nv_fatbin, one behind another.

    source  C code that is compiled into it
    gap     bytes of zeros between two containers

    Raises lab.NoCompiler without a C compiler, lab.CompileError if the source does not compile.
    """
    from lab.compiler import CompileError, find_compiler

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "code.c").write_text(source + "\n")
        lines = []
        for n, data in enumerate(containers):
            (Path(folder) / f"{n}.fatbin").write_bytes(data)
            lines.append(f'    .balign 8\n    .incbin "{n}.fatbin"\n    .zero {gap}')
        (Path(folder) / "held.s").write_text(LIBRARY.format(parts="\n".join(lines)))
        command = [*find_compiler(), "-shared", "-fPIC", "-O1", "-Wl,-z,noexecstack"]
        command += ["code.c", "held.s", "-o", os.path.abspath(path)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CompileError(f"{Path(path).name} does not build:\n{done.stderr.strip()}")
    return Path(path)
