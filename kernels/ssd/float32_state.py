"""float32, kernel 3 of five: what each chunk adds to the state by its end, and whether all of it is finite.

    L seqlen   Q chunk_size   H nheads   P headdim   G ngroups   N dstate   W: N filled up to a tile

    state (batch, chunks, H, P, N):  sum over tokens j of the chunk of  2**(cum_last - cum_j) dt_j x_j B_j^T

As chunk_state.py. x, weighted, is cut into its parts here, where it is read; B comes cut (float32_scores.py).
"""

import torch
import triton
import triton.language as tl

from kernels.ssd import machine_code
from kernels.ssd.float32_scores import TILE, cut, either, three_products
from kernels.ssd.launching import filled_up, launch

# Two warps: Triton takes mma.sync, whose factors come from registers, and loads go to shared memory three deep, by
# cp.async. Four: wgmma, which would read what cp.async wrote without the fence that PTX asks for (float32_scores.py):
# so loads go through registers, one step ahead.
SYNC = {"columns": 32, "depth": 128, "span": 16, "stages": 3, "ahead": 0, "num_warps": 2}
WGMMA = {"columns": 64, "depth": 128, "span": 16, "stages": 1, "ahead": 1, "num_warps": 4}


@triton.jit
def _tokens(x, x_token, cut_B, start, at, s, p, n, end, HEADDIM: tl.constexpr, W: tl.constexpr):
    """x and both parts of B, of tokens at + s of the chunk, which begins at token `start`."""
    xs = x + (start + at) * x_token + s[:, None] * x_token + p[None, :]
    bs = cut_B + (at + s)[:, None] * (2 * W) + n[None, :]
    there = (at + s < end)[:, None] & (p < HEADDIM)[None, :]
    return tl.load(xs, there, other=0), tl.load(bs), tl.load(bs + W)


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads", "heads_a_group"])
def state_kernel(
    x, cut_B, dt, cum, states, strange, seqlen, nheads, nchunks, heads_a_group, x_batch, x_token, x_head,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """grid (H * chunks, tiles of a state, batch). P and N: a tile of the state; SPAN: tokens at a time, whose loads are
    under way STAGES deep, in shared memory; or, where AHEAD, one step ahead in registers."""
    chunk, h = (tl.program_id(0) // nheads).to(tl.int64), (tl.program_id(0) % nheads).to(tl.int64)
    b, tiles = tl.program_id(2).to(tl.int64), W // N
    p = tl.program_id(1) // tiles * P + tl.arange(0, P)
    n = tl.program_id(1) % tiles * N + tl.arange(0, N)
    s, start = tl.arange(0, SPAN), chunk * Q
    end = tl.minimum(seqlen - start, Q).to(tl.int32)
    row, state = ((b * nheads + h) * nchunks + chunk) * Q, (b * nchunks + chunk) * nheads + h
    x += b * x_batch + h * x_head
    cut_B += ((b * (nheads // heads_a_group) + h // heads_a_group) * nchunks * Q + start) * (2 * W)
    last = tl.load(cum + row + Q - 1)
    acc = tl.full((P, N), 0, tl.float32)
    if AHEAD:
        xj, b_high, b_low = _tokens(x, x_token, cut_B, start, 0, s, p, n, end, HEADDIM, W)
    for at in tl.range(0, Q, SPAN, num_stages=STAGES):
        if AHEAD:
            x_now, high, low, after = xj, b_high, b_low, tl.minimum(at + SPAN, Q - SPAN)
            xj, b_high, b_low = _tokens(x, x_token, cut_B, start, after, s, p, n, end, HEADDIM, W)
        else:
            x_now, high, low = _tokens(x, x_token, cut_B, start, at, s, p, n, end, HEADDIM, W)
        left = tl.exp2(last - tl.load(cum + row + at + s)) * tl.load(dt + row + at + s)
        x_high, x_low = cut(x_now * left[:, None], cut_B.dtype.element_ty)
        acc = three_products(tl.trans(x_high), tl.trans(x_low), high, low, acc)
    unlike = tl.max(tl.max(tl.where(acc - acc == 0, 0, 1), 1), 0)  # 0 * NaN is NaN: no NaN of x is missing in the sum
    tl.store(strange + state * tl.num_programs(1) + tl.program_id(1), unlike)
    to = states + state * HEADDIM * DSTATE + p[:, None] * DSTATE + n[None, :]
    tl.store(to, acc, (p < HEADDIM)[:, None] & (n < DSTATE)[None, :])


def run(x, cut_B, dt, cum, dstate, **chosen):
    """(states, strange) as chunk_state.run, of tensors that have been looked at. chosen: other than `plan` says."""
    batch, seqlen, nheads, headdim = x.shape
    ngroups, W = cut_B.shape[1], cut_B.shape[4]
    nchunks, chunk_size = dt.shape[2:]
    states = x.new_empty((batch, nchunks, nheads, headdim, dstate))

    def launched(way):
        kernel, P, N, options = tiling(headdim, W, **way)
        grid = nheads * nchunks, -(-headdim // P) * (W // N), batch
        strange = x.new_empty((batch, nchunks, nheads, grid[1]), dtype=torch.int32)
        numbers = seqlen, nheads, nchunks, nheads // ngroups, *x.stride()[:3]
        constants = headdim, dstate, W, chunk_size, P, N, min(way["span"], chunk_size), way["stages"], way["ahead"]
        launch(kernel, grid, (x, cut_B, dt, cum, states, strange), numbers, constants, **options)
        return states, strange

    kind = "state", headdim, dstate, chunk_size
    return either(launched, kind, x, W, min(TILE, chunk_size), WGMMA | chosen, SYNC | chosen, most=64)


def tiling(headdim, W, columns, depth, num_warps, **_):
    """(the kernel, P, N, options of its launch)"""
    kernel = machine_code.checked(state_kernel) if num_warps >= 4 else state_kernel
    return kernel, min(columns, filled_up(headdim)), min(depth, W), {"num_warps": num_warps}
