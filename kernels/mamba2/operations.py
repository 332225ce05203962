"""embed, conv1d, conv_step, norms and products: looks at their arguments, and their launches (see __init__.py)."""

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2.arguments import (
    expect_begins,
    expect_half,
    expect_inner,
    expect_rows_of,
    expect_taps,
    expect_written,
)
from kernels.mamba2.launches import HALVES, MOST_ROWS, flat, kernel, product
from lab.card import multiprocessors
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_first, output

LEAST, AHEAD = 16, 4  # tokens of a walk of conv1d; inputs on their way
THREADS, RESIDENT = 256, 3  # of a block of conv1d; blocks that a multiprocessor has room for
EMBED, CONV, STEP = Calls("embed"), Calls("conv1d", outs=2), Calls("conv_step", outs=2)
GATED, ADDED = Calls("gated_norm"), Calls("add_norm", outs=2)
IN, OUT = Calls("norm_in_proj", outs=2), Calls("norm_out_proj")


def embed(E, token, *, out, pdl=False):
    """out = E[token]: E (vocab, hidden) float16 or bfloat16, token (1,) int64, out (hidden,) float32 or like E."""
    where = "embed"
    if (done := EMBED.run((bool(pdl),), out, E, token)) is not None:
        return done
    expect_first(where, "E", E, ("vocab", "hidden"), HALVES)
    expect(where, "token", token, E, (1,), (torch.int64,))
    vocab, hidden = E.shape
    expect(where, "out", out, E, (hidden,), (torch.float32, E.dtype))
    expect_written(where, "out", out, E=E, token=token)
    with EMBED.preparing((bool(pdl),), (out,), (out,), (E, token)):
        found = kernel("embed", DTYPE=DTYPES[E.dtype], RESIDUAL=DTYPES[out.dtype])
        found(-(-hidden // 256), 256, E, token, out, vocab, hidden, pdl=pdl)
    return out


def conv1d(
    xBC, weight, bias=None, *, initial_state=None, seq_idx=None, cu_seqlens=None, out=None, final_state=None, pdl=False
):  # fmt: skip
    """y[t] = silu(bias + Σ weight[:, k] · xBC[t − width + 1 + k]), every channel by itself. Returns (y, final state).
    xBC            (batch, seqlen, channels) float16 or bfloat16, such as a view of in_proj's output
    weight         (channels, width) float32, width from 2 to 8;  bias (channels,) float32 or None
    initial_state  (batch, width − 1, channels), like xBC: the inputs before the first, oldest first; None: zeros
    seq_idx        (batch, seqlen) int32, never falling: where it changes a new sequence begins, behind zeros. The
                   initial state is that of token 0's sequence
    cu_seqlens     (sequences + 1,) int32, in place of seq_idx, batch 1: where each sequence begins, from 0, never falling,
                   to seqlen (looked at on the CPU alone). States are then (sequences, width − 1, channels), each its own
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


def gated_norm(y, z, weight, eps=1e-5, *, ngroups=1, out=None, pdl=False):
    """RMSNorm of y · silu(z) in each of ngroups groups of neighbouring columns, times weight.
    y, z (tokens, d_inner) float16 or bfloat16, tokens apart by any stride; weight (d_inner,) like y → (tokens,
    d_inner). Moves 6 bytes a number.
    """
    where, options = "gated_norm", (eps, ngroups, bool(pdl))
    if (done := GATED.run(options, out, y, z, weight)) is not None:
        return done
    result = expect_gated_norm(where, y, z, weight, eps, ngroups, out)
    tokens, columns = y.shape
    with GATED.preparing(options, (out,), (result,), (y, z, weight)):
        cols = columns // ngroups
        args = flat(y), flat(z), weight, result, cols, y.stride(0), z.stride(0), float(eps)
        _rows(where, cols, (y, z, weight, result), (y.stride(0), z.stride(0)), (tokens, ngroups), args, pdl)
    return result


def expect_gated_norm(where, y, z, weight, eps, ngroups, out=None, *, memory=True):
    """Raise unless gated_norm can be called so. Returns the tensor to write to."""
    expect_half(where, "y", y)
    expect_rows_of(where, "y", y, y, ("tokens", "d_inner"))
    expect_rows_of(where, "z", z, y, tuple(y.shape))
    for name, value in (("y", y), ("z", z)):
        expect_inner(where, name, value, 1)
    expect(where, "weight", weight, y, (y.shape[1],))
    expect_eps(where, eps)
    if isinstance(ngroups, bool) or not isinstance(ngroups, int):
        raise TypeError(f"{where}: ngroups must be a whole number, got {ngroups!r}")
    if ngroups < 1 or y.shape[1] % ngroups or ngroups > 65535:
        raise ValueError(f"{where}: ngroups must divide d_inner, {y.shape[1]}, got {ngroups}")
    if out is not None:
        expect(where, "out", out, y, tuple(y.shape))
        if memory:
            expect_written(where, "out", out, y=y, z=z, weight=weight)
    return output(where, out, y, tuple(y.shape))


def add_norm(x, residual, weight, eps=1e-5, *, scale=None, out=None, pdl=False):
    """residual += scale · x, in place, and RMSNorm of it: x (tokens, hidden) float16 or bfloat16, or None for nothing to
    add; residual (tokens, hidden) float32 or like weight, weight (hidden,), scale (tokens,) float32 or None for 1, such as
    gate_root's → (tokens, hidden), like weight."""
    where, options = "add_norm", (eps, bool(pdl))
    if (done := ADDED.run(options, out, residual, x, weight, scale)) is not None:
        return done[0]
    expect_add_norm(where, x, residual, weight, scale, eps)
    result = output(where, out, weight, tuple(residual.shape), x=x, weight=weight, scale=scale, residual=residual)
    expect_written(where, "residual", residual, x=x, weight=weight, scale=scale)
    tokens, cols = residual.shape
    with ADDED.preparing(options, (out, residual), (result, residual), (x, weight, scale)):
        args = x, residual, weight, scale, result, cols, float(eps)
        tensors = [t for t in (x, residual, weight, result) if t is not None]
        _rows(where, cols, tensors, (cols,), (tokens,), args, pdl, RESIDUAL=DTYPES[residual.dtype])
    return result


def expect_add_norm(where, x, residual, weight, scale, eps):
    """Raise unless add_norm can be called so."""
    expect_first(where, "weight", weight, ("hidden",), HALVES)
    expect(where, "residual", residual, weight, ("tokens", len(weight)), (torch.float32, weight.dtype))
    if x is not None:
        expect(where, "x", x, weight, tuple(residual.shape))
    if scale is not None:
        if x is None:
            raise ValueError(f"{where}: scale must be None where there is no x")
        expect(where, "scale", scale, weight, (len(residual),), (torch.float32,))
    expect_eps(where, eps)


def _rows(name, cols, tensors, strides, grid, args, pdl, **options):
    """Launch a norm of rows: in words where addresses and strides allow it, and a row fits in a block's registers."""
    dtype = DTYPES[args[2].dtype]
    words = -(-cols // 8)
    per_thread = -(-words // 128) if words <= 128 * 8 else -(-words // 512)
    in_words = not any(t.data_ptr() % 16 for t in tensors) and not any(n % 8 for n in (cols, *strides))
    if in_words and per_thread <= 8:
        threads = -(-words // per_thread // 32) * 32
        kernel(name, DTYPE=dtype, WORDS=per_thread, **options)(grid, threads, *args, pdl=pdl)
    else:
        kernel(name, f"{name}_any", DTYPE=dtype, WORDS=1, **options)(grid, 256, *args, pdl=pdl)


def norm_in_proj(
    residual, norm_weight, W, eps=1e-5, *, bias=None, conv_state=None, conv_weight=None, conv_bias=None, inner=0,
    out=None, pdl=False,
):  # fmt: skip
    """W · RMSNorm(residual) + bias, and a step of the convolution of its channels, where there is one.
    residual     (hidden,) float32 or like W;  norm_weight (hidden,) like W
    W            (rows, hidden) float16 or bfloat16: of a layer z (inner rows), xBC (channels), dt
    bias         (rows,) like W, or None
    conv_state   (width − 1, channels) like W, the inputs before this one, oldest first: written in place
    conv_weight  (channels, width) float32;  conv_bias (channels,) float32 or None
    inner        rows in front of the channels
    pdl          as in kernels/fusion; conv_state, too, is read at once
    → (rows,) like W: z, silu of the convolution, dt. Moves 2 · rows · hidden bytes in one launch."""
    where, options = "norm_in_proj", (eps, inner, bool(pdl))
    others = residual, norm_weight, W, bias, conv_weight, conv_bias
    if (done := IN.run(options, out, conv_state, *others)) is not None:
        return done[0]
    y, width = expect_norm_in_proj(where, *others, eps, conv_state, inner, out)
    rows, cols = W.shape
    channels = 0 if conv_state is None else conv_state.shape[1]
    with IN.preparing(options, (out, conv_state), (y, conv_state), others):
        args = *others, conv_state, y, rows, cols, inner, channels, float(eps)
        options = {"RESIDUAL": DTYPES[residual.dtype], "WIDTH": width}
        product(where, (W, residual, norm_weight), rows, cols, args, pdl, **options)
    return y


def expect_norm_in_proj(
    where, residual, norm_weight, W, bias, conv_weight, conv_bias, eps, conv_state, inner, out=None, *, memory=True
):  # fmt: skip
    """Raise unless norm_in_proj can be called so. Returns (the tensor to write to, width)."""
    expect_first(where, "W", W, ("rows", "hidden"), HALVES)
    rows, hidden = W.shape
    expect(where, "residual", residual, W, (hidden,), (torch.float32, W.dtype))
    expect(where, "norm_weight", norm_weight, W, (hidden,))
    expect_eps(where, eps)
    if rows > MOST_ROWS:
        raise ValueError(f"{where}: W must have at most {MOST_ROWS} rows, got {rows}")
    if (conv_state is None) != (conv_weight is None) or (conv_bias is not None and conv_weight is None):
        raise ValueError(f"{where}: conv_state and conv_weight must both be given, or neither, nor conv_bias")
    if bias is not None:
        expect(where, "bias", bias, W, (rows,))
    width, inputs = 2, {"residual": residual, "norm_weight": norm_weight, "W": W, "bias": bias}
    if conv_state is not None:
        expect(where, "conv_state", conv_state, W, ("width - 1", "channels"))
        channels = conv_state.shape[1]
        width = expect_taps(where, conv_weight, conv_bias, W, channels)
        expect(where, "conv_state", conv_state, W, (width - 1, channels))
        if isinstance(inner, bool) or not isinstance(inner, int) or not 0 <= inner <= rows - channels:
            raise ValueError(f"{where}: inner must be from 0 to {rows - channels}, got {inner!r}")
        inputs |= {"conv_weight": conv_weight, "conv_bias": conv_bias}
        if memory:
            expect_written(where, "conv_state", conv_state, **inputs)
        inputs["conv_state"] = conv_state
    return output(where, out, W, (rows,), **(inputs if memory else {})), width


def norm_out_proj(x, norm_weight, W, residual, eps=1e-5, *, bias=None, pdl=False):
    """residual += W · RMSNorm(x) + bias, in place. Returns residual.
    x (cols,) float16 or bfloat16, norm_weight (cols,) like x, or None for no norm, W (rows, cols) and bias (rows,) like
    x, residual (rows,) float32 or like x. Moves 2 · rows · cols bytes, 2 · rows · cols flops.
    """
    where, options = "norm_out_proj", (eps, bool(pdl))
    others = x, norm_weight, W, bias
    if (done := OUT.run(options, residual, *others)) is not None:
        return done
    expect_norm_out_proj(where, *others, residual, eps)
    rows, cols = W.shape
    with OUT.preparing(options, (residual,), (residual,), others):
        args = *others, residual, rows, cols, float(eps)
        read = (W, x) if norm_weight is None else (W, x, norm_weight)
        options = {"RESIDUAL": DTYPES[residual.dtype], "NORM": int(norm_weight is not None)}
        product(where, read, rows, cols, args, pdl, **options)
    return residual


def expect_norm_out_proj(where, x, norm_weight, W, bias, residual, eps, *, memory=True):
    """Raise unless norm_out_proj can be called so."""
    expect_first(where, "W", W, ("rows", "cols"), HALVES)
    rows, cols = W.shape
    expect(where, "x", x, W, (cols,))
    if norm_weight is not None:
        expect(where, "norm_weight", norm_weight, W, (cols,))
    if bias is not None:
        expect(where, "bias", bias, W, (rows,))
    expect(where, "residual", residual, W, (rows,), (torch.float32, W.dtype))
    expect_eps(where, eps)
    if rows > MOST_ROWS:
        raise ValueError(f"{where}: W must have at most {MOST_ROWS} rows, got {rows}")
    if memory:
        expect_written(where, "residual", residual, x=x, norm_weight=norm_weight, W=W, bias=bias)
