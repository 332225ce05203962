"""Measure the GEMV ladder on a GPU: fp16 and bf16 on the shapes of a 7-billion-parameter model, fp32 on one of them; a
small matrix, and two whose rows begin at any element.

Peers: cuBLAS through torch.mv (F.linear calls the same kernel, in the same time), and two ways to write the product,
as torch.compile makes them in its fastest mode (kernels/compiling.py: with PDL or without, the best of three compiles).
The last row only reads the weights: what a launch costs without PDL.
"""

import dataclasses
import functools

import numpy as np
import torch
import torch.nn.functional as F

import ref.gemv
from kernels import compiling, running
from kernels.benching import empty, measure, peer_rows
from kernels.gemv import DEPENDENT, RUNGS, UNALIGNED, rows, work
from kernels.gemv.ring_plan import product, ring_plan
from kernels.gemv.unaligned_plan import is_unaligned
from lab import Ladder, check, cuda_timing, hostile_shapes
from lab.card import multiprocessors, shared_memory
from lab.check import Verdict

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096)]
SMALL, UNALIGNED_SHAPES = (2048, 2048), {"fp16": (4097, 4099), "bf16": (32001, 4097)}
READ_AT_ONCE = 128 * 1024  # bytes of which the kernel that only reads takes a multiple, to have its choice of sizes
DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PDL = ", PDL"  # ends the title of what is launched as a dependent
GUARD = 256  # elements of NaN on each side of an input and an output


def ladders(seconds=0.15):
    """Check, then time, every rung and peer. Returns one Ladder for each dtype and shape."""
    cuda_timing.expect_gpu("the GEMV ladder")
    compiling.ahead("kernels.gemv.bench", check_ahead)
    return [_ladder(*case, seconds) for case in _cases() if running.wants(_title(*case[::2]))]


def check_ahead():
    """Hold the rungs on hostile shapes, which is kept: other cores are at work meanwhile."""
    for name, dtype, shape in _cases():
        for rung in rungs(dtype, shape) if running.wants(_title(name, shape)) else ():
            _check(rung.function, dtype)


def _cases():
    """(name of a dtype, dtype, shape) of each ladder."""
    cases = [(name, dtype, shape) for name, dtype in DTYPES.items() for shape in SHAPES]
    cases += [("fp32", torch.float32, SHAPES[1]), ("fp16", torch.float16, SMALL)]
    return cases + [(name, DTYPES[name], shape) for name, shape in UNALIGNED_SHAPES.items()]


def ways():
    """What torch.compile tunes for each ladder, by its title."""
    return {_title(*case[::2]): functools.partial(_ways, *case) for case in _cases()}


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("gemv", roof, versions)


def tolerance(dtype):
    """How far a result may be off, by ‖out − ref‖ / ‖ref‖: two roundings of the dtype, or what fp32 sums lose."""
    return max(torch.finfo(dtype).eps, 1e-5)


def _title(name, shape):
    return f"GEMV {name}, {shape[0]} × {shape[1]}"


def _ladder(name, dtype, shape, seconds):
    empty()
    n_rows, cols = shape
    weights = _cold_weights(dtype, shape)
    x = torch.randn(cols, device=DEVICE).to(dtype)
    wanted = torch.mv(weights[0].double(), x.double())
    moved, flops = work(weights[0])
    ladder = Ladder(_title(name, shape), bound="read", device="cuda")
    written = {}  # {title: outputs that a call writes in place}
    for title, call, verdict, sources in (*_rungs(dtype, shape), ("cuBLAS: torch.mv", _cublas, Verdict(), ())):
        outs = [torch.full((n_rows,), torch.nan, device=DEVICE, dtype=dtype) for _ in weights]
        calls = [functools.partial(call, W, x, y) for W, y in zip(weights, outs)]
        results = [c() for c in calls]  # one after another, as they are timed
        verdict.error = max(verdict.error, _error(title, results, wanted, dtype))
        verdict.shapes += 1
        if results[0].data_ptr() == outs[0].data_ptr():
            written[title] = outs
        ladder.plan(title, calls, bytes=moved, flops=flops, verdict=verdict, sources=sources)
    facts = {"wanted": wanted, "bytes": moved, "flops": flops}
    families = [(way.name, compiling.modes(way)) for way in _ways(name, dtype, shape, weights, x)]
    for row in peer_rows(families, tolerance(dtype), ladder=ladder.title, **facts):
        ladder.plan(row.title, row.calls, bytes=moved, flops=flops, verdict=Verdict(shapes=1))
    for y in (y for outs in written.values() for y in outs):
        y.fill_(torch.nan)
    # its flops are those of the product, so that its speed-up compares
    read = [_whole(W) for W in weights]
    alone = {"bytes": read[0].nbytes, "flops": flops, "sources": ("lab/roof_cuda.py",)}
    ladder.plan("reading the weights only", cuda_timing.read_calls(read), **alone)
    measure(ladder, seconds, sustain=_best(dtype, shape))
    for title, outs in written.items():
        _error(title, outs, wanted, dtype)
    ladder.calls.clear()  # they hold 1 GB of copies
    return running.done(ladder)


