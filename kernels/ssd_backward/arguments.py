"""Look at the tensors of a backward call before anything is launched, and say what is wrong in one sentence.

What the forward takes is looked at as there (kernels.ssd.arguments); dy and dfinal_states are looked at here.
"""

from typing import NamedTuple

import torch

from kernels.ssd.arguments import NO_LIMIT, _expect, _seen, expect_ssd
from lab.tensors import expect_memory


class Gradients(NamedTuple):
    """Of each argument, like it in shape and dtype; None where it was not given."""

    x: torch.Tensor
    dt: torch.Tensor  # of dt as it came, before dt_bias, softplus and limit
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_states: torch.Tensor | None


def expect_backward(
    where, dy, x, dt, A, B, C, chunk_size=None, *, dfinal_states=None, D=None, z=None, dt_bias=None,
    initial_states=None, seq_idx=None, cu_seqlens=None, dt_limit=NO_LIMIT,
):  # fmt: skip
    """Check one call of a rung of the backward ladder. Returns its sizes, a kernels.ssd.arguments.Problem.

    where           the function's name, for messages
    dy              like x in shape, dtype and device; its last axis is contiguous
    dfinal_states   (batch, H, P, N), contiguous, float32 or the dtype of x; or None, for 0
    all else        as kernels.ssd.arguments.expect_ssd has it

    TypeError, ValueError or NotImplementedError names the argument, what was expected and what came.
    """
    problem = expect_ssd(
        where, x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
        cu_seqlens=cu_seqlens, dt_limit=dt_limit,
    )  # fmt: skip
    for name, tensor in (("dy", dy), ("dfinal_states", dfinal_states)):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            expect_memory(where, name, tensor)
    expect_gradients(where, dy, x, B, dfinal_states)
    return problem


def expect_gradients(where, dy, x, B, dfinal_states):
    """Check what comes from behind, beside an x and a B that have been looked at."""
    (batch, _, nheads, headdim), dstate = x.shape, B.shape[3]
    _expect(where, "dy", _seen(dy), tuple(x.shape), (x.dtype,), x.device)
    if dfinal_states is not None:
        shape = batch, nheads, headdim, dstate
        _expect(where, "dfinal_states", _seen(dfinal_states), shape, (x.dtype, torch.float32), x.device, whole=True)
