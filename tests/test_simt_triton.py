"""wgmma and tensor maps against an independent author: Triton's compiled kernels, run by the machine.

Triton chooses the layouts of shared memory, descriptors, swizzles and fragments by its own rules, which run on cards
every day. Compiling for sm_90 needs no GPU.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import simt

pytest.importorskip("triton")
RNG = np.random.default_rng(36)


@pytest.fixture(scope="module")
def compiled():
    """compiled(name, types, constants, warps) -> (kernel, ptx, bytes of shared memory, tensor maps)"""
    from triton_kernels import compile_ptx

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:

        def of(*what):
            ptx, shared, maps = apart.submit(compile_ptx, *what).result()
            module = simt.load(ptx)
            return module[module.names[0]], ptx, shared, maps

        yield of


def rest(kernel, given):
    """The pointers to scratch memory that Triton adds, which these kernels do not use."""
    return [np.uint64(0)] * (len(kernel.program.parameters) - len(given))


SHAPES = [("fp16", 64, 64, 32, 4), ("fp16", 64, 8, 64, 4), ("fp16", 128, 256, 64, 8), ("bf16", 64, 128, 16, 4)]


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("kind", "m", "n", "k", "warps"), SHAPES)
def test_products(compiled, kind, m, n, k, warps, ta, tb):
    constants = {"M": m, "N": n, "K": k, "TA": ta, "TB": tb}
    types = {"a": "*" + kind, "b": "*" + kind, "c": "*fp32"}
    kernel, ptx, shared, _ = compiled("dot", types, constants, warps)
    assert "wgmma.mma_async" in ptx or n == 8  # Triton 3.6 takes mma.sync for 8 columns
    a, b = RNG.integers(-4, 5, (m, k)), RNG.integers(-4, 5, (k, n))

    def bits(x):
        x = np.ascontiguousarray(x, np.float32)
        return x.astype(np.float16) if kind == "fp16" else (x.view(np.uint32) >> 16).astype(np.uint16)

    c = np.full((m, n), np.nan, np.float32)
    given = [bits(a.T if ta else a), bits(b.T if tb else b), c]
    kernel(1, 32 * warps, *given, *rest(kernel, given), shared=shared, check_races=True)
    assert (c == a @ b).all()


@pytest.mark.parametrize(("bm", "bn", "d", "warps"), [(128, 64, 64, 8), (64, 128, 128, 4)])
def test_attention_through_tensor_maps(compiled, bm, bn, d, warps):
    """Three stages of K and V by TMA, P from registers, the output by TMA; 330 tokens, so that boxes hang over."""
    box = {"q": (bm, d), "k": (bn, d), "v": (bn, d), "o": (bm, d)}
    types = {name: f"tensordesc<fp16{list(size)}>" for name, size in box.items()} | {"kv_len": "i32"}
    try:
        kernel, ptx, shared, maps = compiled("attention", types, {"BM": bm, "BN": bn, "D": d}, warps)
    except (AttributeError, KeyError, TypeError) as error:
        pytest.skip(f"another Triton's tensor descriptors: {error}")
    swizzles, boxes = [(0, 32, 64, 128)[swizzle] for swizzle, _ in maps], [box for _, box in maps]
    for name in ("cp.async.bulk.tensor.2d.global", "mbarrier.try_wait", "wgmma.mma_async"):
        assert name in ptx
    tokens = 384
    q, k, v = ((RNG.standard_normal((tokens, d)) / 3).astype(np.float16) for _ in range(3))
    o = np.full((330, d), np.nan, np.float16)
    given = []
    for array, size, swizzle in zip((q[:330], k, v, o), boxes, swizzles):
        given += [simt.TensorMap(array, size, swizzle=swizzle)]
        given += [np.int32(n) for n in array.shape] + [np.int64(n // 2) for n in array.strides]
    given.append(np.int32(tokens))
    kernel(-(-330 // bm), 32 * warps, *given, *rest(kernel, given), shared=shared, check_races=True)
    scores = q[:330].astype(np.float64) @ k.astype(np.float64).T
    p = np.exp2(scores - scores.max(axis=1, keepdims=True))
    right = p / p.sum(axis=1, keepdims=True) @ v.astype(np.float64)
    assert np.abs(o - right).max() < 1e-3
