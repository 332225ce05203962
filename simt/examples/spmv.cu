// y = A x with a sparse A: CSR with a thread or a warp to a row, ELL by columns, COO with atomics.

__global__ void spmv_csr_scalar(const int* starts, const int* columns, const float* values, const float* x, float* y,
                                int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = starts[row]; i < starts[row + 1]; i++) sum += values[i] * x[columns[i]];
    y[row] = sum;
}

__global__ void spmv_csr_vector(const int* __restrict__ starts, const int* __restrict__ columns,
                                const float* __restrict__ values, const float* __restrict__ x, float* y, int rows) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize, lane = threadIdx.x % warpSize;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = starts[row] + lane; i < starts[row + 1]; i += warpSize) sum += values[i] * __ldg(&x[columns[i]]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (lane == 0) y[row] = sum;
}

__global__ void spmv_ell(const int* columns, const float* values, const float* x, float* y, int rows, int width) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int i = 0; i < width; i++) {
        int column = columns[i * rows + row];
        if (column >= 0) sum += values[i * rows + row] * x[column];
    }
    y[row] = sum;
}

__global__ void spmv_coo(const int* rows, const int* columns, const float* values, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&y[rows[i]], values[i] * x[columns[i]]);
}
