"""Measure chapter 06 on a GPU: 8-bit weights with a scale for a row, 4 and 2 bits with one for 128 columns.

The shapes of the GEMV ladder, fp16 x: one row of it, and at 4 bits sixteen; and FURTHER cases, beside which only those
peers stand that have nothing to tune. Every call finds its weights cold. Each row
is held against float64 on the card before it is timed and after; ours also on hostile shapes. Beside ours stand the
course's own 16-bit product, for the speed-up, the peers of peers.py, and a kernel that only reads as many bytes as a
call moves, x and y too, up to a multiple of 128 KiB: what a plain launch over them costs.
"""

import contextlib
import copy
import functools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels import benching, compiling, gemv, lowbit, running
from kernels.lowbit import RUNGS, peers, work
from lab import cuda_timing
from lab.check import Verdict

DEVICE = "cuda"
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096)]
FORMATS = {"int8 per row": (8, None), "int4 g128": (4, 128), "int2 g128": (2, 128)}
WIDE = (8192, 28672)
FURTHER = [  # format, shape, rows of x
    *(("int8 per row", shape, m) for m in (8, 16) for shape in SHAPES),
    ("int8 per row", WIDE, 1),
    *((name, WIDE, 16) for name in FORMATS),
    ("int4 g128", (5120, 5120), 4),
]
DTYPE = torch.float16
TOLERANCE = 1e-3  # against the dequantised weights, by the norm: sums are exact to that, x and y are float16
HOSTILE = [(1, 1), (37, 3), (16, 32), (129, 33), (1009, 9), (7, 112)]  # rows, groups (or units of 128 columns)
WHOLE_TILES = [(16, 2), (48, 33), (1008, 9)]  # of the rung that takes no others
INTERLEAVED = ("digits", "gemv")  # rungs that read codes as layout.py has them
READ = 1 << 17  # bytes that the kernel that only reads takes a multiple of
SIXTEEN = tuple(source for rung in gemv.RUNGS[-1:] for source in rung.sources)


def ladders(seconds=0.1):
    """Check, then time, every rung and peer. Returns the Ladders."""
    cuda_timing.expect_gpu("the ladders of low-bit weights")
    compile_ahead(check_ahead)
    compiling.ahead("kernels.lowbit.bench")
    return [_cell(*cell, seconds) for cell in _wanted()]


def further(roof, versions):
    """The trials, in a file of their own. Returns the paths written."""
    from kernels import trials  # whose modules stand on this one

    return trials.store("lowbit", roof, versions)


def _cells():
    """(format, shape, rows of x) of each ladder that has all peers."""
    one = [(name, shape, 1) for name in FORMATS for shape in SHAPES]
    return [*one, *(("int4 g128", shape, 16) for shape in SHAPES)]


def _wanted():
    return [cell for cell in [*_cells(), *FURTHER] if running.wants(title_of(*cell))]


def compile_ahead(meanwhile=lambda: None):
    """Have the peers compile what they want, on all cores, in processes of their own: one after another would take
    minutes. This process does `meanwhile`. What fails here is compiled later, and fails there.

    What Triton compiles is kept on disk, where this process finds it. What is chosen is not: those processes tune on
    one card all at once. (torch.compile keeps its choices, and has its own way: kernels/compiling.py.)
    """

    def apart(number):
        command = [sys.executable, "-m", "kernels.lowbit.bench", str(number)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=90, **quiet)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = pool.map(apart, [number for number, cell in enumerate(_cells()) if cell in _wanted()])
        meanwhile()
        list(waiting)


def check_ahead():
    """Hold ours on hostile shapes, and call it once on those to be timed, which compiles it."""
    for name, shape, m in _wanted():
        _, x, Wq = _inputs(name, shape, m)
        for rung, pdl in _rungs(name, m):
            _checked(rung, pdl, *FORMATS[name], m)
            rung.function(Wq, x, pdl=pdl)


def _call_peers(number):
    """Call each peer of a ladder once, in each of its modes, but for those of torch.compile."""
    W, x, Wq = _inputs(*_cells()[number])
    for name, modes, _, _ in peers.families(W, Wq, x, 1, True):
        for make in () if name.startswith("torch.compile") else modes.values():
            with contextlib.suppress(Exception):  # a mode that refuses: the ladder says so
                make()[0]()


def ways():
    """What torch.compile tunes for each ladder of 8 bits, by its title."""
    return {title_of(*cell): functools.partial(_ways, *cell) for cell in _cells() if FORMATS[cell[0]][0] == 8}


def _ways(*cell):
    W, x, Wq = _inputs(*cell)
    return [peers.compiled(W, x, math.ceil(cuda_timing.COLD / Wq.nbytes))[0]]


def _inputs(name, shape, m):
    """W (rows, cols), x (m, cols), and W quantised."""
    W = (torch.randn(shape, device=DEVICE) / math.sqrt(shape[1])).to(DTYPE)
    return W, torch.randn(m, shape[1], device=DEVICE).to(DTYPE), lowbit.quantize(W, *FORMATS[name])


def title_of(name, shape, m=1):
    """What the ladder of a format (see FORMATS), a shape (rows, cols) and so many rows of x is called."""
    return f"GEMV, {name}, {shape[0]} × {shape[1]}" + (f", {m} rows of x" if m > 1 else "")


