/* Rung 5, registers: a block of C stays in vector registers while p runs over all its steps. A and B are read where
   they lie. MR, NR and min are block.h's.

   New since tiled: the block, and vector instructions written by hand. */
#include "block.h"

/* c[0..MR)[0..NR) = a · b, where rows of A lie k floats apart, and rows of B and of C n. */
static void block_in_place(int64_t k, const float *a, const float *b, float *c, int64_t n) {
    vec acc[MR][2] = {{{0}}};
    for (int64_t p = 0; p < k; p++) {
        vec b0 = load(b + p * n), b1 = load(b + p * n + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            vec ai = a[i * k + p] - (vec){0}; /* one number of A in every lane */
            acc[i][0] = fma_(ai, b0, acc[i][0]);
            acc[i][1] = fma_(ai, b1, acc[i][1]);
        }
    }
    for (int i = 0; i < MR; i++) memcpy(c + i * n, acc[i], sizeof acc[i]);
}

/* For a C that is smaller than one block. */
static void small(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k) {
    memset(C, 0, sizeof(float) * m * n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < n; j++) C[i * n + j] += A[i * k + p] * B[p * n + j];
}

void matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k, int threads) {
    if (m < MR || n < NR)
        small(A, B, C, m, n, k);
    else
        for (int64_t j = 0; j < n; j += NR)
            for (int64_t i = 0; i < m; i += MR) {
                int64_t row = min(i, m - MR), column = min(j, n - NR); /* the last blocks lie over their neighbours */
                block_in_place(k, A + row * k, B + column, C + row * n + column, n);
            }
    (void)threads; /* this rung uses one */
}
