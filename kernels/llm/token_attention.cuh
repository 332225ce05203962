/* Attention of one token as tasks: a group of tokens of a kv head each, and then parts of the merge. */
#pragma once
#include "../device/hopper/warpgroup.cuh"
#include "dated.cuh"
#include "token_tasks.cuh"
#define DTYPE SHAPE::T
#include "head.cuh"

/* What attention finds of a group of tokens: a vector as `mixed`, behind it each query head's maximum and sum. */
constexpr int OF_HEADS = Spread<4>::size(Q_ROWS), PARTIAL = OF_HEADS + 2 * S::HEADS;
constexpr int TEAMS = MULTIPLIERS / TILES; // of warps: each has a task of its own, and a warp of it a tile
constexpr int NEW_HEADS = (GROUP + 2 + TILES - 1) / TILES; // that a warp makes ready, at most
constexpr int MERGE_DEPTH = 4; // groups of tokens that a warp asks for at once

/* Until all threads that multiply are here; until those of a team are. */
__device__ __forceinline__ void sync_multipliers() { named_barrier<THREADS>(1); }
__device__ __forceinline__ void sync_team(int team) { named_barrier<32 * TILES>(2 + team); }

struct AttentionMemory {
    alignas(16) T q[TEAMS][GROUP][PITCH];
    T fresh[TEAMS][2][HEAD_DIM]; // the newest token's key and value
    float2 max_and_sum[TEAMS][TILES][GROUP];
};
struct MergeMemory {
    float sums[MULTIPLIERS][CHUNK];
    float2 max_and_sum[MULTIPLIERS];
};

/* What a team needs beside its slot. */
struct Attention {
    Model model;
    const Turns &turns;
    AttentionMemory &memory;
    const Dated *qkv;
    Dated *partials;
    int position; // of the new token: as many lie in the cache
    float eps;
    int team, warp, lane; // warp: of the team

