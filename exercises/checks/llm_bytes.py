"""Checks of chapter 17, exercise 1: what a token reads and what a model takes, from its config.json."""

import numpy as np

from exercises.checks import close, number_from, shown, time_limit
from lab.check import apart
from lab.exercise import Exercise, Wrong

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "intermediate_size": 256,
    "vocab_size": 11,
    "tie_word_embeddings": False,
}
NAMES = {"hidden_size": 384, "num_hidden_layers": 3, "intermediate_size": 640, "vocab_size": 1000, "head_dim": 64}
DEFAULTS = ("head_dim", "num_key_value_heads", "tie_word_embeddings")
MISSING, TIED = object(), {"tie_word_embeddings": True}
FEW = ("with ", {}), ("with tied heads, ", TIED)
MISTAKES = {  # what would be said of a count: how it is made
    "the cache has as many heads as there are queries": {"num_key_value_heads": None},
    "head_dim is hidden_size over the heads, whatever the config says": {"head_dim": None},
    "the window is not looked at": {"sliding_window": None},
    "heads are taken for tied": {"tie_word_embeddings": True},
    "heads are taken for untied": {"tie_word_embeddings": False},
    "only the keys are counted, or only the values": {"cache": 0.5},
    "the cache is not counted": {"cache": 0},
    "norms are not counted": {"norms": 0},
    "the whole embedding is counted, and not one row": {"row": "table"},
    "the embedding's row is not counted": {"row": 0},
    "the head is not counted": {"head": 0},
    "one matrix of the feed-forward block is missing": {"glu": 2},
    "the scales are left out": {"scales": 0},
}


