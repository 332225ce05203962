"""conv1d and conv_step: looks at their arguments, and their launches (see __init__.py)."""

import torch

from kernels.mamba2.arguments import (
    expect_begins,
    expect_half,
    expect_inner,
    expect_rows_of,
    expect_taps,
    expect_written,
)
from kernels.mamba2.launches import flat, kernel
from lab.card import multiprocessors
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, output

LEAST, AHEAD = 16, 4  # tokens of a walk of conv1d; inputs on their way
THREADS, RESIDENT = 256, 3  # of a block of conv1d; blocks that a multiprocessor has room for
CONV, STEP = Calls("conv1d", outs=2), Calls("conv_step", outs=2)


def conv1d(
    xBC, weight, bias=None, *, initial_state=None, seq_idx=None, cu_seqlens=None, out=None, final_state=None, pdl=False
):  # fmt: skip
    """y[t] = silu(bias + Σ weight[:, k] · xBC[t − width + 1 + k]), every channel by itself. Returns (y, final state).
    xBC            (batch, seqlen, channels) float16 or bfloat16, such as a view of in_proj's output
    weight         (channels, width) float32, width from 2 to 8;  bias (channels,) float32 or None
    initial_state  (batch, width − 1, channels), like xBC: the inputs before the first, oldest first; None: zeros
    seq_idx        (batch, seqlen) int32, never falling: where it changes a new sequence begins, behind zeros. The
                   initial state is that of token 0's sequence
    cu_seqlens     (sequences + 1,) int32, in place of seq_idx, batch 1: where each sequence begins, from 0 to seqlen,
                   never falling; states are then (sequences, width − 1, channels). On a card, where its values are not
                   looked at beforehand, the first sequence begins at token 0 and the last ends at seqlen whatever it
                   says; with other wrong values tokens meet the wrong state, and a final state may stay unwritten, but
                   nothing outside of these tensors is read or written
    final_state    to be written: the last inputs of the last sequence, behind zeros where it is shorter
    → (batch, seqlen, channels), states like initial_state, like xBC. Moves 4 · channels bytes a token."""
    where, options = "conv1d", (bool(pdl),)
    others = xBC, weight, bias, initial_state, seq_idx, cu_seqlens
    if (done := CONV.run(options, out, final_state, *others)) is not None:
        return done
    y, final, width = expect_conv1d(where, *others, out, final_state)
    with CONV.preparing(options, (out, final_state), (y, final), others):
        launch_conv1d(*others, y, final, width, pdl)
    return y, final


def expect_conv1d(
    where, xBC, weight, bias, initial_state, seq_idx, cu_seqlens, out=None, final_state=None, *, memory=True
):  # fmt: skip
    """Raise unless conv1d can be called so. Returns (y, the final state, width). memory: whether tensors have any."""
    expect_half(where, "xBC", xBC)
    expect_rows_of(where, "xBC", xBC, xBC, ("batch", "seqlen", "channels"))
    expect_inner(where, "xBC", xBC, 2)
    batch, seqlen, channels = xBC.shape
    width = expect_taps(where, weight, bias, xBC, channels)
    sequences = batch if cu_seqlens is None else expect_begins(where, cu_seqlens, seq_idx, xBC, memory)
    window = sequences, width - 1, channels
    if initial_state is not None:
        expect(where, "initial_state", initial_state, xBC, window)
    if seq_idx is not None:
        expect(where, "seq_idx", seq_idx, xBC, (batch, seqlen), (torch.int32,))
    inputs = {"xBC": xBC, "weight": weight, "bias": bias, "initial_state": initial_state, "seq_idx": seq_idx}
    inputs["cu_seqlens"] = cu_seqlens
    written = {"out": (out, (batch, seqlen, channels)), "final_state": (final_state, window)}
    for name, (tensor, shape) in written.items():
        if tensor is not None:
            expect(where, name, tensor, xBC, shape)
            others = inputs | {other: t for other, (t, _) in written.items() if other != name}
            if memory:
                expect_written(where, name, tensor, **others)
    y = output(where, out, xBC, written["out"][1])
    return y, output(where, final_state, xBC, window), width


def launch_conv1d(
    xBC, weight, bias, initial_state, seq_idx, cu_seqlens, out, final, width, pdl, tokens=None, vec=None, **options
):  # fmt: skip
    """Without a look at the arguments; `options` go to the SIMT machine, whose report comes back."""
    batch, seqlen, channels = xBC.shape
    x_batch, x_token, _ = xBC.stride()
    if vec is None:  # 16 bytes take so many registers that too few threads are there
        addresses = [t.data_ptr() for t in (xBC, out, initial_state, final) if t is not None]
        strides = [2 * x_batch * (batch > 1), 2 * x_token * (seqlen > 1), 2 * channels]
        vec = next(v for v in (4, 2, 1) if not any(n % (2 * v) for n in addresses + strides))
    if tokens is None:  # such that all walks go side by side
        threads = THREADS * RESIDENT * multiprocessors(xBC.device)
        tokens = -(-batch * seqlen * (channels // vec) // (threads * AHEAD)) * AHEAD
        tokens = min(max(tokens, LEAST), seqlen)
    walks = channels // vec * -(-seqlen // tokens) * batch
    kind = "ONE" if seq_idx is None and cu_seqlens is None else "BY_BEGIN" if seq_idx is None else "BY_NUMBER"
    found = kernel(
        "conv1d", DTYPE=DTYPES[xBC.dtype], VEC=vec, WIDTH=width, AHEAD=min(AHEAD, tokens), SEQUENCES=kind
    )  # fmt: skip
    tensors = flat(xBC), weight, bias, initial_state, cu_seqlens if seq_idx is None else seq_idx, out, final
    threads = THREADS if walks >= THREADS * multiprocessors(xBC.device) else 64
    count = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    sizes = batch, seqlen, channels, tokens, count, x_batch, x_token
    return found(-(-walks // threads), threads, *tensors, *sizes, pdl=pdl, **options)


def conv_step(conv_state, xBC, weight, bias=None, *, out=None, pdl=False):
    """conv1d of one token of each sequence: xBC (batch, channels) → (batch, channels). conv_state (batch, width − 1,
    channels), like xBC, the inputs before this one, oldest first, is written in place."""
    where, options = "conv_step", (bool(pdl),)
    others = xBC, weight, bias
    if (done := STEP.run(options, out, conv_state, *others)) is not None:
        return done[0]
    y, width = expect_conv_step(where, conv_state, xBC, weight, bias, out)
    with STEP.preparing(options, (out, conv_state), (y, conv_state), others):
        row = xBC[:, None]
        launch_conv1d(row, weight, bias, conv_state, None, None, y, conv_state, width, pdl)
    return y


def expect_conv_step(where, conv_state, xBC, weight, bias, out=None, *, memory=True):
    """Raise unless conv_step can be called so. Returns (the tensor to write to, width)."""
    expect_half(where, "xBC", xBC)
    expect_rows_of(where, "xBC", xBC, xBC, ("batch", "channels"))
    expect_inner(where, "xBC", xBC, 1)
    batch, channels = xBC.shape
    width = expect_taps(where, weight, bias, xBC, channels)
    expect(where, "conv_state", conv_state, xBC, (batch, width - 1, channels))
    inputs = {"xBC": xBC, "weight": weight, "bias": bias}
    if memory:
        expect_written(where, "conv_state", conv_state, **inputs)
        if out is not None:
            expect(where, "out", out, xBC, (batch, channels))
            expect_written(where, "out", out, **inputs, conv_state=conv_state)
    return output(where, out, xBC, (batch, channels)), width