def _cell(name, shape, m, seconds):
    benching.empty()
    W, x, Wq = _inputs(name, shape, m)
    moved, flops = work(Wq, x)
    facts = {"flops": flops, "bytes": moved}
    wanted, best = x.double() @ Wq.dequantize(torch.float64).T, cold(Wq, RUNGS[-1].name)
    rows = list(_ours(Wq, best, x, wanted, facts, _rungs(name, m)))
    rows += _sixteen_bits(W, x, flops) if m == 1 else _one_row(Wq, best, x, wanted, facts)
    count = math.ceil(cuda_timing.COLD / Wq.nbytes)
    tuned = (name, shape, m) not in FURTHER
    for title, modes, of_peer, tolerance in peers.families(W, Wq, x, count, tuned):
        fewer = facts | {"flops": flops * len(of_peer) // m}  # of the rows that it computes
        ladder = title_of(name, shape, m)
        rows += benching.peer_rows([(title, modes)], tolerance, ladder=ladder, wanted=of_peer, **fewer)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (math.ceil(moved / READ) * READ // 4,), device=DEVICE)
    words = words.to(torch.int32)
    rows.append(benching.reading(cuda_timing.cold_copies(words), words.nbytes, flops))
    rows[-1].title = "reading the weights only"
    best = RUNGS[-1].title
    return benching.ladder_of(title_of(name, shape, m), rows, seconds, sustain=(best, f"{best}, PDL") if m == 1 else ())


def cold(Wq, rung):
    """Copies of quantised weights, of what a rung reads; they share the rest."""
    if rung not in INTERLEAVED:
        Wq.row_major()
    read = ("packed", "factors") if rung in INTERLEAVED else ("_row_major", "scale", "zero")
    copies = [copy.copy(Wq) for _ in range(math.ceil(cuda_timing.COLD / Wq.nbytes))]
    for other in copies[1:]:
        for name in read:
            setattr(other, name, getattr(Wq, name).clone())
    return copies


def _rungs(name, m):
    """(rung, whether it is launched as a dependent) of a format and so many rows of x; of more the best one alone."""
    found = [rung for rung in RUNGS if rung.name != "digits" or name == "int4 g128"] if m == 1 else RUNGS[-1:]
    return [*((rung, False) for rung in found), (RUNGS[-1], True)]


def _ours(Wq, best, x, wanted, facts, rungs):
    """The rungs, and the best one under programmatic dependent launch. best: copies of Wq for that one, and for digits;
    the others share theirs, too."""
    others = cold(Wq, RUNGS[0].name) if rungs[0][0] is not RUNGS[-1] else []
    for rung, pdl in rungs:
        run = functools.partial(rung.function, pdl=True) if pdl else rung.function
        verdict = _checked(rung, pdl, Wq.bits, Wq.group, len(x))
        more = facts | {"wanted": wanted, "tolerance": TOLERANCE, "verdict": verdict, "sources": rung.sources}
        inputs = [(c, x) for c in (best if rung.name in INTERLEAVED else others)]
        like = x.new_empty(len(x), Wq.shape[0])
        yield benching.our_row(f"{rung.title}, PDL" if pdl else rung.title, run, inputs, like, **more)


def _one_row(Wq, best, x, wanted, facts):
    """The best rung on the first row alone, to compare with."""
    one = x[:1].contiguous()
    alone = facts | {"flops": facts["flops"] // len(x), "bytes": work(Wq, one)[0]}
    for row in _ours(Wq, best, one, wanted[:1], alone, _rungs("", len(x))):
        row.title += ", one row of x"
        yield row


def _sixteen_bits(W, x, flops):
    """The course's own product with the weights as they were."""
    wanted = (W.double() @ x[0].double())[None]
    weights = cuda_timing.cold_copies(W)
    for pdl in (False, True):
        run = functools.partial(gemv.gemv, pdl=pdl)
        more = {"wanted": wanted[0], "tolerance": TOLERANCE, "flops": flops, "bytes": gemv.work(W)[0]}
        sources = (*SIXTEEN, *gemv.RING) if pdl else SIXTEEN
        inputs = [(w, x[0]) for w in weights]
        title = "16 bits, PDL" if pdl else "16 bits"
        yield benching.our_row(title, run, inputs, x.new_empty(len(W)), verdict=None, sources=sources, **more)


@functools.cache
def _checked(rung, pdl, bits, group, m):
    """Hold a rung on hostile shapes against the dequantised weights. Returns the Verdict."""
    verdict = Verdict()
    for rows, groups in WHOLE_TILES if rung.name == "digits" else HOSTILE:
        cols = groups * (group or 128) - (0 if group else 1)
        W = torch.randn(rows, cols, device=DEVICE).to(DTYPE)
        Wq, x = lowbit.quantize(W, bits, group), torch.randn(m, cols, device=DEVICE).to(DTYPE)
        out = torch.full((m, rows), torch.nan, device=DEVICE, dtype=DTYPE)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # a dependent launch may read the weights before they are written
        rung.function(Wq, x, out=out, pdl=pdl)
        wanted = x.double() @ Wq.dequantize(torch.float64).T
        error = float((out.double() - wanted).norm() / wanted.norm())
        verdict.shapes += 1
        verdict.error = max(verdict.error, error)
        if not error <= TOLERANCE:
            verdict.problems.append(f"wrong at shape {rows} × {cols}, {m} rows of x: relative error {error:.2g}")
            break
    return verdict


if __name__ == "__main__":
    _call_peers(int(sys.argv[1]))
