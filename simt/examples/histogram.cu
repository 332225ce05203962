// How often each byte occurs: atomics on global memory, then a histogram of each block's own, then runs of equal bytes.

#define BINS 256

__global__ void histogram_global(const unsigned char* data, unsigned int* bins, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, stride = blockDim.x * gridDim.x;
    for (; i < n; i += stride) atomicAdd(&bins[data[i]], 1u);
}

__global__ void histogram_shared(const unsigned char* data, unsigned int* bins, int n) {
    __shared__ unsigned int mine[BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) mine[bin] = 0u;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x, stride = blockDim.x * gridDim.x;
    for (; i < n; i += stride) atomicAdd(&mine[data[i]], 1u);
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
        if (mine[bin] > 0) atomicAdd(&bins[bin], mine[bin]);
}

__global__ void histogram_aggregated(const unsigned char* data, unsigned int* bins, int n) {
    __shared__ unsigned int mine[BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) mine[bin] = 0u;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x, stride = blockDim.x * gridDim.x;
    unsigned int count = 0;
    int last = -1;
    for (; i < n; i += stride) {
        int bin = data[i];
        if (bin == last) {
            ++count;
        } else {
            if (count > 0) atomicAdd(&mine[last], count);
            count = 1, last = bin;
        }
    }
    if (count > 0) atomicAdd(&mine[last], count);
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
        if (mine[bin] > 0) atomicAdd(&bins[bin], mine[bin]);
}
