/* The number of an exchange, by which devices know it.

   A block takes part with the block of its number on every other device, and with no other. It counts its exchanges
   itself, so the blocks of one device need not meet: numbers[blockIdx.x] is {exchanges so far, has one failed?}. On all
   devices these numbers are the same, since all have the same launches. They lie 32 bytes apart.

   A graph of several exchanges is replayed as it is: the numbers are in memory, and go on. */
#pragma once
#include "../device/peers.cuh"

constexpr int APART = 4; // uint2 from one block's count to the next

/* Which exchange this is for the block. An earlier one that failed ends all that come. */
struct Exchange {
    unsigned number;
    bool failed;
};
__device__ __forceinline__ Exchange next_exchange(const uint2 *numbers) {
    const uint2 so_far = __ldcg(numbers + blockIdx.x * APART);
    return {so_far.x + 1, so_far.y != 0};
}
/* All threads have come to its end, with or without what they waited for. */
__device__ __forceinline__ void end_exchange(uint2 *numbers, unsigned number, bool failed) {
    const bool any = __syncthreads_or(failed);
    if (threadIdx.x == 0) numbers[blockIdx.x * APART] = make_uint2(number, any);
}

/* The same in two halves, where nothing shall stand behind the last word's arrival: the count between what is sent and
   what is waited for, when there is time; and at the end only that it failed. All threads come to the first. */
__device__ __forceinline__ void count_exchange(uint2 *numbers, unsigned number) {
    __syncthreads(); // all have read the number before
    if (threadIdx.x == 0) numbers[blockIdx.x * APART].x = number;
}
__device__ __forceinline__ void note_failure(uint2 *numbers, bool failed) {
    if (failed) atomicExch(&numbers[blockIdx.x * APART].y, 1);
}
