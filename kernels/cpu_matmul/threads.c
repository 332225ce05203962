/* Rung 8, threads: groups of rows of C are shared out. All threads read the same panels of B, so they are packed once,
   together; each thread has panels of A of its own, and sets its own rows of C to zero.

   New since five_loops: three lines that begin with #pragma, panels of A for each thread, and groups of rows small
   enough that every thread gets some. */
#include "block.h"
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Returns 0, or 1 if there was no memory for the packed panels (nothing is written then). */
int matmul(const float *A, const float *B, float *C, int64_t m, int64_t n, int64_t k, int threads) {
    int64_t group = min(MC, round_up(m / (2 * threads) + 1, MR)); /* about two groups of rows for each thread */
    float *panels_b = malloc(sizeof(float) * KC * round_up(min(n, NC) + 1, NR));
    float *panels_a = malloc(sizeof(float) * KC * group * threads);
    int failed = !panels_b || !panels_a;
    if (k == 0 && !failed) memset(C, 0, sizeof(float) * m * n); /* an empty sum */
    for (int64_t j0 = 0; j0 < n && !failed; j0 += NC)
        for (int64_t p0 = 0; p0 < k; p0 += KC) {
            int64_t nc = min(NC, n - j0), kc = min(KC, k - p0);
#pragma omp parallel num_threads(threads)
            {
#pragma omp for schedule(static)
                for (int64_t j = 0; j < nc; j += NR)
                    pack_b(B + p0 * n + j0 + j, panels_b + j * kc, n, min(NR, nc - j), kc);
                float *mine = panels_a + omp_get_thread_num() * KC * group;
#pragma omp for schedule(dynamic)
                for (int64_t i0 = 0; i0 < m; i0 += group) {
                    int64_t mc = min(group, m - i0);
                    if (j0 == 0 && p0 == 0) memset(C + i0 * n, 0, sizeof(float) * mc * n);
                    pack_a(A + i0 * k + p0, mine, k, mc, kc);
                    for (int64_t j = 0; j < nc; j += NR)
                        for (int64_t i = 0; i < mc; i += MR)
                            block(kc, mine + i * kc, panels_b + j * kc, C + (i0 + i) * n + j0 + j, n,
                                  min(MR, mc - i), min(NR, nc - j));
                }
            }
        }
    free(panels_b);
    free(panels_a);
    return failed;
}
