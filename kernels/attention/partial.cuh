/* What a block hands on at the end of a segment: the result itself, where it has had all tokens of a row, or what
   merge.cu makes the result of. Two epilogues, chosen by a type: each takes what it writes, under its own name.

   Before that the warps of a head tile are joined, in shared memory: each has sums relative to a maximum of its own. */
#pragma once
#include "shape.cuh"
#include "softmax.cuh"

/* Of the warps that a head tile has: the largest maximum, and the sum of their weights relative to it. */
template <int COUNT = WARPS_PER_HEAD_TILE>
__device__ __forceinline__ float2 joined(const float2 *max_and_sum, int from_warp_to_warp) {
    float high = LOWEST, total = 0;
#pragma unroll
    for (int w = 0; w < COUNT; w++) high = fmaxf(high, max_and_sum[w * from_warp_to_warp].x);
#pragma unroll
    for (int w = 0; w < COUNT; w++) {
        const float2 pair = max_and_sum[w * from_warp_to_warp];
        total += pair.y * exp2_approx(pair.x - high);
    }
    return make_float2(high, total);
}

/* The sums of a row as its result. */
struct StoreOutput {
    T *out;        // (batch, n_heads, HEAD_DIM)
    long long row; // of all

    __device__ __forceinline__ T *address(int head_tile, int head, int channel) const {
        const HeadTile tile(row, head_tile);
        head += tile.first_head();
        return head < GROUP ? out + tile.query_head(head) * HEAD_DIM + channel : nullptr;
    }
    /* Of some channels of a head: the weighted values; the maximum and the sum of weights. */
    __device__ __forceinline__ void store(int head_tile, int head, int channel, float4 sum, float2 max_and_sum) const {
        const float share = 1 / max_and_sum.y;
        const uint2 mean = make_uint2(pack(sum.x * share, sum.y * share, T()), pack(sum.z * share, sum.w * share, T()));
        if (T *to = address(head_tile, head, channel)) __stcg(reinterpret_cast<uint2 *>(to), mean);
    }
    __device__ __forceinline__ void store(int head_tile, int head, int channel, float2 sum, float2 max_and_sum) const {
        const float share = 1 / max_and_sum.y;
        const unsigned mean = pack(sum.x * share, sum.y * share, T());
        if (T *to = address(head_tile, head, channel)) __stcg(reinterpret_cast<unsigned *>(to), mean);
    }
    __device__ __forceinline__ void store_values(int head_tile, int head, int channel, float2 sum, float2 found) const {
        store(head_tile, head, channel, sum, found);
    }
    __device__ __forceinline__ void store_max_and_sum(int, int, float2) const {} // it is in the result
};

/* The sums of a segment, for merge.cu. */
struct StorePartial {
    float *partial_out;  // (segments, HEAD_TILES_PER_BLOCK, HEADS, HEAD_DIM)
    float2 *max_and_sum; // (segments, HEAD_TILES_PER_BLOCK, HEADS)
    long long segment;

    __device__ __forceinline__ long long place(int head_tile, int head) const {
        return (segment * HEAD_TILES_PER_BLOCK + head_tile) * HEADS + head;
    }
    template <class Sum> // float2, float4
    __device__ __forceinline__ void store_values(int head_tile, int head, int channel, Sum sum, float2) const {
        *reinterpret_cast<Sum *>(partial_out + place(head_tile, head) * HEAD_DIM + channel) = sum;
    }
    __device__ __forceinline__ void store_max_and_sum(int head_tile, int head, float2 found) const {
        max_and_sum[place(head_tile, head)] = found;
    }
    template <class Sum>
    __device__ __forceinline__ void store(int head_tile, int head, int channel, Sum sum, float2 found) const {
        store_values(head_tile, head, channel, sum, found);
        if (channel == 0) store_max_and_sum(head_tile, head, found);
    }
};

/* Hand on what a head tile's only warp has. */
template <class Epilogue>
__device__ __forceinline__ void store(const Epilogue &epilogue, int head_tile, const SoftmaxSums &sums, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int r = 0; r < LANE_HEADS; r++)
        if (g + 8 * r < HEADS) {
            const float2 found = make_float2(sums.maximum[r], sums.weights[2 * r]);
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++)
                epilogue.store_values(head_tile, g + 8 * r, 8 * n + 2 * c,
                                      make_float2(sums.values[n][2 * r], sums.values[n][2 * r + 1]), found);
            if (c == 0) epilogue.store_max_and_sum(head_tile, g + 8 * r, found);
        }
}

/* Shared memory in which the warps of a block are joined. */
struct WarpSums {
    static constexpr int FLOATS = WARPS_PER_HEAD_TILE > 1 ? WARPS * HEADS * (PITCH + 2) : 0;
    float *values;       // [WARPS][HEADS][PITCH]; first, as they are read 16 bytes at a time
    float2 *max_and_sum; // [WARPS][HEADS]

    __device__ __forceinline__ WarpSums(float *shared)
        : values(shared), max_and_sum(reinterpret_cast<float2 *>(shared + WARPS * HEADS * PITCH)) {}

    /* Lay down a warp's sums, relative to what all warps of its head tile have as their maximum. All warps call. */
    __device__ __forceinline__ void lay_down(const SoftmaxSums &sums, int warp, int lane) const {
        const int g = lane / 4, c = lane % 4;
#pragma unroll
        for (int r = 0; r < LANE_HEADS; r++)
            if (c == 0 && g + 8 * r < HEADS)
                max_and_sum[warp * HEADS + g + 8 * r] = make_float2(sums.maximum[r], sums.weights[2 * r]);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < LANE_HEADS; r++)
            if (g + 8 * r < HEADS) {
                const int head_tile = warp % HEAD_TILES_PER_BLOCK;
                const float high = joined(max_and_sum + head_tile * HEADS + g + 8 * r, HEAD_TILES_PER_BLOCK * HEADS).x;
                const float scale = exp2_approx(sums.maximum[r] - high);
#pragma unroll
                for (int n = 0; n < 2 * STEPS; n++)
                    *reinterpret_cast<float2 *>(values + (warp * HEADS + g + 8 * r) * PITCH + 8 * n + 2 * c) =
                        make_float2(sums.values[n][2 * r] * scale, sums.values[n][2 * r + 1] * scale);
            }
        __syncthreads();
    }
    /* Add them up: four channels of a head for each thread. */
    template <class Epilogue> __device__ __forceinline__ void store(const Epilogue &epilogue, int thread) const {
#pragma unroll 2
        for (int i = thread; i < HEAD_TILES_PER_BLOCK * HEADS * (HEAD_DIM / 4); i += 32 * WARPS) {
            const int channel = i % (HEAD_DIM / 4) * 4, row = i / (HEAD_DIM / 4); // head tile and head
            float4 sum = {};
#pragma unroll
            for (int w = 0; w < WARPS_PER_HEAD_TILE; w++) {
                const int at = (w * HEAD_TILES_PER_BLOCK * HEADS + row) * PITCH + channel;
                const float4 a = *reinterpret_cast<const float4 *>(values + at);
                sum.x += a.x, sum.y += a.y, sum.z += a.z, sum.w += a.w;
            }
            const float2 found = joined(max_and_sum + row, HEAD_TILES_PER_BLOCK * HEADS);
            epilogue.store(row / HEADS, row % HEADS, channel, sum, found);
        }
    }
};
