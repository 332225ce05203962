/* What the roles of fused.cu share: sizes, and what they hand each other in shared memory. Symbols: see fused.cu. */
#pragma once
#include "hopper.cuh"

#ifndef DSTATE
#define DSTATE 128
#endif
#ifndef HALVES
#define HALVES 1
#endif
#ifndef DT_T
#define DT_T half
#endif
#ifndef BIAS_T
#define BIAS_T float
#endif
#ifndef D_T
#define D_T float
#endif
#ifndef SOFTPLUS
#define SOFTPLUS 1
#endif
#ifndef D_ROWS
#define D_ROWS 1
#endif
#ifndef Z
#define Z 0
#endif
#ifndef STAGES
#define STAGES (Z ? 2 : 3)
#endif

constexpr int CHUNK = 64, WIDTH = 64; // tokens; columns of x in a row of heads
constexpr int SIDES = DSTATE / 64;    // tiles of B, and of C
constexpr int NUMBERS = DSTATE / 2;   // of the state in a thread
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int MULTIPLY_REGISTERS = 192, SCORE_REGISTERS = 72, BRING_REGISTERS = 56; // 2, 1 and 1 times: 512
// Of the last warpgroup: two warps make decays, in front, where the warps that make scores have least to do.
constexpr int BRINGER = 14, STORER = 15;
constexpr int MOST_TICKETS = 159, MOST_ROWS = 512;
constexpr float NEVER = -1e30f;      // what is below is a stop of -inf
constexpr float PASS_1 = 0.4f;       // what a chunk of pass 1 counts, if one of pass 2 counts 1
constexpr float TINY = 1.f / 1024;   // of dt, where halves begin to lose digits of it
constexpr int AHEAD = 6, RING = 8;   // chunks of dt that are asked for ahead of time; places for them, a power of two
constexpr int MINE = WIDTH * DSTATE; // numbers of a state

// What a step of the pipeline is.
enum { LOCAL = 1, FIRST = 2, LAST = 4, PUBLISH = 8, SINGLE = 16, END = 32, FLUSH = 64 };

struct Step {
    int kind;   // of the above; SINGLE: the second row is no row; FLUSH: no chunk, but all y are to be written by now
    int chunk;  // of the sequence
    int pair;   // of the whole batch
    int ticket; // of the launch
    int batch, group;
    int row0, row1; // of the batch
    DEVICE bool real(int side) const { return side == 0 || !(kind & SINGLE); }
    DEVICE int row(int side) const { return side ? row1 : row0; }
    DEVICE int head(int side) const { return row(side) / HALVES; }
    DEVICE int half(int side) const { return row(side) % HALVES; }
    /* Number of the row's first column among all columns of x of the batch. */
    DEVICE long long column(int side, int heads) const {
        return (((long long)batch * heads + head(side)) * HALVES + half(side)) * WIDTH;
    }
};

// A lane of a product has tokens 8 i and 8 i + 1 and, for each i up to 7, from 2 (lane % 4) on: what it needs of them
// lies together. APART: so that the four kinds of lanes are in banks of their own.
constexpr int APART = 20;
DEVICE int place_of_enter(int token) { return token / 2 % 4 * APART + token / 8 * 2 + token % 2; }
DEVICE int place_of_half(int token) { return token / 2 % 4 * 16 + token / 8 * 2 + token % 2; }

/* Decays of one row in one chunk. Sums of A dt (in powers of 2) are u within a block of 16, inclusive. */
struct alignas(16) Decays {
    float enter[4 * APART];           // from the chunk's start to token i, inclusive; at place_of_enter
    unsigned short leave_half[CHUNK]; // leave, in the dtype of x; at place_of_half
    float leave[CHUNK]; // dt_j times the decay from token j to the chunk's end; in pass 1 to the piece's end
    float u[CHUNK], dt[CHUNK];
    float rest[CHUNK - 16]; // dt_j times the decay from token j to the end of its block of 16
    float2 far[2];          // decay of block 1 and of block 2; of both; of the chunk
    float log_piece;        // log2 of the decay over the piece that pass 1 walked
    int skip;               // pass 1: nothing of this chunk is left at the end
    int precise;            // whether it takes leave: all dt are so small that leave_half lost digits
};

struct Shared {
    unsigned char x[STAGES][2][TILE]; // and y, when x has been read
    unsigned char b[STAGES][SIDES][TILE], c[STAGES][SIDES][TILE];
    unsigned char z[Z ? STAGES : 1][2][Z ? TILE : 1024];
    unsigned char scores[2][2][TILE]; // [turn][row of the pair]
    Decays decays[STAGES][2];
    unsigned raw[2][RING][CHUNK]; // dt as it is in memory, of chunks to come; two bytes of it in a word that holds them
    Step steps[STAGES];
    unsigned cuts[MOST_TICKETS + 1]; // where shares begin: see `cut`
    unsigned short order[MOST_ROWS]; // rows of a batch, those of a group together, slowly decaying ones first
    u64 planned[STAGES], full[STAGES], empty[STAGES], scores_full[2], scores_empty[2];
    u64 y_full[STAGES];
    int enough[2];   // the ticket whose pass 1 may stop: read while it is written, soon enough whenever it is seen
    unsigned launch; // what a raised flag holds
    unsigned lost;   // whether a share of this block has marked its pair
};

#ifdef SHARED
static_assert(sizeof(Shared) <= SHARED, "the launcher asks for too little shared memory");
#endif

struct Sizes {
    int seqlen, heads, groups, pairs; // pairs: of the whole batch
    int chunks, tickets;              // chunks of a sequence; tickets, which are shares
    int rows, pairs_of_group;         // rows of heads in a group
    int sort;                         // whether rows are to be put in order
    float stop;                       // log2 of the decay beyond which nothing of a state is left: -127, or -inf
    float dt_low, dt_high;
    long long dt_batch, dt_token, dt_head; // strides
};

DEVICE float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float as_float(float x) { return x; }
DEVICE float as_float(half x) { return __half2float(x); }
DEVICE float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
