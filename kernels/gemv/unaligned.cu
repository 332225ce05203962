/* Rung 5 for rows that begin at any element: gemv.cu, but for how words are cut and what x they meet (unaligned.cuh).

   A block works on ROWS rows that are PERIOD rows apart; PERIOD blocks side by side have PERIOD * ROWS neighbouring
   rows, so that W is still swept through in order. Each has x, or as much of it as a go needs, in shared memory.

   Moves sizeof(T) * rows*cols bytes of W once, and the words between two rows twice. 2*rows*cols flops. Nothing
   outside of W and x is read. Compile with SHAPE. cols is VEC or more, and below 2^30. Launch a block for each group:
   rows / (PERIOD * ROWS) * PERIOD, and for the rows that are left one each, but PERIOD at most. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "unaligned.cuh"

/* The sizes that unaligned_plan.py chooses. */
template <class Sizes, int Goes, bool XFirst, int Blocks> struct Shape : Sizes {
    static constexpr int GOES = Goes;        // in so many a row is read, of THREADS * WORDS words each
    static constexpr bool X_FIRST = XFirst;  // ask for x before W: for ordinary launches only
    static constexpr int BLOCKS = Blocks;    // whose registers shall fit on a multiprocessor
};
#ifndef SHAPE
#define SHAPE Shape<Sizes<__half, 8, 288, 2, 2, 128>, 1, false, 3>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = S::VEC, ROWS = S::ROWS, THREADS = S::THREADS, GO = S::THREADS * S::WORDS;

/* Start to copy 16 bytes, by way of L1. */
__device__ __forceinline__ void copy_async_cached(unsigned to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Words `begin` .. `begin` + GO of x in shared memory, with zeros for what is not of x. */
struct Vector {
    T *to;
    const T *x;
    int begin, cols, whole; // words that lie at an address for one: they are copied as such

    __device__ __forceinline__ Vector(T *to, const T *x, int begin, int cols)
        : to(to), x(x), begin(begin), cols(cols),
          whole(reinterpret_cast<unsigned long long>(x) % 16 ? 0 : (unsigned)cols / VEC) {}
    /* Start with the whole words. */
    __device__ __forceinline__ void copy_words(int t) const {
#pragma unroll
        for (int k = 0; k <= S::WORDS; k++) {
            const int q = k * THREADS + t;
            if (q <= GO && (unsigned)(begin + q) < whole)
                copy_async_cached(shared_address(to + q * VEC), x + (begin + q) * VEC);
        }
        copy_async_commit();
    }
    /* The rest, a thread for each element: one thread for all of a word would take eight times as long. */
    __device__ __forceinline__ void copy_rest(int t) const {
#pragma unroll
        for (int i = t; i < S::LINE / 16 * VEC; i += THREADS)
            if (i < -begin * VEC) to[i] = T(0.f);
#pragma unroll 4
        for (int i = max(whole - begin, 0) * VEC + t; i < (GO + 1) * VEC; i += THREADS) {
            const int c = begin * VEC + i;
            if (c >= 0) to[i] = c < cols ? x[c] : T(0.f);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, S::BLOCKS)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    __shared__ uint4 shared[GO + 1 + 2];
    T *const x_words = reinterpret_cast<T *>(shared), *const fringe_words = x_words + (GO + 1) * VEC;
    __shared__ float sums[ROWS][THREADS / 32];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    let_next_kernel_start();
    const RowGroup<S> group(W, rows, cols, blockIdx.x);
    Fringe<S> fringe;
    float sum[ROWS] = {};
#pragma unroll 1
    for (int begin = 0; begin < S::GOES * GO; begin += GO) {
        if (begin > 0) __syncthreads(); // the x of the last go has been read
        const Vector vector(x_words, x, begin - group.first_whole(), cols);
        if constexpr (S::X_FIRST) vector.copy_words(t);
        // 1. ask for weights
        Word<T, VEC> w[ROWS][S::WORDS] = {};
        group.each_word(begin + t, [&](int r, int k, const T *from, bool there) {
            if (there) w[r][k] = load_word_streaming<VEC>(from);
        });
        if (begin == 0) fringe.load(group, t);
        // 2. wait for the kernel ahead, 3. read x
        wait_for_previous_kernel();
        if constexpr (!S::X_FIRST) vector.copy_words(t);
        vector.copy_rest(t);
        if (begin == 0) fringe.store(fringe_words, t);
        copy_async_wait<0>();
        __syncthreads();
        // 4. multiply
        add_products<S>(sum, w, x_words + t * VEC, fringe_words, group, begin + t);
    }
    // 5. add up the lanes' sums, then the warps'
    const float total = warp_sums(sum, lane);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS)][warp] = total;
    __syncthreads();
    if (t < ROWS && group.has(t)) {
        float s = 0;
#pragma unroll
        for (int v = 0; v < THREADS / 32; v++) s += sums[t][v];
        y[group.first + t * S::PERIOD] = (T)s;
    }
}
