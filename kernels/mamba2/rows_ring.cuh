/* Rows of a matrix through a ring that one thread fills by TMA while the other warps multiply: for a product that
   begins under PDL before its x is there, and hands on what the next one waits for.

   In fusion/stream.cuh every thread asks for all that its ring has room for, 120 KB a multiprocessor, and then for x,
   which lies in L2 and comes behind all of that all the same. So do the few numbers that the state's step reads
   meanwhile. Here the ring is as deep, so that memory has work through the wait; but until x is there, only FLYING
   groups are on their way at a time: on an H200 two of 20 KB keep memory nearly busy, and leave L2 quick. From then on
   nobody waits for anything but weights, and the ring is filled as it empties. Who has asked for all of its own rows
   asks, for each slot that is read from then on, for a piece of the matrix that comes next, to be brought into L2
   (Ahead): from the end of this block to the first weights of the next, memory would rest.

   A team's first group waits in registers, so that its slot is free for another. Where there are several TEAMS, they
   take the groups in turn.

   A block has neighbouring rows, as many as any other or one more. Groups of ROWS of them lie one behind another in
   memory, so a group is one copy. Compile with SHAPE. Launch with MULTIPLIERS + 32 threads and S::STAGES * S::SLOT
   bytes, behind which the rows' partial sums lie: PITCH floats for each row of a block, in whole groups. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/bulk.cuh"
#include "../device/hopper/mbarrier.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"

/* What launches.py chooses. */
template <typename Type, int Cols, int Threads, int Teams, int Rows, int Stages, int Flying> struct Shape {
    using T = Type;                         // of weights and vectors: __half or __nv_bfloat16
    static constexpr int COLS = Cols;       // of W, a multiple of 8
    static constexpr int THREADS = Threads; // of a team: whole warps, side by side along a row
    static constexpr int TEAMS = Teams;     // that multiply, a group each
    static constexpr int ROWS = Rows;       // of a group: 1, 2 or 4
    static constexpr int STAGES = Stages;   // groups in the ring
    static constexpr int FLYING = Flying;   // of them on their way at a time before x has come: at most STAGES
    static constexpr int WARPS = Threads / 32, ROW_WORDS = Cols / 8;
    static constexpr int WORDS = (ROW_WORDS + Threads - 1) / Threads; // of a row, for each thread
    // Else a team could wait for a slot whose last round, another team's, has not come: and take it for its own
    static_assert(Stages % Teams == 0, "a slot is always the same team's");
    static constexpr int SLOT = Rows * Cols * 2;                      // bytes of a group
    static constexpr int PITCH = WARPS | 1; // a row's partial sums, one of each warp; odd: rows lie in all banks
};
using S = SHAPE;
using T = S::T;
constexpr int MULTIPLIERS = S::THREADS * S::TEAMS; // threads

/* The k-th word of a row that a thread has; past the end, the row's last. */
__device__ __forceinline__ bool has_word(int k, int thread) { return k * S::THREADS + thread < S::ROW_WORDS; }
__device__ __forceinline__ int word_of(int k, int thread) {
    return has_word(k, thread) ? k * S::THREADS + thread : S::ROW_WORDS - 1;
}

/* What a thread holds of x, as floats; zeros past the end. */
struct Part {
    float at[S::WORDS][8];

    __device__ __forceinline__ void load(const T *x, int thread) {
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            const uint4 *from = reinterpret_cast<const uint4 *>(x) + word_of(k, thread);
            widen(has_word(k, thread) ? __ldcg(from) : uint4{}, at[k], T());
        }
    }
    __device__ __forceinline__ void load(const float *x, int thread) {
#pragma unroll
        for (int k = 0; k < S::WORDS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 *from = reinterpret_cast<const float4 *>(x) + 2 * word_of(k, thread) + half;
                const float4 v = has_word(k, thread) ? __ldcg(from) : float4{};
                float *to = at[k] + 4 * half;
                to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
            }
    }
};

