"""fused, the best rung of the backward pass: four launches in CUDA C++ for Hopper, where card and tensors allow it.

    launch    what                                                     moves, at 8,192 tokens of mamba2-2.7b
    decays    dt into steps and decays, turned to lines of a head        10 MB
    states    states before each pair of chunks, and gradients behind   336 MB: x and dy, and both states in 16 bits
    chunks    dx, ddt, dB and dC of each chunk, from both states        420 MB: x, dy, dx and both states
    finish    sums over runs of heads and over tokens, and ddt turned    30 MB

About 190 µs at the roof of an H200. States in 16 bits are what the products take; the walk itself adds in float32.
"""

import contextlib

import torch

from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.five import sequence_numbers
from kernels.ssd.fused import fused as forward
from kernels.ssd_backward import gate
from kernels.ssd_backward.arguments import Gradients, expect_backward
from kernels.ssd_backward.fused_launches import Tensors, empty_gradients, launches
from lab.card import capability
from lab.prepared import Calls

FILES = ("decays.cu", "states.cu", "chunks.cu", "finish.cu", "fused.py", "fused_launches.py")
SOURCES = tuple(f"kernels/ssd_backward/{name}" for name in FILES)
CALLS = Calls("ssd_backward.fused", outs=8)
NONE_GIVEN = (None,) * 8  # of outputs
MOST_DSTATE = 128


def takes(problem, dy, x, dt, A, B, C, *, D=None, dfinal_states=None, initial_states=None, **others):
    """Why fused cannot do this, in words; or "". problem: of expect_backward."""
    tensors = ("x", x), ("B", B), ("C", C), ("dy", dy)
    if x.dtype is torch.float32:
        return "x is float32"
    if (has := capability(x.device)) != (9, 0):
        return f"compute capability 9.0 is needed, this card has {has}"
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

    Products of matrices take factors rounded to the dtype of x, states and S among them, and add in float32; only the
    tokens that make a state have two parts. All must be finite. Moves x and dy twice, dx once, B and C for each head
    (from L2), and 4 P N bytes for each head and 128 tokens twice. The same from run to run, bit for bit: no sum is
    added to by more than one thread.
    """
    if type(dt_limit) is list:  # as a tuple it can be part of a kind of calls
        dt_limit = tuple(dt_limit)
    how = chunk_size, dt_softplus, dt_limit
    tensors = dy, x, dt, A, B, C, dfinal_states, D, dt_bias, initial_states, seq_idx
    if z is None and cu_seqlens is None and not chosen and (found := CALLS.run(how, *NONE_GIVEN, *tensors)) is not None:
        return Gradients(*found[:6], None, *found[6:])
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
    t = Tensors(dy, x, dt, A, B, C, *map(_wide, (dfinal_states, D, dt_bias, initial_states)), seq_idx)
    gradients = empty_gradients(t)
    outputs = *gradients[:6], *gradients[7:]  # all but that of z
    again = not chosen and all(one is other for one, other in zip(t, tensors))  # a later call can do the same
    with CALLS.preparing(how, NONE_GIVEN, outputs, t) if again else contextlib.nullcontext():
        for each in launches(problem, t, gradients, dt_softplus, dt_limit, **chosen):
            each()
    back = dict(D=D, dt_bias=dt_bias, initial_states=initial_states)
    return gradients._replace(z=dz, **{name: _like(getattr(gradients, name), one) for name, one in back.items()})


def _wide(tensor):
    return None if tensor is None else tensor.float()


def _like(gradient, tensor):
    return None if tensor is None else gradient.to(tensor.dtype)


def _gated(dy, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_softplus, dt_limit):
    """(dz, the gradient of what z is multiplied with)"""
    v = forward(x, dt, A, B, C, D=D, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
                dt_softplus=dt_softplus, dt_limit=dt_limit)  # fmt: skip
    if x.is_cpu:  # Triton's interpreter has no bfloat16
        return tuple(t.to(x.dtype) for t in gate.run(dy.float(), z.float(), v.float()))
    return gate.run(dy, z, v)
