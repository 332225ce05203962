"""What chapter 06 tries beside its ladders (`python -m kernels.trials lowbit`): int4, groups of 128, 14336 × 4096.

What sets the time of the first two rungs: their weights where the L2 cache holds them, rung 1 without its conversion
(whose results are wrong, and so not checked), and how many of each kind of instruction a multiprocessor finishes. A
variant is compiled from its rung's source with one piece of it replaced.
"""

import functools

import numpy as np
import torch

from kernels import benching
from kernels.lowbit import RUNGS, bench, work
from kernels.lowbit.rungs import HERE, WARPS
from lab import cuda, cuda_timing
from lab.card import multiprocessors
from lab.check import Verdict
from lab.table import Table
from lab.tensors import DTYPES

SHAPE, FORMAT = (14336, 4096), "int4 g128"
OWN = "kernels/lowbit/trials.py"
CONVERSION = "weight[i] = (float)(T)code - zero;"
STEPS, OPS, FFMA = 4000, 64, 128  # turns of a loop, instructions in one, results of a multiprocessor in a cycle

KINDS = {  # instructions of the first two rungs' loops, one of each: what it is in PTX
    "FFMA": 'asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f[i]) : "f"(g));',
    "FADD": 'asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(f[i]) : "f"(g));',
    "SHF": 'asm volatile("shr.u32 %0, %0, %1;" : "+r"(a[i]) : "r"(b));',
    "LOP3": 'asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(a[i]) : "r"(b), "r"(c));',
    "HADD2": 'asm volatile("{.reg .f16 l, h; mov.b32 {l, h}, %0; cvt.f32.f16 %0, l;}" : "+r"(a[i]));',
    "I2F": 'asm volatile("{.reg .b16 h; cvt.rn.f16.s32 h, %0; cvt.u32.u16 %0, h;}" : "+r"(a[i]));',
}
LOOP = r"""
extern "C" __global__ void __launch_bounds__(1024) run(unsigned *out, unsigned b, unsigned c, float g, int steps) {
    unsigned a[8];
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = threadIdx.x + i, f[i] = threadIdx.x + i;
#pragma unroll 1
    for (int s = 0; s < steps; s++)
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int i = 0; i < 8; i++) { OP } // eight chains: none waits for the one before it
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) all += a[i] + __float_as_uint(f[i]);
    out[blockIdx.x * blockDim.x + threadIdx.x] = all;
}
"""


def ladders(seconds=0.1):
    """Rungs 1 and 2 and the variants, timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of low-bit weights")
    benching.empty()
    _, x, Wq = bench._inputs(FORMAT, SHAPE, 1)
    wanted, like = x.double() @ Wq.dequantize(torch.float64).T, x.new_empty(1, SHAPE[0])
    moved, flops = work(Wq, x)
    facts = {"bytes": moved, "flops": flops, "wanted": wanted, "tolerance": bench.TOLERANCE}
    cold, found = bench.cold(Wq, RUNGS[0].name), []
    for rung in RUNGS[:2]:
        for title, copies in ((rung.title, cold), (f"{rung.title}, weights in the L2 cache", cold[:1])):
            inputs = [(copy, x) for copy in copies]
            row = benching.our_row(title, rung.function, inputs, like, verdict=Verdict(), sources=rung.sources, **facts)
            found.append(row)
    calls = [functools.partial(_unconverted, copy, x, torch.empty_like(like)) for copy in cold]
    sources = (*RUNGS[0].sources, OWN)
    found.append(benching.Row("shift without the conversion", calls, bytes=moved, flops=flops, sources=sources))
    return [benching.ladder_of(f"trial: GEMV, {FORMAT}, {SHAPE[0]} × {SHAPE[1]}", found, seconds)]


def _unconverted(Wq, x, out):
    rows, cols = Wq.shape
    kernel = unconverted(x.dtype, Wq.scale.dtype, Wq.bits, Wq.group or 0)
    kernel(-(-rows // (4 * WARPS)), 32 * WARPS, Wq.row_major(), Wq.scale, Wq.zero, x, out, rows, cols)
    return out


@functools.cache
def unconverted(dtype, scale, bits, group):
    """Rung 1 with the words of codes in the place of weights: as many loads and multiply-adds, and no conversion."""
    source = (HERE / "shift.cu").read_text()
    if source.count(CONVERSION) != 1:
        raise RuntimeError(f"shift.cu must have {CONVERSION!r} once: the trial replaces it")
    source = source.replace(CONVERSION, "weight[i] = __uint_as_float(w.v[i / PER_WORD]);")
    chosen = {"DTYPE": DTYPES[dtype], "SCALE": DTYPES[scale], "BITS": bits, "GROUP": group}
    options = [f"-D{name}={value}" for name, value in chosen.items()] + [f"-I{HERE}"]  # of rows.cuh
    return cuda.compile(source, options, name="unconverted.cu").gemv


def tables():
    """Results that a multiprocessor has of each kind of instruction, in the time in which it has FFMA multiply-adds."""
    benching.empty()
    blocks = multiprocessors(torch.device(benching.DEVICE))
    out = torch.empty(1024 * blocks, dtype=torch.int32, device=benching.DEVICE)
    took = {}
    for kind in KINDS:
        halves = [functools.partial(loop(kind), blocks, 1024, out, 3, 5, 0.5, n) for n in (STEPS // 2, STEPS)]
        some, all_ = (float(np.median(cuda_timing.Graph([call]).turn())) for call in halves)
        took[kind] = max(all_ - some, 1e-12)  # the launch is in both
    rows = {kind: {"a cycle": FFMA * took["FFMA"] / seconds} for kind, seconds in took.items()}
    return [Table("trial: results of a multiprocessor in a cycle", rows, (OWN,))]


@functools.cache
def loop(kind):
    """A kernel that does OPS of one instruction in a turn, and little else."""
    return cuda.compile(LOOP.replace("OP", KINDS[kind]), name=f"{kind}.cu").run
