"""Attention of a new token in one launch: attend.cu, and what it is compiled for."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.attention.arguments import expect_scale
from kernels.fusion.arguments import expect_eps
from kernels.llm.arguments import expect_heads
from lab import cuda
from lab.arguments import expect_count
from lab.card import capability, multiprocessors, shared_memory
from lab.prepared import Calls
from lab.tensors import DTYPES, expect_apart, expect_no_gradient, output

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/llm/attend.cu", "kernels/llm/attending.py")
TILE, MOST_STAGES = 16, 8  # tokens; tiles of a warp's ring
CLUSTERS = 8, 4, 2  # blocks; 16 take an H200 4 µs longer, as it must find so many free at a time
SHORT, LONG, ENOUGH = 2048, 1024, 64  # tokens of a cache; of a block; blocks that read about as fast as all
# Blocks beside which others fit: their warps, stages; and tokens of a block's part of the cache up to which few do
FEW_WARPS, FEW_WARPS_TOKENS, MORE_WARPS = (4, 2), 128, (8, 2)
LOG2_E = math.log2(math.e)
CALLS = Calls("attend", outs=3)


class Plan(NamedTuple):
    cluster: int  # blocks of a kv head
    warps: int  # of a block
    stages: int  # tiles of a warp's ring
    shared: int  # bytes


def attends(n_heads, n_kv_heads, head_dim, capacity, device="cuda"):
    """Whether `attend` takes such heads and is no worse than rope_append and decode: for a short cache, or where the
    clusters are half of the card and none of their blocks has much to read.

    ValueError where these are no heads: counts from 1, n_heads a multiple of n_kv_heads."""
    counts = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "capacity": capacity}
    for name, count in counts.items():
        expect_count("attends", name, count)
    if n_heads % n_kv_heads:
        raise ValueError(f"attends: n_heads must be a multiple of n_kv_heads, {n_kv_heads}, got {n_heads}")
    group, device = n_heads // n_kv_heads, torch.device(device)
    if capability(device) < (9, 0):
        return False
    if (
        group > 16
        or head_dim % 16
        or head_dim > 256
        or (found := _plan_for(device, group, n_kv_heads, head_dim)) is None
    ):
        return False
    return capacity <= SHORT or (n_kv_heads * found.cluster >= ENOUGH and capacity <= LONG * found.cluster)


def attend(
    qkv, turns, kv_len, k, v, *, bias=None, q_norm=None, k_norm=None, eps=1e-6, scale=None, out=None, beside=False,
    pdl=False,
):  # fmt: skip
    """rope_append, and softmax(scale · q Kᵀ) V of all tokens so far: a token's whole attention.

    qkv … eps  as for `rope_append`, k and v (capacity, n_kv_heads, head_dim) tensors, written at the new token's place
    scale      head_dim**-0.5 unless given
    beside     whether blocks are to be so small that others fit beside them, of the launch ahead and of the next one
    pdl        as for `rope_append`; but kv_len, bias, norms, and keys and values of earlier tokens are read at once:
               none of the launches ahead that may still run may write them
    → (n_heads, head_dim)

    Up to 16 query heads of a kv head, head_dim a multiple of 16 (of 32 at least for clusters of 8). Moves 4 · kv_len ·
    n_kv_heads · head_dim bytes. Needs compute capability 9.0.
    """
    options = eps, scale, beside, pdl
    others = qkv, turns, kv_len, bias, q_norm, k_norm
    if (done := CALLS.run(options, out, k, v, *others)) is not None:
        return done[0]
    result, found, n_heads, n_kv_heads, capacity = expect_attend(
        qkv, turns, kv_len, k, v, bias, q_norm, k_norm, eps, scale, out, beside
    )
    with CALLS.preparing(options, (out, k, v), (result, k, v), others):
        _launch(found, n_heads, n_kv_heads, capacity, others, k, v, result, eps, scale, pdl)
    return result


def expect_attend(
    qkv, turns, kv_len, k, v, bias=None, q_norm=None, k_norm=None, eps=1e-6, scale=None, out=None,
    beside=False, *, memory=True,
):  # fmt: skip
    """Raise unless attend can be called so. Returns (the tensor to write to, the Plan, n_heads, n_kv_heads, capacity).
    memory: whether the tensors have any, so that it can be seen whether they share it."""
    where = "attend"
    expect_eps(where, eps)
    expect_scale(where, scale, 1)
    n_heads, n_kv_heads, capacity, places = expect_heads(where, qkv, turns, kv_len, k, v, bias, q_norm, k_norm)
    if not isinstance(k, torch.Tensor):
        raise TypeError(f"{where}: k and v must be tensors, got {type(k).__name__}; rope_append takes such a cache")
    head_dim = qkv.shape[1]
    planned = plan if memory else plan.__wrapped__  # which has no cache: sizes may be symbols
    group, card = n_heads // n_kv_heads, (multiprocessors(qkv.device), shared_memory(qkv.device))
    found = planned(group, n_kv_heads, head_dim, *card)
    if found is not None and beside and memory:
        warps, stages = FEW_WARPS if capacity <= FEW_WARPS_TOKENS * found.cluster else MORE_WARPS
        found = planned(group, n_kv_heads, head_dim, *card, found.cluster, warps, min(stages, found.stages))
    if found is None or head_dim % 16 or head_dim > 256:
        got = f"{n_heads // n_kv_heads} and {head_dim}"
        raise ValueError(
            f"{where}: at most 16 query heads of a kv head, and a head_dim of multiples of 16 up to 256, got {got}"
        )
    inputs = {"qkv": qkv, "turns": turns, "kv_len": kv_len, "bias": bias, "q_norm": q_norm, "k_norm": k_norm}
    for name, place in places.items():
        if place.data_ptr() % 16:
            raise ValueError(f"{where}: {name} must start at a multiple of 16 bytes, got {place.data_ptr():#x}")
        expect_no_gradient(where, place, name)
        if memory:
            expect_apart(where, name, place, **{n: t for n, t in (places | inputs).items() if n != name})
    inputs |= places
    result = output(where, out, qkv, (n_heads, head_dim), **(inputs if memory else {}))
    return result, found, n_heads, n_kv_heads, capacity


def _launch(found, n_heads, n_kv_heads, capacity, others, k, v, out, eps, scale, pdl, **options):
    """Without a look at the arguments; `options` go to the SIMT machine, whose report comes back."""
    qkv, turns, kv_len, bias, q_norm, k_norm = others
    head_dim = qkv.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    kernel = _kernel(qkv.dtype, head_dim, n_heads // n_kv_heads, *found[:3])
    tensors = (qkv, bias, q_norm, k_norm, turns, kv_len, k, v, out)
    sizes = n_kv_heads, capacity, float(eps), float(scale * LOG2_E)
    cluster = (found.cluster, 1, 1)
    return kernel(
        n_kv_heads * found.cluster, 32 * found.warps, *tensors, *sizes, shared=found.shared, pdl=pdl, cluster=cluster,
        **options,
    )  # fmt: skip


def _plan_for(device, group, n_kv_heads, head_dim):
    return plan(group, n_kv_heads, head_dim, multiprocessors(device), shared_memory(device))


@functools.lru_cache(maxsize=64)
def plan(group, n_kv_heads, head_dim, processors, room, cluster=None, warps=None, stages=None):
    """The Plan for such heads on a card of so many multiprocessors, with so much shared memory for a block; None where
    there is none. What is given by name is taken as it is."""
    if group > 16:
        return None
    clusters = [c for c in CLUSTERS if head_dim % (4 * c) == 0]
    fitting = [c for c in clusters if n_kv_heads * c <= processors] or clusters[-1:]
    cluster = cluster or next(iter(fitting), None)
    if cluster is None:
        return None
    warps = warps or 8
    sums = 4 * (warps * group * (head_dim + 10) + cluster * group * (head_dim // cluster + 2))
    fixed = 2 * group * (head_dim + 8) + sums
    slot = warps * 2 * TILE * head_dim * 2
    stages = stages or min(MOST_STAGES, (room - fixed) // slot)
    return Plan(cluster, warps, stages, stages * slot + fixed) if stages > 0 else None


@functools.cache
def _kernel(dtype, head_dim, group, cluster, warps, stages):
    shape = f"-DSHAPE=Shape<{DTYPES[dtype]}, {head_dim}, {group}>"
    schedule = f"-DSCHEDULE=Schedule<{warps}, {TILE}, 1, false, false>"
    return cuda.load(HERE / "attend.cu", [shape, schedule, f"-DRING_STAGES={stages}", f"-DCLUSTER={cluster}"]).attend
