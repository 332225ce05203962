"""Matrix–vector product on the GPU: the product of decoding, one token at a time.

    y = W x        W (rows, cols) row-major, as torch.nn.Linear holds it;   x (cols,)   ->   y (rows,)

W, x and y have one dtype, float32, float16 or bfloat16; sums are float32, rounded once at the end. One call moves at
least itemsize · (rows·cols + cols + rows) bytes and does 2·rows·cols flops: reading W is the limit on every card.

All rungs take and return torch tensors and have one signature:

    rung(W, x, *, out=None, pdl=False)

    W, x   contiguous, on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine
    out    a tensor like y to write into; must not overlap W or x
    pdl    True: may start before the kernel ahead of it in the stream ends (programmatic dependent launch), and, where
           that was launched so too, before the one ahead of that, and so on. None of them may write W, which is read at
           once; x is read, and y written, only after all of them have ended. `rows`, `ring` and `gemv` only.

Any size is legal, 0 included, and any alignment that the dtype allows. Where addresses or rows are no multiples of 16
bytes, the rungs load narrower words, down to an element; `gemv` cuts long rows into words by address instead
(unaligned_plan). TypeError or ValueError names the argument, what was expected and what came, before anything is
written. NaN and infinity pass through. Without out, gradients are tracked where a tensor asks for one, and computed by
torch's own products.

torch.compile takes each as an operator, torch.ops.matmul_to_mamba.gemv_warp for instance. `counters` runs a rung on the
SIMT machine and returns its report; `plan` says how a rung is launched.
"""

import functools
from pathlib import Path

import torch

from kernels.gemv.plan import plan
from kernels.gemv.ring_plan import product, ring_plan
from kernels.gemv.unaligned_plan import is_unaligned, unaligned_plan, unaligned_ring_plan
from lab import Rung, cuda
from lab.card import multiprocessors, shared_memory, starts_early
from lab.operators import Prepared, operator
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_first, output

HERE = Path(__file__).resolve().parent


CALLS = Calls("gemv")


def _operator(rung):
    """A rung as an operator of torch.library, gemv_naive for instance, with gradients by torch's own products."""
    return operator(
        "gemv" if rung == "gemv" else f"gemv_{rung}",
        "Tensor W, Tensor x, bool pdl=False",
        fake=lambda W, x, *, pdl=False: _expect_all(rung, W, x, None, pdl),
        backward=_backward,
        tracked=("W", "x"),
        prepared=Prepared(CALLS, f"run_tracked(({rung!r}, pdl), out, W, x)"),
    )


def _backward(context, gradient):
    W, x = context.saved_tensors
    W_needs, x_needs = context.needs_input_grad[:2]
    return gradient.outer(x) if W_needs else None, gradient @ W if x_needs else None


@_operator("naive")
def naive(W, x, *, out=None, pdl=False):
    """Rung 1: one thread a row."""
    return _run("naive", W, x, out, pdl)


@_operator("warp")
def warp(W, x, *, out=None, pdl=False):
    """Rung 2: one warp a row, and a shuffle reduction."""
    return _run("warp", W, x, out, pdl)


@_operator("wide")
def wide(W, x, *, out=None, pdl=False):
    """Rung 3: 32 warps, 32 rows, and one store of 32 results."""
    return _run("wide", W, x, out, pdl)


@_operator("vector")
def vector(W, x, *, out=None, pdl=False):
    """Rung 4: words of 16 bytes, eight of them in flight for each lane, four of W and four of x."""
    return _run("vector", W, x, out, pdl)


@_operator("gemv")
def gemv(W, x, *, out=None, pdl=False):
    """The best. Rung 5: several rows a block; with pdl, where it pays, a ring of weights: rung 8, or 7 (ring_plan).
    Where long rows begin at any element, the same with words cut by address: unaligned.cu, unaligned_ring.cu."""
    return _run("gemv", W, x, out, pdl)


@_operator("rows")
def rows(W, x, *, out=None, pdl=False):
    """Rung 5; with pdl rung 6, which asks for its weights while the kernel ahead of it still runs."""
    return _run("rows", W, x, out, pdl)


@_operator("ring")
def ring(W, x, *, out=None, pdl=False):
    """Rung 7, to be called with pdl: a block stays, and keeps a ring of weights filled. Where a matrix is not for it
    (ring_plan), `rows`."""
    return _run("ring", W, x, out, pdl)


PLAN = "kernels/gemv/plan.py"
RING = ("kernels/gemv/ring.cu", "kernels/gemv/ring_plan.py")
RUNGS = [
    Rung("naive", "one thread a row", naive, ("kernels/gemv/naive.cu",)),
    Rung("warp", "one warp a row", warp, ("kernels/gemv/warp.cu",)),
    Rung("wide", "coalesced stores", wide, ("kernels/gemv/wide.cu",)),
    Rung("vector", "16-byte loads in flight", vector, ("kernels/gemv/vector.cu", PLAN)),
    Rung("gemv", "rows share x", gemv, ("kernels/gemv/gemv.cu", PLAN)),
]
DEPENDENT = [  # rungs 6 to 8: launched so that they may start before the kernel ahead of them has ended
    Rung("rows", "rows share x, PDL", functools.partial(rows, pdl=True), ("kernels/gemv/gemv.cu", PLAN)),
    Rung("ring", "ring of weights, PDL", functools.partial(ring, pdl=True), RING),
    Rung("gemv", "ring, tensor cores, PDL", functools.partial(gemv, pdl=True), RING),
]
WORDS_BY_ADDRESS = "kernels/gemv/unaligned.cuh", "kernels/gemv/unaligned_plan.py"
UNALIGNED = [  # what gemv is where rows begin at any element: in an ordinary launch, and as a dependent
    Rung("gemv", "words by address", gemv, ("kernels/gemv/unaligned.cu", *WORDS_BY_ADDRESS)),
    Rung(
        "gemv",
        "words by address, PDL",
        functools.partial(gemv, pdl=True),
        ("kernels/gemv/unaligned_ring.cu", "kernels/gemv/unaligned.cu", *WORDS_BY_ADDRESS),
    ),
]
MAY_BE_DEPENDENT = ("rows", "ring", "gemv")


