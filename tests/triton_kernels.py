"""Triton kernels, compiled for sm_90.

This is done in a process of its own: Triton's interpreter, which other tests use, changes the language of its process.
"""

import warnings

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction  # never the interpreter's


def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if TA:
        x = tl.load(a + k[:, None] * M + m[None, :]).T
    else:
        x = tl.load(a + m[:, None] * K + k[None, :])
    if TB:
        y = tl.load(b + n[:, None] * K + k[None, :]).T
    else:
        y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y))


def attention(q, k, v, o, kv_len, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    start = tl.program_id(0) * BM
    x = q.load([start, 0])
    acc, total = tl.zeros((BM, D), tl.float32), tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    for j in range(0, kv_len, BN):
        s = tl.dot(x, k.load([j, 0]).T)
        higher = tl.maximum(top, tl.max(s, 1))
        p, old = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
        total, top = total * old + tl.sum(p, 1), higher
        acc = tl.dot(p.to(tl.float16), v.load([j, 0]), acc * old[:, None])
    o.store([start, 0], (acc / total[:, None]).to(tl.float16))


def compile_ptx(name, types, constants, warps):
    """Compile `dot` or `attention`. Returns (ptx, bytes of shared memory, [(swizzle, box)] of tensor maps)."""
    pointers = [n for n, t in enumerate(types.values()) if t.startswith("*")]
    source = ASTSource(
        JITFunction(globals()[name]),
        types,
        constexprs=constants,
        attrs={(n,): [["tt.divisibility", 16]] for n in pointers},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3})
    facts = getattr(made.metadata, "tensordesc_meta", None) or []
    return made.asm["ptx"], made.metadata.shared, [(f["swizzle"], f["block_size"]) for f in facts]
