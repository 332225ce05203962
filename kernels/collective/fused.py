"""The exchange in one launch with what stands beside it: a residual and a norm, or the product whose sums it moves."""

import functools
from math import ceil

import torch

from kernels.collective import launches
from kernels.collective.arguments import expect_group, expect_no_overlap, expect_tensors, in_words
from kernels.collective.group import HERE, group_of, module
from kernels.collective.launches import NOT_YET, WORD
from kernels.fusion.launches import PITCH, plan, shape_of
from lab import cuda

THREADS, MOST_WORDS = 512, 8  # norm.cu: threads of a row at most, and words of a thread


def all_reduce_norm(tensors, residuals, weights, eps=1e-5, *, out=None, group=None, pdl=False):
    """residual += the sum of tensors over devices, rounded; returns its RMSNorm, a tensor for each device.

    tensors    (rows, hidden) of each device: its part of the sum. Not changed
    residuals  (rows, hidden), the same on all devices; written in place
    weights    (hidden,), the same on all devices. With pdl no launch ahead writes them
    out        tensors like tensors to write into

    Dtypes float32, float16, bfloat16; the norm is of the rounded residual. A block has a row, of at most 65,536 bytes.
    One launch for up to 512 rows on cards, 6 on the SIMT machine; beyond, all_reduce, which rounds the sum, and a
    launch that adds and norms.
    Errors and `group` as for the rungs.
    """
    where = "all_reduce_norm"
    expect_group(where, "tensors", tensors, group)
    count = len(group.ranks) if group is not None else None
    expect_tensors(where, "tensors", tensors, count=count, shape=("rows", "hidden"))
    rows, hidden = x_shape = tuple(tensors[0].shape)
    for n, x in enumerate(tensors):
        if tuple(x.shape) != x_shape:
            raise ValueError(f"{where}: tensors[{n}] must have shape {x_shape}, like tensors[0], got {tuple(x.shape)}")
    expect_tensors(where, "residuals", residuals, like=tensors, shape=x_shape, written=True)
    expect_tensors(where, "weights", weights, like=tensors, shape=(hidden,))
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < float("inf"):
        raise ValueError(f"{where}: eps must be a number, 0 or more, got {eps!r}")
    words = -(-hidden * tensors[0].element_size() // WORD)
    if words > THREADS * MOST_WORDS:
        most = THREADS * MOST_WORDS * WORD // tensors[0].element_size()
        raise ValueError(f"{where}: tensors must have at most {most} columns of {tensors[0].dtype}, got {hidden}")
    if out is None:
        out = [x.new_empty(x.shape) for x in tensors]
    else:
        expect_tensors(where, "out", out, like=tensors, shape=x_shape, written=True)
        expect_no_overlap(where, "out", out, tensors=tensors, residuals=residuals, weights=weights)
    expect_no_overlap(where, "residuals", residuals, tensors=tensors, weights=weights)
    group = group or group_of(tensors)
    each = ceil(words / THREADS)
    threads = 32 * ceil(ceil(words / each) / 32)
    made = module("residual_norm", tensors[0].dtype, len(group), group.blocks, f"-DROW_WORDS={each}")
    wide = int(in_words(tensors, residuals, weights, out) and hidden * tensors[0].element_size() % WORD == 0)
    if rows > group.blocks:
        summed = [x.clone() for x in tensors]
        launches.two_shot(group, summed, pdl)
        kernel, args = made["residual_norm_alone"], (hidden, float(eps), wide)
        each_device = zip(summed, residuals, weights, out)
        runs = [(kernel, rows, threads, (*tensors_of_one, *args)) for tensors_of_one in each_device]
    else:
        fill = NOT_YET[tensors[0].element_size()]
        numbers = 2 * len(group) * group.blocks * each * THREADS * WORD // 4
        mail = group.mail((where, each, fill), numbers, group.blocks, fill)
        runs = [
            (made["residual_norm"], rows, threads,
             (tensors[n], residuals[n], weights[n], out[n], mail.boxes[r], mail.peers, mail.numbers[r],
              group.told_args[r], r, group.limit, hidden, float(eps), wide))
            for n, r in enumerate(group.ranks)
        ]  # fmt: skip
    group.launch(where, runs, pdl)
    return out


def product(Ws, xs, residuals, *, out=None, group=None, pdl=False):
    """residual + the sum of W x over devices, a tensor for each device: what W_o and W_down of a layer are when their
    columns are split.

    Ws         (rows, cols) of each device: its columns, as many as the others have. No launch ahead writes them
    xs         (cols,): the part of x that meets them
    residuals  (rows,), the same on all devices
    out        tensors like residuals to write into

    Dtypes float16 and bfloat16; sums float32, rounded once. Bytes: 2 rows cols of weights, and over the link 8 rows to
    each peer. Errors and `group` as for the rungs.
    """
    where, halves = "product", (torch.float16, torch.bfloat16)
    expect_group(where, "Ws", Ws, group)
    count = len(group.ranks) if group is not None else None
    expect_tensors(where, "Ws", Ws, count=count, shape=("rows", "cols"), dtypes=halves)
    rows, cols = tuple(Ws[0].shape)
    for n, W in enumerate(Ws):
        if tuple(W.shape) != (rows, cols):
            raise ValueError(f"{where}: Ws[{n}] must have shape {(rows, cols)}, like Ws[0], got {tuple(W.shape)}")
    expect_tensors(where, "xs", xs, like=Ws, shape=(cols,))
    expect_tensors(where, "residuals", residuals, like=Ws, shape=(rows,))
    if out is None:
        out = [x.new_empty((rows,)) for x in residuals]
    else:
        expect_tensors(where, "out", out, like=Ws, shape=(rows,), written=True)
        expect_no_overlap(where, "out", out, Ws=Ws, xs=xs, residuals=residuals)
    group = group or group_of(Ws)
    found = plan(Ws[0].device, rows, cols, 1) if cols % 8 == 0 and in_words(Ws, xs) else None
    if found is not None and not group.devices.on_cards:  # the SIMT machine's patience
        grid, threads, shared, *sizes = found
        few = min(grid, max(3, ceil(rows / 256)))
        shared += PITCH * 4 * sizes[1] * (ceil(rows / sizes[1] / few) - ceil(rows / sizes[1] / grid))
        found = few, threads, shared, *sizes
    if found is None:
        kernel, grid, threads, shared, sizes = "product_any", -(-rows // 4), 128, 0, (1, 2, 1)
    else:
        kernel, (grid, threads, shared, *sizes) = "product", found
    made = product_module(Ws[0].dtype, len(group), tuple(sizes))
    mail = group.mail((where, rows, cols, grid), 2 * len(group) * rows * 2, grid)
    runs = [
        (made[kernel], grid, threads,
         (Ws[n], xs[n], residuals[n], out[n], mail.boxes[r], mail.peers, mail.numbers[r], group.told_args[r], r,
          group.limit, rows, cols), shared)
        for n, r in enumerate(group.ranks)
    ]  # fmt: skip
    group.launch(where, runs, pdl)
    return out


@functools.cache
def product_module(dtype, devices, sizes):
    return cuda.load(HERE / "product.cu", (f"-DSHAPE={shape_of(dtype, *sizes)}", f"-DDEVICES={devices}"))
