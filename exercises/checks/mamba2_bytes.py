"""Checks of chapter 18, exercise 1: what a token of a hybrid reads and writes, and where the cache overtakes."""

import numpy as np

from exercises.checks import shown, time_limit
from lab.exercise import Exercise, Wrong

SMALL = {
    "hidden": 64, "nheads": 2, "headdim": 8, "dstate": 16, "ngroups": 1, "width": 4,
    "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn": 0, "vocab": 100,
}  # fmt: skip
M, A = "mamba", "attention"
MISTAKES = {  # what would be said of a count: how it is made
    "states are read and written in every layer, attention's too": {"states_everywhere": True},
    "every layer has a cache": {"cache_everywhere": True},
    "the conv state has width − 1 inputs of a channel, not width": {"conv_rows": 0},
    "the convolution runs over x, B and C, not over x alone": {"conv_of_x": True},
    "in_proj gives z as well as x": {"no_z": True},
    "in_proj gives dt too": {"no_dt": True},
    "B and C have dstate numbers for each group, not for each head": {"groups": "nheads"},
    "there may be several groups of B and C": {"groups": 1},
    "only the keys are counted, or only the values": {"cache": 0.5},
    "the cache has heads of keys and values, not of queries": {"kv_heads": "n_heads"},
    "states of 8 bits have scales": {"scales": 0},
    "the feed-forward block stands behind every layer": {"ffn_everywhere": False},
    "the whole embedding is counted, and not one row": {"row": "vocab"},
    "the head is not counted": {"head": 0},
}


def weights_of(s, kind, no_z=False, no_dt=False, groups=None, conv_of_x=False):
    """Bytes of one layer's weights, its norm among them."""
    d_inner, groups = s["nheads"] * s["headdim"], groups or s["ngroups"]
    channels = d_inner + 2 * groups * s["dstate"]
    if kind == A:
        q, kv = s["n_heads"] * s["head_dim"], s["n_kv_heads"] * s["head_dim"]
        return 2 * s["hidden"] * (2 * q + 2 * kv + 1)
    rows = channels + (0 if no_z else d_inner) + (0 if no_dt else s["nheads"])
    of_conv = d_inner if conv_of_x else channels
    return 2 * (s["hidden"] * (rows + d_inner + 1) + d_inner) + 4 * (of_conv * (s["width"] + 1) + 3 * s["nheads"])


def state_of(s, bits, groups=None, conv_rows=-1, conv_of_x=False, scales=1):
    """Bytes of one layer's two states."""
    d_inner = s["nheads"] * s["headdim"]
    channels = d_inner + (0 if conv_of_x else 2 * (groups or s["ngroups"]) * s["dstate"])
    of_row = s["dstate"] * bits // 8 + 4 * scales * (bits == 8)
    return 2 * (s["width"] + conv_rows) * channels + d_inner * of_row


def token_of(s, kv_heads="n_kv_heads", cache=1):
    return int(4 * cache * s[kv_heads] * s["head_dim"])


def token_bytes(s, layers, kv_len, bits, **how):
    """(read, written), with what is changed by `how`."""
    only = lambda *names: {n: how[n] for n in names if n in how}  # noqa: E731
    how = dict(how)
    if how.get("groups") == "nheads":
        how["groups"] = s["nheads"]
    state = state_of(s, bits, **only("conv_rows", "conv_of_x", "scales") | {"groups": how.get("groups")})
    mambas, attentions = layers.count(M), layers.count(A)
    states = state * (len(layers) if how.get("states_everywhere") else mambas)
    token = token_of(s, **only("kv_heads", "cache")) * (len(layers) if how.get("cache_everywhere") else attentions)
    kept = only("no_z", "no_dt", "conv_of_x") | {"groups": how.get("groups")}
    weights = mambas * weights_of(s, M, **kept) + attentions * weights_of(s, A)
    if s["ffn"]:
        weights += (
            2 * (3 * s["ffn"] + 1) * s["hidden"] * (len(layers) if how.get("ffn_everywhere", True) else attentions)
        )
    rows = s["vocab"] if how.get("row") else 1
    ends = 2 * s["hidden"] * (how.get("head", 1) * s["vocab"] + 1 + rows)
    return weights + ends + states + kv_len * token, states + token


def crossing(s, layers, bits):
    """The fewest tokens whose cache is more than the states read and written; None without attention."""
    if A not in layers:
        return None
    return 2 * layers.count(M) * state_of(s, bits) // (layers.count(A) * token_of(s)) + 1


