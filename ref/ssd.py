"""Mamba-2's layer, state space duality: one map from x to y, as a recurrence, as a matrix, and by chunks.

    h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_tᵀ         a state (P, N) for each head
    y_t = h_t C_t + D x_t                             and with z: y_t · silu(z_t)

L  seqlen         x, y, z          (batch, L, H, P)      input, output, gate
H  nheads         dt               (batch, L, H)         step size: softplus(dt + dt_bias), clamped to dt_limit
P  headdim        A                (H,)                  below 0: the state decays
N  dstate         B, C             (batch, L, G, N)      what is written to the state, what is read from it
G  ngroups        D                (H,) or (H, P)        straight from x to y; None: 0
Q  chunk_size     dt_bias          (H,)                  None: 0
                  states           (batch, H, P, N)      initial_states: None is 0; final_states: behind the last token
                  seq_idx          (batch, L)            whole numbers; where it changes another sequence begins

Head h reads group h // (H // G) of B and C. initial_states belong to the sequence of the first token, final_states to
that of the last. dt goes through + dt_bias, softplus, dt_limit, in this order; the limit's default, (0, inf), makes a
negative dt 0. All sums are in float64, and so are results. NaN and inf pass to where they reach, and to nothing else.

The chunked form's steps, numbered 1 to 5, are in ref/ssd_steps.py, the fused kernel's schedule in ref/ssd_schedule.py,
the check of the arguments in ref/ssd_arguments.py.
Source: Tri Dao and Albert Gu, "Transformers are SSMs", 2024.
"""

import numpy as np

from ref.ssd_arguments import check, check_chunk_size, check_cu_seqlens
from ref.ssd_schedule import segment_bounds, ssd_segments
from ref.ssd_steps import (
    chunk_bmm,
    chunk_cumsum,
    chunk_scan,
    chunk_state,
    gate,
    segsum,
    selected_product,
    silu,
    softplus,
    state_passing,
    step_sizes,
)

__all__ = [
    "chunk_bmm",
    "chunk_cumsum",
    "chunk_scan",
    "chunk_state",
    "linear_attention",
    "segment_bounds",
    "segsum",
    "seq_idx_of",
    "silu",
    "softplus",
    "ssd_chunked",
    "ssd_matrix",
    "ssd_recurrent",
    "ssd_segments",
    "ssd_varlen",
    "state_passing",
]


def ssd_recurrent(x, dt, A, B, C, **options):
    """One token after another, as the layer is defined. → (y, final_states)

    options: D, z, dt_bias, dt_softplus=False, dt_limit=(0, inf), initial_states, seq_idx.
    """
    p = check(x, dt, A, B, C, **options)
    group = p.x.shape[2] // p.B.shape[2]
    dt = step_sizes(p.dt, **p.steps)[..., None, None]  # (batch, L, H, 1, 1)
    decay = np.exp(p.A[:, None, None] * dt)
    h, y = p.initial_states, np.zeros(p.x.shape)
    for t in range(p.x.shape[1]):
        x_t, B_t, C_t = p.x[:, t], p.B[:, t].repeat(group, axis=1), p.C[:, t].repeat(group, axis=1)  # (batch, H, ·)
        goes_on = p.runs[:, t] == p.runs[:, max(t - 1, 0)]
        h = np.where(goes_on[:, None, None, None], decay[:, t] * h, 0)
        h = h + dt[:, t] * (x_t[..., :, None] * B_t[..., None, :])  # (batch, H, P, N)
        y[:, t] = (h @ C_t[..., None])[..., 0]  # (batch, H, P)
    return gate(y, p.x, p.D, p.z), h


