// C = A B with two tiles by turns: the next one is on its way while this one is multiplied. By hand, by the pipeline's
// primitives, and by cuda::pipeline. Sizes are multiples of 16.

#include <cooperative_groups.h>
#include <cuda/pipeline>
#include <cuda_pipeline.h>

#define TILE 16

__global__ void by_registers(const float* A, const float* B, float* C, int n, int k) {
    __shared__ float As[2][TILE][TILE], Bs[2][TILE][TILE];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * TILE + ty, column = blockIdx.x * TILE + tx;
    As[0][ty][tx] = A[row * k + tx];
    Bs[0][ty][tx] = B[ty * n + column];
    __syncthreads();
    float sum = 0.0f;
    int now = 0;
    for (int t = TILE; t <= k; t += TILE) {
        float a = 0.0f, b = 0.0f;
        if (t < k) a = A[row * k + t + tx], b = B[(t + ty) * n + column];
        for (int i = 0; i < TILE; i++) sum += As[now][ty][i] * Bs[now][i][tx];
        if (t < k) As[now ^ 1][ty][tx] = a, Bs[now ^ 1][ty][tx] = b;
        __syncthreads();
        now ^= 1;
    }
    C[row * n + column] = sum;
}

__global__ void by_primitives(const float* A, const float* B, float* C, int n, int k) {
    __shared__ float As[2][TILE][TILE], Bs[2][TILE][TILE];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * TILE + ty, column = blockIdx.x * TILE + tx;
    __pipeline_memcpy_async(&As[0][ty][tx], &A[row * k + tx], sizeof(float));
    __pipeline_memcpy_async(&Bs[0][ty][tx], &B[ty * n + column], sizeof(float));
    __pipeline_commit();
    float sum = 0.0f;
    for (int t = 0, now = 0; t < k; t += TILE, now ^= 1) {
        if (t + TILE < k) {
            __pipeline_memcpy_async(&As[now ^ 1][ty][tx], &A[row * k + t + TILE + tx], sizeof(float));
            __pipeline_memcpy_async(&Bs[now ^ 1][ty][tx], &B[(t + TILE + ty) * n + column], sizeof(float));
        }
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += As[now][ty][i] * Bs[now][i][tx];
        __syncthreads();
    }
    C[row * n + column] = sum;
}

__global__ void by_pipeline(const float* A, const float* B, float* C, int n, int k) {
    __shared__ float As[2][TILE][TILE], Bs[2][TILE][TILE];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto block = cooperative_groups::this_thread_block();
    auto pipe = cuda::make_pipeline(block, &state);
    int tx = threadIdx.x, ty = threadIdx.y, row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    float sum = 0.0f;
    for (int t = 0, ahead = 0; t < k / TILE; t++) {
        for (; ahead < k / TILE && ahead < t + 2; ahead++) {
            pipe.producer_acquire();
            cuda::memcpy_async(&As[ahead % 2][ty][tx], &A[(row0 + ty) * k + ahead * TILE + tx], sizeof(float), pipe);
            cuda::memcpy_async(&Bs[ahead % 2][ty][tx], &B[(ahead * TILE + ty) * n + column0 + tx], sizeof(float), pipe);
            pipe.producer_commit();
        }
        pipe.consumer_wait();
        for (int i = 0; i < TILE; i++) sum += As[t % 2][ty][i] * Bs[t % 2][i][tx];
        pipe.consumer_release();
    }
    C[(row0 + ty) * n + column0 + tx] = sum;
}
