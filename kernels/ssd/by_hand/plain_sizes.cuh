/* The sizes of a launch of chapter 15's first three rungs: whole pairs, no limits of dt, and all that has decayed
   counts. */
#pragma once
#include "../shape.cuh"

__device__ __forceinline__ Sizes plain_sizes(int seqlen, int heads, int groups, long long dt_batch, long long dt_token,
                                             long long dt_head) {
    Sizes sizes{};
    sizes.seqlen = seqlen, sizes.heads = heads, sizes.groups = groups;
    sizes.chunks = (seqlen + CHUNK - 1) / CHUNK;
    sizes.rows = heads / groups * S::HEAD_PARTS, sizes.pairs_of_group = (sizes.rows + 1) / 2;
    sizes.dt_high = 1e30f;
    sizes.dt_batch = dt_batch, sizes.dt_token = dt_token, sizes.dt_head = dt_head;
    return sizes;
}
