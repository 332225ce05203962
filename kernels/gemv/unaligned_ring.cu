/* Rung 7 for rows that begin at any element: ring.cu with MultiplyAdds, but for how words are cut and what x they
   meet (unaligned.cuh). x stands in shared memory, behind the ring, whole: each group of rows meets it at another
   place.

   Moves the bytes of W once, and the words between two rows twice; each block reads x once. Compile with SHAPE, where
   THREADS * WORDS words hold a row. cols is VEC or more, and below 2^30. Launch at most as many blocks as there are
   groups (unaligned.cu). Shared memory: [STAGES][ROWS][WORDS][THREADS] words, X_WORDS and 2 words, and then
   [rows of a block, in whole groups][PITCH] floats. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "../device/ring.cuh"
#include "unaligned.cuh"

/* The sizes that unaligned_plan.py chooses. */
template <class Sizes, int Stages, int StagesBeforeX> struct Shape : Sizes {
    static constexpr int STAGES = Stages;                 // groups that the ring holds
    static constexpr int STAGES_BEFORE_X = StagesBeforeX; // as in ring.cu
};
#ifndef SHAPE
#define SHAPE Shape<Sizes<__half, 8, 544, 1, 8, 128>, 3, 2>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = S::VEC, ROWS = S::ROWS, WORDS = S::WORDS, THREADS = S::THREADS;
constexpr int WARPS = THREADS / 32, PITCH = WARPS | 1;                   // odd, so that 32 rows' sums lie in 32 banks
constexpr int BEFORE_X = S::LINE / 16, X_WORDS = BEFORE_X + THREADS * WORDS + 1; // zeros in front of x; all
constexpr int SLOT = ROWS * WORDS * THREADS * VEC;                       // elements
using Words = Word<T, VEC>[ROWS][WORDS];                                 // a thread's words of a group of rows

/* The block's groups, one after another. */
struct GroupStream {
    const T *W;
    long long rows;
    int cols, groups, next; // groups in all; the one to be asked for
    T *slots;               // the thread's place in the ring
    CachePolicy once;       // W is read once
    CopyRing<S::STAGES> ring;

    __device__ __forceinline__ GroupStream(const T *W, long long rows, int cols, T *shared)
        : W(W), rows(rows), cols(cols), next(blockIdx.x), slots(shared + threadIdx.x * VEC), once(evict_first()) {
        constexpr int SPAN = S::PERIOD * ROWS; // rows of PERIOD groups
        groups = (int)(rows / SPAN) * S::PERIOD + min(S::PERIOD, (int)(rows % SPAN));
    }
    __device__ __forceinline__ RowGroup<S> group(unsigned number) const { return {W, rows, cols, number}; }
    __device__ __forceinline__ void load_first(Words &w) {
        group(next).each_word(threadIdx.x, [&](int r, int k, const T *from, bool there) {
            if (there) w[r][k] = load_word_streaming<VEC>(from);
        });
        next += gridDim.x;
    }
    __device__ __forceinline__ void prefetch(int slot) {
        if (next < groups) {
            const unsigned to = shared_address(slots + slot * SLOT);
            group(next).each_word(threadIdx.x, [&](int r, int k, const T *from, bool there) {
                if (there) copy_async(to + (r * WORDS + k) * THREADS * 16, from, once);
            });
            next += gridDim.x;
        }
        ring.filled(); // with nothing, too
    }
    /* The next group, and in its place the one that comes STAGES later. */
    __device__ __forceinline__ void take(Words &w, const RowGroup<S> &group) {
        const T *from = slots + ring.wait_full() * SLOT;
        group.each_word(threadIdx.x, [&](int r, int k, const T *, bool there) {
            w[r][k] = there ? load_word<VEC>(from + (r * WORDS + k) * THREADS * VEC) : Word<T, VEC>{};
        });
        prefetch(ring.slot);
        ring.advance();
    }
};

__device__ __forceinline__ void store_word(T *to, const Word<T, VEC> &word) {
    *reinterpret_cast<uint4 *>(to) = reinterpret_cast<const uint4 &>(word);
}

