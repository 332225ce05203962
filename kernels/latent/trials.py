"""What chapter 16 tries beside its ladders (`python -m kernels.trials latent`).

How a sequence's parts become one, behind the same products (split.cu's): by a second launch, of one to four teams; by
the last block; added up in one place; rescaled where they lie, by additions to exponents (amla.cu, which is not
checked, as it is wrong where a sum is 0: the table says how often that was). And what AMLA's rounding costs.
"""

import functools
import math

import numpy as np

from kernels import benching, latent
from kernels.benching import empty, ladder_of
from kernels.latent import bench, decoding, splitting
from kernels.latent.arguments import LATENT, WIDTH
from kernels.latent.bench_problems import SCALE, problem
from lab import cuda_timing
from lab.table import Table
from ref import latent_attention as ref

CELLS = ("128 heads, 1 × 4K", "128 heads, 1 × 32K", "128 heads, 16 × 4K", "16 heads, 1 × 4K")
HERE = "kernels/latent/trials.py"
MERGES = {  # a rung, what is chosen of its plan, its sources
    "merge by 1 team": ("split", {"teams": 1}, splitting.SOURCES),
    "merge by 2 teams": ("split", {"teams": 2}, splitting.SOURCES),
    "merge by 4 teams": ("split", {"teams": 4}, splitting.SOURCES),
    "the last block": ("last", {}, ("kernels/latent/last.cu", "kernels/latent/splitting.py")),
    "added in place": ("in_place", {}, ("kernels/latent/in_place.cu", "kernels/latent/splitting.py")),
    "exponents in place (AMLA)": ("amla", {}, ("kernels/latent/amla.cu", "kernels/latent/splitting.py")),
    "not merged": ("none", {}, splitting.SOURCES),
}
WHOLE_PARTS = 64  # shares of 16 sequences that end where sequences do, as 66 do not
UNCHECKED = ("amla", "none")
SEQUENCE = (128, 4096, 64)  # of the table: heads, tokens, tokens of a tile
FAR = 0.1  # of the norm of a row: an element that is so far off is broken, not rounded


def ladders(seconds=0.1):
    """Every merge in every cell, checked and timed side by side. Returns the Ladders."""
    cuda_timing.expect_gpu("the trials of latent attention")
    return [_cell(cell, seconds) for cell in CELLS]


def _cell(cell, seconds):
    empty()
    n_heads, lens = bench.CELLS[cell]
    q, caches, kv_lens, facts = problem(lens, n_heads, bench.DEVICE)
    merges = {title: (rung, chosen, sources) for title, (rung, chosen, sources) in MERGES.items()}
    if len(lens) == 16:
        for title, (rung, chosen, sources) in MERGES.items():
            merges[f"{title}, {WHOLE_PARTS} shares"] = rung, chosen | {"shares": WHOLE_PARTS}, sources
    benching.ahead(functools.partial(_run, rung, chosen, kv_lens, q, caches[0]) for rung, chosen, _ in merges.values())
    rows = []
    for title, (rung, chosen, sources) in merges.items():
        run = functools.partial(_run, rung, chosen)
        (row,) = bench.our_rows(q, caches, kv_lens, facts, {title: (run, {}, (*sources, HERE))})
        row.calls = [
            functools.partial(run, kv_lens, q, cache, out=out) for cache, out in zip(caches, row.outs, strict=True)
        ]
        if rung in UNCHECKED:
            row.wanted = None
        rows.append(row)
    return ladder_of(f"trial: merges, {bench.title_of(cell)}", rows, seconds)


def _run(rung, chosen, kv_lens, q, cache, *, out=None):
    """A rung under programmatic dependent launch, with a plan of our choice; rung "none": split.cu alone."""
    out = q.new_empty(*q.shape[:2], LATENT) if out is None else out
    launch = {"none": splitting.launch_alone} | decoding.RUNGS | decoding.TRIALS
    launch[rung](q, *cache, kv_lens, SCALE * decoding.LOG2_E, out, True, chosen=chosen)
    return out


def tables():
    """What AMLA's roundings cost, in NumPy; and how right kernels are, on a card."""
    return [reference_table(), kernel_table()]


def reference_table(sizes=SEQUENCE):
    """Errors of tile after tile in float32, weights in bfloat16, against float64."""
    n_heads, tokens, tile = sizes
    rng = np.random.default_rng(16)
    q, cache = (ref.bfloat16(rng.standard_normal(shape)) for shape in ((n_heads, WIDTH), (tokens, WIDTH)))
    wanted = ref.decode(q[None], cache[None], scale=SCALE)[0]
    how = {"scale": SCALE, "tile": tile}
    found = {
        "rescaled by products": ref.flash(q, cache, **how),
        "by additions (AMLA)": ref.amla(q, cache, **how),
        "by additions, not compensated": ref.amla(q, cache, compensate=False, **how),
    }
    errors = {name: np.linalg.norm(out - wanted) / np.linalg.norm(wanted) for name, out in found.items()}
    plain = errors["rescaled by products"]
    rows = {
        name: {"relative error": float(f"{e:.3e}"), "of products'": round(e / plain, 2)} for name, e in errors.items()
    }
    title = f"AMLA in NumPy, {n_heads} heads, {tokens} tokens by {tile}, bf16 weights, float32 result"
    return Table(title, rows, ("ref/latent_attention.py", HERE))


def kernel_table(cell=CELLS[0], device=None):
    """Errors of the kernels, and elements that are far off: of the same calls, on other values."""
    n_heads, lens = bench.CELLS[cell]
    q, caches, kv_lens, facts = problem(lens, n_heads, device or bench.DEVICE)
    wanted, rows = facts["wanted"], {}
    for title, (rung, chosen, _) in MERGES.items():
        if rung == "none":
            continue
        off = (_run(rung, chosen, kv_lens, q, caches[0]).double() - wanted).nan_to_num(nan=math.inf)
        far = off.abs() > FAR * wanted.norm(dim=-1, keepdim=True)
        error = float(off.masked_fill(far, 0).norm() / wanted.norm())
        rows[title] = {"relative error, broken elements aside": float(f"{error:.3e}"), "broken": int(far.sum())}
    error = float((latent.decode(q, caches[0], kv_lens=kv_lens, scale=SCALE).double() - wanted).norm() / wanted.norm())
    rows["decode"] = {"relative error, broken elements aside": float(f"{error:.3e}"), "broken": 0}
    sources = {source for _, _, of in MERGES.values() for source in of}
    return Table(f"errors of kernels, {cell}", rows, (*sorted(sources), HERE))
