/* Warps of a block that share a ring of tiles in shared memory: a team. Head tiles of a kv head that are side by side
   in a block want the same tokens, which are copied once for all of them. Teams meet at barriers of their own. */
#pragma once
#include "../device/hopper/warpgroup.cuh"
#include "../device/ring.cuh"
#include "tile_products.cuh"
#ifndef RING_STAGES
#define RING_STAGES 2
#endif

constexpr int STAGES = RING_STAGES;        // tiles in a ring
constexpr int TEAM = HEAD_TILES_PER_BLOCK < HEAD_TILES ? HEAD_TILES_PER_BLOCK : HEAD_TILES; // warps with one ring
constexpr int TEAMS = WARPS / TEAM;
constexpr int COPIES = (TILE * WORDS + 32 * TEAM - 1) / (32 * TEAM); // words of keys that a lane copies, at most
static_assert(HEAD_DIM % 16 == 0, "a token must be whole mma operands");
static_assert(HEAD_TILES % TEAM == 0 && HEAD_TILES_PER_BLOCK % TEAM == 0, "a team's warps must want the same tokens");
static_assert(TEAM == 1 || TEAMS < 16, "a team needs a barrier of its own, and there are 16");

/* Until all warps with the same ring are here. */
__device__ __forceinline__ void sync_team(int team) {
    if constexpr (TEAM == 1) __syncwarp();
    else named_barrier<32 * TEAM>(1 + team);
}
