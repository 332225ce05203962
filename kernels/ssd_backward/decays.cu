/* Launch 1 of the backward pass: dt into steps, decays and d step / d dt, once for all that follow.

   dt stands as (batch, seqlen, heads), and all launches walk a head's tokens: so this one also turns it. A block has a
   chunk of 64 tokens of 32 heads, a warp four of them in turn; lane l has tokens 2 l and 2 l + 1. Sums of A dt begin at
   each chunk.

   Moves 2 or 4 bytes for each token and head, and writes 12. Compile with DT. Launch with 256 threads on (chunks,
   heads / 32, batch) blocks. */
#include "../device/math.cuh"
#include "shape.cuh"
#include "steps.cuh"

#ifndef DT
#define DT float
#endif
constexpr int THREADS = 256, HEADS = 32;

/* Where the sequences of the lane's two tokens begin: see Begins. `first`: the chunk's first token. */
__device__ __forceinline__ int2 begins_of(const int *seq_idx, int first, int seqlen, int lane) {
    const int token = first + 2 * lane;
    const auto is_new = [&](int t) { return t > 0 && t < seqlen && seq_idx[t] != seq_idx[t - 1]; };
    const int x = is_new(token) ? 2 * lane + 1 : 0, y = is_new(token + 1) ? 2 * lane + 2 : x;
    int last = y; // of the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(~0u, last, distance);
        if (lane >= distance) last = max(last, before);
    }
    const int before = __shfl_up_sync(~0u, last, 1);
    return make_int2(max(x, lane ? before : 0), last);
}

extern "C" __global__ void __launch_bounds__(THREADS)
decays(const DT *dt, const float *a, const float *dt_bias, const int *seq_idx, Line *lines, float *slopes, int seqlen,
       int heads, long long dt_batch, long long dt_token, long long dt_head, int softplus, float low,
       float high) {
    __shared__ float found[CHUNK][HEADS + 1]; // one more: lanes that read a column meet 32 banks
    const int chunk = blockIdx.x, first_head = blockIdx.y * HEADS, batch = blockIdx.z, lane = threadIdx.x % 32;
    const StepRule rule{softplus, low, high};
    for (int token = threadIdx.x / 32; token < CHUNK; token += THREADS / 32) {
        const int t = chunk * CHUNK + token, head = first_head + lane;
        if (t < seqlen && head < heads)
            found[token][lane] = as_float(dt[batch * dt_batch + t * dt_token + head * dt_head]);
    }
    int2 begins = {0, 0};
    if (S::SEQUENCES) begins = begins_of(seq_idx + (long long)batch * seqlen, chunk * CHUNK, seqlen, lane);
    __syncthreads();
    for (int i = threadIdx.x / 32; i < HEADS; i += THREADS / 32) {
        const int head = first_head + i, left = seqlen - chunk * CHUNK - 2 * lane; // tokens from the lane's first on
        if (head >= heads) return;
        const float bias = dt_bias ? dt_bias[head] : 0, slope = a[head] * LOG2_E;
        const float first = left > 0 ? rule.step_of(found[2 * lane][i] + bias) : 0;
        const float second = left > 1 ? rule.step_of(found[2 * lane + 1][i] + bias) : 0;
        const bool x_is_new = begins.x == 2 * lane + 1, y_is_new = begins.y == 2 * lane + 2; // nothing decays into them
        const float2 own = {x_is_new ? 0 : first * slope, y_is_new ? 0 : second * slope};
        float sum = y_is_new ? 0 : own.x + own.y; // of the lane, and then of the lanes up to it
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float before = __shfl_up_sync(~0u, sum, distance);
            if (2 * (lane - distance) + 2 >= begins.y && lane >= distance) sum += before; // of the same sequence
        }
        const float before = __shfl_up_sync(~0u, sum, 1);
        Line &line = lines[((long long)batch * heads + head) * gridDim.x + chunk];
        *(float2 *)&line.dt[2 * lane] = make_float2(first, second);
        *(float2 *)&line.log_decay[2 * lane] = make_float2(own.x + (lane && !x_is_new ? before : 0), sum);
        line.set_pair(2 * lane, begins);
        *(float2 *)&slopes[(((long long)batch * heads + head) * gridDim.x + chunk) * CHUNK + 2 * lane] =
            make_float2(left > 0 ? rule.slope_at(found[2 * lane][i] + bias) : 0,
                        left > 1 ? rule.slope_at(found[2 * lane + 1][i] + bias) : 0);
    }
}