def _cold_weights(dtype, shape):
    return cuda_timing.cold_copies(torch.randn(shape, device=DEVICE).to(dtype))


def rungs(dtype, shape):
    """The rungs of a ladder: those with a ring where the matrix is for it, rung 8 where gemv then is. Where rows begin
    at any element, rungs 5 and 6 as they would be, and what gemv is then."""
    if is_unaligned(shape[1], dtype.itemsize, 16):
        plain, early = UNALIGNED
        return [*RUNGS[:-1], dataclasses.replace(RUNGS[-1], name="rows", function=rows), plain, DEPENDENT[0], early]
    card = torch.device(DEVICE)
    ring = ring_plan(*shape, dtype.itemsize, 16, multiprocessors(card), shared_memory(card))
    dependent, multiply_adds, cores = DEPENDENT
    if not ring:
        return [*RUNGS, dependent]
    _, _, _, _, group_rows, *_ = ring
    return [*RUNGS, dependent, multiply_adds, *([cores] if product(group_rows) == "TensorCores" else [])]


def _best(dtype, shape):
    """Titles of what gemv is, in an ordinary launch and as a dependent."""
    plain = [rung.title for rung in rungs(dtype, shape) if not rung.title.endswith(PDL)]
    return plain[-1], rungs(dtype, shape)[-1].title


def _whole(W):
    """A matrix as the kernel that only reads takes it, without the last few bytes."""
    return (
        W.reshape(-1)[: W.nbytes // READ_AT_ONCE * READ_AT_ONCE // W.element_size()] if W.nbytes > READ_AT_ONCE else W
    )


def _rungs(dtype, shape):
    """Yield (title, call(W, x, out), verdict on hostile shapes, sources) for each rung."""
    for rung in rungs(dtype, shape):
        verdict = dataclasses.replace(_check(rung.function, dtype))
        yield rung.title, lambda W, x, y, run=rung.function: run(W, x, out=y), verdict, rung.sources


def _cublas(W, x, y):
    return torch.mv(W, x, out=y)


def _ways(name, dtype, shape, weights=None, x=None):
    """The two ways to write the product, for torch.compile. Reset, as it gives up after a few shapes."""
    if weights is None:
        weights = _cold_weights(dtype, shape)
        x = torch.randn(shape[1], device=DEVICE).to(dtype)

    def bind(run):
        return [functools.partial(run, W, x) for W in weights]

    torch.compiler.reset()
    written = {"W @ x": lambda W, x: W @ x, "F.linear": lambda W, x: F.linear(x, W)}
    title = _title(name, shape)
    return [compiling.Way(title, f"torch.compile, {text}", function, bind) for text, function in written.items()]


def _error(title, results, wanted, dtype):
    """The largest error of these results by the norm; ValueError if one is wrong."""
    off = torch.stack(results).double() - wanted
    error = float(torch.linalg.vector_norm(off, dim=1).max() / torch.linalg.vector_norm(wanted))
    if not error <= tolerance(dtype):  # NaN too
        raise ValueError(
            f"{title} is not right, so it is not timed: relative error {error:.2g} on {tuple(wanted.shape)}"
        )
    return error


@functools.cache
def _check(function, dtype):
    """Hold a rung against the reference on hostile shapes, on the card."""

    def inputs(rng, rows, cols):
        return rng.standard_normal((rows, cols)).astype(np.float32), rng.standard_normal(cols).astype(np.float32)

    def rounded(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

    def reference(W, x):
        return ref.gemv.gemv(rounded(W).double().numpy(), rounded(x).double().numpy())

    def on_card(W, x):
        out = _between_nans(torch.full((W.shape[0],), torch.nan, dtype=dtype))
        function(_between_nans(rounded(W)), _between_nans(rounded(x)), out=out)
        return out.double().cpu().numpy()

    return check(on_card, reference, inputs, hostile_shapes(2), tolerance=tolerance(dtype))


def _between_nans(tensor):
    """A copy on the card that lies between NaNs: what is read too far turns the result into NaN."""
    home = torch.full((tensor.numel() + 2 * GUARD,), torch.nan, device=DEVICE, dtype=tensor.dtype)
    inside = home[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)
