"""embed and norms: looks at their arguments, and their launches (see __init__.py)."""

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2.arguments import expect_half, expect_inner, expect_rows_of, expect_written
from kernels.mamba2.launches import HALVES, flat, kernel
from lab.prepared import Calls
from lab.tensors import DTYPES, expect, expect_first, output

EMBED, GATED, ADDED = Calls("embed"), Calls("gated_norm"), Calls("add_norm", outs=2)


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