    /* Steps 3 and 4 for the queries of a kv head, and where they are wanted for its newest key and value: bias, norm,
       position (head.cuh). A warp has every TILES-th of these heads. */
    __device__ __forceinline__ void make_heads_ready(int layer, int kv_head, bool newest, unsigned date) const {
        const int heads = GROUP + 2 * newest;
        auto head_of = [&](int n) { // its place among all of q, k and v
            const int head = min(warp + n * TILES, heads - 1);
            return head < GROUP ? kv_head * GROUP + head : S::HEADS + (head - GROUP) * KV_HEADS + kv_head;
        };
        auto channel = [&](int n) { return min(lane + 32 * (n / 2), HEAD_DIM / 2 - 1) + n % 2 * (HEAD_DIM / 2); };
        float found[NEW_HEADS * 2 * PAIRS];
        wait_for_all(found, date, [&](int n) {
            return qkv + head_of(n / (2 * PAIRS)) * HEAD_DIM + channel(n % (2 * PAIRS));
        });
#pragma unroll
        for (int n = 0; n < NEW_HEADS; n++) {
            const int head = warp + n * TILES;
            if (head >= heads) break;
            const bool is_q = head < GROUP, is_v = head > GROUP;
            float a[PAIRS], b[PAIRS];
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const bool here = lane + 32 * i < HEAD_DIM / 2;
                const T *bias = S::BIASES ? model.part(layer, BIAS) + head_of(n) * HEAD_DIM : nullptr;
                a[i] = here ? found[2 * (n * PAIRS + i)] + (S::BIASES ? (float)bias[channel(2 * i)] : 0) : 0;
                b[i] = here ? found[2 * (n * PAIRS + i) + 1] + (S::BIASES ? (float)bias[channel(2 * i + 1)] : 0) : 0;
            }
            if (S::HEAD_NORMS && !is_v) norm(a, b, model.part(layer, is_q ? Q_NORM : K_NORM), eps, lane);
            if (!is_v) turns.rope(a, b);
            store_head(is_q ? memory.q[team][head] : memory.fresh[team][is_v], a, b, lane);
        }
    }
    /* Key and value of the newest token into their tile, and into the cache for later launches. By a warp. */
    __device__ __forceinline__ void append(T *slot, T *keys, T *values, int kv_head, int token) const {
        for (int i = lane; i < 2 * HEAD_DIM; i += 32) {
            const int is_v = i / HEAD_DIM, channel = i % HEAD_DIM;
            const T number = memory.fresh[team][is_v][channel];
            T *tile = slot + token / TILE * 2 * TILE_SIZE + is_v * TILE_SIZE;
            tile[place_of(token % TILE, channel / 8) + channel % 8] = number;
            (is_v ? values : keys)[(long long)position * KV_ROWS + kv_head * HEAD_DIM + channel] = number;
        }
    }
    /* A warp's tile: its weighted values take the place of its keys, (GROUP, HEAD_DIM) floats. */
    __device__ __forceinline__ void mix_tile(T *tile, int tokens) const {
        const unsigned keys = shared_address(tile);
        Scores s = {};
#pragma unroll
        for (int d = 0; d < STEPS; d++) { // queries step by step: all at once would be too many registers
            unsigned q[4], k[4];
            ldmatrix_x4(q, shared_address(memory.q[team][min(lane % 16, GROUP - 1)] + 16 * d + lane / 16 * 8));
            ldmatrix_x4(k, keys + place_of(lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2) * BYTES);
            mma_m16n8k16(s[0][0], q, k[0], k[1], T());
            mma_m16n8k16(s[0][1], q, k[2], k[3], T());
        }
        scale_and_mask(s, LOG2_E * rsqrtf((float)HEAD_DIM), tokens - lane % 4 * 2);

        // Rows g of s are the queries; rows g + 8 repeat one of them, and are left alone
        const float four = fmaxf(fmaxf(s[0][0][0], s[0][0][1]), fmaxf(s[0][1][0], s[0][1][1]));
        const float high = fmaxf(row_max(four), LOWEST); // a tile without tokens has one, too
        unsigned w[4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++)
            w[2 * n] = pack(exp2_approx(s[0][n][0] - high), exp2_approx(s[0][n][1] - high), T());
        float total[4] = {};
        const unsigned ones = pack(1, 1, T());
        mma_m16n8k16(total, w, ones, ones, T());

        const int g = lane / 4, c = lane % 4;
        float *sums = reinterpret_cast<float *>(tile) + g * HEAD_DIM + 2 * c;
        __syncwarp(); // all lanes have read the keys
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, keys + (TILE_SIZE + place_of(lane % 16, 2 * d + lane / 16)) * BYTES);
            float low[4] = {}, high_half[4] = {};
            mma_m16n8k16(low, w, b[0], b[1], T());
            mma_m16n8k16(high_half, w, b[2], b[3], T());
            if (g < GROUP) {
                *reinterpret_cast<float2 *>(sums + 16 * d) = make_float2(low[0], low[1]);
                *reinterpret_cast<float2 *>(sums + 16 * d + 8) = make_float2(high_half[0], high_half[1]);
            }
        }
        if (g < GROUP && c == 0) memory.max_and_sum[team][warp][g] = make_float2(high, total[0]);
    }
    /* What the tiles have, relative to one maximum. */
    __device__ __forceinline__ void hand_on(const T *slot, Dated *to, int first, unsigned date) const {
        for (int i = 2 * (32 * warp + lane); i < GROUP * HEAD_DIM; i += 2 * 32 * TILES) {
            const int head = i / HEAD_DIM, channel = i % HEAD_DIM;
            float high = LOWEST, total = 0, sums[2] = {};
#pragma unroll
            for (int t = 0; t < TILES; t++) high = fmaxf(high, memory.max_and_sum[team][t][head].x);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const float2 pair = memory.max_and_sum[team][t][head];
                const float2 tile = *reinterpret_cast<const float2 *>(
                    reinterpret_cast<const float *>(slot + t * 2 * TILE_SIZE) + i);
                const float weight = exp2_approx(pair.x - high);
                total += weight * pair.y, sums[0] += weight * tile.x, sums[1] += weight * tile.y;
            }
            const int pair = ((first + head) * HEAD_DIM + channel) / 2;
            publish(to + Spread<4>::place(pair), pack(sums[0] / total, sums[1] / total, T()), date);
            if (channel == 0) {
                publish(to + OF_HEADS + 2 * (first + head), high, date);
                publish(to + OF_HEADS + 2 * (first + head) + 1, total, date);
            }
        }
    }
};

