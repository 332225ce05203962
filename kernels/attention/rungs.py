"""Chapter 08's ladder: two_pass, online, split and split_triton, from scores in memory to tokens split over the card.

    rung(q, k, v, scale=None, *, kv_lens=None, out=None)

    q        (batch, n_heads, head_dim) float32, float16 or bfloat16
    k, v     (batch, kv_len, n_kv_heads, head_dim), like q; kv_len at least 1, head_dim a multiple of 8 up to 256
    scale    of the scores, head_dim**-0.5 unless given
    kv_lens  int32 (batch,): so many tokens of each sequence count, 1 to kv_len. On a card a length outside is brought
             to the nearest of 0 and kv_len; a length of 0 gives zeros
    out      a tensor like q to write to, apart from the others

Each must move `work(...)` bytes. Sums are fp32, and results are the same from run to run, bit for bit. Scores that are
all -inf give NaN, as softmax does, in two_pass, and zeros in the others, which cannot tell them from no token. What is
not allowed raises TypeError or ValueError, before anything is written. At most 65,535 sequences and, for two_pass,
heads.
"""

import functools
from pathlib import Path

import torch

from kernels.attention.arguments import DTYPES, expect_decode
from lab import Rung, cuda
from lab.card import multiprocessors

HERE = Path(__file__).resolve().parent
THREADS = 256  # of a block, in all kernels but merge
BLOCKS, LEAST = 6, 32  # split: blocks that a multiprocessor has room for; tokens that a block is worth starting for
TILE = 1 << 14  # split_triton: bytes of K in a tile of 16 to 64 tokens; several tiles must fit in shared memory
MOST = 65535  # splits: what a grid has along y
LOG2_E = 1.4426950408889634


def two_pass(q, k, v, scale=None, *, kv_lens=None, out=None):
    """Rung 1: scores to memory, softmax over them, and the mix: three kernels."""
    return _run("two_pass", q, k, v, scale, kv_lens, out)


def online(q, k, v, scale=None, *, kv_lens=None, out=None):
    """Rung 2: one walk along the tokens, with a running maximum and sum. A block for each head and sequence."""
    return _run("online", q, k, v, scale, kv_lens, out)


def split(q, k, v, scale=None, *, kv_lens=None, out=None, splits=None):
    """Rung 3: several blocks for each head and sequence, and a merge.

    splits: how many, if not as many as `split_count` says.
    """
    return _run("split", q, k, v, scale, kv_lens, out, splits)


def split_triton(q, k, v, scale=None, *, kv_lens=None, out=None, splits=None):
    """Rung 4: the same in Triton, for all query heads of a KV head at once. On the CPU in Triton's interpreter.

    Weights are rounded to the type of v before they are multiplied. RuntimeError where Triton is not installed.
    """
    return _run("split_triton", q, k, v, scale, kv_lens, out, splits)


RUNGS = [
    Rung("two_pass", "scores in memory", two_pass, ("kernels/attention/two_pass.cu",)),
    Rung("online", "online softmax", online, ("kernels/attention/online.cu",)),
    Rung("split", "tokens split", split, ("kernels/attention/split.cu", "kernels/attention/rungs.py")),
    Rung(
        "split_triton",
        "heads packed, Triton",
        split_triton,
        ("kernels/attention/triton_split.py", "kernels/attention/split.cu", "kernels/attention/rungs.py"),
    ),
]


def work(q, k, kv_lens=None):
    """(bytes, flops) that one call must move and do: K and V of the tokens that count, q and the output once."""
    batch, kv_len, n_kv_heads, head_dim = k.shape
    tokens = batch * kv_len if kv_lens is None else int(kv_lens.sum())
    moved = q.element_size() * (2 * tokens * n_kv_heads * head_dim + 2 * q.numel())
    return moved, 4 * tokens * q.shape[1] * head_dim


