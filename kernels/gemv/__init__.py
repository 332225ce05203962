"""Matrix–vector product on the GPU: the product of decoding, one token at a time.

    y = W x        W (rows, cols) row-major, as torch.nn.Linear holds it;   x (cols,)   ->   y (rows,)

W, x and y have one dtype, float32, float16 or bfloat16; sums are float32, rounded once at the end. One call moves at
least itemsize · (rows·cols + cols + rows) bytes and does 2·rows·cols flops: reading W is the limit on every card.

All rungs take and return torch tensors and have one signature:

    rung(W, x, *, out=None, pdl=False)

    W, x   contiguous, on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine
    out    a tensor like y to write into; must not overlap W or x
    pdl    True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch). W is read
           at once, so the kernel ahead must not write it; x is read, and y written, after that kernel. `gemv` only.

Any size is legal, 0 included, and any alignment that the dtype allows; addresses and cols that are multiples of 16
bytes are fastest. TypeError or ValueError names the argument, what was expected and what came, before anything is
written. NaN and infinity pass through.
"""

import functools
from pathlib import Path

import torch

from kernels.gemv.plan import plan
from lab import Rung, cuda

HERE = Path(__file__).resolve().parent
DTYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def naive(W, x, *, out=None, pdl=False):
    """Rung 1: one thread a row."""
    return _run("naive", W, x, out, pdl)


def warp(W, x, *, out=None, pdl=False):
    """Rung 2: one warp a row, and a shuffle reduction."""
    return _run("warp", W, x, out, pdl)


def wide(W, x, *, out=None, pdl=False):
    """Rung 3: 32 warps, 32 rows, and one store of 32 results."""
    return _run("wide", W, x, out, pdl)


def vector(W, x, *, out=None, pdl=False):
    """Rung 4: words of 16 bytes, eight of them in flight for each lane, four of W and four of x."""
    return _run("vector", W, x, out, pdl)


def gemv(W, x, *, out=None, pdl=False):
    """Rung 5, the best: several rows a block, and programmatic dependent launch."""
    return _run("gemv", W, x, out, pdl)


PLAN = "kernels/gemv/plan.py"
RUNGS = [
    Rung("naive", "one thread a row", naive, ("kernels/gemv/naive.cu",)),
    Rung("warp", "one warp a row", warp, ("kernels/gemv/warp.cu",)),
    Rung("wide", "coalesced stores", wide, ("kernels/gemv/wide.cu",)),
    Rung("vector", "16-byte loads in flight", vector, ("kernels/gemv/vector.cu", PLAN)),
    Rung("gemv", "rows share x", gemv, ("kernels/gemv/gemv.cu", PLAN)),
]


def work(W):
    """(bytes, flops) that one call with this matrix must move and do."""
    rows, cols = W.shape
    return W.element_size() * (W.numel() + rows + cols), 2 * W.numel()


@functools.cache
def _kernel(rung, dtype, vec, tiles, rows, x_first):
    chosen = {"VEC": vec, "TILES": tiles, "ROWS": rows, "X_FIRST": x_first}
    options = [f"-DDTYPE={DTYPES[dtype]}", *(f"-D{name}={value}" for name, value in chosen.items() if value)]
    return cuda.load(HERE / f"{rung}.cu", options).gemv


def _run(rung, W, x, out, pdl):
    _expect(rung, "W", W, None, 2)
    rows, cols = W.shape
    _expect(rung, "x", x, W, 1, cols)
    if out is None:
        out = torch.empty(rows, dtype=W.dtype, device=W.device)
    else:
        _expect(rung, "out", out, W, 1, rows)
        _expect_apart(rung, out, W=W, x=x)
    if pdl and rung != "gemv":
        raise ValueError(f"{rung}: pdl must be False, got {pdl!r}: only gemv waits for the kernel before it")
    if rows == 0 or cols == 0:
        return out.zero_()
    address, pdl = W.data_ptr() | x.data_ptr(), bool(pdl)
    grid, block, *constants = plan(rung, rows, cols, W.element_size(), min(address & -address, 16), pdl)
    _kernel(rung, W.dtype, *constants)(grid, block, W, x, out, rows, cols, pdl=pdl)
    return out


def _expect(rung, name, tensor, like, rank, length=None):
    """Raise unless `tensor` is a contiguous torch tensor of this rank and length, and like W in dtype and device."""
    dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in ([like.dtype] if like is not None else DTYPES))
    shape = "(rows, cols)" if rank == 2 else f"({length},)"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{rung}: {name} must be a torch {dtypes} tensor {shape}, got {type(tensor).__name__}")
    if tensor.dtype != like.dtype if like is not None else tensor.dtype not in DTYPES:
        raise TypeError(f"{rung}: {name} must be {dtypes}, got {tensor.dtype}")
    if tensor.dim() != rank or (length is not None and tensor.shape[0] != length):
        raise ValueError(f"{rung}: {name} must have the shape {shape}, got {tuple(tensor.shape)}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{rung}: {name} must be on {like.device}, like W, got {tensor.device}")
    if tensor.data_ptr() % tensor.element_size():
        raise ValueError(f"{rung}: {name} must be aligned to its element size, got an unaligned view")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{rung}: {name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"{name}.contiguous() makes a contiguous copy"
        )


def _expect_apart(rung, out, **inputs):
    """Raise if the output shares memory with an input."""
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, tensor in inputs.items():
        if tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes:
            raise ValueError(f"{rung}: out must not share memory with {name}")
