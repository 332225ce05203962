/* RMSNorm of rows, a block for each: numbers stay in registers between the sum of squares and the result. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"

constexpr int VEC = 8; // numbers in a word of 16 bytes of T

/* The sum over a block, in all of its threads. */
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float sums[32];
    const int warps = (blockDim.x + 31) / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) sums[warp] = v;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0);
}

template <typename T> __device__ __forceinline__ void store_words(T *to, const float (&from)[VEC]) {
    uint4 word;
    word.x = pack(from[0], from[1], T()), word.y = pack(from[2], from[3], T());
    word.z = pack(from[4], from[5], T()), word.w = pack(from[6], from[7], T());
    *reinterpret_cast<uint4 *>(to) = word;
}
__device__ __forceinline__ void store_words(float *to, const float (&from)[VEC]) {
    reinterpret_cast<float4 *>(to)[0] = {from[0], from[1], from[2], from[3]};
    reinterpret_cast<float4 *>(to)[1] = {from[4], from[5], from[6], from[7]};
}
template <typename T> __device__ __forceinline__ void load_words(const T *from, float (&to)[VEC]) {
    widen(*reinterpret_cast<const uint4 *>(from), to, T());
}
__device__ __forceinline__ void load_words(const float *from, float (&to)[VEC]) {
    const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

/* out = row · weight / √(mean of row² + eps) for a row of cols numbers, which read(column, row) gives VEC at a time.
   Thread t has the words t, t + blockDim.x, ..., PER_THREAD of them. */
template <int PER_THREAD, typename T, class Read>
__device__ __forceinline__ void norm_row(Read read, const T *weight, T *out, int cols, float eps) {
    float row[PER_THREAD][VEC], squares = 0;
#pragma unroll
    for (int w = 0; w < PER_THREAD; w++) {
        const int c = (w * (int)blockDim.x + (int)threadIdx.x) * VEC;
#pragma unroll
        for (int i = 0; i < VEC; i++) row[w][i] = 0;
        if (c < cols) read(c, row[w]);
#pragma unroll
        for (int i = 0; i < VEC; i++) squares += row[w][i] * row[w][i];
    }
    const float scale = rsqrtf(block_sum(squares) / cols + eps);
#pragma unroll
    for (int w = 0; w < PER_THREAD; w++) {
        const int c = (w * (int)blockDim.x + (int)threadIdx.x) * VEC;
        if (c >= cols) break;
        float by[VEC];
        load_words(weight + c, by);
#pragma unroll
        for (int i = 0; i < VEC; i++) row[w][i] *= scale * by[i];
        store_words(out + c, row[w]);
    }
}

/* The same for any number of columns at any address: read_one(column) is asked twice for each. */
template <typename T, class Read>
__device__ __forceinline__ void norm_row_any(Read read_one, const T *weight, T *out, int cols, float eps) {
    float squares = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        const float v = read_one(c);
        squares += v * v;
    }
    const float scale = rsqrtf(block_sum(squares) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) out[c] = (T)(read_one(c) * scale * (float)weight[c]);
}
