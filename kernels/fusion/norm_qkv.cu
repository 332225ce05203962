/* Queries, keys and values of the normed x, in one launch instead of four: RMSNorm and three products.

   x (cols,), norm (cols,): the norm's weight
   W_q (q_rows, cols), W_k (k_rows, cols), W_v (v_rows, cols)
   out (q_rows + k_rows + v_rows,): W_q · n, W_k · n, W_v · n one after another,
   where n = x · norm / √(mean of x² + eps)

   The three matrices are one of q_rows + k_rows + v_rows rows that lies in three places. The root
   is one number, so it comes out of the sums: a block multiplies x with norm, adds up the squares
   of x on the way, and divides at the end. All blocks add up the same squares. That moves no byte
   more, as each block needs all of x in any case, and costs less than a launch that does it once
   for all. */
#include "products.cuh"
#include "warp_dot.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_qkv(const T *x, const T *norm_weight, const T *W_q, const T *W_k, const T *W_v, T *out, int q_rows, int k_rows,
         int v_rows, int cols, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const Norm norm = {squares};
    const QkvProduct qkv = {W_q, W_k, W_v, q_rows, k_rows, q_rows + k_rows + v_rows, cols};
    ThreadVector<S::WORDS> x_part, weight;
    weight.load(norm_weight, cols, thread);

    const CachePolicy once = evict_first();
    Stream weights(shared, qkv.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return qkv.row(group, r); }, cols, once, thread);
    });
    weights.fill();               // 1
    wait_for_previous_kernel();   // 2
    x_part.load(x, cols, thread); // 3
    norm.apply(x_part, weight, thread);
    const auto share = weights.share<S::ROWS>(qkv.rows);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    qkv.store(weights, share, out, norm.scale(cols, eps)); // 5
}

/* A warp for a row: where columns are no multiple of 8, or rows are not aligned to 16 bytes. */
extern "C" __global__ void norm_qkv_any(const T *x, const T *norm, const T *W_q, const T *W_k, const T *W_v, T *out,
                                        int q_rows, int k_rows, int v_rows, int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const QkvProduct qkv = {W_q, W_k, W_v, q_rows, k_rows, q_rows + k_rows + v_rows, cols};
    if (row >= qkv.rows) return;
    float squares, total = warp_dot(qkv.row(row), x, norm, cols, lane, &squares);
    if (lane == 0) out[row] = (T)(total * rsqrtf(squares / cols + eps));
}
