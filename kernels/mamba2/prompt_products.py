"""The two products of a prompt's layer with what stands beside them: in_proj with the norm's root and the convolution,
out_proj with the residual stream and the next norm's sums (prompt_in.cu, prompt_out.cu, conv_edges.cu).

    between  what one product leaves for the next: of a run of tokens, made once for all layers

A layer is then in_proj, the convolution's edges, the scan, the gated norm, out_proj: five launches, and neither the
inputs of the convolution nor the sums of out_proj go to memory and back. Sums are those of kernels/matmul, float32; the
normed residual is rounded before its root is taken out, not behind it, which is as exact.
"""

import functools
from typing import NamedTuple

import torch

from kernels.fusion.arguments import expect_eps
from kernels.mamba2.arguments import expect_inner, expect_rows_of, expect_taps
from kernels.mamba2.launches import HALVES, HERE, flat
from kernels.matmul.launching import BOX, tensor_map
from kernels.matmul.plan import plan
from lab import cuda, cuda_driver
from lab.card import multiprocessors, shared_memory
from lab.tensors import DTYPES, expect, expect_first

TILE, CLUSTER, STRIP = (128, 256, 2), (2, 1), 64  # of planned.cu; tokens that a warpgroup convolves by itself
LINE = 64  # numbers in 128 bytes: a row that begins within a line of L2 makes each reader ask for one line more
LEAST = 1024  # tokens: with fewer, tiles of another size are faster than what is saved


class Between(NamedTuple):
    """Of `tokens` tokens on their way through the layers."""

    normed: torch.Tensor  # (tokens, hidden): in_proj's factor
    projected: torch.Tensor  # (tokens, in_rows): z, x, B, C, dt, each row at a multiple of 128 bytes
    squares: torch.Tensor  # (tokens, parts) float32: sums of residual² over columns
    roots: tuple  # two (tokens,) float32: of this norm and of the one before, by turns
    edges: torch.Tensor  # (strips, 2 (width - 1), channels): inputs of the convolution, which two tiles need


def refusal(shape, dtype, device):
    """Why the layers of this shape (kernels/mamba2/shapes.py, or a model's config) cannot be done so; None if they can."""
    if dtype not in HALVES:
        return f"weights are {dtype}"
    if shape.d_inner % STRIP or shape.channels % STRIP:
        return f"d_inner and the convolution's channels are no multiples of {STRIP}"
    if shape.hidden % 8 or shape.in_rows % 8:
        return "hidden or in_proj's rows are no multiple of 8"
    if device.type == "cuda" and cuda_driver.capability(device.index or 0) != (9, 0):
        return "the card has no wgmma"
    return None


