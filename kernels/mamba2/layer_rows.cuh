/* Rows of several matrices through one ring, which one thread fills by TMA while the other warps multiply.

   The ring does not end with a matrix: while a block waits for the next vector, the first weights that will meet it
   come. A block has neighbouring rows of each matrix, as many as any other or one more. Groups of ROWS of them lie one
   behind another in memory, so a group is one copy.

   The ring is deep, so that memory has work through a long wait; but only FLYING groups are on their way at a time. All
   of them at once would be faster by nothing, and the vector, though it lies in L2, would come behind them: on an H200
   three groups of 20 KB a multiprocessor are enough to read at full speed.

   Compile with SIZES. Launch with S::THREADS + 32 threads. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/bulk.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/reduce.cuh"

/* What layer.py chooses. */
template <typename Type, int Hidden, int Heads, int Headdim, int Dstate, int Width, int Threads, int Stages, int Flying,
          int Ahead, int StateLanes, int StateRows>
struct Sizes {
    using T = Type; // of weights and vectors: __half or __nv_bfloat16
    static constexpr int HIDDEN = Hidden, HEADS = Heads, HEADDIM = Headdim, DSTATE = Dstate, WIDTH = Width,
                         INNER = Heads * Headdim, CHANNELS = INNER + 2 * Dstate;
    static constexpr int THREADS = Threads, WARPS = Threads / 32; // that multiply, side by side along a row
    static constexpr int STAGES = Stages, FLYING = Flying;        // groups in the ring; on their way at a time
    static constexpr int AHEAD = Ahead; // groups of the next launch's first matrix that are asked for into L2
    static constexpr int LANES = StateLanes, STATE_ROWS = StateRows; // of a state's row; rows of a thread
    static constexpr int PITCH = WARPS | 1; // a row's partial sums, one of each warp; odd: rows lie in all banks
};
using S = SIZES;
using T = S::T;

constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int least(int a, int b) { return a < b ? a : b; }

/* Rows of COLS numbers. */
template <int Cols> struct Rows {
    static constexpr int COLS = Cols, ROW_WORDS = Cols / 8;
    static constexpr int WORDS = (ROW_WORDS + S::THREADS - 1) / S::THREADS; // of a row, for each thread
    static constexpr int ROWS = WORDS == 1 ? 4 : WORDS == 2 ? 2 : 1;        // of a group
    static constexpr int BYTES = ROWS * Cols * 2;                           // of a group
    static_assert(Cols % 8 == 0, "rows are whole words");
    static __device__ __forceinline__ bool has_word(int k, int thread) { return k * S::THREADS + thread < ROW_WORDS; }
    /* The k-th word of a thread; past the end, the row's last. */
    static __device__ __forceinline__ int word(int k, int thread) {
        return has_word(k, thread) ? k * S::THREADS + thread : ROW_WORDS - 1;
    }
};
using HiddenRows = Rows<S::HIDDEN>;
using InnerRows = Rows<S::INNER>;
constexpr int SLOT = most(HiddenRows::BYTES, InnerRows::BYTES);

/* What a block has of so many rows. */
struct Share {
    int first, count;
    __device__ __forceinline__ Share(int rows) : first(begin(rows, blockIdx.x)) {
        count = begin(rows, blockIdx.x + 1) - first;
    }
    static __device__ __forceinline__ int begin(int rows, int block) {
        return (int)((long long)rows * block / (int)gridDim.x);
    }
};

/* The thread that fills the ring. */
struct Filler {
    Ring<S::STAGES> &ring;
    const unsigned slots; // where they are in shared memory
    Phase<S::STAGES> next, oldest; // to be asked for; on its way the longest
    int asked = 0;

