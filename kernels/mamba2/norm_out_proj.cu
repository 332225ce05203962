/* A Mamba-2 layer's way out, for one token, in one launch: RMSNorm, out_proj, and the residual stream.

   x (cols,): y · silu(z), norm (cols,), or null for none, W (rows, cols), bias (rows,) or null, residual
   (rows,): residual += W · n + bias, where n = x · norm / √(mean of x² + eps)

   New since chapter 05's gemv_residual: the norm, whose root is taken last, so that its sum of squares is needed only
   when the rows are summed; and a residual stream in float, which is written in place. */
#include "residual.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_out_proj(const T *x, const T *norm_weight, const T *W, const T *bias, Residual *residual, /* in
              place */ int rows, int cols, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const Norm norm = {squares};
    const ResidualProduct<S::ROWS> product = {W, rows, cols};
    ThreadVector<S::WORDS> x_part, by;
    if (NORM) by.load(norm_weight, cols, thread);

    const CachePolicy once = evict_first();
    Stream weights(shared, product.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return product.row(group, r); }, cols, once, thread);
    });
    weights.fill();               // 1
    wait_for_previous_kernel();   // 2
    x_part.load(x, cols, thread); // 3
    const auto share = weights.share<S::ROWS>(rows);
    share.each(thread, [&](int row, int i) { /* one more of a row's partial
        sums */ weights.partial[i * PITCH + weights.warps] = (float)residual[row] + (bias ? (float)bias[row] : 0); });
    if (NORM) norm.apply(x_part, by, thread);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    const float scale = NORM ? norm.scale(cols, eps) : 1;
    share.each(thread, [&](int row, int i) { // 5
        const float before = weights.partial[i * PITCH + weights.warps];
        residual[row] = (Residual)(before + scale * weights.sum(i, weights.warps));
    });
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void norm_out_proj_any(const T *x, const T *norm, const T *W, const T *bias,
                                             Residual *residual, int rows, int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float total = 0, squares = 0;
    for (int c = lane; c < cols; c += 32) {
        const float a = x[c];
        squares += a * a;
        total += (float)W[(long long)row * cols + c] * (NORM ? a * (float)norm[c] : a);
    }
    squares = warp_sum(squares), total = warp_sum(total);
    if (lane != 0) return;
    const float before = (float)residual[row] + (bias ? (float)bias[row] : 0);
    residual[row] = (Residual)(before + total * (NORM ? rsqrtf(squares / cols + eps) : 1));
}
