"""Checks of chapter 17, exercises 6 and 7: what may be read before the wait, and a launch less.

The learner's CUDA C++ runs on the SIMT machine, which knows what the launch ahead may still be at (simt.Ahead).
"""

import numpy as np

import simt
from exercises.checks import counted, time_limit
from exercises.checks.launches import blocks_for, by_warp, compiled, launched, near, requests, unchanged, whole_numbers
from exercises.checks.matmul import COURSE
from lab.check import is_unset, unset
from lab.exercise import Exercise, Wrong

WARPS, BLOCK = 8, 256

# Exercise 6: before the wait

HEAD_DIM = 128
# tokens of the prompt, tokens in the cache with the newest, rows of the cache
TEXTS = [(1, 2, 8), (5, 6, 8), (5, 9, 9), (8, 9, 21), (13, 20, 20), (20, 31, 50), (40, 41, 41)]


def exercise_6(source):
    """CUDA source of scores."""
    exercise = Exercise("Exercise 6: before the wait")
    rng = np.random.default_rng()
    prompt = int(rng.integers(41, 60))
    texts = [*TEXTS, (prompt, prompt + int(rng.integers(1, 30)), 96)]
    with exercise, time_limit(60):
        kernel = compiled(source, "scores", options=(COURSE,))
        reports = [_scores(kernel, rng, *text) for text in texts]
        for report, text in zip(reports, texts):
            _nothing_twice(report, *text)
        for text in ((5, 9, 16), (24, 30, 40), (4 * prompt, 4 * prompt + 2, 4 * prompt + 3)):
            _asked_early(kernel, rng, *text)
    return exercise.report(f"right for {len(texts)} texts, and the prompt's keys are asked for before the wait")


def _text(rng, prompt, kv_len, capacity):
    """(K, q, kv_len, out): rows behind the newest token's have never been written."""
    K = whole_numbers(rng, capacity, HEAD_DIM)
    K[kv_len:] = np.nan
    return K, whole_numbers(rng, HEAD_DIM), np.array([kv_len], np.int32), unset(capacity)


def _scores(kernel, rng, prompt, kv_len, capacity):
    at = f"a prompt of {prompt}, kv_len = {kv_len}, capacity = {capacity}"
    K, q, length, out = _text(rng, prompt, kv_len, capacity)
    before = {"K": K[:kv_len].copy(), "q": q.copy(), "kv_len": length.copy()}
    args = (K, q, length, out, np.int32(prompt), np.int32(capacity))
    ahead = simt.Ahead(writes=(K[kv_len - 1 :], q, length), reads=(out,))
    report = launched(kernel, blocks_for(capacity, WARPS), BLOCK, *args, at=at, ahead=ahead, check_races=capacity < 10)
    near("out", out[:kv_len], before["K"].astype(np.float64) @ q, 1e-6, at)
    behind = [t for t in range(kv_len, capacity) if not is_unset(out[t])]
    if behind:
        raise Wrong(f"at {at} the kernel wrote out[{behind[0]}], but there are only {counted(kv_len, 'token')}")
    unchanged({"K": K[:kv_len], "q": q, "kv_len": length}, before, at)
    return report


def _nothing_twice(report, prompt, kv_len, capacity):
    """Raise Wrong if the next launch cannot start early, or more is loaded than need be."""
    at = f"a prompt of {prompt}, kv_len = {kv_len}, capacity = {capacity}"
    if report.ahead is None or report.waits_first:
        raise Wrong(f"right, but at {at} the next launch cannot start early: leave let_next_kernel_start() in front")
    pieces = HEAD_DIM // 32
    most, made = 2 * pieces * kv_len + blocks_for(capacity, WARPS) * WARPS, requests(report, "ld")
    if made > most:
        raise Wrong(
            f"right, but at {at} the warps make {made:,} load requests; {most:,} are enough: a key and q for "
            "each token that there is, and kv_len for each warp"
        )


