"""Rungs 4 to 7 of chapter 07: its attention mix over a cache of 32 and of 16 bits, with shares of 32.

    out[h, d] = sum over t of att[h, t] * v[t, h // (n_heads // n_kv_heads), d]

    mix_fp32, mix_fp16, mix_half2, mix_flight(att, v, *, out=None)

    att  (n_heads, kv_len) float32        after softmax, say; any numbers are legal
    v    (kv_len, n_kv_heads, head_dim)   float32 for mix_fp32, float16 for the others; n_heads is a multiple of
                                          n_kv_heads
    out  (n_heads, head_dim) float32      a tensor to write into; must not overlap att or v

All lie contiguously on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine. Sums are float32,
and the same bits in every run. One launch, on the same grid for all rungs. A call moves at least the bytes of att, v
and out, and does 2 * n_heads * kv_len * head_dim flops: reading v is the limit.

Any size from 1 on is legal, but mix_half2 needs an even head_dim. TypeError or ValueError names the argument, what was
expected and what came, before anything is written. NaN and infinity pass through. Gradients are not tracked.
"""

import functools
from pathlib import Path

import torch

from lab import Rung, cuda
from lab.tensors import expect, expect_first, output

HERE = Path(__file__).resolve().parent
SOURCE = "kernels/kv_cache/"
BLOCK = (32, 32)
DTYPES = {"mix_fp32": torch.float32}  # of v; float16 for the rest
WORD = 16  # bytes of mix_flight's widest word


def mix_fp32(att, v, *, out=None):
    """Rung 4: 32-bit values, a float a lane."""
    return _run("mix_fp32", att, v, out)


def mix_fp16(att, v, *, out=None):
    """Rung 5: 16-bit values, a half a lane."""
    return _run("mix_fp16", att, v, out)


def mix_half2(att, v, *, out=None):
    """Rung 6: two halves a lane. head_dim must be even, and v begin at a multiple of 4 bytes."""
    return _run("mix_half2", att, v, out)


def mix_flight(att, v, *, out=None):
    """Rung 7: up to eight halves a lane, several such words in flight."""
    return _run("mix_flight", att, v, out)


RUNGS = [
    Rung("mix_fp32", "fp32", mix_fp32, (f"{SOURCE}mix_fp32.cu",)),
    Rung("mix_fp16", "fp16, element by element", mix_fp16, (f"{SOURCE}mix_fp16.cu",)),
    Rung("mix_half2", "half2", mix_half2, (f"{SOURCE}mix_half2.cu",)),
    Rung("mix_flight", "wide loads in flight", mix_flight, (f"{SOURCE}mix_flight.cu", f"{SOURCE}rungs.py")),
]


def work(att, v):
    """(bytes, flops) that one call must move and do."""
    n_heads, kv_len = att.shape
    head_dim = v.shape[2]
    return 4 * att.numel() + v.nbytes + 4 * n_heads * head_dim, 2 * n_heads * kv_len * head_dim


def plan(n_heads, head_dim):
    """How every rung is launched, as (grid, block): a block for 32 channels of a query head."""
    return (n_heads, -(-head_dim // 32)), BLOCK


def words(v):
    """Halves in a word of mix_flight: as many as head_dim and the address of v allow, 8 at most."""
    step = v.data_ptr() | v.shape[2] * v.element_size()
    return min(step & -step, WORD) // v.element_size()


def counters(rung, att, v, *, check_races=False):
    """Run a rung, by its name, on the SIMT machine, whatever the device. Returns the machine's report (simt.report).

    CUDA tensors are copied to the CPU first. With check_races, two threads that touch the same memory with no order
    between them raise simt.RaceError. Arguments and errors as for the rungs.
    """
    names = [known.name for known in RUNGS]
    if rung not in names:
        raise ValueError(f"counters: rung must be one of {', '.join(names)}, got {rung!r}")
    out = _expect_all(rung, att, v, None)
    return _launch(rung, att.detach().cpu(), v.detach().cpu(), out.cpu(), check_races=check_races)


def _run(rung, att, v, out):
    out = _expect_all(rung, att, v, out)
    _launch(rung, att, v, out)
    return out


def _launch(rung, att, v, out, **options):
    """One call of a rung whose arguments have been looked at. Returns the report, or None on a card."""
    (kv_len, n_kv_heads, head_dim), n_heads = v.shape, att.shape[0]
    kernel = _kernel(rung, words(v) if rung == "mix_flight" else None)
    return kernel(*plan(n_heads, head_dim), att, v, out, n_heads, n_kv_heads, kv_len, head_dim, **options)


@functools.cache
def _kernel(rung, vec):
    return cuda.load(HERE / f"{rung}.cu", () if vec is None else (f"-DVEC={vec}",)).mix


def _expect_all(rung, att, v, out):
    """Raise unless a rung can be called so; return the tensor to write to."""
    expect_first(rung, "att", att, ("n_heads", "kv_len"), (torch.float32,))
    n_heads, kv_len = att.shape
    expect(rung, "v", v, att, (kv_len, "n_kv_heads", "head_dim"), (DTYPES.get(rung, torch.float16),))
    n_kv_heads, head_dim = v.shape[1:]
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{rung}: n_heads must be a multiple of n_kv_heads, got {n_heads} query heads and {n_kv_heads} kv heads"
        )
    if rung == "mix_half2":
        if head_dim % 2:
            raise ValueError(f"{rung}: head_dim must be even, got {head_dim}")
        if v.data_ptr() % 4:
            raise ValueError(f"{rung}: v must start at an address divisible by 4, got {v.data_ptr():#x}")
    return output(rung, out, att, (n_heads, head_dim), att=att, v=v)
