/* A line of tiles in equal shares, but for a tile: one for each block. */
#pragma once

struct Shares {
    int tiles_per_block, blocks_with_one_more; // the first so many blocks

    __device__ __forceinline__ int first_tile(int block) const {
        return block * tiles_per_block + min(block, blocks_with_one_more);
    }
    __device__ __forceinline__ int block_of(unsigned tile) const {
        unsigned longer = blocks_with_one_more * (tiles_per_block + 1);
        return tile < longer ? tile / (tiles_per_block + 1)
                             : blocks_with_one_more + (tile - longer) / max(tiles_per_block, 1);
    }
};
