"""Which kernels of the SIMT machine's tests NVIDIA's assembler has taken: they need not be assembled on every run.

A test's kernel that no card would take shows nothing. So each is assembled once, and `pytest tests/test_simt_x.py
--store-assembled` notes its hash in assembled.txt. One that is not there, because it is new or has changed, is
assembled on every run, as all are where the compiler is another.
"""

from pathlib import Path

from simt import kept, nvrtc

MINIMAL = "-minimal"  # as in lab/cuda/module.py, which imports PyTorch
STORED = Path(__file__).with_suffix(".txt")
FILES = ("test_simt_ahead", "test_simt_hopper", "test_simt_kernel", "test_simt_machine", "test_simt_memory")
FILES += ("test_simt_memory_model",)


def read():
    """{test file: hashes of what the assembler took}; empty where another compiler took it."""
    version, *lines = STORED.read_text(encoding="utf-8").splitlines()
    found = {}
    if version == compiler():
        for file, key in map(str.split, lines):
            found.setdefault(file, set()).add(key)
    return found


def write(taken):
    """Note what was taken in this run, in place of what was noted of the same test files."""
    lines = [f"{file} {key}\n" for file, keys in sorted((read() | taken).items()) for key in sorted(keys)]
    STORED.write_text(f"{compiler()}\n{''.join(lines)}", encoding="utf-8")


def compiler():
    return "NVRTC {}.{}".format(*nvrtc.version())


def compile_with(compile_to_ptx, known, taken):
    """In place of compile_to_ptx: what is `known` is not assembled. Adds to `taken` what is known or was assembled."""

    def compiled(source, options=(), arch="sm_90", name="kernel.cu", assembled=True, **more):
        key = kept.digest(source, arch, *options)[:16] if isinstance(source, str) and isinstance(arch, str) else None
        if key in known:
            options, assembled = (*options, MINIMAL), False
        ptx = compile_to_ptx(source, options, arch, name, assembled, **more)
        if key:
            taken.add(key)
        return ptx

    return compiled
