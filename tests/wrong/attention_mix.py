"""Wrong answers to the exercises of chapter 07. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold.
"""


def changed(source, *pairs):
    """The source with some words replaced; each must be there."""
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


# Exercise 1: before you run it


def loads(n_heads, kv_len, head_dim, itemsize, along):
    each = n_heads * head_dim * kv_len // 32
    return 2 * each, each * (itemsize + 32 if along == "time" else 1 + itemsize)


def only_v(n_heads, kv_len, head_dim, itemsize, along):
    each = n_heads * head_dim * kv_len // 32
    return each, each * (32 if along == "time" else itemsize)


def score_for_each_lane(n_heads, kv_len, head_dim, itemsize, along):
    requests, sectors = loads(n_heads, kv_len, head_dim, itemsize, along)
    return requests, sectors if along == "time" else requests // 2 * 2 * itemsize


def only_fp32(n_heads, kv_len, head_dim, itemsize, along):
    return loads(n_heads, kv_len, head_dim, 4, along)


def one_lane_each(n_heads, kv_len, head_dim, itemsize, along):
    return tuple(32 * n for n in loads(n_heads, kv_len, head_dim, itemsize, along))


def divides(*case):
    return tuple(n / 1 for n in loads(*case))


# Exercise 2: split, and lose nothing

SPLIT = """
extern "C" __global__ void mix(const float *att, const float *v, float *out,
                               int n_heads, int n_kv_heads, int kv_len, int head_dim) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_heads * head_dim) return;
    int h = i / head_dim, d = i % head_dim, kv_head = h / (n_heads / n_kv_heads);
    const float *shares = att + (long long)h * kv_len, *column = v + kv_head * head_dim + d;
    int first = (long long)kv_len * blockIdx.y / gridDim.y;
    int last = (long long)kv_len * (blockIdx.y + 1) / gridDim.y;
    float sum = 0;
    for (int t = first; t < last; t++) sum += shares[t] * column[(long long)t * n_kv_heads * head_dim];
    atomicAdd(&out[i], sum);
}
"""
SHARE = SPLIT[SPLIT.index("    int first") : SPLIT.index("    float sum")]
UP = "    int share = (kv_len + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, last = first + share;\n"

# Exercise 3: find the bug

BUG = """
extern "C" __global__ void mix(const float *att, const float *v, float *out,
                               int n_heads, int n_kv_heads, int kv_len, int head_dim) {
    __shared__ float sums[32];
    int lane = threadIdx.x, warp = threadIdx.y, h = blockIdx.x;
    const float *shares = att + (long long)h * kv_len, *values = v + h / (n_heads / n_kv_heads) * head_dim;
    if (warp == 0) sums[lane] = 0;
    __syncthreads();
    for (int first = 0; first < head_dim; first += 32) {
        int d = first + lane;
        float sum = 0;
        for (int t = warp; t < kv_len && d < head_dim; t += blockDim.y)
            sum += shares[t] * values[(long long)t * n_kv_heads * head_dim + d];
        atomicAdd(&sums[lane], sum);
        __syncthreads(); // all have added
        if (warp == 0) {
            if (d < head_dim) out[(long long)h * head_dim + d] = sums[lane];
            sums[lane] = 0;
        }
        __syncthreads(); // 2
    }
}
"""
CARDS = "for (int t = warp; t < kv_len && d < head_dim; t += blockDim.y)"
PUBLISHED = (
    "int share = kv_len / blockDim.y;\n        for (int t = warp * share; t < (warp + 1) * share && d < head_dim; t++)"
)

# Exercise 4: the same bits in every run

ORDERED = (
    changed(
        SPLIT,
        ("void mix(", "void mix_partial("),
        ("float *out", "float *partials"),
        ("atomicAdd(&out[i], sum);", "partials[(long long)blockIdx.y * n_heads * head_dim + i] = sum;"),
    )
    + """
extern "C" __global__ void add_partials(const float *partials, float *out, int outputs, int splits) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= outputs) return;
    float total = partials[i];
    for (int y = 1; y < splits; y++) total += partials[(long long)y * outputs + i];
    out[i] = total;
}
"""
)
ADDING = ORDERED[ORDERED.index("    float total") : ORDERED.index("    out[i] = total;")]

