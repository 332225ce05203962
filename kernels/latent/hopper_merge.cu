/* The second launch behind hopper.cu, as merge.cu, for shares as hopper_plan.cuh has them:

       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   of the segments i of a sequence. A block has a head of a sequence: 128 threads for four of its columns each, TEAMS
   times; team t adds up every TEAMS-th segment. A sequence of one segment is finished already; one without tokens gets
   zeros. The order of sums is fixed. Launched as a dependent, it starts where hopper.cu leaves multiprocessors free,
   finds its segments, and waits.

   Reads 2056 bytes for each head and segment. Compile with SHAPE and PLAN, as hopper.cu, and TEAMS. Launch with
   128 * TEAMS threads on batch * n_heads blocks. out (batch, n_heads, 512). */
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "hopper_plan.cuh"
#ifndef TEAMS
#define TEAMS 1
#endif

constexpr int WORDS = LATENT / 4, DEPTH = 8; // of four columns; segments that a thread loads at once
constexpr float LOWEST = -3.4028235e38f;     // of all finite scores

/* Four columns of a head, of some segments: weighted values and the sum of weights, relative to a maximum. */
struct Merged {
    float high = LOWEST, weights = 0;
    float4 values = {};

    template <int N> __device__ __forceinline__ void add(const float2 (&pairs)[N], const float4 (&o)[N]) {
        float higher = high;
#pragma unroll
        for (int n = 0; n < N; n++) higher = fmaxf(higher, pairs[n].x);
        const float less = exp2_approx(high - higher);
        high = higher, weights *= less;
        values = make_float4(values.x * less, values.y * less, values.z * less, values.w * less);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float w = exp2_approx(pairs[n].x - higher);
            weights += w * pairs[n].y;
            values.x += w * o[n].x, values.y += w * o[n].y, values.z += w * o[n].z, values.w += w * o[n].w;
        }
    }
};

extern "C" __global__ void __launch_bounds__(128 * TEAMS)
merge(const float *partial_out, const float2 *max_and_sum, const int *kv_lens, T *out, int kv_len, int batch,
      int n_heads, int most_shares) {
    __shared__ float4 found[TEAMS][WORDS];
    __shared__ float2 pairs[TEAMS];
    let_next_kernel_start();
    const int word = threadIdx.x % WORDS, team = threadIdx.x / WORDS, lane = threadIdx.x % 32;
    const int b = blockIdx.x / n_heads, head = blockIdx.x - b * n_heads;

    // 1. which segments
    const Sequences sequences{kv_lens, kv_len, batch};
    const LineShares shares(sequences, share_count(sequences, most_shares, lane), lane);
    const SegmentsOf segments(sequences, shares, b, lane);
    const long long first = segments.first * n_heads + head;
    const float4 *values = reinterpret_cast<const float4 *>(partial_out) + first * WORDS + word;
    max_and_sum += first;
    wait_for_previous_kernel();
    if (segments.count == 1) return;

    // 2. each team's sums, relative to its own largest m
    Merged mine;
#pragma unroll 1
    for (int i = team; i < segments.count; i += DEPTH * TEAMS) {
        float2 pair[DEPTH];
        float4 o[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const long long at = (long long)(i + d * TEAMS) * n_heads;
            const bool there = i + d * TEAMS < segments.count;
            pair[d] = there ? __ldcg(max_and_sum + at) : make_float2(LOWEST, 0);
            o[d] = there ? __ldcg(values + at * WORDS) : float4{};
        }
        mine.add(pair, o);
    }
    if (TEAMS > 1) {
        found[team][word] = mine.values;
        if (word == 0) pairs[team] = make_float2(mine.high, mine.weights);
        __syncthreads();
        if (team > 0) return;
        float2 pair[TEAMS];
        float4 o[TEAMS];
#pragma unroll
        for (int t = 0; t < TEAMS; t++) pair[t] = pairs[t], o[t] = found[t][word];
        mine = Merged();
        mine.add(pair, o);
    }

    // 3. divide
    const float share = mine.weights == 0 ? 0 : 1 / mine.weights; // 0: no token, or scores of -inf alone
    const uint2 mean = make_uint2(pack(mine.values.x * share, mine.values.y * share, T()),
                                  pack(mine.values.z * share, mine.values.w * share, T()));
    reinterpret_cast<uint2 *>(out)[(long long)blockIdx.x * WORDS + word] = mean;
}
