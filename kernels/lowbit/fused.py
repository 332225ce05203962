"""What stands before and behind a product in a layer, in its launch: fused_row.cu, for one row of x.

    norm_gemv(Wq, x, norm, eps)       W n, n = rmsnorm(x, norm)
    norm_glu(Wq, x, norm, eps)        silu(W_gate n) · (W_up n), of a matrix in pairs: see `paired`
    gemv_residual(Wq, x, residual)    residual + W x

As kernels.fusion has them for 16 bits; weights, x (cols,), out= and pdl= as for kernels.lowbit.gemv. They take no
matrix whose columns would be split (`fits` says so), which `gemv` does.
"""

import functools
from pathlib import Path

import torch

from kernels.fusion.arguments import expect_eps
from kernels.lowbit.arguments import expect_all
from kernels.lowbit.gemv import _room
from kernels.lowbit.operators import of_weights
from kernels.lowbit.plan import plan
from kernels.lowbit.weights import QuantizedWeight
from lab import cuda
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, output

HERE = Path(__file__).resolve().parent
SOURCES = tuple(f"kernels/lowbit/{name}" for name in ("fused_row.cu", "fused.py", "plan.py", "layout.py"))
HALF_TILE = 8  # rows of W_gate, and of W_up, that lie together
RESERVED = 128  # bytes of shared memory that the kernel has besides what the plan knows of: squares
# With PDL, as a layer's launches were fastest one behind another on an H200: stages asked for before the wait; and
# stages of a ring, where a team has few tiles, and where it has many, so that a block of a neighbour in the layer finds
# room beside ours and asks for its own while we still work. None: as many as there is room for
BEFORE_WAIT = {8: 2, 4: 1, 2: 1}
RING = {8: (3, None), 4: (2, 3), 2: (None, None)}
FEW_TILES, FEW_UNITS = 3, 2  # of a team; of a warp: the ring stays deep where tiles are wide
CALLS = Calls("lowbit.fused")
NORM, RESIDUAL = "Tensor norm, float eps=1e-05, ", "Tensor residual, "


def paired(gate_up):
    """Rows of gate above up, (2 · ffn, …), ffn a multiple of 8, in pairs: eight rows of gate, the same eight of up."""
    return gate_up.unflatten(0, (2, -1, HALF_TILE)).transpose(0, 1).flatten(0, 2)


def unpaired(rows):
    """Back again: gate above up."""
    return rows.unflatten(0, (-1, 2, HALF_TILE)).transpose(0, 1).flatten(0, 2)


class Paired:
    """W_gate and W_up as `norm_glu` takes them. weight: a QuantizedWeight whose rows are `paired`."""

    def __init__(self, weight):
        self.weight, self.nbytes, self.shape = weight, weight.nbytes, weight.shape

    @classmethod
    def of(cls, Wq):
        """Of a QuantizedWeight whose rows are gate above up."""
        parts = paired(Wq.codes()), paired(Wq.scale), paired(Wq.zero)
        return cls(QuantizedWeight(*parts, Wq.bits, Wq.group, Wq.dtype))

    def dequantize(self, dtype=None):
        """Gate above up, (2 · ffn, cols)."""
        return unpaired(self.weight.dequantize(dtype))


def fits(shape, bits, group, scale_dtype, device):
    """Whether these functions take a matrix of this shape on a device: its columns are not split there."""
    return _plan(tuple(shape), bits, group, scale_dtype, _room(torch.device(device)), True, False) is not None


