// The sum of an array, from the tree that diverges to the warp's own instructions. Each block writes one partial sum.

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cub/block/block_reduce.cuh>

namespace cg = cooperative_groups;

__global__ void interleaved_divergent(const float* in, float* out, int n) {
    extern __shared__ float s[];
    int tid = threadIdx.x, i = blockIdx.x * blockDim.x + tid;
    s[tid] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        if (tid % (2 * step) == 0) s[tid] += s[tid + step];
        __syncthreads();
    }
    if (tid == 0) out[blockIdx.x] = s[0];
}

__global__ void interleaved_conflicts(const float* in, float* out, int n) {
    extern __shared__ float s[];
    int tid = threadIdx.x, i = blockIdx.x * blockDim.x + tid;
    s[tid] = i < n ? in[i] : 0.0f;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        int at = 2 * step * tid;
        if (at < blockDim.x) s[at] += s[at + step];
        __syncthreads();
    }
    if (tid == 0) out[blockIdx.x] = s[0];
}

__global__ void sequential(const float* in, float* out, int n) {
    extern __shared__ float s[];
    int tid = threadIdx.x, i = blockIdx.x * blockDim.x * 2 + tid;  // the first addition while loading
    s[tid] = (i < n ? in[i] : 0.0f) + (i + blockDim.x < n ? in[i + blockDim.x] : 0.0f);
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step >>= 1) {
        if (tid < step) s[tid] += s[tid + step];
        __syncthreads();
    }
    if (tid == 0) out[blockIdx.x] = s[0];
}

__device__ void last_warp(volatile float* s, int tid) {
    float sum = s[tid] + s[tid + 32];
    for (int step = 16; step > 0; step >>= 1) {
        __syncwarp();
        s[tid] = sum;
        __syncwarp();
        sum += s[tid + step];
    }
    __syncwarp();
    s[tid] = sum;
}

template <int BLOCK>
__global__ void unrolled(const float* in, float* out, int n) {
    __shared__ float s[BLOCK];
    int tid = threadIdx.x;
    float sum = 0.0f;
    for (int i = blockIdx.x * BLOCK + tid; i < n; i += BLOCK * gridDim.x) sum += in[i];
    s[tid] = sum;
    __syncthreads();
    if (BLOCK >= 512) { if (tid < 256) s[tid] += s[tid + 256]; __syncthreads(); }
    if (BLOCK >= 256) { if (tid < 128) s[tid] += s[tid + 128]; __syncthreads(); }
    if (BLOCK >= 128) { if (tid < 64) s[tid] += s[tid + 64]; __syncthreads(); }
    if (tid < 32) last_warp(s, tid);
    if (tid == 0) out[blockIdx.x] = s[0];
}

__inline__ __device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

__global__ void shuffle(const float* in, float* out, int n) {
    __shared__ float sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) sum += in[i];
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = warp_sum(lane < blockDim.x / 32 ? sums[lane] : 0.0f);
        if (lane == 0) out[blockIdx.x] = sum;
    }
}

__global__ void groups(const float* in, float* out, int n) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> tile = cg::tiled_partition<32>(block);
    __shared__ float total;
    if (block.thread_rank() == 0) total = 0.0f;
    block.sync();
    float sum = 0.0f;
    for (int i = block.group_index().x * block.size() + block.thread_rank(); i < n; i += block.size() * gridDim.x)
        sum += in[i];
    sum = cg::reduce(tile, sum, cg::plus<float>());
    if (tile.thread_rank() == 0) atomicAdd(&total, sum);
    block.sync();
    if (block.thread_rank() == 0) out[blockIdx.x] = total;
}

template <int BLOCK>
__global__ void with_cub(const float* in, float* out, int n) {
    typedef cub::BlockReduce<float, BLOCK> BlockReduce;
    __shared__ typename BlockReduce::TempStorage storage;
    float sum = 0.0f;
    for (int i = blockIdx.x * BLOCK + threadIdx.x; i < n; i += BLOCK * gridDim.x) sum += in[i];
    sum = BlockReduce(storage).Sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
