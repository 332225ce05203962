/* Scores of a variant, and keys and queries that are turned by their positions on the way into an mma. */
#pragma once
#include "../attention/tile_products.cuh"
#include "../device/math.cuh"
#include "requests.cuh"

constexpr float ANGLE = 1.4629180792671596e-9f; // 2 pi / 2**32
constexpr int GROUP_HEADS = GROUP / NEW;          // query heads of a kv head
static_assert(!Variant::TURNS || HEAD_DIM % 32 == 0, "turning: head_dim must be a multiple of 32");

/* What a lane's scores are of: rows first_row + g and g + 8 of a kv head, and tokens from first_token on. */
struct ScorePlaces {
    int request, first_head, first_row, first_token; // first_head: of the kv head
    int length;                                      // of the request: the last new token is the last of it

    __device__ __forceinline__ int row(int lane, int r) const { return min(first_row + lane / 4 + 8 * r, GROUP - 1); }
    __device__ __forceinline__ int position(int row) const { return length - NEW + row / GROUP_HEADS; }
};

/* Scores in units of log 2, those of no token masked. scale: in natural units. */
__device__ __forceinline__ void vary_scores(Scores &s, const Variant &variant, float scale, const ScorePlaces &at,
                                            int lane) {
#pragma unroll
    for (int r = 0; r < LANE_HEADS; r++) {
        const int row = at.row(lane, r), position = at.position(row), head = at.first_head + row % GROUP_HEADS;
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int token = at.first_token + 16 * t + 8 * n + i;
                    float &score = s[t][n][2 * r + i];
                    if (token <= position && variant.keep(at.request, head, token, position))
                        score = variant.score(score * scale, at.request, head, token, position) * LOG2_E;
                    else score = MASKED;
                }
    }
}

/* Two dimensions, and the two HEAD_DIM / 2 behind them, of a token: turned, and rounded as they were. */
__device__ __forceinline__ void turn(unsigned &near, unsigned &far, const Variant &variant, int token, int pair) {
    const float2 x = unpack(near, T()), y = unpack(far, T());
    const float first = (int)variant.turns(token, pair) * ANGLE, second = (int)variant.turns(token, pair + 1) * ANGLE;
    const float2 cosine = {__cosf(first), __cosf(second)}, sine = {__sinf(first), __sinf(second)};
    near = pack(x.x * cosine.x - y.x * sine.x, x.y * cosine.y - y.y * sine.y, T());
    far = pack(y.x * cosine.x + x.x * sine.x, y.y * cosine.y + x.y * sine.y, T());
}

/* As multiply_keys, of keys that are turned by their positions, which begin at first_token. */
__device__ __forceinline__ void multiply_turned_keys(Scores &s, const QueryOperands &queries, unsigned keys,
                                                     const Variant &variant, int first_token, int lane) {
    constexpr int HALF = STEPS / 2; // a lane has what is turned together in steps d and d + HALF
#pragma unroll
    for (int d = 0; d < HALF; d++)
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++) {
            unsigned near[4], far[4];
            const int token = 16 * t + lane % 8 + lane / 16 * 8, word = 2 * d + lane / 8 % 2;
            ldmatrix_x4(near, keys + place_of(token, word) * BYTES);
            ldmatrix_x4(far, keys + place_of(token, word + 2 * HALF) * BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++)
                turn(near[i], far[i], variant, first_token + 16 * t + lane / 4 + 8 * (i / 2),
                     16 * d + 8 * (i % 2) + lane % 4 * 2);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                mma_m16n8k16(s[t][n], queries[d], near[2 * n], near[2 * n + 1], T());
                mma_m16n8k16(s[t][n], queries[d + HALF], far[2 * n], far[2 * n + 1], T());
            }
        }
}
/* Queries, by theirs. */
__device__ __forceinline__ void turn_queries(QueryOperands &queries, const Variant &variant, const ScorePlaces &at,
                                             int lane) {
#pragma unroll
    for (int d = 0; d < STEPS / 2; d++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            turn(queries[d][i], queries[d + STEPS / 2][i], variant, at.position(at.row(lane, i % 2)),
                 16 * d + 8 * (i / 2) + lane % 4 * 2);
}
