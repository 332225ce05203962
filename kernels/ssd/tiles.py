"""What the programs of the fused rungs are made of: steps of the chunked form on tiles of one chunk and one head.

    t token of a chunk (Q of them)   p column of x (P)   n column of B and C (N)

Steps are numbered as in ref/ssd.py. Logarithms of decays are in base 2. Rows behind the end of the sequence hold zeros,
and change nothing: their dt is 0.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
EXACT = tl.constexpr("tf32x3")  # float32 factors in two parts of 11 bits, three products; 16-bit factors as they are
LONGEST = tl.constexpr(-200.0)  # step of a sum: 2**-200 is 0; see chunk_cumsum.py


@triton.jit
def of_head(x, dt, B, C, b, head, group, x_b, x_h, dt_b, B_b, B_g, C_b, C_g, column=0):
    """Where x, dt, B and C of one head of sequence b begin, and x at a column."""
    x += b * x_b + head * x_h + column
    dt += b * dt_b + head
    B += b * B_b + group * B_g
    C += b * C_b + group * C_g
    return x, dt, B, C


@triton.jit
def rates(A, dt_bias, head):
    """Of a head: log2 of the decay for a dt of 1, and what is added to its dt."""
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + head).to(tl.float32)
    return tl.load(A + head) * LOG2_E, bias


@triton.jit
def state_tile(row, ROWS: tl.constexpr, N: tl.constexpr, WP: tl.constexpr, WN: tl.constexpr):
    """Where a state of (ROWS, N) lies whose first row is `row`, and which elements of a tile (WP, WN) it has."""
    p, n = tl.arange(0, WP), tl.arange(0, WN)
    return (row + p)[:, None] * N + n[None, :], (p < ROWS)[:, None] & (n < N)[None, :]


@triton.jit
def first_state(initial, at, here, WP: tl.constexpr, WN: tl.constexpr):
    """The state before the first token: (WP, WN)."""
    state = tl.zeros((WP, WN), tl.float32)
    if initial is not None:
        state = tl.load(initial + at, here, other=0).to(tl.float32)
    return state


@triton.jit
def rows(base, start, stride: tl.constexpr, seqlen, COLUMNS: tl.constexpr, Q: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens `start` and on of one head or group: (Q, WIDTH), with zeros outside. The offset takes 64 bits."""
    t, c = tl.arange(0, Q), tl.arange(0, WIDTH)
    there = (start + t < seqlen)[:, None]
    if WIDTH != COLUMNS:
        there = there & (c < COLUMNS)[None, :]
    return tl.load(base + start.to(tl.int64) * stride + t.to(tl.int64)[:, None] * stride + c[None, :], there, other=0)


@triton.jit
def step_sizes(raw, there, bias, low, high, SOFTPLUS: tl.constexpr):
    """Step 1, first half: dt after bias, softplus and limits; 0 where there is no token. NaN stays NaN."""
    d = raw.to(tl.float32) + bias
    if SOFTPLUS:
        e = tl.exp(d)
        u = 1 + e
        # log(1 + e) to the last digits: what 1 + e has lost of a small e is put back
        d = tl.where(d > 20, d, tl.where(u == 1, e, tl.log(u) * (e / (u - 1))))
    d = tl.where(d < low, low, d)
    d = tl.where(d > high, high, d)
    return tl.where(there, d, 0)


@triton.jit
def log_decay(rate, d):
    """log2 of each token's decay. After a huge dt the sums, and the decays between later tokens, keep their digits."""
    a = rate * d
    return tl.where(a < LONGEST, LONGEST, a)


@triton.jit
def dt_tile(base, start, stride: tl.constexpr, seqlen, Q: tl.constexpr):
    """dt of tokens `start` and on of one head: (Q,), with zeros outside."""
    t = tl.arange(0, Q)
    return tl.load(base + start.to(tl.int64) * stride + t.to(tl.int64) * stride, start + t < seqlen, other=0)


