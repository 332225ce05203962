/* The second launch of latent attention: the segments of a sequence become its result.

   A segment i leaves three things of each head (line.cuh), relative to a reference m[i] near its largest score:
       o[i] = sum of 2**(score - m[i]) * value, not divided;  l[i] = sum of 2**(score - m[i])
   Then, with the largest m of all,
       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]

   A block has a head of a sequence: 128 threads for four of its dimensions each, TEAMS times; team t adds up every
   TEAMS-th segment. A sequence of one segment is finished already; one without tokens gets zeros. The order of sums is
   fixed. Launched as a dependent, it starts while the kernel ahead still runs, and waits.

   Reads 2056 bytes for each head and segment. Compile with SHAPE, as the first launch, and TEAMS. Launch with
   128 * TEAMS threads on batch * n_heads blocks. out (batch, n_heads, 512). */
#include "../device/half2.cuh"
#include "../device/pdl.cuh"
#include "line.cuh"
#include "merged.cuh"
#ifndef TEAMS
#define TEAMS 1
#endif


extern "C" __global__ void __launch_bounds__(128 * TEAMS)
merge(const float *partial_out, const float2 *max_and_sum, const int *kv_lens, T *out, int kv_len, int batch,
      int n_heads, int n_shares) {
    __shared__ float4 found[TEAMS][COLUMNS];
    __shared__ float2 pairs[TEAMS];
    let_next_kernel_start();
    const int column = threadIdx.x % COLUMNS, team = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;
    const int b = blockIdx.x / n_heads, head = blockIdx.x - b * n_heads;

    // 1. which segments
    const Sequences sequences{kv_lens, kv_len, batch};
    const LineShares shares(sequences, n_shares, lane);
    const SegmentsOf segments(sequences, shares, b, lane);
    const long long first = segments.first * n_heads + head;
    const float4 *values = reinterpret_cast<const float4 *>(partial_out) + first * COLUMNS + column;
    max_and_sum += first;
    wait_for_previous_kernel();
    if (segments.count == 1) return;

    // 2. each team's sums, relative to its own largest m
    Merged mine;
    mine.add_segments(values, max_and_sum, team, segments.count, TEAMS, n_heads);
    if (TEAMS > 1) {
        found[team][column] = mine.values;
        if (column == 0) pairs[team] = make_float2(mine.high, mine.weights);
        __syncthreads();
        if (team > 0) return;
        float2 pair[TEAMS];
        float4 o[TEAMS];
#pragma unroll
        for (int t = 0; t < TEAMS; t++) pair[t] = pairs[t], o[t] = found[t][column];
        mine = Merged();
        mine.add(pair, o);
    }

    // 3. divide
    reinterpret_cast<uint2 *>(out)[(long long)blockIdx.x * COLUMNS + column] = mine.mean();
}
