/* Rung 5, gemv: a block works on ROWS neighbouring rows at once. Each of its threads owns WORDS
   words of every row, so a word of x, loaded once, serves ROWS words of W; and all ROWS * WORDS
   loads of a thread are under way together. Blocks of 256 threads, three or more to a
   multiprocessor, keep about 96 KB in flight on each, W and x. Their loads sweep through W in order, which
   DRAM likes best, and a block that ends makes room for the next while its neighbours go on
   loading.

   New since vector:
   - ROWS rows a block instead of one a warp, added up in two steps: over the lanes (warp_sums), then
     over the warps.
   - W is read past L1, so that x stays there for the blocks to come.

   Rung 6 is the same file, launched as a dependent (PDL): weights do not depend on the kernel before
   this one, so they are asked for while it still runs (1); after the wait (2) x may be read (3), and
   y be written. In an ordinary launch the wait is over at once, and x is there from the start: at
   some shapes it pays to ask for it first (X_FIRST=1, for ordinary launches only).

   Moves sizeof(T) * rows*cols bytes of W once; x comes from L1 or L2. 2*rows*cols flops.
   Compile with DTYPE, VEC (elements in a word of at most 16 bytes; cols and both addresses are
   multiples of it), WORDS (of a row, for each thread), ROWS (a power of two) and X_FIRST.
   Launch ceil(rows / ROWS) blocks of at most 256 threads, a multiple of 32. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "../device/words.cuh"
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
#ifndef VEC
#define VEC (16 / sizeof(DTYPE))
#endif
#ifndef WORDS
#define WORDS 2
#endif
#ifndef ROWS
#define ROWS 4
#endif
#ifndef X_FIRST
#define X_FIRST 0
#endif
using T = DTYPE;
constexpr int THREADS = 256; // at most

/* A thread's words of x: every threads-th one, as far as the row goes. */
__device__ __forceinline__ void load_x(Word<T, VEC> (&x_words)[WORDS], const T *from, int left, int threads) {
#pragma unroll
    for (int k = 0; k < WORDS; k++)
        if (k * threads < left) x_words[k] = load_word<VEC>(from + k * threads * VEC);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    __shared__ float sums[ROWS][THREADS / 32];
    const int t = threadIdx.x, threads = blockDim.x, lane = t % 32, warp = t / 32;
    const long long first = (long long)blockIdx.x * ROWS, words = cols / VEC;
    float sum[ROWS] = {};
    let_next_kernel_start();
    for (long long begin = 0; begin < words; begin += threads * WORDS) { // once, unless the rows are very long
        const T *w_from = W + first * cols + (begin + t) * VEC, *x_from = x + (begin + t) * VEC;
        // words of the row from the thread's first on, or as many as it may get to
        const int left = words - begin - t > threads * WORDS ? threads * WORDS : words - begin - t;
        Word<T, VEC> w[ROWS][WORDS] = {}, x_words[WORDS] = {}; // zeros past the end
        if constexpr (X_FIRST) load_x(x_words, x_from, left, threads);
        // 1. ask for weights
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                if (first + r < rows && k * threads < left)
                    w[r][k] = load_word_streaming<VEC>(w_from + r * cols + k * threads * VEC);
        // 2. wait for the kernel ahead, 3. read x
        wait_for_previous_kernel();
        if constexpr (!X_FIRST) load_x(x_words, x_from, left, threads);
        // 4. multiply
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[r] += element(w[r][k], i) * element(x_words[k], i);
    }
    // 5. add up the lanes' sums, then the warps'
    const float total = warp_sums(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < ROWS && first + t < rows) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++)
            if (v < threads / 32) s += sums[t][v];
        y[first + t] = (T)s;
    }
}
