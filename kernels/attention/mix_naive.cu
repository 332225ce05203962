/* Rung 1, naive: out[h, d] = sum over t of att[h, t] * v[t, h / group, d], with one warp for each output.

   att (n_heads, kv_len), v (kv_len, n_kv_heads, head_dim), out (n_heads, head_dim), row-major, all of one type T; sums
   are fp32. Must move sizeof(T) * (n_heads*kv_len + kv_len*n_kv_heads*head_dim + n_heads*head_dim) bytes for
   2*n_heads*kv_len*head_dim flops: reading v is the limit.
   Launch: 256 threads, ceil(n_heads*head_dim / 8) blocks; group = n_heads / n_kv_heads.

   The lanes of a warp walk along time, as chapter 04's walk along a row. But here neighbours in time lie n_kv_heads *
   head_dim elements apart: a load of v touches 32 sectors of 32 bytes and uses 4 (fp32) or 2 (16 bit) bytes of each. */
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;

extern "C" __global__ void mix(const T *att, const T *v, T *out, int n_heads, int n_kv_heads,
                               long long kv_len, int head_dim) {
    long long i = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; // this warp's output
    if (i >= (long long)n_heads * head_dim) return;                             // the whole warp
    int h = i / head_dim, d = i % head_dim, lane = threadIdx.x % 32;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    long long kv_head = h / (n_heads / n_kv_heads);
    const T *shares = att + h * kv_len, *column = v + kv_head * head_dim + d;
    float sum = 0;
    for (long long t = lane; t < kv_len; t += 32) sum += (float)shares[t] * (float)column[t * stride];
    sum = warp_sum(sum);
    if (lane == 0) out[i] = (T)sum;
}
