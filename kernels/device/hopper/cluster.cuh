/* Clusters: blocks that run at the same time on neighbouring multiprocessors, and reach each other's shared memory. The
   launch says how many (cluster=). Since compute capability 9.0.

   One copy by TMA can go to the same place in several blocks (multicast): a tile that all of them need is then read
   from L2 once. It arrives at the mbarrier at the same place in each. So a slot may be filled when the readers of all
   these blocks have released it: a reader arrives at every block's mbarrier. No block may end while another may still
   write to it, or arrive there: cluster_barrier() last of all; and first, so that nobody uses what is not
   initialised. */
#pragma once
#include "tma.cuh"

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

/* Arrive at this mbarrier's twin in the block with this rank. It hands over room, and no data: what was read there
   has been read. With .release.cluster the compiler would put a fence of all memory in front of each arrival. */
__device__ __forceinline__ void arrive_at(const Barrier &barrier, unsigned rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier.at()), "r"(rank) : "memory");
}

/* A box to the same place in all blocks whose bits are set; it counts at `full` of each of them. */
__device__ __forceinline__ void load_tile_multicast(void *to, const CUtensorMap &map, int row, int column,
                                                    Barrier &full, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row),
                 "r"(full.at()), "h"(blocks) : "memory");
}
