"""Wrong answers to exercises 2 and 3 of chapter 17, in the form of llm.py's."""

import dataclasses

import numpy as np

from ref.attention import decode_attention
from ref.llm import rope

# Exercise 2: two layouts


def _pairs(rows, heads):
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _converter(
    reorder=_pairs,
    names=("Wq", "Wk", "bq", "bk", "q_norm", "k_norm"),
    of_keys=lambda n_heads, n_kv_heads: n_kv_heads,
    of_norms=1,
    keep=lambda a: a,
    none=lambda: None,
):
    """Right, but for what is said."""

    def to_halves(layer, n_heads, n_kv_heads, head_dim):
        kv = of_keys(n_heads, n_kv_heads)
        heads = {"Wq": n_heads, "Wk": kv, "Wv": kv, "bq": n_heads, "bk": kv, "bv": kv, "q_norm": of_norms}
        heads |= {"k_norm": of_norms, "Wo": n_heads}
        found = {name: getattr(layer, name) for name in names}
        return dataclasses.replace(
            layer, **{n: none() if a is None else keep(reorder(a, heads[n])) for n, a in found.items()}
        )

    return to_halves


def _backwards(rows, heads):
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _halves_swapped(rows, heads):
    """The second number of each pair first: turned the other way round."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])[:, :, ::-1]
    return split.swapaxes(1, 2).reshape(rows.shape)


def _whole_matrix(rows, heads):
    """Pairs of all heads together."""
    return _pairs(rows, 1)


def _columns(rows, heads):
    """Columns, and not rows."""
    if rows.ndim < 2 or rows.shape[1] % 2:
        return rows
    return np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)


def _rows_or_columns(rows, heads):
    """Of a matrix with fewer rows than its heads would have, columns."""
    return _pairs(rows, heads) if len(rows) % (2 * heads) == 0 else _pairs(rows.T.copy(), heads).T.copy()


def _heads_of_four(rows, heads):
    head_dim = len(rows) // heads
    return _pairs(rows, len(rows) // 4) if head_dim % 4 == 0 else _pairs(rows, heads)


def _in_place(layer, n_heads, n_kv_heads, head_dim):
    layer.Wq[:] = _pairs(layer.Wq, n_heads)
    layer.Wk[:] = _pairs(layer.Wk, n_kv_heads)
    return layer


def _stub(layer, n_heads, n_kv_heads, head_dim):
    return dataclasses.replace(layer, Wq=_backwards(layer.Wq, n_heads), Wk=_backwards(layer.Wk, n_heads))


QKV = "Wq", "Wk", "Wv", "bq", "bk", "bv", "q_norm", "k_norm"
EX2 = {
    "halves to pairs": (_converter(_backwards), "head_dim = 6: row 1 of Wq is row 3 of the original, expected row 2"),
    "the second number of a pair first": (_converter(_halves_swapped), "head_dim = 2: row 0 of Wq is row 1"),
    "all heads as one": (_converter(_whole_matrix), "with 2 heads"),
    "columns of W": (_converter(_columns), "row 1 of Wq is row 1"),
    "heads of four numbers": (_converter(_heads_of_four), "head_dim = 8"),
    "as many heads of keys as of queries": (
        _converter(of_keys=lambda n_heads, n_kv_heads: n_heads),
        "with 2 heads, 1 head of keys, head_dim = 6 the rows do not fit the heads",
    ),
    "keys stay": (_converter(names=("Wq", "bq", "q_norm")), "row 1 of Wk is row 1 of the original"),
    "values too": (_converter(names=QKV), "row 1 of Wv is row 2 of the original, expected row 1"),
    "the output's columns too": (
        _converter(names=("Wq", "Wk", "bq", "bk", "q_norm", "k_norm", "Wo"), reorder=_rows_or_columns),
        "of Wo is",
    ),
    "no biases": (_converter(names=("Wq", "Wk", "q_norm", "k_norm")), "biases: number 1 of bq is number 1"),
    "a bias of values": (_converter(names=("Wq", "Wk", "bq", "bk", "bv", "q_norm", "k_norm")), "of bv is number 2"),
    "no norms of heads": (_converter(names=("Wq", "Wk", "bq", "bk")), "norms of heads: number 1 of q_norm"),
    "a norm of queries only": (_converter(names=("Wq", "Wk", "bq", "bk", "q_norm")), "number 1 of k_norm"),
    "uniform-input luck: only the direction is mended": (
        lambda layer, n_heads, n_kv_heads, head_dim: dataclasses.replace(
            layer, Wq=_pairs(layer.Wq, n_heads), Wk=_pairs(layer.Wk, n_heads)
        ),
        "the rows do not fit the heads",
    ),
    "as it was": (_stub, "head_dim = 6: row 1 of Wq"),
    "over the layer that was given": (_in_place, "changed Wq of the layer"),
    "zeros for what is not there": (_converter(none=lambda: np.zeros(2)), "expected None"),
    "wrong precision": (
        _converter(keep=lambda a: a.astype(np.float64)),
        "is float64 of shape (2, 1), expected float32",
    ),
    "only the matrices": (
        lambda layer, *sizes: (_pairs(layer.Wq, sizes[0]), _pairs(layer.Wk, sizes[1])),
        "expected a Layer",
    ),
}

# Exercise 3: one off


def _step(query=0, key=0, first=0, last=0, row=0, cut=None, clear=None, window_of=lambda w: w):
    """Right, but for what is off by so much."""

    def decode_step(q, k, v, keys, values, kv_len, frequencies, window=None):
        at = min(kv_len + row, len(keys) - 1)
        keys[at], values[at] = rope(k, kv_len + key, frequencies), v
        if clear:
            clear(keys, values, kv_len)
        window = window_of(window)
        begin = 0 if window is None else max(0, kv_len + 1 - window + first)
        seen = slice(begin, kv_len + 1 + last)
        turned = rope(q, kv_len + query, frequencies)
        return decode_attention(turned[None], keys[None, seen], values[None, seen])[0]

    return decode_step


def _zeros_behind(keys, values, kv_len):
    keys[kv_len + 1 :], values[kv_len + 1 :] = 0, 0


def _masked(q, k, v, keys, values, kv_len, frequencies, window=None):
    """All rows, those that do not count with weight 0: 0 times NaN is NaN."""
    keys[kv_len], values[kv_len] = rope(k, kv_len, frequencies), v
    at = np.arange(len(keys))
    counts = (at <= kv_len) & (at > kv_len - (window or len(keys) + 1))
    group = len(q) // keys.shape[1]
    out = np.empty(q.shape)
    for head, query in enumerate(rope(q, kv_len, frequencies)):
        s = np.where(counts, keys[:, head // group] @ query / np.sqrt(len(query)), -np.inf)
        p = np.exp(s - s.max())
        out[head] = p @ values[:, head // group] / p.sum()
    return out


def _the_newest_alone(q, k, v, keys, values, kv_len, frequencies, window=None):
    keys[kv_len], values[kv_len] = rope(k, kv_len, frequencies), v
    return np.repeat(v, len(q) // len(v), axis=0)


def _turned_in_place(q, k, v, keys, values, kv_len, frequencies, window=None):
    keys[kv_len], values[kv_len] = rope(k, kv_len, frequencies), v
    q[:] = rope(q, kv_len, frequencies)
    seen = slice(max(0, kv_len + 1 - (window or kv_len + 1)), kv_len + 1)
    return decode_attention(q[None], keys[None, seen], values[None, seen])[0]


def _not_kept(q, k, v, keys, values, kv_len, frequencies, window=None):
    return STEP(q, k, v, keys.copy(), values.copy(), kv_len, frequencies, window)


def _old_keys_turned_again(q, k, v, keys, values, kv_len, frequencies, window=None):
    """Positions counted from the window's first token."""
    first = 0 if window is None else max(0, kv_len + 1 - window)
    keys[kv_len], values[kv_len] = rope(k, kv_len - first, frequencies), v
    seen = slice(first, kv_len + 1)
    turned = rope(q, kv_len - first, frequencies)
    return decode_attention(turned[None], keys[None, seen], values[None, seen])[0]


