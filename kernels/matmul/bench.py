"""Measure the matmul ladder on a GPU: y = x W^T in bf16, square and as a language model's prefill has it.

Every rung on square matrices, in bf16 and once in fp16; `linear` where m tokens meet the layers of a model of 7
billion parameters. The peer is cuBLAS, through F.linear and through torch.mm, of which the faster counts. Each
row is held against float64 on the card before it is timed and after; rungs also on hostile shapes, between NaNs. Every
call finds x and W cold: copies of 1 GB go by turns.

The roof is what cuBLAS reaches with 8192 × 8192 × 8192, measured beside each row: a rung may lie above it. A card that
has been idle for a moment runs faster than one at its limit of power, so both are timed in turns of hundredths of a
second; the last rung and cuBLAS also for more than a second on end.
"""

import functools
import math

import torch
import torch.nn.functional as F

import ref.matmul
from kernels import matmul, running
from kernels.benching import ahead, between_nans, empty, ladder_of, our_row, peer_rows
from kernels.matmul import RUNGS, work
from lab import Rung, check, cuda_timing

DEVICE = "cuda"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SQUARES = [("bf16", 4096), ("bf16", 8192), ("fp16", 4096)]
LAYERS = [(4096, 4096), (14336, 4096), (4096, 14336)]  # n, k
TOKENS = [512, 1024, 2048, 4096, 8192]  # m
HOSTILE = [(37, 64, 56), (1, 8, 8), (129, 264, 72), (128, 256, 64), (300, 136, 1000), (5, 1048, 264)]  # m, n, k
ODD = [(67, 71, 88), (129, 131, 83), (1, 1, 1), (7, 4099, 24)]  # not for all rungs
LINEAR = Rung("linear", "ours", matmul.linear, matmul.BEST)


def ladders(seconds=0.15):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the matmul ladder")
    cases = [(title(name, *shape), name, shape, rungs) for name, shape, rungs in works()]
    cases = [case for case in cases if running.wants(case[0])]
    needed = [rung for rung in (*RUNGS, LINEAR) if any(rung in case[-1] for case in cases)]
    kinds = [(dtype, *sizes) for dtype in DTYPES.values() for sizes in HOSTILE]
    ahead(functools.partial(_once, rung, *kind) for rung in needed for kind in kinds)
    verdicts = {rung.name: _check(rung) for rung in needed}
    return [ladder(*case, verdicts, seconds) for case in cases]


def works():
    """Of each ladder (dtype, (m, n, k), rungs). A layer that is one of the squares stands there, with all rungs."""
    squares = [(name, (n, n, n), RUNGS) for name, n in SQUARES]
    layers = [("bf16", (m, n, k), [LINEAR]) for n, k in LAYERS for m in TOKENS]
    return squares + [layer for layer in layers if layer[:2] not in [square[:2] for square in squares]]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("matmul", roof, versions)


def title(name, m, n, k):
    """What a ladder is called: m rows of x, W (n, k)."""
    return f"Matmul {name}, {m} × {k} times {n} × {k}"


def tolerance(dtype):
    """How far a result may be off, by ‖out − ref‖ / ‖ref‖: one rounding of the dtype and what sums in fp32 lose."""
    return torch.finfo(dtype).eps


def inputs_of(dtype, m, n, k):
    """Pairs (x, W), so many that a pair is cold when its turn comes again."""
    copies = max(2, math.ceil(cuda_timing.COLD / (dtype.itemsize * k * (m + n))))
    x, W = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(dtype)
    return [(x, W), *((x.clone(), W.clone()) for _ in range(copies - 1))]


def facts_of(x, W):
    """What a row is held to, and what it does."""
    moved, flops = work(len(x), len(W), x.shape[1])
    return {"wanted": x.double() @ W.double().T, "tolerance": tolerance(x.dtype), "bytes": moved, "flops": flops}


def ladder(name, dtype, shape, rungs, verdicts, seconds):
    """These rungs and cuBLAS on one shape, each on cold inputs."""
    empty()
    inputs = inputs_of(DTYPES[dtype], *shape)
    facts, like = facts_of(*inputs[0]), inputs[0][0].new_empty(shape[:2])
    rows = [
        our_row(r.title, r.function, inputs, like, verdict=verdicts[r.name], sources=r.sources, **facts) for r in rungs
    ]
    limit = facts.pop("tolerance")
    rows += peer_rows([("cuBLAS", cublas(inputs, like))], limit, ladder=name, **facts)
    return ladder_of(name, rows, seconds, sustain=(rows[len(rungs) - 1].title,), bound="flops")


def cublas(inputs, like):
    """{way to call it: make}, make() gives the calls."""
    out = torch.empty_like(like)
    return {
        "F.linear": lambda: [functools.partial(F.linear, x, W) for x, W in inputs],
        "torch.mm": lambda: [functools.partial(torch.mm, x, W.T, out=out) for x, W in inputs],
    }


def _once(rung, dtype, m, n, k):
    """A call, for what it compiles."""
    rung.function(torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(dtype))


def _check(rung):
    """Hold a rung against the reference on hostile shapes, on the card, in both dtypes."""
    shapes = HOSTILE + (ODD if rung.name == "linear" else [])
    verdict = None
    for dtype in DTYPES.values():

        def inputs(rng, m, n, k):
            return rng.standard_normal((m, k)), rng.standard_normal((n, k))

        def rounded(array, dtype=dtype):
            return torch.from_numpy(array.copy()).to(dtype)

        def reference(x, W, rounded=rounded):
            return ref.matmul.linear(rounded(x).double().numpy(), rounded(W).double().numpy())

        def on_card(x, W, rounded=rounded, dtype=dtype):
            out = between_nans(torch.full((len(x), len(W)), torch.nan, dtype=dtype))
            rung.function(between_nans(rounded(x)), between_nans(rounded(W)), out=out)
            return out.double().cpu().numpy()

        found = check(on_card, reference, inputs, shapes, tolerance=tolerance(dtype))
        if verdict is not None:
            found.shapes, found.error = found.shapes + verdict.shapes, max(found.error, verdict.error)
        verdict = found
        if not verdict:
            return verdict
    return verdict
