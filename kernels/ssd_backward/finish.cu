/* Launch 4 of the backward pass: sums that blocks of launch 3 could not finish. Each block does one of three:

       adders    dB and dC: sums over the runs of a group, in the order of the runs; THREADS pairs of numbers of each
       heads     dA, dD and the gradient of dt_bias: sums over all chunks of a head, its parts and the batch
       turners   ddt, from lines of a head to (batch, seqlen, heads): 64 tokens of 32 heads

   All sums have one order, so the same numbers come out each time. Compile with DT, of dt, and T by SHAPE. Launch with
   THREADS on adders + heads + turners blocks. dt_gradients, head_sums: of each chunk of each row (chunks.cu). */
#include "../device/reduce.cuh"
#include "shape.cuh"

#ifndef DT
#define DT float
#endif
constexpr int THREADS = 256, HEADS = 32;

template <typename To> __device__ __forceinline__ To rounded(float v);
template <> __device__ __forceinline__ float rounded<float>(float v) { return v; }
template <> __device__ __forceinline__ __half rounded<__half>(float v) { return __float2half(v); }
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float v) { return __float2bfloat16(v); }

/* A pair of numbers of dB or dC, of all runs. */
__device__ __forceinline__ void add_runs(T *to, const float *sums, long long pair, long long numbers, int runs) {
    float2 sum = {0, 0};
    for (int run = 0; run < runs; run++) {
        const float2 part = *reinterpret_cast<const float2 *>(sums + run * numbers + 2 * pair);
        sum.x += part.x, sum.y += part.y;
    }
    to[2 * pair] = rounded<T>(sum.x), to[2 * pair + 1] = rounded<T>(sum.y);
}

/* What a head's chunks give, in thread 0: of A, of D, of dt_bias. */
__device__ __forceinline__ float3 sum_of_head(const float4 *head_sums, int head, int heads, int lines, int batches,
                                              int thread) {
    __shared__ float of_warps[3][THREADS / 32];
    float3 sum = {0, 0, 0};
    for (int batch = 0; batch < batches; batch++)
        for (int i = thread; i < lines; i += THREADS) {
            const float4 part = head_sums[((long long)batch * heads + head) * lines + i];
            sum.x += part.x, sum.y += part.y, sum.z += part.z;
        }
    sum = make_float3(warp_sum(sum.x), warp_sum(sum.y), warp_sum(sum.z));
    if (thread % 32 == 0)
        of_warps[0][thread / 32] = sum.x, of_warps[1][thread / 32] = sum.y, of_warps[2][thread / 32] = sum.z;
    __syncthreads();
    sum = make_float3(0, 0, 0);
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) sum.x += of_warps[0][i], sum.y += of_warps[1][i], sum.z += of_warps[2][i];
    return sum;
}

/* A chunk of 32 heads: a warp reads the lines of one after another, and writes all heads of one token. */
__device__ __forceinline__ void turn(DT *ddt, const float *dt_gradients, int batch, int chunk, int first_head,
                                     int seqlen, int heads, int parts, int chunks, int thread) {
    __shared__ float found[HEADS][CHUNK + 1]; // one more: lanes that read a column meet 32 banks
    const int lane = thread % 32;
    for (int i = thread / 32; i < HEADS && first_head + i < heads; i += THREADS / 32) {
        float2 sum = {0, 0};
        for (int part = 0; part < parts; part++) {
            const long long row = ((long long)batch * heads + first_head + i) * parts + part;
            const float *from = dt_gradients + (row * chunks + chunk) * CHUNK;
            const float2 v = reinterpret_cast<const float2 *>(from)[lane];
            sum.x += v.x, sum.y += v.y;
        }
        found[i][2 * lane] = sum.x, found[i][2 * lane + 1] = sum.y;
    }
    __syncthreads();
    for (int i = thread / 32; i < CHUNK; i += THREADS / 32) {
        const int token = chunk * CHUNK + i, head = first_head + lane;
        if (token < seqlen && head < heads)
            ddt[((long long)batch * seqlen + token) * heads + head] = rounded<DT>(found[lane][i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
finish(const float *dt_gradients, const float4 *head_sums, const float *b_sums, const float *c_sums, DT *ddt,
       float *slope_gradient, float *skip_gradient, float *bias_gradient, T *db, T *dc, int seqlen, int heads,
       int parts, int chunks, int batches, int runs, long long numbers) {
    const int adders = (int)((numbers / 2 + THREADS - 1) / THREADS), thread = threadIdx.x;
    const int block = (int)blockIdx.x - adders;
    if (block < 0) {
        const long long pair = (long long)blockIdx.x * THREADS + thread;
        if (pair < numbers / 2) add_runs(db, b_sums, pair, numbers, runs), add_runs(dc, c_sums, pair, numbers, runs);
    } else if (block < heads) {
        const float3 sum = sum_of_head(head_sums, block, heads, parts * chunks, batches, thread);
        if (thread > 0) return;
        slope_gradient[block] = sum.x;
        if (skip_gradient) skip_gradient[block] = sum.y;
        if (bias_gradient) bias_gradient[block] = sum.z;
    } else {
        const int spans = (heads + HEADS - 1) / HEADS, place = (block - heads) / spans; // place: a chunk of the batch
        turn(ddt, dt_gradients, place / chunks, place % chunks, (block - heads) % spans * HEADS, seqlen, heads, parts,
             chunks, thread);
    }
}
