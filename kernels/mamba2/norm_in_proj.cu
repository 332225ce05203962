/* A Mamba-2 layer's way in, for one token, in one launch: RMSNorm, in_proj, and a step of the convolution.

   residual (cols,), norm (cols,), W (rows, cols), bias (rows,) or null, out (rows,): W · n + bias,
   n = residual · norm / √(mean of residual² + eps)
   Of out, `channels` numbers from row `inner` on go through the convolution: weight (channels, WIDTH), conv_bias
   (channels,) or null, window (WIDTH - 1, channels), the inputs before this one, oldest first, written in place. None:
   channels 0.

   New since chapter 05's norm_qkv: what follows a product channel by channel moves behind its sums, as it does for a
   residual. A thread owns a channel, its window too, so that no two blocks meet there: what all heads need of B and C
   is computed once, and the next launch finds it done.

   The window is read, and moved on, before the wait: nothing but this kernel touches it. */
#include "residual.cuh"
#include "window.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_in_proj(const Residual *residual, const T *norm_weight, const T *W, const T *bias, const float *weight,
             const float *conv_bias, T *window, T *out, int rows, int cols, int inner, int channels, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const Norm norm = {squares};
    const Window<T, WIDTH> conv = {weight, conv_bias, window, inner, channels};
    const ResidualProduct<S::ROWS> product = {W, rows, cols};
    ThreadVector<S::WORDS> x_part, by;
    by.load(norm_weight, cols, thread);

    const CachePolicy once = evict_first();
    Stream weights(shared, product.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return product.row(group, r); }, cols, once, thread);
    });
    weights.fill(); // 1
    const auto share = weights.share<S::ROWS>(rows);
    float tap = 0; // of the thread's first row; of others, later
    share.each(thread, [&](int row, int i) {
        if (!conv.has(row)) return;
        weights.partial[i * PITCH + weights.warps] = conv.before(row);
        if (i == thread) tap = conv.newest_tap(row);
    });
    wait_for_previous_kernel();                  // 2
    load_part(x_part, residual, cols, thread);   // 3
    norm.apply(x_part, by, thread);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    const float scale = norm.scale(cols, eps);
    share.each(thread, [&](int row, int i) { // 5
        const T now = (T)(weights.sum(i, weights.warps) * scale + (bias ? (float)bias[row] : 0));
        if (!conv.has(row)) out[row] = now;
        else
            out[row] = conv.after(row, weights.partial[i * PITCH + weights.warps],
                                  i == thread ? tap : conv.newest_tap(row), now);
    });
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void norm_in_proj_any(const Residual *residual, const T *norm, const T *W, const T *bias,
                                            const float *weight, const float *conv_bias, T *window, T *out, int rows,
                                            int cols, int inner, int channels, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float total = 0, squares = 0;
    for (int c = lane; c < cols; c += 32) {
        const float x = residual[c];
        squares += x * x;
        total += (float)W[(long long)row * cols + c] * x * (float)norm[c];
    }
    squares = warp_sum(squares), total = warp_sum(total);
    if (lane != 0) return;
    const T now = (T)(total * rsqrtf(squares / cols + eps) + (bias ? (float)bias[row] : 0));
    const Window<T, WIDTH> conv = {weight, conv_bias, window, inner, channels};
    out[row] = conv.has(row) ? conv.after(row, conv.before(row), conv.newest_tap(row), now) : now;
}
