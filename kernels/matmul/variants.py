"""Variants of planned.cu, for the trials and for `python -m kernels.matmul.sweep`: other sizes, or a piece replaced."""

import functools
from typing import NamedTuple

import torch

from kernels.matmul import launching
from kernels.matmul.plan import plan
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.source import inlined
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES

SOURCE = "kernels/matmul/planned.cu"
TOGETHER = (  # one arrival for a consumer, not for each of its warps
    ("shared.ring.init(1, 4 * S::CONSUMERS * S::SHARERS)", "shared.ring.init(1, S::CONSUMERS * S::SHARERS)"),
    ("if (lane == 0) ring.release(phase);", "if (threadIdx.x % 128 == 0) ring.release(phase);"),
    ("} else if (lane < S::SHARERS) arrive_at", "} else if (threadIdx.x % 128 < S::SHARERS) arrive_at"),
)
NO_OVERLAP = (("wgmma_wait<1>(); // the step", "wgmma_wait<0>(); // the step"),)
STORES_LEAVE_FIRST = (  # what is written is not read again here: it is the first that L2 may drop
    (
        ".shared::cta.bulk_group [%0, {%1, %2}], [%3];",
        ".shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;",
    ),
    (
        '"r"(row), "r"(shared_address(from)) : "memory");',
        '"r"(row), "r"(shared_address(from)), "l"(evict_first()) : "memory");',
    ),
)
DIRECT = "Plain"  # sums from registers to y


class Variant(NamedTuple):
    """A way to launch planned.cu: what plan takes by name, and what of the source is replaced."""

    title: str
    chosen: tuple = ()  # (name, value) pairs
    changes: tuple = ()
    output: str = ""
    promotion: int = 256  # bytes that L2 fetches at a time for TMA

    def fits(self, m, n, k, device):
        """Whether a block finds room for its stages, and as many blocks of a cluster as it has."""
        try:
            p = self.plan(m, n, k, device)
        except ValueError:
            return False
        return p.shared <= shared_memory(device)

    def plan(self, m, n, k, device):
        return plan(m, n, k, multiprocessors(device), shared_memory(device), **dict(self.chosen))

    def prepare(self, x, W, y):
        """A call that writes y."""
        (m, k), n = x.shape, len(W)
        p = self.plan(m, n, k, x.device)
        output = "Partial" if p.splits > 1 else self.output or "ThroughTma"
        function = compiled(p.shape(DTYPES[x.dtype], output), self.changes)
        maps = [
            TensorMap(t, box, 128, l2_promotion=self.promotion)
            for t, box in ((x, p.x_box), (W, p.w_box), (y, (64, 64)))
        ]
        target = y if p.splits == 1 else torch.empty(p.splits, y.numel(), dtype=torch.float32, device=y.device)
        options = {"shared": p.shared} | ({"cluster": (p.together, 1, 1)} if p.together > 1 else {})
        launch = functools.partial(function, p.blocks, p.threads, *maps, target, m, n, k, p.splits, **options)
        if p.splits == 1:
            return launch
        merge = launching.kernel("merge", f"-DDTYPE={DTYPES[x.dtype]}")

        def both():
            launch()
            merge(-(-y.numel() // 1024), 256, target, y, y.numel(), p.splits, pdl=True)

        return both


def changed(changes):
    """The source of planned.cu, in which each of these pieces, found once, is replaced."""
    text = inlined(SOURCE)
    for old, new in changes:
        if text.count(old) != 1:
            raise RuntimeError(f"planned.cu must have {old!r} once: a variant replaces it")
        text = text.replace(old, new)
    return text


@functools.cache
def compiled(shape, changes=()):
    """planned.cu for a Shape, with these changes."""
    return cuda.compile(changed(changes), (f"-DSHAPE={shape}",), name="planned.cu", arch="sm_90a").matmul


def sizes(title, tile, **chosen):
    return Variant(title, (("tile", tile), *chosen.items()))


BIG, WIDE, MIDDLE, LOW, SMALL = (128, 256, 2), (256, 128, 2), (128, 128, 2), (64, 256, 2), (64, 128, 2)
LARGE = [  # for products that fill the card several times over
    *(sizes(f"128×256, cluster {c}, band {g}", BIG, cluster=c, group=g) for c in (1, 2) for g in (4, 8, 16, 32)),
    sizes("128×256, cluster 2, band 2", BIG, cluster=2, group=2),
    sizes("128×256, 3 stages", BIG, stages=3, group=16),
    sizes("128×256, cluster 2, 3 stages", BIG, cluster=2, stages=3, group=8),
    *(sizes(f"256×128, cluster {c}, band {g}", WIDE, cluster=c, group=g) for c in (1, 2) for g in (4, 8)),
    *(sizes(f"128×256, cluster 2 × 2, band {g}", BIG, cluster=(2, 2), group=g) for g in (2, 4, 8)),
    sizes("128×256, cluster 1 × 2", BIG, cluster=(1, 2), group=16),
    sizes("256×128, cluster 2 × 2", WIDE, cluster=(2, 2), group=4),
    sizes("256×128, cluster 1 × 2", WIDE, cluster=(1, 2), group=8),
    *(sizes(f"128×128, cluster {c[0]} × {c[1]}", MIDDLE, cluster=c) for c in ((1, 1), (2, 1), (2, 2))),
    *(
        Variant(f"128×256, cluster {c}, {what}", (("tile", BIG), ("cluster", c), ("group", 16 // c)), **how)
        for c in (1, 2)
        for what, how in {
            "stores from registers": {"output": DIRECT},
            "one arrival a consumer": {"changes": TOGETHER},
            "waits for each step": {"changes": NO_OVERLAP},
            "L2 fetches 128": {"promotion": 128},
            "L2 drops y first": {"changes": STORES_LEAVE_FIRST},
        }.items()
    ),
]
FEW = [  # for few rows of x; tiles are cut along k only where the title says so
    *(
        sizes(f"{t[0]}×{t[1]}, cluster {c[0]} × {c[1]}", t, cluster=c, splits=1)
        for c in ((1, 1), (2, 1), (1, 2), (2, 2))
        for t in (BIG, WIDE, MIDDLE, LOW, SMALL)
    ),
    sizes("128×128, cluster 4 × 1", MIDDLE, cluster=(4, 1), splits=1),
    sizes("128×128, cluster 2 × 2, 2 parts", MIDDLE, cluster=(2, 2), splits=2),
    sizes("64×128, one consumer", (64, 128, 1), splits=1),
    *(sizes(f"{t[0]}×{t[1]}, {s} parts", t, splits=s) for t in (BIG, MIDDLE, SMALL) for s in (2, 4)),
]
MANY = [  # for more rows: those of both that may be the fastest
    *(v for v in LARGE if v.title in ("128×256, cluster 1, band 16", "128×256, cluster 2, band 8")),
    *(v for v in LARGE if v.title in ("128×256, cluster 2 × 2, band 4", "256×128, cluster 2, band 4")),
    *(v for v in FEW if v.title.startswith("128×128, cluster") and "parts" not in v.title),
]
