/* Rung 6, panels: before anything is multiplied, A and B are copied ("packed") into the order in which the block asks
   for their numbers: pack_a, pack_b and block are in block.h.

   New since registers: the copies. A block at the edge of C is computed whole, with zeros, and written as far as it
   lies in C. */
#include "block.h"
#include <stdlib.h>

/* Returns 0, or 1 if there was no memory for the packed panels (nothing is written then). */
int matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k, int threads) {
    float *panels_a = malloc(sizeof(float) * (k + 1) * round_up(m + 1, MR));
    float *panels_b = malloc(sizeof(float) * (k + 1) * round_up(n + 1, NR));
    int failed = !panels_a || !panels_b;
    if (!failed) {
        pack_a(A, panels_a, k, m, k);
        for (int64_t j = 0; j < n; j += NR) pack_b(B + j, panels_b + j * k, n, min(NR, n - j), k);
        memset(C, 0, sizeof(float) * m * n);
        for (int64_t j = 0; j < n; j += NR)
            for (int64_t i = 0; i < m; i += MR)
                block(k, panels_a + i * k, panels_b + j * k, C + i * n + j, n, min(MR, m - i), min(NR, n - j));
    }
    free(panels_b);
    free(panels_a);
    (void)threads; /* this rung uses one */
    return failed;
}
