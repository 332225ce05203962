"""Matrix product on tensor cores: a linear layer on many tokens at a time, as in prefill and training.

    y = x W^T        x (..., k), W (n, k) row-major, as torch.nn.functional.linear takes them   ->   y (..., n)

x, W and y have one dtype, float16 or bfloat16; sums are float32, rounded once at the end. With m rows of x one call does
2·m·n·k flops, and moves at least 2·(m·k + n·k + m·n) bytes: from about m = 300 rows on, arithmetic is the limit.

    linear(x, W, *, out=None)      the best, for any card and any size
    rung(x, W, *, out=None)        tile, mma, ring, tma, wgmma, specialised, persistent: the ladder, same signature

    x, W   contiguous, on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine
    out    a tensor like y to write into; must not overlap x or W

Any size is legal, below 2**31 - 256 each way; 0 too: without columns of x all sums are 0. TypeError or ValueError names
the argument, what was expected and what came, before anything is written. NaN and infinity pass through; a sum beyond
65504 is infinite in float16. Gradients are not tracked.

All rungs but `tile` copy words of 16 bytes: they take k a multiple of 8, and addresses of 16 bytes. `linear` makes
padded copies of x and W where that is not so, on every call, and says so once, in a warning.

`counters` runs a rung on the SIMT machine and returns its report; `which` says what linear would run, and why; `plan`
how `persistent` is launched.
"""

import functools
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.matmul.plan import Plan, plan
from lab import Rung, cuda
from lab.card import multiprocessors, shared_memory
from lab.tensor_map import TensorMap
from lab.tensors import DTYPES, expect, expect_first, output

HERE = Path(__file__).resolve().parent
TYPES = torch.float16, torch.bfloat16
LIMIT = 2**31 - 256  # of m, n and k
STEP, BOX = 64, (64, 64)  # numbers of k in a row of a tile; of y, what one store takes
NEEDS = {"tile": (8, 0), "mma": (8, 0), "ring": (9, 0), "tma": (9, 0)}  # compute capability, or newer; the others 9.0
WORDS = "rows are copied in words of 16 bytes; tile and linear take any"
TILES = {"tile": (128, 128), "mma": (128, 128), "ring": (128, 128), "tma": (128, 128), "wgmma": (128, 128),
         "specialised": (128, 256)}  # fmt: skip
SHARED = {"tile": 0, "specialised": 4 * (128 + 256) * 128}  # bytes of dynamic shared memory; the others:
THREE_STAGES = 3 * (128 + 128) * 128


def tile(x, W, *, out=None):
    """Rung 1: multiply-adds, from a tile in shared memory."""
    return _run("tile", x, W, out)


def mma(x, W, *, out=None):
    """Rung 2: tensor cores, a warp at a time; cp.async, ldmatrix, exchanged words."""
    return _run("mma", x, W, out)


def ring(x, W, *, out=None):
    """Rung 3: a ring of stages with mbarriers."""
    return _run("ring", x, W, out)


def tma(x, W, *, out=None):
    """Rung 4: one thread asks for whole tiles."""
    return _run("tma", x, W, out)


def wgmma(x, W, *, out=None):
    """Rung 5: a warpgroup multiplies what lies in shared memory."""
    return _run("wgmma", x, W, out)


def specialised(x, W, *, out=None):
    """Rung 6: warps that copy, warps that multiply, and registers where they are needed."""
    return _run("specialised", x, W, out)


def persistent(x, W, *, out=None):
    """Rung 7: blocks that stay, stores by TMA, a shape of tiles for each shape of matrices."""
    return _run("persistent", x, W, out)


def linear(x, W, *, out=None):
    """y = x W^T by the best rung for these tensors and this card: `which` says which.

    x (..., k), W (n, k), y (..., n): 2·m·n·k flops and at least 2·(m·k + n·k + m·n) bytes, m rows of x. `persistent` on
    a card of compute capability 9.0 (H100, H200, GH200) and on the SIMT machine; `mma` on other cards from 8.0 on. Where
    k is no multiple of 8, or x or W is not at an address of 16 bytes, padded copies are made first.
    """
    return _run("linear", x, W, out)