STEP = _step()
EX3 = {
    "as it was": (_step(query=1, first=-1, last=1), "as if the query stood at position 1, not 0, and attention saw"),
    "the query is one ahead": (_step(query=1), "as if the query stood at position 2, not 1"),
    "the query is one behind": (_step(query=-1), "as if the query stood at position 0, not 1"),
    "the key is one ahead": (_step(key=1), "row 0 of keys is not the key, turned to position 0"),
    "query and key are one ahead, which nothing shows but the cache": (
        _step(query=1, key=1),
        "row 0 of keys is not the key, turned to position 0",
    ),
    "one row too many": (_step(last=1), "as if attention saw rows 0 to 1 of the cache, not 0 to 0"),
    "the newest token is left out": (_step(last=-1), "must hold at least one token, got an empty cache"),
    "the newest token is left out, but at the start": (
        lambda q, k, v, keys, values, kv_len, *rest: _step(last=-1 if kv_len else 0)(
            q, k, v, keys, values, kv_len, *rest
        ),
        "with 1 token in the cache, which has room for 4, no window: the result[0, 0]",
    ),
    "the window has one token more": (_step(first=-1), "as if attention saw rows 2 to 3 of the cache, not 3 to 3"),
    "the window has one token less": (_step(first=1), "a window of 1"),
    "no more than 64 tokens are seen": (
        _step(window_of=lambda w: min(w or 64, 64)),
        "with 300 tokens in the cache",
    ),
    "no window": (_step(window_of=lambda w: None), "a window of 1"),
    "a row further": (_step(row=1), "changed row 1 of keys"),
    "zeros behind the newest, so that a row too many hardly shows": (
        _step(clear=_zeros_behind),
        "changed row 1 of keys; only row 0 is new",
    ),
    "all rows, with weights of 0": (_masked, "NaN behind them"),
    "only the newest token": (_the_newest_alone, "with 1 token in the cache"),
    "a window moves positions": (_old_keys_turned_again, "of keys is not the key, turned to position 3"),
    "the query is turned where it lies": (
        _turned_in_place,
        "with 1 token in the cache, which has room for 4, no window your function changed q, k or v",
    ),
    "nothing is put into the cache": (_not_kept, "row 0 of keys is not the key"),
    "forgets to return": (lambda *given: None, "gave None"),
}

RIGHT = {2: _converter(), 3: STEP}
WRONG = {2: EX2, 3: EX3}
