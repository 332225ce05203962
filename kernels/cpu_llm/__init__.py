"""What a whole language model needs on the CPU beside chapter 02's products: bf16 weights, and attention.

    gemv(W, x)           fp32, fp16 and bf16 weights; sums and results are float32
    attention(q, k, v)   one new token over a cache in fp16

NumPy arrays in and out; bfloat16, which NumPy has not, travels as uint16. `threads` and `isa` as in kernels/cpu_gemv.
TypeError or ValueError names the argument, what was expected and what came, before anything is written.
"""

from pathlib import Path

import numpy as np

from kernels import cpu_gemv
from lab import machine
from lab.arguments import expect_apart, expect_array
from lab.compiler import compile_c

HERE = Path(__file__).resolve().parent
HEADERS = [HERE.parent / "vec.h", HERE / "bfloat.h", HERE / "tile.h"]
_libraries = {}


def gemv(W, x, *, out=None, threads=None, isa=None):
    """y = W x. W (rows, cols) float32, float16, or uint16 that holds bfloat16; x (cols,) float32 → (rows,) float32.

    Moves itemsize · rows · cols bytes, and 4 · (rows + cols); 2 · rows · cols flops.
    """
    expect_array("gemv", "W", W, dtype=(np.float32, np.float16, np.uint16), shape=("rows", "cols"))
    if W.dtype != np.uint16:
        return cpu_gemv.gemv(W, x, out=out, threads=threads, isa=isa)
    expect_array("gemv", "x", x, dtype=np.float32, shape=(W.shape[1],))
    threads, isa = machine.expect_threads_and_isa("gemv", threads, isa)
    out = _output("gemv", out, (len(W),), W=W, x=x)
    _library("bfloat", isa).gemv(W, x, out, *W.shape, threads)
    return out


def attention(q, k, v, kv_len, scale=None, *, out=None, threads=None, isa=None):
    """softmax(scale · q Kᵀ) V over the first kv_len tokens of a cache.

    q      (n_heads, head_dim) float32
    k, v   (n_kv_heads, capacity, head_dim) float16; n_heads is a multiple of n_kv_heads
    kv_len from 1 to capacity; what stands behind is not read
    scale  head_dim**-0.5 unless given
    → (n_heads, head_dim) float32

    Moves 4 · n_kv_heads · kv_len · head_dim bytes; 4 · n_heads · kv_len · head_dim flops.
    """
    expect_array("attention", "q", q, dtype=np.float32, shape=("n_heads", "head_dim"))
    n_heads, head_dim = q.shape
    expect_array("attention", "k", k, dtype=np.float16, shape=("n_kv_heads", "capacity", head_dim))
    expect_array("attention", "v", v, dtype=np.float16, shape=k.shape)
    n_kv_heads, capacity, _ = k.shape
    if n_kv_heads == 0 or n_heads % n_kv_heads or n_heads == 0:
        raise ValueError(f"attention: n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}")
    if isinstance(kv_len, bool) or not isinstance(kv_len, (int, np.integer)) or not 1 <= kv_len <= capacity:
        raise ValueError(f"attention: kv_len must be a whole number from 1 to {capacity}, got {kv_len!r}")
    threads, isa = machine.expect_threads_and_isa("attention", threads, isa)
    out = _output("attention", out, q.shape, q=q, k=k, v=v)
    parts = max(1, min(-(-threads // n_kv_heads), -(-int(kv_len) // 64)))
    partial = np.empty((parts, n_heads, head_dim + 2), np.float32)
    scale = float(head_dim**-0.5 if scale is None else scale)
    sizes = (n_heads, n_kv_heads, head_dim, capacity, int(kv_len), parts)
    _library("attention", isa).attention(q, k, v, out, partial, *sizes, scale, threads)
    return out


def _output(where, out, shape, **inputs):
    if out is None:
        return np.empty(shape, np.float32)
    expect_array(where, "out", out, dtype=np.float32, shape=shape, writeable=True)
    expect_apart(where, out, **inputs)
    return out


def _library(name, isa):
    if (name, isa) not in _libraries:
        _libraries[name, isa] = compile_c(HERE / f"{name}.c", flags=machine.ISA_FLAGS[isa], headers=HEADERS)
    return _libraries[name, isa]
