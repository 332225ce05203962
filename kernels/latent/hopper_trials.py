"""What hopper.cu owes to each of its ideas, on a card, and what it would take without some of its parts.

python -m kernels.latent.hopper_trials [text ...]    cells whose titles hold one of these
"""

import functools
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from kernels.latent import hopper, splitting
from lab import cuda, cuda_timing
from lab.card import multiprocessors
from lab.source import inlined
from lab.tensors import DTYPES

DEVICE, DTYPE = "cuda", torch.bfloat16
SCALE = 192**-0.5 * math.log2(math.e)
COLD = 300 << 20  # bytes of caches that are gone through before the first one's turn comes again
PASS_ON = """    __device__ __forceinline__ void walk(const Work &work) {
        for (int i = 0; i < SIDE_COLUMNS / 2; i++) o[i] = 0;
        for (int t = 0; t < work.tiles; t++) {
            const int slot = (before + t) % SLOTS;
            for (int part = 0; part < PARTS; part++) s.full[slot][part].wait((before + t) / SLOTS % 2);
            release(slot);
        }
        release_queries();
        before += work.tiles;
    }
    __device__ __forceinline__ void unused(const Work &work) {"""
SOFTMAX = "const bool rises = sums.online_softmax(scores, to_log2);"
PARTIAL = "store_partial(o, to.partial_out + at * LATENT + warpgroup * SIDE_COLUMNS, heads, lane);"
CHANGES = {  # of the text; all but the first two give wrong results
    "": (),
    "no merge": (),
    "loads alone": (("    __device__ __forceinline__ void walk(const Work &work) {", PASS_ON),),
    "products alone": (
        ("if (lane < from || lane >= to) return;", "return;"),
        ("s.full[slot][part].wait(parity);", ""),
    ),
    "no softmax": ((SOFTMAX, "const bool rises = false;"),),
    "partial results not stored": ((PARTIAL, "if (heads < -1000) " + PARTIAL),),
}
VARIANTS = {
    "as planned": {},
    "multicast": {"multicast": True},
    "each for itself": {"multicast": False},
    **{f"merge on {n} blocks a multiprocessor": {"merge_blocks": 132 * n} for n in (4, 8, 64)},
    **{f"{n} parts before": {"parts_before": n} for n in (0, 4, 7, 9)},
    "9 parts before, multicast": {"parts_before": 9, "multicast": True},
    "parts in order": {"own_side_first": False},
    **{f"{n} tiles ahead": {"ahead": n} for n in (0, 1, 4, 8)},
    "multicast, 4 tiles ahead": {"multicast": True, "ahead": 4},
    **{what: {"extra": what} for what in CHANGES if what},
}
SMALL = {f"at least {n} tiles": {"least_tiles": n} for n in (1, 3, 4, 6)} | {
    f"merge by {n}": {"teams": n} for n in (1, 2)
}
# Batch, tokens, more variants, and what it was thought to take before it was measured (us): 2300 clocks a tile (2176 of
# them products), a clock of 1.98 GHz, 1.65 where it lasts; 4 us to begin, and 4 to 6 for partial results and merge.
CELLS = {
    "b1 4K": (1, 4096, SMALL, 11),
    "b1 32K": (1, 32768, {"merge by 2": {"teams": 2}}, 22),
    "b16 4K": (16, 4096, {}, 31),
    "b16 32K": (16, 32768, {}, 185),
    "b64 4K": (64, 4096, {"cut into equal shares": {"merge_tiles": 0}}, 92),
    "b64 32K": (64, 32768, {}, 760),
    "b64 4K, 16 heads": (64, 4096, {}, 76),
}


class NoMerge:
    @staticmethod
    def unchecked(*args, **options):
        return None


@functools.cache
def kernels(dtype, paged, plan_option, teams, extra=""):
    """In place of hopper._kernels: with changes to the text."""
    text = inlined("kernels/latent/hopper.cu")
    for old, new in CHANGES[extra]:
        if text.count(old) != 1:
            raise RuntimeError(f"{old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    shape = f"-DSHAPE=Shape<{dtype}, 64, 64, {str(paged).lower()}>"
    kernel = cuda.compile(text, (shape, plan_option), name="hopper.cu", arch="sm_90a").hopper
    if extra == "no merge":
        return kernel, NoMerge
    return kernel, cuda.load(hopper.HERE / "hopper_merge.cu", (shape, plan_option, f"-DTEAMS={teams}")).merge


def variants_of(cell):
    return VARIANTS | CELLS[cell][2]


def compile_all(cells):
    """All kernels of these cells, by many threads."""
    begin, processors, shapes = time.perf_counter(), multiprocessors(torch.device(DEVICE)), set()
    for cell in cells:
        for chosen in variants_of(cell).values():
            p = hopper.plan(CELLS[cell][0], heads_of(cell), processors, **{"tiles": CELLS[cell][1] // 64} | chosen)
            shapes.add((DTYPES[DTYPE], True, p.option(), p.teams, p.extra))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [kernel for pair in pool.map(lambda shape: kernels(*shape), shapes) for kernel in pair]
        list(pool.map(lambda kernel: kernel.module.cubin(), [k for k in made if k is not NoMerge]))
    print(f"{len(shapes)} shapes in {time.perf_counter() - begin:.1f} s", flush=True)


def heads_of(cell):
    return 16 if "16 heads" in cell else 128


def time_cell(cell):
    batch, tokens, _, thought = CELLS[cell]
    n_heads, n_pages = heads_of(cell), batch * tokens // 64
    pages = torch.randn(n_pages, 64, 576, device=DEVICE, dtype=DTYPE)
    copies = [pages, *(pages.clone() for _ in range(math.ceil(COLD / pages.nbytes) - 1))]
    numbers = np.random.default_rng(0).permutation(n_pages).reshape(batch, -1)
    table = torch.from_numpy(numbers).to(DEVICE, torch.int32)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(batch, n_heads, 576, device=DEVICE).to(DTYPE)
    out, want = (torch.empty(batch, n_heads, 512, device=DEVICE, dtype=DTYPE) for _ in range(2))
    splitting.launch(q, pages, table, lens, SCALE, want, False)
    flops, moved = 2 * 1088 * n_heads * batch * tokens, pages.nbytes
    print(f"\n{cell}  ({flops / 1e9:.0f} GFLOP, {moved / 1e6:.0f} MB; thought to take {thought} us)", flush=True)
    for name, chosen in variants_of(cell).items():
        for pdl in (False, True) if not chosen else (True,):
            out.fill_(math.nan)
            calls = [
                functools.partial(hopper.launch, q, copy, table, lens, SCALE, out, pdl, chosen=chosen)
                for copy in copies
            ]
            us = float(np.median(cuda_timing.Graph(calls).turn())) * 1e6
            far = float((out.double() - want.double()).norm() / want.double().norm())
            print(f"  {name + (', no PDL' if not pdl else ''):28s} {us:8.1f} us {flops / us / 1e6:6.0f} TFLOP/s "
                  f"{moved / us / 1e3:6.0f} GB/s  far from split: {far:.1e}", flush=True)  # fmt: skip


def main(wanted):
    print(torch.cuda.get_device_name(), flush=True)
    hopper._kernels = kernels
    cells = [cell for cell in CELLS if not wanted or any(text in cell for text in wanted)]
    compile_all(cells)
    for cell in cells:
        time_cell(cell)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
