"""How the rungs are launched: `prepare` gives a launch, which is called with x (m, k), W (n, k) and y (m, n), again and
again with others of the same shapes at the same addresses; y may be elsewhere."""

import functools
import math
from pathlib import Path

import torch

from kernels.matmul.plan import plan
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
STEP, BOX, ALIGNMENT = 64, (64, 64), 16  # numbers of k in a row of a tile; of y, what one store takes; TMA's
TILES = {"specialised": (128, 256), "persistent": (128, 256)}  # of y; of the others:
TILE = (128, 128)
STAGE = 128 * 1024 // 4  # bytes of 128 rows of x and 128 of W
SHARED = {"tile": 0, "specialised": 6 * STAGE, "persistent": 7 * STAGE + 1024}  # bytes, dynamic; of the others:
THREE_STAGES = 3 * STAGE
MOST_MAPS = 64  # of y, that a launch keeps


def prepare(rung, x, W, y, *, processors=None, **chosen):
    """A launch of this rung. chosen: what plan takes by name."""
    processors = processors or multiprocessors(x.device)
    if rung == "planned":
        return Planned(x, W, y, processors, chosen)
    rows, columns = TILES.get(rung, TILE)
    tiles = math.ceil(len(x) / rows) * math.ceil(len(W) / columns)
    launch = functools.partial(
        kernel(rung, f"-DDTYPE={DTYPES[x.dtype]}").unchecked,
        min(tiles, processors) if rung == "persistent" else tiles,
        384 if rung in TILES else 256,
    )
    options = {"shared": SHARED.get(rung, THREE_STAGES)}
    sizes = (*x.shape[:1], len(W), x.shape[1])
    if rung in ("tile", "mma", "ring"):
        return lambda x, W, y, **more: launch(x, W, y, *sizes, **options, **more)
    maps = tensor_map(x, (rows, STEP)), tensor_map(W, (columns, STEP))
    if rung != "persistent":
        return lambda x, W, y, **more: launch(*maps, y, *sizes, **options, **more)
    y_map = MapOf(BOX)
    return lambda x, W, y, **more: launch(*maps, y_map(y), *sizes, **options, **more)


class Planned:
    """A launch of planned.cu, and of merge.cu where tiles are cut along k."""

    def __init__(self, x, W, y, processors, chosen):
        (m, k), n = x.shape, len(W)
        p = self.plan = plan(m, n, k, processors, shared_memory(x.device), **chosen)
        through_tma = n % 8 == 0 and y.data_ptr() % ALIGNMENT == 0
        to = "Partial" if p.splits > 1 else "ThroughTma" if through_tma else "Plain"
        self.kernel = kernel("planned", f"-DSHAPE={p.shape(DTYPES[x.dtype], to)}")
        self.maps = tensor_map(x, p.x_box), tensor_map(W, p.w_box)
        self.y_map = MapOf(BOX) if to == "ThroughTma" else lambda y: self.maps[0]  # any
        self.options = {"shared": p.shared} | ({"cluster": (p.together, 1, 1)} if p.together > 1 else {})
        self.sizes = m, n, k, p.splits
        self.merge = kernel("merge", f"-DDTYPE={DTYPES[x.dtype]}") if p.splits > 1 else None

    def __call__(self, x, W, y, **more):
        p, target = self.plan, y
        if p.splits > 1:
            target = torch.empty((p.splits, y.numel()), dtype=torch.float32, device=y.device)
        arguments = *self.maps, self.y_map(y), target, *self.sizes
        report = self.kernel.unchecked(p.blocks, p.threads, *arguments, **self.options, **more)
        if p.splits > 1:
            self.merge.unchecked(math.ceil(y.numel() / 1024), 256, target, y, y.numel(), p.splits, pdl=True)
        return report


class MapOf:
    """Tensor maps of y, which may be another tensor at each call. On a card those made are kept, by address."""

    def __init__(self, box):
        self.box, self.made = box, {}

    def __call__(self, y):
        found = self.made.get(y.data_ptr()) if y.is_cuda else None
        if found is None:
            found = tensor_map(y.view(-1, y.shape[-1]), self.box)
            if y.is_cuda:
                if len(self.made) >= MOST_MAPS:
                    self.made.clear()
                self.made[y.data_ptr()] = found
        return found


def tensor_map(matrix, box):
    """Boxes of rows of 128 bytes, whose words are exchanged. On a card it is an address, and keeps no memory."""
    found = TensorMap(matrix, box, 128)
    if matrix.is_cuda:
        found.tensor = None
    return found


@functools.cache
def kernel(rung, option):
    """The kernel of a rung, or merge."""
    hopper = rung in ("wgmma", "specialised", "persistent", "planned")
    module = cuda.load(HERE / f"{rung}.cu", (option,), arch="sm_90a" if hopper else None)
    return module["merge" if rung == "merge" else "matmul"]
