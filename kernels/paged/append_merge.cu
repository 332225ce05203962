/* Merges what append.cu has left of units that were cut. Launched as a dependent, it starts while the kernel ahead still
   runs, and waits. Reads 4 * (HEAD_DIM + 2) bytes for each row and part.

   Compile with SHAPE. Launch (blocks of append.cu, PIECES) of HEAD_DIM threads; arguments as there. */
#include "../device/math.cuh"
#include "../device/half2.cuh"
#include "../device/pdl.cuh"
#include "append_shape.cuh"

constexpr int PIECES = 8, MERGE_THREADS = HEAD_DIM, COLUMN_THREADS = HEAD_DIM / 4, DEPTH = 4;
constexpr int PIECE_ROWS = ROWS / PIECES, ROWS_AT_A_TIME = MERGE_THREADS / COLUMN_THREADS;

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge(const float *scratch, const float2 *scratch_sums, const Cut *cuts, T *out, float *partial_out,
      float2 *max_and_sum, int n_heads, int team) {
    wait_for_previous_kernel();
    const Cut cut = cuts[blockIdx.x];
    const int column = threadIdx.x % COLUMN_THREADS * 4;
    for (int row = blockIdx.y * PIECE_ROWS + threadIdx.x / COLUMN_THREADS; row < (blockIdx.y + 1) * PIECE_ROWS;
         row += ROWS_AT_A_TIME) {
        const int pair = cut.row + row;
        if (pair >= cut.pairs) return;
        float high = -3.4028235e38f, total = 0;
        float4 sum = {};
        for (int part = 0; part < cut.parts; part += DEPTH) {
            float2 found[DEPTH];
            float4 values[DEPTH];
            const float before = high;
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const bool there = part + d < cut.parts;
                // the first block's own place, then the first of each team-th block behind it
                const int place = part + d ? 2 * ((int)blockIdx.x + (part + d) * team) : cut.scratch;
                const long long at = (long long)place * ROWS + row;
                found[d] = there ? __ldcg(scratch_sums + at) : make_float2(high, 0);
                values[d] = there ? __ldcg(reinterpret_cast<const float4 *>(scratch + at * HEAD_DIM + column)) : float4{};
                high = fmaxf(high, found[d].x);
            }
            const float scale = exp2_approx(before - high);
            total *= scale;
            sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const float w = exp2_approx(found[d].x - high);
                total += w * found[d].y;
                sum.x += w * values[d].x, sum.y += w * values[d].y, sum.z += w * values[d].z, sum.w += w * values[d].w;
            }
        }
        const long long to = (long long)(cut.query + pair / GROUP) * n_heads + cut.kv_head * GROUP + pair % GROUP;
        if (S::USE == APPEND) {
            const float share = cut.seen + pair / GROUP > 0 ? 1 / total : 0;
            *reinterpret_cast<uint2 *>(out + to * HEAD_DIM + column) =
                make_uint2(pack(sum.x * share, sum.y * share, T()), pack(sum.z * share, sum.w * share, T()));
        } else {
            *reinterpret_cast<float4 *>(partial_out + to * HEAD_DIM + column) = sum;
            if (column == 0) max_and_sum[to] = make_float2(high, total);
        }
    }
}
