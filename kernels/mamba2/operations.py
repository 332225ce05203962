"""embed, norms and products: looks at their arguments, and their launches (see __init__.py)."""

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2.arguments import expect_half, expect_inner, expect_rows_of, expect_taps, expect_written
from kernels.mamba2.launches import HALVES, MOST_ROWS, flat, kernel, product
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_first, output

EMBED, GATED, ADDED = Calls("embed"), Calls("gated_norm"), Calls("add_norm", outs=2)
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


def add_norm(x, residual, weight, eps=1e-5, *, out=None, pdl=False):
    """residual += x, in place, and RMSNorm of it: x (tokens, hidden) float16 or bfloat16, or None for nothing to add;
    residual (tokens, hidden) float32 or like weight, weight (hidden,) → (tokens, hidden), like weight."""
    where, options = "add_norm", (eps, bool(pdl))
    if (done := ADDED.run(options, out, residual, x, weight)) is not None:
        return done[0]
    expect_first(where, "weight", weight, ("hidden",), HALVES)
    expect(where, "residual", residual, weight, ("tokens", len(weight)), (torch.float32, weight.dtype))
    if x is not None:
        expect(where, "x", x, weight, tuple(residual.shape))
    expect_eps(where, eps)
    result = output(where, out, weight, tuple(residual.shape), x=x, weight=weight, residual=residual)
    expect_written(where, "residual", residual, x=x, weight=weight)
    tokens, cols = residual.shape
    with ADDED.preparing(options, (out, residual), (result, residual), (x, weight)):
        args = x, residual, weight, result, cols, float(eps)
        tensors = [t for t in (x, residual, weight, result) if t is not None]
        _rows(where, cols, tensors, (cols,), (tokens,), args, pdl, RESIDUAL=DTYPES[residual.dtype])
    return result


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
