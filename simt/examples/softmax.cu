// Softmax of each row: a thread to a row, a block to a row in three passes, a warp to a row in one pass ("online").

#include <float.h>

__global__ void softmax_naive(const float* x, float* y, int rows, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float largest = -INFINITY, sum = 0.0f;
    for (int c = 0; c < columns; c++) largest = fmaxf(largest, x[row * columns + c]);
    for (int c = 0; c < columns; c++) sum += expf(x[row * columns + c] - largest);
    for (int c = 0; c < columns; c++) y[row * columns + c] = expf(x[row * columns + c] - largest) / sum;
}

__global__ void softmax_block(const float* x, float* y, int columns) {
    extern __shared__ float s[];
    const float* in = x + blockIdx.x * columns;
    float* out = y + blockIdx.x * columns;
    int tid = threadIdx.x;

    float largest = -FLT_MAX;
    for (int c = tid; c < columns; c += blockDim.x) largest = fmaxf(largest, in[c]);
    s[tid] = largest;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (tid < step) s[tid] = fmaxf(s[tid], s[tid + step]);
        __syncthreads();
    }
    largest = s[0];
    __syncthreads();

    float sum = 0.0f;
    for (int c = tid; c < columns; c += blockDim.x) {
        float e = __expf(in[c] - largest);
        out[c] = e;
        sum += e;
    }
    s[tid] = sum;
    __syncthreads();
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        if (tid < step) s[tid] += s[tid + step];
        __syncthreads();
    }
    sum = s[0];
    for (int c = tid; c < columns; c += blockDim.x) out[c] /= sum;
}

struct __align__(8) Running {
    float largest, sum;
};

__device__ __forceinline__ Running merge(Running a, Running b) {
    bool first = a.largest > b.largest;
    Running big = first ? a : b, small = first ? b : a;
    return {big.largest, big.sum + small.sum * expf(small.largest - big.largest)};
}

__global__ void softmax_online(const float* __restrict__ x, float* __restrict__ y, int rows, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    Running r = {-FLT_MAX, 0.0f};
    for (int c = lane; c < columns; c += 32) r = merge(r, {x[row * columns + c], 1.0f});
    for (int mask = 16; mask > 0; mask >>= 1) {
        Running other = {__shfl_xor_sync(0xffffffff, r.largest, mask), __shfl_xor_sync(0xffffffff, r.sum, mask)};
        r = merge(r, other);
    }
    for (int c = lane; c < columns; c += 32) y[row * columns + c] = expf(x[row * columns + c] - r.largest) / r.sum;
}