def between(shape, tokens, width, like):
    """Between, of one sequence, on the device of `like` and of its dtype."""
    make = functools.partial(torch.empty, device=like.device)
    parts, strips = -(-shape.hidden // TILE[1]), -(-tokens // STRIP)
    projected = make(tokens, -(-shape.in_rows // LINE) * LINE, dtype=like.dtype)[:, : shape.in_rows]
    return Between(
        make(tokens, shape.hidden, dtype=like.dtype), projected,
        make(tokens, parts), (make(tokens), make(tokens)),
        make(strips, 2 * (width - 1), shape.channels, dtype=like.dtype),
    )  # fmt: skip


def in_proj(x, W, conv_weight, conv_bias, state, made, inner, *, squares=None, before=None, after=None, eps=1e-5,
            pdl=False, **options):  # fmt: skip
    """made.projected = x Wᵀ with the norm's root, its channels behind the convolution and silu. Returns it.

    x            (tokens, hidden) float16 or bfloat16: normed, or, with squares, as out_proj leaves it
    W            (in_rows, hidden) like x, of which `inner` rows stand ahead of the convolution's channels
    conv_weight  (channels, width) float32, conv_bias (channels,) float32 or None
    state        (1, width - 1, channels) like x, or None for zeros: the inputs before the first, written in place
    squares      (tokens, parts) float32, before (tokens,) float32 or None: of out_proj; after (tokens,): the root, written
    """
    where = "in_proj"
    expect_first(where, "W", W, ("in_rows", "hidden"), HALVES)
    rows, hidden = W.shape
    expect(where, "x", x, W, ("tokens", hidden))
    tokens, channels = len(x), made.edges.shape[2]
    width = expect_taps(where, conv_weight, conv_bias, W, channels)
    expect_eps(where, eps)
    if inner % STRIP or channels % STRIP or not 0 <= inner <= rows - channels:
        raise ValueError(f"{where}: inner and channels must be multiples of {STRIP} in {rows} rows, got {inner}, {channels}")
    expect_rows_of(where, "made.projected", made.projected, W, (tokens, rows))
    expect_inner(where, "made.projected", made.projected, 1)
    expect(where, "made.edges", made.edges, W, (-(-tokens // STRIP), 2 * (width - 1), channels))
    if state is not None:
        expect(where, "state", state, W, (1, width - 1, channels))
    parts = 0
    if squares is not None:
        expect(where, "squares", squares, W, (tokens, "parts"), (torch.float32,))
        expect(where, "after", after, W, (tokens,), (torch.float32,))
        parts = squares.shape[1]
        if before is not None:
            expect(where, "before", before, W, (tokens,), (torch.float32,))
    y, dtype = made.projected, DTYPES[W.dtype]
    args = squares, before, after, conv_weight, conv_bias, made.edges
    sizes = tokens, rows, hidden, parts, inner, channels, y.stride(0), float(eps)
    report = _launch("prompt_in", x, W, y, (flat(y), *args), sizes, pdl, options, WIDTH=width)
    edges = _kernel("conv_edges", DTYPE=dtype, WIDTH=width)
    grid = len(made.edges), -(-channels // 1024)
    more = {k: v for k, v in options.items() if k == "check_races"}
    convolved = flat(y[:, inner:])
    sizes = tokens, channels, y.stride(0)
    edges(grid, 128, made.edges, state, conv_weight, conv_bias, convolved, state, *sizes, pdl=pdl, **more)
    return report if options else y


def out_proj(x, W, residual, norm_weight, made, *, root=None, before=None, pdl=False, **options):
    """residual += root · x Wᵀ in place; made.normed = residual · norm_weight · before, made.squares = its sums of squares.

    x (tokens, d_inner), W (hidden, d_inner) float16 or bfloat16, residual (tokens, hidden) float32, norm_weight (hidden,)
    like x: of the next norm; root (tokens,) float32: of a norm of x that is still to come, or None for 1; before: the root of the norm ahead, or None for 1. Returns residual.
    """
    where = "out_proj"
    expect_first(where, "W", W, ("hidden", "d_inner"), HALVES)
    hidden, cols = W.shape
    expect(where, "x", x, W, ("tokens", cols))
    tokens = len(x)
    expect(where, "residual", residual, W, (tokens, hidden), (torch.float32,))
    expect(where, "norm_weight", norm_weight, W, (hidden,))
    expect(where, "made.normed", made.normed, W, (tokens, hidden))
    expect(where, "made.squares", made.squares, W, (tokens, -(-hidden // TILE[1])), (torch.float32,))
    for name, value in (("root", root), ("before", before)):
        if value is not None:
            expect(where, name, value, W, (tokens,), (torch.float32,))
    args = residual, norm_weight, root, before, made.squares
    report = _launch("prompt_out", x, W, made.normed, args, (tokens, hidden, cols), pdl, options)
    return report if options else residual


def _launch(name, x, W, y, args, sizes, pdl, options, **macros):
    """A product as planned.cu is launched, of tiles of one shape."""
    tokens, rows, cols = sizes[:3]
    p = plan(tokens, rows, cols, multiprocessors(x.device), shared_memory(x.device), tile=TILE, cluster=CLUSTER, splits=1)
    run = _kernel(name, SHAPE=p.shape(DTYPES[W.dtype], "ThroughTma"), **macros)
    maps = tensor_map(x, p.x_box), tensor_map(W, p.w_box), tensor_map(y, BOX)
    return run(p.blocks, p.threads, *maps, *args, *sizes, shared=p.shared, cluster=(p.together, 1, 1), pdl=pdl, **options)


@functools.cache
def _kernel(name, **options):
    hopper = None if name == "conv_edges" else "sm_90a"
    module = cuda.load(HERE / f"{name}.cu", [f"-D{key}={value}" for key, value in options.items()], arch=hopper)
    return module[name]
