/* Copies of bytes that lie one behind another, by TMA (tma.cuh) without a tensor map: one thread asks, and a unit
   beside the threads copies, or brings into L2. Addresses and counts are multiples of 16. Since compute capability
   9.0. */
#pragma once
#include "tma.cuh"

/* Into shared memory. They arrive at `full`, which must have been told how many to expect. */
__device__ __forceinline__ void copy_bulk(unsigned to, const void *from, int bytes, Barrier &full, CachePolicy policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(full.at()), "l"(policy) : "memory");
}

/* Into L2, where who needs them finds them later. Nobody is told when; nothing depends on it but time. */
__device__ __forceinline__ void prefetch_bulk(const void *from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
