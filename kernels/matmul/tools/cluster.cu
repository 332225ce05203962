/* A cluster of two, alone: each block asks for half of a box, for both, and each has all of it. The map has boxes of
   (32, 64), swizzled by 128 bytes. Launch two blocks in a cluster of two; to has a box for each. */
#include "../../device/hopper/cluster.cuh"
#include "../tiles.cuh"

extern "C" __global__ void cluster(const __grid_constant__ CUtensorMap matrix, uint4 *to) {
    __shared__ __align__(1024) unsigned char tile[64 * ROW];
    __shared__ Barrier full;
    const unsigned rank = cluster_rank();
    if (threadIdx.x == 0) {
        full.init(1);
        Barrier::init_done();
        full.expect(sizeof(tile)); // both halves
    }
    cluster_barrier(); // the other's barrier is initialised, too
    if (threadIdx.x == 0) load_tile_multicast(tile + rank * 32 * ROW, matrix, rank * 32, 0, full, 3);
    full.wait(0); // so the block does not end before all has come that others bring
    for (int word = threadIdx.x; word < 64 * 8; word += blockDim.x)
        to[rank * 64 * 8 + word] = *reinterpret_cast<const uint4 *>(tile + swizzled(word / 8, word % 8));
}
