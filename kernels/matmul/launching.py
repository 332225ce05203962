"""How the rungs are launched."""

import functools
import math
from pathlib import Path

import torch

from kernels.matmul.plan import plan
from lab import cuda
from lab.card import multiprocessors, shared_memory
from lab.prepared import scratch
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES

HERE = Path(__file__).resolve().parent
STEP, BOX, ALIGNMENT = 64, (64, 64), 16  # numbers of k in a row of a tile; of y, what one store takes; TMA's
TILES = {"specialised": (128, 256), "persistent": (128, 256)}  # of y; of the others:
TILE = (128, 128)
STAGE = 128 * 1024 // 4  # bytes of 128 rows of x and 128 of W
SHARED = {"tile": 0, "specialised": 6 * STAGE, "persistent": 7 * STAGE + 1024}  # bytes, dynamic; of the others:
THREE_STAGES = 3 * STAGE


def launch(rung, x, W, y, *, processors=None, check_races=False, order="forward", places=None, **chosen):
    """Launch this rung for x (m, k), W (n, k) and y (..., n). chosen: what plan takes by name; the rest as lab.cuda."""
    more = {"check_races": check_races, "order": order, "places": places} if x.device.type == "cpu" else {}
    processors = processors or multiprocessors(x.device)
    if rung == "planned":
        return _planned(x, W, y, plan(len(x), len(W), x.shape[1], processors, shared_memory(x.device), **chosen), more)
    rows, columns = TILES.get(rung, TILE)
    tiles = math.ceil(len(x) / rows) * math.ceil(len(W) / columns)
    grid, threads = min(tiles, processors) if rung == "persistent" else tiles, 384 if rung in TILES else 256
    sizes, shared = (len(x), len(W), x.shape[1]), SHARED.get(rung, THREE_STAGES)
    if rung not in ("tile", "mma", "ring"):
        x, W = tensor_map(x, (rows, STEP)), tensor_map(W, (columns, STEP))
    run = kernel(rung, f"-DDTYPE={DTYPES[y.dtype]}").unchecked
    return run(grid, threads, x, W, through_tma(y) if rung == "persistent" else y, *sizes, shared=shared, **more)


def _planned(x, W, y, p, more):
    """planned.cu by this plan, and merge.cu where tiles are cut along k."""
    (m, k), n, dtype = x.shape, len(W), DTYPES[y.dtype]
    stored = n % 8 == 0 and y.data_ptr() % ALIGNMENT == 0  # as TMA can
    to = "Partial" if p.splits > 1 else "ThroughTma" if stored else "Plain"
    x, W = tensor_map(x, p.x_box), tensor_map(W, p.w_box)
    y_map = through_tma(y) if to == "ThroughTma" else x  # any
    target = scratch(y, p.splits * y.numel(), torch.float32) if p.splits > 1 else y
    cluster = {"cluster": (p.together, 1, 1)} if p.together > 1 else {}
    run = kernel("planned", f"-DSHAPE={p.shape(dtype, to)}").unchecked
    arguments = x, W, y_map, target, m, n, k, p.splits
    report = run(p.blocks, p.threads, *arguments, shared=p.shared, **cluster, **more)
    if p.splits > 1:
        merge = kernel("merge", f"-DDTYPE={dtype}").unchecked
        merge(math.ceil(y.numel() / 1024), 256, target, y, y.numel(), p.splits, pdl=True)
    return report


def through_tma(y):
    """Where TMA stores y."""
    return tensor_map(y.view(-1, y.shape[-1]), BOX)


def tensor_map(matrix, box):
    """Boxes of rows of 128 bytes, whose words are exchanged."""
    return TensorMap(matrix, box, 128)


@functools.cache
def kernel(rung, option):
    """The kernel of a rung, or merge."""
    hopper = rung in ("wgmma", "specialised", "persistent", "planned")
    module = cuda.load(HERE / f"{rung}.cu", (option,), arch="sm_90a" if hopper else None)
    return module["merge" if rung == "merge" else "matmul"]
