"""Wrong answers to exercises 6 and 7 of chapter 17, in the form of llm.py's."""

from wrong.warp_gemv import changed

# Exercise 6: before the wait

SCORES = """
#include "kernels/device/pdl.cuh"
constexpr int HEAD_DIM = 128;
__device__ void load(float (&key)[4], const float *K, int t) {
    for (int n = 0; n < 4; n++) key[n] = K[(long long)t * HEAD_DIM + threadIdx.x % 32 + 32 * n];
}
extern "C" __global__ void scores(const float *K, const float *q, const int *kv_len, float *out, int prompt,
                                  int capacity) {
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, t = blockIdx.x * 8 + threadIdx.x / 32;
    float key[4] = {}, sum = 0;
    if (t < prompt) load(key, K, t);
    wait_for_previous_kernel();
    const int n = *kv_len;
    if (t >= prompt && t < n) load(key, K, t);
    if (t >= n) return;
    for (int i = 0; i < 4; i++) sum += key[i] * q[lane + 32 * i];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) out[t] = sum;
}
"""
OLD, WAIT = "    if (t < prompt) load(key, K, t);\n", "    wait_for_previous_kernel();\n"
LENGTH, NEW = "    const int n = *kv_len;\n", "    if (t >= prompt && t < n) load(key, K, t);\n"
ALL = "    if (t < n) load(key, K, t);\n"
AHEAD = "reads kv_len[0], which the launch ahead may still write"
EARLY_OUT = "    if (lane == 0 && t < prompt) out[t] = 0;\n"
FIRST = "    if (t < prompt) key[0] = K[(long long)t * HEAD_DIM + lane];\n"
PREFETCH = """    const float *line = K + (long long)t * HEAD_DIM + 4 * lane;
    if (t < prompt) asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
"""
EARLY_Q = OLD + "    float mine[4];\n    for (int i = 0; i < 4; i++) mine[i] = q[lane + 32 * i];\n"
EX6 = {
    "as it was": (changed(SCORES, (OLD + WAIT + LENGTH + NEW, LENGTH + ALL + WAIT)), AHEAD),
    "no wait": (changed(SCORES, (WAIT, "")), AHEAD),
    "the wait comes first": (
        changed(SCORES, (OLD + WAIT + LENGTH + NEW, WAIT + LENGTH + ALL)),
        "right, but late: with a prompt of 5 tokens, K[0, ",
    ),
    "the length before the wait, keys behind": (
        changed(SCORES, (OLD + WAIT + LENGTH + NEW, LENGTH + WAIT + ALL)),
        AHEAD,
    ),
    "all rows that there are before the wait": (
        changed(SCORES, (OLD, "    if (t < capacity) load(key, K, t);\n"), (NEW, "")),
        "which the launch ahead may still write",
    ),
    "all rows but the newest, by a length that is read early": (
        changed(SCORES, (OLD, "    if (t < *kv_len - 1) load(key, K, t);\n")),
        AHEAD,
    ),
    "one row more than the prompt": (
        changed(SCORES, ("t < prompt", "t <= prompt"), ("t >= prompt", "t > prompt")),
        "reads K[128], which the launch ahead may still write",
    ),
    "one row less than the prompt": (
        changed(SCORES, ("t < prompt", "t < prompt - 1"), ("t >= prompt", "t >= prompt - 1")),
        "right, but late: with a prompt of 5 tokens, K[4, ",
    ),
    "only the first number of each lane before the wait": (
        changed(SCORES, (OLD, FIRST), (NEW, ALL)),
        "is asked for only behind the wait",
    ),
    "asked for without registers, and again behind the wait": (
        changed(SCORES, (OLD, PREFETCH), (NEW, ALL)),
        "is asked for only behind the wait",
    ),
    "q before the wait": (
        changed(SCORES, (OLD, EARLY_Q), ("key[i] * q[lane + 32 * i]", "key[i] * mine[i]")),
        "reads q[0], which the launch ahead may still write",
    ),
    "old keys are asked for again": (
        changed(SCORES, ("4], const float *K", "4], const volatile float *K"), (NEW, ALL)),
        "load requests; ",
    ),
    "the newest token is left out": (
        changed(SCORES, ("t >= prompt && t < n", "t >= prompt && t < n - 1")),
        "of out differ",
    ),
    "only the newest token is new": (changed(SCORES, ("t >= prompt && t < n", "t == n - 1")), "of out differ"),
    "rows behind the newest": (changed(SCORES, ("if (t >= n) return", "if (t >= capacity) return")), "wrote out["),
    "out of bounds: rows that are not there": (changed(SCORES, ("t >= prompt && t < n", "t >= prompt")), "but K has"),
    "every row that there is, needed or not": (
        changed(SCORES, ("t >= prompt && t < n", "t >= prompt && t < capacity")),
        "load requests; ",
    ),
    "the newest rows wait, the others do not": (
        changed(SCORES, (WAIT, "    if (t >= prompt) wait_for_previous_kernel();\n")),
        AHEAD,
    ),
    "only the first warp waits": (
        changed(SCORES, (WAIT, "    if (threadIdx.x < 32) wait_for_previous_kernel();\n")),
        AHEAD,
    ),
    "registers that were never set": (
        changed(SCORES, ("key[4] = {}, sum = 0", "key[4], sum")),
        "is read before it is set",
    ),
    "out is cleared before the wait": (
        changed(SCORES, (OLD, OLD + EARLY_OUT)),
        "writes out[0], which the launch ahead may still read",
    ),
    "uniform-input luck: a prompt of one block": (
        changed(SCORES, ("t < prompt", "t < min(prompt, 8)"), ("t >= prompt", "t >= min(prompt, 8)")),
        "late: with a prompt of 24 tokens, K[12",
    ),
    "uniform-input luck: a prompt of 64 tokens": (
        changed(SCORES, ("t < prompt", "t < min(prompt, 64)"), ("t >= prompt", "t >= min(prompt, 64)")),
        "right, but late",
    ),
    "the next launch starts behind the wait": (
        changed(SCORES, ("    let_next_kernel_start();\n", ""), (WAIT, WAIT + "    let_next_kernel_start();\n")),
        "the next launch cannot start early",
    ),
    "the next launch starts late": (
        changed(SCORES, ("    let_next_kernel_start();\n", "")),
        "the next launch cannot start early",
    ),
}

