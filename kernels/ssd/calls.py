"""What the fused rungs in Triton do with a call before and after their one launch.

    rung(x, dt, A, B, C, *, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
         dt_limit=(0, inf), return_final_states=False, out=None)

Arguments, results and errors are those of kernels.ssd.five, with dstate at most 128. It is a NotImplementedError to
give seq_idx, cu_seqlens, return_varlen_states or a state_dtype other than float32.
"""

from typing import NamedTuple

import torch

from kernels.ssd.arguments import NO_LIMIT, Problem, expect_ssd
from kernels.ssd.launching import filled_up, launch

LACKS = "seq_idx", "cu_seqlens", "return_varlen_states"
FILES = ("arguments", "launching", "calls", "tiles")  # of every rung


class Call(NamedTuple):
    """A call that has been looked at. tensors, numbers and constants: of the kernel, as far as all rungs have them."""

    problem: Problem
    out: torch.Tensor
    y: torch.Tensor  # what the kernel writes: `out`, or a float32 tensor in its place
    final: torch.Tensor | None
    tensors: tuple
    numbers: tuple
    constants: tuple
    tile: tuple  # headdim and dstate, filled up
    return_final_states: bool


def prepare(
    where, x, dt, A, B, C, chunk_size, *, most_chunk=64, keep_final=False, D=None, z=None, dt_bias=None,
    initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT,
    return_final_states=False, return_varlen_states=False, out=None, state_dtype=torch.float32,
):  # fmt: skip
    """Check a call and make what its kernel takes.

    chunk_size  as it was given; if None, then most_chunk. In float32 half of either, for want of shared memory
    keep_final  whether the kernel needs the final states' memory anyway
    """
    if isinstance(x, torch.Tensor) and x.dtype is torch.float32:
        most_chunk //= 2
    problem = expect_ssd(
        where, x, dt, A, B, C, most_chunk if chunk_size is None else chunk_size, D=D, z=z, dt_bias=dt_bias,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_limit=dt_limit,
        return_varlen_states=return_varlen_states, out=out, state_dtype=state_dtype, lacks=LACKS,
        most_chunk=most_chunk, most_dstate=128,
    )  # fmt: skip
    if state_dtype is not torch.float32:
        raise NotImplementedError(f"{where}: state_dtype must be torch.float32 here, got {state_dtype}")
    batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size, _ = problem
    y = out = x.new_empty(x.shape) if out is None else out
    if x.is_cpu:  # the interpreter takes bfloat16's bits for whole numbers
        if x.dtype is torch.bfloat16:
            x, B, C, z = (v if v is None else v.float() for v in (x, B, C, z))
            y = torch.empty(x.shape)
        dt, D, dt_bias, initial_states = (v if v is None else v.float() for v in (dt, D, dt_bias, initial_states))
    final = None
    if keep_final or return_final_states:
        final = x.new_empty(batch, nheads, headdim, dstate, dtype=torch.float32)
    (x_b, x_l, x_h, _), (dt_b, dt_l, _), (B_b, B_l, B_g, _) = x.stride(), dt.stride(), B.stride()
    (C_b, C_l, C_g, _), (z_b, z_l, z_h, _) = C.stride(), (x if z is None else z).stride()
    tensors = x, dt, A, B, C, D, z, dt_bias, initial_states, y, final
    numbers = batch, seqlen, ngroups, *map(float, dt_limit), x_b, x_h, dt_b, B_b, B_g, C_b, C_g, z_b, z_h
    tile = filled_up(headdim), filled_up(dstate)
    # A token's stride is compiled in, so that the rows of a tile need no registers for their addresses.
    constants = (
        x_l, dt_l, B_l, C_l, z_l, nheads, headdim, dstate, *tile, chunk_size, bool(dt_softplus),
        D is not None and D.ndim == 2,
    )  # fmt: skip
    return Call(problem, out, y, final, tensors, numbers, constants, tile, return_final_states)


def run(call, kernel, grid, workspace=(), numbers=(), constants=(), *, warps=None, stages=1):
    """Launch, and return y or (y, final_states). Unless told, 4 warps up to a state of 32 KB, else 8."""
    warps = warps or (4 if call.tile[0] * call.tile[1] <= 8192 else 8)
    launch(
        kernel, grid, call.tensors + workspace, call.numbers + numbers, call.constants + constants,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if call.out is not call.y:
        call.out.copy_(call.y)
    return (call.out, call.final) if call.return_final_states else call.out
