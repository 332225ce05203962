"""Planted wrong answers to the exercises of chapter 21: {exercise: {mistake: (answer, what the check says)}}."""

import numpy as np

# Exercise 1: the reverse scan


def _states(a, reads, d_final):
    """The right answer."""
    d_h, behind = np.zeros(reads.shape), d_final
    for t in reversed(range(len(a))):
        d_h[t] = reads[t] + behind
        behind = np.where(a[t] == 0, 0, a[t] * d_h[t])
    return d_h, behind


def _own_decay(a, reads, d_final):
    """A gradient comes back through the decay of the token itself."""
    d_h, behind = np.zeros(reads.shape), d_final
    for t in reversed(range(len(a))):
        d_h[t] = behind = reads[t] + np.where(a[t] == 0, 0, a[t] * behind)
    return d_h, behind


def _start_undecayed(a, reads, d_final):
    d_h, _ = _states(a, reads, d_final)
    return d_h, d_h[0]


def _no_final(a, reads, d_final):
    return _states(a, reads, 0 * np.nan_to_num(d_final))


def _forwards(a, reads, d_final):
    d_h, before = np.zeros(reads.shape), d_final
    for t in range(len(a)):
        d_h[t] = reads[t] + before
        before = np.where(a[t] == 0, 0, a[t] * d_h[t])
    return d_h, before


def _multiplied(a, reads, d_final):
    """0 times NaN."""
    d_h, behind = np.zeros(reads.shape), d_final
    for t in reversed(range(len(a))):
        d_h[t] = reads[t] + behind
        behind = a[t] * d_h[t]
    return d_h, behind


def _quotients(a, reads, d_final):
    """Products from the front, divided: 0 / 0 where they underflow."""
    p = np.cumprod(np.where(a == 0, 1e-30, a))
    sums = np.cumsum((p[:, None] * reads)[::-1], axis=0)[::-1] + p[-1] * d_final
    d_h = sums / p[:, None]
    return d_h, a[0] * d_h[0]


def _in_place(a, reads, d_final):
    d_h, d_start = _states(a, reads, d_final)
    reads[:] = d_h
    return reads, d_start


# Exercise 2: what a decay answers for


def _decays(flows, crosses, dt, Q, *, ends=None, sums=None, total=None):
    """The right answer, with parts of it replaced."""
    L, K = len(flows), len(crosses)
    chunks = np.pad(flows, (0, K * Q - L)).reshape(K, Q)
    inside = (_to_the_end if sums is None else sums)(chunks)
    d_log = (inside + (crosses if ends is None else ends(crosses))[:, None]).reshape(-1)[:L]
    return d_log, (d_log * dt).sum() if total is None else total(d_log, dt)


def _to_the_end(chunks):
    return chunks[:, ::-1].cumsum(axis=1)[:, ::-1]


def _d(**changes):
    return lambda *given: _decays(*given, **changes)


def _one_sum(flows, crosses, dt, Q):
    """One sum over all tokens, as in the chapter's first form."""
    d_log = flows[::-1].cumsum()[::-1] + crosses[-1]
    return d_log, (d_log * dt).sum()


def _padded_in_front(flows, crosses, dt, Q):
    L, K = len(flows), len(crosses)
    chunks = np.pad(flows, (K * Q - L, 0)).reshape(K, Q)
    d_log = (_to_the_end(chunks) + crosses[:, None]).reshape(-1)[K * Q - L :]
    return d_log, (d_log * dt).sum()


