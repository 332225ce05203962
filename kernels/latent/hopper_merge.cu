/* The second launch behind hopper.cu, as merge.cu, for shares as hopper_plan.cuh has them:

       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   of the segments i of a sequence. A block has one head of a sequence after another: 128 threads for four of its columns
   each, TEAMS times; team t adds up every TEAMS-th segment. A sequence of one segment is finished already; one without
   tokens gets zeros. The order of sums is fixed. Launched as a dependent, it starts where hopper.cu leaves
   multiprocessors free, finds what there is to merge, and waits.

   Reads 2056 bytes for each head and segment. Compile with SHAPE and PLAN, as hopper.cu, and TEAMS. Launch with
   128 * TEAMS threads on at most batch * n_heads blocks. out (batch, n_heads, 512). */
#include "../device/pdl.cuh"
#include "hopper_plan.cuh"
#include "merged.cuh"
#ifndef TEAMS
#define TEAMS 1
#endif

/* The heads that a block has, of all sequences: those that are not finished. */
struct Unfinished {
    const Sequences &sequences;
    const LineShares &shares;
    int n_heads, lane, b, head;
    SegmentsOf segments;

    __device__ __forceinline__ Unfinished(const Sequences &sequences, const LineShares &shares, int n_heads, int lane)
        : sequences(sequences), shares(shares), n_heads(n_heads), lane(lane), b(blockIdx.x / n_heads),
          head(blockIdx.x - b * n_heads), segments(sequences, shares, b, lane) {
        while (exists() && segments.count == 1) step();
    }
    __device__ __forceinline__ bool exists() const { return b < sequences.batch; }
    __device__ __forceinline__ void next() {
        do step();
        while (exists() && segments.count == 1);
    }

  private:
    __device__ __forceinline__ void step() {
        head += gridDim.x;
        if (head < n_heads) return;
        b += head / n_heads, head %= n_heads;
        if (exists()) segments = SegmentsOf(sequences, shares, b, lane);
    }
};

extern "C" __global__ void __launch_bounds__(128 * TEAMS)
merge(const float *partial_out, const float2 *max_and_sum, const int *kv_lens, T *out, int kv_len, int batch,
      int n_heads, int most_shares) {
    __shared__ float4 found[TEAMS][COLUMNS];
    __shared__ float2 pairs[TEAMS];
    let_next_kernel_start();
    const int column = threadIdx.x % COLUMNS, team = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;

    // 1. which segments
    const Sequences sequences{kv_lens, kv_len, batch};
    const LineShares shares(sequences, share_count(sequences, most_shares, lane), lane);
    Unfinished here(sequences, shares, n_heads, lane);
    wait_for_previous_kernel();
#pragma unroll 1
    for (; here.exists(); here.next()) {
        // 2. each team's sums, relative to its own largest m
        const long long row = here.segments.first * n_heads + here.head;
        Merged merged;
        merged.add_segments(reinterpret_cast<const float4 *>(partial_out) + row * COLUMNS + column, max_and_sum + row,
                            team, here.segments.count, TEAMS, n_heads);
        if (TEAMS > 1) {
            found[team][column] = merged.values;
            if (column == 0) pairs[team] = make_float2(merged.high, merged.weights);
            __syncthreads();
            float2 pair[TEAMS];
            float4 o[TEAMS];
#pragma unroll
            for (int t = 0; t < TEAMS; t++) pair[t] = pairs[t], o[t] = found[t][column];
            merged = Merged();
            merged.add(pair, o);
            __syncthreads(); // before the next row is laid down
        }

        // 3. divide
        if (team == 0)
            reinterpret_cast<uint2 *>(out)[((long long)here.b * n_heads + here.head) * COLUMNS + column] = merged.mean();
    }
}
