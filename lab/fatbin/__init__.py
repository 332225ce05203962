"""Device code inside libraries: fat binaries, read entry by entry and written.

    entries = fatbin.read("libtorch_cuda.so")      of a library, an object file, an archive, a fat binary or a cubin
    entries[0].arch, .kind, .size, .stored         "sm_90", "elf", bytes unpacked, bytes in the file
    entries[0].kernels, .image()                   ("gemm", ...), the cubin or PTX itself

    fatbin.container([("elf", "sm_90", cubin)])    a fat binary's bytes
    fatbin.library("libmine.so", containers)       a shared library that holds some

The format is NVIDIA's own and undocumented; entry.py says what is known of it. Files are read by their headers: of a
library of 500 MB, some hundred kilobytes. Unpacking needs the packages zstandard and lz4.
"""

from lab.fatbin.damage import Damaged
from lab.fatbin.entry import Entry
from lab.fatbin.reading import containers, read
from lab.fatbin.writing import container, library

__all__ = ["Damaged", "Entry", "container", "containers", "library", "read"]
