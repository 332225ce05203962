"""few: the SSD layer backwards in a few launches, chunk by chunk.

0 gate           dy, z, v           -> dz, dy silu(z)                  with z alone; v by a forward without z
1 chunk_cumsum   dt, A              -> dt, cum                         kernels.ssd's
2 states         x, B, dy, C        -> h, dh at the chunks' ends       16 bits, in chunks of 128
3 inter          x, dy, C, h, dh    -> parts of dB, dC and of the sums for dt and A, from beyond the chunk
4 intra          x, dy, B, C, dh    -> dx, and these parts from inside of the chunk
5 finish.join    parts              -> dB, dC
6 finish.ddt     sums               -> ddt
7 finish.totals  sums over chunks   -> dA, dD, ddt_bias

No float atomics: all sums have one order, and the same call gives the same bits.

L seqlen   H nheads   P headdim   G ngroups   N dstate
"""

import torch

from kernels.ssd import chunk_cumsum
from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.five import five, sequence_numbers
from kernels.ssd.fused import fused
from kernels.ssd_backward import finish, gate, inter, intra, states
from kernels.ssd_backward.arguments import Gradients, expect_backward
from kernels.ssd_backward.plan import plan
from lab.card import multiprocessors

FILES = ("arguments", "plan", "gate", "states", "inter", "intra", "finish", "few")
SOURCES = (
    *(f"kernels/ssd_backward/{name}.py" for name in FILES),
    "kernels/ssd/launching.py",
    "kernels/ssd/chunk_cumsum.py",
)


def few(
    dy, x, dt, A, B, C, *, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None,
    seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT, **chosen,
):  # fmt: skip
    """Gradients of kernels.ssd's layer, each like its argument; None for what was not given.

    dy              (batch, L, H, P), like x: the gradient of y
    dfinal_states   (batch, H, P, N), float32 or like x: that of the final states; None for 0
    x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit    as the forward had
                    them: kernels.ssd.five says what each is. dt beyond a limit has a gradient of 0, at it its own
    chunk_size      is looked at, and then left alone: there are 128 tokens to a chunk here, 64 in float32
    chosen          fields of plan.Plan

    Products of matrices take factors rounded to the dtype of x, states among them, and add in float32; the tokens that
    make a state have two parts. Of float32 they take two parts of 11 bits, and three products. All must be finite.
    Moves x and dy three times, dx once, and a state for each head and chunk, P N numbers, five times. The same from
    run to run, bit for bit.
    On the CPU it runs in Triton's interpreter, bfloat16 in float32.
    """
    problem = expect_backward(
        "few", dy, x, dt, A, B, C, chunk_size, dfinal_states=dfinal_states, D=D, z=z, dt_bias=dt_bias,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_limit=dt_limit,
    )  # fmt: skip
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = sequence_numbers(cu_seqlens, problem.seqlen)
    limit = tuple(dt_limit)
    tensors = dy, x, dt, A, B, C, D, z, dt_bias, initial_states
    if x.is_cpu and x.dtype is torch.bfloat16:  # of which Triton's interpreter would multiply the bits
        wide = (None if t is None else t.float() for t in (*tensors, dfinal_states))
        found = _run(problem, *wide, seq_idx, dt_softplus, limit, chosen)
        return Gradients(*(g if g is None else g.to(t.dtype) for g, t in zip(found, tensors[1:])))
    return _run(problem, *tensors, dfinal_states, seq_idx, dt_softplus, limit, chosen)


def _run(problem, dy, x, dt, A, B, C, D, z, dt_bias, initial, dfinal, seq_idx, softplus, limit, chosen):
    """The launches, of tensors that have been looked at. Returns Gradients."""
    batch, seqlen, nheads, headdim, ngroups, dstate = problem[:6]
    how = plan(batch, seqlen, nheads, headdim, ngroups, dstate, x.dtype, multiprocessors(x.device), **chosen)
    dz = None
    if z is not None:
        forward = five if x.is_cpu or x.dtype is torch.float32 else fused
        v = forward(x, dt, A, B, C, D=D, dt_bias=dt_bias, initial_states=initial, seq_idx=seq_idx,
                    dt_softplus=softplus, dt_limit=limit)  # fmt: skip
        dz, dy = gate.run(dy, z, v)
    dts, cum = chunk_cumsum.run(dt, A, 2 * how.rows, dt_bias, seq_idx, softplus, limit)
    ddt, dA, dB, dC = (t.new_empty(t.shape) for t in (dt, A, B, C))
    dinitial, dbias, dD = (None if t is None else t.new_empty(t.shape) for t in (initial, dt_bias, D))
    h, dh = states.run(problem, x, dy, B, C, dts, cum, seq_idx, initial, dfinal, dinitial, how)
    dB_parts = cum.new_empty((how.runs + how.inter_runs, *B.shape))
    dC_parts = cum.new_empty((2 * how.runs + how.inter_runs, *B.shape))
    inner, outer = slice(how.runs), slice(how.runs, how.runs + how.inter_runs)
    rises, crossing = inter.run(problem, x, dy, C, dts, cum, seq_idx, h, dh, dB_parts[outer], dC_parts[outer], how)
    del h  # whose memory dx takes
    dx = x.new_empty(x.shape)
    second = dC_parts[outer.stop :]
    sums, skip = intra.run(
        problem, x, dy, B, C, D, dts, cum, seq_idx, dh, dx, dB_parts[inner], dC_parts[inner], second, how
    )  # fmt: skip
    del dh
    finish.join(dB_parts, dC_parts, dB, dC, how)
    skips = D is not None and D.ndim == 1
    parts = finish.ddt(
        problem, sums, rises, crossing, dts, cum, dt, A, dt_bias, seq_idx, softplus, limit, ddt, skips
    )  # fmt: skip
    finish.totals(problem, parts, skip, dA, dbias, dD)
    return Gradients(dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial)
