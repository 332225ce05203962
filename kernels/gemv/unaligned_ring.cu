/* Rungs 7 and 8 for rows that begin at any element: ring.cu, but for how words are cut and what x they meet
   (unaligned.cuh). A block has rows of one phase only, which is the number of the row modulo PERIOD: so what a thread
   needs of x is the same for all of them, and stays in registers.

   Moves the bytes of W once (some rows twice if ROWS does not divide a phase's rows), and the words between two rows
   twice; each block reads x once. Compile with SHAPE, where THREADS * WORDS words hold a row. cols is VEC or more, and
   below 2^30. Launch PERIOD blocks or more, each of which has a group of rows, where a phase has ROWS rows or more.
   Shared memory: [STAGES][ROWS][WORDS][THREADS] words, and then [rows of a block, in whole groups][PITCH] floats. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "../device/ring.cuh"
#include "unaligned.cuh"

/* The sizes that unaligned_plan.py chooses, and what multiplies. */
template <class Sizes, int Stages, int StagesBeforeX, typename Multiply = TensorCores> struct Shape : Sizes {
    using Product = Multiply;
    static constexpr int STAGES = Stages;                 // groups that the ring holds
    static constexpr int STAGES_BEFORE_X = StagesBeforeX; // as in ring.cu
};
#ifndef SHAPE
#define SHAPE Shape<Sizes<__half, 8, 544, 1, 8>, 3, 2>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = S::VEC, ROWS = S::ROWS, WORDS = S::WORDS, THREADS = S::THREADS, PERIOD = S::PERIOD;
constexpr int WARPS = THREADS / 32, PITCH = WARPS | 1; // odd, so that 32 rows' sums lie in 32 banks
constexpr int SLOT = ROWS * WORDS * THREADS * VEC;     // elements
using Group = Word<T, VEC>[ROWS][WORDS];               // a thread's words of a group of rows

/* Start to copy 16 bytes, or as many zeros: the address need not be one, then. */
__device__ __forceinline__ void copy_async_or_zero(unsigned to, const void *from, CachePolicy policy, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0), "l"(policy) : "memory");
#else
    copy_async_or_zero(to, from, there);
#endif
}

/* The block's rows are one phase's: row r of the phase is row `phase` + r * PERIOD of the matrix. Every `blocks`-th
   group of ROWS of them is the block's. */
struct RowStream {
    const T *from; // the thread's first word of row 0 of the phase
    long long stride; // elements between two rows of the phase
    Columns<S> columns;
    int phase, count, groups, blocks, next; // rows and groups of the phase; its blocks; the group to be asked for
    bool begins, ends;                      // the phase has the matrix's first, its last row
    T *slots;                               // the thread's place in the ring
    CachePolicy once;                       // W is read once
    CopyRing<S::STAGES> ring;

