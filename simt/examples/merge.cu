// Two sorted arrays into one: each thread finds where its part of the result begins ("merge path"), then merges it.

__device__ int co_rank(int k, const int* A, int m, const int* B, int n) {
    int i = k < m ? k : m, j = k - i;
    int i_low = k > n ? k - n : 0, j_low = k > m ? k - m : 0;
    while (true) {
        if (i > 0 && j < n && A[i - 1] > B[j]) {
            int delta = (i - i_low + 1) >> 1;
            j_low = j;
            j += delta;
            i -= delta;
        } else if (j > 0 && i < m && B[j - 1] >= A[i]) {
            int delta = (j - j_low + 1) >> 1;
            i_low = i;
            i += delta;
            j -= delta;
        } else {
            return i;
        }
    }
}

__device__ void merge_sequential(const int* A, int m, const int* B, int n, int* C) {
    int i = 0, j = 0, k = 0;
    while (i < m && j < n) C[k++] = A[i] <= B[j] ? A[i++] : B[j++];
    while (i < m) C[k++] = A[i++];
    while (j < n) C[k++] = B[j++];
}

__global__ void merge(const int* A, int m, const int* B, int n, int* C, int per_thread) {
    int tid = blockIdx.x * blockDim.x + threadIdx.x;
    int k0 = min(tid * per_thread, m + n), k1 = min((tid + 1) * per_thread, m + n);
    int i0 = co_rank(k0, A, m, B, n), i1 = co_rank(k1, A, m, B, n);
    merge_sequential(A + i0, i1 - i0, B + k0 - i0, (k1 - i1) - (k0 - i0), C + k0);
}
