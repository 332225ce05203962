// C = A B with several elements of C to a thread, in registers: a column of them, and a square; loads of float4.

#define BM 32
#define BN 32
#define BK 8

__global__ void matmul_coarsened(const float* A, const float* B, float* C, int m, int n, int k) {  // BN * BM / 4 threads
    __shared__ float As[BM][BK], Bs[BK][BN];
    const int PER_THREAD = 4;
    int tx = threadIdx.x % BN, ty = threadIdx.x / BN, threads = BM * BN / PER_THREAD;
    int row0 = blockIdx.y * BM, column0 = blockIdx.x * BN;
    float sum[PER_THREAD] = {0.0f};
    for (int t = 0; t < k; t += BK) {
        for (int i = threadIdx.x; i < BM * BK; i += threads) {
            int r = i / BK, c = i % BK;
            As[r][c] = row0 + r < m && t + c < k ? A[(row0 + r) * k + t + c] : 0.0f;
        }
        for (int i = threadIdx.x; i < BK * BN; i += threads) {
            int r = i / BN, c = i % BN;
            Bs[r][c] = t + r < k && column0 + c < n ? B[(t + r) * n + column0 + c] : 0.0f;
        }
        __syncthreads();
        for (int i = 0; i < BK; i++) {
            float b = Bs[i][tx];
            for (int j = 0; j < PER_THREAD; j++) sum[j] += As[ty * PER_THREAD + j][i] * b;
        }
        __syncthreads();
    }
    for (int j = 0; j < PER_THREAD; j++) {
        int row = row0 + ty * PER_THREAD + j, column = column0 + tx;
        if (row < m && column < n) C[row * n + column] = sum[j];
    }
}

#define TM 4
#define TN 4

__global__ void __launch_bounds__(BM* BN / (TM * TN))
    matmul_vectorised(const float* A, const float* B, float* C, int m, int n, int k) {  // sizes: multiples of 32, 32, 8
    __shared__ float As[BK][BM];  // turned, so that a thread's rows lie together
    __shared__ float Bs[BK][BN];
    int tid = threadIdx.x, tx = tid % (BN / TN), ty = tid / (BN / TN);
    A += blockIdx.y * BM * k;
    B += blockIdx.x * BN;
    C += blockIdx.y * BM * n + blockIdx.x * BN;
    float sum[TM][TN] = {}, a[TM], b[TN];
    int ar = tid / (BK / 4), ac = tid % (BK / 4) * 4, br = tid / (BN / 4), bc = tid % (BN / 4) * 4;
    for (int t = 0; t < k; t += BK) {
        float4 v = *reinterpret_cast<const float4*>(&A[ar * k + ac]);
        As[ac + 0][ar] = v.x;
        As[ac + 1][ar] = v.y;
        As[ac + 2][ar] = v.z;
        As[ac + 3][ar] = v.w;
        *reinterpret_cast<float4*>(&Bs[br][bc]) = *reinterpret_cast<const float4*>(&B[br * n + bc]);
        __syncthreads();
        A += BK;
        B += BK * n;
#pragma unroll
        for (int i = 0; i < BK; i++) {
            for (int j = 0; j < TM; j++) a[j] = As[i][ty * TM + j];
            for (int j = 0; j < TN; j++) b[j] = Bs[i][tx * TN + j];
            for (int r = 0; r < TM; r++)
                for (int c = 0; c < TN; c++) sum[r][c] += a[r] * b[c];
        }
        __syncthreads();
    }
    for (int r = 0; r < TM; r++)
        *reinterpret_cast<float4*>(&C[(ty * TM + r) * n + tx * TN]) =
            make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}