# Exercise 7: no launch for RoPE

ROPE = """
__device__ float warp_sum(float v) {
    for (int far = 16; far > 0; far /= 2) v += __shfl_xor_sync(0xffffffff, v, far);
    return v;
}
extern "C" __global__ void qkv_rope(const float *W, const float *x, const float *cosine, const float *sine,
                                    const int *kv_len, float *q, float *K, float *V, int n_heads, int n_kv_heads,
                                    int head_dim, int hidden) {
    const int half = head_dim / 2, lane = threadIdx.x % 32, pair = blockIdx.x * 8 + threadIdx.x / 32;
    const int head = pair / half, i = pair % half, position = *kv_len - 1, far = i + half;
    if (head >= n_heads + 2 * n_kv_heads) return;
    const float *of_head = W + (long long)head * head_dim * hidden;
    const float *row = of_head + i * hidden, *further = of_head + far * hidden;
    float a = 0, b = 0;
    for (int c = lane; c < hidden; c += 32) {
        const float from = x[c];
        a += row[c] * from;
        b += further[c] * from;
    }
    a = warp_sum(a), b = warp_sum(b);
    const bool is_v = head >= n_heads + n_kv_heads;
    if (!is_v) {
        const float c = cosine[position * half + i], s = sine[position * half + i], old = a;
        a = old * c - b * s;
        b = b * c + old * s;
    }
    const int kv_head = is_v ? head - n_heads - n_kv_heads : head - n_heads;
    float *to = q + head * head_dim;
    if (head >= n_heads) to = (is_v ? V : K) + ((long long)position * n_kv_heads + kv_head) * head_dim;
    if (lane == 0) {
        to[i] = a;
        to[far] = b;
    }
}
"""
LOOP = ROPE[ROPE.index("    for (int c = lane") : ROPE.index("    a = warp_sum(a)")]
TWO_LOOPS = """    for (int c = lane; c < hidden; c += 32) a += row[c] * x[c];
    asm volatile("" ::: "memory");
    for (int c = lane; c < hidden; c += 32) b += further[c] * x[c];
"""
TURN = "        a = old * c - b * s;\n        b = b * c + old * s;\n"
SUMS = "a = warp_sum(a), b = warp_sum(b);"
VOLATILE = "((const volatile float *)x)[c]"
BY_LANE = """    const int each = (hidden + 31) / 32;
    for (int c = lane * each; c < min((lane + 1) * each, hidden); c++) {
        const float from = x[c];
        a += row[c] * from;
        b += further[c] * from;
    }
"""
ROUNDED = "a = __half2float(__float2half(warp_sum(a) + 0.3f)) - 0.3f, b = warp_sum(b);"
AT = "position * n_kv_heads + kv_head"
EX7 = {
    "x is loaded for each of the two rows": (
        changed(ROPE, (LOOP, TWO_LOOPS)),
        "12,800 load requests; 9,792 are enough: each row of W once, x once for two rows",
    ),
    "x is loaded twice in one loop": (
        changed(ROPE, ("from = x[c]", f"from = {VOLATILE}"), ("further[c] * from", f"further[c] * {VOLATILE}")),
        "12,800 load requests; 9,792 are enough",
    ),
    "values are turned too": (changed(ROPE, ("if (!is_v) {", "{")), "of V[new] differ"),
    "keys are not turned": (changed(ROPE, ("if (!is_v) {", "if (head < n_heads) {")), "of K[new] differ"),
    "the position of the next token": (
        changed(ROPE, ("position = *kv_len - 1", "position = *kv_len")),
        "but cosine has",
    ),
    "the angle of the token before": (changed(ROPE, ("position * half", "max(position - 1, 0) * half")), "of q differ"),
    "the new b is made of the new a": (changed(ROPE, ("b = b * c + old * s", "b = b * c + a * s")), "of q differ"),
    "turned the other way": (
        changed(ROPE, (TURN, "        a = old * c + b * s;\n        b = b * c - old * s;\n")),
        "of q differ",
    ),
    "neighbours are pairs": (
        changed(
            ROPE,
            ("i = pair % half", "i = pair % half * 2"),
            ("far = i + half", "far = i + 1"),
            ("f + i]", "f + i / 2]"),
        ),
        "of q differ",
    ),
    "one angle for all pairs": (changed(ROPE, ("half + i]", "half]")), "of q differ"),
    "one angle for a head": (changed(ROPE, ("half + i]", "half + head % half]")), "of q differ"),
    "keys go where values belong": (changed(ROPE, ("is_v ? V : K", "is_v ? K : V")), "of K[new]"),
    "as many heads of keys as of queries": (changed(ROPE, (AT, "position * n_heads + kv_head")), "of K[new]"),
    "the first head of keys only": (changed(ROPE, (AT, "position * n_kv_heads")), "race on "),
    "row kv_len of the cache": (changed(ROPE, (AT, "(position + 1) * n_kv_heads + kv_head")), "but K has 2 elements"),
    "the cache's first row": (changed(ROPE, (AT, "kv_head")), "of K[new] differ"),
    "dropped tail: whole warps of columns": (
        changed(ROPE, ("c < hidden; c += 32", "c + 32 <= hidden; c += 32")),
        "of q differ",
    ),
    "uniform-input luck: hidden is at most 64": (
        changed(ROPE, ("c < hidden; c += 32", "c < min(hidden, 64); c += 32")),
        "hidden = 65, kv_len = 7, capacity = 8: 64 of 64 elements of q differ",
    ),
    "no check of the head": (
        changed(ROPE, ("    if (head >= n_heads + 2 * n_kv_heads) return;\n", "")),
        "but W has 6 elements",
    ),
    "uniform-input luck: head_dim is at most 64": (
        changed(ROPE, ("pair % half,", "pair % half % 32,")),
        "heads of 128, hidden = 20",
    ),
    "an endless loop": (changed(ROPE, ("c < hidden; c += 32", "c < hidden; c += 0 * c")), "is there an endless loop?"),
    "sums of one lane": (changed(ROPE, (SUMS, ";")), "of q differ"),
    "one of the two is stored": (changed(ROPE, ("        to[far] = b;\n", "")), "was never set"),
    "registers that were never set": (
        changed(ROPE, ("float a = 0, b = 0;", "float a, b;")),
        "a variable is read before it is set",
    ),
    "a whole copy of the product besides": (
        changed(ROPE, (SUMS, f"{SUMS}\n    if (lane == 0) V[0] = a;")),
        "race on V[0]",
    ),
    "added with atomics": (
        changed(ROPE, ("to[i] = a", "atomicExch(to + i, a)"), ("to[far] = b", "atomicExch(to + far, b)")),
        "384 atomic requests; wanted: none",
    ),
    "all lanes store: as many requests and sectors, and 32 times the stores": (
        changed(ROPE, ("    if (lane == 0) {\n", "    {\n")),
        "12,288 threads store, 32 for each number; 384 are enough",
    ),
    "half a warp stores": (changed(ROPE, ("    if (lane == 0) {", "    if (lane < 16) {")), "6,144 threads store"),
    "columns in blocks for each lane: not coalesced": (changed(ROPE, (LOOP, BY_LANE)), "right, but not coalesced"),
    "wrong precision: a sum in half": (
        changed(ROPE, (SUMS, ROUNDED), ("\n__device__ float", "#include <cuda_fp16.h>\n__device__ float")),
        "of q differ",
    ),
}

RIGHT = {6: SCORES, 7: ROPE}
WRONG = {6: EX6, 7: EX7}