def _cases(rng):
    """[(sizes, layers, kv_len, bits)]"""
    cases = [(SMALL, [M], 1, 32), (SMALL, [M, M, M], 9, 32), (SMALL, [A], 5, 32), (SMALL, [M, A], 5, 32)]
    cases += [(SMALL, [M] * 3 + [A], 7, bits) for bits in (16, 8)]
    for name, value in (("ngroups", 2), ("width", 2), ("ffn", 96), ("headdim", 16), ("dstate", 48), ("vocab", 7)):
        cases.append((SMALL | {name: value}, [M, A, M], 7, 32))
    for _ in range(30):
        drawn = {
            "hidden": 32 * int(rng.integers(1, 200)), "nheads": 4 * int(rng.integers(1, 30)),
            "headdim": 16 * int(rng.integers(1, 9)), "dstate": 16 * int(rng.integers(1, 17)),
            "ngroups": int(rng.choice([1, 2, 4])), "width": int(rng.integers(2, 5)), "n_heads": 32,
            "n_kv_heads": int(rng.choice([1, 4, 8, 32])), "head_dim": int(rng.choice([64, 128])),
            "ffn": int(rng.choice([0, 8192])), "vocab": int(rng.integers(1, 200_000)),
        }  # fmt: skip
        layers = rng.choice([M, A], int(rng.integers(1, 60)), p=[0.8, 0.2]).tolist()
        cases.append((drawn, layers, int(rng.integers(1, 10**6)), int(rng.choice([32, 16, 8]))))
    return cases


def exercise_1(token_bytes, crossing):
    """token_bytes(sizes, layers, kv_len, state_bits) -> (read, written); crossing(sizes, layers, state_bits)"""
    exercise = Exercise("Exercise 1: bytes of a hybrid")
    cases = _cases(np.random.default_rng())
    with exercise, time_limit():
        for sizes, layers, kv_len, bits in cases:
            _counted(token_bytes, sizes, layers, kv_len, bits)
        for sizes, layers, _, bits in cases:
            _crossed(crossing, sizes, layers, bits)
    return exercise.report(f"to the byte for {len(cases)} models, and where each one's cache overtakes")


def _at(sizes, layers, bits):
    odd = {name: value for name, value in sizes.items() if SMALL[name] != value}
    said = f"with the example's sizes{'' if not odd else ' but ' + ', '.join(f'{k} = {v}' for k, v in odd.items())}"
    kinds = ", ".join(f"{layers.count(k)} {k}" for k in (M, A) if k in layers)
    return f"{said}, layers: {kinds}, states of {bits} bits"


def _called(function, sizes, layers, *rest, at):
    given = dict(sizes), list(layers)
    got = function(*given, *rest)
    if given != (sizes, layers):
        raise Wrong(f"{at} your function changed the sizes or the list of layers")
    return got


def _counted(function, sizes, layers, kv_len, bits):
    at = f"{_at(sizes, layers, bits)}, {kv_len:,} in the cache,"
    got = _called(function, sizes, layers, kv_len, bits, at=at)
    wanted = token_bytes(sizes, layers, kv_len, bits)
    whole = isinstance(got, tuple) and len(got) == 2
    if not whole or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in got):
        raise Wrong(f"{at} your function gave {shown(got)}, expected two whole numbers, (read, written)")
    for n, word in enumerate(("read", "written")):
        if got[n] != wanted[n]:
            why = next(
                (f": {t}" for t, how in MISTAKES.items() if _tells(how, n, got[n], sizes, layers, kv_len, bits)), ""
            )
            raise Wrong(f"{at} your function gave {got[n]:,} bytes {word}, expected {wanted[n]:,}{why}")


def _tells(how, n, got, *case):
    found = token_bytes(*case, **how)[n]
    return found == got


def _crossed(function, sizes, layers, bits):
    at, wanted = _at(sizes, layers, bits), crossing(sizes, layers, bits)
    got = _called(function, sizes, layers, bits, at=at)
    if wanted is None or got is None:
        if got is not wanted:
            raise Wrong(f"crossing: {at} it gave {shown(got)}, expected {wanted}")
        return
    if isinstance(got, bool) or not isinstance(got, (int, np.integer)):
        raise Wrong(f"crossing: {at} it gave {shown(got)}, expected a whole number, an int")
    if got != wanted:
        cache, states = wanted * layers.count(A) * token_of(sizes), 2 * layers.count(M) * state_of(sizes, bits)
        raise Wrong(
            f"crossing: {at} it gave {got:,}, expected {wanted:,}: so many tokens have {cache:,} bytes of keys and "
            f"values, and states of {states:,} bytes are read and written"
        )