def _sources(name, *more):
    return f"kernels/matmul/{name}.cu", "kernels/matmul/tiles.cuh", *(f"kernels/matmul/{file}" for file in more)


BEST = _sources("persistent", "shape.cuh", "merge.cu", "plan.py")
RUNGS = [
    Rung("tile", "a tile in shared memory", tile, ("kernels/matmul/tile.cu",)),
    Rung("mma", "tensor cores, cp.async, ldmatrix", mma, _sources("mma", "warp_product.cuh")),
    Rung("ring", "a ring of mbarriers", ring, _sources("ring", "warp_product.cuh")),
    Rung("tma", "copies by TMA", tma, _sources("tma", "warp_product.cuh")),
    Rung("wgmma", "wgmma", wgmma, _sources("wgmma")),
    Rung("specialised", "specialised warps", specialised, _sources("specialised")),
    Rung("persistent", "persistent blocks", persistent, BEST),
]


def work(m, n, k):
    """(bytes, flops) that one call with m rows of x must move and do."""
    return 2 * (m * k + n * k + m * n), 2 * m * n * k


def which(x, W, *, out=None):
    """(rung, why) of what `linear` runs with these tensors; why is "" for `persistent` as it stands. Runs nothing."""
    x2, W, y = _expect_all("which", x, W, out)
    return _choose(x2, W)


def counters(rung, x, W, *, out=None, check_races=False, order="forward", places=None, **chosen):
    """Run a rung, by its name, on the SIMT machine, whatever the device. Returns the machine's report (simt.report).

    CUDA tensors are copied to the CPU first. check_races, order, places: as for the machine. chosen, of `persistent`:
    what `plan` takes by name, and processors, the multiprocessors of the card. Arguments and errors as for the rungs;
    ValueError for an empty matrix, which launches nothing. Where tiles are cut along k, the report is of the products.
    """
    names = [known.name for known in RUNGS]
    if rung not in names:
        raise ValueError(f"counters: rung must be one of {', '.join(names)}, got {rung!r}")
    x2, W, y = _expect_all(rung, x.detach().cpu(), W.detach().cpu(), None if out is None else out)
    if 0 in (*x2.shape, len(W)):
        raise ValueError(f"counters: x and W must not be empty, got {tuple(x2.shape)} and {tuple(W.shape)}")
    _expect_words(rung, x2, W)
    if chosen and rung != "persistent":
        raise ValueError(f"counters: {', '.join(chosen)} is for persistent, got rung {rung!r}")
    return _prepare(rung, x2, W, y, **chosen).launch(x2, W, y, check_races=check_races, order=order, places=places)


def _run(rung, x, W, out):
    key = _key(rung, x, W, out)
    ready = _ready.get(key) if key is not None else None
    if ready is not None:
        y = x.new_empty(ready.shape) if out is None else out
        ready.launch(x, W, y)
        return y
    x2, W, y = _expect_all(rung, x, W, out)
    shape = *x.shape[:-1], len(W)
    if y.numel() == 0:
        return y.view(shape)
    if x2.shape[1] == 0:
        return y.zero_().view(shape)  # the sum of nothing
    name = rung
    if rung == "linear":
        name, why = _choose(x2, W)
        if why:
            _warn(why)
    else:
        _expect_card(rung, x2.device)
        _expect_words(rung, x2, W)
    if rung == "linear" and name != "tile" and _words(x2, W):
        x2, W, key = _padded(x2), _padded(W), None
    ready = _prepare(name, x2, W, y)
    if key is not None:
        if len(_ready) >= MOST_READY:
            _ready.clear()
        _ready[key] = ready._replace(shape=shape)
    ready.launch(x2, W, y)
    return out if out is not None else y.view(shape)


