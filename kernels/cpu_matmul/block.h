/* The block of C that stays in vector registers, and the packing that feeds it.

   One step along p costs two vector loads from B and MR numbers from A, and does 2·MR vector multiply-adds. Panels of
   A and B are copied ("packed") into the order in which they are read, so that every load is the next one in memory.
   The rung `registers` takes the sizes alone, `panels` the packing too, `five_loops` and `threads` all.

   The scheme is that of K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), with
   the loops as BLIS orders them. */
#pragma once
#include "vec.h"

#if defined(__AVX512F__)
enum { MR = 12 }; /* 24 accumulators of the 32 registers */
#elif defined(__aarch64__)
enum { MR = 8 }; /* 16 of 32 */
#else
enum { MR = 6 }; /* 12 of 16 */
#endif
/* A block of C has MR rows and NR columns. The five loops pack KC steps along p at a time, of MC rows of A (for L2) and of
   NC columns of B (for L3). One panel of B, KC · NR floats, serves MC / MR blocks in a row: 24 KB with AVX2, which L1
   holds; 48 KB with AVX-512, where many an L1 leaves it to L2. */
enum { NR = 2 * LANES, KC = 384, MC = 16 * MR, NC = 4096 };

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* c[0..mr)[0..nr) += a · b, where a is packed as [p][MR] and b as [p][NR]. The whole block is computed; only the
   part inside C is written. */
static void block(int64_t kc, const float *a, const float *b, float *c, int64_t n, int64_t mr, int64_t nr) {
    vec acc[MR][2] = {{{0}}};
    for (int64_t p = 0; p < kc; p++) {
        vec b0 = load(b + p * NR), b1 = load(b + p * NR + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < MR; i++) {
            vec ai = a[p * MR + i] - (vec){0}; /* one number of A in every lane */
            acc[i][0] = fma_(ai, b0, acc[i][0]);
            acc[i][1] = fma_(ai, b1, acc[i][1]);
        }
    }
    float done[MR][NR];
    memcpy(done, acc, sizeof done);
    for (int64_t i = 0; i < mr; i++)
        for (int64_t j = 0; j < nr; j++) c[i * n + j] += done[i][j];
}

/* Copy rows of A into panels of MR rows: [panel][p][MR], with zeros past the last row. */
static void pack_a(const float *A, float *to, int64_t k, int64_t mc, int64_t kc) {
    for (int64_t i = 0; i < mc; i += MR, to += MR * kc)
        for (int64_t p = 0; p < kc; p++)
            for (int64_t r = 0; r < MR; r++) to[p * MR + r] = i + r < mc ? A[(i + r) * k + p] : 0;
}

/* Copy one panel of NR columns of B: [p][NR], with zeros past the last column. */
static void pack_b(const float *B, float *to, int64_t n, int64_t nr, int64_t kc) {
    for (int64_t p = 0; p < kc; p++)
        for (int64_t c = 0; c < NR; c++) to[p * NR + c] = c < nr ? B[p * n + c] : 0;
}
