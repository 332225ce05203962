/* Launch 1 of the backward pass: dt into steps and decays, once for all that follow.

   dt stands as (batch, seqlen, heads), and all launches walk a head's tokens: so this one also turns it. A block has a
   chunk of 64 tokens of 32 heads, a warp four of them in turn; lane l has tokens 2 l and 2 l + 1. Sums of A dt begin at
   each chunk.

   Moves 2 or 4 bytes for each token and head, and writes 8. Compile with DT. Launch with 256 threads on (chunks,
   heads / 32, batch) blocks. */
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "shape.cuh"
#include "steps.cuh"

#ifndef DT
#define DT float
#endif
constexpr int THREADS = 256, HEADS = 32;

extern "C" __global__ void __launch_bounds__(THREADS)
decays(const DT *dt, const float *a, const float *dt_bias, Line *lines, int seqlen, int heads, long long dt_batch,
       long long dt_token, long long dt_head, int softplus, float low, float high) {
    __shared__ float found[CHUNK][HEADS + 1]; // one more: lanes that read a column meet 32 banks
    const int chunk = blockIdx.x, first_head = blockIdx.y * HEADS, batch = blockIdx.z, lane = threadIdx.x % 32;
    const StepRule rule{softplus, low, high};
    let_next_kernel_start();
    for (int token = threadIdx.x / 32; token < CHUNK; token += THREADS / 32) {
        const int t = chunk * CHUNK + token, head = first_head + lane;
        if (t < seqlen && head < heads)
            found[token][lane] = as_float(dt[batch * dt_batch + t * dt_token + head * dt_head]);
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < HEADS; i += THREADS / 32) {
        const int head = first_head + i, left = seqlen - chunk * CHUNK - 2 * lane; // tokens from the lane's first on
        if (head >= heads) return;
        const float bias = dt_bias ? dt_bias[head] : 0, slope = a[head] * LOG2_E;
        const float first = left > 0 ? rule.step_of(found[2 * lane][i] + bias) : 0;
        const float second = left > 1 ? rule.step_of(found[2 * lane + 1][i] + bias) : 0;
        float sum = first * slope + second * slope; // of the lane, and then of the lanes up to it
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += before;
        }
        const float before = __shfl_up_sync(~0u, sum, 1);
        Line &line = lines[((long long)batch * heads + head) * gridDim.x + chunk];
        *(float2 *)&line.dt[2 * lane] = make_float2(first, second);
        *(float2 *)&line.log_decay[2 * lane] = make_float2((lane ? before : 0) + first * slope, sum);
    }
}
