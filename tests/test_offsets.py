"""Tensors of more than 2**31 elements: what a kernel counts in 32 bits leads astray there.

Pages of memory that nobody writes to take no room, so the tensors are as large as they say and cost nothing; where a
kernel would go through all of it, the last block alone runs.
"""

import mmap
import sys

import numpy as np
import pytest
import torch

import ref.attention
import ref.fusion
from kernels import attention, fusion
from kernels.attention import rungs
from kernels.fusion import launches
from lab import cuda

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # the kernel need not have the memory that is asked for
HALF = torch.float16


def huge(*shape):
    """Zeros, float16."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, 2 * int(np.prod(shape)), flags=flags)
    return torch.frombuffer(memory, dtype=HALF).view(shape)


def close(out, wanted):
    assert np.linalg.norm(out.double().numpy() - wanted) <= 2e-3 * np.linalg.norm(wanted) > 0


@pytest.mark.parametrize("decode", [attention.decode, rungs.split, rungs.online], ids=lambda f: f.__name__)
def test_a_long_cache(decode):
    """Nine sequences with room for two million tokens each; the last one has twenty."""
    cache = huge(9, 1 << 21, 1, 128)
    lens = torch.tensor([1] * 8 + [20], dtype=torch.int32)
    assert cache[:8].numel() >= 1 << 31
    near = cache[:, :20]
    near[:] = torch.randn(near.shape).half()
    q = torch.randn(9, 2, 128).half()
    there = near.double().numpy()
    close(decode(q, cache, cache, kv_lens=lens), ref.attention.decode_attention(q.double(), there, there, kv_lens=lens))


@pytest.fixture
def last_block(monkeypatch):
    """Of each launch the last block alone, on a card with a multiprocessor for each group of rows."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 1 << 20)
    launches.plan.cache_clear()
    launch = cuda.Kernel.__call__

    def last(kernel, grid, block, *args, **options):
        return launch(kernel, grid, block, *args, only=[grid - 1], **options)

    monkeypatch.setattr(cuda.Kernel, "__call__", last)
    yield
    launches.plan.cache_clear()


ROWS, COLS = 131_100, 16_392  # more than 2**31 elements


def matrix():
    """Zeros but for the last row."""
    W = huge(ROWS, COLS)
    W[-1] = torch.randn(COLS).half() / 128
    return W


def test_a_large_matrix(last_block):
    W, x, residual = matrix(), torch.randn(COLS).half(), torch.randn(ROWS).half()
    y = fusion.gemv_residual(W, x, residual)
    rest = W[-1:].double().numpy(), x.double().numpy(), residual[-1:].double().numpy()
    close(y[-1:], ref.fusion.gemv_residual(*rest))


def test_large_matrices_behind_a_norm(last_block):
    W, x, norm = matrix(), torch.randn(COLS).half(), torch.randn(COLS).half()
    last, *vectors = (t.double().numpy() for t in (W[-1:], x, norm))
    close(fusion.norm_glu(x, norm, W, W)[-1:], ref.fusion.norm_glu(*vectors, last, last))
    close(fusion.norm_qkv(x, norm, W[:1], W[:1], W)[-1:], ref.fusion.norm_qkv(*vectors, last, last, last)[-1:])


def test_more_rows_than_32_bits_count_are_refused():
    W, x = huge(2**31 - 7, 1), torch.randn(1).half()
    third = W[: 1 << 30]
    for call, name, rows in (
        (lambda: fusion.norm_qkv(x, x, third, third, third), "norm_qkv: Wq, Wk and Wv", "rows in all, got 3221225472"),
        (lambda: fusion.norm_glu(x, x, W, W), "norm_glu: W_gate", "rows, got 2147483641"),
        (lambda: fusion.gemv_residual(W, x, W[:, 0]), "gemv_residual: W", "rows, got 2147483641"),
        (lambda: fusion.down_residual(W, x, W[:, 0]), "down_residual: W_down", "rows, got 2147483641"),
    ):
        with pytest.raises(ValueError, match=f"{name} must have at most 2147483640 {rows}"):
            call()
