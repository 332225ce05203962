/* Rung 5 for rows that begin at any element. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "unaligned.cuh"

template <typename Type, int Period, int Threads, int Words, int Rows, int Line, bool XFirst, int Blocks, bool OneGo> struct Shape {
    using T = Type;
    static constexpr int PERIOD = Period, THREADS = Threads, WORDS = Words, ROWS = Rows, LINE = Line, BLOCKS = Blocks;
    static constexpr bool X_FIRST = XFirst, ONE_GO = OneGo;
};
#ifndef SHAPE
#define SHAPE Shape<__half, 8, 288, 2, 4, 128, false, 3, true>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = 16 / sizeof(T), THREADS = S::THREADS, WORDS = S::WORDS, ROWS = S::ROWS, PERIOD = S::PERIOD;
constexpr int GO = THREADS * WORDS;

extern "C" __global__ void __launch_bounds__(THREADS, S::BLOCKS)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    __shared__ uint4 x_words[GO + 1];
    __shared__ float sums[ROWS][THREADS / 32];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const long long first = (long long)(blockIdx.x / PERIOD) * (PERIOD * ROWS) + blockIdx.x % PERIOD;
    const T *const start = W + first * cols;
    const Row<T, S::LINE> row(start, cols);
    // the block's rows, and whether the last one is the matrix's
    const unsigned below = (unsigned)min(rows - 1 - first, (long long)PERIOD * ROWS);
    const int here = min(ROWS, below / PERIOD + 1), last = below < PERIOD * ROWS && below % PERIOD == 0 ? below / PERIOD : ROWS;
    float sum[ROWS] = {};
    let_next_kernel_start();

    // words that reach out of the matrix, element by element
    T head = T(0.f), tail = T(0.f);
    if (first == 0 && t < row.head()) head = W[t];
    if (last < ROWS && t < row.tail()) tail = start[(long long)last * PERIOD * cols + cols - row.tail() + t];

    for (int begin = 0; S::ONE_GO ? begin == 0 : begin < row.last(); begin += GO) {
        const int x_begin = begin - (int)row.first_whole();
        if (begin > 0) __syncthreads(); // x has been read
        if constexpr (S::X_FIRST) copy_x<GO + 1, THREADS>(x_words, x, x_begin, cols);
        // 1. ask for weights
        uint4 w[ROWS][WORDS] = {};
        const uint4 *from = reinterpret_cast<const uint4 *>(start - row.lead) + begin + t;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int low = r == 0 && first == 0 ? row.first_whole() : row.first();
            const int high = r >= here ? 0 : r == last ? row.last_whole() : row.last();
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                if (begin + k * THREADS + t >= low && begin + k * THREADS + t < high)
                    w[r][k] = load_streaming(from + k * THREADS);
            from += PERIOD * (long long)cols / VEC;
        }
        // 2. wait for the kernel ahead, 3. read x
        wait_for_previous_kernel();
        if constexpr (!S::X_FIRST) copy_x<GO + 1, THREADS>(x_words, x, x_begin, cols);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        // 4. multiply
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int j = k * THREADS + t, c = (begin + j) * VEC - row.lead;
            const Word<T, VEC> x_word = shifted<T>(x_words[j], x_words[j + 1], row.head() * sizeof(T));
            auto words = [&](int r) -> Word<T, VEC> & { return reinterpret_cast<Word<T, VEC> &>(w[r][k]); };
            if (c < 0 || c + VEC > cols)
#pragma unroll
                for (int r = 0; r < ROWS; r++) keep_columns(words(r), c, cols);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[r] += element(words(r), i) * element(x_word, i);
        }
    }
    if (first == 0 && t < row.head()) sum[0] += (float)head * (float)x[t];
    if (last < ROWS && t < row.tail())
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r == last) sum[r] += (float)tail * (float)x[cols - row.tail() + t];
    // 5. add up the lanes' sums, then the warps'
    const float total = warp_sums(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < here) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++) s += sums[t][v];
        y[first + t * PERIOD] = (T)s;
    }
}
