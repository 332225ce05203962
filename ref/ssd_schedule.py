"""The fused kernel's schedule in NumPy, block by block: two passes over segments, with a look-back between them.

The chunks of a sequence are dealt into segments. A block has one head of one row of the batch, one segment, and a
ticket, which it takes when it starts; earlier segments have earlier tickets. So a block waits only for blocks that have
started, and the loop over tickets below is an order in which they may run.

pass 1     walk the segment's chunks backwards; add up the state that the segment alone leaves at its end
publish    that state and the segment's whole decay
look back  from the segment before towards the first: the state at this segment's start
pass 2     walk the chunks forwards with the state in hand, and write y

Numbers 1 to 5 are those of ref/ssd_steps.py.
"""

import numpy as np

from ref.ssd_arguments import check, check_chunk_size
from ref.ssd_steps import gate, selected_product, step_sizes


def segment_bounds(nchunks, segments):
    """The first chunk of each segment, and nchunks at the end. A segment may be empty."""
    if isinstance(segments, bool) or not isinstance(segments, int | np.integer) or segments < 1:
        raise ValueError(f"segments must be a whole number of at least 1, got {segments!r}")
    return [s * nchunks // int(segments) for s in range(int(segments) + 1)]


def ssd_segments(x, dt, A, B, C, *, chunk_size, segments, stop=0.0, **options):
    """As ref.ssd.ssd_chunked, by the fused kernel's schedule. → (y, final_states)

    stop: pass 1 and the look-back end as soon as all that they have yet to add would be multiplied by less than this.
    0: never. What is left out is not looked at: a NaN in it is lost, and so is a number as large as 1 / stop.
    """
    p, Q = check(x, dt, A, B, C, **options), check_chunk_size(chunk_size)
    batch, L, H, P = p.x.shape
    group = H // p.B.shape[2]
    bounds = segment_bounds(-(-L // Q), segments)
    y, final = np.zeros(p.x.shape), np.zeros(p.initial_states.shape)
    board = {}  # what blocks have published: (row, head, segment) → (state, decay)
    for ticket in range(len(bounds[1:]) * batch * H):
        s, b, h = np.unravel_index(ticket, (len(bounds) - 1, batch, H))
        tokens = [slice(Q * k, min(Q * k + Q, L)) for k in range(bounds[s], bounds[s + 1])]
        chunks = [_chunk(p, b, h, h // group, t) for t in tokens]

        state, decay = np.zeros(final.shape[2:]), 1.0  # pass 1; nobody asks for the last segment's state
        for chunk in reversed(chunks if s < len(bounds) - 2 else []):
            state = state + _times(decay, chunk.adds())  # 1, 3
            decay = _product(decay, chunk.decay(), stop)
            if decay is None:
                break
        board[b, h, s] = state, decay  # publish: the state first, then a flag that says so

        state, factor = np.zeros(final.shape[2:]), 1.0  # look back, 4
        for earlier in reversed(range(s)):
            there, decay = board[b, h, earlier]
            state, factor = state + _times(factor, there), _product(factor, decay, stop)
            if factor is None:
                break
        state = state + _times(factor, p.initial_states[b, h])

        for t, chunk in zip(tokens, chunks):  # pass 2
            y[b, t, h] = chunk.outputs(state)  # 2, 5
            state = _times(chunk.decay(), state) + chunk.adds()  # 3, 4
        final[b, h] = state
    return gate(y, p.x, p.D, p.z), final


def _product(decay, earlier, stop):
    """decay · earlier; None where nothing of what was before counts: another sequence begins, or it is below stop."""
    return None if earlier is None or decay * earlier < stop else decay * earlier


def _times(decay, state):
    """decay · state; zeros where decay is None, whatever the state holds."""
    return np.zeros(state.shape) if decay is None else decay * state


class _Chunk:
    """One chunk of one head: x (q, P), dt (q,), B and C (q, N), all that a block holds at a time."""

    def __init__(self, x, dt, A, B, C, runs, enters):
        self.x, self.dt, self.B, self.C, self.runs, self.enters = x, dt, B, C, runs, enters
        self.a = np.zeros(len(dt))  # 1. the running sum of A · dt, anew where a sequence begins
        for i, step in enumerate(A * dt):
            self.a[i] = step + (self.a[i - 1] if i and runs[i] == runs[i - 1] else 0)

    def decay(self):
        """What is left at the chunk's end of a state at its start. None: another sequence has begun."""
        return np.exp(self.a[-1]) if self.runs[-1] == self.enters else None

    def adds(self):
        """3. (P, N)"""
        counts = self.runs == self.runs[-1]
        weights = np.exp(self.a[-1] - self.a[counts]) * self.dt[counts]
        return (weights[:, None] * self.x[counts]).T @ self.B[counts]

    def outputs(self, state):
        """2 and 5. (q, P)"""
        inside = np.tri(len(self.a), dtype=bool) & (self.runs[:, None] == self.runs)
        decay = np.exp(np.where(inside, self.a[:, None] - self.a, -np.inf))
        M = np.where(inside, self.C @ self.B.T * decay * self.dt, 0)
        before = np.exp(self.a)[:, None] * (self.C @ state.T)
        return selected_product(inside, M, self.x) + np.where((self.runs == self.enters)[:, None], before, 0)


def _chunk(p, b, h, g, t):
    dt = step_sizes(p.dt[b, t], **p.steps)[:, h]
    enters = p.runs[b, t.start - 1] if t.start else 0
    return _Chunk(p.x[b, t, h], dt, p.A[h], p.B[b, t, g], p.C[b, t, g], p.runs[b, t], enters)