/* RMSNorm with the root taken last: its weight comes early, apply in front of a product, scale behind it. */
struct Norm {
    float *squares; // in shared memory, of each warp
    uint4 weight[S::WORDS];

    __device__ __forceinline__ void load(const T *from, int thread) {
#pragma unroll
        for (int k = 0; k < S::WORDS; k++)
            weight[k] = __ldg(reinterpret_cast<const uint4 *>(from) + word_of(k, thread));
    }
    /* Returns the thread's part of the sum of squares from before. */
    __device__ __forceinline__ float apply(Part &x) const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            float by[8];
            widen(weight[k], by, T());
#pragma unroll
            for (int i = 0; i < 8; i++) sum += x.at[k][i] * x.at[k][i], x.at[k][i] *= by[i];
        }
        return sum;
    }
    /* In front of the barrier behind the product. */
    __device__ __forceinline__ void lay_down(float sum, int thread) const {
        sum = warp_sum(sum);
        if (thread % 32 == 0 && thread < S::THREADS) squares[thread / 32] = sum; // of the first team
    }
    /* 1 / √(mean of squares + eps) */
    __device__ __forceinline__ float scale(float eps) const {
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < S::WARPS; warp++) total += squares[warp];
        return rsqrtf(total / S::COLS + eps);
    }
};

/* The first of a block's rows. */
__device__ __forceinline__ int first_row(int rows, int block) {
    return (int)((long long)rows * block / (int)gridDim.x);
}

/* The matrix of the next product, or null: each block asks for `pieces` of what the block with its number will read
   there first. */
struct Ahead {
    const T *W;
    int rows, row_bytes, pieces;

    __device__ __forceinline__ void ask(int piece) const {
        const long long from = (long long)first_row(rows, blockIdx.x) * row_bytes + (long long)piece * S::SLOT;
        const long long left = (long long)first_row(rows, blockIdx.x + 1) * row_bytes - from;
        if (left > 0) prefetch_bulk(reinterpret_cast<const char *>(W) + from, (int)min(left, (long long)S::SLOT));
    }
};

/* By all threads: the ring, before any of them uses it. */
__device__ __forceinline__ void init(Ring<S::STAGES> &ring, int &has_x, int thread) {
    if (thread == MULTIPLIERS) ring.init(1, S::WARPS), has_x = 0;
    __syncthreads();
}

/* A block's rows times x. */
struct Rows {
    const T *W;
    const int first, count; // the block's rows
    const int thread, team; // of the team; or of those that fill, with no team
    unsigned char *const slots; // [STAGES][SLOT]
    float *const partial;       // [rows, in whole groups][PITCH]: what each warp has of a row's sum
    Ring<S::STAGES> &ring;
    volatile int *const has_x; // in shared memory: 0 before the block has read x
    Phase<S::STAGES> phase;
    uint4 kept[S::ROWS][S::WORDS];

    __device__ __forceinline__ Rows(unsigned char *shared, Ring<S::STAGES> &ring, volatile int *has_x, const T *W,
                                    int rows)
        : W(W), first(first_row(rows, blockIdx.x)), count(first_row(rows, blockIdx.x + 1) - first),
          thread(threadIdx.x % S::THREADS), team(threadIdx.x / S::THREADS), slots(shared),
          partial(reinterpret_cast<float *>(shared + S::STAGES * S::SLOT)), ring(ring), has_x(has_x) {}

    __device__ __forceinline__ int groups() const { return (count + S::ROWS - 1) / S::ROWS; }

