/* Rung 5 for rows that begin at any element: gemv.cu, but for how words are cut and what x they meet (unaligned.cuh).

   A block works on ROWS rows that are PERIOD rows apart; PERIOD blocks side by side have PERIOD * ROWS neighbouring
   rows, so that W is still swept through in order.

   Moves sizeof(T) * rows*cols bytes of W once, and the words between two rows twice. 2*rows*cols flops. Nothing
   outside of W and x is read. Compile with SHAPE. cols is VEC or more, and below 2^30. Launch a block for each group:
   rows / (PERIOD * ROWS) * PERIOD, and for the rows that are left one each, but PERIOD at most. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "unaligned.cuh"

/* The sizes that unaligned_plan.py chooses. */
template <class Sizes, int Goes, int Blocks, typename Multiply> struct Shape : Sizes {
    using Product = Multiply;             // MultiplyAdds or TensorCores
    static constexpr int GOES = Goes;     // in so many a row is read, of THREADS * WORDS words each
    static constexpr int BLOCKS = Blocks; // whose registers shall fit on a multiprocessor
};
#ifndef SHAPE
#define SHAPE Shape<Sizes<__half, 8, 288, 2, 2>, 1, 3, TensorCores>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = S::VEC, ROWS = S::ROWS, WORDS = S::WORDS, THREADS = S::THREADS, PERIOD = S::PERIOD;

extern "C" __global__ void __launch_bounds__(THREADS, S::BLOCKS)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    __shared__ float sums[ROWS][THREADS / 32];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    let_next_kernel_start();
    const long long first = (long long)(blockIdx.x / PERIOD) * (PERIOD * ROWS) + blockIdx.x % PERIOD; // row
    const int rest = (int)min(rows - first, PERIOD * ROWS + 1ll); // rows from there on, as many as matter
    const int left = min((rest + PERIOD - 1) / PERIOD, ROWS);      // of the group
    const bool begins = first == 0, ends = rest - 1 == (left - 1) * PERIOD; // has the matrix's first, its last row
    const T *const start = W + first * cols;
    Fringe<S> fringe;
    float sum[ROWS] = {};
#pragma unroll 1
    for (int go = 0; go < S::GOES; go++) {
        const Columns<S> columns(start, cols, go * WORDS * THREADS + t);
        VectorWords<S> x_words;
        // 1. ask for weights
        Word<T, VEC> w[ROWS][WORDS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                if (r < left && columns.has(k, begins && r == 0, ends && r == left - 1))
                    w[r][k] = load_word_streaming<VEC>(start + (long long)r * PERIOD * cols + columns.column(k));
        if (go == 0) fringe.load(begins ? W : nullptr, ends ? W + rows * cols : nullptr, lane);
        // 2. wait for the kernel ahead, 3. read x
        wait_for_previous_kernel();
        x_words.load_whole(x, columns);
        x_words.load_parts(x, columns);
        // 4. multiply
        fringe.put(w, columns, begins, ends ? left - 1 : -1);
        Word<T, VEC> x_own[WORDS];
#pragma unroll
        for (int k = 0; k < WORDS; k++) x_own[k] = x_words.word(k);
        OwnBits<S>(columns).keep(w);
        S::Product::add(sum, w, x_own, lane);
    }
    // 5. add up the lanes' sums, then the warps'
    const float total = warp_sums(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < left) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++) s += sums[t][v];
        y[first + t * PERIOD] = (T)s;
    }
}
