/* Which block has which work.

   An item is a run of tokens of one request, and the queries that look at them. Its units are row tiles of one kv head;
   TEAM neighbouring tiles go together, to as many neighbouring blocks: those read the same tokens at the same time,
   from L2 once. Two ways to share units out:

   - In a line: the steps of all units, one behind the other, are cut into equal shares, one for each team. Where a cut
     falls into a unit, its parts leave partial results for append_merge.cu.
   - Whole: units go by turns to the blocks, forth and back, an item's long ones first.

   All of it is found here, by the warp that brings pages, from lengths as they are now: nothing is planned before. */
#pragma once
#include "../device/reduce_integers.cuh"
#include "append_shape.cuh"

struct Item {
    int slot;       // row of the table
    int first_page; // of the run
    int tokens, seen, query, pairs; // as in Segment
};

/* What the launch says. */
struct Problem {
    const int *table, *lens, *items; // (max_requests, max_pages); (max_requests,); what items there are
    int n_items, queries;            // APPEND: new tokens of each; PREFIX: all rows of the list
    int n_kv_heads, n_pages, max_pages, max_requests, team;
    bool whole;

    /* APPEND: items are slots, (n_items,). PREFIX: (n_items, 5): slot, first token, tokens, first row of the list, rows.
       What is out of range is nobody, or ends where the range does. */
    __device__ __forceinline__ Item item(int i) const {
        Item item;
        item.slot = __ldg(items + (S::USE == APPEND ? i : 5 * i));
        const bool nobody = item.slot < 0 || item.slot >= max_requests;
        const int length = nobody ? 0 : min(max(__ldg(lens + item.slot), 0), max_pages * PAGE_SIZE);
        if constexpr (S::USE == APPEND) {
            item.first_page = 0, item.tokens = length, item.seen = length - queries + 1;
            item.query = i * queries, item.pairs = queries * GROUP;
        } else {
            item.first_page = max(__ldg(items + 5 * i + 1), 0) / PAGE_SIZE;
            item.tokens = max(min(__ldg(items + 5 * i + 2), length - item.first_page * PAGE_SIZE), 0);
            item.seen = item.tokens;
            item.query = min(max(__ldg(items + 5 * i + 3), 0), queries);
            item.pairs = min(max(__ldg(items + 5 * i + 4), 0), queries - item.query) * GROUP;
        }
        return item;
    }
    __device__ __forceinline__ int tiles(const Item &item) const { return (item.pairs + ROWS - 1) / ROWS; }
    /* One at least: who sees nothing gets zeros. */
    __device__ __forceinline__ int steps(const Item &item, int tile) const {
        int seen = item.tokens;
        if (S::USE == APPEND) seen = min(seen, item.seen + (min((tile + 1) * ROWS, item.pairs) - 1) / GROUP);
        return max(1, (seen + TOKENS - 1) / TOKENS);
    }
    __device__ __forceinline__ int teams(const Item &item) const { return (tiles(item) + team - 1) / team; }
    /* As many as the longest tile of a team has, its last. */
    __device__ __forceinline__ int team_steps(const Item &item, int of) const {
        return steps(item, min((of + 1) * team, tiles(item)) - 1);
    }
    __device__ __forceinline__ unsigned head_steps(const Item &item) const { // of all teams
        unsigned sum = 0;
        const int count = teams(item);
        if constexpr (S::USE == PREFIX) sum = count ? count * team_steps(item, 0) : 0; // all alike
        else
            for (int of = 0; of < count; of++) sum += team_steps(item, of);
        return sum;
    }
};

/* The first of `count` numbers with which the sum exceeds `at`, which becomes what is above the sum before it. */
template <class Number> __device__ __forceinline__ int find_in_sum(unsigned &at, int count, int lane, Number number) {
    for (int from = 0;; from += 32) {
        const unsigned mine = from + lane < count ? number(from + lane) : 0, sum = warp_sum_up_to(mine, lane);
        const unsigned above = __ballot_sync(~0u, sum > at);
        if (above || from + 32 >= count) {
            const int found = above ? __ffs(above) - 1 : 0;
            at -= __shfl_sync(~0u, sum - mine, found);
            return from + found;
        }
        at -= __shfl_sync(~0u, sum, 31);
    }
}