def ssd_matrix(x, dt, A, B, C, **options):
    """All tokens at once, for short sequences: y = M x, M lower triangular. → (y, final_states)

    M[i, j] = (C_i · B_j) · exp(A dt_{j+1} + ... + A dt_i) · dt_j: CBᵀ as in attention, under a mask
    of decays. Initial states are read with the decay from the start; the final state is the row
    behind the last token.
    """
    p = check(x, dt, A, B, C, **options)
    batch, L, H, P = p.x.shape
    y, final = np.zeros(p.x.shape), np.zeros(p.initial_states.shape)
    dt = step_sizes(p.dt, **p.steps)
    for b, h in np.ndindex(batch, H):
        g = h // (H // p.B.shape[2])
        x_h, dt_h, B_g, C_g, runs = p.x[b, :, h], dt[b, :, h], p.B[b, :, g], p.C[b, :, g], p.runs[b]
        inside = np.tri(L, dtype=bool) & (runs[:, None] == runs)  # (L, L)
        # One column more, for the initial state; it acts like a token before the first.
        sums = segsum(np.concatenate([[0], p.A[h] * dt_h]))  # (1 + L, 1 + L)
        decay = np.exp(np.where(inside, sums[1:, 1:], -np.inf))
        M = np.where(inside, C_g @ B_g.T * decay * dt_h, 0)
        start = p.initial_states[b, h]  # (P, N)
        first = (runs == 0)[:, None]
        y[b, :, h] = selected_product(inside, M, x_h)
        y[b, :, h] += np.where(first, np.exp(sums[1:, :1]) * (C_g @ start.T), 0)
        last = runs == runs[-1]
        weights = np.exp(sums[-1, 1:][last]) * dt_h[last]
        final[b, h] = (weights[:, None] * x_h[last]).T @ B_g[last]
        final[b, h] += np.exp(sums[-1, 0]) * start if runs[-1] == 0 else 0
    return gate(y, p.x, p.D, p.z), final


def ssd_chunked(x, dt, A, B, C, *, chunk_size, **options):
    """A matrix within each chunk, a recurrence from chunk to chunk. → (y, final_states)

    Any seqlen: the last chunk may be shorter than chunk_size (1 or more).
    """
    p, Q = check(x, dt, A, B, C, **options), check_chunk_size(chunk_size)
    dA_cumsum, dt = chunk_cumsum(p.dt, p.A, Q, **p.steps, seq_idx=p.seq_idx)  # 1
    CB = chunk_bmm(p.C, p.B, Q)  # 2
    states = chunk_state(p.B, p.x, dt, dA_cumsum, seq_idx=p.seq_idx)  # 3
    passing = dict(initial_states=p.initial_states, seq_idx=p.seq_idx)
    states, final = state_passing(states, dA_cumsum, **passing)  # 4
    return chunk_scan(CB, p.x, dt, dA_cumsum, p.C, states, D=p.D, z=p.z, seq_idx=p.seq_idx), final  # 5


def linear_attention(q, k, v, *, chunk_size):
    """Causal attention without softmax: SSD with A dt = 0 and dt = 1.

    y_i = sum over j <= i of (q_i · k_j) v_j

    q, k (batch, seqlen, ngroups, dstate), v (batch, seqlen, nheads, headdim) → like v
    """
    v = np.asarray(v)
    return ssd_chunked(v, np.ones(v.shape[:3]), np.zeros(v.shape[2:3]), k, q, chunk_size=chunk_size)[0]


def seq_idx_of(cu_seqlens):
    """The number of each token's sequence, (1, seqlen). cu_seqlens: each one's first token, and seqlen at the end."""
    ends = check_cu_seqlens(cu_seqlens, np.asarray(cu_seqlens).reshape(-1)[-1:].sum())
    return np.repeat(np.arange(len(ends) - 1), np.diff(ends))[None]


def ssd_varlen(x, dt, A, B, C, cu_seqlens, *, z=None, initial_states=None, **options):
    """Sequences laid end to end in a batch of 1, each run alone. → (y, varlen_states)

    cu_seqlens: where each begins, and seqlen at the end. initial_states (1, H, P, N) belong to the
    first that is not empty; an empty one's state is 0. y is what seq_idx=seq_idx_of(cu_seqlens)
    gives; varlen_states are (sequences, H, P, N).
    """
    p = check(x, dt, A, B, C, z=z, initial_states=initial_states, **options)
    if len(p.x) != 1:
        raise ValueError(f"x must have a batch of 1 where cu_seqlens is given, got {len(p.x)}")
    if p.seq_idx is not None:
        raise ValueError("seq_idx must be None where cu_seqlens is given, got both")
    ends = check_cu_seqlens(cu_seqlens, p.x.shape[1])
    y, states = np.zeros(p.x.shape), np.zeros((len(ends) - 1, *p.initial_states.shape[1:]))
    for i, t in enumerate(map(slice, ends, ends[1:])):
        if t.start < t.stop:
            own = dict(z=None if p.z is None else p.z[:, t], initial_states=None if t.start else p.initial_states)
            whole = p.x[:, t], p.dt[:, t], p.A, p.B[:, t], p.C[:, t]
            y[:, t], states[i : i + 1] = ssd_recurrent(*whole, **own, **options)
    return y, states