    template <class R> __device__ __forceinline__ void ask_for(const T *W, int rows) {
        const Share share(rows);
        const T *from = W + (long long)share.first * R::COLS;
        for (int i = 0; i < share.count; i += R::ROWS, next.advance(), from += R::ROWS * R::COLS) {
            const int bytes = min(R::ROWS, share.count - i) * R::COLS * 2;
            ring.wait_empty(next);
            if (asked++ >= S::FLYING) {
                ring.wait_full(oldest);
                oldest.advance();
            }
            Barrier &full = ring.full[next.stage];
            full.expect(bytes);
            copy_bulk(slots + next.stage * SLOT, from, bytes, full, LEAVES_FIRST);
        }
    }
    /* Behind all else, as fast as groups are read: what the block with this number asks for first next time. */
    template <class R> __device__ __forceinline__ void bring_near(const T *W, int rows) {
        const Share share(rows);
        const T *from = W + (long long)share.first * R::COLS;
        for (int i = 0; i < least(S::AHEAD * R::ROWS, share.count); i += R::ROWS, next.advance()) {
            ring.wait_empty(next);
            prefetch_bulk(from + (long long)i * R::COLS, min(R::ROWS, share.count - i) * R::COLS * 2);
        }
    }
};

/* What a thread holds of a vector, as floats, and the weight of the norm that it goes through, which comes earlier. */
template <class R> struct Part {
    float at[R::WORDS][8];
    uint4 weight[R::WORDS];

    __device__ __forceinline__ void load_weight(const T *from, int thread) {
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
            weight[k] = __ldg(reinterpret_cast<const uint4 *>(from) + R::word(k, thread));
    }
    __device__ __forceinline__ void load(const T *x, int thread) {
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
            widen(__ldcg(reinterpret_cast<const uint4 *>(x) + R::word(k, thread)), at[k], T());
    }
    __device__ __forceinline__ void load(const float *x, int thread) {
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 v = __ldcg(reinterpret_cast<const float4 *>(x) + 2 * R::word(k, thread) + half);
                float *to = at[k] + 4 * half;
                to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
            }
    }
    /* Multiply with the weight; zeros past the end. Returns the thread's part of the sum of squares from before. */
    __device__ __forceinline__ float apply_weight(int thread) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            float by[8];
            widen(weight[k], by, T());
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (!R::has_word(k, thread)) at[k][i] = 0;
                sum += at[k][i] * at[k][i], at[k][i] *= by[i];
            }
        }
        return sum;
    }
};

/* The threads that multiply. */
struct Multiplier {
    Ring<S::STAGES> &ring;
    const unsigned char *slots;
    float *partial; // [rows of a block, in whole groups][PITCH]: what each warp has of a row's sum
    float *squares; // [WARPS]
    const int thread;
    Phase<S::STAGES> phase;

    /* A group's words times x: the sum of row l / (32 / ROWS) in lane l. Of rows that there are not, whatever comes of
       the first. */
    template <class R> __device__ __forceinline__ float multiply_group(const Part<R> &x, int rows) {
        float sums[R::ROWS] = {};
        ring.wait_full(phase);
        const uint4 *words = reinterpret_cast<const uint4 *>(slots + phase.stage * SLOT);
#pragma unroll
        for (int r = 0; r < R::ROWS; r++)
#pragma unroll
            for (int k = 0; k < R::WORDS; k++) {
                float w[8];
                widen(words[(r < rows ? r : 0) * R::ROW_WORDS + R::word(k, thread)], w, T());
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] += w[i] * x.at[k][i];
            }
        return warp_sums(sums, thread % 32);
    }
    /* RMSNorm of the vector in x, but for its root, times the block's `count` rows. Then each may read sums. */
    template <class R> __device__ __forceinline__ void multiply(Part<R> &x, int count) {
        constexpr int EACH = 32 / R::ROWS; // lanes with the same row's sum
        const float squared = x.apply_weight(thread);
        float *to = partial + thread % 32 / EACH * S::PITCH + thread / 32;
#pragma unroll 1
        for (int row = 0; row < count; row += R::ROWS, to += R::ROWS * S::PITCH) {
            const float sum = multiply_group(x, count - row);
            if (thread % EACH == 0) *to = sum;
            __syncwarp();
            if (thread % 32 == 0) ring.release(phase);
            phase.advance();
        }
        const float all = warp_sum(squared);
        if (thread % 32 == 0) squares[thread / 32] = all;
        named_barrier<S::THREADS>(1);
    }
    /* The sum of the block's i-th row. */
    __device__ __forceinline__ float sum(int i) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += partial[i * S::PITCH + w];
        return total;
    }
    /* 1 / √(mean of squares + eps) */
    __device__ __forceinline__ float scale(int cols, float eps) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += squares[w];
        return rsqrtf(total / cols + eps);
    }
};
