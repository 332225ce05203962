"""The recurrence of ref/ssd_backward.py run backwards for one head, in three forms.

A Head holds dy behind z, so that y = h C alone; what D, z, A and softplus do lies outside. log_decay is A · dt, whose
gradient each form makes by adding, never as a difference. There is a short way (y and d(x) here without D and z),

    d(log_decay_t) = sum over i >= t of (d(y_i) · y_i - x_i · d(x_i)) + <d(final), final>

which is the same number, but where large terms leave a small sum its digits are lost: what a token writes and reads
itself is in both terms and in no decay. The fewer tokens the sum has, as where it starts anew at each chunk, the more
digits are left.

    6 gate            dy, z                                        → dy before z       in ref/ssd_backward.py
    7 chunk_state     C, dy, dA_cumsum                             → what each chunk adds to d(h) at its start
    8 state_passing   the same, from the last chunk to the first   → d(h) at each chunk's end, and before the first
    9 chunk_scan      all of a chunk                               → d(x), d(B), d(C), d(dt), d(log_decay)
"""

from typing import NamedTuple

import numpy as np

from ref.ssd_steps import chunk_cumsum, chunk_state, in_chunks, runs_at, segsum, selected_product, state_passing


class Head(NamedTuple):
    """One head of a whole batch."""

    dy: np.ndarray  # (batch, L, P)
    x: np.ndarray  # (batch, L, P)
    dt: np.ndarray  # (batch, L), as the recurrence uses it
    A: float
    B: np.ndarray  # (batch, L, N)
    C: np.ndarray  # (batch, L, N)
    start: np.ndarray  # (batch, P, N): initial states
    d_final: np.ndarray  # (batch, P, N)
    runs: np.ndarray  # (batch, L), see ref.ssd_arguments.runs_of


class HeadGradients(NamedTuple):
    """y itself, and gradients; dt's is by the factor before x Bᵀ alone, not by the decay."""

    y: np.ndarray  # (batch, L, P)
    x: np.ndarray  # (batch, L, P)
    dt: np.ndarray  # (batch, L)
    log_decay: np.ndarray  # (batch, L): of A · dt
    B: np.ndarray  # (batch, L, N)
    C: np.ndarray  # (batch, L, N)
    start: np.ndarray  # (batch, P, N)


def recurrent(head):
    """Forward, each state kept; then d(h_t) = d(y_t) C_tᵀ + a_{t+1} d(h_{t+1}) from the last token to the first."""
    dy, x, dt, A, B, C, h, d_h, runs = head
    L = x.shape[1]
    decay = np.exp(A * dt)[..., None, None]
    goes_on = np.concatenate([runs[:, :1] == 0, runs[:, 1:] == runs[:, :-1]], axis=1)[..., None, None]
    before, behind = np.zeros((L, *h.shape)), np.zeros((L, *h.shape))  # h_{t-1} as token t meets it, and h_t
    for t in range(L):
        before[t] = np.where(goes_on[:, t], h, 0)
        h = np.where(goes_on[:, t], decay[:, t] * h, 0) + dt[:, t, None, None] * outer(x[:, t], B[:, t])
        behind[t] = h
    y, d_x, d_dt, d_log, d_B, d_C = (np.zeros(v.shape) for v in (x, x, dt, dt, B, C))
    for t in reversed(range(L)):
        d_h = d_h + outer(dy[:, t], C[:, t])  # d_h came from token t + 1, already decayed
        y[:, t] = times(behind[t], C[:, t])
        d_C[:, t] = times(behind[t].swapaxes(1, 2), dy[:, t])
        d_x[:, t] = dt[:, t, None] * times(d_h, B[:, t])
        d_B[:, t] = dt[:, t, None] * times(d_h.swapaxes(1, 2), x[:, t])
        d_dt[:, t] = (d_h * outer(x[:, t], B[:, t])).sum(axis=(1, 2))
        d_log[:, t] = np.where(goes_on[:, t], decay[:, t] * d_h * before[t], 0).sum(axis=(1, 2))
        d_h = np.where(goes_on[:, t], decay[:, t] * d_h, 0)
    return HeadGradients(y, d_x, d_dt, d_log, d_B, d_C, d_h)


