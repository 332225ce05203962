/* Rungs 7 and 8, ring: one block of up to 512 threads on each multiprocessor asks for as much of its share
   of W as it can hold, about 256 KB, before it waits for the kernel ahead of it. Launched as a dependent
   (PDL); without that it is slower than rung 5.

   New since gemv (rung 7, MultiplyAdds): a block stays. It owns groups of ROWS neighbouring rows, every
   gridDim.x-th one, and keeps STAGES of them on their way into shared memory with cp.async, and at first
   one more into registers. A thread reads only what it copied itself, so the ring needs no barrier; there
   is one in the kernel, before the warps' sums are added up. With so much shared memory a block has its
   multiprocessor to itself: a block of the next kernel starts there when this one ends, while others
   still work. x comes late: it stands in line behind all that has been asked for, and a whole ring of
   weights waits for it.

   New since that (rung 8, TensorCores): mma.m16n8k16 does the arithmetic of 4 columns of 2 rows for all
   lanes in one instruction. It is meant for tiles. Here row g of A is what the 4 lanes 4g .. 4g+3 hold of
   one row of W, row g + 8 what they hold of the next, and column g of B what the same lanes hold of x:
   their product is D[g][g], and D[g+8][g]. The rest of D mixes lanes that have nothing to do with each
   other, and is thrown away.

   Moves the 2 * rows*cols bytes of W once (some rows twice if ROWS does not divide rows); each block
   reads x once. 2*rows*cols flops that count; rung 8 does 8 times as many. Compile with SHAPE (below).
   Launch at most ceil(rows / ROWS) blocks of THREADS. Shared memory: [STAGES][ROWS][WORDS][THREADS]
   words, and then [rows of a block, in whole groups][PITCH] floats. cols and both addresses are
   multiples of a word, which is 8 columns. */
#include "../device/copy.cuh"
#include "../device/mma.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "../device/ring.cuh"
#include "../device/words.cuh"

struct MultiplyAdds; // rung 7
struct TensorCores;  // rung 8

/* The sizes that ring_plan.py chooses, and what multiplies. */
template <typename Type, int Threads, int Words, int Rows, int Stages, int StagesBeforeX,
          typename Multiply = TensorCores>
struct Shape {
    using T = Type;           // of W, x and y: __half or __nv_bfloat16
    using Product = Multiply; // MultiplyAdds or TensorCores
    static constexpr int THREADS = Threads; // of a block
    static constexpr int WORDS = Words;     // that a thread has of a row; THREADS * WORDS hold a row
    static constexpr int ROWS = Rows;       // of a group: 2, 4 or 8, and no more than the matrix has
    static constexpr int STAGES = Stages;   // groups that the ring holds
    static constexpr int STAGES_BEFORE_X = StagesBeforeX; // STAGES, or one less where all of a block's groups fit
};
#ifndef SHAPE
#define SHAPE Shape<__nv_bfloat16, 512, 1, 8, 3, 3>
#endif
using S = SHAPE;
using T = S::T;
constexpr int ROWS = S::ROWS, WORDS = S::WORDS;
constexpr int WARPS = S::THREADS / 32, PITCH = WARPS | 1; // odd, so that 32 rows' sums lie in 32 banks
using Group = uint4[ROWS][WORDS];                         // a thread's words of a group of rows

/* The block's groups, one after another. */
struct RowStream {
    const uint4 *W; // the thread's first word of row 0
    long long rows;
    int words, groups, next; // of a row; in all; the group to be asked for
    uint4 *slots;            // the thread's place in the ring
    CachePolicy once;        // W is read once
    CopyRing<S::STAGES> ring;

    __device__ __forceinline__ RowStream(const T *W, long long rows, int cols, uint4 *shared)
        : W(reinterpret_cast<const uint4 *>(W) + threadIdx.x), rows(rows), words(cols / 8),
          groups((rows + ROWS - 1) / ROWS), next(blockIdx.x), slots(shared + threadIdx.x), once(evict_first()) {}

