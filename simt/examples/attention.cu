// Attention: scores, softmax and sum by three plain kernels; then in one kernel over tiles of keys, with running sums.

__global__ void scores(const float* Q, const float* K, float* S, int tokens, int keys, int d, float scale) {
    int key = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y * blockDim.y + threadIdx.y;
    if (token >= tokens || key >= keys) return;
    float sum = 0.0f;
    for (int i = 0; i < d; i++) sum += Q[token * d + i] * K[key * d + i];
    S[token * keys + key] = sum * scale;
}

__global__ void softmax_rows(float* S, int keys) {
    __shared__ float largest, total;
    float* row = S + blockIdx.x * keys;
    if (threadIdx.x == 0) {
        largest = row[0];
        for (int i = 1; i < keys; i++) largest = max(largest, row[i]);
        total = 0.0f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < keys; i += blockDim.x) {
        row[i] = expf(row[i] - largest);
        atomicAdd(&total, row[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < keys; i += blockDim.x) row[i] /= total;
}

__global__ void weighted_sum(const float* S, const float* V, float* O, int tokens, int keys, int d) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y * blockDim.y + threadIdx.y;
    if (token >= tokens || i >= d) return;
    float sum = 0.0f;
    for (int key = 0; key < keys; key++) sum += S[token * keys + key] * V[key * d + i];
    O[token * d + i] = sum;
}

#define D 32
#define TILE 16

__global__ void flash(const float* Q, const float* K, const float* V, float* O, int tokens, int keys, float scale,
                      bool causal) {  // a thread to a token, D numbers a token
    __shared__ float Ks[TILE][D], Vs[TILE][D];
    int token = blockIdx.x * blockDim.x + threadIdx.x;
    float q[D], o[D], largest = -INFINITY, total = 0.0f;
    for (int i = 0; i < D; i++) {
        q[i] = token < tokens ? Q[token * D + i] * scale : 0.0f;
        o[i] = 0.0f;
    }
    for (int start = 0; start < keys; start += TILE) {
        int here = min(TILE, keys - start);
        for (int i = threadIdx.x; i < here * D; i += blockDim.x) {
            Ks[i / D][i % D] = K[start * D + i];
            Vs[i / D][i % D] = V[start * D + i];
        }
        __syncthreads();
        for (int j = 0; j < here; j++) {
            if (causal && start + j > token) break;
            float s = 0.0f;
            for (int i = 0; i < D; i++) s += q[i] * Ks[j][i];
            float most = fmaxf(largest, s), old = __expf(largest - most), weight = __expf(s - most);
            for (int i = 0; i < D; i++) o[i] = o[i] * old + weight * Vs[j][i];
            total = total * old + weight;
            largest = most;
        }
        __syncthreads();
    }
    if (token < tokens)
        for (int i = 0; i < D; i++) O[token * D + i] = o[i] / total;
}
