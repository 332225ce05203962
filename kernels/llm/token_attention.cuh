/* Attention of one token as tasks: a group of tokens of a kv head each, and then parts of the merge. */
#pragma once
#include "../device/hopper/warpgroup.cuh"
#include "../device/math.cuh"
#include "dated.cuh"
#include "head.cuh"
#include "token_tasks.cuh"

constexpr int PARTIAL = S::DIM + 2;            // numbers of a query head and a group of tokens: maximum, sum, channels
constexpr int LANES = 8;                       // that share a token: THREADS / 64
constexpr int COLUMNS = S::DIM / 2, SLICES = THREADS / COLUMNS; // pairs of channels; tokens mixed side by side
constexpr int MERGE_DEPTH = 4;                 // groups of tokens that a warp asks for at once
constexpr float LOWEST = -3.4028235e38f;

/* Until all threads that multiply are here. */
__device__ __forceinline__ void sync_multipliers() { named_barrier<THREADS>(1); }

struct AttentionMemory {
    alignas(16) T q[GROUP][S::DIM];
    float scores[TOKENS][GROUP]; // then weights
    float sums[SLICES][GROUP][S::DIM];
};
struct MergeMemory {
    float sums[WARPS][CHUNK];
    float2 max_and_sum[WARPS];
};

/* A head of q, k or v of the new token, as the product left it, made ready: bias, norm, position (head.cuh). By a warp. */
struct NewHeads {
    const Dated *qkv;
    const Model &model;
    int layer;
    const double *turns;
    int position;
    float eps;

    __device__ __forceinline__ void take(T *to, int head, unsigned date, int lane) const {
        const bool is_q = head < S::HEADS, is_v = head >= S::HEADS + S::KV_HEADS;
        const Dated *row = qkv + head * S::DIM;
        const T *bias = S::BIASES ? model.part(layer, BIAS) + head * S::DIM : nullptr;
        float both[2 * PAIRS], a[PAIRS], b[PAIRS];
        auto place = [&](int n) { return min(lane + 32 * (n / 2), S::DIM / 2 - 1) + n % 2 * (S::DIM / 2); };
        wait_for_all(both, date, [&](int n) { return row + place(n); });
        for (int n = 0; n < PAIRS; n++) {
            const bool here = lane + 32 * n < S::DIM / 2;
            a[n] = here ? both[2 * n] + (S::BIASES ? (float)bias[place(2 * n)] : 0) : 0;
            b[n] = here ? both[2 * n + 1] + (S::BIASES ? (float)bias[place(2 * n + 1)] : 0) : 0;
        }
        if (S::HEAD_NORMS && !is_v) norm(a, b, model.part(layer, is_q ? Q_NORM : K_NORM), eps, lane);
        if (!is_v) rope(a, b, turns, position, lane);
        store_head(to, a, b, lane);
    }
};

/* One group of tokens of a kv head for its query heads. slot: [2][TOKENS][DIM], keys and values; the newest token's are
   put there, and into the cache, by the task that has the last group. */