/* A group of tokens of a kv head for its query heads, by the warps of a team. A function of its own, which takes
   copies: else what it reckons would take registers from the products, whose loops then go through memory. */
__device__ __noinline__ void attend(const Attention team, Task task, T *slot, unsigned date) {
    const int kv_head = task.number % KV_HEADS, newest = team.position - task.number / KV_HEADS * TOKENS;
    const bool last = newest < TOKENS;
    T *keys = team.model.keys_of(task.layer), *values = team.model.values_of(task.layer); // looked up while q is made
    team.make_heads_ready(task.layer, kv_head, last, date);
    sync_team(team.team);
    if (last && team.warp == newest / TILE) team.append(slot, keys, values, kv_head, newest);
    __syncwarp();
    team.mix_tile(slot + team.warp * 2 * TILE_SIZE, (last ? newest + 1 : TOKENS) - team.warp * TILE);
    sync_team(team.team);
    team.hand_on(slot, team.partials + (long long)(task.number / KV_HEADS) * PARTIAL, kv_head * GROUP, date);
}

/* Some channels of a query head, of what all groups of tokens found. A lane for a channel, a warp for every
   MULTIPLIERS-th group. */
__device__ __forceinline__ void merge(MergeMemory &memory, Task task, int groups, const Dated *partials, Dated *mixed,
                                      unsigned date, int thread) {
    const int warp = thread / 32, lane = thread % 32, head = task.number / CHUNKS;
    const int channel = task.number % CHUNKS * CHUNK + lane, there = min(channel, HEAD_DIM - 1);
    float high = LOWEST, total = 0, sum = 0;
    for (int group = warp; group < groups; group += MERGE_DEPTH * MULTIPLIERS) {
        float found[3 * MERGE_DEPTH];
        wait_for_all(found, date, [&](int n) {
          const int mine = min(group + n / 3 * MULTIPLIERS, groups - 1);
          const Dated *of_group = partials + (long long)mine * PARTIAL;
          return of_group + (n % 3 < 2 ? OF_HEADS + 2 * head + n % 3 : Spread<4>::place((head * HEAD_DIM + there) / 2));
        });
        const float before = high;
#pragma unroll
        for (int d = 0; d < MERGE_DEPTH; d++) high = fmaxf(high, found[3 * d]);
        const float scale = exp2_approx(before - high);
        total *= scale, sum *= scale;
#pragma unroll
        for (int d = 0; d < MERGE_DEPTH; d++) {
            const float w = group + d * MULTIPLIERS < groups ? exp2_approx(found[3 * d] - high) * found[3 * d + 1] : 0;
            const float2 pair = unpack(__float_as_uint(found[3 * d + 2]), T());
            total += w, sum += w * (there % 2 ? pair.y : pair.x);
        }
    }
    memory.sums[warp][lane] = sum;
    if (lane == 0) memory.max_and_sum[warp] = make_float2(high, total);
    sync_multipliers();
    if (warp) return;
    high = LOWEST, total = 0, sum = 0;
    for (int w = 0; w < MULTIPLIERS; w++) high = fmaxf(high, memory.max_and_sum[w].x);
    for (int w = 0; w < MULTIPLIERS; w++) {
        const float weight = exp2_approx(memory.max_and_sum[w].x - high);
        total += weight * memory.max_and_sum[w].y, sum += weight * memory.sums[w][lane];
    }
    const float mine = sum / total, next = __shfl_down_sync(~0u, mine, 1);
    if (channel < HEAD_DIM && channel % 2 == 0)
        publish(mixed + Spread<4>::place((head * HEAD_DIM + channel) / 2), pack(mine, next, T()), date);
}
