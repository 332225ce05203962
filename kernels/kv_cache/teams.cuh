/* What the warps of a team have in common: shared memory, and where they meet. */
#pragma once
#include "../device/hopper/warpgroup.cuh"
#include "column_sums.cuh"
#include "queries.cuh"

/* Shared memory of a block, as a warp of a team sees it: [WARPS][STAGES][SLOT] words of 16 bytes; if a team has several
   warps, [WARPS][HEADS][PITCH] floats and [WARPS][HEADS] pairs of them; [TEAMS][HEADS][PITCH] float16; [TEAMS][HEADS]
   ints. */
struct Shared {
    uint4 *ring;           // of the warp
    float *values;         // of the team, and all that follows
    float2 *max_and_sum;
    SharedQueries queries;

    __device__ __forceinline__ Shared(uint4 *memory, int warp, int team) : ring(memory + warp * STAGES * SLOT) {
        constexpr int JOINED = TEAM > 1 || WHOLE ? WARPS * HEADS : 0, EACH = JOINED / TEAMS;
        float *all_values = reinterpret_cast<float *>(memory + WARPS * STAGES * SLOT);
        float2 *all_pairs = reinterpret_cast<float2 *>(all_values + JOINED * PITCH);
        __half *all_queries = reinterpret_cast<__half *>(all_pairs + JOINED);
        int *all_exponents = reinterpret_cast<int *>(all_queries + TEAMS * HEADS * PITCH);
        values = all_values + team * EACH * PITCH, max_and_sum = all_pairs + team * EACH;
        queries = {all_queries + team * HEADS * PITCH, all_exponents + team * HEADS};
    }
};
/* The warps of a team meet. */
__device__ __forceinline__ void meet(int team) {
    if constexpr (TEAM == 1) __syncwarp();
    else if constexpr (TEAMS == 1) __syncthreads();
    else named_barrier<32 * TEAM>(1 + team);
}
