// Bitonic sort of a power of two: one step of the network in global memory, all steps in shared memory.

__global__ void bitonic_step(float* x, int j, int k) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x, other = i ^ j;
    if (other > i) {
        bool up = (i & k) == 0;
        if ((x[i] > x[other]) == up) {
            float swapped = x[i];
            x[i] = x[other];
            x[other] = swapped;
        }
    }
}

__global__ void bitonic_shared(float* x, int n) {  // one block, n / 2 threads
    extern __shared__ float s[];
    int tid = threadIdx.x;
    s[tid] = x[tid];
    s[tid + blockDim.x] = x[tid + blockDim.x];
    for (int size = 2; size <= n; size <<= 1)
        for (int stride = size / 2; stride > 0; stride >>= 1) {
            __syncthreads();
            int at = 2 * tid - (tid & (stride - 1));
            bool up = (at & size) == 0;
            float a = s[at], b = s[at + stride];
            if ((a > b) == up) s[at] = b, s[at + stride] = a;
        }
    __syncthreads();
    x[tid] = s[tid];
    x[tid + blockDim.x] = s[tid + blockDim.x];
}
