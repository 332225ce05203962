/* Queries, keys and values of the normed x, in one launch instead of four: RMSNorm and three
   products.

   x (cols,), norm (cols,): the norm's weight
   W_q (q_rows, cols), W_k (k_rows, cols), W_v (v_rows, cols)
   out (q_rows + k_rows + v_rows,): W_q · n, W_k · n, W_v · n one after another,
   where n = x · norm / √(mean of x² + eps)

   The three matrices are one of q_rows + k_rows + v_rows rows that lies in three places. The root
   is one number, so it comes out of the sums: a block multiplies x with norm, adds up the squares
   of x on the way, and divides at the end. All blocks add up the same squares. That moves no byte
   more, as each block needs all of x in any case, and costs less than a launch that does it once
   for all. */
#include "stream.cuh"

/* Where row `row` of the three matrices lies. */
__device__ __forceinline__ const T *find(int row, const T *W_q, const T *W_k, const T *W_v, int q_rows, int k_rows,
                                         int cols) {
    const T *W = W_q;
    if (row >= q_rows + k_rows) W = W_v, row -= q_rows + k_rows;
    else if (row >= q_rows) W = W_k, row -= q_rows;
    return W + (long long)row * cols;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_qkv(const T *x, const T *norm, const T *W_q, const T *W_k, const T *W_v, T *out, int q_rows, int k_rows,
         int v_rows, int cols, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_the_next_kernel_start();
    const int rows = q_rows + k_rows + v_rows, warps = blockDim.x / 32;
    auto row_at = [=](int group, int r) {
        return find(min(group * R + r, rows - 1), W_q, W_k, W_v, q_rows, k_rows, cols);
    };
    Piece<TILES> weight, piece;
    weight.load(norm, cols);
    Stream stream(row_at, (rows + R - 1) / R, cols, shared);
    stream.fill(); // 1

    wait_for_the_kernel_before(); // 2
    piece.load(x, cols);          // 3
    float square = sum_over_warp(piece.times(weight));
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;

    stream.multiply(piece); // 4
    __syncthreads();
    const float scale = norm_scale(squares, cols, eps);
    for (int l = threadIdx.x; l < stream.owned(); l += blockDim.x) {
        int row = stream.group_of(l) * R + l % R;
        if (row < rows) out[row] = (T)(stream.sum(l, warps) * scale);
    }
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void norm_qkv_any(const T *x, const T *norm, const T *W_q, const T *W_k, const T *W_v, T *out,
                                        int q_rows, int k_rows, int v_rows, int cols, float eps) {
    let_the_next_kernel_start();
    wait_for_the_kernel_before();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= q_rows + k_rows + v_rows) return;
    float squares, total = warp_dot(find(row, W_q, W_k, W_v, q_rows, k_rows, cols), x, norm, cols, &squares);
    if (threadIdx.x % 32 == 0) out[row] = (T)(total * rsqrtf(squares / cols + eps));
}