    __device__ __forceinline__ RowStream(const T *W, long long rows, int cols, T *shared)
        : stride((long long)PERIOD * cols), columns(W + (long long)(blockIdx.x % PERIOD) * cols, cols, threadIdx.x),
          phase(blockIdx.x % PERIOD), count(((unsigned)rows - phase + PERIOD - 1) / PERIOD),
          groups((unsigned)(count + ROWS - 1) / ROWS), blocks((gridDim.x - phase + PERIOD - 1) / PERIOD),
          next(blockIdx.x / PERIOD), begins(phase == 0), ends(phase + (count - 1) * PERIOD == (int)rows - 1),
          slots(shared + threadIdx.x * VEC), once(evict_first()) {
        from = W + (long long)phase * cols + columns.first;
    }
    /* The last group is the last ROWS rows: some may be in the one before too. */
    __device__ __forceinline__ int first_row(int group) const { return min(group * ROWS, count - ROWS); }
    __device__ __forceinline__ bool has_first(int group) const { return begins && group == 0; }
    __device__ __forceinline__ bool has_last(int group) const { return ends && group == groups - 1; }
    /* The thread's, of the group's first row. The compiler shall add `stride` to it, and not multiply for each row. */
    __device__ __forceinline__ const T *first_word(int group) const {
        const T *word = from + first_row(group) * stride;
        asm("" : "+l"(word));
        return word;
    }
    __device__ __forceinline__ void load_first(Group &w) {
        const T *row = first_word(next);
        const bool first = has_first(next), last = has_last(next);
#pragma unroll
        for (int r = 0; r < ROWS; r++, row += stride)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                if (columns.has(k, first && r == 0, last && r == ROWS - 1))
                    w[r][k] = load_word_streaming<VEC>(row + k * THREADS * VEC);
        next += blocks;
    }
    __device__ __forceinline__ void prefetch(int slot) {
        if (next < groups) {
            const T *row = first_word(next);
            const unsigned to = shared_address(slots + slot * SLOT);
            const bool first = has_first(next), last = has_last(next);
#pragma unroll
            for (int r = 0; r < ROWS; r++, row += stride)
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    copy_async_or_zero(to + (r * WORDS + k) * THREADS * 16, row + k * THREADS * VEC, once,
                                       columns.has(k, first && r == 0, last && r == ROWS - 1));
            next += blocks;
        }
        ring.filled(); // with nothing, too
    }
    /* The group whose turn it is, and in its place the one that comes STAGES later. */
    __device__ __forceinline__ void take(Group &w) {
        const T *at = slots + ring.wait_full() * SLOT;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++) w[r][k] = load_word<VEC>(at + (r * WORDS + k) * THREADS * VEC);
        prefetch(ring.slot);
        ring.advance();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    extern __shared__ uint4 shared[];
    T *const slots = reinterpret_cast<T *>(shared);
    auto sums = reinterpret_cast<float (*)[PITCH]>(slots + S::STAGES * SLOT); // [rows][PITCH]
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    let_next_kernel_start();

    // 1. ask for weights: the first group into registers, the next into the ring
    RowStream weights(W, rows, cols, slots);
    const int own = weights.next; // the block's first group
    Group w = {};
    weights.load_first(w);
#pragma unroll 1
    for (int slot = 0; slot < S::STAGES_BEFORE_X; slot++) weights.prefetch(slot);
    Fringe<S> fringe;
    fringe.load(weights.has_first(own) ? W : nullptr, weights.ends ? W + rows * cols : nullptr, lane);

    // 2. wait for the kernel ahead, 3. read x
    wait_for_previous_kernel();
    VectorWords<S> vector;
    vector.load_whole(x, weights.columns);
#pragma unroll
    for (int slot = S::STAGES_BEFORE_X; slot < S::STAGES; slot++) weights.prefetch(slot); // behind x
    vector.load_parts(x, weights.columns);
    const OwnBits<S> own_bits(weights.columns);
    Word<T, VEC> x_words[WORDS];
#pragma unroll
    for (int k = 0; k < WORDS; k++) x_words[k] = vector.word(k);

    // 4. multiply
    float *to = &sums[lane / (32 / ROWS)][warp];
    int owned = 0; // rows
#pragma unroll 1
    for (int group = own; group < weights.groups; group += weights.blocks) {
        if (group != own) weights.take(w); // the first is in registers
        fringe.put(w, weights.columns, weights.has_first(group), weights.has_last(group) ? ROWS - 1 : -1);
        own_bits.keep(w);
        float sum[ROWS] = {};
        S::Product::add(sum, w, x_words, lane);
        const float total = warp_sums(sum, lane);
        if (lane % (32 / ROWS) == 0) *to = total;
        to += ROWS * PITCH, owned += ROWS;
    }

    // 5. add up the warps' sums
    __syncthreads();
    for (int l = t; l < owned; l += THREADS) {
        const int group = own + l / ROWS * weights.blocks, row = weights.first_row(group) + l % ROWS;
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[l][v];
        if (row >= group * ROWS) y[weights.phase + (long long)row * PERIOD] = (T)total; // else it is the group before's
    }
}
