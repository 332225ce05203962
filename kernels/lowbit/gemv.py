"""The best rung: few_rows.cu, many_rows.cu and merge.cu, and their launch."""

import functools
from pathlib import Path

import torch

from kernels.lowbit.arguments import expect_all
from kernels.lowbit.operators import of_weights
from kernels.lowbit.plan import plan
from kernels.lowbit.weights import QuantizedWeight
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.prepared import Calls, scratch
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
MERGE = 128  # threads of a block of merge, four sums each
KERNELS = ("few_rows.cu", "many_rows.cu", "merge.cu")
SOURCES = (*(f"kernels/lowbit/{name}" for name in (*KERNELS, "plan.py", "layout.py")),)
CALLS = Calls("lowbit.gemv")


@of_weights("lowbit_gemv", calls=CALLS)
def gemv(Wq, x, *, out=None, pdl=False):
    """Rung 4, the best: tensor cores on an interleaved layout, whole numbers for up to four rows of x.

    Up to four rows are rounded: where a warp has a slice of a row of x, and 2**e is above the largest number of it, to
    multiples of 2**(e - 21); products and their sums over a group are exact. More rows are taken as they are, and sums
    are float32, at most of numbers of 2**(bits + 3) times x: bfloat16 x above 2**110 may overflow there.
    A row of x with NaN or infinity gives a row without a finite number. Scales do not pass 2**80 (see quantizing.py).
    """
    if not isinstance(Wq, QuantizedWeight):
        expect_all("gemv", Wq, x, out)  # says what it should be
    options = Wq.shape, Wq.bits, Wq.group, pdl
    held = Wq.packed, Wq.factors
    if out is not None and Wq.scale is not Wq.factors:  # out must lie in none of these
        held += Wq.scale, Wq.zero
    if (y := CALLS.run(options, out, x, *held)) is not None:
        return y
    _, y = expect_all("gemv", Wq, x, out)
    with CALLS.preparing(options, (out,), (y,), (x, *held)):
        launch(Wq, x, y, bool(pdl))
    return y


def launch(Wq, x, out, pdl, **options):
    """Launch without looking at the arguments; `options` go to the SIMT machine, whose report comes back, or two where
    the columns are split: of gemv and of merge."""
    packed, factors = Wq.packed, Wq.factors
    m = 1 if x.ndim == 1 else x.shape[0]
    found = _prepared(
        Wq.shape, m, Wq.bits, Wq.group, x.dtype, factors.dtype, _room(x.device), x.data_ptr() % 16 == 0, pdl
    )
    grid, block, shared, splits, gemv, merge, sizes, blocks = found
    # x and out have been looked at: the kernels need not do so again, if the rest is as QuantizedWeight has made it;
    # else the checked launch says what is wrong
    if packed.is_contiguous() and factors.is_contiguous() and factors.get_device() == packed.get_device():
        gemv, merge = gemv.unchecked, merge and merge.unchecked
    if splits == 1:
        return gemv(grid, block, packed, factors, x, out, *sizes, shared=shared, pdl=pdl, **options)
    parts = scratch(x, splits * out.numel(), torch.float32)
    report = gemv(grid, block, packed, factors, x, parts, *sizes, shared=shared, pdl=pdl, **options)
    # which waits for gemv
    return report, merge(blocks, MERGE, parts, out, out.numel(), pdl=True, **options)


@functools.lru_cache(maxsize=1024)
def _prepared(shape, m, bits, group, dtype, scale, room, aligned, pdl):
    """What all calls with such tensors share: the plan, the two kernels, the sizes gemv takes, blocks of merge."""
    rows, cols = shape
    group = 0 if group is None or group == cols else group
    found = plan(rows, cols, m, bits, group, scale.itemsize, *room, aligned and cols % 8 == 0, pdl)
    merge = _merge(dtype, found.splits) if found.splits > 1 else None
    launch = found.grid, found.block, found.shared, found.splits
    return *launch, kernel(found, dtype, scale), merge, (rows, cols, m), -(-m * rows // (4 * MERGE))


@functools.cache
def _room(device):
    return multiprocessors(device), shared_memory(device)


def kernel(found, dtype, scale):
    """The kernel of a plan, for x and scales of these dtypes."""
    return _kernel(found.source, found.options(DTYPES[dtype], DTYPES[scale]))


@functools.cache
def _kernel(source, options):
    return cuda.load(HERE / source, list(options)).gemv


@functools.cache
def _merge(dtype, splits):
    return cuda.load(HERE / "merge.cu", [f"-DX={DTYPES[dtype]}", f"-DSPLITS={splits}"]).merge
