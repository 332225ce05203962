/* Rung 5 for rows that begin at any element. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "unaligned.cuh"

template <typename Type, int Period, int Threads, int Words, int Rows, int Line, bool XFirst, int Blocks> struct Shape {
    using T = Type;
    static constexpr int PERIOD = Period, THREADS = Threads, WORDS = Words, ROWS = Rows, LINE = Line, BLOCKS = Blocks;
    static constexpr bool X_FIRST = XFirst;
};
#ifndef SHAPE
#define SHAPE Shape<__half, 8, 288, 2, 4, 128, false, 3>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = 16 / sizeof(T), THREADS = S::THREADS, WORDS = S::WORDS, ROWS = S::ROWS, PERIOD = S::PERIOD;
constexpr int GO = THREADS * WORDS;

extern "C" __global__ void __launch_bounds__(THREADS, S::BLOCKS)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    __shared__ uint4 x_words[GO + 1];
    __shared__ float sums[ROWS][THREADS / 32];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const long long first = (long long)(blockIdx.x / PERIOD) * (PERIOD * ROWS) + blockIdx.x % PERIOD;
    const long long pitch = PERIOD * cols / VEC; // words between two rows
    const Row<T, S::LINE> row(W + first * cols, cols);
    const int shift = row.head(); // of x against the rows, in elements
    float sum[ROWS] = {};
    let_next_kernel_start();

    // words that reach out of the matrix, element by element
    const long long has = (rows - 1 - first) / PERIOD; // the last row's number in this block, if it is here
    const bool has_last = (rows - 1 - first) % PERIOD == 0 && has < ROWS;
    T head = T(0), tail = T(0);
    if (first == 0 && t < row.head()) head = W[t];
    if (has_last && t < row.tail()) tail = W[rows * cols - row.tail() + t];

    for (long long begin = 0; begin * VEC < row.end; begin += GO) {
        const long long x_begin = begin - row.lead / VEC - (shift > 0);
        if (begin > 0) __syncthreads(); // x has been read
        if constexpr (S::X_FIRST) copy_x<GO + 1, THREADS>(x_words, x, x_begin, cols);
        // 1. ask for weights
        Word<T, VEC> w[ROWS][WORDS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++) {
                const long long j = begin + k * THREADS + t;
                if (first + r * PERIOD < rows && j >= row.first(r == 0 && first == 0) && j < row.last(has_last && r == has)) {
                    const uint4 found = load_streaming(row.words + r * pitch + j);
                    w[r][k].bits[0] = found.x, w[r][k].bits[1] = found.y, w[r][k].bits[2] = found.z, w[r][k].bits[3] = found.w;
                }
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
            const int j = k * THREADS + t;
            const long long c = (begin + j) * VEC - row.lead;
            const Word<T, VEC> x_word = shifted<T>(x_words[j], x_words[j + 1], shift * sizeof(T));
            if (c < 0 || c + VEC > cols)
#pragma unroll
                for (int r = 0; r < ROWS; r++) keep_columns(w[r][k], c, cols);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[r] += element(w[r][k], i) * element(x_word, i);
        }
    }
    if (first == 0 && t < row.head()) sum[0] += (float)head * (float)x[t];
    if (has_last && t < row.tail())
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r == has) sum[r] += (float)tail * (float)x[cols - row.tail() + t];
    // 5. add up the lanes' sums, then the warps'
    const float total = warp_sums(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < ROWS && first + t * PERIOD < rows) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++) s += sums[t][v];
        y[first + t * PERIOD] = (T)s;
    }
}
