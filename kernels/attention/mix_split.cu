/* Rung 2, split: one thread for each output, and the tokens are split over gridDim.y blocks, whose sums are added up by
   atomics. Neighbouring threads have neighbouring channels, so a load of v is 32 neighbouring elements.

   New since naive: lanes lie along channels and not along time, so no shuffles; and many blocks share one output.
   `sums` (n_heads, head_dim) is fp32 whatever T is, and must be 0 before the launch: each block adds to it once. That
   costs gridDim.y atomic additions for each output, the zeroing, and for 16-bit results one pass that rounds them.
   Launch: 128 threads, (ceil(n_heads*head_dim / 128), splits) blocks.

   Blocks come in any order, and float addition is not associative: the last bits change from run to run. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;

extern "C" __global__ void mix(const T *att, const T *v, float *sums, int n_heads, int n_kv_heads,
                               long long kv_len, int head_dim) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; // this thread's output
    if (i >= (long long)n_heads * head_dim) return;
    int h = i / head_dim, d = i % head_dim;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    long long kv_head = h / (n_heads / n_kv_heads);
    const T *shares = att + h * kv_len, *column = v + kv_head * head_dim + d;
    // multiplied before it is divided: pieces differ by one token at most, and none is left over
    long long first = kv_len * blockIdx.y / gridDim.y, last = kv_len * (blockIdx.y + 1) / gridDim.y;
    float sum = 0;
    for (long long t = first; t < last; t++) sum += (float)shares[t] * (float)column[t * stride];
    atomicAdd(&sums[i], sum);
}
