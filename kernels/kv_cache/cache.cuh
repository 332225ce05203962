/* A quantised cache: what a tile of it is made of, and how a warp's tiles come into its ring.

   The codes lie in memory as the lanes of an mma take them: of 16 tokens of a kv head a lane has STEPS times
   Int4::WORDS or Int8::WORDS words, and they are neighbours by fours, what is left over by twos and ones. So a lane
   loads its operands, without ldmatrix, and there is no padding. A slot of the ring has a tile's codes of keys and of
   values, and behind them their scales.

   A share of the tiles belongs to a team: TEAM warps of a block, which join what they have found at the end of each
   segment. A team of one waits for nobody. WHOLE: each share is a row. */
#pragma once
#include "../attention/tiles.cuh"
#include "../device/copy.cuh"
#include "../device/hidden.cuh"
#include "../device/ring.cuh"
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

/* A share that is a row begins at the row's first tile: nothing is searched for, so that the first copies are asked for
   sooner. */
struct RowCursor {
    int b, row, tile, tiles; // as in TileCursor

    __device__ __forceinline__ RowCursor(const TileSchedule &schedule, int share)
        : b((unsigned)share / schedule.rows), row(share - b * schedule.rows), tile(0), tiles(schedule.tiles(b)) {}
    __device__ __forceinline__ long long work_row(const TileSchedule &schedule) const {
        return (long long)b * schedule.rows + row;
    }
    __device__ __forceinline__ void next_row(const TileSchedule &) {} // there is none
};
template <bool> struct CursorOf { using type = TileCursor; };
template <> struct CursorOf<true> { using type = RowCursor; };
using Cursor = CursorOf<WHOLE>::type;

/* Where a warp is: the tiles of a share, one segment after another, of each those that are the warp's. They are
   neighbours, so that it meets a group's scales once. */
struct WarpTiles {
    Cursor cursor;     // tile: the next of this warp
    int left;          // tiles of the share that follow this segment
    int mine;          // tiles that the warp still has in it

    /* begin: of the share; count: its tiles. */
    __device__ __forceinline__ WarpTiles(const Cursor &begin, int count, int member) : cursor(begin), left(count) {
        enter(member);
    }
    __device__ __forceinline__ void enter(int member) {
        const int tiles = min(left, cursor.tiles - cursor.tile), from = tiles * member / TEAM;
        left -= tiles;
        mine = tiles * (member + 1) / TEAM - from;
        cursor.tile += from;
    }
    __device__ __forceinline__ void next_segment(const TileSchedule &schedule, int member) {
        cursor.tile = 0;
        cursor.next_row(schedule);
        enter(member);
    }
    /* The row of the next segment, which there must be. */
    __device__ __forceinline__ long long row_after(const TileSchedule &schedule) const {
        Cursor after = cursor;
        after.next_row(schedule);
        return after.work_row(schedule);
    }
    __device__ __forceinline__ void next_tile() { cursor.tile++, mine--; }
    /* Whether this is the first tile that its group of tokens has. */
    __device__ __forceinline__ bool at_new_group() const { return cursor.tile * TILE % TOKENS_STILL_CHANGING == 0; }
};

/* The cache, as layout.py lays it out. */
struct Codes {
    const uint4 *k, *v, *k_scale, *v_scale;
    int k_room, v_room; // tiles that a sequence has room for
};

/* Copies a warp's tiles into its ring, STAGES tiles before they are used. */
struct Prefetcher {
    const TileSchedule &schedule;
    const Codes &codes;
    WarpTiles next;   // the tile to be copied
    bool new_segment; // it is the warp's first of a segment
    const uint4 *k, *v, *k_scale, *v_scale; // this lane's words of it
    uint4 *ring;
    CachePolicy once; // the cache is read once, so it is the first that may leave L2

    __device__ __forceinline__ Prefetcher(const TileSchedule &schedule, const Codes &codes, const WarpTiles &begin,
                                          uint4 *ring)
        : schedule(schedule), codes(codes), next(begin), new_segment(true), ring(ring), once(evict_first()) {}

    /* Go on to a segment in which the warp has a tile. */
    __device__ __forceinline__ void find_tile(int member) {
        while (next.mine == 0 && next.left > 0) next.next_segment(schedule, member), new_segment = true;
    }
    /* Whether the next tile is of the group that the newest token of a sequence is in: what shares its scale. */
    __device__ __forceinline__ bool at_newest_group() const {
        if (next.mine == 0) return false;
        const int newest = schedule.length(next.cursor.b) - 1;
        return next.cursor.tile * TILE >= newest / TOKENS_STILL_CHANGING * TOKENS_STILL_CHANGING;
    }
    /* Ask for the next tile: first the keys, then the values, which are waited for one after the other. */
    __device__ __forceinline__ void prefetch(int slot, int lane) {
        const unsigned to = hidden(shared_address(ring + slot * SLOT + lane), lane); // insurance
        if (next.mine > 0) {
            if (new_segment) find_words(lane);
            copy<K_WORDS>(to, 0, k, lane);
            if (!BY_CHANNEL || new_segment || next.at_new_group()) {
                const int group = next.cursor.tile * TILE / TOKENS_STILL_CHANGING;
                copy<K_SCALES>(to, K_WORDS + V_WORDS, BY_CHANNEL ? k_scale + group * K_SCALES : k_scale, lane);
            }
            k += K_WORDS;
            if (!BY_CHANNEL) k_scale += K_SCALES;
        }
        CopyRing<STAGES, 2>::filled(); // also with nothing
        if (next.mine > 0) {
            copy<V_WORDS>(to, K_WORDS, v, lane);
            copy<V_SCALES>(to, K_WORDS + V_WORDS + K_SCALES, v_scale, lane);
            v += V_WORDS, v_scale += V_SCALES;
            new_segment = false;
            next.next_tile();
        }
        CopyRing<STAGES, 2>::filled();
    }

  private:
    __device__ __forceinline__ void find_words(int lane) {
        const int n_kv_heads = schedule.rows / HEAD_TILES;
        const long long row = (long long)next.cursor.b * n_kv_heads + next.cursor.row / HEAD_TILES;
        const long long key = row * codes.k_room + next.cursor.tile, value = row * codes.v_room + next.cursor.tile;
        k = codes.k + key * K_WORDS + lane, v = codes.v + value * V_WORDS + lane;
        v_scale = codes.v_scale + value * V_SCALES + lane;
        k_scale = codes.k_scale + lane;
        if (BY_CHANNEL)
            k_scale += row * ((codes.k_room * TILE + TOKENS_STILL_CHANGING - 1) / TOKENS_STILL_CHANGING) * K_SCALES;
        else
            k_scale += key * K_SCALES;
    }
    /* So many words, 32 at a time, to behind so many others in the slot; to: the lane's place in it. */
    template <int COUNT>
    __device__ __forceinline__ void copy(unsigned to, int behind, const uint4 *from, int lane) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 32)
            if (COUNT % 32 == 0 || i + lane < COUNT) copy_async(to + (behind + i) * 16, from + i, once);
    }
};
