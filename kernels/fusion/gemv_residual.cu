/* out = residual + W x, in one launch: the addition moves into the epilogue of the product.

   W (rows, cols), x (cols,), residual (rows,), out (rows,)

   On its own, the addition is a launch that reads two vectors and writes one. Here the residual
   simply is one more partial sum of its row. */
#include "products.cuh"
#include "warp_dot.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
gemv_residual(const T *W, const T *x, const T *residual, T *out, int rows, int cols) {
    extern __shared__ uint4 shared[];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const ResidualProduct<S::ROWS> product = {W, rows, cols};
    const CachePolicy once = evict_first();
    Stream weights(shared, product.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return product.row(group, r); }, cols, once, thread);
    });
    weights.fill();             // 1
    wait_for_previous_kernel(); // 2
    ThreadVector<S::WORDS> x_part;
    x_part.load(x, cols, thread); // 3
    const auto share = weights.share<S::ROWS>(rows);
    product.load(weights, share, residual);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    product.store(weights, share, out);                    // 5
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void gemv_residual_any(const T *W, const T *x, const T *residual, T *out, int rows, int cols) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float squares, total = warp_dot<T>(W + (long long)row * cols, x, nullptr, cols, lane, &squares);
    if (lane == 0) out[row] = (T)((float)residual[row] + total);
}
