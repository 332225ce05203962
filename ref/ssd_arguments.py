"""What all forms of ref.ssd take, checked once, in float64. Letters and shapes: ref/ssd.py."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Problem:
    """One call: arrays in float64, options filled in."""

    x: np.ndarray  # (batch, L, H, P)
    dt: np.ndarray  # (batch, L, H)
    A: np.ndarray  # (H,)
    B: np.ndarray  # (batch, L, G, N)
    C: np.ndarray  # (batch, L, G, N)
    D: np.ndarray | None  # (H,) or (H, P)
    z: np.ndarray | None  # (batch, L, H, P)
    steps: dict  # dt_bias, dt_softplus, dt_limit: how dt is made
    initial_states: np.ndarray  # (batch, H, P, N)
    seq_idx: np.ndarray | None  # (batch, L)
    runs: np.ndarray  # (batch, L): how often seq_idx has changed so far


def check(
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0, np.inf),
    initial_states=None,
    seq_idx=None,
):
    """A Problem, or ValueError with the argument's name, what was expected and what came."""
    x = array("x", x)
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must have shape (batch, seqlen, nheads, headdim), none of it 0, got {x.shape}")
    batch, L, H, P = x.shape
    B = array("B", B)
    if B.ndim != 4 or B.shape[:2] != (batch, L) or 0 in B.shape:
        raise ValueError(f"B must have shape ({batch}, {L}, ngroups, dstate), none of it 0, like x, got {B.shape}")
    G, N = B.shape[2:]
    if H % G:
        raise ValueError(f"nheads must be a multiple of ngroups, got {H} heads and {G} groups")
    if D is not None:
        D = np.asarray(D)
        D = array("D", D, (H, P) if D.ndim == 2 else (H,))
    low, high = check_limit(dt_limit)
    state = (batch, H, P, N)
    return Problem(
        x,
        array("dt", dt, (batch, L, H)),
        array("A", A, (H,)),
        B,
        array("C", C, B.shape),
        D,
        None if z is None else array("z", z, x.shape),
        dict(
            dt_bias=None if dt_bias is None else array("dt_bias", dt_bias, (H,)),
            dt_softplus=bool(dt_softplus),
            dt_limit=(low, high),
        ),
        np.zeros(state) if initial_states is None else array("initial_states", initial_states, state),
        None if seq_idx is None else np.asarray(seq_idx),
        runs_of(seq_idx, batch, L),
    )


def array(name, values, shape=None):
    """values in float64, held to a shape."""
    values = np.asarray(values)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{name} must hold real numbers, got {values.dtype}")
    if shape is not None and values.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {values.shape}")
    return values.astype(np.float64)


def check_limit(dt_limit):
    low, high = map(float, dt_limit)
    if not low <= high:
        raise ValueError(f"dt_limit must be (low, high) with low <= high, got {tuple(dt_limit)}")
    return low, high


def check_chunk_size(chunk_size):
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | np.integer) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a whole number of at least 1, got {chunk_size!r}")
    return int(chunk_size)


def runs_of(seq_idx, batch, L):
    """How often seq_idx has changed up to each token. (batch, L); all 0 where seq_idx is None."""
    if seq_idx is None:
        return np.zeros((batch, L), int)
    seq_idx = np.asarray(seq_idx)
    if seq_idx.shape != (batch, L) or seq_idx.dtype.kind not in "iu":
        wanted = f"whole numbers of shape ({batch}, {L})"
        raise ValueError(f"seq_idx must be {wanted}, got {seq_idx.dtype} of shape {seq_idx.shape}")
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    return np.concatenate([np.zeros((batch, 1), int), np.cumsum(changes, axis=1)], axis=1)


def check_cu_seqlens(cu_seqlens, L):
    """Where each sequence begins, and L at the end."""
    ends = np.asarray(cu_seqlens)
    if ends.ndim != 1 or len(ends) < 2 or ends.dtype.kind not in "iu":
        raise ValueError(f"cu_seqlens must be two or more whole numbers, got {ends.dtype} of shape {ends.shape}")
    if ends[0] != 0 or ends[-1] != L or (np.diff(ends.astype(np.int64)) < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to seqlen, {L}, got {ends.tolist()}")
    return ends.astype(np.int64)
