"""Rung 1: the layer run backwards by torch's own products, chunk by chunk. Any device, size and dtype.

    L seqlen   Q chunk_size   K chunks   G groups   R heads of a group   P headdim   N dstate

Its steps are those of ref/ssd_backward.py, by the same numbers: the forward's 1 to 4 are done again, as nothing but the
layer's own inputs is kept from the way there; then 7 goes from dy to what each chunk adds to the gradient of the
state, 8 from chunk to chunk, last to first, and 9 has all of a chunk. Between steps everything goes through memory:
some twelve matrices (Q, Q) for each chunk and head, in float32. Heads are taken as many at a time as keep these below
MOST numbers each.
"""

import torch
import torch.nn.functional as F

from kernels.ssd.arguments import NO_LIMIT
from kernels.ssd.five import sequence_numbers
from kernels.ssd_backward.arguments import Gradients, expect_backward

SOURCES = ("kernels/ssd_backward/plain.py", "kernels/ssd_backward/arguments.py")
CHUNK = 64  # tokens, where no chunk_size is given
MOST = 1 << 26  # numbers of a (Q, Q) for every chunk of the heads that are taken at a time


def plain(
    dy, x, dt, A, B, C, *, chunk_size=None, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None,
    seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=NO_LIMIT,
):  # fmt: skip
    """The gradients, in float32, each rounded once to the dtype of its argument. → Gradients

    Arguments: kernels.ssd_backward. What is not finite reaches every token of its chunk.
    """
    problem = expect_backward(
        "plain", dy, x, dt, A, B, C, chunk_size, dfinal_states=dfinal_states, D=D, z=z, dt_bias=dt_bias,
        initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_limit=dt_limit,
    )  # fmt: skip
    if seq_idx is None and cu_seqlens is not None:
        seq_idx = sequence_numbers(cu_seqlens, problem.seqlen)
    given = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
    with torch.no_grad():
        found = wide_gradients(
            dy, **given, dfinal_states=dfinal_states, seq_idx=seq_idx, dt_softplus=dt_softplus, dt_limit=dt_limit,
            chunk_size=chunk_size or CHUNK,
        )  # fmt: skip
    rounded = {name: None if one is None else one.to(given[name].dtype) for name, one in found._asdict().items()}
    return Gradients(*(None if one is None else one.contiguous() for one in rounded.values()))


