"""Mamba-2's layer run backwards: from the gradient of y to those of all that y was made of.

For a number `loss` that depends on y and on the final states, d(v) is the gradient of the loss by v. The layer is
h_t = a_t h_{t-1} + dt_t x_t B_tᵀ with a_t = exp(A dt_t), and y_t = h_t C_t. What is d(h_t)? h_t reaches the loss by
y_t, and by h_{t+1}:

    d(h_t) = d(y_t) C_tᵀ + a_{t+1} d(h_{t+1})                     the same recurrence, from the last token to the first

and all else is read from it: d(x_t) = dt_t d(h_t) B_t, d(B_t) = dt_t d(h_t)ᵀ x_t, d(C_t) = h_tᵀ d(y_t), and
d(A dt_t) = a_t <d(h_t), h_{t-1}>, which asks for the states of the way there.

gradients() is what kernels are held against. Its forms, tested against each other and against finite differences:

    backward_recurrent    one token after another, as above
    backward_matrix       all at once: y = M x, so d(x) = Mᵀ d(y)
    backward_chunked      a matrix in each chunk, a recurrence from chunk to chunk: what kernels do

Letters, shapes and options are those of ref/ssd.py; dy is like x, dfinal_states like final_states. A form works on one
head at a time; its steps, numbered 6 to 9 behind the forward's 1 to 5, are in ref/ssd_backward_forms.py. B and C
are read by all heads of a group, A, D and dt_bias by all tokens: their gradients are sums over all who read them.
"""

from typing import NamedTuple

import numpy as np

from ref.ssd_arguments import array, check, check_chunk_size, check_cu_seqlens
from ref.ssd_backward_forms import Head, chunked, matrix, recurrent
from ref.ssd_steps import silu, step_sizes

__all__ = [
    "Gradients",
    "backward_chunked",
    "backward_matrix",
    "backward_recurrent",
    "backward_varlen",
    "gradients",
]


class Gradients(NamedTuple):
    """Each like the argument of its name, in float64; None where that was not given."""

    x: np.ndarray
    dt: np.ndarray  # of dt as it came, before dt_bias, softplus and limit
    A: np.ndarray
    B: np.ndarray
    C: np.ndarray
    D: np.ndarray | None
    z: np.ndarray | None
    dt_bias: np.ndarray | None
    initial_states: np.ndarray | None


def gradients(dy, x, dt, A, B, C, *, dfinal_states=None, **options):
    """The gradients, by chunks of 64. → Gradients

    dy like x; dfinal_states (batch, H, P, N), of the final states, or None for 0. options: D, z, dt_bias,
    dt_softplus=False, dt_limit=(0, inf), initial_states, seq_idx.
    """
    return backward_chunked(dy, x, dt, A, B, C, chunk_size=64, dfinal_states=dfinal_states, **options)


def backward_recurrent(dy, x, dt, A, B, C, *, dfinal_states=None, **options):
    """One token after another: forward with every state kept, then backward. → Gradients"""
    return _by_heads(recurrent, dy, x, dt, A, B, C, dfinal_states, options)


def backward_matrix(dy, x, dt, A, B, C, *, dfinal_states=None, **options):
    """All tokens at once, for short sequences. → Gradients"""
    return _by_heads(matrix, dy, x, dt, A, B, C, dfinal_states, options)


def backward_chunked(dy, x, dt, A, B, C, *, chunk_size, dfinal_states=None, **options):
    """A matrix in each chunk, a recurrence from chunk to chunk, both ways. → Gradients

    Any seqlen: the last chunk may be shorter than chunk_size (1 or more).
    """
    Q = check_chunk_size(chunk_size)
    return _by_heads(lambda head: chunked(head, Q), dy, x, dt, A, B, C, dfinal_states, options)


