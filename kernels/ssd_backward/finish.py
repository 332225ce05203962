"""Launches 5 to 7 of few: the gradients of dt, A, dt_bias and D, and of B and C, of which other launches left parts.

    H nheads   L seqlen   T tokens of a chunk

A token's a_t = exp(A dt_t) stands between all tokens before it and all from it on. What goes over it inside the chunk
is the sum over i >= t of rise_i - dt_i (direct_i - gone_i): all that arrives at these tokens, less what has begun among
them. What comes from before the chunk is in rise; what goes on to its end is counted by itself, dt_j gone_j for j < t,
and `crossing` from end to end. Sums begin anew at each chunk, or digits would be lost.

    d(A dt_t) = sum_{i >= t} (rise_i - dt_i (direct_i - gone_i)) + sum_{j < t} dt_j gone_j + a_chunk crossing
    d(dt_t) = A d(A dt_t) + direct_t,  through limit and softplus;  dA = sum_t dt_t d(A dt_t)

`ddt` leaves the sums over a chunk for A and dt_bias, `totals` adds them up over chunks and batch, in one order.
"""

import triton
import triton.language as tl

from kernels.ssd.launching import launch

HEADS = 8  # of a program of ddt
SPAN = 1024  # numbers that `join` takes at a time
NOTHING = tl.constexpr(-40.0)  # A dt: of what decays like this, by 2**-57, no digit is left in a sum
ROWS = 64  # of what `totals` adds up, at a time


@triton.jit
def _add_unless_new(sum_a, new_a, sum_b, new_b):
    """Two neighbouring stretches, as chunk_cumsum.py adds them."""
    return tl.where(new_b != 0, sum_b, sum_a + sum_b), new_a | new_b


@triton.jit(do_not_specialize=["seqlen", "nchunks", "nheads"])
def ddt_kernel(
    sums, rises, crossing, dts, cum, dt, A, dt_bias, seq_idx, ddt, dA, dbias, dD,
    seqlen, nchunks, nheads, sums_l, dt_b, dt_l, low, high,
    TILES: tl.constexpr, RISES: tl.constexpr, T: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr,
    D_TOO: tl.constexpr,
):  # fmt: skip
    """grid (chunks, tiles of heads, batch)."""
    chunk, b = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    h, t = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, T)
    token = chunk * T + t
    heads = h < nheads
    there = heads[:, None] & (token < seqlen)[None, :]
    direct, gone = tl.zeros((HEADS, T), tl.float32), tl.zeros((HEADS, T), tl.float32)
    skipped = tl.zeros((HEADS, T), tl.float32)
    rise, crossed = tl.zeros((HEADS, T), tl.float32), tl.zeros((HEADS,), tl.float32)
    for tile in range(TILES):
        at = sums + (((b * nheads + h) * TILES + tile) * nchunks + chunk)[:, None] * T + t[None, :]
        direct += tl.load(at, there, other=0)
        gone += tl.load(at + sums_l, there, other=0)
        rise += tl.load(at + 2 * sums_l, there, other=0)
        rise += tl.load(at + 3 * sums_l, there & (t >= T // 2)[None, :], other=0)
        if D_TOO:
            skipped += tl.load(at + 4 * sums_l, there, other=0)
    for tile in range(RISES):
        line = ((b * nheads + h) * RISES + tile) * nchunks + chunk
        rise += tl.load(rises + line[:, None] * T + t[None, :], there, other=0)
        crossed += tl.load(crossing + line, heads, other=0)
    row = ((b * nheads + h) * nchunks + chunk) * T
    step = tl.load(dts + row[:, None] + t[None, :], there, other=0)
    crossed *= tl.exp2(tl.load(cum + row + T - 1, heads, other=0))
    gone *= step
    over = tl.where(there, rise - (step * direct - gone), 0)
    if seq_idx is None:
        over = tl.cumsum(over, 1, reverse=True)
    else:
        seq_idx += b * seqlen
        mine = tl.load(seq_idx + token, token < seqlen, other=-1)
        after = tl.load(seq_idx + token + 1, token + 1 < seqlen, other=-1)
        ends = ((mine != after) & (t < T - 1)).to(tl.int32)
        over, _ = tl.associative_scan(
            (over, tl.broadcast_to(ends[None, :], (HEADS, T))), 1, _add_unless_new, reverse=True
        )
        found = tl.load(seq_idx + tl.maximum(chunk * T - 1, 0))
        left = tl.load(seq_idx + tl.minimum((chunk + 1) * T, seqlen) - 1)
        crossed = tl.where(found == left, crossed, 0)
    over += tl.cumsum(gone, 1) - gone + crossed[:, None]
    if seq_idx is not None:  # before a sequence's first token nothing is left that could decay
        fresh = mine != tl.load(seq_idx + tl.maximum(token - 1, 0), token < seqlen, other=-1)
        over = tl.where(fresh[None, :], 0, over)
    rate = tl.load(A + h, heads, other=0)[:, None]
    over = tl.where(rate * step < NOTHING, 0, over)  # else what rounding has left, times a large step
    found_dt = rate * over + direct
    raw = tl.load(dt + b * dt_b + token[None, :] * dt_l + h[:, None], there, other=0).to(tl.float32)
    if dt_bias is not None:
        raw += tl.load(dt_bias + h, heads, other=0).to(tl.float32)[:, None]
    slope = tl.full((HEADS, T), 1, tl.float32)
    if SOFTPLUS:
        slope = tl.where(raw > 20, 1.0, 1 / (1 + tl.exp(-raw)))
    # At a limit dt is what the limit says: `step` has been there, and what it was before is known from raw.
    within = _softplus(raw) if SOFTPLUS else raw
    found_dt = tl.where(there & (within >= low) & (within <= high), found_dt * slope, 0)
    tl.store(ddt + (b * seqlen + token)[None, :] * nheads + h[:, None], found_dt.to(ddt.dtype.element_ty), there)
    part = (b * nchunks + chunk) * nheads + h
    tl.store(dA + part, tl.sum(tl.where(there, over * step, 0), 1), heads)
    tl.store(dbias + part, tl.sum(found_dt, 1), heads)
    if D_TOO:
        tl.store(dD + part, tl.sum(skipped, 1), heads)


@triton.jit
def _softplus(value):
    """log(1 + e**value), as chunk_cumsum.py has it."""
    e = tl.exp(-tl.abs(value))
    s = e / (2 + e)
    u = s * s
    series = 1 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7 + u * (1 / 9 + u * (1 / 11 + u * (1 / 13 + u / 15))))))
    return tl.where(value > 0, value, 0) + 2 * s * series


