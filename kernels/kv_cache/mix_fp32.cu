/* Rung 4, fp32: mix_shared, for values of 32 bits, and allowed 64 registers a thread.

   out[h, d] = sum over t of att[h, t] * v[t, h / (n_heads / n_kv_heads), d]
   att (n_heads, kv_len) fp32, v (kv_len, n_kv_heads, head_dim) fp32, out (n_heads, head_dim) fp32.
   Reads 4 * kv_len * n_kv_heads * head_dim bytes of v, which is nearly all that must move.

   New since mix_shared: the second number of __launch_bounds__. It says that one block on a multiprocessor is enough,
   so that a thread may have 64 registers. The compiler unrolls the loop; the registers decide how many of the unrolled
   loads are on their way together.
   Launch: (32, 32) threads, (n_heads, ceil(head_dim / 32)) blocks. */
#ifndef BLOCKS
#define BLOCKS 1 /* that should fit on a multiprocessor; 2 leaves 32 registers a thread */
#endif
constexpr int SLICES = 32; // warps of a block

extern "C" __global__ void __launch_bounds__(32 * SLICES, BLOCKS)
mix(const float *att, const float *v, float *out, int n_heads, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[SLICES][32];
    int lane = threadIdx.x, slice = threadIdx.y, h = blockIdx.x, d = blockIdx.y * 32 + lane;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    const float *shares = att + h * kv_len, *column = v + (long long)(h / (n_heads / n_kv_heads)) * head_dim + d;
    float sum = 0;
    if (d < head_dim) // lanes without a channel come to the barrier like the others
        for (long long t = slice; t < kv_len; t += SLICES) sum += shares[t] * column[t * stride];
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || d >= head_dim) return;
    for (int s = 1; s < SLICES; s++) sum += sums[s][lane];
    out[(long long)h * head_dim + d] = sum;
}