def wide_gradients(
    dy, x, dt, A, B, C, *, dfinal_states=None, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    dt_softplus=False, dt_limit=NO_LIMIT, chunk_size=CHUNK, wide=torch.float32,
):  # fmt: skip
    """As `plain`, unchecked, computed in and returned as `wide`: in float64 the truth for what a card has measured."""
    batch, L, H, P = x.shape
    G, N = B.shape[2:]
    R = H // G
    dy, x, raw, A, B, C, D, z, dt_bias, start, d_final = (
        None if t is None else t.to(wide)
        for t in (dy, x, dt, A, B, C, D, z, dt_bias, initial_states, dfinal_states)
    )  # fmt: skip
    steps, slope = step_sizes(raw, dt_bias, dt_softplus, dt_limit)
    behind = dy if z is None else dy * F.silu(z)  # 6
    K = -(-L // chunk_size)
    if seq_idx is not None:
        seq_idx = torch.cat([seq_idx, seq_idx[:, -1:].expand(batch, K * chunk_size - L)], 1)
        seq_idx = seq_idx.view(batch, K, 1, 1, chunk_size)

    y, d_x, d_steps, d_logs = (torch.empty_like(t) for t in (x, x, steps, steps))
    d_B, d_C, d_start = torch.zeros_like(B), torch.zeros_like(C), x.new_empty(batch, H, P, N)
    heads = max(1, MOST // (batch * K * chunk_size**2))
    groups, shares = max(1, heads // R), min(heads, R)  # whole groups at a time, or some heads of one
    for g in range(0, G, groups):
        for r in range(0, R, shares):
            of = slice(g, g + groups)
            own = torch.arange(H, device=x.device).view(G, R)[of, r : r + shares]  # heads
            of_heads = ((behind, 2), (x, 2), (steps, 2), (A, 0), (start, 1), (d_final, 1))
            own_behind, own_x, own_steps, own_A, own_start, own_final = (
                None if t is None else t.index_select(dim, own.flatten()).unflatten(dim, own.shape)
                for t, dim in of_heads
            )
            found = _chunked(
                own_behind, own_x, own_steps, own_A, B[:, :, of], C[:, :, of], own_start, own_final, seq_idx,
                chunk_size,
            )  # fmt: skip
            own = own.flatten()
            for whole, part in zip((y, d_x, d_steps, d_logs), found):
                whole[:, :, own] = part.flatten(2, 3)
            d_B[:, :, of] += found[4]
            d_C[:, :, of] += found[5]
            d_start[:, own] = found[6].flatten(1, 2)

    d_D = None
    if D is not None:
        per_head = D.ndim == 1
        y = torch.addcmul(y, D[:, None] if per_head else D, x)
        d_x = torch.addcmul(d_x, D[:, None] if per_head else D, behind)
        d_D = (behind * x).sum((0, 1, 3) if per_head else (0, 1))
    d_dt = (d_steps + A * d_logs) * slope
    return Gradients(
        d_x, d_dt, (d_logs * steps).sum((0, 1)), d_B, d_C, d_D, None if z is None else dy * y * silu_slope(z),
        None if dt_bias is None else d_dt.sum((0, 1)), None if start is None else d_start,
    )  # fmt: skip


def step_sizes(dt, dt_bias, dt_softplus, dt_limit):
    """dt as the recurrence uses it, and the derivative of that by dt: 0 beyond the limits."""
    v = dt if dt_bias is None else dt + dt_bias
    slope = torch.where(v > 20, 1.0, torch.sigmoid(v)) if dt_softplus else torch.ones_like(v)
    v = F.softplus(v) if dt_softplus else v
    low, high = dt_limit
    return v.clamp(low, high), torch.where((v < low) | (v > high), 0.0, slope)


def silu_slope(z):
    """The derivative of z · sigmoid(z)."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _chunked(dy, x, dt, A, B, C, start, d_final, seq_idx, Q):
    """The recurrence backwards, for some groups: dy, x (batch, L, G, R, P), dt (batch, L, G, R), A (G, R), B and C
    (batch, L, G, N), states (batch, G, R, P, N) or None. → y, d(x), d(dt), d(log decay), d(B), d(C), d(start)"""
    L = x.shape[1]
    dy, x, dt, B, C = (_in_chunks(t, Q) for t in (dy, x, dt[..., None], B[:, :, :, None], C[:, :, :, None]))
    dt = dt[..., 0]  # (batch, K, G, R, Q); x (batch, K, G, R, Q, P), B (batch, K, G, 1, Q, N)
    a = _sums(A[..., None] * dt, seq_idx)  # 1
    continues, counts, lives, inside = _sequences(seq_idx, Q, x.device)
    from_start = torch.where(continues, a, -torch.inf).exp()[..., None]
    to_end = torch.where(counts, a[..., -1:] - a, -torch.inf).exp()[..., None]
    whole = torch.where(lives, a[..., -1], -torch.inf).exp()[..., None, None]  # (batch, K, G, R, 1, 1)
    starts, _ = _pass(((to_end * dt[..., None] * x).mT @ B), whole, start)  # 3, 4
    d_ends, d_start = _pass((from_start * dy).mT @ C, whole, d_final, backwards=True)  # 7, 8

    decay = torch.where(inside, a[..., :, None] - a[..., None, :], -torch.inf).exp()  # 9, to the end
    CB = C @ B.mT  # 2
    scores = CB * decay  # y = scores · dt x
    weighted = (dy @ x.mT) * decay * dt[..., None, :]  # of CB
    read = from_start * (C @ starts.mT)  # what y has from before the chunk
    y = scores @ (dt[..., None] * x) + read
    d_u = scores.mT @ dy + to_end * (B @ d_ends.mT)  # of u = dt x
    left = dt[..., None] * to_end * (x @ d_ends)  # what reaches B from behind the chunk
    of_group = weighted.sum(3)  # all heads of a group have one C and one B: their products are summed before
    d_C = of_group @ B[:, :, :, 0] + (from_start * (dy @ starts)).sum(3)
    d_B = of_group.mT @ C[:, :, :, 0] + left.sum(3)

    # The pairs j < t <= i in which the decay of token t stands: both in the chunk, one of them, none of them.
    pairs = (weighted * CB).tril(-1)
    d_log = pairs.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    d_log += (dy * read).sum(-1).flip(-1).cumsum(-1).flip(-1)
    d_log += F.pad((left * B).sum(-1).cumsum(-1)[..., :-1], (1, 0))
    d_log += (whole * d_ends * starts).sum((-1, -2))[..., None]
    of_heads = (_in_a_row(t, 4, L) for t in (y, dt[..., None] * d_u, (x * d_u).sum(-1), d_log))
    return *of_heads, *(_in_a_row(t, 3, L) for t in (d_B, d_C)), d_start


def _in_chunks(t, Q):
    """(batch, L, G, R, n) → (batch, K, G, R, Q, n), zeros behind the end."""
    batch, L, G, R, n = t.shape
    t = F.pad(t, (0, 0, 0, 0, 0, 0, 0, -L % Q))
    return t.view(batch, -1, Q, G, R, n).permute(0, 1, 3, 4, 2, 5)


def _in_a_row(t, dim, L):
    """(batch, K, ...) with a chunk's tokens along dim → (batch, L, ...)"""
    return t.movedim(dim, 2).flatten(1, 2)[:, :L]


def _sums(log_decay, seq_idx):
    """1. Running sums in each chunk; of sequences: from where each begins, so that its digits are its own."""
    if seq_idx is None:
        return log_decay.cumsum(-1)
    sums = log_decay.clone()
    for i in range(1, sums.shape[-1]):
        sums[..., i] += torch.where(seq_idx[..., i] == seq_idx[..., i - 1], sums[..., i - 1], 0)
    return sums


def _sequences(seq_idx, Q, device):
    """Which tokens of a chunk are of the sequence before it, which of its last one, which chunks are of one sequence
    that was there before, and which pairs of tokens see each other."""
    triangle = torch.ones(Q, Q, dtype=torch.bool, device=device).tril()
    if seq_idx is None:
        yes = torch.ones((), dtype=torch.bool, device=device)
        return yes, yes, yes, triangle
    before = torch.cat([seq_idx[:, :1, ..., 0], seq_idx[:, :-1, ..., -1]], 1)  # (batch, K, 1, 1)
    same = seq_idx[..., :, None] == seq_idx[..., None, :]
    return seq_idx == before[..., None], seq_idx == seq_idx[..., -1:], seq_idx[..., -1] == before, triangle & same


def _pass(added, whole, first, backwards=False):
    """4 and 8. From chunk to chunk: state = whole · state + added. → (the state each chunk meets, the last one)"""
    state = torch.zeros_like(added[:, 0]) if first is None else first
    met = torch.empty_like(added)
    order = range(added.shape[1])
    for k in reversed(order) if backwards else order:
        met[:, k] = state
        state = torch.addcmul(added[:, k], whole[:, k], state)
    return met, state
