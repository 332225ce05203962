/* What the blocks of a cluster (cluster.cuh) keep in shared memory, read by each other: sums, say, that each has a part
   of. Since compute capability 9.0.

       keep what others shall read;
       cluster_arrive();  ...  cluster_wait();    // all threads of all blocks have arrived; what they kept is known
       load_from_block(place, rank)               // from the block with this rank what lies there at this place
       cluster_arrive();  ...  cluster_wait();    // before anyone ends, or keeps something else at that place

   Between the two halves of the barrier a thread may do what neither writes such a place nor reads one. */
#pragma once
#include "../copy.cuh"

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float load_from_block(const float *place, unsigned rank) {
    float found;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(found) : "r"(shared_address(place)), "r"(rank) : "memory");
    return found;
}
__device__ __forceinline__ float4 load_from_block(const float4 *place, unsigned rank) {
    float4 found;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; "
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
                 : "r"(shared_address(place)), "r"(rank) : "memory");
    return found;
}
