/* The role of one warp: it says what is to be done, and brings queries and tiles.

   Whatever lies behind a sequence's last token in its last tile comes along, and whoever multiplies takes it away. What
   lies outside of the cache, or behind the last head, comes as zeros. */
#pragma once
#include "../device/hopper/bulk.cuh"
#include "../device/pdl.cuh"
#include "hopper_plan.cuh"

struct Problem {
    Sequences sequences;
    const T *cache;         // (batch, kv_len, WIDTH), or pages
    const int *table;       // (batch, max_pages)
    int n_pages, max_pages; // of the pool; of a row
    int most_shares, head_tiles, head_tile; // head_tile: the block's
};

/* Where a segment's tiles begin: of 32 of them, one a lane, and the 32 behind, loaded before they are needed. */
struct Pages {
    const int *row;                        // of the table
    int n_pages, b, tiles, at, now, ahead; // at: the tile of lane 0

    __device__ __forceinline__ Pages(const Problem &problem, const Segment &segment, int lane)
        : row(problem.table + (long long)segment.b * problem.max_pages), n_pages(problem.n_pages), b(segment.b),
          tiles(segment.tiles), at(segment.tile), now(load(at + lane)), ahead(load(at + 32 + lane)) {}
    __device__ __forceinline__ int load(int tile) const {
        return PAGED && tile < tiles ? min(max(__ldg(row + tile), 0), n_pages - 1) : b;
    }
    /* The first axis of the cache, of a tile at most 32 ahead of the last one that was advanced to. */
    __device__ __forceinline__ int of_tile(int tile) const {
        const int near = __shfl_sync(~0u, now, tile - at), far = __shfl_sync(~0u, ahead, tile - at);
        return tile - at < 32 ? near : far;
    }
    __device__ __forceinline__ void advance(int tile, int lane) { // tiles come in order
        if (tile == at + 32) at = tile, now = ahead, ahead = load(at + 32 + lane);
    }
    static __device__ __forceinline__ int first_row(int tile) { return PAGED ? 0 : tile * TILE; } // the second axis
};

/* Ask L2 for a tile, which lies in one piece, up to the last token. Blocks with the same tiles take turns. */
__device__ __forceinline__ void prefetch(const Problem &problem, const Segment &segment, const Pages &pages, int tile,
                                         int length, int lane) {
    const int page = pages.of_tile(tile);
    if (lane > 0 || tile >= segment.end || tile % problem.head_tiles != problem.head_tile) return;
    const long long rows = PAGED ? TILE : problem.sequences.kv_len;
    const T *from = problem.cache + (page * rows + Pages::first_row(tile)) * WIDTH;
    prefetch_bulk(from, min(length - tile * TILE, TILE) * WIDTH * (int)sizeof(T));
}

/* 64 rows and 64 columns of a map of three axes: to this block, or to the same place in both blocks of the cluster. */
__device__ __forceinline__ void load_part(void *to, const CUtensorMap &map, int column, int row, int page,
                                          Barrier &full) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row),
                 "r"(page), "r"(full.at()) : "memory");
}
__device__ __forceinline__ void load_part_for_both(void *to, const CUtensorMap &map, int column, int row, int page,
                                                   Barrier &full) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(column), "r"(row),
                 "r"(page), "r"(full.at()), "h"((unsigned short)3) : "memory");
}

/* A lane brings a part: first those of the slot's own side, whose places become free first. */
__device__ __forceinline__ void load_tile(Shared &s, const CUtensorMap &cache, Phase<SLOTS> &phase, int row, int page,
                                          int head_tile, int lane) {
    const int slot = phase.stage, part = part_at(lane, slot), first = OWN_SIDE_FIRST ? slot : 0;
    const auto bring = [&](int from, int to) {
        if (lane < from || lane >= to) return;
        Barrier &full = s.full[slot][part];
        full.expect(PART_BYTES);
        if (!MULTICAST) load_part(s.tiles[slot][part], cache, 64 * part, row, page, full);
        else if (lane % 2 == head_tile) load_part_for_both(s.tiles[slot][part], cache, 64 * part, row, page, full);
    };
    s.empty[slot][first].wait(phase.parity ^ 1);
    bring(0, SIDE_PARTS);
    __syncwarp();
    s.empty[slot][1 - first].wait(phase.parity ^ 1);
    bring(SIDE_PARTS, PARTS);
    __syncwarp();
    phase.advance();
}

__device__ __forceinline__ void load_queries(Shared &s, const CUtensorMap &q, Phase<1> &phase, int b, int head_tile,
                                             int lane) {
    s.q_ring.wait_empty(phase);
    if (lane == 0) s.q_ring.full[0].expect(PARTS * PART_BYTES);
    __syncwarp();
    if (lane < PARTS) load_part(s.q[lane], q, 64 * lane, HEADS * head_tile, b, s.q_ring.full[0]);
    __syncwarp();
    phase.advance();
}

__device__ __forceinline__ void announce(Shared &s, Phase<SEGMENTS> &phase, const Work &work, int lane) {
    s.work_ring.wait_empty(phase);
    if (lane == 0) {
        s.work[phase.stage] = work;
        s.work_ring.full[phase.stage].arrive();
    }
    __syncwarp();
    phase.advance();
}

__device__ __forceinline__ void bring_tiles(Shared &s, const CUtensorMap &q, const CUtensorMap &cache,
                                            const Problem &problem, int share, int lane) {
    const Sequences &sequences = problem.sequences;
    Phase<SEGMENTS> work_phase;
    Phase<SLOTS> phase;
    Phase<1> q_phase;
    const int n_shares = share_count(sequences, problem.most_shares, lane);
    const LineShares shares(sequences, n_shares, lane);
    const int begin = shares.first_tile(share), count = share < n_shares ? shares.first_tile(share + 1) - begin : 0;
    if (count > 0) {
        Segment segment(sequences, begin, count, lane);
        for (;;) {
            Pages pages(problem, segment, lane);
            const int length = sequences.length(segment.b), first = segment.tile, end = segment.end;
            for (int tile = first; tile < first + AHEAD; tile++) prefetch(problem, segment, pages, tile, length, lane);
            const int place = segment.whole() ? -1 : (int)segment.place(share);
            announce(s, work_phase, {end - first, segment.b, min(length - (end - 1) * TILE, TILE), place}, lane);
            wait_for_previous_kernel();
            for (int tile = first; tile < end; tile++) {
                pages.advance(tile, lane);
                load_tile(s, cache, phase, Pages::first_row(tile), pages.of_tile(tile), problem.head_tile, lane);
                if (AHEAD > 0) prefetch(problem, segment, pages, tile + AHEAD, length, lane);
                if (tile == first) load_queries(s, q, q_phase, segment.b, problem.head_tile, lane);
            }
            if (segment.left == 0) break;
            segment.next(sequences);
        }
    }
    announce(s, work_phase, Work{}, lane);
    wait_for_previous_kernel();
}