# Exercise 5: each value once

GROUPED = """
constexpr int GROUP = 4, WARPS = 8;
extern "C" __global__ void mix(const float *att, const float *v, float *out,
                               int n_kv_heads, int kv_len, int head_dim) {
    int lane = threadIdx.x, warp = threadIdx.y, kv_head = blockIdx.x, d = blockIdx.y * 32 + lane;
    __shared__ float sums[WARPS][GROUP][32];
    const float *shares = att + (long long)kv_head * GROUP * kv_len;
    float sum[GROUP] = {};
    for (int t = warp; t < kv_len && d < head_dim; t += WARPS) {
        float value = v[((long long)t * n_kv_heads + kv_head) * head_dim + d];
#pragma unroll
        for (int j = 0; j < GROUP; j++) sum[j] += shares[(long long)j * kv_len + t] * value;
    }
#pragma unroll
    for (int j = 0; j < GROUP; j++) sums[warp][j][lane] = sum[j];
    __syncthreads();
    if (warp >= GROUP || d >= head_dim) return;
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += sums[w][warp][lane];
    out[((long long)kv_head * GROUP + warp) * head_dim + d] = total;
}
"""
END = GROUPED[GROUPED.index("    if (warp >= GROUP") : GROUPED.index("}\n", -3)]

ONE_WARP = changed(
    GROUPED,
    (
        END,
        "    if (warp > 0 || d >= head_dim) return;\n"
        "    for (int j = 0; j < GROUP; j++) {\n"
        "        float total = 0;\n"
        "        for (int w = 0; w < WARPS; w++) total += sums[w][j][lane];\n"
        "        out[((long long)kv_head * GROUP + j) * head_dim + d] = total;\n"
        "    }\n",
    ),
)
ADDED = "    __syncthreads();\n    for (int j = 0; j < GROUP; j++) atomicAdd(&sums[j][lane], sum[j]);"

# Exercise 6: the mended mix

FLIGHT = """
#include <cuda_fp16.h>
constexpr int BATCH = 8;
extern "C" __global__ void __launch_bounds__(256, 4)
mix(const float *att, const __half2 *v, float2 *out, int kv_len) {
    __shared__ float2 sums[8][32];
    int lane = threadIdx.x, slice = threadIdx.y;
    float2 sum = {0, 0};
    __half2 now[BATCH], next[BATCH];
    #pragma unroll
    for (int b = 0; b < BATCH; b++) {
        int token = slice + 8 * b;
        now[b] = token < kv_len ? v[token * 32 + lane] : __half2();
    }
    for (int t = slice; t < kv_len; t += 8 * BATCH) {
        #pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int token = t + 8 * (BATCH + b);
            next[b] = token < kv_len ? v[token * 32 + lane] : __half2();
        }
        #pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int token = t + 8 * b;
            float a = token < kv_len ? att[token] : 0;
            float2 pair = __half22float2(now[b]);
            sum.x += a * pair.x;
            sum.y += a * pair.y;
            now[b] = next[b];
        }
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0) return;
    for (int s = 1; s < 8; s++) sum.x += sums[s][lane].x, sum.y += sums[s][lane].y;
    out[lane] = sum;
}
"""
NOW = "now[b] = token < kv_len ? v[token * 32 + lane] : __half2();"
NEXT = "next[b] = token < kv_len ? v[token * 32 + lane] : __half2();"
IF_NOW = "if (token < kv_len) now[b] = v[token * 32 + lane];"
IF_NEXT = "if (token < kv_len) next[b] = v[token * 32 + lane];"
FLIGHT_LOOP = FLIGHT[FLIGHT.index("    #pragma unroll") : FLIGHT.index("    sums[slice][lane] = sum;")]
ONE_AT_A_TIME = """    for (int t = slice; t < kv_len; t += 8) {
        float2 pair = __half22float2(v[t * 32 + lane]);
        sum.x += att[t] * pair.x;
        sum.y += att[t] * pair.y;
    }
"""

