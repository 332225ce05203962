/* What can this machine do at most? Three loops that do nothing but read, copy, or multiply-and-add. */

#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, CHAINS = 16 };
#elif defined(__AVX__)
enum { LANES = 8, CHAINS = 10 };
#elif defined(__aarch64__)
enum { LANES = 4, CHAINS = 16 };
#else
enum { LANES = 4, CHAINS = 10 };
#endif
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint64_t words __attribute__((vector_size(LANES * 4), aligned(8)));

enum { BLOCK = 1 << 17, STREAMS = 4 }; /* words of 8 bytes: a thread takes 1 MB at a time, as four streams */

/* Read n words and add them up: the sum is returned so that the compiler cannot drop the reads.
   Each thread walks four streams at once: that keeps more requests to the memory under way than one stream does. */
uint64_t read_all(const uint64_t *data, int64_t n, int threads) {
    uint64_t total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : total)
    for (int64_t block = 0; block < n / BLOCK; block++) {
        const uint64_t *p = data + block * BLOCK;
        words sum[STREAMS] = {{0}};
        for (int64_t i = 0; i < BLOCK / STREAMS; i += LANES / 2)
            for (int s = 0; s < STREAMS; s++) sum[s] += *(const words *)(p + s * (BLOCK / STREAMS) + i);
        sum[0] += sum[1] + sum[2] + sum[3];
        for (int lane = 0; lane < LANES / 2; lane++) total += sum[0][lane];
    }
    return total;
}

/* Copy n words, each thread its own part. */
void copy_all(const uint64_t *from, uint64_t *to, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < n / BLOCK; block++)
        memcpy(to + block * BLOCK, from + block * BLOCK, BLOCK * sizeof *to);
}

/* Multiply and add in registers only: `threads` times `steps` times CHAINS vectors of LANES floats. The work is given,
   not the threads: a system that grants fewer takes longer. One multiply-add must wait for the one before it in its
   chain, so it takes many chains to keep the unit busy. */
float multiply_add(int64_t steps, int threads) {
    float total = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : total)
    for (int thread = 0; thread < threads; thread++) {
        floats chain[CHAINS], by = {0}, plus = {0};
        by += 0.999f, plus += 0.001f;
        for (int c = 0; c < CHAINS; c++) chain[c] = by + (float)c;
        for (int64_t step = 0; step < steps; step++)
#pragma GCC unroll 16
            for (int c = 0; c < CHAINS; c++) chain[c] = chain[c] * by + plus;
        for (int c = 0; c < CHAINS; c++)
            for (int lane = 0; lane < LANES; lane++) total += chain[c][lane];
    }
    return total;
}

int lanes_times_chains(void) { return LANES * CHAINS; }
