"""The attention mix: chapter 07's ladder. The shares of the tokens are given, values are mixed.

    out[h, d] = sum over t of att[h, t] * v[t, h // (n_heads // n_kv_heads), d]

    mix_naive, mix_split, mix_shared(att, v, *, out=None)

    att  (n_heads, kv_len)                after softmax, say; any numbers are legal
    v    (kv_len, n_kv_heads, head_dim)   n_heads is a multiple of n_kv_heads
    out  (n_heads, head_dim)              a tensor to write into; must not overlap att or v

All have one dtype, float32, float16 or bfloat16, and lie contiguously on one device: CUDA tensors run on their card,
CPU tensors on the SIMT machine. Sums are float32, rounded once at the end. One call moves at least
itemsize * (att + v + out) bytes, and does 2 * n_heads * kv_len * head_dim flops: reading v is the limit.

Any size from 1 on is legal. TypeError or ValueError names the argument, what was expected and what came, before
anything is written. NaN and infinity pass through. Gradients are not tracked. mix_split adds with atomics: its last
bits change from run to run on a card. The other two give the same bits every time.
"""

import functools
from pathlib import Path

import torch

from lab import Rung, cuda
from lab.card import multiprocessors
from lab.tensors import DTYPES, expect, expect_first, output

HERE = Path(__file__).resolve().parent
BLOCKS_PER_SM, LEAST_TOKENS = 16, 32  # of mix_split: blocks of 128 threads fill an SM; shorter splits do not pay


def mix_naive(att, v, *, out=None):
    """Rung 1: a warp for each output, its lanes along time. One launch."""
    return _run("mix_naive", att, v, out)


def mix_split(att, v, *, out=None):
    """Rung 2: a thread for each output, tokens split over blocks, sums added by atomics.

    Two launches, as sums must start at zero. For 16-bit dtypes they are kept in a float32 workspace of n_heads *
    head_dim, and a third launch rounds them to out.
    """
    return _run("mix_split", att, v, out)


def mix_shared(att, v, *, out=None):
    """Rung 3: blocks of 32 channels x 32 time slices, whose sums meet in shared memory. One launch."""
    return _run("mix_shared", att, v, out)


SOURCE = "kernels/attention/"
RUNGS = [
    Rung("mix_naive", "one warp an output", mix_naive, (f"{SOURCE}mix_naive.cu",)),
    Rung("mix_split", "tokens split over blocks, atomics", mix_split, (f"{SOURCE}mix_split.cu", f"{SOURCE}mix.py")),
    Rung("mix_shared", "tokens split over warps, shared memory", mix_shared, (f"{SOURCE}mix_shared.cu",)),
]


def work(att, v):
    """(bytes, flops) that one call must move and do."""
    n_heads, kv_len = att.shape
    head_dim = v.shape[2]
    return v.element_size() * (att.numel() + v.numel() + n_heads * head_dim), 2 * n_heads * kv_len * head_dim


def plan(rung, n_heads, kv_len, head_dim, sms=132):
    """How a rung is launched, as (grid, block). sms: multiprocessors of the card."""
    outputs = n_heads * head_dim
    if rung == "mix_naive":
        return -(-outputs // 8), 256
    if rung == "mix_split":
        tiles = -(-outputs // 128)
        splits = min(-(-BLOCKS_PER_SM * sms // tiles), -(-kv_len // LEAST_TOKENS))
        return (tiles, splits), 128
    return (n_heads, -(-head_dim // 32)), (32, 32)


def counters(rung, att, v, *, check_races=False):
    """Run a rung, by its name, on the SIMT machine, whatever the device. Returns the machine's report (simt.report).

    CUDA tensors are copied to the CPU first. With check_races, two threads that touch the same memory with no order
    between them raise simt.RaceError. The report is that of the rung's own kernel, without the launches that zero and
    round. Arguments and errors as for the rungs.
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
    grid, block = plan(rung, n_heads, kv_len, head_dim, _sms(v.device))
    sums = out
    if rung == "mix_split":  # atomics add in float32, to what must be 0
        sums = out.zero_() if out.dtype == torch.float32 else torch.zeros(out.shape, device=out.device)
    report = _kernel(rung, v.dtype)(grid, block, att, v, sums, n_heads, n_kv_heads, kv_len, head_dim, **options)
    if sums is not out:
        out.copy_(sums)
    return report


@functools.cache
def _kernel(rung, dtype):
    return cuda.load(HERE / f"{rung}.cu", [f"-DDTYPE={DTYPES[dtype]}"]).mix


@functools.cache
def _sms(device):
    return multiprocessors(device)


def _expect_all(rung, att, v, out):
    """Raise unless a rung can be called so; return the tensor to write to."""
    expect_first(rung, "att", att, ("n_heads", "kv_len"))
    n_heads, kv_len = att.shape
    expect(rung, "v", v, att, (kv_len, "n_kv_heads", "head_dim"))
    n_kv_heads, head_dim = v.shape[1:]
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{rung}: n_heads must be a multiple of n_kv_heads, got {n_heads} query heads and {n_kv_heads} kv heads"
        )
    return output(rung, out, att, (n_heads, head_dim), att=att, v=v)
