/* Between the blocks of a grid. A block that waits for another needs that one to be running: launch no more blocks
   than the card has room for at a time, or wait only for blocks that have begun before (by tickets). Else the grid
   hangs. Since compute capability 7.0.

   An acquire and a release order what stands around them, for all threads that the block's own barrier has brought
   together: barrier, release by one thread; acquire by one thread, barrier. With a plain store and load the flag could
   arrive before what it announces. */
#pragma once

__device__ __forceinline__ unsigned load_acquire(const unsigned *at) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long *at) {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(unsigned *at, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
/* In no order with anything else; anywhere in memory. */
__device__ __forceinline__ void store_relaxed(unsigned *at, unsigned value) {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
/* Add to a flag, in order with all that comes before and after; what it was before. */
__device__ __forceinline__ unsigned add_acquire_release(unsigned *at, unsigned value) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
}

/* Wait until all blocks have come here, and see what they wrote. Every arrival adds 1; the first block's adds so much
   that the sum of all is 2**31, so that the top bit flips when the last one arrives: nobody needs to reset anything.
   `barrier` is 0 before the first launch. */
__device__ __forceinline__ void grid_barrier(unsigned *barrier) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned arrival = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
        const unsigned before = add_acquire_release(barrier, arrival);
        while (!((before ^ load_acquire(barrier)) & 0x80000000u)) {
        }
    }
    __syncthreads();
}