def _rows_and_cols(config, glu=3, head=1):
    """(how many, rows, columns) of all matrices that a step reads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_rows, layers = (config.get("num_key_value_heads") or heads) * head_dim, config["num_hidden_layers"]
    ffn = config["intermediate_size"]
    found = [(layers, heads * head_dim, hidden), (2 * layers, kv_rows, hidden), (layers, hidden, heads * head_dim)]
    return [*found, ((glu - 1) * layers, ffn, hidden), (layers, hidden, ffn), (head, config["vocab_size"], hidden)]


def _bytes(config, tokens, bits, kv_bits, stored, *, cache=1, norms=1, row=1, head=1, glu=3, scales=1, **changed):
    """Bytes that a step reads, or that are stored; with what is changed in the config."""
    config = config | changed
    matrices = 0
    for n, rows, cols in _rows_and_cols(config, glu, head):
        matrices += n * rows * (cols * bits // 8 + scales * {16: 0, 8: 4, 4: 4 * -(-cols // 128)}[bits])
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    if stored:
        row = 0 if config.get("tie_word_embeddings") and bits == 16 else vocab
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    seen = tokens if stored else min(tokens, config.get("sliding_window") or tokens)
    of_head = head_dim * kv_bits // 8 + scales * {16: 0, 8: 2, 4: 2 * -(-head_dim // 32)}[kv_bits]
    return (
        matrices + 2 * norms * (2 * layers + 1) * hidden + 2 * hidden * (vocab if row == "table" else row)
        + int(cache * 2 * layers * kv_heads * of_head * seen)
    )  # fmt: skip


def _configs(rng):
    """[(what is said of it, config, tokens, bits, kv_bits)]"""
    cases = [("", {}, 1, 16, 16), ("", {}, 7, 16, 16)]
    cases += [(f"with {name} = {value}", {name: value}, 1, 16, 16) for name, value in NAMES.items()]
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 2}
    cases += [("with 4 heads, 2 of them of keys and values", grouped, 5, 16, 16)]
    for name in DEFAULTS:
        for what, value in ((f"without {name} in it", MISSING), (f"with {name} = None", None)):
            cases.append((what, {"num_attention_heads": 2, name: value}, 5, 16, 16))
    cases += [("with tied heads", TIED, 5, 16, 16)]
    cases += [(f"with a window of {n}", {"sliding_window": n}, 5, 16, 16) for n in (3, 5, 6)]
    cases += [("with sliding_window = None", {"sliding_window": None}, 5, 16, 16)]
    for bits, kv_bits in ((8, 16), (4, 16), (16, 8), (16, 4), (8, 4), (4, 8)):
        cases += [(f"{what}bits = {bits}, kv_bits = {kv_bits}", changed, 3, bits, kv_bits) for what, changed in FEW]
    for n in range(1, 31):
        heads = int(rng.choice([1, 2, 4, 8]))
        drawn = {
            "hidden_size": 128 * heads * int(rng.integers(1, 5)), "num_hidden_layers": int(rng.integers(1, 99)),
            "num_attention_heads": 4 * heads, "num_key_value_heads": heads, "vocab_size": int(rng.integers(1, 200_000)),
            "head_dim": int(rng.choice([32, 64, 128, 256])), "intermediate_size": 128 * int(rng.integers(1, 200)),
            "tie_word_embeddings": bool(rng.integers(2)), "sliding_window": int(rng.integers(1, 9000)),
        }  # fmt: skip
        for name in rng.choice([*DEFAULTS, "sliding_window"], int(rng.integers(0, 3)), replace=False).tolist():
            drawn[name] = (None, MISSING)[rng.integers(2)]
        bits, kv_bits = (int(b) for b in rng.choice([16, 8, 4], 2))
        cases.append((f"drawn ({n})", drawn, int(rng.integers(1, 9000)), bits, kv_bits))
    for what, changed, *rest in cases:
        yield what, {name: value for name, value in (SMALL | changed).items() if value is not MISSING}, *rest


def exercise_1(read_bytes, stored_bytes, tokens_per_second):
    """read_bytes(config, kv_len, bits, kv_bits), stored_bytes(config, capacity, bits, kv_bits) -> bytes;
    tokens_per_second(config, kv_len, gb_per_s, bits, kv_bits)"""
    exercise = Exercise("Exercise 1: bytes of a token")
    cases = list(_configs(np.random.default_rng()))
    with exercise, time_limit():
        for function, stored in ((read_bytes, False), (stored_bytes, True)):
            for what, config, tokens, bits, kv_bits in cases:
                _counted(function, stored, what, config, tokens, bits, kv_bits)
        for what, config, kv_len, bits, kv_bits in cases:
            speed = 1000.0 if not what else float(np.random.default_rng().integers(30, 9000))
            wanted = speed * 1e9 / _bytes(config, kv_len, bits, kv_bits, False)
            got = number_from(tokens_per_second, dict(config), kv_len, speed, bits, kv_bits)
            mine, right = apart(got, wanted)
            call = _call(tokens_per_second, what, config, kv_len, speed, bits, kv_bits)
            exercise.require(close(got, wanted), f"{call} gave {mine}, expected {right} tokens a second")
    return exercise.report(f"right for {len(cases)} models, to the byte")


def _call(function, what, config, *args):
    """The call, with a word for the config: all of it would be too long."""
    named = f"config, {', '.join(map(repr, args))}"
    given = f"a config {what}: " if what else ""
    return f"{getattr(function, '__name__', 'your function')}({named}) with {given}{shown(config, 400)}"


def _counted(function, stored, what, config, tokens, bits, kv_bits):
    before = dict(config)
    args, how = (tokens, bits, kv_bits), (config, tokens, bits, kv_bits, stored)
    got, wanted = number_from(function, config, *args, whole=True), _bytes(*how)
    call = _call(function, what, before, *args)
    if config != before:
        raise Wrong(f"{call} changed the config")
    if got != wanted:
        likely = [why for why, mistake in MISTAKES.items() if _bytes(*how, **mistake) == got]
        raise Wrong(f"{call} gave {got:,}, expected {wanted:,}" + (f": as if {likely[0]}" if len(likely) == 1 else ""))