RIGHT = {1: loads, 2: SPLIT, 3: BUG, 4: ORDERED, 5: GROUPED, 6: FLIGHT}

WRONG = {
    1: {
        "forgets the loads of att": (only_v, "gives 32 requests; the machine counts 64"),
        "a sector of shares for every few lanes, though all read the same": (
            score_for_each_lane,
            "loads(1, 32, 32, 4, 'channels') gives 256 sectors; the machine counts 160".replace(
                "loads(", "score_for_each_lane("
            ),
        ),
        "uniform-input luck: fp32 only": (only_fp32, "2, 'time') gives 1,152 sectors; the machine counts 1,088"),
        "a request for each lane": (one_lane_each, "gives 2,048 requests; the machine counts 64"),
        "divides with /": (divides, "expected two whole numbers"),
        "forgets to return": (lambda *case: None, "gave None"),
        "one number": (lambda *case: 5, "expected a pair"),
    },
    2: {
        "dropped tail: the share is rounded down": (
            changed(
                SPLIT,
                (SHARE, "    int share = kv_len / gridDim.y, first = blockIdx.y * share, last = first + share;\n"),
            ),
            "wrong at 1 token, 2 splits",
        ),
        "rounded up, and read beyond the end": (changed(SPLIT, (SHARE, UP)), "at 1 token, 2 splits"),
        "the remainder goes to every block": (
            changed(
                SPLIT,
                (
                    SHARE,
                    "    int share = kv_len / gridDim.y, first = blockIdx.y * share, last = first + share;\n"
                    "    if (kv_len % gridDim.y) last = kv_len;\n",
                ),
            ),
            "wrong at 1 token, 2 splits",
        ),
        "lost update: no atomic": (
            changed(SPLIT, ("atomicAdd(&out[i], sum);", "out[i] += sum;")),
            "race on out",
        ),
        "the last block to come wins": (changed(SPLIT, ("atomicAdd(&out[i], sum);", "out[i] = sum;")), "race on out"),
        "an atomic for each token: right, and many": (
            changed(
                SPLIT,
                (" sum += shares[t] * column", " atomicAdd(&out[i], shares[t] * column"),
                ("n_kv_heads * head_dim];", "n_kv_heads * head_dim]);"),
                ("    atomicAdd(&out[i], sum);\n", ""),
            ),
            "right, but at 100 tokens, 6 splits (8 heads on 2, head_dim = 64) the warps make 1,600 atomic requests",
        ),
        "neighbouring results lie in neighbouring blocks: right, but not coalesced": (
            changed(SPLIT, ("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x * gridDim.x + blockIdx.x")),
            "right, but not coalesced",
        ),
        "uniform-input luck: every head reads KV head 0": (
            changed(SPLIT, ("h / (n_heads / n_kv_heads)", "0")),
            "wrong at ",
        ),
        "KV heads in turns": (changed(SPLIT, ("h / (n_heads / n_kv_heads)", "h % n_kv_heads")), "wrong at "),
        "uniform-input luck: all heads use the shares of head 0": (
            changed(SPLIT, ("(long long)h * kv_len", "0")),
            "wrong at ",
        ),
        "a stride of head_dim from one token to the next": (
            changed(SPLIT, ("t * n_kv_heads * head_dim", "t * head_dim")),
            "wrong at ",
        ),
        "one block takes all the tokens": (
            changed(SPLIT, (SHARE, "    int first = 0, last = blockIdx.y ? 0 : kv_len;\n")),
            "right, but not shared: at 100 tokens, 6 splits (8 heads on 2, head_dim = 64) split 0 makes 200 of 200",
        ),
        "the sum is never set": (changed(SPLIT, ("float sum = 0;", "float sum;")), "`sum` is read before it is set"),
        "threads without a result": (changed(SPLIT, ("if (i >= n_heads * head_dim) return;", "")), "at 1 token"),
    },
    3: {
        "only the race is mended": (changed(BUG, (CARDS, PUBLISHED)), "wrong at 1 token, 2 warps"),
        "only the share is mended": (changed(BUG, ("__syncthreads(); // 2", "")), "race on"),
        "a barrier for each warp only": (changed(BUG, ("__syncthreads(); // 2", "__syncwarp();")), "race on"),
        "the barrier stands in a branch that warp 0 takes": (
            changed(
                BUG,
                ("            sums[lane] = 0;\n", "            sums[lane] = 0;\n            __syncthreads();\n"),
                ("        __syncthreads(); // 2\n", ""),
            ),
            "at ",
        ),
        "the share is rounded up, and the last warps read beyond the end": (
            changed(
                BUG,
                (
                    CARDS,
                    "int share = (kv_len + blockDim.y - 1) / blockDim.y;\n"
                    "        for (int t = warp * share; t < (warp + 1) * share && d < head_dim; t++)",
                ),
            ),
            "at 1 token, 2 warps",
        ),
        "lost update: adds to sums without an atomic": (
            changed(BUG, ("atomicAdd(&sums[lane], sum);", "sums[lane] += sum;")),
            "wrong at 64 tokens, 2 warps",
        ),
        "every warp takes all tokens of its 32 channels": (
            changed(BUG, (CARDS, "for (int t = 0; t < kv_len && d < head_dim; t++)")),
            "wrong at 64 tokens, 2 warps",
        ),
        "one warp takes all the tokens": (
            changed(BUG, (CARDS, "for (int t = 0; warp == 0 && t < kv_len && d < head_dim; t++)")),
            "right, but not shared: at 100 tokens, 4 warps, head_dim = 64 warp 0 makes 400 of 400 load requests",
        ),
        "a warp of its own for each block takes all the tokens": (
            changed(BUG, (CARDS, "for (int t = 0; warp == h % blockDim.y && t < kv_len && d < head_dim; t++)")),
            "right, but not shared",
        ),
        "the sum is never set": (changed(BUG, ("float sum = 0;", "float sum;")), "`sum` is read before it is set"),
        "every warp loads all tokens and keeps its own: right, but read again and again": (
            changed(
                BUG,
                (CARDS, "for (int t = 0; t < kv_len && d < head_dim; t++)"),
                ("sum += shares[t] *", "sum += (t % blockDim.y == warp) * shares[t] *"),
            ),
            "load requests; 1,600 are enough",
        ),
    },
    4: {
        "dropped tail": (
            changed(
                ORDERED,
                (SHARE, "    int share = kv_len / gridDim.y, first = blockIdx.y * share, last = first + share;\n"),
            ),
            "wrong at 1 token, 2 splits",
        ),
        "blocks without a token write nothing": (
            changed(ORDERED, ("    float sum = 0;\n", "    if (first == last) return;\n    float sum = 0;\n")),
            "was never set",
        ),
        "one block takes all the tokens": (
            changed(ORDERED, (SHARE, "    int first = 0, last = blockIdx.y == gridDim.y - 1 ? kv_len : 0;\n")),
            "right, but not shared: at 100 tokens, 6 splits (8 heads on 2, head_dim = 64) split 5 makes 200 of 200",
        ),
        "adds to what was there": (changed(ORDERED, ("head_dim + i] = sum;", "head_dim + i] += sum;")), "NaN"),
        "atomics on one row of partials": (
            changed(
                ORDERED,
                (
                    "partials[(long long)blockIdx.y * n_heads * head_dim + i] = sum;",
                    "atomicAdd(&partials[i], sum);",
                ),
            ),
            "was never set, or only added to",
        ),
        "all blocks write to the same row": (
            changed(ORDERED, ("(long long)blockIdx.y * n_heads * head_dim + i", "i")),
            "race on partials",
        ),
        "from the last split to the first": (
            changed(
                ORDERED,
                (
                    ADDING,
                    "    float total = partials[(long long)(splits - 1) * outputs + i];\n"
                    "    for (int y = splits - 2; y >= 0; y--) total += partials[(long long)y * outputs + i];\n",
                ),
            ),
            "was not added up from the first split to the last",
        ),
        "even splits and odd splits apart": (
            changed(
                ORDERED,
                (
                    ADDING,
                    "    float total = partials[i], odd = 0;\n"
                    "    for (int y = 1; y < splits; y++)\n"
                    "        (y % 2 ? odd : total) += partials[(long long)y * outputs + i];\n"
                    "    total += odd;\n",
                ),
            ),
            "was not added up from the first split to the last",
        ),
        "wrong precision: adds up in double": (
            changed(ORDERED, ("float total", "double total")),
            "was not added up from the first split to the last",
        ),
        "the second launch adds with atomics": (
            changed(ORDERED, ("    out[i] = total;", "    out[i] = 0;\n    atomicAdd(&out[i], total);")),
            "atomic requests; wanted: none",
        ),
        "the first split is left out": (
            changed(ORDERED, ("float total = partials[i];", "float total = 0;")),
            "wrong at 1 output, 1 split",
        ),
        "the second launch loads each partial sum twice": (
            changed(
                ORDERED,
                (
                    ADDING,
                    f"    float total = 0;\n    for (int n = 0; n < 2; n++) {{\n{ADDING.replace('float ', '')}    }}\n",
                ),
                ("const float *partials, float *out", "const volatile float *partials, float *out"),
            ),
            "load requests; 256 are enough",
        ),
    },
    5: {
        "each head loads the value again": (
            changed(
                GROUPED,
                (
                    "        float value = v[",
                    "        const volatile float *again = v;\n        auto value = [&] { return again[",
                ),
                ("head_dim + d];\n#pragma", "head_dim + d]; };\n#pragma"),
                ("+ t] * value;", "+ t] * value();"),
            ),
            "load requests; 2,000 are enough",
        ),
        "no barrier": (changed(GROUPED, ("    __syncthreads();\n", "")), "at "),
        "a barrier for each warp only": (changed(GROUPED, ("__syncthreads()", "__syncwarp()")), "at "),
        "sums[lane][...]: bank conflicts": (
            changed(
                GROUPED,
                ("sums[WARPS][GROUP][32]", "sums[32][WARPS][GROUP]"),
                ("sums[warp][j][lane]", "sums[lane][warp][j]"),
                ("sums[w][warp][lane]", "sums[lane][w][warp]"),
            ),
            "bank conflicts",
        ),
        "all warps add to the same sums, without atomics": (
            changed(
                GROUPED,
                ("sums[WARPS][GROUP][32]", "sums[GROUP][32]"),
                ("sums[warp][j][lane] = sum[j]", "sums[j][lane] = sum[j]"),
                ("for (int w = 0; w < WARPS; w++) total += sums[w][warp][lane]", "total = sums[warp][lane]"),
            ),
            "race on",
        ),
        "one warp takes all the tokens": (
            changed(GROUPED, ("int t = warp; t", "int t = 0; warp == 0 && t"), ("t += WARPS", "t++")),
            "right, but not shared: at 2 KV heads, 100 tokens, head_dim = 64 warp 0 makes 500 of 500 load requests",
        ),
        "one warp adds up all four heads": (ONE_WARP, "one warp makes 32 loads from shared memory; wanted: at most 8"),
        "the warps add to the same sums by atomics in shared memory": (
            changed(
                GROUPED,
                ("sums[WARPS][GROUP][32];", "sums[GROUP][32];\n    if (warp < GROUP) sums[warp][lane] = 0;"),
                ("#pragma unroll\n    for (int j = 0; j < GROUP; j++) sums[warp][j][lane] = sum[j];", ADDED),
                ("for (int w = 0; w < WARPS; w++) total += sums[w][warp][lane]", "total = sums[warp][lane]"),
            ),
            "atomic requests to shared memory; wanted: none, a place of its own for each sum of a warp",
        ),
        "the sums are never set": (
            changed(GROUPED, ("float sum[GROUP] = {};", "float sum[GROUP];")),
            "is read before it is set",
        ),
        "each warp adds its sums to out with atomics": (
            changed(
                GROUPED,
                (
                    "    __syncthreads();\n",
                    "    if (warp == 0 && d < head_dim)\n"
                    "        for (int j = 0; j < GROUP; j++)\n"
                    "            out[((long long)kv_head * GROUP + j) * head_dim + d] = 0;\n"
                    "    __syncthreads();\n    if (d < head_dim)\n"
                    "        for (int j = 0; j < GROUP; j++)\n"
                    "            atomicAdd(&out[((long long)kv_head * GROUP + j) * head_dim + d], sum[j]);\n",
                ),
                (END, ""),
            ),
            "atomic requests; wanted: none",
        ),
        "dropped tail: whole rounds of eight tokens only": (
            changed(GROUPED, ("t < kv_len && d", "t < kv_len / WARPS * WARPS && d")),
            "wrong at 1 KV head, 1 token",
        ),
        "uniform-input luck: all four heads use the same shares": (
            changed(GROUPED, ("shares[(long long)j * kv_len + t]", "shares[t]")),
            "1 token, head_dim = 1: ",
        ),
        "heads that belong to another KV head": (
            changed(GROUPED, ("kv_head * GROUP + warp", "warp * n_kv_heads + kv_head")),
            "wrong at 3 KV heads",
        ),
    },
    6: {
        "only the first batch asks": (
            changed(FLIGHT, (NEXT, "next[b] = v[token * 32 + lane];")),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "only the next batch asks": (
            changed(FLIGHT, (NOW, "now[b] = v[token * 32 + lane];")),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "asks after it has read": (
            changed(
                FLIGHT, (NEXT, "next[b] = v[token * 32 + lane];\n            if (token >= kv_len) next[b] = __half2();")
            ),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "reads the last token again, and weighs it with what lies behind": (
            changed(
                FLIGHT,
                (NOW, "now[b] = v[min(token, kv_len - 1) * 32 + lane];"),
                (NEXT, "next[b] = v[min(token, kv_len - 1) * 32 + lane];"),
                ("token < kv_len ? att[token] : 0", "att[token]"),
            ),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "no load for a token that is not there, and no zero either": (
            changed(FLIGHT, (NOW, IF_NOW), (NEXT, IF_NEXT)),
            "`now` is read before it is set",
        ),
        "no zero for the next batch": (
            changed(FLIGHT, (NEXT, IF_NEXT)),
            "`now` is read before it is set",  # a copy of next
        ),
        "one token more than there are": (
            changed(FLIGHT, ("token < kv_len ? v", "token <= kv_len ? v")),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "dropped tail: only whole batches": (
            changed(FLIGHT, ("t < kv_len; t += 8 * BATCH", "t + 8 * BATCH - 8 < kv_len; t += 8 * BATCH")),
            "wrong at kv_len = 1, capacity = 1",
        ),
        "no loads in flight any more": (
            changed(FLIGHT, (FLIGHT_LOOP, ONE_AT_A_TIME)),
            "right, but in the compiled code no more than",
        ),
        "the last token again and again: right, and loads that nobody needs": (
            changed(
                FLIGHT,
                (NOW, "now[b] = v[min(token, kv_len - 1) * 32 + lane];"),
                (NEXT, "next[b] = v[min(token, kv_len - 1) * 32 + lane];"),
            ),
            "load requests; wanted: at most 1,024",
        ),
        "the weights ask, the values do not": (
            changed(FLIGHT, ("token < kv_len ? v[token * 32 + lane] : __half2()", "v[token * 32 + lane]")),
            "at kv_len = 1, capacity = 1: kernel mix",
        ),
        "forgets to hand on the next batch": (
            changed(FLIGHT, ("            now[b] = next[b];\n", "")),
            "wrong at kv_len = 65",
        ),
        "no barrier before the sums": (
            changed(FLIGHT, ("    __syncthreads();\n", "")),
            "at kv_len = 1, capacity = 1: kernel mix: race",
        ),
    },
}
