/* Rung 7 for rows that begin at any element. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "../device/ring.cuh"
#include "unaligned.cuh"

template <typename Type, int Period, int Threads, int Words, int Rows, int Line, int Stages, int StagesBeforeX> struct Shape {
    using T = Type;
    static constexpr int PERIOD = Period, THREADS = Threads, WORDS = Words, ROWS = Rows, LINE = Line;
    static constexpr int STAGES = Stages, STAGES_BEFORE_X = StagesBeforeX;
};
#ifndef SHAPE
#define SHAPE Shape<__half, 8, 544, 1, 8, 128, 3, 2>
#endif
using S = SHAPE;
using T = S::T;
constexpr int VEC = 16 / sizeof(T), THREADS = S::THREADS, WORDS = S::WORDS, ROWS = S::ROWS, PERIOD = S::PERIOD;
constexpr int WARPS = THREADS / 32, PITCH = WARPS | 1;
constexpr int BEFORE = S::LINE / 16, X_WORDS = BEFORE + THREADS * WORDS + 1; // of x in shared memory: BEFORE in front of it
using Words = uint4[ROWS][WORDS];

/* ROWS rows that begin at the same place in a line. */
struct Group {
    long long first;
    const T *start;
    Row<T, S::LINE> row;
    int here, last; // rows that there are; the matrix's last one, or ROWS

    static __device__ __forceinline__ long long first_of(int group) {
        return (long long)(group / PERIOD) * (PERIOD * ROWS) + group % PERIOD;
    }
    __device__ __forceinline__ Group(const T *W, long long rows, int cols, int group)
        : first(first_of(group)), start(W + first * cols), row(start, cols) {
        const unsigned below = (unsigned)min(rows - 1 - first, (long long)PERIOD * ROWS);
        here = min(ROWS, below / PERIOD + 1);
        last = below < PERIOD * ROWS && below % PERIOD == 0 ? below / PERIOD : ROWS;
    }
    template <class Do> __device__ __forceinline__ void each_word(int cols, Do act) const {
        const uint4 *from = reinterpret_cast<const uint4 *>(start - row.lead) + threadIdx.x;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int low = r == 0 && first == 0 ? row.first_whole() : row.first();
            const int high = r >= here ? 0 : r == last ? row.last_whole() : row.last();
#pragma unroll
            for (int k = 0; k < WORDS; k++)
                act(r, k, from + k * THREADS, k * THREADS + (int)threadIdx.x >= low && k * THREADS + (int)threadIdx.x < high);
            from += PERIOD * (long long)cols / VEC;
        }
    }
};

struct RowStream {
    const T *W;
    long long rows;
    int cols, groups, next;
    uint4 *slots;
    CachePolicy once;
    CopyRing<S::STAGES> ring;

