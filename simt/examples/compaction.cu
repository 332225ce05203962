// Keep the positive numbers: by a scan, in order; by one atomic for each warp, in any order, spelt in three ways.

#include <cooperative_groups.h>
#include <cub/block/block_scan.cuh>

namespace cg = cooperative_groups;

__global__ void flags_and_sums(const int* in, int* before, int* sums, int n) {  // before: kept ahead in the block
    using Scan = cub::BlockScan<int, 256>;
    __shared__ typename Scan::TempStorage storage;
    int i = blockIdx.x * 256 + threadIdx.x, keep = i < n && in[i] > 0, all;
    Scan(storage).ExclusiveSum(keep, keep, all);
    if (i < n) before[i] = keep;
    if (threadIdx.x == 0) sums[blockIdx.x] = all;
}

__global__ void scatter_kept(const int* in, const int* before, const int* offsets, int* out, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n && in[i] > 0) out[offsets[blockIdx.x] + before[i]] = in[i];
}

__global__ void by_ballot(const int* in, int* out, int* count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    bool keep = i < n && in[i] > 0;
    unsigned int kept = __ballot_sync(0xffffffff, keep);
    int base = 0;
    if (lane == 0 && kept) base = atomicAdd(count, __popc(kept));
    base = __shfl_sync(0xffffffff, base, 0);
    if (keep) out[base + __popc(kept & ((1u << lane) - 1))] = in[i];
}

__device__ int aggregated_increment(int* count) {
    cg::coalesced_group active = cg::coalesced_threads();
    int base;
    if (active.thread_rank() == 0) base = atomicAdd(count, active.size());
    return active.shfl(base, 0) + active.thread_rank();
}

__global__ void by_coalesced_group(const int* in, int* out, int* count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && in[i] > 0) out[aggregated_increment(count)] = in[i];
}

__global__ void by_active_mask(const int* in, int* out, int* count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || in[i] <= 0) return;
    unsigned int active = __activemask(), below = active & ((1u << (threadIdx.x % 32)) - 1);
    int leader = __ffs(active) - 1, base = 0;
    if (below == 0) base = atomicAdd(count, __popc(active));
    base = __shfl_sync(active, base, leader);
    out[base + __popc(below)] = in[i];
}
