"""The best rung: gemv.cu and its launch."""

import functools
from pathlib import Path

import torch

from kernels.lowbit.arguments import expect_all
from kernels.lowbit.plan import plan
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
SOURCES = ("kernels/lowbit/gemv.cu", "kernels/lowbit/plan.py", "kernels/lowbit/layout.py")


def gemv(Wq, x, *, out=None, pdl=False):
    """Rung 3, the best: tensor cores on an interleaved layout, whole numbers for up to four rows of x.

    Up to four rows are rounded: where a warp has a slice of a row of x, and 2**e is above the largest number of it, to
    multiples of 2**(e - 21); products and their sums over a group are exact. More rows are taken as they are, and sums
    are float32, at most of numbers of 2**(bits + 3) times x: bfloat16 x above 2**110 may overflow there.
    A row of x with NaN or infinity gives a row without a finite number. Scales do not pass 2**80 (see quantizing.py).
    """
    m, out = expect_all("gemv", Wq, x, out)
    launch(Wq, x, out, bool(pdl))
    return out


def launch(Wq, x, out, pdl, **options):
    """Launch without looking at the arguments; `options` go to the SIMT machine, whose report comes back, or two where
    the columns are split: of gemv and of merge."""
    rows, cols = Wq.shape
    m = 1 if x.dim() == 1 else len(x)
    scale = Wq.factors.dtype
    aligned = cols % 8 == 0 and x.data_ptr() % 16 == 0
    group = 0 if Wq.group is None or Wq.group == cols else Wq.group
    found = plan(rows, cols, m, Wq.bits, group, scale.itemsize, *_room(x.device), aligned, pdl)
    module = _module(x.dtype, scale, found.constants)
    if found.splits == 1:
        args = (Wq.packed, Wq.factors, x, out, rows, cols, m)
        return module.gemv(found.grid, found.block, *args, shared=found.shared, pdl=pdl, **options)
    parts = torch.empty(found.splits, m, rows, dtype=torch.float32, device=x.device)
    args = (Wq.packed, Wq.factors, x, parts, rows, cols, m)
    report = module.gemv(found.grid, found.block, *args, shared=found.shared, pdl=pdl, **options)
    args = (parts, out, m * rows, found.splits)
    return report, module.merge(-(-m * rows // 1024), 256, *args, pdl=True, **options)  # which waits for gemv


@functools.cache
def _room(device):
    return multiprocessors(device), shared_memory(device)


@functools.cache
def _module(dtype, scale, constants):
    types = [f"-DX={DTYPES[dtype]}", f"-DSCALE={DTYPES[scale]}"]
    return cuda.load(HERE / "gemv.cu", [*types, *(f"-D{name}={value}" for name, value in constants)])
