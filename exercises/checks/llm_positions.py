"""Checks of chapter 17, exercises 2 and 3: the order of rotary pairs, and positions that are off by one."""

import dataclasses
import itertools
import warnings

import numpy as np

from exercises.checks import array_from, counted, shown, time_limit
from lab.check import differs
from lab.exercise import Exercise, Wrong
from ref.attention import decode_attention
from ref.llm import Layer, rope, rope_frequencies

# Exercise 2: two layouts

IN_ORDER = {"Wq": "n_heads", "Wk": "n_kv_heads", "bq": "n_heads", "bk": "n_kv_heads", "q_norm": 1, "k_norm": 1}
# n_heads, n_kv_heads, head_dim, hidden, biases, norms of heads, dtype
MODELS = [
    (1, 1, 2, 1, False, False, np.float32),
    (1, 1, 4, 1, False, False, np.float32),
    (1, 1, 6, 1, False, False, np.float32),
    (1, 1, 8, 5, False, False, np.float32),
    (2, 2, 6, 3, False, False, np.float32),
    (2, 1, 6, 3, False, False, np.float32),
    (4, 2, 8, 3, False, False, np.float32),
    (2, 2, 6, 3, True, False, np.float32),
    (4, 2, 8, 3, True, False, np.float32),
    (2, 2, 6, 3, False, True, np.float32),
    (6, 3, 10, 7, True, True, np.float16),
]


def _layer(rng, n_heads, n_kv_heads, head_dim, hidden, biases, norms, dtype):
    """A layer whose numbers all differ."""
    rows, kv_rows, ffn = n_heads * head_dim, n_kv_heads * head_dim, 3
    shapes = {"Wq": (rows, hidden), "Wk": (kv_rows, hidden), "Wv": (kv_rows, hidden), "Wo": (hidden, rows)}
    shapes |= {"attention_norm": hidden, "ffn_norm": hidden, "W_gate": (ffn, hidden), "W_up": (ffn, hidden)}
    shapes |= {"W_down": (hidden, ffn)}
    if biases:
        shapes |= {"bq": rows, "bk": kv_rows, "bv": kv_rows}
    if norms:
        shapes |= {"q_norm": head_dim, "k_norm": head_dim}
    return Layer(**{name: _all_different(rng, shape).astype(dtype) for name, shape in shapes.items()})


def _all_different(rng, shape):
    return (rng.permutation(int(np.prod(shape))) / 8 + 1).reshape(shape)


def _order(heads, head_dim):
    """Which of the original rows come one after the other."""
    one = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return np.array([head * head_dim + row for head in range(heads) for row in one])


def exercise_2(to_halves):
    """to_halves(layer, n_heads, n_kv_heads, head_dim) -> Layer"""
    exercise = Exercise("Exercise 2: two layouts")
    rng = np.random.default_rng()
    drawn = []
    for _ in range(8):
        groups, kv_heads, half, hidden = (int(n) for n in rng.integers(1, [5, 5, 17, 9]))
        drawn.append(
            (groups * kv_heads, kv_heads, 2 * half, hidden, *(bool(b) for b in rng.integers(2, size=2)), np.float32)
        )
    with exercise, time_limit():
        for model in MODELS + drawn:
            _converted(to_halves, rng, *model)
    return exercise.report(f"right for {len(MODELS + drawn)} layers, and what has no positions stays")


