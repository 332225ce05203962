/* wgmma, alone: a warpgroup multiplies a (64 x 64) by b^T (b 64 x 64), both in shared memory, in four instructions.
   Threads put the words there themselves, exchanged, so a fence must tell wgmma of them. Launch one block of 128
   threads. */
#include "../../device/hopper/tma.cuh"
#include "../../device/hopper/wgmma.cuh"
#include "../tiles.cuh"
#ifndef DTYPE
#define DTYPE __half /* or __nv_bfloat16 */
#endif

extern "C" __global__ void product(const uint4 *a, const uint4 *b, float *to) {
    __shared__ __align__(1024) unsigned char tiles[2][64 * ROW];
    for (int word = threadIdx.x; word < 64 * 8; word += 128) {
        *reinterpret_cast<uint4 *>(tiles[0] + swizzled(word / 8, word % 8)) = a[word];
        *reinterpret_cast<uint4 *>(tiles[1] + swizzled(word / 8, word % 8)) = b[word];
    }
    fence_async_proxy();
    __syncthreads();
    const Descriptor left = k_major(shared_address(tiles[0])), right = k_major(shared_address(tiles[1]));
    float d[32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma<64>(d, advance(left, 32 * i), advance(right, 32 * i), i > 0, DTYPE());
    wgmma_commit();
    wgmma_wait<0>();
    keep(d);
#pragma unroll
    for (int j = 0; j < 8; j++) store_fragment(to, d + 4 * j, threadIdx.x / 32 * 16, 8 * j, 64, 64, threadIdx.x % 32);
}
