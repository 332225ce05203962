/* One box by TMA: 64 x 64 numbers of 16 bits, whose words TMA exchanges on the way. Each thread waits for the bytes,
   and copies words to where they stood in the matrix. The map has boxes of (64, 64), swizzled by 128 bytes. One
   block. */
#include "../../device/hopper/tma.cuh"
#include "../tiles.cuh"

extern "C" __global__ void box(const __grid_constant__ CUtensorMap matrix, uint4 *to, int row, int column) {
    __shared__ __align__(1024) unsigned char tile[64 * ROW];
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        full.init(1);
        Barrier::init_done();
        full.expect(sizeof(tile)); // all of the box, what lies outside of the matrix too
        load_tile(tile, matrix, row, column, full);
    }
    __syncthreads(); // the barrier is initialised
    full.wait(0);
    for (int word = threadIdx.x; word < 64 * 8; word += blockDim.x)
        to[word] = *reinterpret_cast<const uint4 *>(tile + swizzled(word / 8, word % 8));
}