# Calls that agree in all that is looked at, addresses too, are looked at once. Only on a card: there a tensor map is an
# address and sizes, and need not keep the memory; and an address tells the card.
_ready = {}
MOST_READY = 4096


def _key(rung, x, W, out):
    """What decides how tensors on a card are launched; None for all else, which is looked at anew."""
    try:
        if not x.is_cuda or x.layout is not torch.strided or W.layout is not torch.strided:
            return None
        where = None
        if out is not None:
            if out.requires_grad or out.layout is not torch.strided:
                return None
            where = out.data_ptr(), out.shape, out.stride(), out.dtype
        return rung, x.data_ptr(), x.shape, x.stride(), x.dtype, W.data_ptr(), W.shape, W.stride(), W.dtype, where
    except (AttributeError, RuntimeError, TypeError):
        return None  # no plain tensors: _expect_all says what is wrong


class Ready(NamedTuple):
    """A launch but for y's address: what is checked and prepared once."""

    kernel: object
    grid: int
    block: int
    shared: int
    inputs: tuple  # tensor maps of x and W; () for rungs that take addresses
    sizes: tuple
    plan: Plan  # of persistent, else None
    y_maps: dict  # address of y -> its tensor map
    merge: object  # kernel, for parts
    shape: tuple  # of y as returned

    def launch(self, x, W, y, **options):
        if self.plan is None:
            return self.kernel.unchecked(self.grid, self.block, *(self.inputs or (x, W)), y, *self.sizes,
                                         shared=self.shared, **options)  # fmt: skip
        target, y_map = y, self.inputs[0]
        if self.merge is not None:
            target = y.new_empty((self.plan.splits, y.numel()), dtype=torch.float32)
        elif self.y_maps is not None:
            y_map = self.y_maps.get(y.data_ptr())
            if y_map is None:
                if len(self.y_maps) > 64:
                    self.y_maps.clear()
                y_map = self.y_maps[y.data_ptr()] = _map(y.view(-1, y.shape[-1]), BOX)
            if y.device.type == "cpu":
                self.y_maps.clear()  # it holds the tensor
        if self.plan.cluster > 1:
            options["cluster"] = (self.plan.cluster, 1, 1)
        report = self.kernel.unchecked(self.grid, self.block, *self.inputs, y_map, target, *self.sizes,
                                       shared=self.shared, **options)  # fmt: skip
        if self.merge is not None:
            self.merge.unchecked(-(-y.numel() // 1024), 256, target, y, y.numel(), self.plan.splits, pdl=True)
        return report


def _prepare(rung, x, W, y, *, processors=None, **chosen):
    """A launch of this rung. x (m, k), W (n, k)."""
    (m, k), n = x.shape, len(W)
    if rung == "persistent":
        p = plan(m, n, k, processors or multiprocessors(x.device), shared_memory(x.device), **chosen)
        through_tma = n % 8 == 0 and y.data_ptr() % 16 == 0
        to = "Partial" if p.splits > 1 else "ThroughTma" if through_tma else "Plain"
        kernel = _kernel("persistent", f"-DSHAPE={p.shape(DTYPES[x.dtype], to)}")
        maps = _map(x, (p.rows, STEP)), _map(W, (p.columns // p.cluster, STEP))
        merge = _kernel("merge", f"-DDTYPE={DTYPES[x.dtype]}") if p.splits > 1 else None
        sizes = m, n, k, p.splits
        y_maps = {} if to == "ThroughTma" else None
        return Ready(kernel, p.blocks, p.threads, p.shared, maps, sizes, p, y_maps, merge, None)
    rows, columns = TILES[rung]
    maps = ()
    if rung in ("tma", "wgmma", "specialised"):
        maps = _map(x, (rows, STEP)), _map(W, (columns, STEP))
    grid = math.ceil(m / rows) * math.ceil(n / columns)
    block, shared = 384 if rung == "specialised" else 256, SHARED.get(rung, THREE_STAGES)
    kernel = _kernel(rung, f"-DDTYPE={DTYPES[x.dtype]}")
    return Ready(kernel, grid, block, shared, maps, (m, n, k), None, None, None, None)


@functools.cache
def _kernel(rung, option):
    module = cuda.load(HERE / f"{rung}.cu", (option,), arch="sm_90a" if rung not in NEEDS and rung != "merge" else None)
    return module["merge" if rung == "merge" else "matmul"]


def _map(tensor, box):
    found = TensorMap(tensor, box, 128)
    if tensor.is_cuda:
        found.tensor = None
    return found


def _padded(tensor):
    """A copy with rows of whole words, zeros at their ends."""
    rows, k = tensor.shape
    copy = tensor.new_empty((rows, -(-k // 8) * 8))
    copy[:, :k] = tensor
    copy[:, k:] = 0
    return copy


def _words(x, W):
    """Why rows cannot be copied in words of 16 bytes, or ""."""
    if x.shape[1] % 8:
        return f"k is {x.shape[1]}, not a multiple of 8"
    for name, tensor in (("x", x), ("W", W)):
        if tensor.data_ptr() % 16:
            return f"{name} is not at an address of 16 bytes"
    return ""


def _choose(x, W):
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    rung, reasons = "persistent", []
    if capability != (9, 0):
        rung = "mma"
        wanted = "wgmma needs compute capability 9.0"
        reasons.append(f"{wanted}, this card has {capability[0]}.{capability[1]}: the rung mma runs instead")
    if why := _words(x, W):
        reasons.append(f"{why}: padded copies of x and W are made on each call")
    return rung, "; ".join(reasons)


_said = set()


def _warn(why):
    if why not in _said:
        _said.add(why)
        warnings.warn(f"linear: {why}", stacklevel=4)


def _expect_card(rung, device):
    """Raise where the card lacks a rung's instructions."""
    if device.type != "cuda":
        return
    have, need = torch.cuda.get_device_capability(device), NEEDS.get(rung, (9, 0))
    if have < need or (rung not in NEEDS and have != need):
        newer = " or newer" if rung in NEEDS else ""
        raise RuntimeError(
            f"{rung}: needs a card of compute capability {need[0]}.{need[1]}{newer}, this one has {have[0]}.{have[1]}; "
            f"linear runs mma there"
        )


def _expect_words(rung, x, W):
    if rung == "tile":
        return
    if x.shape[1] % 8:
        raise ValueError(f"{rung}: x and W must have a multiple of 8 columns, got {x.shape[1]}: {WORDS}")
    for name, tensor in (("x", x), ("W", W)):
        if tensor.data_ptr() % 16:
            got = f"{tensor.data_ptr():#x}"
            raise ValueError(f"{rung}: {name} must be at an address that is a multiple of 16 bytes, got {got}: {WORDS}")


def _expect_all(rung, x, W, out):
    """Raise unless a rung can be called so. Returns x as (m, k), W, and the tensor to write to."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{rung}: x must be a torch tensor, got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{rung}: x must have shape (..., k), got a tensor without axes")
    free = tuple(f"m{axis}" for axis in range(x.ndim - 1))
    expect_first(rung, "x", x, (*free, "k"), TYPES, empty=True)
    expect(rung, "W", W, x, ("n", x.shape[-1]), empty=True)
    k, n = x.shape[-1], len(W)
    m = math.prod(x.shape[:-1])
    for name, size in (("x", m), ("x", k), ("W", n)):
        if size >= LIMIT:
            raise ValueError(f"{rung}: {name} must have less than 2**31 - 256 rows and columns, got {size}")
    y = output(rung, out, x, (*x.shape[:-1], n), empty=True, x=x, W=W)
    return x.view(m, k), W, y
