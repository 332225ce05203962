/* Merges what append.cu has left. A part i has weighted values o[i], relative to a maximum m[i], and a sum l[i] of
   weights:

       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   APPEND: the parts of tiles that were cut. SHARED: of each query, all parts of all runs of tokens that it looks at; so
   parts of prefixes and of what comes behind them are one sum. Who saw no token gets zeros.

   The order of sums is fixed. Launched as a dependent, it starts while the kernel ahead still runs, and waits. Reads
   4 * (HEAD_DIM + 2) bytes for each row and part.

   Compile with SHAPE. Launch MERGE_THREADS on APPEND: (blocks of append.cu, PIECES); SHARED: as many blocks as
   n_queries * n_heads take, ROWS_OF_BLOCK each. parts, part_sums, found, lasts: as there. levels (n_queries,
   n_levels): rows of the list; -1: none. */
#include "../device/math.cuh"
#include "../device/half2.cuh"
#include "../device/pdl.cuh"
#include "append_shape.cuh"

constexpr int MERGE_THREADS = 256, ROW_THREADS = HEAD_DIM / 4, ROWS_OF_BLOCK = MERGE_THREADS / ROW_THREADS;
constexpr int PIECES = ROWS / ROWS_OF_BLOCK;
constexpr int DEPTH = 8; // parts that a thread asks for at once

/* Four channels of a row, summed over its parts. */
struct Merged {
    float high = -3.4028235e38f, total = 0;
    float4 sum = {};

    /* Of so many parts, which are these rows of `parts`. */
    __device__ __forceinline__ void add(const float *parts, const float2 *part_sums, int count, long long first,
                                        long long second, long long stride) {
#pragma unroll 1
        for (int part = 0; part < count; part += DEPTH) {
            float2 found[DEPTH];
            float4 values[DEPTH];
            const float before = high;
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const bool there = part + d < count;
                const long long at = part + d == 0 ? first : second + (part + d - 1) * stride;
                found[d] = there ? __ldcg(part_sums + at) : make_float2(before, 0);
                values[d] = there ? __ldcg(reinterpret_cast<const float4 *>(parts + at * HEAD_DIM)) : float4{};
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) high = fmaxf(high, found[d].x);
            const float scale = exp2_approx(before - high);
            total *= scale;
            sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const float w = exp2_approx(found[d].x - high);
                total += w * found[d].y;
                sum.x += w * values[d].x, sum.y += w * values[d].y;
                sum.z += w * values[d].z, sum.w += w * values[d].w;
            }
        }
    }
    __device__ __forceinline__ void store(T *to) const {
        const float share = total == 0 ? 0 : 1 / total; // 0: it saw no token
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(pack(sum.x * share, sum.y * share, T()), pack(sum.z * share, sum.w * share, T()));
    }
};

extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge(const float *parts, const float2 *part_sums, const int4 *found, const Segment *lasts, const int *levels, T *out,
      int n_queries, int n_heads, int n_levels) {
    const int of_block = threadIdx.x / ROW_THREADS, column = threadIdx.x % ROW_THREADS * 4;
    let_next_kernel_start();
    Merged merged;
    if constexpr (S::USE == APPEND) {
        const int row = blockIdx.y * ROWS_OF_BLOCK + of_block;
        wait_for_previous_kernel();
        const Segment cut = lasts[blockIdx.x];
        const int pair = cut.row + row;
        if (cut.place < 0 || cut.parts == 0 || pair >= cut.pairs) return;
        const long long next = (long long)cut.next_place * ROWS + row;
        merged.add(parts + column, part_sums, cut.parts, (long long)cut.place * ROWS + row, next, cut.stride * ROWS);
        const long long query = cut.query + pair / GROUP, head = cut.kv_head * GROUP + pair % GROUP;
        merged.store(out + (query * n_heads + head) * HEAD_DIM + column);
    } else {
        const int row = blockIdx.x * ROWS_OF_BLOCK + of_block, query = row / n_heads, head = row - query * n_heads;
        const bool there = query < n_queries;
        wait_for_previous_kernel();
        if (!there) return;
        for (int level = 0; level < n_levels; level++) {
            const int listed = __ldg(levels + query * n_levels + level);
            if (listed < 0) continue;
            const int4 f = __ldcg(found + (long long)listed * n_heads + head);
            merged.add(parts + column, part_sums, f.x, f.y, f.z, f.w);
        }
        merged.store(out + (long long)row * HEAD_DIM + column);
    }
}
