/* The second launch behind hopper.cu, as merge.cu, for shares as hopper_plan.cuh has them:

       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   of the segments i of a sequence. A block has a head of a sequence: 128 threads for four of its columns each, TEAMS
   times; team t adds up every TEAMS-th segment. A sequence of one segment is finished already; one without tokens gets
   zeros. The order of sums is fixed. Launched as a dependent, it starts where hopper.cu leaves multiprocessors free,
   finds its segments, and waits.

   Reads 2056 bytes for each head and segment. Compile with SHAPE and PLAN, as hopper.cu, and TEAMS. Launch with
   128 * TEAMS threads on batch * n_heads blocks. out (batch, n_heads, 512). */
#include "../device/pdl.cuh"
#include "hopper_plan.cuh"
#include "merged.cuh"
#ifndef TEAMS
#define TEAMS 1
#endif

extern "C" __global__ void __launch_bounds__(128 * TEAMS)
merge(const float *partial_out, const float2 *max_and_sum, const int *kv_lens, T *out, int kv_len, int batch,
      int n_heads, int most_shares) {
    __shared__ float4 found[TEAMS][COLUMNS];
    __shared__ float2 pairs[TEAMS];
    let_next_kernel_start();
    const int column = threadIdx.x % COLUMNS, team = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;
    const int b = blockIdx.x / n_heads, head = blockIdx.x - b * n_heads;

    // 1. which segments
    const Sequences sequences{kv_lens, kv_len, batch};
    const LineShares shares(sequences, share_count(sequences, most_shares, lane), lane);
    const SegmentsOf segments(sequences, shares, b, lane);
    const long long row = segments.first * n_heads + head;
    wait_for_previous_kernel();
    if (segments.count == 1) return;

    // 2. each team's sums, relative to its own largest m
    Merged merged;
    merged.add_segments(reinterpret_cast<const float4 *>(partial_out) + row * COLUMNS + column, max_and_sum + row,
                        team, segments.count, TEAMS, n_heads);
    if (TEAMS > 1) {
        found[team][column] = merged.values;
        if (column == 0) pairs[team] = make_float2(merged.high, merged.weights);
        __syncthreads();
        if (team > 0) return;
        float2 pair[TEAMS];
        float4 o[TEAMS];
#pragma unroll
        for (int t = 0; t < TEAMS; t++) pair[t] = pairs[t], o[t] = found[t][column];
        merged = Merged();
        merged.add(pair, o);
    }

    // 3. divide
    reinterpret_cast<uint2 *>(out)[(long long)blockIdx.x * COLUMNS + column] = merged.mean();
}
