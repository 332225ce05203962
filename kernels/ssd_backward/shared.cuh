/* What the roles of chunks.cu hand each other in shared memory. Symbols: see chunks.cu. */
#pragma once
#include "../device/hopper/mbarrier.cuh"
#include "shape.cuh"

// Heads that shared memory has room for: of tokens, and of states, which are used for a shorter time.
constexpr int STAGES = 3, STATE_STAGES = 2;

/* What the gradients of the steps are made of: sums over a chunk of a head. j and i are tokens; M_ij is what token j
   gives to the loss through y_i: (dy_i x_j)(C_i B_j) decay dt_j. */
struct StepSums {
    float dt[CHUNK];
    float over_inputs[4][CHUNK]; // sum over j of M_ij, of which each of 4 warps has 16 j
    float over_outputs[CHUNK];   // sum over i of M_ij
    float to_end[CHUNK];         // what token j gives through the state behind the chunk
    float direct[CHUNK];         // d loss / d dt_j, where dt_j is a factor of x_j: decays are not counted
    float from_start[CHUNK];     // what y_i gives of the state before the chunk
    float state[4];              // dh . (decay of the chunk) h, of 4 warps: what goes through all of the chunk
    float skip[4];               // dy . x, of 4 warps: the gradient of D
};

struct Shared {
    unsigned char b[STATE_TILES][TILE], c[STATE_TILES][TILE]; // of the chunk
    unsigned char other_columns[STATE_TILES][TILE];           // of the other chunk: B of the first, C of the second
    unsigned char h[STATE_STAGES][STATE_TILES][TILE];         // before the chunk, once it is made (outputs.cuh)
    unsigned char dh[STATE_STAGES][STATE_TILES][TILE];        // behind it
    unsigned char x[STAGES][TILE];                            // and dx, when x has been read
    unsigned char dy[STAGES][TILE];
    unsigned char other_rows[STAGES][TILE]; // of the other chunk: x of the first, dy of the second
    unsigned char turned[TILE];             // S^T, at the end
    float4 products[8][128];                // B C^T: of each thread, as it needs it
    Line lines[STAGES], other_lines[STAGES];
    StepSums sums[2];
    Ring<STAGES> ring;              // of heads: tokens and lines
    Ring<STATE_STAGES> states_ring; // of heads: states
    Ring<2> sums_ring;              // of the sums
    Barrier between_full[STATE_STAGES]; // the state between the pair's chunks is made
    Barrier chunk_full;                 // what is of the chunk
    Barrier dx_full[STAGES];

    /* By one thread; who arrives stands in brackets. */
    __device__ __forceinline__ void init() {
        ring.init(1 + 32, 4 + 1); // (bring: a lane for TMA, all for the lines), (4 warps of outputs, store)
        states_ring.init(1, 8);   // (bring), (8 warps that multiply)
        sums_ring.init(8, 1);     // (8 warps that multiply), (make_steps)
        chunk_full.init(1);
#pragma unroll
        for (int i = 0; i < STATE_STAGES; i++) between_full[i].init(4); // (4 warps of outputs)
#pragma unroll
        for (int i = 0; i < STAGES; i++) dx_full[i].init(4); // (4 warps of inputs)
        Barrier::init_done();
    }
};

/* The rows that a block walks: up to but not `last`. */
struct Run {
    int first, last, group, of_group; // of_group: which run of its group
};

/* Which chunk of its pair a block has, and what it makes of the other one: the first makes dh behind itself, the second
   h before itself. */
struct Half {
    int chunk;

    __device__ __forceinline__ bool second() const { return chunk % 2; }
    __device__ __forceinline__ int other() const { return chunk ^ 1; }
};

#ifdef SHARED_BYTES
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little shared memory");
#endif