def backward_varlen(
    dy, x, dt, A, B, C, cu_seqlens, *, dvarlen_states=None, z=None, initial_states=None, form=gradients, **options
):
    """Of ref.ssd.ssd_varlen: sequences laid end to end in a batch of 1, each run alone by `form`. → Gradients

    dvarlen_states (sequences, H, P, N): of the states at the ends of the sequences, or None for 0. initial_states
    belong to the first sequence that is not empty, and so does their gradient.
    """
    p = check(x, dt, A, B, C, z=z, initial_states=initial_states, **options)
    if len(p.x) != 1:
        raise ValueError(f"x must have a batch of 1 where cu_seqlens is given, got {len(p.x)}")
    if p.seq_idx is not None:
        raise ValueError("seq_idx must be None where cu_seqlens is given, got both")
    ends, dy = check_cu_seqlens(cu_seqlens, p.x.shape[1]), array("dy", dy, p.x.shape)
    states = len(ends) - 1, *p.initial_states.shape[1:]
    dvarlen_states = np.zeros(states) if dvarlen_states is None else array("dvarlen_states", dvarlen_states, states)
    parts = []
    for i, t in enumerate(map(slice, ends, ends[1:])):
        if t.start < t.stop:
            own = dict(z=None if p.z is None else p.z[:, t], initial_states=None if t.start else initial_states)
            whole = p.x[:, t], p.dt[:, t], p.A, p.B[:, t], p.C[:, t]
            parts.append(form(dy[:, t], *whole, dfinal_states=dvarlen_states[i : i + 1], **own, **options))

    def end_to_end(name):
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else np.concatenate(found, axis=1)

    def together(name):
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else sum(found)

    rows = {name: end_to_end(name) for name in ("x", "dt", "B", "C", "z")}
    return Gradients(
        **rows, **{name: together(name) for name in ("A", "D", "dt_bias")}, initial_states=parts[0].initial_states
    )


def _by_heads(form, dy, x, dt, A, B, C, dfinal_states, options):
    """What lies around the recurrence, and one head after another through it."""
    p = check(x, dt, A, B, C, **options)
    given = {name for name, value in options.items() if value is not None}
    dy = array("dy", dy, p.x.shape)
    states = p.initial_states.shape
    dfinal = np.zeros(states) if dfinal_states is None else array("dfinal_states", dfinal_states, states)
    steps = step_sizes(p.dt, **p.steps)

    behind = dy if p.z is None else dy * silu(p.z)  # 6. the gradient of y before z
    y, dx, d_steps, d_logs = np.zeros(p.x.shape), np.zeros(p.x.shape), np.zeros(p.dt.shape), np.zeros(p.dt.shape)
    dB, dC, d_initial = np.zeros(p.B.shape), np.zeros(p.C.shape), np.zeros(states)
    for h in range(p.x.shape[2]):
        g = h // (p.x.shape[2] // p.B.shape[2])
        head = Head(
            behind[:, :, h], p.x[:, :, h], steps[:, :, h], p.A[h], p.B[:, :, g], p.C[:, :, g],
            p.initial_states[:, h], dfinal[:, h], p.runs,
        )  # fmt: skip
        found = form(head)
        y[:, :, h], dx[:, :, h], d_steps[:, :, h], d_logs[:, :, h] = found.y, found.x, found.dt, found.log_decay
        dB[:, :, g] += found.B  # a sum over the heads of the group
        dC[:, :, g] += found.C
        d_initial[:, h] = found.start

    dD = None
    if p.D is not None:
        D = p.D if p.D.ndim == 2 else p.D[:, None]
        y, dx = y + D * p.x, dx + D * behind
        dD = (behind * p.x).sum(axis=(0, 1) if p.D.ndim == 2 else (0, 1, 3))
    d_steps = d_steps + p.A * d_logs  # the logarithm of a decay is A · dt
    d_dt = d_steps * step_sizes_slope(p.dt, **p.steps)
    return Gradients(
        x=dx,
        dt=d_dt,
        A=(d_logs * steps).sum(axis=(0, 1)),
        B=dB,
        C=dC,
        D=dD,
        z=None if p.z is None else dy * y * silu_slope(p.z),
        dt_bias=d_dt.sum(axis=(0, 1)) if "dt_bias" in given else None,
        initial_states=d_initial if "initial_states" in given else None,
    )


def silu_slope(v):
    """The derivative of v / (1 + exp(-v))."""
    s = sigmoid(v)
    return s * (1 + v * (1 - s))


def step_sizes_slope(dt, dt_bias=None, dt_softplus=False, dt_limit=(0, np.inf)):
    """The derivative of ref.ssd_steps.step_sizes by dt: 0 beyond the limits (at a limit itself: as within), and behind
    softplus that of softplus, sigmoid(dt), and 1 above 20."""
    v = dt if dt_bias is None else dt + dt_bias
    slope = np.where(v > 20, 1.0, sigmoid(v)) if dt_softplus else np.ones(v.shape)
    steps, (low, high) = step_sizes(dt, dt_bias, dt_softplus, (-np.inf, np.inf)), dt_limit
    return np.where((steps < low) | (steps > high), 0.0, slope)


def sigmoid(v):
    """1 / (1 + exp(-v))."""
    e = np.exp(-np.abs(v))  # never overflows
    return np.where(v < 0, e, 1) / (1 + e)
