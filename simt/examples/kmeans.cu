// One round of k-means: the nearest centre of each point, sums for each centre, and their means.

#define DIMENSIONS 3

__global__ void assign(const float* points, const float* centres, int* labels, int n, int k) {
    extern __shared__ float shared_centres[];
    for (int i = threadIdx.x; i < k * DIMENSIONS; i += blockDim.x) shared_centres[i] = centres[i];
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float nearest = INFINITY;
    int label = 0;
    for (int c = 0; c < k; c++) {
        float distance = 0.0f;
        for (int d = 0; d < DIMENSIONS; d++) {
            float apart = points[i * DIMENSIONS + d] - shared_centres[c * DIMENSIONS + d];
            distance += apart * apart;
        }
        if (distance < nearest) nearest = distance, label = c;
    }
    labels[i] = label;
}

__global__ void add_points(const float* points, const int* labels, float* sums, int* counts, int n, int k) {
    extern __shared__ float s[];  // k sums, and k counts behind them
    int* number = (int*)&s[k * DIMENSIONS];
    for (int i = threadIdx.x; i < k * DIMENSIONS; i += blockDim.x) s[i] = 0.0f;
    for (int i = threadIdx.x; i < k; i += blockDim.x) number[i] = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        for (int d = 0; d < DIMENSIONS; d++) atomicAdd(&s[labels[i] * DIMENSIONS + d], points[i * DIMENSIONS + d]);
        atomicAdd(&number[labels[i]], 1);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < k * DIMENSIONS; j += blockDim.x) atomicAdd(&sums[j], s[j]);
    for (int j = threadIdx.x; j < k; j += blockDim.x) atomicAdd(&counts[j], number[j]);
}

__global__ void divide(float* centres, const float* sums, const int* counts) {  // a block for each centre
    int count = counts[blockIdx.x];
    int i = blockIdx.x * DIMENSIONS + threadIdx.x;
    if (count > 0) centres[i] = sums[i] / count;
}
