/* Launch 4 of the backward pass: sums that blocks of launch 3 could not finish.

   The first blocks have a head each: ddt back through softplus and limits, as (batch, seqlen, heads), and the sums over
   all tokens, dA, dD and that of dt_bias. The others add up dB and dC over the runs of a group, in the order of the
   runs. So the same numbers come out each time.

   Compile with DT, of dt, and T by SHAPE. Launch with THREADS on heads + any number of blocks. */
#include "../device/pdl.cuh"
#include "steps.cuh"
#include "shape.cuh"

#ifndef DT
#define DT float
#endif
constexpr int THREADS = 1024;

template <typename To> __device__ __forceinline__ To rounded(float v);
template <> __device__ __forceinline__ float rounded<float>(float v) { return v; }
template <> __device__ __forceinline__ __half rounded<__half>(float v) { return __float2half(v); }
template <> __device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float v) { return __float2bfloat16(v); }

/* Over the block, in a fixed order; in thread 0. */
__device__ __forceinline__ float block_sum(float v, float (&of_warps)[32]) {
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v += __shfl_xor_sync(~0u, v, lane_mask);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = of_warps[threadIdx.x % 32];
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v += __shfl_xor_sync(~0u, v, lane_mask);
    __syncthreads();
    return v;
}

struct Strides {
    long long batch, token, head;
};

extern "C" __global__ void __launch_bounds__(THREADS)
finish(const DT *dt, const float *dt_bias, const float *dt_gradients, const float2 *head_sums, const float *b_sums,
       const float *c_sums, DT *ddt, float *slope_gradient, float *skip_gradient, float *bias_gradient, T *db, T *dc,
       int seqlen, int heads, int parts, int chunks, int batches, int runs, long long numbers, long long dt_batch,
       long long dt_token, long long dt_head, int softplus, float low, float high) {
    __shared__ float of_warps[32];
    wait_for_previous_kernel();
    if (blockIdx.x >= heads) { // numbers: of dB, and of dC
        const int workers = (gridDim.x - heads) * THREADS;
        for (long long i = (blockIdx.x - heads) * THREADS + threadIdx.x; i < numbers / 2; i += workers)
#pragma unroll
            for (int which = 0; which < 2; which++) {
                const float2 *from = reinterpret_cast<const float2 *>(which ? c_sums : b_sums) + i;
                float2 sum = {0, 0};
                for (int run = 0; run < runs; run++) {
                    const float2 part = from[run * (numbers / 2)];
                    sum.x += part.x, sum.y += part.y;
                }
                T *to = (which ? dc : db) + 2 * i;
                to[0] = rounded<T>(sum.x), to[1] = rounded<T>(sum.y);
            }
        return;
    }
    const int head = blockIdx.x;
    const StepRule rule{softplus, low, high};
    const float bias = dt_bias ? dt_bias[head] : 0;
    float slope_sum = 0, skip_sum = 0, bias_sum = 0;
    for (int batch = 0; batch < batches; batch++) {
        const long long first = ((long long)batch * heads + head) * parts * chunks;
        for (int t = threadIdx.x; t < seqlen; t += THREADS) {
            const float v = as_float(dt[batch * dt_batch + t * dt_token + head * dt_head]) + bias;
            float gradient = 0;
            for (int part = 0; part < parts; part++) gradient += dt_gradients[(first + part * chunks) * CHUNK + t];
            gradient *= rule.slope_at(v);
            ddt[((long long)batch * seqlen + t) * heads + head] = rounded<DT>(gradient);
            bias_sum += gradient;
        }
        for (int chunk = threadIdx.x; chunk < parts * chunks; chunk += THREADS) {
            const float2 part = head_sums[first + chunk];
            slope_sum += part.x, skip_sum += part.y;
        }
    }
    slope_sum = block_sum(slope_sum, of_warps);
    skip_sum = block_sum(skip_sum, of_warps);
    bias_sum = block_sum(bias_sum, of_warps);
    if (threadIdx.x == 0)
        slope_gradient[head] = slope_sum, skip_gradient[head] = skip_sum, bias_gradient[head] = bias_sum;
}
