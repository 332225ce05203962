/* The sizes of fused.cu: of a program, which fused.py chooses by the tensors, and of a launch (fused_plan.py). */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum SkipKind { NO_D, D_PER_HEAD, D_PER_COLUMN };
enum Gate { NO_Z, WITH_Z };
enum Sequences { ONE_SEQUENCE, MANY_SEQUENCES }; // in a row of tokens: see sequences.cuh

/* How steps come: the type of dt, that of dt_bias, and whether a softplus follows. */
template <typename DtType, typename BiasType, bool Softplus> struct Steps {
    using Dt = DtType;
    using Bias = BiasType;
    static constexpr bool SOFTPLUS = Softplus;
};
/* How D comes: its type, and whether there is one. */
template <typename Type, SkipKind Kind> struct Skip {
    using D = Type;
    static constexpr SkipKind KIND = Kind;
};

template <typename Type, int HeadDim, int DState, typename StepsOf, typename SkipOf, Gate GateOf, typename InitialType,
          Sequences SequencesOf = ONE_SEQUENCE>
struct Shape {
    using T = Type; // of x, B, C, z and y: __half or __nv_bfloat16
    using Steps = StepsOf;
    using Skip = SkipOf;
    using Initial = InitialType; // of initial_states
    static constexpr bool GATED = GateOf == WITH_Z, SEQUENCES = SequencesOf == MANY_SEQUENCES;
    // Multiples of 8, dstate up to 256. Tiles have 64 columns: TMA fills the last with zeros, which add nothing.
    static constexpr int HEADDIM = HeadDim, DSTATE = DState;
    static constexpr bool HALVES = DSTATE > 128; // of a state: more of it than a warpgroup's registers hold
    static constexpr int HEAD_PARTS = (HEADDIM + 63) / 64, STATE = HALVES ? 256 : (DSTATE + 63) / 64 * 64;
    static constexpr bool PADDED_HEAD = HEADDIM % 64 != 0, PADDED_STATE = DSTATE != STATE;
    static_assert(HEADDIM % 8 == 0 && DSTATE % 8 == 0 && STATE <= 256 && !(SEQUENCES && HALVES));
};

#ifndef SHAPE
#define SHAPE Shape<__half, 64, 128, Steps<__half, float, true>, Skip<float, D_PER_HEAD>, NO_Z, float>
#endif
using S = SHAPE;
using T = S::T;
using Dt = S::Steps::Dt;
using Bias = S::Steps::Bias;
using D = S::Skip::D;
using Initial = S::Initial;
constexpr int ROWS = S::HALVES ? 1 : 2;      // of a pair: two warpgroups have one each, or a half of one's state
constexpr int STAGES = 3;                    // steps that shared memory has room for
constexpr int GROUP_STAGES = ROWS + 1;       // and for how many of them it has B and C
constexpr int CHUNK = 64, WIDTH = 64;        // tokens; columns of x in a row of heads
constexpr int STATE = S::STATE;              // columns of a state
constexpr int STATE_TILES = STATE / 64;      // of B, and of C
constexpr int PART = STATE / (3 - ROWS);     // columns of a state that a warpgroup has
constexpr int PART_TILES = PART / 64;        // of B, and of C
constexpr int STATE_NUMBERS = WIDTH * PART;  // of what it has
constexpr int THREAD_NUMBERS = PART / 2;     // of that in a thread: 128 threads have it
constexpr int MOST_TICKETS = 159, MOST_ROWS = 512;

/* Of a launch. */
struct Sizes {
    int seqlen, heads, groups, pairs; // pairs: of the whole batch
    int chunks, tickets;              // chunks of a sequence; tickets
    int rows, pairs_of_group;         // rows of heads in a group
    int sort;                         // whether rows are to be put in order
    int side_by_side;                 // log2 of the pairs of a bundle: see shares.cuh
    float log2_negligible;            // log2 of the decay beyond which nothing of a state is left: see fused.cu
    float dt_low, dt_high;
    long long dt_batch, dt_token, dt_head; // strides

    __device__ __forceinline__ int together() const { return 1 << side_by_side; } // pairs of a bundle
    __device__ __forceinline__ int bundle_of(int pair) const { return pair >> side_by_side; }
    __device__ __forceinline__ int share_of(int ticket) const { return ticket >> side_by_side; } // of a bundle
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