def work(W):
    """(bytes, flops) that one call with this matrix must move and do."""
    rows, cols = W.shape
    return W.element_size() * (W.numel() + rows + cols), 2 * W.numel()


def counters(rung, W, x, *, pdl=False, check_races=False):
    """Run a rung, by its name, on the SIMT machine, whatever the device. Returns the machine's report (simt.report).

    CUDA tensors are copied to the CPU first. With check_races, two threads that touch the same memory with no order
    between them raise simt.RaceError. Arguments and errors as for the rungs; ValueError for an empty matrix, which
    launches nothing.
    """
    names = list(dict.fromkeys(known.name for known in RUNGS + DEPENDENT))
    if rung not in names:
        raise ValueError(f"counters: rung must be one of {', '.join(names)}, got {rung!r}")
    _expect_all(rung, W, x, None, pdl)
    if W.numel() == 0:
        raise ValueError(f"counters: W must have at least one row and one column, got {tuple(W.shape)}")
    W, x = W.detach().cpu(), x.detach().cpu()
    out = torch.full((len(W),), torch.nan, dtype=W.dtype)
    return _launch(rung, W, x, out, bool(pdl), check_races=check_races)


@functools.cache
def _kernel(rung, dtype, vec, words, rows, x_first):
    chosen = {"VEC": vec, "WORDS": words, "ROWS": rows, "X_FIRST": x_first}
    options = [f"-DDTYPE={DTYPES[dtype]}", *(f"-D{name}={value}" for name, value in chosen.items() if value)]
    return cuda.load(HERE / f"{'gemv' if rung in MAY_BE_DEPENDENT else rung}.cu", options).gemv


@functools.cache
def _ring(dtype, *shape):
    """ring.cu, compiled for a Shape: the block, what ring_plan gives behind the shared memory, and a product."""
    arguments = ", ".join(map(str, (DTYPES[dtype], *shape)))
    return cuda.load(HERE / "ring.cu", [f"-DSHAPE=Shape<{arguments}>"]).gemv


@functools.cache
def _unaligned(file, dtype, sizes, *more):
    """unaligned.cu or unaligned_ring.cu, compiled for Sizes and what its own Shape has beside them."""
    sizes = ", ".join(map(str, (DTYPES[dtype], *sizes)))
    return cuda.load(HERE / file, [f"-DSHAPE=Shape<Sizes<{sizes}>, {', '.join(map(str, more))}>"]).gemv


@functools.cache
def _room(device):
    """(multiprocessors, bytes of shared memory that a block may have), or None where no launch may start early."""
    return (multiprocessors(device), shared_memory(device)) if starts_early(device) else None


def _run(rung, W, x, out, pdl):
    if (y := CALLS.run((rung, pdl), out, W, x)) is not None:
        return y
    y = _expect_all(rung, W, x, out, pdl)
    if W.numel() == 0:
        return y.zero_()  # the sum of nothing
    with CALLS.preparing((rung, pdl), (out,), (y,), (W, x)):
        _launch(rung, W, x, y, bool(pdl))
    return y


def _launch(rung, W, x, out, pdl, **options):
    rows, cols = W.shape
    address = W.data_ptr() | x.data_ptr()
    alignment = min(address & -address, 16)
    if rung == "gemv" and is_unaligned(cols, W.element_size(), alignment):
        return _launch_unaligned(W, x, out, pdl, **options)
    room = (rung == "ring" or rung == "gemv" and pdl) and _room(W.device)
    if room and (found := ring_plan(rows, cols, W.element_size(), alignment, *room)):
        grid, block, shared, words, group_rows, *stages = found
        multiply = product(group_rows) if rung == "gemv" else "MultiplyAdds"
        kernel = _ring(W.dtype, block, words, group_rows, *stages, multiply)
        return kernel(grid, block, W, x, out, rows, cols, shared=shared, pdl=pdl, **options)
    grid, block, *constants = plan(rung, rows, cols, W.element_size(), alignment, pdl)
    return _kernel(rung, W.dtype, *constants)(grid, block, W, x, out, rows, cols, pdl=pdl, **options)


def _launch_unaligned(W, x, out, pdl, **options):
    (rows, cols), room = W.shape, pdl and _room(W.device)
    if room and (found := unaligned_ring_plan(rows, cols, W.element_size(), *room)):
        (grid, block, shared, *shape), file = found, "unaligned_ring.cu"
    else:
        (grid, block, *shape), file, shared = unaligned_plan(rows, cols, W.element_size(), pdl), "unaligned.cu", 0
    kernel = _unaligned(file, W.dtype, *shape)
    return kernel(grid, block, W, x, out, rows, cols, shared=shared, pdl=pdl, **options)


def _expect_all(rung, W, x, out, pdl):
    """Raise unless a rung can be called so. Returns the tensor to write to."""
    expect_first(rung, "W", W, ("rows", "cols"), empty=True)
    rows, cols = W.shape
    expect(rung, "x", x, W, (cols,), empty=True)
    if pdl and rung not in MAY_BE_DEPENDENT:
        waits = "only rows, ring and gemv wait for the kernel before them"
        raise ValueError(f"{rung}: pdl must be False, got {pdl!r}: {waits}")
    return output(rung, out, W, (rows,), empty=True, W=W, x=x)
