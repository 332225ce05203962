"""norm_in_proj and norm_out_proj, the products of a token: looks at their arguments, and their launches."""

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2.arguments import expect_taps, expect_written
from kernels.mamba2.launches import HALVES, MOST_ROWS, product, ring_product
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_first, output

IN, OUT = Calls("norm_in_proj", outs=2), Calls("norm_out_proj")


def norm_in_proj(
    residual, norm_weight, W, eps=1e-5, *, bias=None, conv_state=None, conv_weight=None, conv_bias=None, inner=0,
    bulk=False, ahead=None, out=None, pdl=False,
):  # fmt: skip
    """W · RMSNorm(residual) + bias, and a step of the convolution of its channels, where there is one.
    residual     (hidden,) float32 or like W;  norm_weight (hidden,) like W
    W            (rows, hidden) float16 or bfloat16: of a layer z (inner rows), xBC (channels), dt
    bias         (rows,) like W, or None
    conv_state   (width − 1, channels) like W, the inputs before this one, oldest first: written in place
    conv_weight  (channels, width) float32;  conv_bias (channels,) float32 or None
    inner        rows in front of the channels
    pdl          as in kernels/fusion; conv_state, too, is read at once
    bulk         whether TMA brings the weights, some at a time (rows_ring.cuh), where the card is of compute capability
                 9.0 or newer and sizes allow it: for launches with pdl among others
    ahead        the matrix of the next such product, (rows, hidden) like W, some of which is then brought into L2, or
                 None
    → (rows,) like W: z, silu of the convolution, dt. Moves 2 · rows · hidden bytes in one launch."""
    where, options = "norm_in_proj", (eps, inner, bool(pdl), bool(bulk))
    others = residual, norm_weight, W, bias, conv_weight, conv_bias
    if (done := IN.run(options, out, conv_state, *others, ahead)) is not None:
        return done[0]
    y, width = expect_norm_in_proj(where, *others, eps, conv_state, inner, out)
    expect_ahead(where, W, ahead)
    rows, cols = W.shape
    channels = 0 if conv_state is None else conv_state.shape[1]
    with IN.preparing(options, (out, conv_state), (y, conv_state), (*others, ahead)):
        args, sizes = (*others, conv_state, y), (inner, channels, float(eps))
        options = {"RESIDUAL": DTYPES[residual.dtype], "WIDTH": width}
        read = W, residual, norm_weight
        if not (bulk and ring_product("in_proj_ring", read, args, sizes, ahead, pdl, **options)):
            product(where, read, rows, cols, (*args, rows, cols, *sizes), pdl, **options)
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


def norm_out_proj(x, norm_weight, W, residual, eps=1e-5, *, bias=None, bulk=False, ahead=None, pdl=False):
    """residual += W · RMSNorm(x) + bias, in place. Returns residual.
    x (cols,) float16 or bfloat16, norm_weight (cols,) like x, or None for no norm, W (rows, cols) and bias (rows,) like
    x, residual (rows,) float32 or like x; bulk and ahead as in norm_in_proj. Moves 2 · rows · cols bytes, 2 · rows ·
    cols flops.
    """
    where, options = "norm_out_proj", (eps, bool(pdl), bool(bulk))
    others = x, norm_weight, W, bias
    if (done := OUT.run(options, residual, *others, ahead)) is not None:
        return done
    expect_norm_out_proj(where, *others, residual, eps)
    expect_ahead(where, W, ahead)
    rows, cols = W.shape
    with OUT.preparing(options, (residual,), (residual,), (*others, ahead)):
        args = *others, residual
        read = (W, x) if norm_weight is None else (W, x, norm_weight)
        options = {"RESIDUAL": DTYPES[residual.dtype], "NORM": int(norm_weight is not None)}
        if not (bulk and ring_product("out_proj_ring", read, args, (float(eps),), ahead, pdl, **options)):
            product(where, read, rows, cols, (*args, rows, cols, float(eps)), pdl, **options)
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


def expect_ahead(where, W, ahead):
    """Raise unless this can be the matrix that comes next."""
    if ahead is not None:
        expect(where, "ahead", ahead, W, ("rows", "hidden"))
