"""Wrong answers to the exercises of chapter 11. Each says the mistake that it makes, and what the check must find.

WRONG maps an exercise's number to {mistake: (the functions that its check takes, part of the message)}.
"""

import numpy as np

from ref.ssd import segsum

# Exercise 1: segment sums


def _sums(a):
    a = np.asarray(a, float)
    terms = np.where(np.tri(len(a), k=-1, dtype=bool), a[:, None], 0)
    return np.where(np.tri(len(a), dtype=bool), np.cumsum(terms, axis=0), -np.inf)


def _differences(a):
    running = np.cumsum(a)
    return np.where(np.tri(len(a), dtype=bool), running[:, None] - running, -np.inf)


def _kept_finite(a):
    """Differences, mended for -inf only."""
    return np.where(np.isfinite(a).all(), _differences(a), _sums(a))


def _with_own(a):
    terms = np.where(np.tri(len(a), dtype=bool), np.asarray(a)[:, None], 0)
    return np.where(np.tri(len(a), dtype=bool), np.cumsum(terms, axis=0), -np.inf)


def _times_zero(a):
    terms = np.tri(len(a), k=-1) * np.asarray(a)[:, None]
    return np.where(np.tri(len(a), dtype=bool), np.cumsum(terms, axis=0), -np.inf)


def _in_single(a):
    return _sums(np.asarray(a, np.float32)).astype(np.float32)


def _in_place(a):
    result = _sums(a)
    a[:] = 0
    return result


# Exercise 2: the mask


def _matrix(A, dt, B, C, seq_idx, *, sees=None, sums=None, weight=None, table=None, early=True, chosen=True):
    """The right answer, with parts of it replaced."""
    seen = np.tri(len(dt), dtype=bool) & (seq_idx[:, None] == seq_idx) if sees is None else sees(dt, seq_idx)
    exponent = (segsum if sums is None else sums)(A * dt)
    decay = np.exp(np.where(seen, exponent, -np.inf) if early else exponent)
    product = (C @ B.T if table is None else table(B, C)) * decay * (dt if weight is None else weight(dt))
    return np.where(seen, product, 0) if chosen else product * seen


def _m(**changes):
    return lambda *arrays: _matrix(*arrays, **changes)


def _lower(dt, seq_idx):
    return np.tri(len(dt), dtype=bool)


def _strict(dt, seq_idx):
    return np.tri(len(dt), k=-1, dtype=bool) & (seq_idx[:, None] == seq_idx)


def _nearly_zero(A, dt, B, C, seq_idx):
    """What is not seen is small, and not 0."""
    return np.where(_lower(dt, seq_idx) & (seq_idx[:, None] == seq_idx), _matrix(A, dt, B, C, seq_idx), 1e-13)


def _running(a):
    running = np.cumsum(a)
    return running[:, None] - running


# Exercise 3: a scan


def _combine(first, second):
    (d1, s1), (d2, s2) = first, second
    return d1 * d2, d2[:, None] * s1 + s2


def _pair(decays, adds):
    """A `combine` of other formulas."""
    return lambda first, second: (decays(first[0], second[0]), adds(*first, *second))


def _scan(combine, decays, adds, initial, *, front=None, rounds=None, swapped=False):
    """The right answer, with parts of it replaced."""
    d = np.concatenate([[1.0], decays[:-1]])
    s = np.concatenate([(initial if front is None else front(initial))[None], adds[:-1]])
    step, left = 1, rounds(len(d)) if rounds else len(d)
    while step < len(d) and left > 0:
        pairs = (d[:-step], s[:-step]), (d[step:], s[step:])
        more = combine(*(pairs[::-1] if swapped else pairs))
        d, s = np.concatenate([d[:step], more[0]]), np.concatenate([s[:step], more[1]])
        step, left = 2 * step, left - 1
    return s


def _s(**changes):
    return lambda *given: _scan(*given, **changes)


def _one_by_one(combine, decays, adds, initial):
    states = [initial]
    for k in range(len(decays) - 1):
        states.append(combine((np.ones(1), states[-1][None]), (decays[k : k + 1], adds[k : k + 1]))[1][0])
    return np.array(states)


