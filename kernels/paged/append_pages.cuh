/* The role of one warp: it brings pages of keys and values, and says what is to be done with them.

   Eight tokens lie in shared memory as TMA brings them: half by half of a head's channels, each 8 rows of 128 bytes,
   swizzled. So the layout does not depend on the page's size, and a page is one box of five axes.

   Behind the last token nothing is read: a freed page may hold NaN there, and 0 * NaN is NaN. What lies outside of a
   map comes as zeros. So pages that a step does not have are asked for behind the pool's end. Of the page in which the
   tokens end, eights are asked for one by one; and the last eight, if it has but r tokens, from its row r - 8 on: zeros
   first, then its r tokens, in the last r of its places. (A box that ended early would have to begin early, too.) The
   mask knows. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "append_walk.cuh"

constexpr int PAGES = TOKENS / PAGE_SIZE, PAGE_EIGHTS = PAGE_SIZE / 8;
constexpr CachePolicy NO_POLICY = 0x1000000000000000; // as for any load, in the instruction's code

/* Page numbers of a segment, one a lane, loaded 32 pages before they are needed. */
struct PageNumbers {
    const int *row; // of the table, from the item's first page on
    int pages, n_pages; // of the item; of the pool
    int at, now, ahead; // the first page of those in the lanes

    __device__ __forceinline__ PageNumbers(const Problem &problem, const Item &item, int first_page, int lane)
        : row(problem.table + (long long)item.slot * problem.max_pages + item.first_page),
          pages((item.tokens + PAGE_SIZE - 1) / PAGE_SIZE), n_pages(problem.n_pages), at(first_page),
          now(load(first_page + lane)), ahead(load(first_page + 32 + lane)) {}
    __device__ __forceinline__ int load(int page) const {
        return page < pages ? min(max(__ldg(row + page), 0), n_pages - 1) : n_pages; // behind the end of the pool
    }
    /* Of a step, in the first PAGES lanes. Steps come in order. */
    __device__ __forceinline__ int of_step(int step, int lane) {
        if (step * PAGES == at + 32) at += 32, now = ahead, ahead = load(at + 32 + lane);
        return __shfl_sync(~0u, now, step * PAGES - at + lane);
    }
};

struct Maps {
    const CUtensorMap &pages, &eights; // boxes of a whole page, and of eight tokens
};

/* Ask for a step of keys, or of values, once there is room. */
__device__ __forceinline__ void load_step(unsigned char (&slots)[STAGES][STEP_BYTES], Ring<STAGES> &ring,
                                          Phase<STAGES> &phase, const Maps &maps, PageNumbers &numbers, int step,
                                          int tokens, int kv_head, int n_kv_heads, int lane) {
    const int page = numbers.of_step(step, lane) * n_kv_heads + kv_head;
    unsigned char *to = slots[phase.stage] + lane * (PAGE_EIGHTS * EIGHT);
    Barrier &full = ring.full[phase.stage];
    ring.wait_empty(phase);
    if (lane == 0) full.expect(STEP_BYTES);
    __syncwarp();
    if (lane < PAGES) {
        const int left = tokens - (step * TOKENS + lane * PAGE_SIZE); // from this page's first token on
        if (left >= PAGE_SIZE || left <= 0) load_tile(to, maps.pages, {{0, 0, 0, 0, page}}, full, NO_POLICY);
        else
            for (int eight = 0; eight < PAGE_EIGHTS; eight++) {
                const int there = left - 8 * eight, row = there < 8 ? max(there, 0) - 8 : 0;
                load_tile(to + eight * EIGHT, maps.eights, {{0, row, 0, eight, page}}, full, NO_POLICY);
            }
    }
    __syncwarp();
    phase.advance();
}

__device__ __forceinline__ void bring_pages(Shared &s, const Problem &problem, const Maps &k, const Maps &v, Cut *cuts,
                                            int lane) {
    Walk walk(problem, lane);
    Phase<SEGMENTS> place;
    Phase<STAGES> k_phase, v_phase;
    for (;; place.advance()) {
        const Segment segment = walk.next();
        s.segment_ring.wait_empty(place);
        if (lane == 0) {
            s.segments[place.stage] = segment;
            s.segment_ring.full[place.stage].arrive();
        }
        if (segment.steps == 0) break;
        const int end = segment.first_step + segment.steps;
        PageNumbers k_numbers(problem, walk.item, segment.first_step * PAGES, lane);
        PageNumbers v_numbers = k_numbers;
        for (int step = segment.first_step; step <= end; step++) { // values one step behind keys, as they are needed
            if (step < end)
                load_step(s.k, s.k_ring, k_phase, k, k_numbers, step, segment.tokens, segment.kv_head,
                          problem.n_kv_heads, lane);
            if (step > segment.first_step)
                load_step(s.v, s.v_ring, v_phase, v, v_numbers, step - 1, segment.tokens, segment.kv_head,
                          problem.n_kv_heads, lane);
        }
    }
    if (lane == 0 && !problem.whole) cuts[blockIdx.x] = walk.cut;
}
