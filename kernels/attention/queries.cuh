/* A head tile's queries on their way into an mma, in three steps: loaded, in words of 16 bytes, by whoever knows where
   they lie; laid down in shared memory, (HEADS, PITCH); and taken up as the mma with the keys wants them. The last head
   also stands for those that the head tile lacks. */
#pragma once
#include "../device/copy.cuh"
#include "../device/mma.cuh"
#include "tile_products.cuh"

struct LaidQueries {
    static constexpr int LOADS = (HEADS * WORDS + 31) / 32;
    uint4 loaded[LOADS];
    QueryOperands operand;

    /* The lanes of a warp meet in here. */
    __device__ __forceinline__ void take(T *shared, const HeadTile &tile, int lane) {
        const int first = tile.first_head();
        __syncwarp(); // who still reads the last ones?
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int word = 32 * i + lane, head = word / WORDS;
            if (head < HEADS && first + head < GROUP)
                *reinterpret_cast<uint4 *>(shared + head * PITCH + word % WORDS * 8) = loaded[i];
        }
        __syncwarp();
        const int head = min(lane % 16, min(HEADS, GROUP - first) - 1);
#pragma unroll
        for (int d = 0; d < STEPS; d++)
            ldmatrix_x4(operand[d], shared_address(shared + head * PITCH + 16 * d + lane / 16 * 8));
    }
};
