"""Matrix product on the CPU: from Python loops to a kernel that keeps up with NumPy's library.

    C = A B        A (m, k), B (k, n), C (m, n), all float32

One call must move 4·(m·k + k·n + m·n) bytes at the least and does 2·m·n·k flops: at 1024 cubed that is 171 flops
per byte, so arithmetic is the limit, not memory.

All rungs take and return NumPy arrays and have one signature:

    rung(A, B, *, out=None, threads=None, isa=None)

    out      a float32 array of shape (m, n) to write into; must not overlap A or B
    threads  how many threads, 256 at most (default: all that this process may use); only `threads` uses more than one
    isa      "avx512", "avx2" or "portable" (default: the best that this processor has); not for `python_loops`

Sums are float32. Any size is legal, 0 included. TypeError or ValueError, before anything is written, for a wrong
dtype, rank, shape, layout or an overlap; MemoryError if there is no room for the packed panels. NaN and infinity
pass through.
OpenMP's threads do not survive a fork: in multiprocessing, use the start method "spawn".
"""

from pathlib import Path

import numpy as np

from kernels.cpu_matmul import python_loops as _python
from lab import Rung, machine
from lab.arguments import expect_apart, expect_array
from lab.compiler import compile_c

HERE = Path(__file__).resolve().parent
HEADERS = [HERE.parent / "vec.h", HERE / "block.h"]
_libraries = {}


def python_loops(A, B, *, out=None, threads=None, isa=None):
    """Rung 1: three loops in Python."""
    out, _, _ = _arguments("python_loops", A, B, out, threads, isa)
    _python.matmul(A, B, out)
    return out


def naive(A, B, *, out=None, threads=None, isa=None):
    """Rung 2: the same loops in C."""
    return _run("naive", A, B, out, threads, isa)


def loop_order(A, B, *, out=None, threads=None, isa=None):
    """Rung 3: the loops in the order that walks along rows."""
    return _run("loop_order", A, B, out, threads, isa)


def tiled(A, B, *, out=None, threads=None, isa=None):
    """Rung 4: a tile of B at a time, used while it is in the cache."""
    return _run("tiled", A, B, out, threads, isa)


def registers(A, B, *, out=None, threads=None, isa=None):
    """Rung 5: a block of C in vector registers; A and B are read where they lie."""
    return _run("registers", A, B, out, threads, isa)


def panels(A, B, *, out=None, threads=None, isa=None):
    """Rung 6: A and B are first copied into the order in which the block asks for them."""
    return _run("panels", A, B, out, threads, isa)


def five_loops(A, B, *, out=None, threads=None, isa=None):
    """Rung 7: as much of A and of B is packed at a time as stays in the caches until it has been used."""
    return _run("five_loops", A, B, out, threads, isa)


def threads(A, B, *, out=None, threads=None, isa=None):
    """Rung 8: rows of C shared out among threads."""
    return _run("threads", A, B, out, threads, isa)


def matmul(A, B, *, out=None, threads=None, isa=None):
    """The best rung."""
    return _run("threads", A, B, out, threads, isa)


_BLOCK = ("kernels/cpu_matmul/block.h", "kernels/vec.h")
RUNGS = [
    Rung("python_loops", "Python loops", python_loops, ("kernels/cpu_matmul/python_loops.py",)),
    Rung("naive", "naive C", naive, ("kernels/cpu_matmul/naive.c",)),
    Rung("loop_order", "loop order", loop_order, ("kernels/cpu_matmul/loop_order.c",)),
    Rung("tiled", "tiles", tiled, ("kernels/cpu_matmul/tiled.c",)),
    Rung("registers", "registers and SIMD", registers, ("kernels/cpu_matmul/registers.c", *_BLOCK)),
    Rung("panels", "packed panels", panels, ("kernels/cpu_matmul/panels.c", *_BLOCK)),
    Rung("five_loops", "five loops", five_loops, ("kernels/cpu_matmul/five_loops.c", *_BLOCK)),
    Rung("threads", "threads", threads, ("kernels/cpu_matmul/threads.c", *_BLOCK)),
]


def blocking(isa=None):
    """{"MR": …, "NR": …, "KC": …, "MC": …, "NC": …}: the sizes of block.h, in floats.

    isa: as for the rungs. A block of C has MR rows and NR columns; KC steps along p, MC rows of A and NC columns of B
    are packed at a time.
    """
    _, isa = machine.expect_threads_and_isa("blocking", None, isa)
    names = ("MR", "NR", "KC", "MC", "NC")
    copy = f"int64_t of[] = {{{', '.join(names)}}}; memcpy(sizes, of, sizeof of);"
    source = f'#include "block.h"\nvoid blocking(int64_t *sizes) {{ {copy} }}'
    sizes = np.empty(len(names), np.int64)
    compile_c(source, flags=machine.ISA_FLAGS[isa], headers=HEADERS, name="blocking.c").blocking(sizes)
    return dict(zip(names, sizes.tolist(), strict=True))


def work(m, n, k):
    """(bytes, flops) that one product must move at the least, and do."""
    return 4 * (m * k + k * n + m * n), 2 * m * n * k


def _arguments(where, A, B, out, n_threads, isa):
    expect_array(where, "A", A, dtype=np.float32, shape=("m", "k"))
    expect_array(where, "B", B, dtype=np.float32, shape=(A.shape[1], "n"))
    n_threads, isa = machine.expect_threads_and_isa(where, n_threads, isa)
    shape = A.shape[0], B.shape[1]
    if out is None:
        return np.empty(shape, np.float32), n_threads, isa
    expect_array(where, "out", out, dtype=np.float32, shape=shape, writeable=True)
    expect_apart(where, out, A=A, B=B)
    return out, n_threads, isa


def _run(rung, A, B, out, n_threads, isa):
    out, n_threads, isa = _arguments(rung, A, B, out, n_threads, isa)
    key = rung, isa
    if key not in _libraries:
        _libraries[key] = compile_c(HERE / f"{rung}.c", flags=machine.ISA_FLAGS[isa], headers=HEADERS)
    (m, k), n = A.shape, B.shape[1]
    if _libraries[key].matmul(A, B, out, m, n, k, n_threads):
        raise MemoryError(f"{rung}: no memory for the packed panels of A and B")
    return out
