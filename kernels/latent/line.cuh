/* Which block has which tiles, and where it leaves what it finds.

   All tiles of all sequences, one behind another, are a line that is cut into equal shares. As many blocks as there are
   head tiles (shape.cuh) have the same share, each for its heads, and stand beside each other, so that they read the
   same tokens at the same time: the second one finds them in L2. Where a share and a sequence meet is a segment.
   Segments are numbered share + sequence: going along the line, one of the two grows from each to the next.

   A sequence that is one segment is finished by its block. All others leave partial results for a merge:
       partial_out   (segments, n_heads, 512) float32, relative to a maximum, not divided
       max_and_sum   (segments, n_heads) float2: that maximum, in units of log 2, and the sum of weights relative to it
   with segments = shares + batch.

   Lengths are read here, so nothing is planned beforehand, and a replayed graph shares out whatever it finds. Every
   lane of a warp calls, and all get the same answer. */
#pragma once
#include "../attention/shares.cuh"
#include "../device/reduce_integers.cuh"
#include "shape.cuh"

struct Sequences {
    const int *kv_lens; // (batch,), or none: all have kv_len tokens
    int kv_len, batch;  // kv_len: what the cache, or a row of the table, has room for

    __device__ __forceinline__ int length(int b) const {
        return kv_lens ? min(max(__ldg(kv_lens + b), 0), kv_len) : kv_len;
    }
    __device__ __forceinline__ int tiles(int b) const { return (length(b) + TILE - 1) / TILE; }

    /* Tiles of the sequences before b. */
    __device__ __forceinline__ int tiles_before(int b, int lane) const {
        if (!kv_lens) return b * tiles(0);
        int sum = 0;
#pragma unroll 4
        for (int i = lane; i < b; i += 32) sum += tiles(i);
        return warp_sum(sum);
    }
};

struct LineShares : Shares {
    __device__ __forceinline__ LineShares(const Sequences &sequences, int shares, int lane) {
        const int total = sequences.tiles_before(sequences.batch, lane);
        tiles_per_block = total / shares, blocks_with_one_more = total - tiles_per_block * shares;
    }
};

/* A segment: the tiles of a sequence from `tile` to `end`. */
struct Segment {
    int b, tile, end, tiles; // tiles: of the sequence
    int left;                // tiles of the share that follow this segment

    /* The first of the share that begins with the line's at-th tile and has `count`, at least one. */
    __device__ __forceinline__ Segment(const Sequences &sequences, unsigned at, int count, int lane) {
#pragma unroll 1
        for (int from = 0;; from += 32) { // 32 sequences at a time
            const unsigned mine = from + lane < sequences.batch ? sequences.tiles(from + lane) : 0;
            const unsigned up_to = warp_sum_up_to(mine, lane);
            const unsigned later = __ballot_sync(~0u, at < up_to); // it is in the first of these sequences
            const int first = later ? __ffs(later) - 1 : 31;
            at -= __shfl_sync(~0u, later ? up_to - mine : up_to, first);
            b = from + first;
            tiles = __shfl_sync(~0u, mine, first);
            if (later) break;
        }
        enter(at, count);
    }
    __device__ __forceinline__ void enter(int begin, int count) {
        tile = begin, end = min(tiles, begin + count);
        left = count - (end - begin);
    }
    /* Its tiles are done, and the share has more. */
    __device__ __forceinline__ void next(const Sequences &sequences) {
        do tiles = ++b < sequences.batch ? sequences.tiles(b) : 1;
        while (tiles == 0);
        enter(0, left);
    }
    __device__ __forceinline__ bool whole() const { return tile == 0 && end == tiles; } // asked before tiles are done
    __device__ __forceinline__ long long place(int share) const { return (long long)share + b; }
};

/* The segments of a sequence, for who merges them. */
struct SegmentsOf {
    int count;       // 0: no token; 1: finished already
    long long first; // its place; the others follow

    __device__ __forceinline__ SegmentsOf(const Sequences &sequences, const LineShares &shares, int b, int lane) {
        const int tiles = sequences.tiles(b);
        const unsigned begin = sequences.tiles_before(b, lane);
        const int first_share = shares.block_of(begin);
        count = tiles ? shares.block_of(begin + tiles - 1) - first_share + 1 : 0;
        first = (long long)first_share + b;
    }
};
