/* Rows stream through shared memory, and each meets x: the loop that the kernels of this folder share.

   A block owns groups of ROWS rows, every gridDim.x-th one. Its threads stand side by side along a row, with WORDS
   words of 8 columns each, and keep STAGES groups on their way. One block of 512 threads, or several smaller ones, fill
   a multiprocessor: about 200 KB on their way. A thread reads only what it copied itself, so the ring needs no barrier.

   A kernel has one phase or several, each a product with a vector of its own. Their groups are numbered in one go, so
   the ring does not end with a phase: while a block waits for the next vector, the first weights that will meet it are
   on their way. Left to each kernel: which rows are in a group, what is done to x, and what becomes of the sums.

   Every kernel
   1. asks for its first weights, which no kernel writes;
   2. waits for the kernel before it;
   3. reads x;
   4. multiplies and adds;
   5. makes its results of the sums.
   Under programmatic dependent launch (PDL), 1 overlaps with the end of the kernel before. */
#pragma once
#include "../device/hidden.cuh"
#include "../device/pdl.cuh"
#include "../device/ring.cuh"
#include "vector.cuh"

/* What launches.py chooses. Shared memory: [STAGES][SLOT][threads] words of 16 bytes, the ring, and then
   [rows of the block in a phase][PITCH] floats, partial sums. */
template <typename Type, int Words, int Rows, int Stages, int FfnWords = Words, int FfnRows = Rows> struct Shape {
    using T = Type;                       // of weights and vectors: __half or __nv_bfloat16
    static constexpr int WORDS = Words;   // of a row, for each thread
    static constexpr int ROWS = Rows;     // in a group: 1, 2 or 4
    static constexpr int STAGES = Stages; // groups in the ring
    static constexpr int FFN_WORDS = FfnWords, FFN_ROWS = FfnRows; // the same for rows of W_down, in layer.cu
    static constexpr int SLOT = Words * Rows > FfnWords * FfnRows ? Words * Rows : FfnWords * FfnRows;
};
using S = SHAPE;
using T = S::T;
constexpr int MAX_WARPS = 16, MAX_THREADS = 32 * MAX_WARPS;
constexpr int PITCH = MAX_WARPS + 1; // a row's partial sums: one of each warp, and one more (see ResidualProduct)

/* A thread's places in a slot of the ring. */
struct Slot {
    const uint4 *words; // the first, to read it
    unsigned address;   // and to copy to it
    unsigned pitch;     // from one word to the thread's next

    __device__ __forceinline__ Slot behind(int i) const { return {words + i * pitch, address + i * pitch * 16, pitch}; }
};

/* Start to copy the thread's words of ROWS rows to a slot; row(r) is where row r begins. */
template <int ROWS, int WORDS, class Row>
__device__ __forceinline__ void copy_rows(Slot slot, Row row, int cols, CachePolicy policy, int thread) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const uint4 *from = reinterpret_cast<const uint4 *>(row(r));
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            const int word = k * (int)blockDim.x + thread;
            if (word < cols / VEC) copy_async(slot.behind(r * WORDS + k).address, from + word, policy);
        }
    }
}

/* Multiply ROWS rows in a slot with x. Returns the warp's sum of row l / (32 / ROWS) in lane l. */
template <int ROWS, int WORDS>
__device__ __forceinline__ float multiply_rows(Slot slot, const ThreadVector<WORDS> &x, int cols, int thread) {
    float sums[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int k = 0; k < WORDS; k++)
            if (k * (int)blockDim.x + thread < cols / VEC) {
                float w[VEC];
                widen(*slot.behind(r * WORDS + k).words, w, T());
#pragma unroll
                for (int i = 0; i < VEC; i++) sums[r] += w[i] * x.at[k][i];
            }
    return warp_sums(sums, thread % 32);
}

/* What a block has of a phase: the results of its groups, PER_GROUP of each. */
template <int PER_GROUP> struct Share {
    int first, groups, results; // the block's first group; all groups and results of the phase

    /* act(n, i) for every result n that is the block's, its i-th. The same thread gets the same ones each time. */
    template <class Act> __device__ __forceinline__ void each(int thread, Act act) const {
        for (int i = thread, group; (group = first + i / PER_GROUP * (int)gridDim.x) < groups; i += blockDim.x) {
            const int n = group * PER_GROUP + i % PER_GROUP;
            if (n < results) act(n, i);
        }
    }
};

/* copy_group(group, slot): start to copy the thread's words of a group. */
template <class CopyGroup> struct Stream {
    const CopyGroup copy_group;
    const int groups;        // of all phases
    const int thread, warps; // of the block
    const Slot slots;        // all of them, one behind another
    float *partial;          // [rows of the block in a phase][PITCH]: what each warp has of a row's sum
    int next, group;         // the group to be copied, of all; the one to be multiplied, of its phase
    CopyRing<S::STAGES> ring;

    __device__ __forceinline__ Stream(uint4 *shared, int groups, int thread, CopyGroup copy_group)
        : copy_group(copy_group), groups(groups), thread(thread), warps(blockDim.x / 32),
          slots{shared + thread, hidden(shared_address(shared + thread), thread % 32), hidden(blockDim.x, thread % 32)},
          partial(reinterpret_cast<float *>(shared + S::STAGES * S::SLOT * (int)blockDim.x)), next(blockIdx.x),
          group(blockIdx.x) {}

    __device__ __forceinline__ Slot slot(int i) const { return slots.behind(i * S::SLOT); }
    __device__ __forceinline__ void prefetch(int i) {
        if (next < groups) {
            copy_group(next, slot(i));
            next += gridDim.x;
        }
        ring.filled(); // with nothing, too
    }
    __device__ __forceinline__ void fill() {
        for (int i = 0; i < S::STAGES; i++) prefetch(i);
    }

    /* What the block has of the phase that begins. */
    template <int PER_GROUP> __device__ __forceinline__ Share<PER_GROUP> share(int results) const {
        return {group, (results + PER_GROUP - 1) / PER_GROUP, results};
    }

    /* A phase: its groups, of ROWS rows each, times x. Then all threads may read the sums. */
    template <int ROWS, int WORDS>
    __device__ __forceinline__ void multiply(int phase_groups, const ThreadVector<WORDS> &x, int cols) {
        const int lane = thread % 32;
        float *to = partial + lane / (32 / ROWS) * PITCH + thread / 32;
        for (; group < phase_groups; group += gridDim.x, to += ROWS * PITCH) {
            const float sum = multiply_rows<ROWS>(slot(ring.wait_full()), x, cols, thread);
            prefetch(ring.slot);
            ring.advance();
            if (lane % (32 / ROWS) == 0) *to = sum;
        }
        group -= phase_groups; // now the block's first in the next phase
        __syncthreads();
    }

    /* The sum of the block's l-th row, of so many partial sums. */
    __device__ __forceinline__ float sum(int l, int parts) const {
        float total = 0;
        for (int part = 0; part < parts; part++) total += partial[l * PITCH + part];
        return total;
    }
};
