/* Rung 2 without atomics: each block stores its sums at a place of their own, and a second launch adds them up, always
   in the order of the blocks. The same bits in every run, and as many blocks as mix_split has.

   partials (splits, n_heads, head_dim) is fp32 and may hold anything before; every element is written, 0 by a block
   without tokens. The end of a launch is a barrier for the whole grid: add_partials sees all that mix_partial has
   stored.

   New since mix_split: the last line of the kernel, and add_partials. That writes and reads 2 * 4 * splits * n_heads *
   head_dim bytes more, which the L2 cache holds.
   Launch: mix_partial 128 threads, (ceil(n_heads*head_dim / 128), splits) blocks; add_partials 128 threads,
   ceil(n_heads*head_dim / 128) blocks. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;

extern "C" __global__ void mix_partial(const T *att, const T *v, float *partials, int n_heads, int n_kv_heads,
                                       long long kv_len, int head_dim) {
    long long outputs = (long long)n_heads * head_dim;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; // this thread's output
    if (i >= outputs) return;
    int h = i / head_dim, d = i % head_dim;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    long long kv_head = h / (n_heads / n_kv_heads);
    const T *shares = att + h * kv_len, *column = v + kv_head * head_dim + d;
    // multiplied before it is divided: pieces differ by one token at most, and none is left over
    long long first = kv_len * blockIdx.y / gridDim.y, last = kv_len * (blockIdx.y + 1) / gridDim.y;
    float sum = 0;
    for (long long t = first; t < last; t++) sum += (float)shares[t] * (float)column[t * stride];
    partials[blockIdx.y * outputs + i] = sum;
}

extern "C" __global__ void add_partials(const float *partials, T *out, long long outputs, int splits) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= outputs) return;
    float sum = partials[i];
    for (int y = 1; y < splits; y++) sum += partials[y * outputs + i];
    out[i] = (T)sum;
}