def _with_numbers(combine, decays, adds, initial):
    return combine((1.0, initial), (decays[0], adds[0]))[1]


def _by_itself(combine, decays, adds, initial):
    states = [initial]
    for k in range(len(decays) - 1):
        states.append(decays[k] * states[-1] + adds[k])
    return np.array(states)


def _behind(combine, decays, adds, initial):
    """States behind the chunks, not before."""
    return _scan(combine, np.append(decays, 1), np.concatenate([adds, adds[:1]]), initial)[1:]


def _initial_on_top(combine, decays, adds, initial):
    return _scan(combine, decays, adds, 0 * initial) + initial


# Exercise 4: the best chunk


def _flops(L, Q, H, P, N, *, entries=None, keys=None, chunks=None, per_token=4):
    full, rest = divmod(L, Q)
    count = full * Q * (Q + 1) // 2 + rest * (rest + 1) // 2 if entries is None else entries(L, Q)
    table = 2 * N if keys is None else keys(H, N)
    states = full + (rest > 0) if chunks is None else chunks(L, Q)
    return count * (table + 2 * P * H) + per_token * P * N * H * L + 2 * P * N * H * states


def _f(**changes):
    return {"chunk_flops": lambda *widths: _flops(*widths, **changes)}


def _best(L, H, P, N, bandwidth, rate, sizes, *, together=max, state=8, pick=min, order=sorted):
    def time(Q):
        moved = 2 * (2 * H * P + H + 2 * N) * L + state * P * N * H * -(-L // Q)
        return together(_flops(L, Q, H, P, N) / rate, moved / bandwidth)

    return pick(order(sizes), key=time)


def _b(**changes):
    return {"best_chunk": lambda *given: _best(*given, **changes)}


# Exercise 5: a chunked form


def _chunked(x, dt, A, B, C, Q, dt_bias, initial, *, tail=True, start=True, first=True, kept=True):
    """Right, with each of the defects to be switched on: tail, start, first, kept."""
    L = len(x)
    if tail:
        dt = np.log1p(np.exp(dt + dt_bias))
    fill = -L % Q
    x, dt, B, C = (np.pad(v, [(0, fill)] + [(0, 0)] * (v.ndim - 1)) for v in (x, dt, B, C))
    if not tail:
        dt = np.log1p(np.exp(dt + dt_bias))
    x, dt, B, C = (v.reshape(-1, Q, *v.shape[1:]) for v in (x, dt, B, C))
    a = np.cumsum(A * dt, axis=1)
    S = ((np.exp(a[:, -1:] - a) * dt)[..., None] * x).swapaxes(1, 2) @ B
    H = np.zeros((len(S) + 1, *initial.shape))
    H[0] = initial if start else 0
    for k in range(len(S)):
        H[k + 1] = (np.exp(a[k, -1]) if k or first else 1) * H[k] + S[k]
    H += 0 if start else initial
    exponent = np.where(np.tri(Q, dtype=bool), a[:, :, None] - a[:, None], -np.inf)
    y = _within(C, B, exponent, dt, x) + np.exp(a)[..., None] * (C @ H[:-1].swapaxes(1, 2))
    return (y.reshape(-1, y.shape[-1])[:L] if kept else y.reshape(-1, y.shape[-1])), H[-1]


def _within(C, B, exponent, dt, x):
    return C @ B.swapaxes(1, 2) * np.exp(exponent) * dt[:, None] @ x


def _c(**changes):
    return {"chunked": lambda *given: _chunked(*given, **changes)}


def _whole_chunks(x, dt, A, B, C, Q, dt_bias, initial):
    """The tail is left out."""
    whole = len(x) // Q * Q
    y, final = _chunked(x[:whole], dt[:whole], A, B[:whole], C[:whole], Q, dt_bias, initial)
    return np.concatenate([y, np.zeros((len(x) - whole, x.shape[1]))]), final


def _no_initial(*given):
    return _chunked(*given[:-1], 0 * given[-1])


RIGHT = {
    1: {"segment_sums": _sums},
    2: {"matrix_form": _matrix},
    3: {"combine": _combine, "states_before": _scan},
    4: {"chunk_flops": _flops, "best_chunk": _best},
    5: {"chunked": _chunked},
}
WRONG = {
    1: {
        "differences of running sums": (
            {"segment_sums": _differences},
            "with a = [-1, -inf, -2, -3]: the result has nan",
        ),
        "differences where all is finite": ({"segment_sums": _kept_finite}, "with a[1] = -1e15 and small numbers:"),
        "the own term is added": ({"segment_sums": _with_own}, "has -1 at [0, 0], expected 0"),
        "multiplied by 0": ({"segment_sums": _times_zero}, "with a = [-1, -inf, -2, -3]: the result has nan"),
        "0 above the diagonal": ({"segment_sums": lambda a: np.tril(_sums(a))}, "at [0, 1], expected -inf"),
        "transposed": ({"segment_sums": lambda a: _sums(a).T}, "at [0, 1], expected -inf"),
        "exponentials": ({"segment_sums": lambda a: np.exp(_sums(a))}, "has 1 at [0, 0], expected 0"),
        "in fp32": ({"segment_sums": _in_single}, "with a[1] = -1e15 and small numbers:"),
        "changes its argument": ({"segment_sums": _in_place}, "changed its argument"),
        "nothing is returned": ({"segment_sums": lambda a: None}, "gave None"),
    },
    2: {
        "the own decay counts": (
            {"matrix_form": _m(sums=lambda a: segsum(a) + a)},
            "with 1 token: M has",
        ),
        "dt of the row": ({"matrix_form": _m(weight=lambda dt: dt[:, None])}, "with 2 tokens: M has"),
        "no dt": ({"matrix_form": _m(weight=np.ones_like)}, "with 1 token: M has"),
        "B and C exchanged": ({"matrix_form": _m(table=lambda B, C: B @ C.T)}, "M has"),
        "a token does not see itself": ({"matrix_form": _m(sees=_strict)}, "with 1 token: M has 0"),
        "sees other sequences": ({"matrix_form": _m(sees=_lower)}, "with 2 sequences of 2, all else 1: M has"),
        "multiplied by the mask": ({"matrix_form": _m(chosen=False)}, "M has nan at"),
        "nearly 0": ({"matrix_form": _nearly_zero}, "with 3 tokens, A = -ln 2, all else 1: M has 1e-13 at [0, 1]"),
        "exponential first": (
            {"matrix_form": _m(early=False, sums=_running, chosen=False)},
            "with A dt around -1000: M has nan",
        ),
        "running sums across sequences": (
            {"matrix_form": _m(sums=_running)},
            "with NaN in dt of the first of 2 sequences: M has nan",
        ),
        "no decay": ({"matrix_form": _m(sums=lambda a: np.zeros((len(a), len(a))))}, "with 3 tokens, A = -ln 2"),
    },
    3: {
        "the first decays what the second adds": (
            {"combine": _pair(lambda d1, d2: d1 * d2, lambda d1, s1, d2, s2: d1[:, None] * s2 + s1)},
            "combine: adds has",
        ),
        "no decay": (
            {"combine": _pair(lambda d1, d2: d1 * d2, lambda d1, s1, d2, s2: s1 + s2)},
            "combine: adds has",
        ),
        "decays are added": (
            {"combine": _pair(lambda d1, d2: d1 + d2, lambda d1, s1, d2, s2: d2[:, None] * s1 + s2)},
            "combine: decays has",
        ),
        "decay of the second only": (
            {"combine": _pair(lambda d1, d2: d2, lambda d1, s1, d2, s2: d2[:, None] * s1 + s2)},
            "combine: decays has",
        ),
        "one chunk after another": ({"states_before": _one_by_one}, "4 chunks: `combine` was called 3 times"),
        "numbers and vectors, not rows of them": (
            {"states_before": _with_numbers},
            "`combine` was given decays and adds of shapes () and (3,), expected (m,) and (m, 3)",
        ),
        "without combine": ({"states_before": _by_itself}, "plain sums as `combine`: the result has"),
        "neighbours swapped": ({"states_before": _s(swapped=True)}, "the chapter's operation: the result has"),
        "no initial state": ({"states_before": _s(front=np.zeros_like)}, "with K = 1, the chapter's operation"),
        "the initial state does not decay": ({"states_before": _initial_on_top}, "with K = 2, the chapter's operation"),
        "states behind the chunks": ({"states_before": _behind}, "with K = 1, the chapter's operation"),
        "rounds rounded down": (
            {"states_before": _s(rounds=lambda K: int(np.log2(K)))},
            "with K = 3, the chapter's operation",
        ),
        "one round": ({"states_before": _s(rounds=lambda K: 1)}, "with K = 3, the chapter's operation"),
    },
    4: {
        "the whole square": (_f(entries=lambda L, Q: L // Q * Q * Q + (L % Q) ** 2), "chunk_flops"),
        "without the diagonal": (
            _f(entries=lambda L, Q: L // Q * Q * (Q - 1) // 2 + (L % Q) * (L % Q - 1) // 2),
            "(1, 1, 1, 1, 1) gave",
        ),
        "the last chunk is full": (_f(entries=lambda L, Q: -(-L // Q) * Q * (Q + 1) // 2), "(3, 2, 1, 1, 1) gave"),
        "the last chunk is left out": (_f(entries=lambda L, Q: L // Q * Q * (Q + 1) // 2), "(3, 2, 1, 1, 1) gave"),
        "its state is left out": (_f(chunks=lambda L, Q: L // Q), "(3, 2, 1, 1, 1) gave"),
        "C Bᵀ for each head": (_f(keys=lambda H, N: 2 * N * H), "(4, 2, 3, 1, 1) gave"),
        "adding only": (_f(per_token=2), "(1, 1, 1, 1, 1) gave"),
        "a float": (_f(chunks=lambda L, Q: float(-(-L // Q))), "expected a whole number"),
        "flops only": (_b(together=lambda flops, moved: flops), "best_chunk"),
        "bytes only": (_b(together=lambda flops, moved: moved), "best_chunk"),
        "one after the other": (_b(together=lambda flops, moved: flops + moved), " takes "),
        "states forgotten": (_b(state=0), "best_chunk"),
        "states in 16 bits": (_b(state=4), " takes "),
        "the slowest": (_b(pick=max), " takes "),
        "the largest of equal ones": (_b(order=lambda sizes: sorted(sizes)[::-1]), "takes as long, and is smaller"),
        "the first of equal ones": (_b(order=lambda sizes: sizes[::-1]), "takes as long, and is smaller"),
        "always 256": ({"best_chunk": lambda *given: 256}, "none of the sizes"),
    },
    5: {
        "the tail decays": (_c(tail=False), "with 3 tokens in chunks of 2, no initial state: the final state has"),
        "the initial state does not decay": (
            _c(start=False),
            "with 1 token in chunks of 1, an initial state: the final state has",
        ),
        "both": (_c(tail=False, start=False), "with 3 tokens in chunks of 2, no initial state: the final state has"),
        "it does not decay through the first chunk": (_c(first=False), "with 1 token in chunks of 1, an initial state"),
        "added tokens are given back": (_c(kept=False), "y has shape (4, 1), expected (3, 1)"),
        "the tail is left out": ({"chunked": _whole_chunks}, "with 3 tokens in chunks of 2, no initial state: y has"),
        "the initial state is left out": ({"chunked": _no_initial}, "with 1 token in chunks of 1, an initial state: y"),
        "y only": ({"chunked": lambda *given: _chunked(*given)[0]}, "expected a pair (y, final state)"),
    },
}

for _answers in (RIGHT, *(dict(enumerate(found for found, _ in one.values())) for one in WRONG.values())):
    for _functions in _answers.values():
        for _name, _function in _functions.items():
            if _function.__name__ == "<lambda>":
                _function.__name__ = _name  # as it would be called in the notebook
