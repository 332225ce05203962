/* norm_in_proj.cu on another ring, which TMA fills (rows_ring.cuh): the same arguments and results.

   The window is read, and moved on, before the wait, as there. */
#include "rows_ring.cuh"
#include "window.cuh"

using Residual = RESIDUAL;

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
in_proj_ring(const Residual *residual, const T *norm_weight, const T *W, const T *bias, const float *weight,
             const float *conv_bias, T *window, T *out, int rows, int inner, int channels, float eps, const T *ahead,
             int ahead_rows, int ahead_row_bytes, int ahead_pieces) {
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
    norm.load(norm_weight, mine.thread);
    const Window<T, WIDTH> conv = {weight, conv_bias, window, inner, channels};
    float before = 0, tap = 0; // of the thread's first row; of others, later
    if (thread < mine.count && conv.has(mine.first + thread))
        before = conv.before(mine.first + thread), tap = conv.newest_tap(mine.first + thread);
    mine.keep_first();
    wait_for_previous_kernel();

    Part x;
    x.load(residual, mine.thread);
    const float squared = norm.apply(x);
    mine.multiply(x);
    norm.lay_down(squared, thread);
    named_barrier<MULTIPLIERS>(1);
    const float scale = norm.scale(eps);
    for (int i = thread; i < mine.count; i += MULTIPLIERS) {
        const int row = mine.first + i;
        const T now = (T)(mine.sum(i) * scale + (bias ? (float)bias[row] : 0));
        if (!conv.has(row)) {
            out[row] = now;
            continue;
        }
        if (i != thread) before = conv.before(row), tap = conv.newest_tap(row);
        out[row] = conv.after(row, before, tap, now);
    }
}
