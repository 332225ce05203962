// An inclusive scan of a block: log n steps, in each of which every thread adds what lies `step` to its left.

__global__ void hillis_steele(const int* in, int* out, int n) {  // one block, two buffers by turns
    extern __shared__ int buffer[];
    int tid = threadIdx.x, from = 0, to = 1;
    buffer[tid] = tid < n ? in[tid] : 0;
    __syncthreads();
    for (int step = 1; step < blockDim.x; step *= 2) {
        int value = buffer[from * blockDim.x + tid];
        if (tid >= step) value += buffer[from * blockDim.x + tid - step];
        buffer[to * blockDim.x + tid] = value;
        from = 1 - from, to = 1 - to;
        __syncthreads();
    }
    if (tid < n) out[tid] = buffer[from * blockDim.x + tid];
}

__global__ void hillis_steele_in_place(const int* in, int* out, int n) {  // one buffer, two barriers
    __shared__ int s[1024];
    int tid = threadIdx.x;
    s[tid] = tid < n ? in[tid] : 0;
    for (int step = 1; step < blockDim.x; step <<= 1) {
        __syncthreads();
        int left = tid >= step ? s[tid - step] : 0;
        __syncthreads();
        s[tid] += left;
    }
    if (tid < n) out[tid] = s[tid];
}

__global__ void warp_scan(const int* in, int* out, int n) {  // a warp by shuffles, the block by its warps' sums
    __shared__ int sums[32];
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int value = tid < n ? in[tid] : 0;
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(0xffffffff, value, step);
        if (lane >= step) value += left;
    }
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int sum = lane < (blockDim.x + 31) / 32 ? sums[lane] : 0;
        for (int step = 1; step < 32; step *= 2) {
            int left = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += left;
        }
        sums[lane] = sum;
    }
    __syncthreads();
    if (warp > 0) value += sums[warp - 1];
    if (tid < n) out[tid] = value;
}
