// C = A B on tensor cores: nvcuda::wmma, halves in, floats out; a warp to a tile of 16 x 16. Sizes: multiples of 16.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

__global__ void wmma_naive(const half* A, const half* B, float* C, int m, int n, int k) {
    int tile_row = (blockIdx.y * blockDim.y + threadIdx.y) * 16;
    int tile_column = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 16;
    if (tile_row >= m || tile_column >= n) return;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 0.0f);
    for (int i = 0; i < k; i += 16) {
        wmma::load_matrix_sync(a, A + tile_row * k + i, k);
        wmma::load_matrix_sync(b, B + i * n + tile_column, n);
        wmma::mma_sync(c, a, b, c);
    }
    wmma::store_matrix_sync(C + tile_row * n + tile_column, c, n, wmma::mem_row_major);
}

// alpha A B + beta C, with B stored by columns, through shared memory; a block of four warps makes 32 x 32.
__global__ void wmma_shared(const __nv_bfloat16* A, const __nv_bfloat16* B, float* C, int n, int k, float alpha,
                            float beta) {
    __shared__ __nv_bfloat16 As[32][16 + 8], Bs[32][16 + 8];
    int warp = threadIdx.x / 32, row = blockIdx.y * 32 + warp / 2 * 16, column = blockIdx.x * 32 + warp % 2 * 16;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum, old;
    wmma::fill_fragment(sum, 0.0f);
    for (int t = 0; t < k; t += 16) {
        for (int i = threadIdx.x; i < 32 * 16; i += blockDim.x) {
            As[i / 16][i % 16] = A[(blockIdx.y * 32 + i / 16) * k + t + i % 16];
            Bs[i / 16][i % 16] = B[(blockIdx.x * 32 + i / 16) * k + t + i % 16];
        }
        __syncthreads();
        wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> a;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> b;
        wmma::load_matrix_sync(a, &As[warp / 2 * 16][0], 24);
        wmma::load_matrix_sync(b, &Bs[warp % 2 * 16][0], 24);
        wmma::mma_sync(sum, a, b, sum);
        __syncthreads();
    }
    wmma::load_matrix_sync(old, C + row * n + column, n, wmma::mem_row_major);
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = alpha * sum.x[i] + beta * old.x[i];
    wmma::store_matrix_sync(C + row * n + column, sum, n, wmma::mem_row_major);
}
