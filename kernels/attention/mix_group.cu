/* Each value once: a block has 32 channels of a KV head, and works on all GROUP heads that share it. A thread loads a
   value and uses it for GROUP sums in registers; the sums meet in shared memory, and a warp adds up those of a head.

   New since mix_shared: the block's heads, and 8 warps instead of 32. v is loaded once and not GROUP times. But there
   are GROUP times fewer blocks: on Mistral-7B's shapes 32 of them, for an H200's 132 multiprocessors. So the tokens may
   be split over gridDim.z blocks as well: then OUT is float, out is (gridDim.z, n_heads, head_dim), and
   mix_ordered.cu's add_partials adds up.
   Launch: (32, WARPS) threads, (n_kv_heads, ceil(head_dim / 32), splits) blocks. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
#ifndef OUT
#define OUT DTYPE /* float if add_partials follows */
#endif
#ifndef GROUP
#define GROUP 4 /* heads of a KV head */
#endif
using T = DTYPE;
constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
mix(const T *att, const T *v, OUT *out, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[WARPS][GROUP][32];
    int lane = threadIdx.x, warp = threadIdx.y, kv_head = blockIdx.x, d = blockIdx.y * 32 + lane;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    const T *shares = att + (long long)kv_head * GROUP * kv_len, *column = v + (long long)kv_head * head_dim + d;
    long long first = kv_len * blockIdx.z / gridDim.z, last = kv_len * (blockIdx.z + 1) / gridDim.z;
    float sum[GROUP] = {};
    if (d < head_dim) // lanes without a channel come to the barrier like the others
        for (long long t = first + warp; t < last; t += WARPS) {
            float value = (float)column[t * stride]; // once, for all heads of the group
#pragma unroll
            for (int j = 0; j < GROUP; j++) sum[j] += (float)shares[j * kv_len + t] * value;
        }
#pragma unroll
    for (int j = 0; j < GROUP; j++) sums[warp][j][lane] = sum[j]; // a row of 32 floats: one wavefront
    __syncthreads();
    if (d >= head_dim) return;
    out += (long long)blockIdx.z * n_kv_heads * GROUP * head_dim;
    for (int j = warp; j < GROUP; j += WARPS) {
        float total = sums[0][j][lane];
        for (int w = 1; w < WARPS; w++) total += sums[w][j][lane];
        out[((long long)kv_head * GROUP + j) * head_dim + d] = (OUT)total;
    }
}
