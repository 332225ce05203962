"""The answers to exercises 4 and 5 of chapter 07 as rungs, and both together. What they take and give, and what they
refuse: as kernels.attention.mix has it. All give the same bits in every run.

    mix_ordered, mix_group, mix_group_ordered(att, v, *, out=None)

The last two take up to 32 query heads for each kv head (ValueError for more): their sums lie in shared memory.
"""

import functools

import torch

from kernels.attention import mix
from lab import Rung, cuda
from lab.tensors import DTYPES

MOST_HEADS = 32  # of a KV head: 8 warps keep 32 sums each for every head in 48 KB of shared memory
WARPS = 8  # of a block of mix_group.cu


def mix_ordered(att, v, *, out=None):
    """Exercise 4: tokens split over blocks, whose sums are stored side by side and added in order. Two launches, and a
    float32 workspace of splits * n_heads * head_dim."""
    out = mix._expect_all("mix_ordered", att, v, out)
    _ordered(att, v, out)
    return out


def mix_group(att, v, *, out=None):
    """Exercise 5: each value is loaded once, for all heads that share it. One launch."""
    out = _expect_group("mix_group", att, v, out)
    _group(att, v, out)
    return out


def mix_group_ordered(att, v, *, out=None):
    """Both: each value once, tokens split over blocks too, and sums added in order. Two launches, and a float32
    workspace."""
    out = _expect_group("mix_group_ordered", att, v, out)
    _group_ordered(att, v, out)
    return out


SOURCE = "kernels/attention/"
_BOTH = (f"{SOURCE}mix_group.cu", f"{SOURCE}mix_ordered.cu", f"{SOURCE}mix_answers.py")
RUNGS = [
    Rung("mix_ordered", "tokens split over blocks, added in order", mix_ordered, _BOTH[1:]),
    Rung("mix_group", "each value once for its heads", mix_group, (_BOTH[0], _BOTH[2])),
    Rung("mix_group_ordered", "each value once, tokens split, added in order", mix_group_ordered, _BOTH),
]


def splits(rung, n_heads, n_kv_heads, kv_len, head_dim, sms=132):
    """How many blocks share the tokens of a result: enough to fill the card, and 32 tokens each at the least."""
    if rung == "mix_ordered":
        return mix.plan("mix_split", n_heads, kv_len, head_dim, sms)[0][1]
    blocks = n_kv_heads * -(-head_dim // 32)  # of 256 threads, 8 of which fill an SM
    return min(-(-8 * sms // blocks), -(-kv_len // mix.LEAST_TOKENS))


def reports(rung, att, v, **options):
    """Run a rung, by its name, on the SIMT machine, whatever the device; a report for each launch, in order. Options:
    as the machine's, such as check_races=True."""
    launches = {"mix_ordered": _ordered, "mix_group": _group, "mix_group_ordered": _group_ordered}
    if rung not in launches:
        raise ValueError(f"reports: rung must be one of {', '.join(launches)}, got {rung!r}")
    expect = mix._expect_all if rung == "mix_ordered" else _expect_group
    out = expect(rung, att, v, None)
    return launches[rung](att.detach().cpu(), v.detach().cpu(), out.cpu(), **options)


def _expect_group(rung, att, v, out):
    out = mix._expect_all(rung, att, v, out)
    if len(att) > MOST_HEADS * v.shape[1]:
        raise ValueError(
            f"{rung}: at most {MOST_HEADS} query heads for each kv head, got {len(att)} and {v.shape[1]} kv heads"
        )
    return out


def _ordered(att, v, out, **options):
    (kv_len, n_kv_heads, head_dim), n_heads = v.shape, len(att)
    (tiles, pieces), block = mix.plan("mix_split", n_heads, kv_len, head_dim, mix._sms(v.device))
    partials = torch.empty(pieces, *out.shape, device=v.device)
    kernel = _ordered_module(v.dtype).mix_partial
    report = kernel((tiles, pieces), block, att, v, partials, n_heads, n_kv_heads, kv_len, head_dim, **options)
    return [report, _add(partials, out, options)]


def _group(att, v, out, **options):
    (kv_len, n_kv_heads, head_dim), group = v.shape, len(att) // v.shape[1]
    kernel = _group_module(v.dtype, group, DTYPES[v.dtype]).mix
    grid = n_kv_heads, -(-head_dim // 32), 1
    return [kernel(grid, (32, WARPS), att, v, out, n_kv_heads, kv_len, head_dim, **options)]


def _group_ordered(att, v, out, **options):
    (kv_len, n_kv_heads, head_dim), group = v.shape, len(att) // v.shape[1]
    pieces = splits("mix_group_ordered", len(att), n_kv_heads, kv_len, head_dim, mix._sms(v.device))
    partials = torch.empty(pieces, *out.shape, device=v.device)
    kernel = _group_module(v.dtype, group, "float").mix
    grid = n_kv_heads, -(-head_dim // 32), pieces
    report = kernel(grid, (32, WARPS), att, v, partials, n_kv_heads, kv_len, head_dim, **options)
    return [report, _add(partials, out, options)]


def _add(partials, out, options):
    blocks = -(-out.numel() // 128)
    return _ordered_module(out.dtype).add_partials(blocks, 128, partials, out, out.numel(), len(partials), **options)


@functools.cache
def _ordered_module(dtype):
    return cuda.load(mix.HERE / "mix_ordered.cu", [f"-DDTYPE={DTYPES[dtype]}"])


@functools.cache
def _group_module(dtype, group, result):
    return cuda.load(mix.HERE / "mix_group.cu", [f"-DDTYPE={DTYPES[dtype]}", f"-DGROUP={group}", f"-DOUT={result}"])
