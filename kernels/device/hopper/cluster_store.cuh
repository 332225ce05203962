/* Clusters (cluster.cuh) that share sums: a plain store into another block's shared memory, and the cluster's barrier in
   two halves. Since compute capability 9.0. */
#pragma once
#include "../copy.cuh"

/* Of all threads of all blocks of the cluster: what they wrote to shared memory before they arrived is known to those
   who have waited. */
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/* The first time, with nothing written yet: who has waited knows that all blocks are there. Before, nobody may write to
   them. The other kind begins with a fence of all memory, that is not for nothing. */
__device__ __forceinline__ void cluster_begin() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* Write to this place's twin in the block with this rank. */
__device__ __forceinline__ void store_in_cluster(float *place, unsigned rank, float value) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "st.shared::cluster.f32 [there], %2; }" ::"r"(shared_address(place)), "r"(rank), "f"(value) : "memory");
}
