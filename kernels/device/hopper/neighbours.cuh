/* Blocks of a cluster (cluster.cuh) read each other's shared memory. */
#pragma once

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Of all threads of all blocks of the cluster; what they wrote to shared memory is known behind it. */
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <class T> __device__ __forceinline__ T load_from_block(unsigned at, unsigned rank);
template <> __device__ __forceinline__ float4 load_from_block<float4>(unsigned at, unsigned rank) {
    float4 f;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; "
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w) : "r"(at), "r"(rank) : "memory");
    return f;
}
template <> __device__ __forceinline__ float load_from_block<float>(unsigned at, unsigned rank) {
    float f;
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %1, %2; "
                 "ld.shared::cluster.f32 %0, [there]; }" : "=f"(f) : "r"(at), "r"(rank) : "memory");
    return f;
}