def split_count(groups, kv_len, multiprocessors, room=BLOCKS, least=LEAST):
    """How many splits: as many blocks as the card has room for at once, and none with fewer than `least` tokens.

    groups  blocks of one split: heads times sequences
    room    blocks that fit on a multiprocessor
    """
    return max(1, min(room * multiprocessors // groups, -(-kv_len // least), MOST))


def counters(rung, q, k, v, scale=None, *, kv_lens=None, splits=None, check_races=False):
    """Run a CUDA rung, by its name, on the SIMT machine, whatever the device. Returns its kernels' reports, in order.

    With check_races, two threads that touch the same memory with no order between them raise simt.RaceError.
    """
    counted = [name for name in LAUNCHES if name != "split_triton"]  # which does not run on the machine
    if rung not in counted:
        raise ValueError(f"counters: rung must be one of {', '.join(counted)}, got {rung!r}")
    scale, _ = expect_decode(rung, q, k, v, scale, kv_lens, alignment=1)
    q, k, v, kv_lens = (None if x is None else x.detach().cpu() for x in (q, k, v, kv_lens))
    return LAUNCHES[rung](q, k, v, scale, kv_lens, torch.empty_like(q), splits, check_races=check_races)


def _run(rung, q, k, v, scale, kv_lens, out, splits=None):
    scale, out = expect_decode(rung, q, k, v, scale, kv_lens, out, alignment=1)
    expect_splits(rung, splits)
    LAUNCHES[rung](q, k, v, scale, kv_lens, out, splits)
    return out


def expect_splits(rung, splits):
    """Raise unless tokens can be split so; None: as split_count says."""
    if splits is None:
        return
    if isinstance(splits, bool) or not isinstance(splits, int):
        raise TypeError(f"{rung}: splits must be an int or None, got {type(splits).__name__}")
    if not 1 <= splits <= MOST:
        raise ValueError(f"{rung}: splits must be from 1 to {MOST}, got {splits}")


@functools.cache
def _module(name, dtype, head_dim):
    return cuda.load(HERE / f"{name}.cu", [f"-DDTYPE={DTYPES[dtype]}", f"-DHEAD_DIM={head_dim}"])


def _two_pass(q, k, v, scale, kv_lens, out, _, **options):
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q.shape, k.shape
    module = _module("two_pass", q.dtype, head_dim)
    scores = torch.empty(batch, n_heads, kv_len, dtype=torch.float32, device=q.device)
    blocks, rows = (-(-kv_len // 8), n_heads, batch), (n_heads, batch)
    return [
        module.scores(blocks, THREADS, q, k, kv_lens, scores, kv_len, n_kv_heads, scale, **options),
        module.softmax(rows, THREADS, scores, kv_lens, kv_len, **options),
        module.mix(rows, THREADS, scores, v, kv_lens, out, kv_len, n_kv_heads, **options),
    ]


def _online(q, k, v, scale, kv_lens, out, _, **options):
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q.shape, k.shape
    kernel = _module("online", q.dtype, head_dim).online
    return [kernel((n_heads, batch), THREADS, q, k, v, kv_lens, out, kv_len, n_kv_heads, scale, **options)]


def _split(q, k, v, scale, kv_lens, out, splits, **options):
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q.shape, k.shape
    splits = splits or split_count(n_heads * batch, kv_len, multiprocessors(q.device))
    module, (partial, lse) = _module("split", q.dtype, head_dim), _partials(q, splits)
    grid = (n_heads, splits, batch)
    return [
        module.split(grid, THREADS, q, k, v, kv_lens, partial, lse, kv_len, n_kv_heads, scale, **options),
        module.merge((n_heads, batch), head_dim, partial, lse, out, splits, **options),
    ]


def _split_triton(q, k, v, scale, kv_lens, out, splits):
    try:
        from kernels.attention import triton_split
    except ImportError as error:
        raise RuntimeError(f"split_triton: needs Triton, which is not installed here ({error})") from None
    (batch, n_heads, head_dim), (_, kv_len, n_kv_heads, _) = q.shape, k.shape
    tokens = max(16, min(64, TILE // (triton_split.filled_up(head_dim) * q.element_size())))
    splits = splits or split_count(n_kv_heads * batch, kv_len, multiprocessors(q.device), 1, 2 * tokens)
    partial, lse = _partials(q, splits)
    triton_split.launch(q, k, v, kv_lens, partial, lse, scale * LOG2_E, tokens)
    _module("split", q.dtype, head_dim).merge((n_heads, batch), head_dim, partial, lse, out, splits)


def _partials(q, splits):
    """Room for the partial results: (batch, splits, n_heads, head_dim) and their log2-sum-exp."""
    batch, n_heads, head_dim = q.shape
    partial = torch.empty(batch, splits, n_heads, head_dim, dtype=torch.float32, device=q.device)
    return partial, partial.new_empty(batch, splits, n_heads)


LAUNCHES = {"two_pass": _two_pass, "online": _online, "split": _split, "split_triton": _split_triton}