def _converted(to_halves, rng, n_heads, n_kv_heads, head_dim, *rest):
    layer = _layer(rng, n_heads, n_kv_heads, head_dim, *rest)
    before = {name: None if a is None else a.copy() for name, a in vars(layer).items()}
    of_keys = counted(n_kv_heads, "head") + " of keys"
    at = f"with {counted(n_heads, 'head')}, {of_keys}, head_dim = {head_dim}"
    at += "".join(f", {word}" for word, there in zip(("biases", "norms of heads"), rest[1:]) if there)
    try:
        got = to_halves(layer, n_heads, n_kv_heads, head_dim)
    except ValueError as error:
        if "reshape" not in str(error):
            raise
        raise Wrong(f"{at} the rows do not fit the heads: {error}") from None
    if got is None:
        raise Wrong(f"{at} your function gave None. Does it return its result?")
    if not all(hasattr(got, field.name) for field in dataclasses.fields(Layer)):
        raise Wrong(f"{at} your function gave {shown(got)}, expected a Layer")
    for name, original in before.items():
        now = getattr(layer, name)
        if (now is None) != (original is None) or now is not None and not np.array_equal(now, original):
            raise Wrong(f"{at} your function changed {name} of the layer that it was given")
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, 1: 1}
    for name, original in before.items():
        order = _order(heads[IN_ORDER[name]], head_dim) if name in IN_ORDER else None
        _same_rows(name, getattr(got, name), original, order, at)


def _same_rows(name, got, original, order, at):
    """Raise Wrong unless `got` is the original, its rows in that order (None: as they were)."""
    if original is None or got is None:
        if got is not original:
            raise Wrong(f"{at}: {name} is {shown(got)}, expected {'None' if original is None else 'an array'}")
        return
    if not isinstance(got, np.ndarray) or (got.shape, got.dtype) != (original.shape, original.dtype):
        what = f"{got.dtype} of shape {got.shape}" if isinstance(got, np.ndarray) else shown(got)
        raise Wrong(f"{at}: {name} is {what}, expected {original.dtype} of shape {original.shape}")
    order = np.arange(len(original)) if order is None else order
    bad = np.flatnonzero((got != original[order]).reshape(len(got), -1).any(axis=1))
    if not len(bad):
        return
    row, what = int(bad[0]), "row" if original.ndim > 1 else "number"
    known = [n for n in range(len(original)) if np.array_equal(got[row], original[n])]
    is_now = f"{what} {known[0]} of the original" if known else f"no {what} of the original"
    raise Wrong(f"{at}: {what} {row} of {name} is {is_now}, expected {what} {order[row]}")


# Exercise 3: one off

# n_heads, n_kv_heads, head_dim, kv_len before, rows of the cache, window
STEPS = [
    (1, 1, 2, 0, 3, None),
    (1, 1, 2, 1, 4, None),
    (1, 1, 4, 2, 3, None),
    (2, 1, 4, 5, 9, None),
    (4, 2, 8, 9, 10, None),
    (1, 1, 2, 3, 7, 1),
    (1, 1, 2, 3, 7, 2),
    (1, 1, 2, 3, 7, 3),
    (1, 1, 2, 3, 7, 4),
    (1, 1, 2, 3, 7, 5),
    (1, 1, 2, 0, 7, 1),
    (4, 2, 8, 20, 21, 8),
    (2, 2, 6, 2000, 2003, 3),
    (2, 1, 4, 300, 303, None),
]