@triton.jit
def chunk_decay(raw, start, seqlen, rate, bias, low, high, SOFTPLUS: tl.constexpr, Q: tl.constexpr):
    """Step 1: dt (Q,), log2 of the decay from the chunk's start through each token (Q,), and through all of it."""
    d = step_sizes(raw, start + tl.arange(0, Q) < seqlen, bias, low, high, SOFTPLUS)
    a = log_decay(rate, d)
    return d, tl.cumsum(a, 0), tl.sum(a, 0)


@triton.jit
def chunk_decay_once(raw, start, seqlen, rate, bias, low, high, SOFTPLUS: tl.constexpr, Q: tl.constexpr):
    """`chunk_decay`, but dt goes through the scan as well, unchanged: a scan's result is moved from layout to layout,
    where Triton would make dt anew, softplus and all."""
    d = step_sizes(raw, start + tl.arange(0, Q) < seqlen, bias, low, high, SOFTPLUS)
    a = log_decay(rate, d)
    total = tl.sum(a, 0)
    cum, d = tl.associative_scan((a, d), 0, _sum_and_last)
    return d, cum, total


@triton.jit
def _sum_and_last(a, d, next_a, next_d):
    return a + next_a, next_d


@triton.jit
def state_input(x, d, cum, total):
    """Of step 3: x (Q, P), weighted with dt and the decay from each token to the chunk's end. Its product with B is
    what the chunk adds to the state."""
    return tl.trans((x * (d * tl.exp2(total - cum))[:, None]).to(x.dtype))


@triton.jit
def triangle(cb, d, cum, Q: tl.constexpr):
    """Of step 5: C B^T (Q, Q), weighted with dt and the decay from token j to token i, where j <= i."""
    t = tl.arange(0, Q)
    m = cb * tl.exp2(cum[:, None] - cum[None, :]) * d[None, :]
    return tl.where(t[:, None] >= t[None, :], m, 0)


@triton.jit
def product(m, v, acc, Q: tl.constexpr):
    """acc + m @ v for a lower triangle m (Q, Q). No row sees what v holds behind it, though it be infinite or NaN."""
    if tl.sum(tl.sum(tl.abs(v.to(tl.float32)), 1), 0) < float("inf"):
        acc = tl.dot(m.to(v.dtype), v, acc, input_precision=EXACT)
    else:  # rare, and slow: one column of m and one row of v at a time
        t = tl.arange(0, Q)
        for j in range(Q):
            column = tl.sum(tl.where(t[None, :] == j, m, 0), 1)
            row = tl.sum(tl.where(t[:, None] == j, v, 0).to(tl.float32), 0)
            acc += tl.where((t >= j)[:, None], column[:, None] * row[None, :], 0)
    return acc


@triton.jit
def finish(y, acc, x, D, z, start, seqlen, y_l: tl.constexpr, z_l: tl.constexpr, D_ROWS: tl.constexpr,
           P: tl.constexpr, Q: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The end of step 5: D x, then silu(z), then to memory. y, z and D start at this head."""
    t, c = tl.arange(0, Q), tl.arange(0, WIDTH)
    if D is not None:
        if D_ROWS:
            acc += x * tl.load(D + c, c < P, other=0).to(tl.float32)[None, :]
        else:
            acc += x * tl.load(D).to(tl.float32)
    if z is not None:
        gate = rows(z, start, z_l, seqlen, P, Q, WIDTH).to(tl.float32)
        acc *= gate / (1 + tl.exp(-gate))
    at = y + start.to(tl.int64) * y_l + t.to(tl.int64)[:, None] * y_l + c[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), (start + t < seqlen)[:, None] & (c < P)[None, :])


@triton.jit
def await_value(flag, value):
    """Wait until the flag holds this value, or more. What was written before it was set can be read after this."""
    while tl.atomic_add(flag, 0, sem="acquire") < value:
        pass