@triton.jit(do_not_specialize=["size", "of_token", "runs", "inter_runs"])
def join_kernel(
    dB_parts, dC_parts, dB, dC, size, of_token, seqlen, runs, inter_runs, HALF: tl.constexpr, SPAN: tl.constexpr
):
    """grid (spans, 2, 1): dB and dC, each the sum of what the runs have of it. Those of dC that came from a chunk's
    first block, HALF tokens, are there for the second alone. of_token: numbers of a token"""
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    there = at < size
    total = tl.zeros((SPAN,), tl.float32)
    if tl.program_id(1) == 0:
        for _ in range(runs + inter_runs):
            total += tl.load(dB_parts + at, there, other=0)
            dB_parts += size
        tl.store(dB + at, total.to(dB.dtype.element_ty), there)
    else:
        for _ in range(runs + inter_runs):
            total += tl.load(dC_parts + at, there, other=0)
            dC_parts += size
        second = there & (at // of_token % seqlen // HALF % 2 == 1)
        for _ in range(runs):
            total += tl.load(dC_parts + at, second, other=0)
            dC_parts += size
        tl.store(dC + at, total.to(dC.dtype.element_ty), there)


@triton.jit
def _column(parts, to, rows, columns, c, there, ROWS: tl.constexpr, SPAN: tl.constexpr):
    """to[c] = sum over rows of parts (rows, columns), in one order."""
    total = tl.zeros((ROWS, SPAN), tl.float32)
    for first in range(0, rows, ROWS):
        r = first + tl.arange(0, ROWS)
        at = parts + r.to(tl.int64)[:, None] * columns + c[None, :]
        total += tl.load(at, (r < rows)[:, None] & there[None, :], other=0)
    tl.store(to + c, tl.sum(total, 0).to(to.dtype.element_ty), there)


@triton.jit(do_not_specialize=["rows", "nheads"])
def totals_kernel(
    dA_parts, dbias_parts, dD_parts, skip, dA, dbias, dD, rows, nheads,
    P: tl.constexpr, WP: tl.constexpr, D_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grid (H, 1, 1). rows: chunks of the batch; skip has two for each."""
    h = tl.program_id(0)
    c = tl.arange(0, 1)
    _column(dA_parts + h, dA + h, rows, nheads, c, c < 1, ROWS, 1)
    if dbias is not None:
        _column(dbias_parts + h, dbias + h, rows, nheads, c, c < 1, ROWS, 1)
    if dD is not None:
        if D_ROWS:
            p = tl.arange(0, WP)
            _column(skip + h * P, dD + h * P, 2 * rows, nheads * P, p, p < P, ROWS, WP)
        else:
            _column(dD_parts + h, dD + h, rows, nheads, c, c < 1, ROWS, 1)


def ddt(problem, sums, rises, crossing, dts, cum, dt, A, dt_bias, seq_idx, softplus, limit, grad, skips):
    """Writes dt's gradient; returns the parts of those of A and dt_bias, (batch, chunks, H), and,
    if `skips`, of D's."""
    batch, seqlen, nheads = problem[:3]
    nchunks, T = cum.shape[2:]
    parts = cum.new_empty((3, batch, nchunks, nheads))
    tensors = sums, rises, crossing, dts, cum, dt, A, dt_bias, seq_idx, grad, *parts
    numbers = seqlen, nchunks, nheads, sums[0].numel(), dt.stride(0), dt.stride(1), *map(float, limit)
    constants = sums.shape[3], rises.shape[2], T, HEADS, bool(softplus), skips
    launch(ddt_kernel, (nchunks, -(-nheads // HEADS), batch), tensors, numbers, constants, num_warps=4)
    return parts


def join(dB_parts, dC_parts, dB, dC, plan):
    """Add up what the runs have of dB and dC: those inside of chunks, then those from beyond them; then, of dC, those
    from the chunk's first block."""
    size, of_token = dB.numel(), dB.shape[2] * dB.shape[3]
    numbers = size, of_token, dB.shape[1], plan.runs, plan.inter_runs
    tensors = dB_parts, dC_parts, dB, dC
    launch(join_kernel, (-(-size // SPAN), 2, 1), tensors, numbers, (plan.rows, SPAN), num_warps=4)


def totals(problem, parts, skip, dA, dbias, dD):
    """Writes the gradients of A, dt_bias and D; the last two None where they are not asked for."""
    headdim = problem.headdim
    rows = parts.shape[1] * parts.shape[2]
    width = max(16, 1 << (headdim - 1).bit_length())
    tensors = *parts, skip, dA, dbias, dD
    constants = headdim, width, dD is not None and dD.ndim == 2, ROWS
    launch(totals_kernel, (problem.nheads, 1, 1), tensors, (rows, problem.nheads), constants, num_warps=4)