    __device__ __forceinline__ RowStream(const T *W, long long rows, int cols, uint4 *shared)
        : W(W), rows(rows), cols(cols), next(blockIdx.x), slots(shared + threadIdx.x), once(evict_first()) {
        const int rest = rows % (PERIOD * ROWS);
        groups = (int)(rows / (PERIOD * ROWS)) * PERIOD + min(PERIOD, rest);
    }
    __device__ __forceinline__ void load_first(Words &w) {
        Group(W, rows, cols, next).each_word(cols, [&](int r, int k, const uint4 *from, bool there) {
            if (there) w[r][k] = load_streaming(from);
        });
        next += gridDim.x;
    }
    __device__ __forceinline__ void prefetch(int slot) {
        if (next < groups) {
            const unsigned to = shared_address(slots + slot * (ROWS * WORDS * THREADS));
            Group(W, rows, cols, next).each_word(cols, [&](int r, int k, const uint4 *from, bool there) {
                if (there) copy_async(to + (r * WORDS + k) * THREADS * 16, from, once);
            });
            next += gridDim.x;
        }
        ring.filled();
    }
    __device__ __forceinline__ void take(Words &w, const Group &group) {
        const uint4 *from = slots + ring.wait_full() * (ROWS * WORDS * THREADS);
        group.each_word(cols, [&](int r, int k, const uint4 *, bool there) {
            w[r][k] = there ? from[(r * WORDS + k) * THREADS] : uint4{};
        });
        prefetch(ring.slot);
        ring.advance();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemv(const T *W, const T *x, T *y, long long rows, int cols) {
    extern __shared__ uint4 shared[];
    uint4 *x_words = shared + S::STAGES * ROWS * WORDS * THREADS;
    auto sums = reinterpret_cast<float (*)[PITCH]>(x_words + X_WORDS);
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, blocks = gridDim.x;
    let_next_kernel_start();

    // 1. ask for weights
    RowStream weights(W, rows, cols, shared);
    Words w = {};
    weights.load_first(w);
    // words that reach out of the matrix, element by element
    const int last_group = (int)((rows - 1) / (PERIOD * ROWS)) * PERIOD + (int)((rows - 1) % PERIOD);
    const int ragged_tail = last_group % blocks == blockIdx.x ? Group(W, rows, cols, last_group).row.tail() : 0;
    const int ragged_head = blockIdx.x == 0 ? Group(W, rows, cols, 0).row.head() : 0;
    T head = T(0.f), tail = T(0.f);
    if (t < ragged_head) head = W[t];
    if (t < ragged_tail) tail = W[rows * cols - ragged_tail + t];
#pragma unroll 1
    for (int slot = 0; slot < S::STAGES_BEFORE_X; slot++) weights.prefetch(slot);

    // 2. wait for the kernel ahead, 3. read x
    wait_for_previous_kernel();
    const unsigned whole = reinterpret_cast<unsigned long long>(x) % 16 ? 0 : cols / VEC;
    uint4 found[WORDS + 1];
#pragma unroll
    for (int i = 0; i <= WORDS; i++)
        if ((unsigned)(i * THREADS + t - BEFORE) < whole)
            found[i] = __ldcg(reinterpret_cast<const uint4 *>(x) + i * THREADS + t - BEFORE);
#pragma unroll
    for (int slot = S::STAGES_BEFORE_X; slot < S::STAGES; slot++) weights.prefetch(slot); // behind x
#pragma unroll
    for (int i = 0; i <= WORDS; i++) {
        const int q = i * THREADS + t;
        if ((unsigned)(q - BEFORE) < whole) x_words[q] = found[i];
        else if (q < X_WORDS)
#pragma unroll 1
            for (int e = 0; e < VEC; e++) {
                const unsigned c = (q - BEFORE) * VEC + e;
                reinterpret_cast<T *>(x_words + q)[e] = c < cols ? x[c] : T(0.f);
            }
    }
    const float head_product = t < ragged_head ? (float)head * (float)x[t] : 0;
    const float tail_product = t < ragged_tail ? (float)tail * (float)x[cols - ragged_tail + t] : 0;
    __syncthreads();

    // 4. multiply
    float *to = &sums[lane / (32 / ROWS)][warp];
#pragma unroll 1
    for (int number = blockIdx.x; number < weights.groups; number += blocks) {
        const Group group(W, rows, cols, number);
        if (number != blockIdx.x) weights.take(w, group); // the first is in registers
        float sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = r == group.last ? tail_product : 0;
        if (number == 0) sum[0] += head_product;
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int j = k * THREADS + t, c = j * VEC - group.row.lead, q = BEFORE + j - group.row.first_whole();
            const Word<T, VEC> x_word = shifted<T>(x_words[q], x_words[q + 1], group.row.head() * sizeof(T));
            auto words = [&](int r) -> Word<T, VEC> & { return reinterpret_cast<Word<T, VEC> &>(w[r][k]); };
            if (c < 0 || c + VEC > cols)
#pragma unroll
                for (int r = 0; r < ROWS; r++) keep_columns(words(r), c, cols);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum[r] += element(words(r), i) * element(x_word, i);
        }
        const float total = warp_sums(sum, lane);
        if (lane % (32 / ROWS) == 0) *to = total;
        to += ROWS * PITCH;
    }

    // 5. add up the warps' sums
    __syncthreads();
    const int owned = (weights.groups - (int)blockIdx.x + blocks - 1) / blocks * ROWS; // rows
    for (int l = t; l < owned; l += THREADS) {
        const long long row = Group::first_of(l / ROWS * blocks + blockIdx.x) + l % ROWS * PERIOD;
        float total = 0;
#pragma unroll
        for (int v = 0; v < WARPS; v++) total += sums[l][v];
        if (row < rows) y[row] = (T)total;
    }
}
