"""fused, the best rung of the backward pass: four launches in CUDA C++ for Hopper, where card and tensors allow it.

    launch    what                                                     moves, at 8,192 tokens of mamba2-2.7b
    decays    dt into steps and decays, turned to lines of a head         7 MB
    states    states before each pair of chunks, and gradients behind   336 MB: x and dy, and both states in 16 bits
    chunks    dx, ddt, dB and dC of each chunk, from both states        420 MB: x, dy, dx and both states
    finish    sums over runs of heads and over tokens, and ddt turned    25 MB

About 190 µs at the roof of an H200. States in 16 bits are what the products take; the walk itself adds in float32.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from kernels import ssd
from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.five import sequence_numbers
from kernels.ssd_backward import gate
from kernels.ssd_backward.arguments import Gradients, expect_backward
from lab import cuda
from lab.card import multiprocessors
from lab.tensor_map import TensorMap

HERE = Path(__file__).resolve().parent
SOURCES = tuple(
    f"kernels/ssd_backward/{name}" for name in ("decays.cu", "states.cu", "chunks.cu", "finish.cu", "fused.py")
)
TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}
CHUNK, WIDTH = 64, 64
TILE = 64 * 128  # bytes
MOST_DSTATE = 128
FINISHERS = 64  # blocks that add up dB and dC


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


def takes(problem, dy, x, dt, A, B, C, *, D=None, dfinal_states=None, initial_states=None, **others):
    """Why fused cannot do this, in words; or "". problem: of expect_backward."""
    tensors = ("x", x), ("B", B), ("C", C), ("dy", dy)
    if x.dtype is torch.float32:
        return "x is float32"
    if x.is_cuda and (capability := torch.cuda.get_device_capability(x.device)) != (9, 0):
        return f"compute capability 9.0 is needed, this card has {capability}"
    if D is not None and D.ndim == 2:
        return "D has a number for each column"
    if problem.headdim % 8:
        return f"headdim is {problem.headdim}, no multiple of 8"
    if problem.dstate % 8 or problem.dstate > MOST_DSTATE:
        return f"dstate is {problem.dstate}, no multiple of 8 up to {MOST_DSTATE}"
    for name, state in (("initial_states", initial_states), ("dfinal_states", dfinal_states)):
        if state is not None and state.dtype is torch.float32 and state.data_ptr() % 8:
            return f"{name} is not at an address of two elements"
    name = next((name for name, t in tensors if not _fits_tma(t)), None)
    return f"{name} is not at addresses and strides of 16 bytes" if name else ""


def _fits_tma(t):
    apart = (stride for n, stride in zip(t.shape[:-1], t.stride()) if n > 1)
    return t.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in apart)


def fused(
    dy, x, dt, A, B, C, *, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None,
    seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT, **chosen,
):  # fmt: skip
    """Gradients of kernels.ssd's layer, each like its argument; None for what was not given. Four launches.

    dy              (batch, L, H, P), like x: the gradient of y
    dfinal_states   (batch, H, P, N), float32 or like x: that of the final states; None for 0
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit    as the forward had
                    them: kernels.ssd.five says what each is. dt beyond a limit has a gradient of 0, at it its own
    chunk_size      is looked at, and then left alone: there are 64 tokens to a chunk here
    chosen          run_rows, of `plan`

    x, B, C, dy and z in float16 or bfloat16, at addresses and strides of 16 bytes; headdim a multiple of 8, and dstate
    one up to 128; D a number for each head; on a card of compute capability 9.0 (H100, H200, GH200). Otherwise
    NotImplementedError says what; `takes` says it before, and kernels.ssd_backward.gradients takes another rung then.
    On the CPU it runs on the SIMT machine. With z a forward without z runs first, and a kernel that makes dz (gate.py).

    Products of matrices take factors rounded to the dtype of x, states and S among them, and add in float32. All must
    be finite. Moves x and dy twice, dx once, B and C for each head (from L2), and 4 P N bytes for each head and 128
    tokens twice. The same from run to run, bit for bit: no sum is added to by more than one thread.
    """
    options = dict(
        dfinal_states=dfinal_states, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
        cu_seqlens=cu_seqlens, dt_limit=dt_limit,
    )  # fmt: skip
    problem = expect_backward("fused", dy, x, dt, A, B, C, chunk_size, **options)
    if why := takes(problem, dy, x, dt, A, B, C, **options):
        raise NotImplementedError(f"fused: {why}; kernels.ssd_backward.gradients takes another rung")
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = sequence_numbers(cu_seqlens, problem.seqlen)
    dz = None
    if z is not None:
        dz, dy = _gated(dy, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit)
    how = dfinal_states, D, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit
    found, _ = launch(problem, dy, x, dt, A, B, C, *how, chosen=chosen)
    return found._replace(z=dz)


def _gated(dy, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit):
    """(dz, the gradient of what z is multiplied with)"""
    v = ssd.fused(x, dt, A, B, C, D=D, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
                  dt_softplus=dt_softplus, dt_limit=dt_limit)  # fmt: skip
    if x.is_cpu:  # Triton's interpreter has no bfloat16
        return tuple(t.to(x.dtype) for t in gate.run(dy.float(), z.float(), v.float()))
    return gate.run(dy, z, v)


class Launch(NamedTuple):
    """A kernel, and all that it is given."""

    name: str
    kernel: object
    grid: object
    threads: int
    arguments: tuple
    shared: int = 0
    pdl: bool = False

    def __call__(self, **options):
        how = dict(shared=self.shared, pdl=self.pdl) | options
        return self.kernel.unchecked(self.grid, self.threads, *self.arguments, **how)


def launches(
    problem, dy, x, dt, A, B, C, dfinal_states, D, dt_bias, initial_states, seq_idx, softplus, limit, **chosen
):
    """([Launch], Gradients that they write). chosen: what `plan` takes by name."""
    batch, seqlen, heads, headdim, groups, dstate = problem[:6]
    parts = -(-headdim // WIDTH)
    rows = heads * parts
    p = plan(batch, seqlen, rows, groups, multiprocessors(x.device), **chosen)
    modules = _modules(TYPES[x.dtype], padded(dstate), TYPES[dt.dtype], seq_idx is not None)
    rule = int(bool(softplus)), *map(float, limit)
    bias, skip, start, end = (None if t is None else t.float() for t in (dt_bias, D, initial_states, dfinal_states))
    new = functools.partial(torch.empty, device=x.device, dtype=torch.float32)
    lines = new(batch, heads, p.chunks, 2 if seq_idx is None else 3, CHUNK)
    h, dh = x.new_empty(2, batch * p.chunks // 2, rows, WIDTH, padded(dstate))
    b_sums, c_sums = new(2, p.runs, batch, seqlen, groups, dstate)
    dt_lines, head_sums = new(batch, rows, p.chunks, CHUNK), new(batch, rows, p.chunks, 2)
    dx, ddt = torch.empty_like(x, memory_format=torch.contiguous_format), dt.new_empty(dt.shape)
    db, dc = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (B, C))
    da, dskip, dbias = new(3, heads)
    dstart = None if start is None else torch.empty_like(start)

    line, strides = _line(dt), dt.stride()
    x_map, b_map, dy_map, c_map, dx_map = (_tiles(t) for t in (x, B, dy, C, dx))
    sizes = seqlen, p.chunks, heads, groups, headdim, dstate, parts
    decays = line, A, bias, seq_idx, lines, seqlen, heads, *strides, *rule
    states = x_map, b_map, dy_map, c_map, _states(h, 16), _states(dh, 16), lines, start, end, dstart, *sizes
    chunks = x_map, dy_map, b_map, c_map, _states(h, 64), _states(dh, 64), dx_map, lines, A, skip
    chunks += b_sums, c_sums, dt_lines, head_sums, *sizes, p.run_rows, batch
    finish = line, bias, dt_lines, head_sums, b_sums, c_sums, ddt, da, dskip, dbias, db, dc
    finish += seqlen, heads, parts, p.chunks, batch, p.runs, db.numel(), *strides, *rule
    made = [
        Launch("decays", modules.decays.decays, (p.chunks, -(-heads // 32), batch), 256, decays),
        Launch("states", modules.states.states, (rows, batch, 2), 160, states, modules.states_shared, pdl=True),
        Launch(
            "chunks",
            modules.chunks.chunks,
            (p.chunks, groups * p.runs, batch),
            384,
            chunks,
            modules.chunks_shared,
            pdl=True,
        ),
        Launch("finish", modules.finish.finish, heads + FINISHERS, 1024, finish, pdl=True),
    ]

    def like(gradient, t):
        return None if t is None else gradient.to(t.dtype)

    def found():  # behind the launches
        return Gradients(dx, ddt, da, db, dc, like(dskip, D), None, like(dbias, dt_bias), like(dstart, initial_states))

    return made, found


def launch(*arguments, chosen=None, **options):
    """All launches, of what `launches` takes. Returns (Gradients, the launches' reports, on the SIMT machine)."""
    made, found = launches(*arguments, **(chosen or {}))
    reports = [each(**options) for each in made]
    return found(), reports


class Modules(NamedTuple):
    """The compiled sources, and bytes of shared memory."""

    decays: object
    states: object
    chunks: object
    finish: object
    states_shared: int
    chunks_shared: int


@functools.cache
def _modules(dtype, state, dt, sequences):
    """For a type of x, a padded dstate, a type of dt, and whether there are several sequences in a row."""
    tiles, line = state // 64, 4 * CHUNK * (3 if sequences else 2)
    states_shared = 3 * (1 + tiles) * TILE + 2 * tiles * TILE + 3 * line + 64
    sums = 4 * (4 * CHUNK + 5 * CHUNK + 8)
    chunks_shared = (3 * tiles + 2 * 2 * tiles + 3 * 3 + 1 + 2) * TILE + 6 * line + 2 * sums + 8 * 20 + 64
    shape = f"-DSHAPE=Shape<{dtype}, {state}, {str(sequences).lower()}>"

    def load(name, *options):
        return cuda.load(HERE / f"{name}.cu", options, arch="sm_90a")

    return Modules(
        load("decays", shape, f"-DDT={dt}"), load("states", shape, f"-DSHARED_BYTES={states_shared}"),
        load("chunks", shape, f"-DSHARED_BYTES={chunks_shared}"), load("finish", shape, f"-DDT={dt}"),
        states_shared, chunks_shared,
    )  # fmt: skip


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