def exercise_3(decode_step):
    """decode_step(q, k, v, keys, values, kv_len, frequencies, window) -> (n_heads, head_dim)"""
    exercise = Exercise("Exercise 3: one off")
    rng, first = np.random.default_rng(), np.random.default_rng(17)  # the stub's verdict is the same on every run
    cases = [(*case, False) for case in STEPS] + [(*case, True) for case in STEPS]
    for _ in range(10):
        kv_heads, kv_len, more = (int(n) for n in rng.integers(1, [4, 40, 9]))
        window = int(rng.integers(1, 50)) if rng.random() < 0.5 else None
        cases.append((2 * kv_heads, kv_heads, 16, kv_len, kv_len + more, window, bool(rng.integers(2))))
    with exercise, time_limit(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            _stepped(decode_step, first if case is cases[0] else rng, *case)
    return exercise.report(f"right at {len(cases)} lengths, and of the cache one row is new")


def _mixed(q, k, v, keys, values, kv_len, frequencies, window, off=(0, 0, 0)):
    """What attention gives if the query's position, the first row and the last are off by so much."""
    keys, values = keys.copy(), values.copy()
    keys[kv_len], values[kv_len] = rope(k, kv_len, frequencies), v
    first = 0 if window is None else max(0, kv_len + 1 - window + off[1])
    seen = slice(first, kv_len + 1 + off[2])
    return decode_attention(rope(q, kv_len + off[0], frequencies)[None], keys[None, seen], values[None, seen])[0]


def _stepped(decode_step, rng, n_heads, n_kv_heads, head_dim, kv_len, capacity, window, nothing_behind):
    """nothing_behind: rows behind the new token's are NaN; else those of an older text."""
    at = f"with {counted(kv_len, 'token')} in the cache, which has room for {capacity}"
    at += (", no window" if window is None else f", a window of {window}") + (
        ", NaN behind them" if nothing_behind else ""
    )
    q, k, v = (rng.standard_normal((n, head_dim)) for n in (n_heads, n_kv_heads, n_kv_heads))
    keys, values = rng.standard_normal((2, capacity, n_kv_heads, head_dim))
    if nothing_behind:
        keys[kv_len:], values[kv_len:] = np.nan, np.nan
    frequencies = rope_frequencies(head_dim)
    given = q, k, v, keys.copy(), values.copy()
    wanted = _mixed(q, k, v, keys, values, kv_len, frequencies, window)
    copies = [a.copy() for a in (q, k, v)]
    try:
        got = decode_step(*copies, given[3], given[4], kv_len, frequencies, window)
    except ValueError as error:
        raise Wrong(f"{at}: {error}") from None
    got = array_from(got, wanted.shape, at)
    key = rope(k, kv_len, frequencies)
    for name, now, before, new in (("keys", given[3], keys, key), ("values", given[4], values, v)):
        _one_row_is_new(name, now, before, new, kv_len, at)
    if not all(np.array_equal(a, b) for a, b in zip(copies, (q, k, v))):
        raise Wrong(f"{at} your function changed q, k or v")
    bad = np.argwhere(~(np.abs(got - wanted) <= 1e-9))
    if len(bad):
        place = tuple(int(n) for n in bad[0])
        likely = _as_if(got, q, k, v, keys, values, kv_len, frequencies, window)
        index = ", ".join(map(str, place))
        raise Wrong(f"{at}: {differs(f'the result[{index}]', got[place], wanted[place])}{likely}")


def _one_row_is_new(name, now, before, new, kv_len, at):
    off = ~(np.isclose(now, before, rtol=0, atol=0, equal_nan=True)).all(axis=(1, 2))
    off[kv_len] = False
    if off.any():
        raise Wrong(f"{at} your function changed row {int(np.flatnonzero(off)[0])} of {name}; only row {kv_len} is new")
    if not np.allclose(now[kv_len], new, rtol=0, atol=1e-9):
        what = f"the key, turned to position {kv_len}" if name == "keys" else "the value"
        raise Wrong(f"{at}: row {kv_len} of {name} is not {what}")


def _as_if(got, q, k, v, keys, values, kv_len, frequencies, window):
    """What may have been off by one, in words; "" if nothing of that explains the result."""
    for off in itertools.product((0, 1, -1), repeat=3):
        begin = 0 if window is None else max(0, kv_len + 1 - window)
        first, end = max(0, begin + off[1]), kv_len + 1 + off[2]
        if window is None and off[1] or end > len(keys) or first >= end:
            continue
        other = _mixed(q, k, v, keys, values, kv_len, frequencies, window, off)
        if np.allclose(got, other, rtol=0, atol=1e-9):
            said = [f"the query stood at position {kv_len + off[0]}, not {kv_len}"] if off[0] else []
            if (first, end) != (begin, kv_len + 1):
                said.append(f"attention saw rows {first} to {end - 1} of the cache, not {begin} to {kv_len}")
            return ": as if " + ", and ".join(said)
    return ""
