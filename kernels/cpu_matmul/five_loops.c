/* Rung 7, five loops: KC steps of a panel of B and MC rows of A are packed at a time, so that what was packed stays in
   the caches until it has been used; see block.h.

   New since panels: three loops around the two, over NC columns, KC steps and MC rows. A block of C is read, added to
   and written once for each KC steps. */
#include "block.h"
#include <stdlib.h>

/* Returns 0, or 1 if there was no memory for the packed panels (nothing is written then). */
int matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k, int threads) {
    float *panels_b = malloc(sizeof(float) * KC * round_up(min(n, NC) + 1, NR));
    float *panels_a = malloc(sizeof(float) * KC * MC);
    int failed = !panels_b || !panels_a;
    if (!failed) memset(C, 0, sizeof(float) * m * n);
    for (int64_t j0 = 0; j0 < n && !failed; j0 += NC)
        for (int64_t p0 = 0; p0 < k; p0 += KC) {
            int64_t nc = min(NC, n - j0), kc = min(KC, k - p0);
            for (int64_t j = 0; j < nc; j += NR)
                pack_b(B + p0 * n + j0 + j, panels_b + j * kc, n, min(NR, nc - j), kc);
            for (int64_t i0 = 0; i0 < m; i0 += MC) {
                int64_t mc = min(MC, m - i0);
                pack_a(A + i0 * k + p0, panels_a, k, mc, kc);
                for (int64_t j = 0; j < nc; j += NR)
                    for (int64_t i = 0; i < mc; i += MR)
                        block(kc, panels_a + i * kc, panels_b + j * kc, C + (i0 + i) * n + j0 + j, n,
                              min(MR, mc - i), min(NR, nc - j));
            }
        }
    free(panels_b);
    free(panels_a);
    (void)threads; /* this rung uses one */
    return failed;
}