/* All lanes of a warp walk together. */
struct Walk {
    const Problem &problem;
    const int block, blocks, share; // the team's
    int shares;                     // none of them empty
    unsigned total;                 // steps of all units
    unsigned begin, here, end;      // of the share, on the line; where the walk is
    int number = 0;                 // of the item; if whole, turns so far
    int kv_head, team, step;        // of the item; of the kv head; of the unit
    int unit_end = -1;              // of the unit that the last segment was of
    Item item;
    Cut cut = {};

    __device__ __forceinline__ Walk(const Problem &problem, int lane)
        : problem(problem), block(blockIdx.x), blocks(gridDim.x), share(block / problem.team) {
        if (problem.whole) return;
        unsigned sum = 0;
        for (int i = lane; i < problem.n_items; i += 32) sum += item_steps(i);
        total = warp_sum((int)sum), shares = min((unsigned)(blocks / problem.team), total);
        begin = here = end = 0;
        if (share >= shares) return;
        begin = here = share_begin(share), end = share_begin(share + 1);
        unsigned at = here;
        number = find_in_sum(at, problem.n_items, lane, [&](int i) { return item_steps(i); });
        item = problem.item(number);
        const unsigned head_steps = problem.head_steps(item);
        kv_head = at / head_steps, at -= kv_head * head_steps;
        team = find_in_sum(at, problem.teams(item), lane, [&](int of) { return problem.team_steps(item, of); });
        step = at;
    }
    __device__ __forceinline__ unsigned item_steps(int i) const {
        return problem.n_kv_heads * problem.head_steps(problem.item(i));
    }
    __device__ __forceinline__ unsigned share_begin(int of) const { return (unsigned long long)total * of / shares; }
    __device__ __forceinline__ int share_of(unsigned at) const {
        return (int)((((unsigned long long)at + 1) * shares - 1) / total);
    }

    /* The next segment; one of 0 steps behind the last. */
    __device__ __forceinline__ Segment next() { return problem.whole ? next_whole() : next_in_line(); }

    __device__ __forceinline__ Segment segment(int tile, int first_step, int steps, int scratch) const {
        return {steps, first_step, tile * ROWS, item.pairs, item.query, kv_head, item.tokens, item.seen, scratch};
    }
    __device__ __forceinline__ Segment next_whole() {
        const int turn = number++, unit = turn % 2 ? (turn + 1) * blocks - 1 - block : turn * blocks + block;
        const int tiles = (problem.queries * GROUP + ROWS - 1) / ROWS, of_item = tiles * problem.n_kv_heads;
        if (unit >= problem.n_items * of_item) return Segment{};
        item = problem.item(unit / of_item);
        kv_head = unit % of_item / tiles;
        const int tile = tiles - 1 - unit % tiles;
        return segment(tile, 0, problem.steps(item, tile), -1);
    }
    __device__ __forceinline__ Segment next_in_line() {
        while (here < end) {
            if (step == unit_end) next_unit();
            const int tile = team * problem.team + block % problem.team, unit_steps = problem.team_steps(item, team);
            const int tile_steps = tile < problem.tiles(item) ? problem.steps(item, tile) : 0;
            const int first = step, stop = min(step + (int)(end - here), unit_steps), last = min(stop, tile_steps);
            const bool whole = first == 0 && last == tile_steps;
            const int scratch = whole ? -1 : 2 * block + (here != begin);
            const Segment found = segment(tile, first, last - first, scratch);
            if (first == 0 && last > 0 && !whole)
                cut = {share_of(here + tile_steps - 1) - share + 1, scratch, found.row, found.pairs, found.query,
                       found.kv_head, found.seen};
            here += stop - first, step = stop, unit_end = unit_steps;
            if (found.steps > 0) return found;
        }
        return Segment{};
    }
    __device__ __forceinline__ void next_unit() {
        step = 0;
        if (++team < problem.teams(item)) return;
        team = 0;
        if (++kv_head < problem.n_kv_heads) return;
        kv_head = 0;
        do item = problem.item(++number);
        while (item.pairs == 0); // here < end: there is one that is not
    }
};
