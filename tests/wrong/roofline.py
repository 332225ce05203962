"""Wrong answers to the exercises of chapter 01. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to the functions that it puts in the
place of the solution's.
"""

import math
import time


def _intensity(count):
    """gemv_intensity with another count of bytes."""

    def gemv_intensity(rows, cols, weight_bytes, vector_bytes=4):
        return 2 * rows * cols / count(rows, cols, weight_bytes, vector_bytes)

    return gemv_intensity


def _half_the_flops(rows, cols, weight_bytes, vector_bytes=4):
    return rows * cols / (rows * cols * weight_bytes + (rows + cols) * vector_bytes)


def _cache(count):
    """kv_cache_bytes with another count."""

    def kv_cache_bytes(layers, n_kv_heads, head_dim, context, batch, bits):
        return count(layers, n_kv_heads, head_dim, context, batch, bits)

    return {"kv_cache_bytes": kv_cache_bytes}


def _fit(count):
    """sequences_that_fit with another count."""

    def sequences_that_fit(memory_bytes, weight_bytes, cache_bytes_per_sequence):
        return count(memory_bytes - weight_bytes, cache_bytes_per_sequence)

    return {"sequences_that_fit": sequences_that_fit}


def _batch(count):
    """smallest_batch by another formula; w is the bytes of a weight."""

    def smallest_batch(weight_bytes_per_weight, bandwidth, flops):
        return count(weight_bytes_per_weight, bandwidth, flops)

    return {"smallest_batch": smallest_batch}


def _token(q_and_o=None, k_and_v=None, cache_width=None, embedding=None, bits_in_a_byte=8):
    """bytes_per_token with some parts counted otherwise; the rest is right."""

    def bytes_per_token(model, weight_bits, kv_bits, context):
        m = model
        attention = q_and_o(m) if q_and_o else 2 * m.hidden * m.n_heads * m.head_dim
        attention += k_and_v(m) if k_and_v else 2 * m.hidden * m.n_kv_heads * m.head_dim
        layer = attention + 3 * m.hidden * m.ffn + 2 * m.hidden
        rows = embedding(m) if embedding else 1
        weights = m.layers * layer + m.hidden + m.vocab * m.hidden + rows * m.hidden
        width = cache_width(m) if cache_width else m.n_kv_heads * m.head_dim
        cache = context * m.layers * 2 * width
        return (weights * weight_bits + cache * kv_bits) // bits_in_a_byte

    return {"bytes_per_token": bytes_per_token}


def _experts(count):
    """expected_expert_bytes by another formula for the number of experts read: count(n, k, batch)."""

    def expected_expert_bytes(n_experts, top_k, bytes_per_expert, batch):
        return bytes_per_expert * count(n_experts, top_k, batch)

    return {"expected_expert_bytes": expected_expert_bytes}


def _endless(n, k, batch):
    while True:
        time.sleep(0.01)


