/* norm_out_proj.cu on another ring, which TMA fills (rows_ring.cuh): the same arguments and results. */
#include "rows_ring.cuh"

using Residual = RESIDUAL;

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
out_proj_ring(const T *x, const T *norm_weight, const T *W, const T *bias, Residual *residual, int rows, float eps,
              const T *ahead, int ahead_rows, int ahead_row_bytes, int ahead_pieces) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Ring<S::STAGES> ring;
    __shared__ float squares[S::WARPS];
    __shared__ int has_x;
    let_next_kernel_start();
    const int thread = threadIdx.x;
    init(ring, has_x, thread);
    Rows mine(shared, ring, &has_x, W, rows);
    if (thread >= MULTIPLIERS) return mine.fill_by_warp({ahead, ahead_rows, ahead_row_bytes, ahead_pieces});
    Norm norm = {squares};
    if (NORM) norm.load(norm_weight, mine.thread);
    mine.keep_first();
    wait_for_previous_kernel();

    auto residual_of = [&](int row) { return (float)residual[row] + (bias ? (float)bias[row] : 0); };
    Part part;
    part.load(x, mine.thread);
    float before = thread < mine.count ? residual_of(mine.first + thread) : 0; // so that nothing waits for it behind
    const float squared = NORM ? norm.apply(part) : 0;
    mine.multiply(part);
    if (NORM) norm.lay_down(squared, thread);
    named_barrier<MULTIPLIERS>(1);
    const float scale = NORM ? norm.scale(eps) : 1;
    for (int i = thread; i < mine.count; i += MULTIPLIERS) {
        const int row = mine.first + i;
        if (i != thread) before = residual_of(row);
        residual[row] = (Residual)(before + scale * mine.sum(i));
    }
}