def matrix(head):
    """All at once. One column more than tokens, for the initial state, and one row more, for the final state:

              start   x_0 ... x_{L-1}
      y_0       ·      M
      ...       ·        ...
      final     ·      ·  ...  ·

    weight[i, j], of row i and column j, is what the pair adds to the loss. log_decay_t is in the exponent of every pair
    with j < t <= i: its gradient is the sum over that rectangle.
    """
    dy, x, dt, A, B, C, start, d_final, runs = head
    L = x.shape[1]
    found = HeadGradients(*(np.zeros(v.shape) for v in (x, x, dt, dt, B, C, start)))
    for b in range(len(x)):
        # rows: the tokens and the final state, which does not decay behind the last; columns: the start and the tokens
        sums = segsum(np.concatenate([[0], A * dt[b], [0]]))[1:, :-1]
        row_runs, column_runs = np.append(runs[b], runs[b, -1]), np.append(0, runs[b])
        inside = (row_runs[:, None] == column_runs) & np.tri(L + 1, L + 1, 1, dtype=bool)
        decay = np.exp(np.where(inside, sums, -np.inf))
        tokens, begins, ends = inside[:L, 1:], inside[:L, :1], inside[L:, 1:].T  # (L, L), (L, 1), (L, 1)
        to_tokens, from_start, to_final = decay[:L, 1:], decay[:L, :1], decay[L:, 1:].T
        scores = np.where(tokens, C[b] @ B[b].T, 0) * to_tokens  # y = scores · dt x
        products = np.where(tokens, dy[b] @ x[b].T, 0)
        d_scores = products * to_tokens * dt[b]  # of C Bᵀ
        d_u = selected_product(tokens.T, scores.T, dy[b])  # of u = dt x
        d_u = d_u + np.where(ends, to_final * (B[b] @ d_final[b].T), 0)
        read = np.where(begins, from_start * (C[b] @ start[b].T), 0)  # what y has of the initial state
        found.y[b] = selected_product(tokens, scores * dt[b], x[b]) + read
        found.x[b] = dt[b, :, None] * d_u
        found.dt[b] = (x[b] * d_u).sum(axis=1)
        found.C[b] = selected_product(tokens, d_scores, B[b]) + np.where(begins, from_start * (dy[b] @ start[b]), 0)
        kept = np.where(ends, dt[b, :, None] * to_final * (x[b] @ d_final[b]), 0)
        found.B[b] = selected_product(tokens.T, d_scores.T, C[b]) + kept
        found.start[b] = np.where(begins, from_start * dy[b], 0).T @ np.where(begins, C[b], 0)
        found.start[b] += np.where(inside[L, 0], decay[L, 0] * d_final[b], 0)

        weight = np.zeros((L + 1, L + 1))
        weight[:L, 1:] = products * scores * dt[b]
        weight[:L, 0] = (dy[b] * read).sum(axis=1)
        weight[L, 1:] = (kept * B[b]).sum(axis=1)
        weight[L, 0] = np.where(inside[L, 0], decay[L, 0] * (d_final[b] * start[b]), 0).sum()
        found.log_decay[b] = rectangles(np.where(inside, weight, 0))
    return found


def rectangles(weight):
    """For each t the sum of weight[i, j] over i >= t and j <= t; weight (n, n) → (n - 1,). Column j stands before
    token j, so that j <= t are those before the decay of token t."""
    below = np.cumsum(weight[::-1], axis=0)[::-1]  # over i >= t
    return np.array([below[t, : t + 1].sum() for t in range(len(weight) - 1)])


def chunked(head, Q):
    """Steps 1 to 4 as on the way there, for the states at the chunks' starts; then 7, 8 and 9."""
    dy, x, dt, A, B, C, start, d_final, runs = head
    L, one = x.shape[1], (slice(None), slice(None), None)  # a single head
    dA_cumsum, _ = chunk_cumsum(dt[..., None], [A], Q, dt_limit=(-np.inf, np.inf), seq_idx=runs)
    added = chunk_state(B[one], x[one], _, dA_cumsum, seq_idx=runs)
    starts, _ = state_passing(added, dA_cumsum, initial_states=start[:, None], seq_idx=runs)
    d_added = chunk_state_backward(C, dy, dA_cumsum, runs)  # 7
    d_ends, d_start = state_passing_backward(d_added, dA_cumsum, d_final, runs)  # 8
    found = chunk_scan_backward(dy, x, dt, B, C, dA_cumsum, starts[:, :, 0], d_ends, runs)  # 9
    return HeadGradients(*(v.reshape(len(x), -1, *v.shape[3:])[:, :L] for v in found), start=d_start)


