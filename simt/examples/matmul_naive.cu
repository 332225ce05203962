// C = A B, one element of C to a thread: A is (m, k), B (k, n), C (m, n), all row by row.

__global__ void matmul(const float* A, const float* B, float* C, int m, int n, int k) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < m && column < n) {
        float sum = 0.0f;
        for (int i = 0; i < k; i++) sum += A[row * k + i] * B[i * n + column];
        C[row * n + column] = sum;
    }
}

__global__ void matmul_uncoalesced(const float* A, const float* B, float* C, int m, int n, int k) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;  // neighbours in a warp have neighbouring rows
    int column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < m && column < n) {
        float sum = 0.0f;
        for (int i = 0; i < k; i++) sum += A[row * k + i] * B[i * n + column];
        C[row * n + column] = sum;
    }
}

__global__ void sgemm(int m, int n, int k, float alpha, const float* A, const float* B, float beta, float* C) {
    const int row = blockIdx.x * 16 + threadIdx.x / 16, column = blockIdx.y * 16 + threadIdx.x % 16;
    if (row < m && column < n) {
        float sum = 0.0f;
        for (int i = 0; i < k; ++i) sum += A[row * k + i] * B[i * n + column];
        C[row * n + column] = alpha * sum + beta * C[row * n + column];
    }
}
