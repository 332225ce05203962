"""The rungs and gradients as operators of torch.library: ssd_backward_plain and the others, and ssd_backward.

An operator returns nine tensors; what was not given has a gradient without elements. Where a tensor asks for gradients
of these gradients, as with create_graph=True, the operator runs, and what it returns refuses to be differentiated.
"""

import torch

from kernels.ssd import arguments
from kernels.ssd.arguments import MOST_CHUNK, MOST_DSTATE, MOST_HEADDIM, NO_LIMIT
from kernels.ssd_backward.arguments import Gradients, expect_gradients
from kernels.ssd_backward.choice import gradients as run_gradients
from kernels.ssd_backward.few import few as run_few
from kernels.ssd_backward.fused import fused as run_fused
from kernels.ssd_backward.plain import plain as run_plain
from lab.operators import operator

INPUTS = (
    "Tensor dy, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, int? chunk_size=None, Tensor? dfinal_states=None, "
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? initial_states=None, Tensor? seq_idx=None, "
    "Tensor? cu_seqlens=None, bool dt_softplus=False, float[]? dt_limit=None"
)
RESULTS = f"({', '.join(['Tensor'] * len(Gradients._fields))})"
REFUSAL = (
    "gradients of gradients are not computed; call backward or torch.autograd.grad without create_graph=True, and take "
    "what they return as it is"
)


def _caller(function):
    def call(x, dt_limit=None, **how):
        found = function(x=x, dt_limit=NO_LIMIT if dt_limit is None else tuple(dt_limit), **how)
        return tuple(x.new_empty(0) if one is None else one for one in found)

    return call


def _fake(where):
    def fake(dy, x, dt, A, B, C, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None,
             initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=None):  # fmt: skip
        tensors = x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, None
        arguments._look.__wrapped__(  # which has no cache: sizes may be symbols
            where, tuple(map(arguments._seen, tensors)), chunk_size, tuple(dt_limit or NO_LIMIT), False,
            torch.float32, (), (MOST_CHUNK, MOST_HEADDIM, MOST_DSTATE),
        )  # fmt: skip
        expect_gradients(where, dy, x, B, dfinal_states)
        like = x, dt, A, B, C, D, z, dt_bias, initial_states
        return tuple(x.new_empty(0) if one is None else one.new_empty(one.shape) for one in like)

    return fake


def _unpack(operators, *tensors, dt_limit=NO_LIMIT, **how):
    found = operators(*tensors, **how, dt_limit=None if dt_limit == NO_LIMIT else list(dt_limit))
    given = True, True, True, True, True, *(how[name] is not None for name in Gradients._fields[5:])
    return Gradients(*(one if there else None for one, there in zip(found, given)))


def _rung(function, name):
    return operator(
        name, INPUTS, fake=_fake(function.__name__), results=RESULTS, unpack=_unpack, call=_caller(function),
        refusal=REFUSAL, tracked=("dy", *Gradients._fields),
    )(function)  # fmt: skip


gradients = _rung(run_gradients, "ssd_backward")
plain, few = _rung(run_plain, "ssd_backward_plain"), _rung(run_few, "ssd_backward_few")
fused = _rung(run_fused, "ssd_backward_fused")
