"""What chapter 14 tries beside the ladder (`python -m kernels.trials matmul`): bf16, 4096 × 4096 × 4096.

What the last rung owes to each of its sizes and ideas: the order of tiles, stages, clusters, stores by TMA, products
that stay under way, the shape of tiles. A variant is compiled from its source with other sizes, or a piece replaced.
"""

import torch

from kernels import benching
from kernels.benching import Row, ladder_of
from kernels.matmul import BEST, bench
from kernels.matmul.variants import LARGE
from lab import cuda_timing
from lab.check import Verdict

OWN = ("kernels/matmul/trials.py", "kernels/matmul/variants.py")
SHAPE = (4096, 4096, 4096)


def ladders(seconds=0.1):
    """The variants, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of the matmul")
    benching.empty()
    inputs = bench.inputs_of(torch.bfloat16, *SHAPE)
    facts = bench.facts_of(*inputs[0])
    rows = []
    for variant in (v for v in LARGE if v.fits(*SHAPE, inputs[0][0].device)):
        outs = [torch.full(SHAPE[:2], torch.nan, dtype=torch.bfloat16, device=bench.DEVICE) for _ in inputs]
        calls = [_writing(variant.prepare(x, W, y), y) for (x, W), y in zip(inputs, outs)]
        rows.append(Row(variant.title, calls, outs=outs, verdict=Verdict(), sources=BEST + OWN, **facts))
    return [ladder_of(f"trial: {bench.title('bf16', *SHAPE)}, sizes", rows, seconds, bound="flops")]


def _writing(call, y):
    """The call, which returns what it has written."""

    def run():
        call()
        return y

    return run


def tables():
    return []
