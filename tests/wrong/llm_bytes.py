"""Wrong answers to exercise 1 of chapter 17, in the form of llm.py's."""


def _cost(
    n_kv_heads=lambda c: c.get("num_key_value_heads") or c["num_attention_heads"],
    head_dim=lambda c: c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
    wo=lambda hidden, q: (hidden, q),
    ffn=3,
    head=lambda c: 1,
    scales=True,
    round_up=True,
    norms=lambda layers: 2 * layers + 1,
    norm_bytes=lambda bits: 2,
    row=1,
    table=lambda c, bits: not (c.get("tie_word_embeddings") and bits == 16),
    table_bytes=lambda bits: 2,
    seen=lambda c, n: min(n, c.get("sliding_window") or n),
    kept=lambda c, n: n,
    both=2,
    divide=lambda a, b: a // b,
    speed=1e9,
):
    """(read_bytes, stored_bytes, tokens_per_second): right, but for what is said."""

    def matrices(c, bits):
        hidden, ffns, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
        q, kv = c["num_attention_heads"] * head_dim(c), n_kv_heads(c) * head_dim(c)
        shapes = layers * [(q, hidden), (kv, hidden), (kv, hidden), wo(hidden, q), (hidden, ffns)]
        shapes += (ffn - 1) * layers * [(ffns, hidden)] + head(c) * [(c["vocab_size"], hidden)]
        total = norm_bytes(bits) * norms(layers) * hidden
        for rows, cols in shapes:
            groups = -(-cols // 128) if round_up else cols // 128
            total += rows * (divide(cols * bits, 8) + scales * {16: 0, 8: 4, 4: 4 * groups}[bits])
        return total

    def cache(c, kv_bits):
        of_head = divide(head_dim(c) * kv_bits, 8) + scales * {16: 0, 8: 2, 4: 2 * -(-head_dim(c) // 32)}[kv_bits]
        return both * c["num_hidden_layers"] * n_kv_heads(c) * of_head

    def read_bytes(config, kv_len, bits=16, kv_bits=16):
        rows = config["vocab_size"] if row == "all" else row
        return matrices(config, bits) + 2 * rows * config["hidden_size"] + seen(config, kv_len) * cache(config, kv_bits)

    def stored_bytes(config, capacity, bits=16, kv_bits=16):
        whole = table_bytes(bits) * config["vocab_size"] * config["hidden_size"] if table(config, bits) else 0
        return matrices(config, bits) + whole + kept(config, capacity) * cache(config, kv_bits)

    def tokens_per_second(config, kv_len, gb_per_s, bits=16, kv_bits=16):
        return gb_per_s * speed / read_bytes(config, kv_len, bits, kv_bits)

    return read_bytes, stored_bytes, tokens_per_second


def n_kv_heads_of(config):
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _pops(config, kv_len, bits=16, kv_bits=16):
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return COSTS[0](config, kv_len, bits, kv_bits)


COSTS = _cost()
EX1 = {
    "the cache has all heads": (
        _cost(n_kv_heads=lambda c: c["num_attention_heads"]),
        "with a config with 4 heads, 2 of them of keys and values",
    ),
    "num_key_value_heads is always there": (
        _cost(n_kv_heads=lambda c: c.get("num_key_value_heads", 1)),
        "without num_key_value_heads in it",
    ),
    "head_dim is hidden over heads": (
        _cost(head_dim=lambda c: c["hidden_size"] // c["num_attention_heads"]),
        "as if head_dim is hidden_size over the heads",
    ),
    "head_dim is hidden over the heads of keys": (
        _cost(head_dim=lambda c: c.get("head_dim") or c["hidden_size"] // n_kv_heads_of(c)),
        "head_dim",
    ),
    "the embedding's row has few bits": (
        (
            lambda c, n, bits=16, kv_bits=16: COSTS[0](c, n, bits, kv_bits) - c["hidden_size"] * (16 - bits) // 8,
            *COSTS[1:],
        ),
        "(config, 3, 8, 16)",
    ),
    "no row of a tied embedding": (
        (
            lambda c, n, *bits: COSTS[0](c, n, *bits) - 2 * c["hidden_size"] * bool(c.get("tie_word_embeddings")),
            *COSTS[1:],
        ),
        "as if the embedding's row is not counted",
    ),
    "Wo is square": (_cost(wo=lambda hidden, q: (hidden, hidden)), "expected"),
    "two matrices of the feed-forward block": (_cost(ffn=2), "as if one matrix of the feed-forward block is missing"),
    "a tied head is not read": (
        _cost(head=lambda c: not c["tie_word_embeddings"] if "tie_word_embeddings" in c else 1),
        "as if the head is not counted",
    ),
    "the whole embedding is read": (_cost(row="all"), "as if the whole embedding is counted"),
    "the embedding is not read": (_cost(row=0), "as if the embedding's row is not counted"),
    "one norm a layer": (_cost(norms=lambda layers: layers + 1), "expected"),
    "no norm behind the last layer": (_cost(norms=lambda layers: 2 * layers), "expected"),
    "norms have the bits of matrices": (_cost(norm_bytes=lambda bits: bits // 8), "(config, 3, 8, 16)"),
    "the window is not looked at": (_cost(seen=lambda c, n: n), "as if the window is not looked at"),
    "the window is always full": (
        _cost(seen=lambda c, n: c.get("sliding_window") or n),
        "a config with a window of 6",
    ),
    "the new token is beside the window": (
        _cost(seen=lambda c, n: min(n, (c.get("sliding_window") or n) + 1)),
        "with a window of 3",
    ),
    "only keys": (_cost(both=1), "as if only the keys are counted"),
    "no scales": (_cost(scales=False), "as if the scales are left out"),
    "bytes are floats": (_cost(divide=lambda a, b: a / b), "a float; expected a whole number"),
    "an embedding beside a tied head": (
        _cost(table=lambda c, bits: True),
        "stored_bytes(config, 5, 16, 16) with a config with tied heads",
    ),
    "a tied head of few bits is the embedding too": (
        _cost(table=lambda c, bits: not c.get("tie_word_embeddings")),
        "with a config with tied heads, bits = 8",
    ),
    "the embedding has few bits": (_cost(table_bytes=lambda bits: bits // 8), "stored_bytes(config, 3, 8, 16)"),
    "no more is stored than the window": (
        _cost(kept=lambda c, n: min(n, c.get("sliding_window") or n)),
        "stored_bytes(config, 5, 16, 16) with a config with a window of 3",
    ),
    "GB of 2^30 bytes": (_cost(speed=2**30), "tokens a second"),
    "forgets the speed's GB": (_cost(speed=1), "tokens a second"),
    "a limit that leaves out the cache": (
        (*COSTS[:2], lambda c, kv_len, speed, *bits: speed * 1e9 / COSTS[0](c, 0, *bits)),
        "tokens a second",
    ),
    "changes the config": ((_pops, *COSTS[1:]), "changed the config"),
}


RIGHT = {1: COSTS}
WRONG = {1: EX1}
