// Convolutions in 1 and 2 dimensions with the weights in constant memory; zeros lie beyond the edges.

#define RADIUS 3
#define TILE 16

__constant__ float weights[2 * RADIUS + 1];
__constant__ float filter[2 * RADIUS + 1][2 * RADIUS + 1];

__global__ void convolution_1d(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.0f;
    for (int k = -RADIUS; k <= RADIUS; k++)
        if (i + k >= 0 && i + k < n) sum += weights[k + RADIUS] * x[i + k];
    y[i] = sum;
}

__global__ void convolution_1d_tiled(const float* x, float* y, int n) {
    extern __shared__ float tile[];  // blockDim.x + 2 * RADIUS
    int i = blockIdx.x * blockDim.x + threadIdx.x, at = threadIdx.x + RADIUS;
    tile[at] = i < n ? x[i] : 0.0f;
    if (threadIdx.x < RADIUS) {
        int left = i - RADIUS, right = i + blockDim.x;
        tile[at - RADIUS] = left >= 0 ? x[left] : 0.0f;
        tile[at + blockDim.x] = right < n ? x[right] : 0.0f;
    }
    __syncthreads();
    if (i >= n) return;
    float sum = 0.0f;
#pragma unroll
    for (int k = -RADIUS; k <= RADIUS; k++) sum += weights[k + RADIUS] * tile[at + k];
    y[i] = sum;
}

__global__ void convolution_2d(const float* x, float* y, int width, int height) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (column >= width || row >= height) return;
    float sum = 0.0f;
    for (int i = 0; i < 2 * RADIUS + 1; i++)
        for (int j = 0; j < 2 * RADIUS + 1; j++) {
            int r = row + i - RADIUS, c = column + j - RADIUS;
            if (r >= 0 && r < height && c >= 0 && c < width) sum += filter[i][j] * x[r * width + c];
        }
    y[row * width + column] = sum;
}

__global__ void convolution_2d_tiled(const float* x, float* y, int width, int height) {
    const int out = TILE - 2 * RADIUS;  // the block loads its tile with the border, and computes what lies within
    __shared__ float tile[TILE][TILE];
    int column = blockIdx.x * out + threadIdx.x - RADIUS, row = blockIdx.y * out + threadIdx.y - RADIUS;
    bool inside = row >= 0 && row < height && column >= 0 && column < width;
    tile[threadIdx.y][threadIdx.x] = inside ? x[row * width + column] : 0.0f;
    __syncthreads();
    int c = threadIdx.x - RADIUS, r = threadIdx.y - RADIUS;
    if (inside && c >= 0 && c < out && r >= 0 && r < out) {
        float sum = 0.0f;
        for (int i = 0; i < 2 * RADIUS + 1; i++)
            for (int j = 0; j < 2 * RADIUS + 1; j++) sum += filter[i][j] * tile[r + i][c + j];
        y[row * width + column] = sum;
    }
}
