// The k largest of each row, and where they are: k rounds of an arg-max by a block.

__global__ void top_k(const float* x, float* values, int* places, int columns, int k) {
    extern __shared__ unsigned char memory[];
    float* s = reinterpret_cast<float*>(memory);
    int* where = reinterpret_cast<int*>(s + blockDim.x);
    bool* taken = reinterpret_cast<bool*>(where + blockDim.x);
    const float* row = x + (size_t)blockIdx.x * columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) taken[c] = false;
    __syncthreads();
    for (int round = 0; round < k; round++) {
        float best = -INFINITY;
        int place = columns;
        for (int c = threadIdx.x; c < columns; c += blockDim.x)
            if (!taken[c] && (row[c] > best || place == columns)) best = row[c], place = c;
        s[threadIdx.x] = best, where[threadIdx.x] = place;
        __syncthreads();
        for (int step = blockDim.x / 2; step > 0; step >>= 1) {
            if (threadIdx.x < step) {
                float other = s[threadIdx.x + step];
                int there = where[threadIdx.x + step];
                if (there < columns && (where[threadIdx.x] == columns || other > s[threadIdx.x] ||
                                        (other == s[threadIdx.x] && there < where[threadIdx.x])))
                    s[threadIdx.x] = other, where[threadIdx.x] = there;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            values[blockIdx.x * k + round] = s[0];
            places[blockIdx.x * k + round] = where[0];
            taken[where[0]] = true;
        }
        __syncthreads();
    }
}
