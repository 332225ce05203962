"""What chapters 03 and 04 try beside the ladder (`python -m kernels.trials gemv`): fp16, 4096 × 4096.

Rung 1 with other blocks; what rung 3 owes to its barrier and what to its large blocks; rung 5 with fewer and with more
bytes under way; and the ring without dependent launches, or with all of its slots asked for before x. Tables
say how fast a kernel reads with so many bytes under way, and how long one load of the L2 cache takes. A variant is
compiled from its rung's source with other options, or with one piece of it replaced.
"""

import functools
import math

import numpy as np
import torch

from kernels import benching
from kernels.gemv import DEPENDENT, HERE, PLAN, RING, RUNGS, _kernel, _ring, _room, bench, ring, work
from kernels.gemv.plan import plan
from kernels.gemv.ring_plan import ring_plan
from lab import Rung, cuda, cuda_timing
from lab.check import Verdict
from lab.table import Table
from lab.tensors import DTYPES

SHAPE, DTYPE = (4096, 4096), torch.float16
OWN = "kernels/gemv/trials.py"
BLOCKS = (1024, 512, 256, 128, 64, 32)  # threads of one, of rung 1
SM_SHARED, RESERVED = 228 * 1024, 1024  # bytes of shared memory of an H200's multiprocessor; of a block, the system's
IN_FLIGHT = [(2, 1, n) for n in (1, 2, 3, 4)] + [(2, 0, 5), (4, 0, 3), (4, 1, 4)]  # ROWS, X_FIRST, blocks that fit
WORDS, SHARES = (1, 2, 4, 8), (0.25, 0.5, 1, 2, 3)  # of 16 bytes, of a thread; blocks for each multiprocessor
READ_BYTES, CHAIN_BYTES, STEPS = 1 << 30, 1 << 30, 1 << 14

READ = r"""
extern "C" __global__ void __launch_bounds__(256) read(const uint4 *data, unsigned *sums, long long words) {
    unsigned sum = 0;
#pragma unroll 1
    for (long long at = blockIdx.x * 256ll * WORDS + threadIdx.x; at < words; at += gridDim.x * 256ll * WORDS) {
        uint4 w[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) // volatile keeps them together
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w) : "l"(data + at + i * 256));
#pragma unroll
        for (int i = 0; i < WORDS; i++) sum += w[i].x + w[i].y + w[i].z + w[i].w;
    }
    sums[blockIdx.x * 256 + threadIdx.x] = sum;
}

// each number says where the next one is: a load cannot begin before the one ahead of it has ended
extern "C" __global__ void chain(const long long *next, long long *last, int steps) {
    long long at = 0;
    for (int i = 0; i < steps; i++) at = next[at];
    *last = at;
}
"""


