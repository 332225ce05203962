/* The first half of the gated feed-forward block in one launch instead of four: RMSNorm, gate, up,
   silu(gate) · up.

   x (cols,), norm (cols,): the norm's weight; W_gate, W_up (rows, cols); out (rows,)
   out = silu(W_gate · n) · (W_up · n)
   where n = x · norm / √(mean of x² + eps) and silu(a) = a / (1 + exp(-a))

   New since norm_qkv: half of a group's rows come from W_gate and half, of the same numbers, from
   W_up. So a gate and its partner end up in one block, and meet before anything is written: neither
   ever exists in memory. */
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_glu(const T *x, const T *norm, const T *W_gate, const T *W_up, T *out, int rows, int cols, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_the_next_kernel_start();
    constexpr int HALF = R / 2;
    const int warps = blockDim.x / 32;
    auto row_at = [=](int group, int r) {
        return (r < HALF ? W_gate : W_up) + (long long)min(group * HALF + r % HALF, rows - 1) * cols;
    };
    Piece<TILES> weight, piece;
    weight.load(norm, cols);
    Stream stream(row_at, (rows + HALF - 1) / HALF, cols, shared);
    stream.fill(); // 1

    wait_for_the_kernel_before(); // 2
    piece.load(x, cols);          // 3
    float square = sum_over_warp(piece.times(weight));
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;

    stream.multiply(piece); // 4
    __syncthreads();
    const float scale = norm_scale(squares, cols, eps);
    for (int i = threadIdx.x; i < stream.owned() / 2; i += blockDim.x) {
        int l = i / HALF * R + i % HALF; // where the gate is; its partner is HALF further
        int row = stream.group_of(l) * HALF + i % HALF;
        if (row < rows) out[row] = (T)(silu(stream.sum(l, warps) * scale) * stream.sum(l + HALF, warps) * scale);
    }
}

/* A warp for a gate and its partner: where columns are no multiple of 8, or rows are not aligned to
   16 bytes. */
extern "C" __global__ void norm_glu_any(const T *x, const T *norm, const T *W_gate, const T *W_up, T *out, int rows,
                                        int cols, float eps) {
    let_the_next_kernel_start();
    wait_for_the_kernel_before();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float squares, gate = warp_dot(W_gate + (long long)row * cols, x, norm, cols, &squares);
    float up = warp_dot(W_up + (long long)row * cols, x, norm, cols, &squares);
    const float scale = rsqrtf(squares / cols + eps);
    if (threadIdx.x % 32 == 0) out[row] = (T)(silu(gate * scale) * up * scale);
}
