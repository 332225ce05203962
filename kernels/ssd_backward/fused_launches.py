"""The four launches of fused: how a call is cut, the compiled sources, and what each launch is given."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.ssd_backward.arguments import Gradients
from lab import cuda
from lab.card import multiprocessors
from lab.prepared import scratch
from lab.tensor_map import TensorMap

HERE = Path(__file__).resolve().parent
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
CHUNK, WIDTH = 64, 64  # tokens; columns of x in a row of heads
WALK_TILES = 1  # of 64 columns of a state, in a block of `states`
TILE = 64 * 128  # bytes
TURNED, ADDED = 32, 512  # of a block of `finish`: heads, and numbers of dB and of dC


class Plan(NamedTuple):
    """How a call is cut: rows of heads, 64 columns each, in runs, each of which a block of `chunks` walks."""

    chunks: int  # even: two have a state in memory
    run_rows: int  # at most: the last run of a group may have fewer
    runs: int  # of a group


def plan(batch, seqlen, rows, groups, processors, run_rows=None):
    """The Plan of a call. Runs are as long as they can be while all multiprocessors have about equal work: each run
    writes sums of dB and dC of its own."""
    chunks, group_rows = 2 * -(-seqlen // (2 * CHUNK)), rows // groups

    def cost(length):  # of the block that works longest, in rows; a run takes about two more for what it does once
        blocks = batch * chunks * groups * -(-group_rows // length)
        return -(-blocks // processors) * (length + 2)

    if run_rows is None:
        run_rows = min(range(group_rows, 0, -1), key=cost)
    return Plan(chunks, run_rows, -(-group_rows // run_rows))


def padded(dstate):
    """Columns of a state in the kernels."""
    return -(-dstate // 64) * 64


class Tensors(NamedTuple):
    """Of a call; None where there is none. dt_bias, D, and states are float32."""

    dy: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    dfinal_states: torch.Tensor | None
    D: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None
    seq_idx: torch.Tensor | None


class Launch(NamedTuple):
    """A kernel, and all that it is given."""

    name: str
    kernel: object
    grid: tuple
    threads: int
    arguments: tuple
    shared: int = 0

    def __call__(self, **options):
        return self.kernel.unchecked(self.grid, self.threads, *self.arguments, shared=self.shared, **options)


def empty_gradients(t):
    """New Gradients of such Tensors; None where there is none, and for z."""

    def like(tensor):
        return None if tensor is None else tensor.new_empty(tensor.shape)

    return Gradients(*map(like, (t.x, t.dt, t.A, t.B, t.C, t.D, None, t.dt_bias, t.initial_states)))


def launches(problem, t, gradients, softplus, limit, **chosen):
    """A list of each Launch. t: Tensors; gradients: what they write; chosen: what `plan` takes by name."""
    batch, seqlen, heads, headdim, groups, dstate = problem[:6]
    parts, state = -(-headdim // WIDTH), padded(dstate)
    rows = heads * parts
    p = plan(batch, seqlen, rows, groups, multiprocessors(t.x.device), **chosen)
    modules = compiled(TYPES[t.x.dtype], state, TYPES[t.dt.dtype], t.seq_idx is not None)
    rule = int(bool(softplus)), *map(float, limit)

    def new(*shape, dtype=torch.float32):
        return scratch(t.x, math.prod(shape), dtype).view(shape)

    lines, slopes = (
        new(batch, heads, p.chunks, 2 if t.seq_idx is None else 3, CHUNK),
        new(batch, heads, p.chunks, CHUNK),
    )
    h, dh = (new(batch * p.chunks // 2, rows, WIDTH, state, dtype=t.x.dtype) for _ in range(2))
    b_sums, c_sums = (new(p.runs, batch, seqlen, groups, dstate) for _ in range(2))
    # Where a row is a head, its gradients take the place of its slopes: who writes a number has read the one there.
    dt_lines = slopes if parts == 1 else new(batch, rows, p.chunks, CHUNK)
    head_sums = new(batch, rows, p.chunks, 4)

    line, strides, g = _line(t.dt), t.dt.stride(), gradients
    x, b, dy, c, dx = (_tiles(tensor) for tensor in (t.x, t.B, t.dy, t.C, g.x))
    sizes = seqlen, p.chunks, heads, groups, headdim, dstate, parts
    decays = line, t.A, t.dt_bias, t.seq_idx, lines, slopes, seqlen, heads, *strides, *rule
    states = x, b, dy, c, _states(h, 16), _states(dh, 16), lines
    states += t.initial_states, t.dfinal_states, g.initial_states, *sizes
    chunks = x, dy, b, c, _states(h, 64), _states(dh, 64), dx, lines, t.A, t.D
    chunks += slopes, b_sums, c_sums, dt_lines, head_sums, *sizes, p.run_rows, batch
    finish = dt_lines, head_sums, b_sums, c_sums, g.dt, g.A, g.D, g.dt_bias, g.B, g.C
    finish += seqlen, heads, parts, p.chunks, batch, p.runs, g.B.numel()
    spans, walks = -(-heads // TURNED), -(-state // (64 * WALK_TILES))
    finishers = -(-g.B.numel() // ADDED) + heads + batch * p.chunks * spans
    return [
        Launch("decays", modules.decays.decays, (p.chunks, spans, batch), 256, decays),
        Launch("states", modules.states.states, (rows * walks, batch, 2), 160, states, modules.states_shared),
        Launch("chunks", modules.chunks.chunks, (p.chunks, groups * p.runs, batch), 384, chunks, modules.chunks_shared),
        Launch("finish", modules.finish.finish, (finishers, 1, 1), 256, finish),
    ]


class Modules(NamedTuple):
    """The compiled sources, and bytes of shared memory."""

    decays: object
    states: object
    chunks: object
    finish: object
    states_shared: int
    chunks_shared: int


@functools.cache
def compiled(dtype, state, dt, sequences):
    """For a type of x, a padded dstate, a type of dt, and whether there are several sequences in a row."""
    tiles, line = state // 64, 4 * CHUNK * (3 if sequences else 2)
    walked = min(tiles, WALK_TILES)
    states_shared = 3 * (1 + walked) * TILE + 2 * walked * TILE + 3 * line + 64
    sums = 4 * (4 * CHUNK + 5 * CHUNK + 8)
    chunks_shared = (3 * tiles + 2 * 2 * tiles + 3 * 3 + 1 + 2) * TILE + 6 * line + 2 * sums + 8 * 20 + 64
    shape = f"-DSHAPE=Shape<{dtype}, {state}, {str(sequences).lower()}>"

    def load(name, *options):
        return cuda.load(HERE / f"{name}.cu", options, arch="sm_90a")

    return Modules(
        load("decays", shape, f"-DDT={dt}"),
        load("states", shape, f"-DWALK_TILES={walked}", f"-DSHARED_BYTES={states_shared}"),
        load("chunks", shape, f"-DSHARED_BYTES={chunks_shared}"),
        load("finish", shape, f"-DDT={dt}"),
        states_shared,
        chunks_shared,
    )


def _tiles(t):
    """A (batch, seqlen, n, columns) tensor in boxes of 64 tokens and 64 columns."""
    (batch, seqlen, n, columns), (b, s, h, _) = t.shape, t.stride()
    return TensorMap(
        t.as_strided((1, batch, n, seqlen, columns), (b, b, h, s, 1)), (1, 1, 1, 64, 64), 128, l2_promotion=128
    )


def _states(t, rows):
    """States (chunks, heads, 64, columns) in boxes of so many rows and 64 columns."""
    return TensorMap(t[None], (1, 1, 1, rows, 64), 128, l2_promotion=128)


def _line(dt):
    """All of dt's memory from its first to its last element, as one contiguous axis."""
    if dt.is_contiguous():
        return dt
    return dt.as_strided((1 + sum((n - 1) * stride for n, stride in zip(dt.shape, dt.stride())),), (1,))