    /* The last group is the last ROWS rows: some may be in the one before too. */
    __device__ __forceinline__ long long first_row(int group) const {
        return min((long long)group * ROWS, rows - ROWS);
    }
    __device__ __forceinline__ const uint4 *address(int group) const { return W + first_row(group) * words; }
    /* Do (r, k) for all words that the thread has of a group: word k of row r. */
    template <class Do> __device__ __forceinline__ void each_word(Do act) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                if (k * S::THREADS + threadIdx.x < words) act(r, k);
    }
    __device__ __forceinline__ void load_first(Group &w) {
        const uint4 *from = address(next);
        each_word([&](int r, int k) { w[r][k] = load_streaming(from + r * words + k * S::THREADS); });
        next += gridDim.x;
    }
    __device__ __forceinline__ void prefetch(int slot) {
        if (next < groups) {
            const uint4 *from = address(next);
            const unsigned to = shared_address(slots + slot * (ROWS * WORDS * S::THREADS));
            each_word([&](int r, int k) {
                copy_async(to + (r * WORDS + k) * S::THREADS * 16, from + r * words + k * S::THREADS, once);
            });
            next += gridDim.x;
        }
        ring.filled(); // with nothing, too
    }
    /* The next group, and in its place the one that comes STAGES later. */
    __device__ __forceinline__ void take(Group &w) {
        const uint4 *from = slots + ring.wait_full() * (ROWS * WORDS * S::THREADS);
        each_word([&](int r, int k) { w[r][k] = from[(r * WORDS + k) * S::THREADS]; });
        prefetch(ring.slot);
        ring.advance();
    }
};

/* Step 4: a warp's sums of a group of rows, that of row l / (32 / ROWS) in lane l. All lanes take part. */
struct MultiplyAdds {
    static __device__ __forceinline__ float row_sums(const Group &w, const uint4 (&x)[WORDS], int lane) {
        float sums[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++) {
                const auto &a = reinterpret_cast<const Word<T, 8> &>(w[r][k]);
                const auto &b = reinterpret_cast<const Word<T, 8> &>(x[k]);
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] += element(a, i) * element(b, i);
            }
        return warp_sums(sums, lane);
    }
};

struct TensorCores {
    static __device__ __forceinline__ float row_sums(const Group &w, const uint4 (&x)[WORDS], int lane) {
        float sums[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r += 2) {
            float d[4] = {};
#pragma unroll
            for (int k = 0; k < WORDS; k++) {
                const uint4 a = w[r][k], b = w[r + 1][k];
                mma_m16n8k16(d, {a.x, b.x, a.y, b.y}, x[k].x, x[k].y, T());
                mma_m16n8k16(d, {a.z, b.z, a.w, b.w}, x[k].z, x[k].w, T());
            }
            // d holds D[g][2c], D[g][2c + 1], and the same of row g + 8, in lane 4g + c
            const bool mine = lane % 4 == lane / 8, odd = lane / 4 % 2;
            sums[r] = !mine ? 0 : odd ? d[1] : d[0];
            sums[r + 1] = !mine ? 0 : odd ? d[3] : d[2];
        }
        return warp_sums(sums, lane);
    }
};

extern "C" __global__ void __launch_bounds__(S::THREADS, 1)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    extern __shared__ __align__(16) uint4 shared[];
    auto sums = reinterpret_cast<float (*)[PITCH]>(shared + S::STAGES * ROWS * WORDS * S::THREADS); // [rows][PITCH]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = gridDim.x;
    let_next_kernel_start();

    // 1. ask for weights: the first group into registers, the next into the ring
    RowStream weights(W, rows, cols, shared);
    Group w = {};
    uint4 x_words[WORDS] = {}; // zeros past the end of a row
    weights.load_first(w);
#pragma unroll 1
    for (int slot = 0; slot < S::STAGES_BEFORE_X; slot++) weights.prefetch(slot);

    // 2. wait for the kernel ahead, 3. read x
    wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        const int word = k * S::THREADS + threadIdx.x;
        if (word < weights.words) x_words[k] = __ldcg(reinterpret_cast<const uint4 *>(x) + word);
    }
#pragma unroll
    for (int slot = S::STAGES_BEFORE_X; slot < S::STAGES; slot++) weights.prefetch(slot); // behind x

    // 4. multiply
    float *to = &sums[lane / (32 / ROWS)][warp];
#pragma unroll 1
    for (int group = blockIdx.x; group < weights.groups; group += blocks) {
        if (group != blockIdx.x) weights.take(w); // the first is in registers
        const float sum = S::Product::row_sums(w, x_words, lane);
        if (lane % (32 / ROWS) == 0) *to = sum;
        to += ROWS * PITCH;
    }

    // 5. add up the warps' sums
    __syncthreads();
    const int owned = (weights.groups - (int)blockIdx.x + blocks - 1) / blocks * ROWS; // rows
    for (int l = threadIdx.x; l < owned; l += S::THREADS) {
        const int group = l / ROWS * blocks + blockIdx.x;
        const long long row = weights.first_row(group) + l % ROWS;
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[l][v];
        if (row >= (long long)group * ROWS) y[row] = (T)total; // else it is the group before's
    }
}
