/* The first half of the gated feed-forward block in one launch instead of four: RMSNorm, gate, up,
   silu(gate) · up.

   x (cols,), norm (cols,): the norm's weight; W_gate, W_up (rows, cols); out (rows,)
   out = silu(W_gate · n) · (W_up · n)
   where n = x · norm / √(mean of x² + eps) and silu(a) = a / (1 + exp(-a))

   New since norm_qkv: half of a group's rows come from W_gate and half, of the same numbers, from
   W_up. So a gate and its partner end up in one block, and meet before anything is written: neither
   ever exists in memory. */
#include "products.cuh"
#include "warp_dot.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
norm_glu(const T *x, const T *norm_weight, const T *W_gate, const T *W_up, T *out, int rows, int cols, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const Norm norm = {squares};
    const GluProduct glu = {W_gate, W_up, rows, cols};
    ThreadVector<S::WORDS> x_part, weight;
    weight.load(norm_weight, cols, thread);

    const CachePolicy once = evict_first();
    Stream weights(shared, glu.groups(), thread, [=](int group, Slot slot) {
        copy_rows<S::ROWS, S::WORDS>(slot, [&](int r) { return glu.row(group, r); }, cols, once, thread);
    });
    weights.fill();               // 1
    wait_for_previous_kernel();   // 2
    x_part.load(x, cols, thread); // 3
    norm.apply(x_part, weight, thread);
    const auto share = weights.share<glu.HALF>(rows);
    weights.multiply<S::ROWS>(share.groups, x_part, cols); // 4
    glu.store(weights, share, out, norm.scale(cols, eps)); // 5
}

/* A warp for a gate and its partner: where columns are no multiple of 8, or rows are not aligned to
   16 bytes. */
extern "C" __global__ void norm_glu_any(const T *x, const T *norm, const T *W_gate, const T *W_up, T *out, int rows,
                                        int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float squares, gate = warp_dot(W_gate + (long long)row * cols, x, norm, cols, lane, &squares);
    float up = warp_dot(W_up + (long long)row * cols, x, norm, cols, lane, &squares);
    const float scale = rsqrtf(squares / cols + eps);
    if (lane == 0) out[row] = (T)(silu(gate * scale) * up * scale);
}