def _asked_early(kernel, rng, prompt, kv_len, capacity):
    """Take it that the launch ahead writes a number of K that it does not: who asks for it before the wait, is seen."""
    for t in (0, prompt // 2, prompt - 1):
        for at in rng.integers(0, 32, HEAD_DIM // 32) + np.arange(0, HEAD_DIM, 32):
            K, q, length, out = _text(rng, prompt, kv_len, capacity)
            args = (K, q, length, out, np.int32(prompt), np.int32(capacity))
            try:
                kernel(blocks_for(capacity, WARPS), BLOCK, *args, ahead=simt.Ahead(writes=(K[t, at : at + 1],)))
            except simt.AsyncFault:
                continue
            raise Wrong(
                f"right, but late: with a prompt of {prompt} tokens, K[{t}, {at}] is asked for only behind the wait. "
                "The launch ahead writes no key of the prompt"
            )


# Exercise 7: no launch for RoPE

# n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity
STEPS = [
    (1, 1, 2, 1, 1, 1),
    (1, 1, 2, 3, 2, 3),
    (1, 1, 4, 5, 3, 3),
    (2, 1, 6, 33, 4, 9),
    (3, 3, 4, 31, 1, 5),
    (4, 2, 16, 65, 7, 8),
    (8, 2, 10, 100, 12, 12),
    (2, 1, 128, 20, 20, 30),
]
LARGE = (8, 2, 32, 512, 5, 6)
TWO = """
__device__ float warp_sum(float v) {
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    return v;
}
extern "C" __global__ void project(const float *W, const float *x, float *qkv, int rows, int hidden) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0;
    for (int c = lane; c < hidden; c += 32) sum += W[(long long)row * hidden + c] * x[c];
    sum = warp_sum(sum);
    if (lane == 0) qkv[row] = sum;
}
extern "C" __global__ void rope_append(const float *qkv, const float *cosine, const float *sine, const int *kv_len,
                                       float *q, float *K, float *V, int n_heads, int n_kv_heads, int head_dim) {
    const int half = head_dim / 2, pair = blockIdx.x * blockDim.x + threadIdx.x;
    const int head = pair / half, i = pair % half, position = *kv_len - 1;
    if (head >= n_heads + 2 * n_kv_heads) return;
    float a = qkv[head * head_dim + i], b = qkv[head * head_dim + i + half];
    if (head < n_heads + n_kv_heads) {
        const float c = cosine[position * half + i], s = sine[position * half + i], old = a;
        a = old * c - b * s;
        b = b * c + old * s;
    }
    float *to = q + head * head_dim;
    if (head >= n_heads + n_kv_heads)
        to = V + ((long long)position * n_kv_heads + head - n_heads - n_kv_heads) * head_dim;
    else if (head >= n_heads)
        to = K + ((long long)position * n_kv_heads + head - n_heads) * head_dim;
    to[i] = a;
    to[i + half] = b;
}
"""  # the kernels of the statement


def exercise_7(source):
    """CUDA source of qkv_rope."""
    exercise = Exercise("Exercise 7: no launch for RoPE")
    rng, praise = np.random.default_rng(), ""
    steps = [*STEPS, (6, int(rng.choice([1, 2, 3])), 2 * int(rng.integers(8, 40)), int(rng.integers(40, 90)), 3, 4)]
    with exercise, time_limit(60):
        kernel = compiled(source, "qkv_rope")
        for step in steps:
            _qkv_rope(kernel, rng, *step)
        made, two = _counted(kernel, rng), _of_two_launches(rng)
        praise = f"{made:,} sectors in one launch, and {two:,} in two"
    return exercise.report(f"right in {len(steps) + 1} cases: {praise}")


def _counted(kernel, rng):
    """Sectors that the kernel loads and stores at LARGE; Wrong if they, its requests or its stores are too many."""
    n_heads, n_kv_heads, head_dim, hidden, *_ = LARGE
    report, pairs = _qkv_rope(kernel, rng, *LARGE, by_warp=True), (n_heads + 2 * n_kv_heads) * head_dim // 2
    at = f"{n_heads} and {n_kv_heads} heads of {head_dim}, hidden = {hidden}"
    atomics = requests(report, "red") + requests(report, "atom")
    if atomics:
        raise Wrong(f"right, but at {at} the warps make {atomics:,} atomic requests; wanted: none")
    once = "each row of W once, x once for two rows, and for each pair kv_len, its cosine and its sine"
    limits = (
        ("ld", "load", 3 * pairs * hidden // 32 + 3 * pairs, 3 * pairs * hidden // 8 + 3 * pairs, once),
        ("st", "store", 2 * pairs, 2 * pairs, "one for each number"),
    )
    moved = 0
    for op, word, most, most_sectors, why in limits:
        made, sectors = requests(report, op), sectors_of(report, op)
        if made > most:
            raise Wrong(f"right, but at {at} the warps make {made:,} {word} requests; {most:,} are enough: {why}")
        if sectors > most_sectors:
            each = report.sectors_per_request(op)
            raise Wrong(
                f"right, but not coalesced: at {at} {word}s move {sectors:,} sectors, {each:.3g} a request; "
                f"{most_sectors:,} are enough"
            )
        moved += sectors
    threads = int(by_warp(report, "simt__threads_mem_global_op_st.sum").sum())
    if threads > 2 * pairs:
        raise Wrong(
            f"right, but at {at} {threads:,} threads store, {threads / (2 * pairs):.3g} for each number; {2 * pairs:,} "
            "are enough: all lanes have the sum, and one of them stores it"
        )
    return moved


def sectors_of(report, op):
    return report.counters[f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum"]


def _of_two_launches(rng):
    """Sectors that the two kernels of the statement load and store at LARGE."""
    module, moved = simt.compile(TWO), 0
    given, qkv, found = _arrays(rng, *LARGE)
    n_heads, n_kv_heads, head_dim, hidden, *_ = LARGE
    rows = len(given["W"])
    first = module["project"], blocks_for(rows, WARPS), (given["W"], given["x"], qkv, np.int32(rows), np.int32(hidden))
    others = (given[name] for name in ("cosine", "sine", "kv_len"))
    sizes = (np.int32(n) for n in (n_heads, n_kv_heads, head_dim))
    second = module["rope_append"], blocks_for(rows // 2, BLOCK), (qkv, *others, *found, *sizes)
    for kernel, grid, args in (first, second):
        report = kernel(grid, BLOCK, *args)
        moved += sectors_of(report, "ld") + sectors_of(report, "st")
    return moved


def tables(capacity, head_dim, rng):
    """Cosines and sines (capacity, head_dim / 2) of angles that nothing else gives away."""
    angles = rng.uniform(0.3, 1.2, (capacity, head_dim // 2)) * rng.choice([-1, 1], (capacity, head_dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def truth(W, x, cosine, sine, position, n_heads, n_kv_heads, head_dim):
    """q (n_heads, head_dim), and the new rows of K and V (n_kv_heads, head_dim), in float64."""
    y = (W.astype(np.float64) @ x).reshape(-1, head_dim)
    half = head_dim // 2
    a, b = y[: n_heads + n_kv_heads, :half], y[: n_heads + n_kv_heads, half:]
    c, s = cosine[position].astype(np.float64), sine[position].astype(np.float64)
    turned = np.concatenate([a * c - b * s, b * c + a * s], axis=1)
    return turned[:n_heads], turned[n_heads:], y[n_heads + n_kv_heads :]


def _arrays(rng, n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity):
    """(what is read, by name; qkv; q, K and V, in which nothing was put yet)"""
    rows = (n_heads + 2 * n_kv_heads) * head_dim
    cosine, sine = tables(capacity, head_dim, rng)
    given = {"W": whole_numbers(rng, rows, hidden), "x": whole_numbers(rng, hidden), "cosine": cosine, "sine": sine}
    given["kv_len"] = np.array([kv_len], np.int32)
    return given, unset(rows), [unset((n_heads, head_dim)), *(unset((capacity, n_kv_heads, head_dim)) for _ in "KV")]


def _qkv_rope(kernel, rng, n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity, **how):
    at = f"{n_heads} and {n_kv_heads} heads of {head_dim}, hidden = {hidden}, kv_len = {kv_len}, capacity = {capacity}"
    given, qkv, (q, K, V) = _arrays(rng, n_heads, n_kv_heads, head_dim, hidden, kv_len, capacity)
    before, position = {name: a.copy() for name, a in given.items()}, kv_len - 1
    args = (*given.values(), q, K, V, *(np.int32(n) for n in (n_heads, n_kv_heads, head_dim, hidden)))
    report = launched(
        kernel, blocks_for(qkv.size // 2, WARPS), BLOCK, *args, at=at, check_races=qkv.size * hidden < 3000, **how
    )
    wanted = truth(*(before[n] for n in ("W", "x", "cosine", "sine")), position, n_heads, n_kv_heads, head_dim)
    size = max(np.abs(part).max() for part in wanted)
    for name, got, right in zip(("q", "K[new]", "V[new]"), (q, K[position], V[position]), wanted):
        near(name, got, right, 1e-5, at, size)
    for name, cache in (("K", K), ("V", V)):
        others = [t for t in range(capacity) if t != position and not all(map(is_unset, cache[t].flat))]
        if others:
            raise Wrong(f"at {at} the kernel wrote row {others[0]} of {name}; the new token's is row {position}")
    unchanged(given, before, at)
    return report