def chunk_state_backward(C, dy, dA_cumsum, runs):
    """7. What a chunk alone adds to the gradient of the state at its start: sum over i of exp(dA up to i) d(y_i) C_iᵀ,
    of the tokens of the sequence that enters. → (batch, K, P, N)"""
    enters, runs = runs_at(runs, dA_cumsum)
    continues = (runs == enters[..., None])[..., None]  # (batch, K, Q, 1)
    decay = np.exp(dA_cumsum[:, 0])[..., None]
    Q = dA_cumsum.shape[-1]
    scaled = np.where(continues, decay * in_chunks(dy, Q), 0)  # (batch, K, Q, P)
    return scaled.swapaxes(-1, -2) @ np.where(continues, in_chunks(C, Q), 0)


def state_passing_backward(d_added, dA_cumsum, d_final, runs):
    """8. From the last chunk to the first: d(h) at the start is exp(dA of the chunk) d(h) at the end + d_added[k].

    → (d(h) at the chunks' ends (batch, K, P, N), d(h) before the first (batch, P, N))
    """
    enters, runs = runs_at(runs, dA_cumsum)
    lives = (runs[..., -1] == enters)[..., None, None]
    decay = np.exp(dA_cumsum[:, 0, :, -1])[..., None, None]
    d_ends, d_h = np.zeros(d_added.shape), d_final
    for k in reversed(range(d_added.shape[1])):
        d_ends[:, k] = d_h
        d_h = np.where(lives[:, k], decay[:, k] * d_h, 0) + d_added[:, k]
    return d_ends, d_h


def chunk_scan_backward(dy, x, dt, B, C, dA_cumsum, starts, d_ends, runs):
    """9. All of a chunk: within it by the triangle, from before by its first state, from behind by d(h) at its end.

    → y, d(x), d(dt), d(log_decay), d(B), d(C), each (batch, K, Q, ...)
    """
    a, Q = dA_cumsum[:, 0], dA_cumsum.shape[-1]  # (batch, K, Q)
    dy, x, dt, B, C = (in_chunks(v, Q) for v in (dy, x, dt, B, C))
    enters, runs = runs_at(runs, dA_cumsum)
    inside = np.tri(Q, dtype=bool) & (runs[..., :, None] == runs[..., None, :])  # (batch, K, Q, Q)
    continues, counts = (runs == enters[..., None])[..., None], (runs == runs[..., -1:])[..., None]
    lives = runs[..., -1] == enters  # (batch, K)
    decay = np.exp(np.where(inside, a[..., :, None] - a[..., None, :], -np.inf))
    from_start, to_end = np.exp(a)[..., None], np.exp(np.where(counts, a[..., -1:, None] - a[..., None], -np.inf))
    T = lambda v: v.swapaxes(-1, -2)  # noqa: E731

    scores = np.where(inside, C @ T(B), 0) * decay  # the forward's; y = scores · dt x
    products = np.where(inside, dy @ T(x), 0)
    d_scores = products * decay * dt[..., None, :]  # of C Bᵀ; S of a group is the sum over its heads
    read = np.where(continues, from_start * (C @ T(starts)), 0)
    y = selected_product(inside, scores * dt[..., None, :], x) + read
    d_u = selected_product(T(inside), T(scores), dy) + np.where(counts, to_end * (B @ T(d_ends)), 0)  # of u = dt x
    d_C = selected_product(inside, d_scores, B) + np.where(continues, from_start * (dy @ starts), 0)
    kept = np.where(counts, dt[..., None] * to_end * (x @ d_ends), 0)
    d_B = selected_product(T(inside), T(d_scores), C) + kept

    # The pairs j < t <= i in which the decay of token t stands: both in the chunk, one of them, none of them.
    weight = np.where(inside & ~np.eye(Q, dtype=bool), products * scores * dt[..., None, :], 0)
    below = np.cumsum(weight[..., ::-1, :], axis=-2)[..., ::-1, :]  # over i >= t
    d_log = np.where(np.tri(Q, Q, -1, dtype=bool), below, 0).sum(axis=-1)
    d_log += np.cumsum(np.where(continues, dy * read, 0).sum(axis=-1)[..., ::-1], axis=-1)[..., ::-1]
    ending = np.cumsum(np.where(counts, kept * B, 0).sum(axis=-1), axis=-1)
    d_log[..., 1:] += ending[..., :-1]
    through = np.where(lives[..., None, None], from_start[..., -1:, :] * d_ends * starts, 0).sum(axis=(-1, -2))
    d_log += through[..., None]
    return y, dt[..., None] * d_u, (x * d_u).sum(axis=-1), d_log, d_B, d_C


def outer(v, w):
    """v wᵀ: (batch, P), (batch, N) → (batch, P, N)"""
    return v[:, :, None] * w[:, None, :]


def times(m, v):
    """m v: (batch, P, N), (batch, N) → (batch, P)"""
    return (m @ v[..., None])[..., 0]
