// C = A B through tiles of shared memory: their size fixed, and chosen at the launch (dynamic shared memory).

#define TILE 16

__global__ void matmul_tiled(const float* A, const float* B, float* C, int m, int n, int k) {
    __shared__ float As[TILE][TILE], Bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < (k + TILE - 1) / TILE; t++) {
        int a = t * TILE + threadIdx.x, b = t * TILE + threadIdx.y;
        As[threadIdx.y][threadIdx.x] = row < m && a < k ? A[row * k + a] : 0.0f;
        Bs[threadIdx.y][threadIdx.x] = b < k && column < n ? B[b * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += As[threadIdx.y][i] * Bs[i][threadIdx.x];
        __syncthreads();
    }
    if (row < m && column < n) C[row * n + column] = sum;
}

__global__ void matmul_dynamic(const float* A, const float* B, float* C, int m, int n, int k, int tile) {
    extern __shared__ float tiles[];
    float *As = tiles, *Bs = tiles + tile * tile;
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * tile + ty, column = blockIdx.x * tile + tx;
    float sum = 0.0f;
    for (int t = 0; t < k; t += tile) {
        As[ty * tile + tx] = row < m && t + tx < k ? A[row * k + t + tx] : 0.0f;
        Bs[ty * tile + tx] = t + ty < k && column < n ? B[(t + ty) * n + column] : 0.0f;
        __syncthreads();
        for (int i = 0; i < tile; i++) sum += As[ty * tile + i] * Bs[i * tile + tx];
        __syncthreads();
    }
    if (row < m && column < n) C[row * n + column] = sum;
}
