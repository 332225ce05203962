/* One box of y by TMA, the way back: threads write words to shared memory, exchanged, and one of them stores the box.
   What of it lies outside of y is not written. The map has boxes of (64, 64), swizzled by 128 bytes. One block. */
#include "../../device/hopper/tma.cuh"
#include "../tiles.cuh"

extern "C" __global__ void store(const uint4 *from, const __grid_constant__ CUtensorMap y, int row, int column) {
    __shared__ __align__(1024) unsigned char tile[64 * ROW];
    for (int word = threadIdx.x; word < 64 * 8; word += blockDim.x)
        *reinterpret_cast<uint4 *>(tile + swizzled(word / 8, word % 8)) = from[word];
    fence_async_proxy(); // each thread of what it wrote; then all of them at the barrier
    __syncthreads();
    if (threadIdx.x == 0) {
        store_tile(y, row, column, tile);
        store_commit();
        store_wait(); // or the block's shared memory could be gone before it has been read
    }
}
