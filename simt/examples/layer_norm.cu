// Layer norm of each row: two passes by a block, and Welford's single pass by a tile of cooperative groups.

#include <cooperative_groups.h>
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>

namespace cg = cooperative_groups;

template <int BLOCK>
__global__ void layer_norm_block(const float* x, const float* weight, const float* bias, float* y, int columns,
                                 float epsilon) {
    using Reduce = cub::BlockReduce<float, BLOCK>;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ float mean, scale;
    const float* in = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < columns; c += BLOCK) sum += in[c];
    sum = Reduce(storage).Sum(sum);
    if (threadIdx.x == 0) mean = sum / columns;
    __syncthreads();
    float squares = 0.0f;
    for (int c = threadIdx.x; c < columns; c += BLOCK) squares += (in[c] - mean) * (in[c] - mean);
    squares = Reduce(storage).Sum(squares);
    if (threadIdx.x == 0) scale = rsqrtf(squares / columns + epsilon);
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += BLOCK)
        y[blockIdx.x * columns + c] = (in[c] - mean) * scale * weight[c] + bias[c];
}

__global__ void layer_norm_welford(const float* x, const float* weight, const float* bias, float* y, int rows,
                                   int columns, float epsilon) {
    auto tile = cg::tiled_partition<16>(cg::this_thread_block());
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / tile.size();
    if (row >= rows) return;
    float mean = 0.0f, squares = 0.0f;
    int count = 0;
    for (int c = tile.thread_rank(); c < columns; c += tile.size()) {
        float value = x[row * columns + c], before = value - mean;
        mean += before / ++count;
        squares += before * (value - mean);
    }
    for (int offset = tile.size() / 2; offset > 0; offset /= 2) {
        float mean2 = tile.shfl_xor(mean, offset), squares2 = tile.shfl_xor(squares, offset);
        int count2 = tile.shfl_xor(count, offset), both = count + count2;
        if (both > 0) {
            float apart = mean2 - mean;
            mean = (mean * count + mean2 * count2) / both;
            squares += squares2 + apart * apart * count * count2 / both;
            count = both;
        }
    }
    float scale = rsqrtf(squares / columns + epsilon);
    for (int c = tile.thread_rank(); c < columns; c += tile.size())
        y[row * columns + c] = (x[row * columns + c] - mean) * scale * weight[c] + bias[c];
}

__global__ void rms_norm_cub(const float* x, const float* weight, float* y, int rows, int columns, float epsilon) {
    using Reduce = cub::WarpReduce<float>;
    __shared__ typename Reduce::TempStorage storage[4];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 4 + warp;
    if (row >= rows) return;
    float squares = 0.0f;
    for (int c = lane; c < columns; c += 32) squares += x[row * columns + c] * x[row * columns + c];
    squares = Reduce(storage[warp]).Sum(squares);
    squares = __shfl_sync(0xffffffff, squares, 0);
    float scale = rsqrtf(squares / columns + epsilon);
    for (int c = lane; c < columns; c += 32) y[row * columns + c] = x[row * columns + c] * scale * weight[c];
}