    /* By one thread: all copies of the block, and then some for the next launch. */
    __device__ __forceinline__ void fill(Ahead ahead) {
        const int all = groups();
        const unsigned to = shared_address(slots);
        const T *from = W + (long long)first * S::COLS;
        Phase<S::STAGES> oldest; // of those that are on their way
        int come = 0;
        for (int i = 0; i < all; i++, phase.advance(), from += S::ROWS * S::COLS) {
            const int bytes = min(S::ROWS, count - i * S::ROWS) * S::COLS * 2;
            ring.wait_empty(phase);
            for (; i - come >= (*has_x ? S::STAGES : S::FLYING); come++) {
                ring.wait_full(oldest);
                oldest.advance();
            }
            Barrier &full = ring.full[phase.stage];
            full.expect(bytes);
            copy_bulk(to + phase.stage * S::SLOT, from, bytes, full, LEAVES_FIRST);
        }
        if (!ahead.W) return;
        for (int i = 0; i < ahead.pieces; i++, phase.advance()) {
            if (i < S::STAGES) ring.wait_empty(phase); // a group has been read: as fast as they are, no faster
            ahead.ask(i);
        }
    }

    /* All that the warp behind those that multiply has to do. */
    __device__ __forceinline__ void fill_by_warp(Ahead ahead) {
        if (threadIdx.x == MULTIPLIERS) fill(ahead);
        __syncwarp(); // the wait would hold up the whole warp
        wait_for_previous_kernel();
    }

    /* Into registers, behind the wait for them. Of rows that there are not, whatever: the first. */
    __device__ __forceinline__ void take(uint4 (&w)[S::ROWS][S::WORDS], int rows) const {
        ring.wait_full(phase);
        const uint4 *words = reinterpret_cast<const uint4 *>(slots + phase.stage * S::SLOT);
#pragma unroll
        for (int r = 0; r < S::ROWS; r++)
#pragma unroll
            for (int k = 0; k < S::WORDS; k++) w[r][k] = words[(r < rows ? r : 0) * S::ROW_WORDS + word_of(k, thread)];
    }
    /* This warp needs its slot no more; on to the team's next. */
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (thread % 32 == 0) ring.release(phase);
#pragma unroll
        for (int t = 0; t < S::TEAMS; t++) phase.advance();
    }
    /* A team's first group, in front of the wait for x: its slot is free for another. */
    __device__ __forceinline__ void keep_first() {
        for (int t = 0; t < team; t++) phase.advance();
        if (team * S::ROWS >= count) return; // none
        take(kept, count - team * S::ROWS);
        fence_async_proxy(); // what was read has come (Ring::release)
        release();
    }
    __device__ __forceinline__ void multiply_group(const uint4 (&words)[S::ROWS][S::WORDS], const Part &x, int row) {
        constexpr int EACH = 32 / S::ROWS; // lanes with the same row's sum
        float sums[S::ROWS] = {};
#pragma unroll
        for (int r = 0; r < S::ROWS; r++)
#pragma unroll
            for (int k = 0; k < S::WORDS; k++) {
                float w[8];
                widen(words[r][k], w, T());
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] += w[i] * x.at[k][i];
            }
        const float sum = warp_sums(sums, thread % 32);
        if (thread % EACH == 0) partial[(row + thread % 32 / EACH) * S::PITCH + thread / 32] = sum;
    }
    /* All groups, each by a team in its turn. Behind a barrier of the threads that multiply, each may read sums. */
    __device__ __forceinline__ void multiply(const Part &x) {
        constexpr int STEP = S::TEAMS * S::ROWS;
        if (thread == 0 && team == 0) *has_x = x.at[0][0] == x.at[0][0] ? 1 : 2; // not before it is there
        int row = team * S::ROWS;
        if (row < count) multiply_group(kept, x, row);
#pragma unroll 1
        for (row += STEP; row < count; row += STEP) {
            uint4 words[S::ROWS][S::WORDS];
            take(words, count - row);
            multiply_group(words, x, row);
            release();
        }
    }
    /* The sum of the block's i-th row. */
    __device__ __forceinline__ float sum(int i) const {
        float total = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) total += partial[i * S::PITCH + w];
        return total;
    }
};
