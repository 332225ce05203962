/* out = residual + W x, in one launch: the addition moves into the epilogue of the product.

   W (rows, cols), x (cols,), residual (rows,), out (rows,)

   On its own, the addition is a launch that reads two vectors and writes one. Here the residual
   simply is one more partial sum of its row. */
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
gemv_residual(const T *W, const T *x, const T *residual, T *out, int rows, int cols) {
    extern __shared__ uint4 shared[];
    let_the_next_kernel_start();
    auto row_at = [=](int group, int r) { return W + (long long)min(group * R + r, rows - 1) * cols; };
    Stream stream(row_at, (rows + R - 1) / R, cols, shared);
    stream.fill(); // 1

    wait_for_the_kernel_before(); // 2
    Piece<TILES> piece;
    piece.load(x, cols); // 3
    const int warps = blockDim.x / 32;
    for (int l = threadIdx.x; l < stream.owned(); l += blockDim.x) {
        int row = stream.group_of(l) * R + l % R;
        if (row < rows) stream.partial[l * PITCH + warps] = residual[row];
    }

    stream.multiply(piece); // 4
    __syncthreads();
    for (int l = threadIdx.x; l < stream.owned(); l += blockDim.x) {
        int row = stream.group_of(l) * R + l % R;
        if (row < rows) out[row] = (T)stream.sum(l, warps + 1);
    }
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void gemv_residual_any(const T *W, const T *x, const T *residual, T *out, int rows, int cols) {
    let_the_next_kernel_start();
    wait_for_the_kernel_before();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float squares, total = warp_dot(W + (long long)row * cols, x, nullptr, cols, &squares);
    if (threadIdx.x % 32 == 0) out[row] = (T)((float)residual[row] + total);
}
