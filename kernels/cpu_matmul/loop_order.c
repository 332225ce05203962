/* Rung 3, loop order: p outside, j inside. Now B and C are walked along their rows, one float after another, and the
   compiler can do several j at once, because each has its own sum.

   New since naive: two loops changed places, so C is set to zero first and added to. */
#include <string.h>

void matmul(const float *restrict A, const float *restrict B, float *restrict C, int64_t m, int64_t n, int64_t k,
            int threads) {
    memset(C, 0, sizeof(float) * m * n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < n; j++) C[i * n + j] += A[i * k + p] * B[p * n + j];
    (void)threads; /* this rung uses one */
}