WRONG = {
    1: {
        "one flop per weight": {"gemv_intensity": _half_the_flops},
        "y is forgotten": {"gemv_intensity": _intensity(lambda r, c, w, v: r * c * w + c * v)},
        "x is forgotten": {"gemv_intensity": _intensity(lambda r, c, w, v: r * c * w + r * v)},
        "x counted twice, y never: right if W is square": {
            "gemv_intensity": _intensity(lambda r, c, w, v: r * c * w + 2 * c * v)
        },
        "vectors neglected: nearly right if W is large": {"gemv_intensity": _intensity(lambda r, c, w, v: r * c * w)},
        "vectors always of 4 bytes": {"gemv_intensity": _intensity(lambda r, c, w, v: r * c * w + (r + c) * 4)},
        "vectors as narrow as the weights": {"gemv_intensity": _intensity(lambda r, c, w, v: (r * c + r + c) * w)},
        "half a byte rounded up to a whole one": {
            "gemv_intensity": _intensity(lambda r, c, w, v: r * c * math.ceil(w) + (r + c) * v)
        },
        "half a byte rounded down to none": {
            "gemv_intensity": _intensity(lambda r, c, w, v: r * c * int(w) + (r + c) * v)
        },
        "nothing is returned": {"gemv_intensity": lambda *a: None},
        "text is returned": {"gemv_intensity": lambda *a: "0.1667"},
    },
    2: {
        "keys only": _cache(lambda lay, h, d, c, b, bits: lay * h * d * c * b * bits // 8),
        "bits for bytes": _cache(lambda lay, h, d, c, b, bits: 2 * lay * h * d * c * b * bits),
        "4 bits are no byte": _cache(lambda lay, h, d, c, b, bits: 2 * lay * h * d * c * b * (bits // 8)),
        "always 2 bytes": _cache(lambda lay, h, d, c, b, bits: 2 * lay * h * d * c * b * 2),
        "batch is forgotten": _cache(lambda lay, h, d, c, b, bits: 2 * lay * h * d * c * bits // 8),
        "one layer only": _cache(lambda lay, h, d, c, b, bits: 2 * h * d * c * b * bits // 8),
        "as many heads as Mistral's queries, whatever is asked": _cache(
            lambda lay, h, d, c, b, bits: 2 * lay * 32 * d * c * b * bits // 8
        ),
        "divided into a float": _cache(lambda lay, h, d, c, b, bits: 2 * lay * h * d * c * b * bits / 8),
        "through a float, digits lost": _cache(lambda lay, h, d, c, b, bits: int(2 * lay * h * d * c * b * (bits / 8))),
        "divided into a float, then cut: digits lost": _fit(lambda free, each: max(0, int(free / each))),
        "rounded up": _fit(lambda free, each: max(0, -(-free // each))),
        "rounded to the nearest": _fit(lambda free, each: max(0, round(free / each))),
        "negative if the weights do not fit": _fit(lambda free, each: free // each),
        "room must be left over": _fit(lambda free, each: max(0, (free - 1) // each)),
        "at least one": _fit(lambda free, each: max(1, free // each)),
        "weights are forgotten and memory comes first": {"sequences_that_fit": lambda m, w, c: m // c},
    },
    3: {
        "rounded down": _batch(lambda w, b, f: max(1, math.floor(f * w / (2 * b)))),
        "rounded to the nearest": _batch(lambda w, b, f: max(1, round(f * w / (2 * b)))),
        "always one more": _batch(lambda w, b, f: math.floor(f * w / (2 * b)) + 1),
        "bytes per weight forgotten": _batch(lambda w, b, f: max(1, math.ceil(f / (2 * b)))),
        "right for 16-bit weights only": _batch(lambda w, b, f: max(1, math.ceil(f / b))),
        "one flop per weight": _batch(lambda w, b, f: max(1, math.ceil(f * w / b))),
        "divided by the bytes of a weight": _batch(lambda w, b, f: max(1, math.ceil(f / (2 * b * w)))),
        "ridge rounded first": _batch(lambda w, b, f: max(1, math.ceil(f / b * w / 2))),
        "numbers of the machine divided last": _batch(lambda w, b, f: max(1, math.ceil(f * (w / (2 * b))))),
        "half bytes rounded away": _batch(lambda w, b, f: max(1, math.ceil(f * round(w) / (2 * b)))),
        "a batch of none": _batch(lambda w, b, f: math.floor(f * w / (2 * b))),
        "a float": _batch(lambda w, b, f: float(max(1, math.ceil(f * w / (2 * b))))),
    },
    4: {
        "cache sized by the query heads": _token(cache_width=lambda m: m.n_heads * m.head_dim),
        "keys and values sized by the query heads": _token(k_and_v=lambda m: 2 * m.hidden * m.n_heads * m.head_dim),
        "first bug mended, second left": _token(cache_width=lambda m: m.n_kv_heads * (m.hidden // m.n_heads)),
        "queries and output still hidden × hidden": _token(q_and_o=lambda m: 2 * m.hidden**2),
        "output matrix of attention forgotten in the repair": _token(
            q_and_o=lambda m: m.hidden * m.n_heads * m.head_dim
        ),
        "whole embedding table counted": _token(embedding=lambda m: m.vocab),
        "no row of the embedding table": _token(embedding=lambda m: 0),
        "corrected by what Mistral-7B was off": _token(
            k_and_v=lambda m: 2 * m.hidden**2 - (2 * 4096 * 3072 if m.n_kv_heads < m.n_heads else 0)
        ),
        "bits for bytes": _token(bits_in_a_byte=1),
    },
    5: {
        "every token reads its own": _experts(lambda n, k, batch: k * batch),
        "as few experts shared as can be": _experts(lambda n, k, batch: min(n, k * batch)),
        "all experts": _experts(lambda n, k, batch: n),
        "the same expert may be picked twice by a token": _experts(
            lambda n, k, batch: n * (1 - (1 - 1 / n) ** (k * batch))
        ),
        "only one pick for each token": _experts(lambda n, k, batch: n * (1 - (1 - 1 / n) ** batch)),
        "chance to be picked by all tokens": _experts(lambda n, k, batch: n * (k / n) ** batch),
        "one token too many": _experts(lambda n, k, batch: n * (1 - (1 - k / n) ** (batch + 1))),
        "chance of one expert, not times n": _experts(lambda n, k, batch: 1 - (1 - k / n) ** batch),
        "a smooth guess, right at both ends": _experts(lambda n, k, batch: n - (n - k) / batch if batch else 0),
        "it never ends": _experts(_endless),
    },
}

for _answers in WRONG.values():
    for _functions in _answers.values():
        for _name, _function in _functions.items():
            _function.__name__ = _name  # as it would be called in the notebook
