"""Right answers to the exercises of chapter 17 that are not the solutions': a check must let each of them pass."""

import math
import statistics

import numpy as np
from wrong import llm_kernels as kernels
from wrong.llm import FIT, RIGHT, _sampler
from wrong.warp_gemv import changed

from ref.attention import decode_attention
from ref.llm import Layer, rope


def by_index(layer, n_heads, n_kv_heads, head_dim):
    order = np.r_[0:head_dim:2, 1:head_dim:2]
    q, k = ((head_dim * np.arange(n)[:, None] + order).ravel() for n in (n_heads, n_kv_heads))
    taken = {"Wq": q, "bq": q, "Wk": k, "bk": k, "q_norm": order, "k_norm": order}
    found = {name: getattr(layer, name)[rows] for name, rows in taken.items() if getattr(layer, name) is not None}
    return Layer(**{**vars(layer), **found})


def by_positions(q, k, v, keys, values, kv_len, frequencies, window=None):
    """The length is that with the new token, everywhere."""
    length = kv_len + 1
    keys[length - 1], values[length - 1] = rope(k, length - 1, frequencies), v
    seen = np.arange(length)[-(window or length) :]
    q = rope(q, length - 1, frequencies)
    return decode_attention(q[None], keys[seen][None], values[seen][None])[0]


def token_by_token(logits, u, temperature=1.0, top_k=None, top_p=None):
    """A walk along the line."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return order[0]
    highest = float(logits[order[0]])
    weights = [math.exp((float(logits[t]) - highest) / temperature) for t in order[:top_k]]
    total, let_in, sum_so_far = math.fsum(weights), [], 0.0
    for weight in weights:
        if let_in and top_p is not None and sum_so_far >= top_p * total:
            break
        let_in.append(weight)
        sum_so_far += weight
    place, last = u * math.fsum(let_in), 0
    for n, weight in enumerate(let_in):
        if weight > 0:
            last = n
        if place < weight:
            return order[n]
        place -= weight
    return order[last]


def by_normal_equations(kernels, runs):
    """Without a library's fit: both sums of squares by hand."""
    rows = []
    for left_out, times in runs:
        there = [pair for name, pair in kernels.items() if name not in left_out]
        rows.append((sum(b for b, _ in there) / 1e3, sum(n for _, n in there), statistics.median(times)))
    bytes_, launches, times = np.array(rows).T
    bb, bn, nn, bt, nt = bytes_ @ bytes_, bytes_ @ launches, launches @ launches, bytes_ @ times, launches @ times
    det = bb * nn - bn * bn
    return det / (nn * bt - bn * nt), (bb * nt - bn * bt) / det


def each_run_alike(kernels, runs):
    """Weighted by the time: what is least are squares of shares."""
    whole = np.sum(list(kernels.values()), axis=0)
    gone = np.array([np.sum([kernels[name] for name in out], axis=0) if out else (0, 0) for out, _ in runs])
    A, t = (whole - gone) / (1e3, 1), np.array([np.median(times) for _, times in runs])
    s, c = np.linalg.lstsq(A / t[:, None], np.ones(len(t)))[0]
    return 1 / s, c


MOST = RIGHT[5][1]
STAGE = """    __shared__ float rows[8][HEAD_DIM];
    float *mine = rows[t % 8] + lane;
    for (int i = 0; i < HEAD_DIM && t < prompt; i += 32) mine[i] = K[(long long)t * HEAD_DIM + lane + i];
"""
TAKE = "    for (int i = 0; i < 4 && t < prompt; i++) key[i] = mine[32 * i];\n"
STAGED = changed(kernels.SCORES, (kernels.OLD, STAGE), (kernels.NEW, kernels.NEW + TAKE))
ONE_WAITS = "    if (threadIdx.x == 77) wait_for_previous_kernel();\n    __syncthreads();\n"
BY_FOUR = """    const bool four = hidden % 4 == 0;
    for (int c = four ? 4 * lane : hidden; c < hidden; c += 128) {
        const float4 from = *(const float4 *)(x + c), one = *(const float4 *)(row + c);
        const float4 two = *(const float4 *)(further + c);
        a += one.x * from.x + one.y * from.y + one.z * from.z + one.w * from.w;
        b += two.x * from.x + two.y * from.y + two.z * from.z + two.w * from.w;
    }
    for (int c = lane; c < (four ? 0 : hidden); c += 32) {
        a += row[c] * x[c];
        b += further[c] * x[c];
    }
"""
BOTH_LANES = "        to[lane ? far : i] = lane ? b : a;\n"
OTHERS = {
    "rows by their numbers": (2, by_index),
    "the length with the new token": (3, by_positions),
    "a walk along the line": (4, token_by_token),
    "divided, and back to the last that is let in": (
        4,
        _sampler(divided=True, stretched=False, clamp=lambda place, weights: min(place, np.count_nonzero(weights) - 1)),
    ),
    "normal equations": (5, (by_normal_equations, MOST)),
    "all runs alike": (5, (each_run_alike, MOST)),
    "launches by steps": (
        5,
        (FIT, lambda speed, c, size, share: int((size / speed / 1e3 / share - size / speed / 1e3) / c)),
    ),
    "one thread waits, and a barrier": (6, changed(kernels.SCORES, (kernels.WAIT, ONE_WAITS))),
    "old keys in shared memory": (6, STAGED),
    "a second wait": (6, changed(kernels.SCORES, (kernels.NEW, kernels.WAIT + kernels.NEW))),
    "four columns at a time": (7, changed(kernels.ROPE, (kernels.LOOP, BY_FOUR))),
    "two lanes store": (
        7,
        changed(
            kernels.ROPE,
            ("if (lane == 0) {", "if (lane < 2) {"),
            ("        to[i] = a;\n        to[far] = b;\n", BOTH_LANES),
        ),
    ),
}
