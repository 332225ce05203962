"""The five steps of the chunked form, each a function, and the segment sum. Letters and shapes: ref/ssd.py.

A sequence is cut into K = ceil(L / Q) chunks of Q tokens; behind its end x, dt, B and C are 0. A kernel of chapter 12
takes and gives what the step of the same number does:

1 chunk_cumsum    dt (batch, L, H)                    → dA_cumsum, dt (batch, H, K, Q)
2 chunk_bmm       C, B (batch, L, G, N)               → CB (batch, K, G, Q, Q)
3 chunk_state     B, x, dt, dA_cumsum                 → states (batch, K, H, P, N), what each chunk adds
4 state_passing   states, dA_cumsum                   → states (batch, K, H, P, N) at the chunks' starts, and the last
5 chunk_scan      CB, x, dt, dA_cumsum, C, states     → y (batch, L, H, P)

Decays are differences of dA_cumsum, as in the kernels: a running sum s in float64 is off by 1e-16 · |s|, and so is the
exponent. What does not count is selected away, never multiplied by 0: 0 · NaN is NaN.
"""

import numpy as np

from ref.ssd_arguments import array, check_chunk_size, check_limit, runs_of


def segsum(a):
    """Sums over segments: S[i, j] = a[j + 1] + ... + a[i], -inf where j > i. a (..., n) → (..., n, n)

    exp(S) is then the lower-triangular matrix of decays from token j to token i, 1 on its diagonal.

    Each entry is added up from its own terms. The short way, cumsum(a)[i] - cumsum(a)[j], subtracts
    two numbers that may both be large where the sum between them is small: what is left has the
    rounding error of the large ones. And where a is -inf or NaN, the difference is NaN for every
    later segment, whether it holds that token or not.
    """
    a = np.asarray(a, np.float64)
    token = np.arange(a.shape[-1])
    later = token[:, None] > token  # (k, j): a[k] belongs to the segments that begin behind j if k > j
    terms = np.where(later, a[..., :, None], 0.0)
    return np.where(later | (token[:, None] == token), np.cumsum(terms, axis=-2), -np.inf)


def softplus(v):
    """log(1 + exp(v)), and v itself above 20, where the two agree to 2e-9; as mamba_ssm has it."""
    return np.where(v > 20, v, np.log1p(np.exp(np.minimum(v, 20))))


def silu(v):
    """v / (1 + exp(-v))."""
    half = np.exp(-np.abs(v))  # never overflows
    return v * np.where(v < 0, half, 1) / (1 + half)


