/* Several sequences in a row of tokens, as seq_idx numbers them. Where one begins, nothing of those before it is left:
   a decay of 0. A chunk in which none begins goes its way as ever. In one in which some do, sums of A dt begin with a
   sequence, too, and weights and decays over such a place are 0 (decays.cuh). What a 0 does not remove, as it may be
   infinite or NaN, and all scores between two sequences, are removed by hand, here. */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/tma.cuh"
#include "../device/mma.cuh"
#include "state.cuh"
#include "tiles.cuh"

/* The states at the ends of sequences, (count, heads, HEADDIM, DSTATE), by their numbers in seq_idx; null where nobody
   asks for them. The kernel leaves the state before the chunk in which the next sequence begins: the last tokens come
   later (ends.py). */
struct Ends {
    float *states;
    int count;
    const int *seq_idx;
};

/* Of a lane that has tokens 2 l and 2 l + 1 of a chunk, x and y: Begins::of (shared.cuh) of the two, and of the last
   token, in a byte each. */
struct LaneBegins {
    unsigned bytes;

    __device__ __forceinline__ int x() const { return bytes & 0xff; }
    __device__ __forceinline__ int y() const { return bytes >> 8 & 0xff; }
    __device__ __forceinline__ int last() const { return bytes >> 16; }
    __device__ __forceinline__ bool any() const { return S::SEQUENCES && last(); }
    __device__ __forceinline__ bool x_is_new(int lane) const { return S::SEQUENCES && x() == 2 * lane + 1; }
    __device__ __forceinline__ bool y_is_new(int lane) const { return S::SEQUENCES && y() == 2 * lane + 2; }
    /* How many lanes back, in the same block of 16 tokens, the second token's sequence reaches. */
    __device__ __forceinline__ int lanes_back(int lane) const {
        return S::SEQUENCES ? lane - max(lane / 8 * 8, (y() - 1) / 2) : lane % 8;
    }
};

/* What seq_idx says of the lane's two tokens, and of the token before them. */
struct SequenceNumbers {
    int before, first, second;

    /* Outside of the sequence nothing changes. */
    __device__ __forceinline__ void load(const int *of_batch, int seqlen, int chunk, int lane) {
        const auto number = [&](int token) { return __ldg(of_batch + min(max(token, 0), seqlen - 1)); };
        const int token = chunk * CHUNK + 2 * lane;
        before = number(token - 1), first = number(token), second = number(token + 1);
    }
    __device__ __forceinline__ LaneBegins begins(int lane) const {
        const bool x_is_new = first != before, y_is_new = second != first;
        const unsigned x_new = __ballot_sync(~0u, x_is_new), y_new = __ballot_sync(~0u, y_is_new);
        const unsigned earlier = (x_new | y_new) & (1u << lane) - 1; // lanes
        const int nearest = 31 - __clz(earlier);
        const int x = x_is_new ? 2 * lane + 1 : earlier ? 2 * nearest + 1 + (y_new >> nearest & 1) : 0;
        const int y = y_is_new ? 2 * lane + 2 : x;
        return {(unsigned)(x | y << 8 | __shfl_sync(~0u, y, 31) << 16)};
    }
};

/* Scores between tokens of two sequences become 0, whatever they were. By the warp that has made those of the block. */
__device__ __forceinline__ void blank_scores(unsigned char (&scores)[ROWS][TILE], const Begins &begins, int block,
                                             int lane) {
    __syncwarp(); // behind its own stores
    const int row = 16 * block + lane % 16, own = begins.of[row] - 1; // the first token of the row's sequence
#pragma unroll 1
    for (int j = lane / 16 * 2; j < own; j += 4) {
        const int spot = swizzled(row, j / 8) + j % 8 * 2;
#pragma unroll
        for (int side = 0; side < ROWS; side++)
            if (j + 1 < own) *reinterpret_cast<unsigned *>(scores[side] + spot) = 0;
            else *reinterpret_cast<unsigned short *>(scores[side] + spot) = 0;
    }
}

/* The state before the chunk, where its sequence ends there: it is kept, if somebody asks for it, and then ends. */
__device__ __forceinline__ void end_sequence(const float (&state)[THREAD_NUMBERS], const Step &step, const Sizes &sizes,
                                             const Ends &ends, int side, int thread) {
    if (ends.states && step.has_row(side)) {
        const unsigned sequence = ends.seq_idx[max(step.chunk * CHUNK - 1, 0)];
        const long long column = (long long)sequence * sizes.heads * S::HEADDIM + step.column(side, sizes.heads);
        if (sequence < ends.count)
            write_matrix(ends.states + column * S::DSTATE, state, step.columns(side), side, thread);
    }
}

/* What comes from the state before the chunk reaches no token of a sequence that begins in the chunk. */
__device__ __forceinline__ void drop_from_state(float (&from_state)[32], const Begins &begins, int lane) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const uchar2 of = *reinterpret_cast<const uchar2 *>(&begins.of[8 * n + lane % 4 * 2]);
        if (of.x) from_state[4 * n] = from_state[4 * n + 2] = 0;
        if (of.y) from_state[4 * n + 1] = from_state[4 * n + 3] = 0;
    }
}

/* state += (x w)^T B, where f is (x w)^T, of the tokens of the chunk's last sequence alone: what others have is made 0
   before it is multiplied. */
__device__ __forceinline__ void add_last_sequence(float (&state)[THREAD_NUMBERS], const unsigned (&f)[4][4],
                                                  const Begins &begins, unsigned b, int lane) {
    const int last = begins.of[CHUNK - 1];
    const auto of_last = [&](int token) { // a mask of it and the next
        return (token + 1 < last ? 0 : 0xffffu) | (token + 2 < last ? 0 : 0xffff0000);
    };
#pragma unroll
    for (int k = 0; k < 4; k++) { // 16 tokens
        const unsigned first = of_last(16 * k + lane % 4 * 2), second = of_last(16 * k + 8 + lane % 4 * 2);
        const unsigned own[4] = {f[k][0] & first, f[k][1] & first, f[k][2] & second, f[k][3] & second};
#pragma unroll
        for (int n = 0; n < PART / 16; n++) { // 16 columns of B
            unsigned v[4];
            ldmatrix_x4_trans(v, spot_of_tokens(b + n / 4 * TILE, k, n % 4, lane));
            for (int h = 0; h < 2; h++)
                mma_m16n8k16(reinterpret_cast<float(&)[4]>(state[8 * n + 4 * h]), own, v[h] & first, v[2 + h] & second,
                             T());
        }
    }
    fence_async_proxy(); // what has been read of B has come: the next B may be brought there
}