__device__ __forceinline__ void attend(T *slot, AttentionMemory &memory, const NewHeads &heads, Task task, Line line,
                                       Dated *partials, unsigned date, int thread) {
    const int warp = thread / 32, lane = thread % 32, kv_head = task.number % S::KV_HEADS;
    const int group = task.number / S::KV_HEADS, newest = line.tokens - group * TOKENS;
    const bool last = newest < TOKENS; // always so in one group: newest >= 0
    const int count = last ? newest + 1 : TOKENS;

    // 1. queries, and the newest token
    for (int head = warp; head < GROUP + 2 * last; head += WARPS) {
        const int kv = head - GROUP; // 0: key, 1: value
        T *to = kv < 0 ? memory.q[head] : slot + (kv * TOKENS + newest) * S::DIM;
        heads.take(to, kv < 0 ? kv_head * GROUP + head : S::HEADS + kv * S::KV_HEADS + kv_head, date, lane);
        if (kv >= 0) {
            __syncwarp();
            T *cache = kv ? heads.model.values_of(task.layer) : heads.model.keys_of(task.layer);
            cache += ((long long)line.tokens * S::KV_HEADS + kv_head) * S::DIM;
            for (int i = lane; i < S::DIM; i += 32) cache[i] = to[i]; // for later launches
        }
    }
    sync_multipliers();

    // 2. scores, in units of log 2: eight lanes for a token
    const float scale = LOG2_E * rsqrtf((float)S::DIM);
    for (int token = thread / LANES; token < TOKENS; token += THREADS / LANES) { // lanes of a warp go together
        float s[GROUP] = {};
        if (token < count)
            for (int word = thread % LANES; word < S::DIM / 8; word += LANES) {
                float k[8];
                widen(reinterpret_cast<const uint4 *>(slot + token * S::DIM)[word], k, T());
#pragma unroll
                for (int g = 0; g < GROUP; g++) {
                    float q[8];
                    widen(reinterpret_cast<const uint4 *>(memory.q[g])[word], q, T());
#pragma unroll
                    for (int i = 0; i < 8; i++) s[g] += q[i] * k[i];
                }
            }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
#pragma unroll
            for (int mask = LANES / 2; mask; mask /= 2) s[g] += __shfl_xor_sync(~0u, s[g], mask);
            if (thread % LANES == 0) memory.scores[token][g] = token < count ? s[g] * scale : LOWEST;
        }
    }
    sync_multipliers();

    // 3. weights: a warp for a head
    Dated *to = partials + (long long)task.number * GROUP * PARTIAL;
    for (int g = warp; g < GROUP; g += WARPS) {
        float high = LOWEST, total = 0;
        for (int token = lane; token < count; token += 32) high = fmaxf(high, memory.scores[token][g]);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, mask));
        for (int token = lane; token < count; token += 32) {
            const float w = exp2_approx(memory.scores[token][g] - high);
            memory.scores[token][g] = w;
            total += w;
        }
        total = warp_sum(total);
        if (lane < 2) publish(to + g * PARTIAL + lane, lane ? total : high, date);
    }
    sync_multipliers();

    // 4. weighted values: a pair of channels of every SLICES-th token for a thread
    const int column = thread % COLUMNS, slice = thread / COLUMNS;
    if (slice < SLICES) {
        float2 sums[GROUP] = {};
        for (int token = slice; token < count; token += SLICES) {
            const float2 v = unpack(reinterpret_cast<const unsigned *>(slot + (TOKENS + token) * S::DIM)[column], T());
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                const float w = memory.scores[token][g];
                sums[g].x += w * v.x, sums[g].y += w * v.y;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) reinterpret_cast<float2 *>(memory.sums[slice][g])[column] = sums[g];
    }
    sync_multipliers();
    for (int i = thread; i < GROUP * S::DIM; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) sum += memory.sums[slice][i / S::DIM][i % S::DIM];
        publish(to + i / S::DIM * PARTIAL + 2 + i % S::DIM, sum, date);
    }
}

/* Some channels of a query head, of what all groups of tokens found. A lane for a channel, a warp for every WARPS-th
   group. */
__device__ __forceinline__ void merge(MergeMemory &memory, Task task, int groups, const Dated *partials, Dated *mixed,
                                      unsigned date, int thread) {
    const int warp = thread / 32, lane = thread % 32, head = task.number / CHUNKS;
    const int channel = task.number % CHUNKS * CHUNK + lane, there = min(channel, S::DIM - 1);
    const int kv_head = head / GROUP, of_group = head % GROUP;
    float high = LOWEST, total = 0, sum = 0;
    for (int group = warp; group < groups; group += MERGE_DEPTH * WARPS) {
        float found[3 * MERGE_DEPTH];
        wait_for_all(found, date, [&](int n) {
            const int mine = min(group + n / 3 * WARPS, groups - 1);
            const long long row = ((long long)mine * S::KV_HEADS + kv_head) * GROUP + of_group;
            return partials + row * PARTIAL + (n % 3 < 2 ? n % 3 : 2 + there);
        });
        const float before = high;
#pragma unroll
        for (int d = 0; d < MERGE_DEPTH; d++) high = fmaxf(high, found[3 * d]);
        const float scale = exp2_approx(before - high);
        total *= scale, sum *= scale;
#pragma unroll
        for (int d = 0; d < MERGE_DEPTH; d++) {
            const float w = group + d * WARPS < groups ? exp2_approx(found[3 * d] - high) : 0;
            total += w * found[3 * d + 1], sum += w * found[3 * d + 2];
        }
    }
    memory.sums[warp][lane] = sum;
    if (lane == 0) memory.max_and_sum[warp] = make_float2(high, total);
    sync_multipliers();
    if (warp) return;
    high = LOWEST, total = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) high = fmaxf(high, memory.max_and_sum[w].x);
    for (int w = 0; w < WARPS; w++) {
        const float weight = exp2_approx(memory.max_and_sum[w].x - high);
        total += weight * memory.max_and_sum[w].y, sum += weight * memory.sums[w][lane];
    }
    if (channel < S::DIM) publish(mixed + Spread<8>::place(head * S::DIM + channel), sum / total, date);
}
