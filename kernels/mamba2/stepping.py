"""state_step: looks at its arguments, its plan, and its launch."""

import functools
import math
from typing import NamedTuple

import torch

from kernels.mamba2.arguments import (
    FLOAT,
    expect_half,
    expect_inner,
    expect_limit,
    expect_rows_of,
    expect_written,
)
from kernels.mamba2.launches import CODES, TYPES, flat, kernel
from kernels.mamba2.states import QuantizedState
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, output

SOURCES = tuple(f"kernels/mamba2/{name}" for name in ("state_step.cu", "stepping.py"))
NO_LIMIT = (0.0, math.inf)
MOST = 65535  # heads, and sequences of a batch: blocks of a grid along y and z
MOST_DSTATE = 1024
CALLS = Calls("state_step", outs=3)  # y, the state or its codes, its scales


class Plan(NamedTuple):
    vec: int  # numbers in a word of the state
    part: int  # in one of B and C
    words: int  # of a row, a lane
    lanes: int  # of a row
    rows: int  # of a thread
    threads: int


def state_step(
    state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=NO_LIMIT, out=None, pdl=False
):  # fmt: skip
    """One token of the state space: state = exp(A dt) state + dt x Bᵀ, y = C state + D x, times silu(z). Returns y.

    state        (batch, nheads, headdim, dstate) float32 or like x, or a QuantizedState, of 8 bits: written in place
    x            (batch, nheads, headdim) float16 or bfloat16;  dt (batch, nheads) like x
    A            (nheads,) float32;  D, dt_bias (nheads,) float32 or None
    B, C         (batch, ngroups, dstate) like x; head h reads group h // (nheads // ngroups)
    z            like x, or None
    dt_bias, dt_softplus, dt_limit    what dt takes, in this order
    pdl          as in kernels/fusion; but the state, A, D and dt_bias are read at once: none of the launches ahead that
                 may still run may write them
    → y (batch, nheads, headdim), like x

    x, dt, B, C and z may be views whose batches lie apart, such as of in_proj's output. Sums are float32; the state is
    rounded once. Moves the state twice, once each way: 8 · headdim · dstate bytes a head in float32, 4 in 16 bits, and
    2 · headdim · (dstate + 4) in 8 bits, whose dstate is a multiple of 16.
    """
    codes, scale = (state.codes, state.scale) if isinstance(state, QuantizedState) else (state, None)
    limit = dt_limit if type(dt_limit) is tuple else NO_LIMIT
    options = bool(dt_softplus), limit, bool(pdl), type(dt_limit) is tuple
    others = x, dt, A, B, C, D, z, dt_bias
    if (done := CALLS.run(options, out, codes, scale, *others)) is not None:
        return done[0]
    y, limit = expect_state_step(codes, scale, *others, dt_limit, out)
    with CALLS.preparing(options, (out, codes, scale), (y, codes, scale), others):
        _launch(plan_of(codes, B, C, x.device), codes, scale, *others, y, dt_softplus, limit, pdl)
    return y


def expect_state_step(codes, scale, x, dt, A, B, C, D, z, dt_bias, dt_limit, out=None, *, memory=True):
    """Raise unless state_step can be called so. Returns (the tensor to write to, dt's limits). memory: whether the
    tensors have any, so that it can be seen whether they share it."""
    where = "state_step"
    expect_half(where, "x", x)
    expect_rows_of(where, "x", x, x, ("batch", "nheads", "headdim"))
    batch, nheads, headdim = x.shape
    dtypes = (torch.float32, x.dtype) if scale is None else (CODES,)
    expect(where, "state", codes, x, (batch, nheads, headdim, "dstate"), dtypes)
    dstate = codes.shape[-1]
    if scale is not None:
        expect(where, "state.scale", scale, x, (batch, nheads, headdim), FLOAT)
        if dstate % 16 or codes.data_ptr() % 16:
            raise ValueError(f"{where}: state of 8 bits must have dstate a multiple of 16, got {dstate}")
    expect_rows_of(where, "dt", dt, x, (batch, nheads))
    expect(where, "A", A, x, (nheads,), FLOAT)
    expect_rows_of(where, "B", B, x, (batch, "ngroups", dstate))
    expect_rows_of(where, "C", C, x, tuple(B.shape))
    for name, value in (("x", x), ("dt", dt), ("B", B), ("C", C), ("z", z)):
        if name == "z" and z is not None:
            expect_rows_of(where, "z", z, x, tuple(x.shape))
        if value is not None:
            expect_inner(where, name, value, 1)
    for name, value in (("D", D), ("dt_bias", dt_bias)):
        if value is not None:
            expect(where, name, value, x, (nheads,), FLOAT)
    if nheads % B.shape[1]:
        raise ValueError(f"{where}: nheads must be a multiple of ngroups, got {nheads} heads and {B.shape[1]} groups")
    if nheads > MOST or batch > MOST or dstate > MOST_DSTATE:
        wanted = f"at most {MOST} heads and sequences, and dstate at most {MOST_DSTATE}"
        raise ValueError(f"{where}: state must have {wanted}, got shape {tuple(codes.shape)}")
    limit = expect_limit(where, dt_limit)
    inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    if memory:
        expect_written(where, "state", codes, **inputs, **{"state.scale": scale})
        if scale is not None:
            expect_written(where, "state.scale", scale, **inputs)
        if out is not None:
            expect(where, "out", out, x, tuple(x.shape))
            expect_written(where, "out", out, **inputs, state=codes, **{"state.scale": scale})
    return output(where, out, x, tuple(x.shape)), limit


def plan_of(codes, B, C, device):
    """The Plan of a call."""
    dstate = codes.shape[-1]
    size, places = codes.element_size(), [dstate]
    for tensor in (B, C):
        places += tensor.data_ptr() // 2, tensor.stride(0) * (len(codes) > 1)
    vec = 16 // size if codes.data_ptr() % 16 == 0 and dstate * size % 16 == 0 else 1
    part = next(n for n in (8, 4, 2, 1) if n <= vec and not any(place % n for place in places))
    return plan(dstate, vec, part)


@functools.lru_cache(maxsize=256)
def plan(dstate, vec, part, rows=1, threads=128):
    """The Plan for such rows. vec, part, rows, threads: taken as they are."""
    lanes = 4
    while lanes < 32 and lanes * 16 < dstate:
        lanes *= 2
    return Plan(vec, part, -(-dstate // (lanes * vec)), lanes, rows, threads)


def _launch(found, codes, scale, x, dt, A, B, C, D, z, dt_bias, y, dt_softplus, limit, pdl, **options):
    """Without a look at the arguments; `options` go to the SIMT machine, whose report comes back."""
    batch, nheads, headdim = x.shape
    ngroups, dstate = B.shape[1:]
    step = kernel(
        "state_step", DTYPE=DTYPES[x.dtype], STATE=TYPES[codes.dtype], VEC=found.vec, PART=found.part,
        WORDS=found.words, LANES=found.lanes, ROWS=found.rows, THREADS=found.threads,
    )  # fmt: skip
    strides = [t.stride(0) if t is not None else 0 for t in (x, dt, B, C, z)]
    x, dt, B, C, z = (flat(t) for t in (x, dt, B, C, z))
    args = (codes, scale, x, dt, A, B, C, D, z, dt_bias, y, nheads, headdim, dstate, nheads // ngroups, *strides)
    blocks = -(-headdim // (found.threads // found.lanes * found.rows))
    return step((blocks, nheads, batch), found.threads, *args, int(dt_softplus), *limit, pdl=pdl, **options)
