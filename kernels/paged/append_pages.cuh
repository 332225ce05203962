/* The role of one warp: it brings pages of keys and values, and says what is to be done with them.

   Eight tokens lie in shared memory as TMA brings them: half by half of a head's channels, each 8 rows of 128 bytes,
   swizzled. So the layout does not depend on the page's size, and a page is one box of five axes.

   Behind the last token nothing is read: a freed page may hold NaN there, and 0 * NaN is NaN. What lies outside of a
   map comes as zeros. So pages that a step does not have are asked for behind the pool's end. Of the page in which the
   tokens end, eights are asked for one by one; and the last eight, if it has but r tokens, from its row r - 8 on: zeros
   first, then its r tokens, in the last r of its places. (A box that ended early would have to begin early, too.) The
   mask knows. */
#pragma once
#include "append_walk.cuh"

constexpr int PAGES = TOKENS / PAGE_SIZE, PAGE_EIGHTS = PAGE_SIZE / 8;

/* Page numbers of a segment, one a lane, loaded 32 pages before they are needed. */
struct PageNumbers {
    const int *row; // of the table, from the item's first page on
    int pages, n_pages; // of the item; of the pool
    int at, now, ahead; // the first page of those in the lanes

    __device__ __forceinline__ PageNumbers(const Problem &problem, const Item &item, int first_page, bool any,
                                           int lane)
        : row(problem.table + (long long)item.slot * problem.max_pages + item.first_page),
          pages(any ? (item.tokens + PAGE_SIZE - 1) / PAGE_SIZE : 0), n_pages(problem.n_pages), at(first_page),
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

__device__ __forceinline__ void load_box(void *to, const CUtensorMap &map, Place place, Barrier &full) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)), "l"(&map), "r"(place.at[0]),
                 "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]), "r"(place.at[4]), "r"(full.at()) : "memory");
}

/* Keys, or values: their map, their ring, and which pages come next. */
struct Side {
    unsigned char (&slots)[STAGES][STEP_BYTES];
    Ring<STAGES> &ring;
    const Maps maps;
    Phase<STAGES> phase;

    /* Ask for a step once there is room. */
    __device__ __forceinline__ void load(const Segment &segment, PageNumbers &numbers, int step, int n_kv_heads,
                                         int lane) {
        const int page = numbers.of_step(step, lane) * n_kv_heads + segment.kv_head;
        unsigned char *to = slots[phase.stage] + lane * (PAGE_EIGHTS * EIGHT);
        Barrier &full = ring.full[phase.stage];
        ring.wait_empty(phase);
        if (lane == 0) full.expect(STEP_BYTES);
        __syncwarp();
        if (lane < PAGES) {
            const int left = segment.tokens - (step * TOKENS + lane * PAGE_SIZE); // from this page's first token on
            if (left >= PAGE_SIZE) load_box(to, maps.pages, {{0, 0, 0, 0, page}}, full);
            else if (left <= 0) load_box(to, maps.pages, {{0, 0, 0, 0, page}}, full); // zeros
            else
                for (int eight = 0; eight < PAGE_EIGHTS; eight++) {
                    const int there = left - 8 * eight, row = there < 8 ? max(there, 0) - 8 : 0;
                    load_box(to + eight * EIGHT, maps.eights, {{0, row, 0, eight, page}}, full);
                }
        }
        __syncwarp();
        phase.advance();
    }
};

/* Say what the next segment is. Returns its page numbers, which are on their way. */
__device__ __forceinline__ PageNumbers announce(Shared &s, Phase<SEGMENTS> &place, const Problem &problem, Walk &walk,
                                                int lane) {
    const Segment segment = walk.next(lane);
    s.segment_ring.wait_empty(place);
    if (lane == 0) {
        s.segments[place.stage] = segment;
        s.segment_ring.full[place.stage].arrive();
    }
    __syncwarp();
    place.advance();
    return PageNumbers(problem, walk.item, segment.first_step * PAGES, segment.steps > 0, lane);
}

__device__ __forceinline__ void bring_pages(Shared &s, const Problem &problem, const Maps &k, const Maps &v,
                                            Segment *lasts, int rank, int lane) {
    Walk walk(problem, rank, lane);
    Phase<SEGMENTS> announced, here;
    Side keys{s.k, s.k_ring, k}, values{s.v, s.v_ring, v};
    PageNumbers next = announce(s, announced, problem, walk, lane);
    const int newest = S::USE == APPEND ? problem.queries : 1; // tokens of a request that the kernel ahead may write
    for (; s.segments[here.stage].steps; here.advance()) {
        const Segment &segment = s.segments[here.stage];
        const int first = segment.first_step, end = first + segment.steps;
        PageNumbers k_numbers = next, v_numbers = next;
        for (int step = first; step <= end; step++) { // values one step behind keys, as they are needed
            if ((step + 1) * TOKENS > segment.tokens - newest) wait_for_previous_kernel(); // or it is over at once
            if (step < end) keys.load(segment, k_numbers, step, problem.n_kv_heads, lane);
            if (step > first) values.load(segment, v_numbers, step - 1, problem.n_kv_heads, lane);
            else next = announce(s, announced, problem, walk, lane); // early: page numbers are there in time
        }
    }
    wait_for_previous_kernel();
    if (lane == 0 && S::USE == APPEND && !problem.whole) // the last one may be a tile's first part
        lasts[blockIdx.x] = s.segments[(here.stage + SEGMENTS - 1) % SEGMENTS];
}
