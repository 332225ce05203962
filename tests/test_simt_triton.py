"""wgmma and tensor maps against an independent author: Triton's compiled kernels, run by the machine.

Triton chooses the layouts of shared memory, descriptors, swizzles and fragments by its own rules, which run on cards
every day. Compiling for sm_90 needs no GPU.
"""

import warnings

import numpy as np
import pytest

import simt

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
JITFunction = pytest.importorskip("triton.runtime.jit").JITFunction  # never the interpreter's

RNG = np.random.default_rng(36)


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


def compiled(function, types, constants, warps):
    pointers = [n for n, t in enumerate(types.values()) if t.startswith("*")]
    source = compiler.ASTSource(
        JITFunction(function), types, constexprs=constants, attrs={(n,): [["tt.divisibility", 16]] for n in pointers}
    )
    target = backends.GPUTarget("cuda", 90, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 3})
    module = simt.load(made.asm["ptx"])
    return made, module[module.names[0]]


def rest(kernel, given):
    """The pointers to scratch memory that Triton adds, which these kernels do not use."""
    return [np.uint64(0)] * (len(kernel.program.parameters) - len(given))


SHAPES = [("fp16", 64, 64, 32, 4), ("fp16", 64, 8, 64, 4), ("fp16", 128, 256, 64, 8), ("bf16", 64, 128, 16, 4)]


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("kind", "m", "n", "k", "warps"), SHAPES)
def test_products(kind, m, n, k, warps, ta, tb):
    constants = {"M": m, "N": n, "K": k, "TA": ta, "TB": tb}
    made, kernel = compiled(dot, {"a": "*" + kind, "b": "*" + kind, "c": "*fp32"}, constants, warps)
    assert "wgmma.mma_async" in made.asm["ptx"] or n == 8  # Triton 3.6 takes mma.sync for 8 columns
    a, b = RNG.integers(-4, 5, (m, k)), RNG.integers(-4, 5, (k, n))

    def bits(x):
        x = np.ascontiguousarray(x, np.float32)
        return x.astype(np.float16) if kind == "fp16" else (x.view(np.uint32) >> 16).astype(np.uint16)

    c = np.full((m, n), np.nan, np.float32)
    given = [bits(a.T if ta else a), bits(b.T if tb else b), c]
    kernel(1, 32 * warps, *given, *rest(kernel, given), shared=made.metadata.shared, check_races=True)
    assert (c == a @ b).all()


@pytest.mark.parametrize(("bm", "bn", "d", "warps"), [(128, 64, 64, 8), (64, 128, 128, 4)])
def test_attention_through_tensor_maps(bm, bn, d, warps):
    """Three stages of K and V by TMA, P from registers, the output by TMA; 330 tokens, so that boxes hang over."""
    box = {"q": (bm, d), "k": (bn, d), "v": (bn, d), "o": (bm, d)}
    types = {name: f"tensordesc<fp16{list(size)}>" for name, size in box.items()} | {"kv_len": "i32"}
    try:
        made, kernel = compiled(attention, types, {"BM": bm, "BN": bn, "D": d}, warps)
        facts = made.metadata.tensordesc_meta
        swizzles = [(0, 32, 64, 128)[f["swizzle"]] for f in facts]
        boxes = [f["block_size"] for f in facts]
    except (AttributeError, KeyError, TypeError) as error:
        pytest.skip(f"another Triton's tensor descriptors: {error}")
    for name in ("cp.async.bulk.tensor.2d.global", "mbarrier.try_wait", "wgmma.mma_async"):
        assert name in made.asm["ptx"]
    tokens = 384
    q, k, v = ((RNG.standard_normal((tokens, d)) / 3).astype(np.float16) for _ in range(3))
    o = np.full((330, d), np.nan, np.float16)
    given = []
    for array, size, swizzle in zip((q[:330], k, v, o), boxes, swizzles):
        given += [simt.TensorMap(array, size, swizzle=swizzle)]
        given += [np.int32(n) for n in array.shape] + [np.int64(n // 2) for n in array.strides]
    given.append(np.int32(tokens))
    kernel(-(-330 // bm), 32 * warps, *given, *rest(kernel, given), shared=made.metadata.shared, check_races=True)
    scores = q[:330].astype(np.float64) @ k.astype(np.float64).T
    p = np.exp2(scores - scores.max(axis=1, keepdims=True))
    right = p / p.sum(axis=1, keepdims=True) @ v.astype(np.float64)
    assert np.abs(o - right).max() < 1e-3
