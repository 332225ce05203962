/* The two products of a warpgroup, and where their operands lie in shared memory (append_pages.cuh): eights of tokens
   are EIGHT bytes apart, the halves of a head's channels 1024. */
#pragma once
#include "../device/hopper/wgmma.cuh"
#include "append_softmax.cuh"

/* As k_major and mn_major of wgmma.cuh, of eights that do not lie one behind the other. */
__device__ __forceinline__ Descriptor keys_operand(unsigned keys) {
    return (keys & 0x3FFFF) >> 4 | (Descriptor)(EIGHT >> 4) << 32 | (Descriptor)1 << 62;
}
__device__ __forceinline__ Descriptor values_operand(unsigned values) {
    return keys_operand(values) | (Descriptor)(1024 >> 4) << 16;
}

/* Start S = Q K^T. */
__device__ __forceinline__ void start_scores(Scores &s, unsigned q, unsigned k) {
    const Descriptor queries = k_major(q), keys = keys_operand(k);
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++)
        wgmma<COLUMNS>(s, advance(queries, d / 4 * WARPGROUP_ROWS * 128 + d % 4 * 32),
                       advance(keys, d / 4 * 1024 + d % 4 * 32), d > 0, T());
}
/* Start O += W V; without `more`, O = W V. */
__device__ __forceinline__ void start_values(Values &o, const Weights &w, unsigned v, bool more) {
    const Descriptor values = values_operand(v);
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
        wgmma<HEAD_DIM, MN_MAJOR>(o, w[i], advance(values, 2 * i * EIGHT), more || i > 0, T());
}
