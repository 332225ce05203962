/* What the roles of fused.cu hand each other in shared memory. Symbols: see fused.cu. */
#pragma once
#include "../device/hopper/mbarrier.cuh"
#include "shape.cuh"

/* A Phase<2> in one register: whose turn it is among two places. */
struct Turns {
    unsigned count = 0;

    __device__ __forceinline__ operator Phase<2>() const { return {(int)(count % 2), count / 2 % 2}; }
    __device__ __forceinline__ void advance() { count++; }
};

/* What a step of the pipeline is. */
enum {
    LOCAL = 1,   // pass 1
    FIRST = 2,   // of a piece
    LAST = 4,    // of a piece
    PUBLISH = 8, // the end state of pass 1, which the registers still hold, goes to the other blocks first
    SINGLE = 16, // the second row is no row
    END = 32,    // nothing more comes
    FLUSH = 64   // no chunk, but all y are to be written by now
};

struct Step {
    int kind;   // of the above
    int chunk;  // of the sequence
    int pair;   // of the whole batch; if there are halves, a row
    int ticket; // of the launch
    int batch, group;
    int row0, row1; // of the batch; the same, if there are halves

    __device__ __forceinline__ bool has_row(int side) const { return side == 0 || !(kind & SINGLE); }
    __device__ __forceinline__ int row(int side) const { return side ? row1 : row0; }
    __device__ __forceinline__ int head(int side) const { return row(side) / S::HEAD_PARTS; }
    __device__ __forceinline__ int head_part(int side) const { return row(side) % S::HEAD_PARTS; }
    /* Number of the row's first column among all columns of x of the batch. */
    __device__ __forceinline__ long long column(int side, int heads) const {
        return ((long long)batch * heads + head(side)) * S::HEADDIM + head_part(side) * WIDTH;
    }
    /* How many of the row's columns there are; where there are fewer than 64, the others are zeros. */
    __device__ __forceinline__ int columns(int side) const {
        return S::PADDED_HEAD ? min(WIDTH, S::HEADDIM - head_part(side) * WIDTH) : WIDTH;
    }
};

// A lane of a product has tokens 8 i and 8 i + 1 and, for each i up to 7, from 2 (lane % 4) on: what it needs of them
// lies together. APART: so that the four kinds of lanes are in banks of their own.
constexpr int APART = 20;
__device__ __forceinline__ int place_of_decay(int token) { return token / 2 % 4 * APART + token / 8 * 2 + token % 2; }
__device__ __forceinline__ int place_of_weight(int token) { return token / 2 % 4 * 16 + token / 8 * 2 + token % 2; }

/* Decays of one row in one chunk: step 1. Decays are powers of 2, sums of A dt their exponents, which begin anew at
   each block of 16 tokens. A weight is a decay times the token's dt. */
struct alignas(16) Decays {
    float decay_from_start[4 * APART];     // from the chunk's start to token i, inclusive; at place_of_decay
    unsigned short rounded_to_end[CHUNK];  // weight_to_end, in the type of x; at place_of_weight
    float weight_to_end[CHUNK];            // from token j to the chunk's end; in pass 1 to the piece's end
    float log_decay_in_block[CHUNK];       // from the block's start to token i, inclusive
    float dt[CHUNK];
    float weight_to_block_end[CHUNK - 16]; // from token j to the end of its block of 16
    float2 block_decay[2];                 // of block 1 and of block 2; of both, and of the chunk
    float log_piece;                       // the exponent over the piece that pass 1 walked
    int skip;                              // pass 1: nothing of this chunk is left at the end
    int precise;                           // whether it takes weight_to_end: all dt are so small that rounding costs
    int sequence_begins;                   // in the chunk: see Begins
};

/* Where sequences begin in a chunk: see sequences.cuh. */
struct alignas(16) Begins {
    unsigned char of[CHUNK]; // where each token's sequence begins: 0 is before the chunk, 1 the chunk's first token
};

constexpr int TILE = 64 * 128; // bytes: 64 rows, swizzled (swizzle.cuh)
constexpr int DT_RING = 8;     // places for chunks of dt to come, a power of two

/* What two warpgroups with halves of a state hand each other: halves.cuh. */
struct Handed {
    float4 sums[2][2][4][S::HALVES ? 128 : 1]; // [turn][who gives][16 numbers of a thread, four by four]
    Barrier full[2][8];                        // [turn][who gives: a warp]
};

/* Where B and C of a step are: the stage; or, if they have a ring of their own, two places deep, the step's number % 2.
   The number is 3 * (rounds of phase) + stage. */
__device__ __forceinline__ int place_of_group(Phase<STAGES> phase) {
    return S::HALVES ? (phase.stage + (int)phase.parity) & 1 : phase.stage;
}

struct Shared {
    unsigned char x[STAGES][ROWS][TILE]; // and y, when x has been read
    unsigned char b[GROUP_STAGES][STATE_TILES][TILE], c[GROUP_STAGES][STATE_TILES][TILE];
    unsigned char scores[2][ROWS][TILE];            // [turn][row of the pair]
    unsigned char z[2][ROWS][S::GATED ? TILE : 16]; // the same
    Decays decays[STAGES][ROWS];
    unsigned raw_dt[ROWS][DT_RING][CHUNK]; // as in memory, of chunks to come; two bytes of it in a word that holds them
    Step steps[STAGES];
    unsigned cuts[MOST_TICKETS + 1]; // where shares begin, at most one for each ticket: see shares.cuh
    unsigned short order[MOST_ROWS]; // rows of a batch, those of a group together, slowly decaying ones first
    Barrier planned[STAGES];         // it is known what the step is
    Ring<STAGES> ring;               // of steps: full when tiles and decays are there, empty when all have used them
    Ring<2> scores_ring, z_ring;     // of steps of pass 2
    Barrier y_full[STAGES];
    int pass_1_may_stop[2];   // the ticket whose pass 1 may: read while it is written, soon enough whenever it is seen
    unsigned launch;          // what a raised flag holds
    unsigned has_marked_pair; // whether a share of this block has marked its pair
    Handed handed;
    Barrier b_empty[2], c_empty[2]; // if there are halves: nobody reads the place of B, of C any more
    Begins begins[S::SEQUENCES ? STAGES : 1];

    /* By one thread; who arrives stands in brackets. */
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < STAGES; i++) planned[i].init(1), y_full[i].init(8); // (bring_tiles), (multiply's 8 warps)
        if (S::HALVES)
#pragma unroll
            for (int i = 0; i < 16; i++) handed.full[i / 8][i % 8].init(1); // (the warp that gives)
        if (S::HALVES)
#pragma unroll
            for (int i = 0; i < 2; i++) b_empty[i].init(12), c_empty[i].init(12); // (12 warps that compute)
        ring.init(1 + ROWS, 13); // (bring_tiles, the warps that make decays), (12 warps that compute, store_tiles)
        scores_ring.init(4, 8);  // (4 warps that make scores), (multiply's 8 warps)
        z_ring.init(1, 8);       // (bring_tiles), (multiply's 8 warps)
        pass_1_may_stop[0] = pass_1_may_stop[1] = -1;
        has_marked_pair = 0;
    }
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");
#endif
