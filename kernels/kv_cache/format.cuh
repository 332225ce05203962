/* A quantised cache: what a tile of it is made of, wherever it lies.

   The codes lie in memory as the lanes of an mma take them: of 16 tokens of a kv head a lane has STEPS times
   Int4::WORDS or Int8::WORDS words, and they are neighbours by fours, what is left over by twos and ones. So a lane
   loads its operands, without ldmatrix, and there is no padding. A slot of the ring has a tile's codes of keys and of
   values, and behind them their scales.

   A share of the tiles belongs to a team: TEAM warps of a block, which join what they have found at the end of each
   segment. A team of one waits for nobody. WHOLE: each share is a row. */
#pragma once
#include "../attention/shape.cuh"
#include "codes.cuh"

template <typename Keys, typename Values, int KeyTokens, int KeyChannels, int ValueChannels> struct Cache {
    using KEYS = Keys; // Int8, Int4 or Fp8
    using VALUES = Values;
    static constexpr int KEY_TOKENS = KeyTokens;         // that share a scale of a channel, a multiple of TILE; 0: none
    static constexpr int KEY_CHANNELS = KeyChannels;     // that share a scale of a token, if KEY_TOKENS is 0
    static constexpr int VALUE_CHANNELS = ValueChannels; // likewise: multiples of 16 that divide HEAD_DIM
};
#ifndef CACHE
#define CACHE Cache<Int8, Int8, 0, HEAD_DIM, HEAD_DIM>
#endif
#ifndef RING_STAGES
#define RING_STAGES 4
#endif
#ifndef TEAM_WARPS
#define TEAM_WARPS WARPS
#endif
using C = CACHE;
using KEYS = C::KEYS;
using VALUES = C::VALUES;

constexpr int STAGES = RING_STAGES;            // tiles in a warp's ring
constexpr bool WHOLE = ONE_BLOCK_PER_ROW;      // a share is a row, and what its team finds is the result
constexpr bool BY_CHANNEL = C::KEY_TOKENS > 0; // scales of keys belong to channels
constexpr int SIXTEENS = TILE / 16;            // of the tokens of a tile
constexpr int TEAM = TEAM_WARPS, TEAMS = WARPS / TEAM; // warps of a team; teams of a block
static_assert(WARPS % TEAM == 0, "a team is in one block");
constexpr int K_LANE = STEPS * KEYS::WORDS, V_LANE = STEPS * VALUES::WORDS; // words of 4 bytes of a lane, 16 tokens
constexpr int K_GROUPS = BY_CHANNEL ? 1 : HEAD_DIM / C::KEY_CHANNELS, V_GROUPS = HEAD_DIM / C::VALUE_CHANNELS;
constexpr int K_WORDS = 8 * SIXTEENS * K_LANE, V_WORDS = 8 * SIXTEENS * V_LANE; // of a tile, of 16 bytes
constexpr int K_SCALES = BY_CHANNEL ? HEAD_DIM / 8 : SIXTEENS * 2 * K_GROUPS, V_SCALES = SIXTEENS * 2 * V_GROUPS;
constexpr int SLOT = (K_WORDS + V_WORDS + K_SCALES + V_SCALES + 7) / 8 * 8; // whole lines of 128 bytes
constexpr int TOKENS_STILL_CHANGING = BY_CHANNEL ? C::KEY_TOKENS : TILE;    // by a token that is appended, at most
static_assert(TOKENS_STILL_CHANGING % TILE == 0, "a tile of keys has one set of scales for its channels");

/* A lane's words of 16 tokens, from where they begin: by fours, and what is left over by twos and ones. */
template <int N> __device__ __forceinline__ void take_words(unsigned (&to)[N], const uint4 *from, int lane) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint4 word = from[32 * i + lane];
        to[4 * i] = word.x, to[4 * i + 1] = word.y, to[4 * i + 2] = word.z, to[4 * i + 3] = word.w;
    }
    const uint2 *twos = reinterpret_cast<const uint2 *>(from + 32 * (N / 4));
    if constexpr (N % 4 >= 2) {
        const uint2 word = *(twos + lane);
        to[N / 4 * 4] = word.x, to[N / 4 * 4 + 1] = word.y;
    }
    if constexpr (N % 2) to[N - 1] = reinterpret_cast<const unsigned *>(twos + N % 4 / 2 * 32)[lane];
}