def _token_by_token(flows, crosses, dt, Q):
    d_log = np.zeros_like(flows)
    for t in reversed(range(len(flows))):
        last = t == len(flows) - 1 or t % Q == Q - 1
        d_log[t] = flows[t] + (crosses[t // Q] if last else d_log[t + 1])
    return d_log, (d_log * dt).sum()


# Exercise 3: memory against time


def _through(step, back, h0, K, s, d_last, *, every=None):
    """The right answer; every: keep each of so many in place of s."""
    s = s if every is None else every(K, s)
    kept, h, d = [], h0, d_last
    for k in range(K):
        if k % s == 0:
            kept.append(h)
        h = step(k, h)
    for first in reversed(range(0, K, s)):
        states = [kept.pop()]
        for k in range(first, min(first + s, K) - 1):
            states.append(step(k, states[-1]))
        for k in reversed(range(first, first + len(states))):
            d = back(k, states.pop(), d)
    return d


def _t(every):
    return lambda *given: _through(*given, every=every)


def _from_the_start(step, back, h0, K, s, d_last):
    """Nothing is kept."""
    d = d_last
    for k in reversed(range(K)):
        h = h0
        for j in range(k):
            h = step(j, h)
        d = back(k, h, d)
    return d


def _never_freed(step, back, h0, K, s, d_last):
    """What was made again is held until the end."""
    kept, h, d = {}, h0, d_last
    for k in range(K):
        if k % s == 0:
            kept[k] = h
        h = step(k, h)
    for k in reversed(range(K)):
        first = k // s * s
        for j in range(first, k):
            if j + 1 not in kept:
                kept[j + 1] = step(j, kept[j])
        d = back(k, kept[k], d)
    return d


def _behind(step, back, h0, K, s, d_last):
    """The state behind each step in the place of that before it."""
    states, d = [h0], d_last
    for k in range(K):
        states.append(step(k, states[-1]))
    for k in reversed(range(K)):
        d = back(k, states[k + 1], d)
    return d


def _in_order(step, back, h0, K, s, d_last):
    h, d = h0, d_last
    for k in range(K):
        d = back(k, h, d)
        h = step(k, h)
    return d


def _whole_segments(step, back, h0, K, s, d_last):
    """The last segment is taken to be whole."""
    return _through(step, back, h0, -(-K // s) * s, s, d_last)


# Exercise 4: find the bug


def _chunked_back(dy, x, dA, dt, B, C, Q, *, past=None, crossing=None, table=None):
    """The right answer, with parts of it replaced."""
    L = len(x)
    dy, x, dA, dt, B, C = (np.pad(v, [(0, -L % Q)] + [(0, 0)] * (v.ndim - 1)) for v in (dy, x, dA, dt, B, C))
    dy, x, dA, dt, B, C = (v.reshape(-1, Q, *v.shape[1:]) for v in (dy, x, dA, dt, B, C))
    a = np.cumsum(dA, axis=1)
    CB = C @ B.swapaxes(1, 2)
    from_start, to_end, whole = np.exp(a)[..., None], np.exp(a[:, -1:] - a)[..., None], np.exp(a[:, -1])
    u = dt[..., None] * x
    S, T = (to_end * u).swapaxes(1, 2) @ B, (from_start * dy).swapaxes(1, 2) @ C
    H, G = np.zeros_like(S), np.zeros_like(S)
    for k in range(1, len(S)):
        H[k] = whole[k - 1] * H[k - 1] + S[k - 1]
    for k in reversed(range(1, len(S))):
        G[k - 1] = (_passed if past is None else past)(whole, G, T, k)
    decays = np.exp(np.where(np.tri(Q, dtype=bool), a[:, :, None] - a[:, None], -np.inf))
    du = (CB * decays).swapaxes(1, 2) @ dy + to_end * (B @ G.swapaxes(1, 2))
    R = (dy @ x.swapaxes(1, 2)) * decays * (dt[:, None] if table is None else table(dt))
    dC, dB = R @ B + from_start * (dy @ H), R.swapaxes(1, 2) @ C + to_end * (u @ G)
    y = (CB * decays) @ u + from_start * (C @ H.swapaxes(1, 2))
    flows = (dy * y - u * du).sum(axis=-1)
    held = (whole[:, None, None] * H + S) if crossing is None else crossing(whole, H, S)
    d_log = flows[:, ::-1].cumsum(axis=1)[:, ::-1] + (G * held).sum(axis=(1, 2))[:, None]
    return [v.reshape(-1, *v.shape[2:])[:L] for v in (dt[..., None] * du, dB, dC, d_log)]


def _passed(whole, G, T, k):
    return whole[k] * G[k] + T[k]


def _b(**changes):
    return lambda *given: _chunked_back(*given, **changes)


def _by_tokens(dy, x, dA, dt, B, C, Q):
    return _chunked_back(dy, x, dA, dt, B, C, 1)


RIGHT = {1: _states, 2: _decays, 3: _through, 4: _chunked_back}
WRONG = {
    1: {
        "the token's own decay": (_own_decay, "d_start has 1 at [0], expected 0.5"),
        "the initial state's gradient undecayed": (_start_undecayed, "d_start has 1 at [0], expected 0.5"),
        "the final state's gradient left out": (_no_final, "d_final = [4]: d_h has 1 at [0, 0], expected 5"),
        "from the first token to the last": (_forwards, "d_h has"),
        "multiplied by 0": (_multiplied, "with NaN behind a decay of 0: d_h has nan"),
        "quotients of products": (_quotients, "d_h has"),
        "written into its argument": (_in_place, "changed an argument"),
    },
    2: {
        "one sum over all": (_one_sum, "d_log has"),
        "forgets the borders": (_d(ends=lambda c: 0 * c), "d_log has 3 at [0], expected 7"),
        "the next chunk's border": (_d(ends=lambda c: np.append(c[1:], 0)), "d_log has 3 at [0], expected 7"),
        "from the chunk's start": (_d(sums=lambda v: v.cumsum(axis=1)), "d_log has"),
        "without the token itself": (_d(sums=lambda v: _to_the_end(v) - v), "d_log has 4 at [0], expected 7"),
        "dt left out of d_A": (_d(total=lambda d, dt: d.sum()), "d_A is 7, expected 3.5"),
        "d_A as a mean": (_d(total=lambda d, dt: (d * dt).mean()), "d_A is"),
        "filled up in front": (_padded_in_front, "d_log has"),
        "a step for each token": (_token_by_token, "steps of Python"),
    },
    3: {
        "all states kept": (_t(lambda K, s: 1), "were alive at once; wanted: at most"),
        "only the first kept": (_t(lambda K, s: K), "were alive at once; wanted: at most"),
        "each made from the start": (_from_the_start, "step was called"),
        "never freed": (_never_freed, "were alive at once; wanted: at most"),
        "the state behind a step": (_behind, "was given the state before step 1"),
        "in the order of the way there": (_in_order, "expected step 1: the last one first"),
        "the last segment taken to be whole": (_whole_segments, "steps are 0 to"),
        "no way back": (lambda step, back, h0, K, s, d: d, "back was called for 0 steps, expected 1"),
    },
    4: {
        "to the neighbour alone": (_b(past=lambda w, G, T, k: T[k]), "dx has"),
        "what the chunk added alone": (_b(crossing=lambda w, H, S: S), "d(A dt) has"),
        "the state before the chunk": (_b(crossing=lambda w, H, S: H), "d(A dt) has"),
        "the neighbour's decay": (_b(past=lambda w, G, T, k: w[k - 1] * G[k] + T[k]), "dx has"),
        "the reader's dt": (_b(table=lambda dt: dt[:, :, None]), "dB has"),
        "all in one chunk": (lambda *given: _chunked_back(*given[:-1], len(given[1])), "your function took"),
        "chunks of one token": (_by_tokens, "steps of Python"),
        "Q taken for 1": (lambda *given: _chunked_back(*given[:-1], 1), "steps of Python"),
    },
}
