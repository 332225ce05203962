// An exclusive scan of any length: sums up a tree and down again, for each block; then the scan of the blocks' sums.

#define BLOCK 128  // threads; a block scans twice as many
#define OFFSET(i) ((i) + ((i) >> 5))  // a gap after every 32 words, against bank conflicts

__global__ void scan_blocks(const int* in, int* out, int* sums, int n) {
    __shared__ int s[OFFSET(2 * BLOCK)];
    int tid = threadIdx.x, base = blockIdx.x * 2 * BLOCK;
    s[OFFSET(tid)] = base + tid < n ? in[base + tid] : 0;
    s[OFFSET(tid + BLOCK)] = base + tid + BLOCK < n ? in[base + tid + BLOCK] : 0;
    int step = 1;
    for (int active = BLOCK; active > 0; active >>= 1) {  // up
        __syncthreads();
        if (tid < active) {
            int left = step * (2 * tid + 1) - 1, right = step * (2 * tid + 2) - 1;
            s[OFFSET(right)] += s[OFFSET(left)];
        }
        step *= 2;
    }
    if (tid == 0) {
        if (sums) sums[blockIdx.x] = s[OFFSET(2 * BLOCK - 1)];
        s[OFFSET(2 * BLOCK - 1)] = 0;
    }
    for (int active = 1; active <= BLOCK; active *= 2) {  // down
        step >>= 1;
        __syncthreads();
        if (tid < active) {
            int left = step * (2 * tid + 1) - 1, right = step * (2 * tid + 2) - 1;
            int value = s[OFFSET(left)];
            s[OFFSET(left)] = s[OFFSET(right)];
            s[OFFSET(right)] += value;
        }
    }
    __syncthreads();
    if (base + tid < n) out[base + tid] = s[OFFSET(tid)];
    if (base + tid + BLOCK < n) out[base + tid + BLOCK] = s[OFFSET(tid + BLOCK)];
}

__global__ void add_sums(int* out, const int* sums, int n) {
    int i = blockIdx.x * 2 * BLOCK + threadIdx.x;
    if (i < n) out[i] += sums[blockIdx.x];
    if (i + BLOCK < n) out[i + BLOCK] += sums[blockIdx.x];
}