def _look_normed(where, Wq, x, norm, eps=1e-5, out=None, pairs=False):
    """Raise unless a function with a norm can be called so. Returns the tensor to write to."""
    _expect_row(where, Wq, x)
    expect(where, "norm", norm, x, tuple(x.shape))
    expect_eps(where, eps)
    rows = Wq.shape[0]
    if pairs and rows % (2 * HALF_TILE):
        raise ValueError(f"{where}: Wq must have a multiple of {2 * HALF_TILE} rows, in pairs, got {rows}")
    return _output(where, Wq, x, out, rows // 2 if pairs else rows, norm=norm)


def _look_residual(where, Wq, x, residual, out=None):
    _expect_row(where, Wq, x)
    expect(where, "residual", residual, x, (Wq.shape[0],))
    return _output(where, Wq, x, out, Wq.shape[0], residual=residual)


_look_paired = functools.partial(_look_normed, pairs=True)


def _expect_row(where, Wq, x):
    if isinstance(x, torch.Tensor) and x.ndim != 1:
        wanted = f"({Wq.shape[1]},)" if isinstance(Wq, QuantizedWeight) else "(cols,)"
        raise ValueError(f"{where}: x must be one row of shape {wanted}, got {tuple(x.shape)}")
    expect_all(where, Wq, x)


def _output(where, Wq, x, out, rows, **others):
    held = {"Wq": Wq.packed, "Wq.scale": Wq.scale, "Wq.zero": Wq.zero, "Wq.factors": Wq.factors}
    return output(where, out, x, (rows,), x=x, **others, **held)


@of_weights("lowbit_norm_gemv", NORM, _look_normed)
def norm_gemv(Wq, x, norm, eps=1e-5, *, out=None, pdl=False):
    """W n, n = x · norm / √(mean of x² + eps): Wq (rows, cols), x, norm (cols,) → (rows,).

    Wq.nbytes and 4 · cols bytes, 2 · rows · cols flops; one launch, not two. n is not rounded to x's dtype.
    """
    return _run("norm_gemv", _look_normed, Wq, x, norm, eps, out, pdl)


@of_weights("lowbit_norm_glu", NORM, _look_paired)
def norm_glu(Wq, x, norm, eps=1e-5, *, out=None, pdl=False):
    """silu(W_gate n) · (W_up n), n as for norm_gemv: Wq (2 · ffn, cols), whose rows are `paired`, x, norm (cols,) →
    (ffn,).

    Wq.nbytes and 4 · cols bytes, 4 · ffn · cols flops; one launch, not three.
    """
    return _run("norm_glu", _look_paired, Wq, x, norm, eps, out, pdl)


@of_weights("lowbit_gemv_residual", RESIDUAL, _look_residual)
def gemv_residual(Wq, x, residual, *, out=None, pdl=False):
    """residual + W x: Wq (rows, cols), x (cols,), residual (rows,) → (rows,).

    Wq.nbytes and 2 · (cols + 2 · rows) bytes, 2 · rows · cols flops; one launch, not two.
    """
    return _run("gemv_residual", _look_residual, Wq, x, residual, None, out, pdl)


def _run(where, look, Wq, x, other, eps, out, pdl):
    """other: norm or residual"""
    if not isinstance(Wq, QuantizedWeight):
        expect_all(where, Wq, x, out)  # says what it should be
    options = where, Wq.shape, Wq.bits, Wq.group, eps, pdl
    held = (Wq.packed, Wq.factors) if out is None else (Wq.packed, Wq.factors, Wq.scale, Wq.zero)  # out is in none
    if (y := CALLS.run(options, out, x, other, *held)) is not None:
        return y
    y = look(where, Wq, x, other, *(() if look is _look_residual else (eps,)), out=out)
    with CALLS.preparing(options, (out,), (y,), (x, other, *held)):
        _launch(where, Wq, x, other, eps, y, bool(pdl))
    return y


def _launch(where, Wq, x, other, eps, out, pdl, **further):
    """Without looking at the arguments; `further` goes to the SIMT machine, whose report comes back."""
    aligned = x.data_ptr() % 16 == 0 == other.data_ptr() % 16
    found = _plan(Wq.shape, Wq.bits, Wq.group, Wq.factors.dtype, _room(x.device), aligned, pdl)
    if found is None:
        raise ValueError(f"{where}: Wq has columns that would be split, {Wq.shape[1]} of them; gemv takes such")
    normed = eps is not None
    kernel = _kernel(found.options(DTYPES[x.dtype], DTYPES[Wq.factors.dtype]), normed, where == "norm_glu")
    args = (x, other if normed else None, None if normed else other, out, *Wq.shape, float(eps or 0))
    return kernel(found.blocks, found.block, Wq.packed, Wq.factors, *args, shared=found.shared, pdl=pdl, **further)


@functools.lru_cache(maxsize=1024)
def _plan(shape, bits, group, dtype, room, aligned, pdl):
    """That of `gemv` for one row of x, with stages as above; None where it splits columns."""
    rows, cols = shape
    group = 0 if group is None or group == cols else group
    multiprocessors, shared = room
    given = rows, cols, 1, bits, group, dtype.itemsize, multiprocessors, shared - RESERVED, aligned and cols % 8 == 0
    found = plan(*given, pdl)
    if pdl and found.splits == 1:
        most = RING[bits][found.team_tiles > FEW_TILES] if found.units <= FEW_UNITS else None
        stages = min(found.stages, most or found.stages)
        found = plan(*given, pdl, teams=found.teams, stages=stages, stages_before_wait=min(stages, BEFORE_WAIT[bits]))
    return found if found.splits == 1 else None


@functools.cache
def _kernel(options, normed, glu):
    around = ", ".join(str(value).lower() for value in (normed, glu, not normed))
    return cuda.load(HERE / "fused_row.cu", [*options, f"-DAROUND=Around<{around}>"]).fused_row
