/* Rung 2, naive C: the same three loops, compiled.

   The inner loop walks down a column of B: every step jumps n floats ahead, into another cache line. */
void matmul(const float *restrict A, const float *restrict B, float *restrict C, int64_t m, int64_t n, int64_t k,
            int threads) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float acc = 0;
            for (int64_t p = 0; p < k; p++) acc += A[i * k + p] * B[p * n + j];
            C[i * n + j] = acc;
        }
    (void)threads; /* this rung uses one */
}
