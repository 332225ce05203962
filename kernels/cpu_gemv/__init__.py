"""Matrix–vector product on the CPU, in C, from one slow thread to the memory's full speed.

    y = W x        W (rows, cols) float32, or float16 for `half`;   x (cols,) float32   ->   y (rows,) float32

One call moves at least rows·cols weights (4 or 2 bytes each), x once and y once, and does 2·rows·cols flops: half a
flop per byte at float32, one at float16. So reading is the limit, on every processor there is.

All rungs take and return NumPy arrays and have one signature:

    rung(W, x, *, out=None, threads=None, isa=None)

    out      a float32 array of shape (rows,) to write into; must not overlap W or x
    threads  how many threads, 256 at most (default: all that this process may use); `naive` uses one
    isa      "avx512", "avx2" or "portable" (default: the best that this processor has); for `simd` and up

Sums are float32. Any size is legal, 0 included. TypeError or ValueError, before anything is written, for a wrong
dtype, rank, shape, layout or an overlap. NaN and infinity pass through.
OpenMP's threads do not survive a fork: in multiprocessing, use the start method "spawn".
"""

from pathlib import Path

import numpy as np

from lab import Rung, machine
from lab.arguments import expect_apart, expect_array
from lab.compiler import compile_c

HERE = Path(__file__).resolve().parent
VEC = HERE.parent / "vec.h"
PLAIN = ("naive", "openmp")  # nothing in them depends on the processor, whatever isa says
_libraries = {}


def naive(W, x, *, out=None, threads=None, isa=None):
    """Rung 1: two loops, one thread, one sum."""
    return _run("naive", np.float32, W, x, out, threads, isa)


def openmp(W, x, *, out=None, threads=None, isa=None):
    """Rung 2: the rows are shared out among threads."""
    return _run("openmp", np.float32, W, x, out, threads, isa)


def simd(W, x, *, out=None, threads=None, isa=None):
    """Rung 3: vector instructions and four accumulators."""
    return _run("simd", np.float32, W, x, out, threads, isa)


def rows(W, x, *, out=None, threads=None, isa=None):
    """Rung 4: eight rows at a time."""
    return _run("rows", np.float32, W, x, out, threads, isa)


def prefetch(W, x, *, out=None, threads=None, isa=None):
    """Rung 5: while eight rows are worked on, the next eight are asked for."""
    return _run("prefetch", np.float32, W, x, out, threads, isa)


def half(W, x, *, out=None, threads=None, isa=None):
    """Rung 6: float16 weights, converted on the way in. W is float16; x, the sums and y are float32."""
    return _run("half", np.float16, W, x, out, threads, isa)


def gemv(W, x, *, out=None, threads=None, isa=None):
    """The best rung for W's dtype: `prefetch` for float32, `half` for float16."""
    expect_array("gemv", "W", W, dtype=(np.float32, np.float16), shape=("rows", "cols"))
    return (half if W.dtype == np.float16 else prefetch)(W, x, out=out, threads=threads, isa=isa)


RUNGS = [
    Rung("naive", "naive C", naive, ("kernels/cpu_gemv/naive.c",)),
    Rung("openmp", "OpenMP threads", openmp, ("kernels/cpu_gemv/openmp.c",)),
    Rung("simd", "SIMD, four accumulators", simd, ("kernels/cpu_gemv/simd.c", "kernels/vec.h")),
    Rung("rows", "eight rows at a time", rows, ("kernels/cpu_gemv/rows.c", "kernels/vec.h")),
    Rung("prefetch", "prefetch of the next eight", prefetch, ("kernels/cpu_gemv/prefetch.c", "kernels/vec.h")),
    Rung("half", "fp16 weights", half, ("kernels/cpu_gemv/half.c", "kernels/vec.h")),
]


def work(W):
    """(bytes, flops) that one call with this matrix must move and do."""
    n_rows, n_cols = W.shape
    return W.nbytes + 4 * (n_cols + n_rows), 2 * W.size


def _run(rung, dtype, W, x, out, threads, isa):
    expect_array(rung, "W", W, dtype=dtype, shape=("rows", "cols"))
    expect_array(rung, "x", x, dtype=np.float32, shape=(W.shape[1],))
    threads, isa = machine.expect_threads_and_isa(rung, threads, isa)
    if out is None:
        out = np.empty(W.shape[0], np.float32)
    else:
        expect_array(rung, "out", out, dtype=np.float32, shape=(W.shape[0],), writeable=True)
        expect_apart(rung, out, W=W, x=x)
    _library(rung, "portable" if rung in PLAIN else isa).gemv(W, x, out, *W.shape, threads)
    return out


def _library(rung, isa):
    key = rung, isa
    if key not in _libraries:
        _libraries[key] = compile_c(HERE / f"{rung}.c", flags=machine.ISA_FLAGS[isa], headers=[VEC])
    return _libraries[key]
