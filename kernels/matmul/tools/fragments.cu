/* ldmatrix, alone: a warp reads a tile of 64 x 64 numbers as fragments of 16 x 16, with its words exchanged or in plain
   order. Eight rows of a matrix lie 128 bytes apart: in plain order in the same four banks, so that a read takes eight
   times as long. Compile with EXCHANGED (0, 1). Launch one warp. to has [fragment][lane][4] registers. */
#include "../../device/mma.cuh"
#include "../../device/copy.cuh"
#include "../tiles.cuh"
#ifndef EXCHANGED
#define EXCHANGED 1
#endif

__device__ __forceinline__ int place(int row, int word) {
    return EXCHANGED ? swizzled(row, word) : row * ROW + word * 16;
}

extern "C" __global__ void fragments(const uint4 *from, uint4 *to) {
    __shared__ __align__(1024) unsigned char tile[64 * ROW];
    const int lane = threadIdx.x;
    for (int word = lane; word < 64 * 8; word += 32)
        *reinterpret_cast<uint4 *>(tile + place(word / 8, word % 8)) = from[word];
    __syncwarp();
    for (int i = 0; i < 16; i++) { // of 4 x 4
        unsigned r[4];
        ldmatrix_x4(r, shared_address(tile + place(i / 4 * 16 + lane % 16, i % 4 * 2 + lane / 16)));
        to[32 * i + lane] = {r[0], r[1], r[2], r[3]};
    }
}