def step_sizes(dt, dt_bias=None, dt_softplus=False, dt_limit=(0, np.inf)):
    """dt (..., H) as the recurrence uses it: add the bias, softplus, clamp, in this order."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = softplus(dt) if dt_softplus else dt
    return np.clip(dt, *dt_limit)


def chunk_cumsum(dt, A, chunk_size, *, dt_bias=None, dt_softplus=False, dt_limit=(0, np.inf), seq_idx=None):
    """1. dt as it is used, and the sum of A · dt in each chunk. → (dA_cumsum, dt)

    Behind the end dt is 0 *after* softplus, so that those tokens neither decay nor add. With
    seq_idx the sum starts anew at each sequence's first token: only differences within a sequence
    are ever used.
    """
    dt, Q = array("dt", dt), check_chunk_size(chunk_size)
    batch, L, H = dt.shape
    A = array("A", A, (H,))
    bias = None if dt_bias is None else array("dt_bias", dt_bias, (H,))
    dt = in_chunks(step_sizes(dt, bias, dt_softplus, check_limit(dt_limit)), Q)  # (batch, K, Q, H)
    dt = np.moveaxis(dt, 3, 1)  # (batch, H, K, Q)
    dA = A[:, None, None] * dt
    dA_cumsum = np.cumsum(dA, axis=-1)
    if seq_idx is not None:
        runs = in_chunks(runs_of(seq_idx, batch, L), Q, "edge")  # (batch, K, Q)
        for i in range(1, Q):
            fresh = (runs[..., i] != runs[..., i - 1])[:, None]  # (batch, 1, K)
            dA_cumsum[..., i] = dA[..., i] + np.where(fresh, 0, dA_cumsum[..., i - 1])
    return dA_cumsum, dt


def chunk_bmm(C, B, chunk_size):
    """2. CB[i, j] = C_i · B_j within a chunk, one for each group. Step 5 reads j <= i only."""
    C, B = (in_chunks(array(name, v), chunk_size) for name, v in (("C", C), ("B", B)))  # (batch, K, Q, G, N)
    return C.transpose(0, 1, 3, 2, 4) @ B.transpose(0, 1, 3, 4, 2)


def chunk_state(B, x, dt, dA_cumsum, *, seq_idx=None):
    """3. What a chunk alone adds to the state at its end.

    sum over j of exp(dA from j to the end) · dt_j · x_j B_jᵀ

    With seq_idx: of the tokens of the chunk's last sequence.
    """
    (batch, H, K, Q), (L, G, N), P = dA_cumsum.shape, B.shape[1:], x.shape[3]
    x, B = in_chunks(array("x", x), Q), in_chunks(array("B", B), Q)  # (batch, K, Q, H, P), (batch, K, Q, G, N)
    runs = in_chunks(runs_of(seq_idx, batch, L), Q, "edge")
    counts = (runs == runs[..., -1:])[..., None]  # (batch, K, Q, 1)
    states = np.zeros((batch, K, H, P, N))
    for h in range(H):
        to_end = (dA_cumsum[:, h, :, -1:] - dA_cumsum[:, h])[..., None]  # (batch, K, Q, 1)
        decay = np.exp(np.where(counts, to_end, -np.inf))
        keys = np.where(counts, B[:, :, :, h // (H // G)], 0)  # (batch, K, Q, N)
        scaled = np.where(counts, decay * dt[:, h, ..., None] * x[:, :, :, h], 0)  # (batch, K, Q, P)
        states[:, :, h] = scaled.swapaxes(-1, -2) @ keys
    return states


def state_passing(states, dA_cumsum, *, initial_states=None, seq_idx=None):
    """4. From what each chunk adds to the state before each.

    H_next = exp(dA of the whole chunk) · H + states[k]

    → (states at the chunks' starts, state behind the last). With seq_idx: where a chunk's last
    token is not of the sequence of the last token before the chunk, H does not live to the end.
    initial_states belong to the first token's sequence.
    """
    batch, K, H, P, N = states.shape
    shape = (batch, H, P, N)
    state = np.zeros(shape) if initial_states is None else array("initial_states", initial_states, shape)
    enters, runs = runs_at(seq_idx, dA_cumsum)
    starts = np.zeros(states.shape)
    for k in range(K):
        starts[:, k] = state
        lives = (runs[:, k, -1] == enters[:, k])[:, None, None, None]
        decay = np.exp(dA_cumsum[:, :, k, -1])[..., None, None]  # (batch, H, 1, 1)
        state = np.where(lives, decay * state, 0) + states[:, k]
    return starts, state


def chunk_scan(CB, x, dt, dA_cumsum, C, states, *, D=None, z=None, seq_idx=None):
    """5. y of each chunk: from its own tokens by the triangle, from all before by the state.

    y_i = sum over j <= i of CB[i, j] · exp(dA from j to i) · dt_j · x_j
          + exp(dA up to i) · C_i · state + D · x_i,  then times silu(z)

    With seq_idx: j of i's sequence, and the state only for the sequence that enters the chunk.
    """
    (batch, L, H, P), G, Q = x.shape, C.shape[2], dA_cumsum.shape[-1]
    x, C = array("x", x), array("C", C)
    xs, Cs = in_chunks(x, Q), in_chunks(C, Q)  # (batch, K, Q, H, P), (batch, K, Q, G, N)
    enters, runs = runs_at(seq_idx, dA_cumsum)
    inside = np.tri(Q, dtype=bool) & (runs[..., :, None] == runs[..., None, :])  # (batch, K, Q, Q)
    continues = (runs == enters[..., None])[..., None]  # (batch, K, Q, 1)
    y = np.zeros(xs.shape)
    for h in range(H):  # a head at a time: its matrices are (Q, Q) for every chunk
        g, a = h // (H // G), dA_cumsum[:, h]  # (batch, K, Q)
        decay = np.exp(np.where(inside, a[..., :, None] - a[..., None, :], -np.inf))  # (batch, K, Q, Q)
        M = np.where(inside, CB[:, :, g] * decay * dt[:, h, :, None, :], 0)
        diagonal = selected_product(inside, M, xs[:, :, :, h])
        before = np.exp(a)[..., None] * (Cs[:, :, :, g] @ states[:, :, h].swapaxes(-1, -2))
        y[:, :, :, h] = diagonal + np.where(continues, before, 0)
    return gate(y.reshape(batch, -1, H, P)[:, :L], x, D, z)


def gate(y, x, D, z):
    """What comes behind the recurrence: y + D · x, then times silu(z)."""
    if D is not None:
        D = array("D", D)
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return y if z is None else y * silu(array("z", z))


def in_chunks(values, chunk_size, mode="constant"):
    """(batch, L, ...) → (batch, K, Q, ...); behind the end zeros, or with "edge" the last value again."""
    Q = check_chunk_size(chunk_size)
    batch, L, *rest = values.shape
    padding = [(0, 0), (0, -L % Q), *[(0, 0)] * len(rest)]
    return np.pad(values, padding, mode).reshape(batch, -1, Q, *rest)


def runs_at(seq_idx, dA_cumsum):
    """Runs (see runs_of) of the token before each chunk, (batch, K), and of each chunk's tokens, (batch, K, Q)."""
    batch, _, K, Q = dA_cumsum.shape
    if seq_idx is None:
        return np.zeros((batch, K), int), np.zeros((batch, K, Q), int)
    runs = in_chunks(runs_of(seq_idx, batch, np.shape(seq_idx)[-1]), Q, "edge")
    return np.concatenate([np.zeros((batch, 1), int), runs[:, :-1, -1]], axis=1), runs


def selected_product(inside, M, X):
    """M @ X over the entries of M that are `inside`; the others are 0. What they would multiply is not looked at."""
    if np.isfinite(X).all():
        return M @ X
    return np.where(inside[..., None], M[..., None] * X[..., None, :, :], 0).sum(axis=-2)