/* x on its way to shared memory, from word -BEFORE_X on: zeros stand around it. */
struct Vector {
    const T *x;
    int cols, whole;             // words, to be copied as such; elements have a thread each
    Word<T, VEC> found[WORDS];
    T rest;

    __device__ __forceinline__ Vector(const T *x, int cols)
        : x(x), cols(cols), whole(reinterpret_cast<unsigned long long>(x) % 16 ? 0 : cols / VEC) {}
    __device__ __forceinline__ void load(int t) {
#pragma unroll
        for (int k = 0; k < WORDS; k++)
            if (k * THREADS + t < whole) found[k] = load_word<VEC>(x + (k * THREADS + t) * VEC);
        if (whole * VEC + t < cols) rest = x[whole * VEC + t];
    }
    __device__ __forceinline__ void store(T *to, int t) const {
#pragma unroll
        for (int k = 0; k < WORDS; k++)
            if (k * THREADS + t < whole) store_word(to + (k * THREADS + t) * VEC, found[k]);
        static_assert(BEFORE_X * VEC <= THREADS);
        if (t < BEFORE_X * VEC) to[t - BEFORE_X * VEC] = T(0.f);
        if (whole * VEC + t < cols) to[whole * VEC + t] = rest;
        for (int c = whole * VEC + t + THREADS; c < cols; c += THREADS) to[c] = x[c]; // where x is not at a word
        for (int c = cols + t; c < (X_WORDS - BEFORE_X) * VEC; c += THREADS) to[c] = T(0.f);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    extern __shared__ uint4 shared[];
    T *const ring = reinterpret_cast<T *>(shared), *const x_home = ring + S::STAGES * SLOT;
    T *const x_words = x_home + BEFORE_X * VEC, *const fringe_words = x_home + X_WORDS * VEC;
    auto sums = reinterpret_cast<float (*)[PITCH]>(fringe_words + 2 * VEC); // [rows][PITCH]
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, blocks = gridDim.x;
    let_next_kernel_start();

    // 1. ask for weights: the first group into registers, the next into the ring
    GroupStream weights(W, rows, cols, ring);
    Words w = {};
    weights.load_first(w);
    const int last = (int)((rows - 1) / (S::PERIOD * ROWS)) * S::PERIOD + (int)((rows - 1) % S::PERIOD); // group
    Fringe<S> fringe;
    if (blockIdx.x == 0) fringe.load(weights.group(0), t);
    if (blockIdx.x == last % blocks) fringe.load(weights.group(last), t);
#pragma unroll 1
    for (int slot = 0; slot < S::STAGES_BEFORE_X; slot++) weights.prefetch(slot);

    // 2. wait for the kernel ahead, 3. read x
    wait_for_previous_kernel();
    Vector vector(x, cols);
    vector.load(t);
#pragma unroll
    for (int slot = S::STAGES_BEFORE_X; slot < S::STAGES; slot++) weights.prefetch(slot); // behind x
    vector.store(x_words, t);
    fringe.store(fringe_words, t);
    __syncthreads();

    // 4. multiply
    float *to = &sums[lane / (32 / ROWS)][warp];
#pragma unroll 1
    for (int number = blockIdx.x; number < weights.groups; number += blocks) {
        const RowGroup<S> group = weights.group(number);
        if (number != blockIdx.x) weights.take(w, group); // the first is in registers
        float sum[ROWS] = {};
        add_products<S>(sum, w, x_words + (t - group.first_whole()) * VEC, fringe_words, group, t);
        const float total = warp_sums(sum, lane);
        if (lane % (32 / ROWS) == 0) *to = total;
        to += ROWS * PITCH;
    }

    // 5. add up the warps' sums
    __syncthreads();
    const int owned = (weights.groups - (int)blockIdx.x + blocks - 1) / blocks * ROWS; // rows
    for (int l = t; l < owned; l += THREADS) {
        const long long row = RowGroup<S>::first_row(l / ROWS * blocks + blockIdx.x) + l % ROWS * S::PERIOD;
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[l][v];
        if (row < rows) y[row] = (T)total;
    }
}
