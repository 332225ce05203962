"""Matrix product on tensor cores: a linear layer on many tokens at a time, as in prefill and training.

    y = x W^T        x (..., k), W (n, k) row-major, as torch.nn.functional.linear takes them   ->   y (..., n)

x, W and y have one dtype, float16 or bfloat16; sums are float32, rounded once at the end. With m rows of x one call is
2·m·n·k flops, and moves at least 2·(m·k + n·k + m·n) bytes: from some 150 to 300 rows on, by the
card, arithmetic is the limit.

    linear(x, W, *, out=None)      the best, for any card and any size
    rung(x, W, *, out=None)        tile, mma, ring, tma, wgmma, specialised, persistent, planned: the ladder

    x, W   contiguous, on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine
    out    a tensor like y to write into; must not overlap x or W

Any size is legal, below 2**31 - 256 each way; 0 too: without columns of x all sums are 0. TypeError or ValueError names
the argument, what was expected and what came, before anything is written. NaN and infinity pass through; a sum beyond
65504 is infinite in float16. `linear` has gradients, by torch's own products; the other rungs do not track them.

All rungs but `tile` copy words of 16 bytes: they take k a multiple of 8, and addresses that are multiples of 16.
`linear` makes padded copies of x and W where that is not so, on every call, and says so once, in a warning.

`counters` runs a rung on the SIMT machine and returns its report; `which` says what linear would run, and why; `plan`
how `planned` is launched.
"""

import warnings

from kernels.matmul.arguments import expect_card, expect_layout, expect_linear, padded, why_padded, why_slower
from kernels.matmul.launching import HERE, launch
from kernels.matmul.plan import plan
from lab import Rung
from lab.operators import operator
from lab.prepared import Calls

__all__ = ["HERE", "RUNGS", "counters", "linear", "plan", "which", "work"]


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
    """Rung 7: blocks that stay, and stores by TMA."""
    return _run("persistent", x, W, out)


def planned(x, W, *, out=None):
    """Rung 8: sizes for each shape of matrices, clusters, tiles cut along k."""
    return _run("planned", x, W, out)


def _backward(context, gradient):
    """Gradients of linear, by torch's own products."""
    x, W = context.saved_tensors
    x_needs, W_needs = context.needs_input_grad[:2]
    rows = x[None] if x.ndim == 1 else x.flatten(0, -2)  # sizes of 0 are legal, and leave reshape(-1, ...) no answer
    of_rows = gradient[None] if x.ndim == 1 else gradient.flatten(0, -2)
    of_W = of_rows.T @ rows if W_needs else None
    return gradient @ W if x_needs else None, of_W


@operator(
    "matmul_linear",
    "Tensor x, Tensor W",
    fake=lambda x, W: expect_linear("linear", x, W, None)[2],
    backward=_backward,
    tracked=("x", "W"),
)
def linear(x, W, *, out=None):
    """y = x W^T by the best rung for these tensors and this card: `which` says which.

    x (..., k), W (n, k), y (..., n): 2·m·n·k flops and at least 2·(m·k + n·k + m·n) bytes, m rows of x. `planned` on
    a card of compute capability 9.0 (H100, H200, GH200) and on the SIMT machine; `mma` on other cards from 8.0 on, and
    `tile` on those of 7.5, which have too little shared memory for it.
    Where k is no multiple of 8, or x or W is not at a multiple of 16 bytes, padded copies are made first.
    """
    return _run("linear", x, W, out)


LAUNCHING = "kernels/matmul/launching.py"
BEST = ("kernels/matmul/planned.cu", "kernels/matmul/merge.cu", "kernels/matmul/plan.py", LAUNCHING)
RUNGS = [
    Rung("tile", "a tile in shared memory", tile, ("kernels/matmul/tile.cu",)),
    Rung("mma", "tensor cores, cp.async, ldmatrix", mma, ("kernels/matmul/mma.cu", LAUNCHING)),
    Rung("ring", "a ring of mbarriers", ring, ("kernels/matmul/ring.cu", LAUNCHING)),
    Rung("tma", "copies by TMA", tma, ("kernels/matmul/tma.cu", LAUNCHING)),
    Rung("wgmma", "wgmma", wgmma, ("kernels/matmul/wgmma.cu", LAUNCHING)),
    Rung("specialised", "specialised warps", specialised, ("kernels/matmul/specialised.cu", LAUNCHING)),
    Rung("persistent", "persistent blocks", persistent, ("kernels/matmul/persistent.cu", LAUNCHING)),
    Rung("planned", "sizes by a plan", planned, BEST),
]


def work(m, n, k):
    """(bytes, flops) that one call with m rows of x must move and do."""
    return 2 * (m * k + n * k + m * n), 2 * m * n * k


def which(x, W, *, out=None):
    """(rung, why) of what `linear` runs with these tensors; why is "" for `planned` as it stands. Runs nothing."""
    rows, W, _ = expect_linear("which", x, W, out)
    expect_card("linear", rows.device)
    return _choose(rows, W)


def counters(rung, x, W, *, out=None, check_races=False, order="forward", places=None, **chosen):
    """Run a rung, by its name, on the SIMT machine, whatever the device. Returns the machine's report (simt.report).

    CUDA tensors are copied to the CPU first; out, if given, is a CPU tensor. check_races, order, places: as for the
    machine. chosen: processors, the multiprocessors of the card, for `persistent` and `planned`; and for `planned` what
    `plan` takes by name. Arguments and errors as for the rungs; ValueError for an empty matrix, which launches nothing.
    Where tiles are cut along k, the report is of the products.
    """
    names = [known.name for known in RUNGS]
    if rung not in names:
        raise ValueError(f"counters: rung must be one of {', '.join(names)}, got {rung!r}")
    known = {"planned": True, "persistent": set(chosen) <= {"processors"}}.get(rung, not chosen)
    if not known:
        raise ValueError(f"counters: {', '.join(chosen)} must not be given for rung {rung}")
    rows, W, y = expect_linear(rung, x.detach().cpu(), W.detach().cpu(), out)
    if 0 in (*rows.shape, len(W)):
        raise ValueError(f"counters: x and W must not be empty, got {tuple(x.shape)} and {tuple(W.shape)}")
    expect_layout(rung, rows, W, y)
    return launch(rung, rows, W, y, check_races=check_races, order=order, places=places, **chosen)


CALLS = Calls("matmul")


def _run(rung, x, W, out):
    if (y := CALLS.run((rung,), out, x, W)) is not None:
        return y
    rows, matrix, y = expect_linear(rung, x, W, out)
    if y.numel() == 0:
        return y
    if rows.shape[1] == 0:
        return y.zero_()  # the sum of nothing
    expect_card(rung, rows.device)
    name, why = _choose(rows, matrix) if rung == "linear" else (rung, "")
    if why:
        _warn(why)
    if rung == "linear" and name != "tile" and why_padded(rows, matrix):
        launch(name, padded(rows), padded(matrix), y)  # and again so on each call: copies are no launches of ours
        return y
    expect_layout(name, rows, matrix, y)
    with CALLS.preparing((rung,), (out,), (y,), (x, W)):
        launch(name, rows, matrix, y)
    return y


def _choose(x, W):
    """(rung, why it is not planned as it stands) for linear."""
    (rung, slower), copies = why_slower(x.device), why_padded(x, W)
    copies = f"{copies}: padded copies are made on each call" if copies and rung != "tile" else ""
    return rung, "; ".join(filter(None, (slower, copies)))


_said = set()


def _warn(why):
    """Once for each reason."""
    if why not in _said:
        _said.add(why)
        warnings.warn(f"linear: {why}", stacklevel=4)