def ladders(seconds=0.1):
    """The variants, checked and timed side by side with the rungs that they vary. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of GEMV")
    return [_ladder(title, rungs(), seconds) for title, rungs in LADDERS.items()]


def _ladder(title, rungs, seconds):
    benching.empty()
    W, x = torch.randn(SHAPE, device=benching.DEVICE).to(DTYPE), torch.randn(SHAPE[1], device=benching.DEVICE).to(DTYPE)
    inputs = [(copy, x) for copy in cuda_timing.cold_copies(W)]
    moved, flops = work(W)
    facts = {"bytes": moved, "flops": flops, "tolerance": bench.tolerance(DTYPE)}
    facts |= {"wanted": torch.mv(W.double(), x.double()), "verdict": Verdict()}
    rows = [
        benching.our_row(rung.title, rung.function, inputs, W.new_empty(len(W)), sources=rung.sources, **facts)
        for rung in rungs
    ]
    return benching.ladder_of(f"trial: {title}", rows, seconds)


def tables():
    """GB/s by the bytes under way, and the time of one load."""
    benching.empty()
    return [read_table(), chain_table()]


# Rung 1, by the size of its blocks


def naive_blocks():
    return [Rung(f"naive_{n}", f"{n} threads a block", functools.partial(_blocks, "naive", n, n), sources("naive"))
            for n in BLOCKS]  # fmt: skip


def _blocks(rung, threads, rows, W, x, *, out):
    """A rung without constants in blocks of so many threads, which have so many rows."""
    _kernel(rung, W.dtype, 0, 0, 0, 0)(-(-len(W) // rows), threads, W, x, out, *W.shape)
    return out


# Rungs 2 and 3: the size of a block, and the barrier


def stores():
    """Both rungs with 8 and with 32 warps a block."""
    warp, wide = (rung for rung in RUNGS if rung.name in ("warp", "wide"))
    warp_32 = functools.partial(_blocks, "warp", 1024, 32)
    return [
        Rung("warp", f"{warp.title}, 8 warps a block", warp.function, warp.sources),
        Rung("warp_32", f"{warp.title}, 32 warps a block", warp_32, sources("warp")),
        Rung("wide_8", f"{wide.title}, 8 warps a block", _wide_8, sources("wide")),
        Rung("wide", f"{wide.title}, 32 warps a block", wide.function, wide.sources),
    ]


def _wide_8(W, x, *, out):
    wide_8(W.dtype)(-(-len(W) // 8), 256, W, x, out, *W.shape)
    return out


@functools.cache
def wide_8(dtype):
    """Rung 3 with 8 rows a block, one for each of 8 warps."""
    changes = {
        "ROWS = 32;": "ROWS = 8;",
        "if (warp == 0 && first + lane < rows)": "if (warp == 0 && lane < ROWS && first + lane < rows)",
    }
    return variant("wide.cu", changes, [f"-DDTYPE={DTYPES[dtype]}"])


# Rung 5: bytes under way


def in_flight():
    """Rung 5 with other numbers of rows a block, and of blocks on a multiprocessor."""
    return [Rung(f"gemv_{r}_{x}_{n}", in_flight_title(r, x, n), functools.partial(_in_flight, r, x, n),
                 sources("gemv", PLAN)) for r, x, n in IN_FLIGHT]  # fmt: skip


def in_flight_title(each, x_first, blocks):
    """What a variant is called, by the KB of W that are under way on a multiprocessor at the most."""
    kb = blocks * 256 * 2 * each * 16 // 1024  # threads, WORDS, of 16 bytes
    order = "x first" if x_first else "W first"
    return f"{kb} KB on an SM: {blocks} block{'s' * (blocks > 1)} of {each} rows, {order}"


def _in_flight(each, x_first, blocks, W, x, *, out):
    """gemv.cu; the shared memory that it does not use lets no more than so many blocks share a multiprocessor."""
    rows, cols = W.shape
    _, threads, vec, held, *_ = plan("gemv", rows, cols, W.element_size())
    kernel = _kernel("gemv", W.dtype, vec, held, each, x_first)
    static = 4 * each * threads // 32
    shared = min(SM_SHARED // blocks - RESERVED - static, cuda.MAX_SHARED - static) // 1024 * 1024
    kernel(-(-rows // each), threads, W, x, out, rows, cols, shared=shared)
    return out


# Rungs 7 and 8: the ring


def rings():
    """The ring as the ladder has it, launched in the ordinary way, and with every slot before x; rung 5 beside it."""
    gemv, (_, multiply_adds, cores) = RUNGS[-1], DEPENDENT
    plain = {rung.name: rung.title.removesuffix(", PDL") for rung in (multiply_adds, cores)}
    return [
        gemv,
        Rung("ring_plain", plain["ring"], ring, RING),
        Rung("cores_plain", plain["gemv"], functools.partial(_cores, False, False), (*RING, OWN)),
        multiply_adds,
        cores,
        Rung("cores_all", f"{cores.title}, all slots before x", functools.partial(_cores, True, True), (*RING, OWN)),
    ]


def _cores(pdl, every_slot, W, x, *, out):
    """ring.cu on tensor cores, launched as a dependent or not. every_slot: all are asked for before x."""
    grid, block, shared, *constants = ring_plan(*W.shape, W.element_size(), 16, *_room(W.device))
    if every_slot:
        constants[-1] = constants[-2]  # STAGES_BEFORE_X, STAGES
    kernel = _ring(W.dtype, block, *constants, "TensorCores")
    kernel(grid, block, W, x, out, *W.shape, shared=shared, pdl=pdl)
    return out


# Tables


def read_table():
    """GB/s of a kernel that only reads, by words under way of a thread (rows) and by blocks (columns)."""
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (READ_BYTES // 4,), dtype=torch.int32, device=benching.DEVICE)
    processors = _room(data.device)[0]
    rows = {}
    for words in WORDS:
        kernel, found = reading(words).read, rows.setdefault(f"{words} × 16 bytes", {})
        for share in SHARES:
            blocks = math.ceil(share * processors)
            goes = data.nbytes // 16 // (blocks * 256 * words)  # whole ones
            sums = torch.empty(256 * blocks, dtype=torch.int32, device=data.device)
            count = goes * blocks * 256 * words
            call = functools.partial(kernel, blocks, 256, data, sums, count)
            seconds = float(np.median(cuda_timing.Graph([call]).turn()))
            if (int(sums.sum()) - int(data[: 4 * count].sum())) % (1 << 32):
                raise RuntimeError("the trial's reading is wrong, so its time means nothing")
            found[f"{blocks} blocks"] = 16 * count / seconds / 1e9
    return Table("trial: GB/s by 16-byte loads under way, blocks of 256 threads", rows, (OWN,))


def chain_table():
    """Nanoseconds of a load by one thread, each from where the one before it said, in an otherwise idle card.

    A graph replays the same steps, so their lines, 2 MB, are in the L2 cache, whose latency this is.
    """
    count = CHAIN_BYTES // 128
    order = torch.randperm(count, device=benching.DEVICE) * 16  # one number of eight bytes in each line of 128
    order = torch.roll(order, -int((order == 0).nonzero()))  # the first is 0
    following = torch.zeros(16 * count, dtype=torch.int64, device=order.device)
    following[order] = torch.roll(order, -1)
    last = torch.zeros(1, dtype=torch.int64, device=order.device)
    taken = [
        float(np.median(cuda_timing.Graph([functools.partial(reading(1).chain, 1, 1, following, last, n)]).turn()))
        for n in (STEPS // 2, STEPS)
    ]
    if int(last) != int(order[STEPS % count]):
        raise RuntimeError("the chain ended in the wrong place, so its time means nothing")
    each = {"ns a load": 1e9 * (taken[1] - taken[0]) / (STEPS - STEPS // 2)}
    return Table("trial: latency of one load", {"a chain of loads": each}, (OWN,))


@functools.cache
def reading(words):
    return cuda.compile(READ, [f"-DWORDS={words}"], name="reading.cu")


# What they share


def sources(rung, *more):
    return f"kernels/gemv/{rung}.cu", *more, OWN


def variant(name, changes, options):
    """The kernel `gemv` of a source in which each of these pieces, found once, is replaced."""
    source = (HERE / name).read_text()
    for old, new in changes.items():
        if source.count(old) != 1:
            raise RuntimeError(f"{name} must have {old!r} once: the trial replaces it")
        source = source.replace(old, new)
    return cuda.compile(source, options, name=name).gemv


CASE = "GEMV fp16, 4096 × 4096"
LADDERS = {
    f"{CASE}, one thread a row": naive_blocks,
    f"{CASE}, blocks and stores": stores,
    f"{CASE}, bytes under way": in_flight,
    f"{CASE}, the ring": rings,
}
