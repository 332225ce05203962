/* Rung 4, tiles: a tile of B that fits in the cache is used for every row of A before the next tile is fetched.

   New since loop_order: two loops over tiles around the three. */
#include <string.h>
enum { TILE_P = 64, TILE_J = 1024 }; /* a tile of B: 64 × 1024 floats, 256 KB, fits in the second-level cache */

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

void matmul(const float *restrict A, const float *restrict B, float *restrict C, int64_t m, int64_t n, int64_t k,
            int threads) {
    memset(C, 0, sizeof(float) * m * n);
    for (int64_t j0 = 0; j0 < n; j0 += TILE_J)
        for (int64_t p0 = 0; p0 < k; p0 += TILE_P) {
            int64_t j1 = min(j0 + TILE_J, n), p1 = min(p0 + TILE_P, k); /* the last tiles may be smaller */
            for (int64_t i = 0; i < m; i++)
                for (int64_t p = p0; p < p1; p++)
                    for (int64_t j = j0; j < j1; j++) C[i * n + j] += A[i * k + p] * B[p * n + j];
        }
    (void)threads; /* this rung uses one */
}
