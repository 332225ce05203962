/* What append.cu is compiled for, and what a block has in shared memory.

   A pair is a query and one head of the group that shares a kv head: a row of the products. All pairs of an item
   (append_walk.cuh) and one kv head stand in a line, query by query. ROWS neighbouring pairs are a row tile, TOKENS
   tokens a step. A warpgroup has 64 of a tile's rows and all tokens of a step, or, where a tile has no more rows than
   that, half of the tokens. */
#pragma once
#include "../device/hopper/tma.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Use {
    APPEND, // new tokens of each request, causal
    SHARED  // runs of tokens, and which queries look at each: all of them at all of it
};

template <typename Type, int HeadDim, int Group, int PageSize, Use What, int Rows, int Stages, int Team>
struct AppendShape {
    using T = Type;                              // of q, pages and out: __half or __nv_bfloat16
    static constexpr int HEAD_DIM = HeadDim;     // 64 or 128
    static constexpr int GROUP = Group;          // query heads of a kv head
    static constexpr int PAGE_SIZE = PageSize;   // tokens: 8, 16, 32, 64
    static constexpr Use USE = What;
    static constexpr int ROWS = Rows;            // 128, or 64 for both warpgroups
    static constexpr int STAGES = Stages;        // of the two rings
    static constexpr int TEAM = Team;            // blocks that take neighbouring tiles side by side: 1 or 2
};
#ifndef SHAPE
#define SHAPE AppendShape<__nv_bfloat16, 128, 4, 16, APPEND, 128, 2, 2>
#endif
using S = SHAPE;
using T = S::T;
constexpr int HEAD_DIM = S::HEAD_DIM, GROUP = S::GROUP, PAGE_SIZE = S::PAGE_SIZE, ROWS = S::ROWS, STAGES = S::STAGES;
constexpr int TEAM = S::TEAM;
static_assert(TEAM == 1 || TEAM == 2, "");
static_assert((HEAD_DIM == 64 || HEAD_DIM == 128) && (ROWS == 64 || ROWS == 128), "");
static_assert(PAGE_SIZE % 8 == 0 && PAGE_SIZE <= 64, "a page is whole groups of 8 tokens");

constexpr int TOKENS = 128;                          // of a step
constexpr int WARPGROUPS = 2, WARPGROUP_ROWS = 64;   // that multiply
constexpr int COLUMNS = ROWS == 128 ? TOKENS : TOKENS / WARPGROUPS; // tokens of a step that a warpgroup has
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int HALVES = HEAD_DIM / 64;                // rows of 128 bytes that a token has
constexpr int EIGHT = 8 * HEAD_DIM * (int)sizeof(T); // bytes of 8 tokens, which lie half by half
constexpr int STEP_BYTES = TOKENS / 8 * EIGHT;
constexpr int SEGMENTS = 4;

/* A row tile's steps that a block takes one after another, of one kv head. */
struct Segment {
    int steps;       // 0: there are no more segments
    int first_step;  // of the item
    int row, pairs;  // the tile's first pair; all of the item
    int query;       // the item's first
    int kv_head;
    int tokens;      // of the item
    int seen;        // of them, by the item's first query; every further one sees one more. (SHARED: all)
    int parts;       // of the tile, if this is the first; else 0
    int place;       // where partial results go, if this is not all of the tile's steps; else -1
    int next_place;  // of the second part; from each to the next it is `stride` further
    int stride;
};

constexpr int PLACES = 3; // of a block: its first segment together, its first apart, and its last

struct Shared {
    alignas(1024) unsigned char q[WARPGROUPS][WARPGROUP_ROWS * HEAD_DIM * sizeof(T)]; // half by half
    unsigned char k[STAGES][STEP_BYTES], v[STAGES][STEP_BYTES];
    unsigned char out[WARPGROUPS][WARPGROUP_ROWS * HEAD_DIM * sizeof(T)];
    float2 max_and_sum[WARPGROUP_ROWS];
    Segment segments[SEGMENTS];
    Ring<SEGMENTS> segment_ring;
    Ring<STAGES> k_ring, v_ring;

    __device__ __forceinline__ void init() {
        segments[SEGMENTS - 1] = {}; // in front of the first: of no parts, if there is no first
        segment_ring.init(1, 4 * WARPGROUPS);
        k_ring.init(1, 4 * WARPGROUPS);
        v_ring.init(1, 4 * WARPGROUPS);
    }
};
