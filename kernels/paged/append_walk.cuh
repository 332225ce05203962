/* Which block has which work.

   An item is a run of tokens of one request, and the queries that look at them. A unit is a row tile of one kv head;
   or TEAM neighbouring tiles, which the blocks of a team take together, at about the same time: they need the same
   tokens, which are then in L2. So it is for the items in front that have several tiles; from the first that has one,
   each block is for itself. Two ways to share units out:

   - In a line: the steps of all units, one behind the other, are cut into shares that cost the same, one for each
     team. What is not taken together lies behind all that is, and blocks of a team take half of it each. Where
     a cut falls into a unit, its parts leave partial results for append_merge.cu.
   - Whole: units go by turns to the teams, forth and back, long ones first, of as many items at a time as there
     are teams for.

   All of it is found here, by the warp that brings pages, from lengths as they are now: nothing is planned before. */
#pragma once
#include "../device/reduce_integers.cuh"
#include "append_shape.cuh"

/* What a step costs: of a unit that a team takes together, where products are the limit; of a single tile, which
   has few rows where there is another choice, and waits for memory. */
constexpr unsigned COST_TOGETHER = S::USE == SHARED ? 3 : 1, COST_APART = 1;

struct Item {
    int slot;       // row of the table
    int first_page; // of the run
    int tokens, seen, query, pairs = 0; // as in Segment
    int width;      // tiles of a unit

    __device__ __forceinline__ int tiles() const { return (pairs + ROWS - 1) / ROWS; }
    __device__ __forceinline__ int units() const { return (tiles() + width - 1) / width; }
    /* Of a unit: as many as its last tile has, the longest. One at least: who sees nothing gets zeros. */
    __device__ __forceinline__ int steps(int unit) const {
        int most = tokens;
        if (S::USE == APPEND) most = min(most, seen + (min((unit + 1) * width * ROWS, pairs) - 1) / GROUP);
        return max(1, (most + TOKENS - 1) / TOKENS);
    }
    __device__ __forceinline__ unsigned head_steps() const { // of all units of a kv head
        const int count = units();
        if (S::USE == SHARED) return count ? count * steps(0) : 0; // all alike
        unsigned sum = 0;
        for (int unit = 0; unit < count; unit++) sum += steps(unit);
        return sum;
    }
};

/* What the launch says. */
struct Problem {
    const int *table, *lens, *items; // (max_requests, max_pages); (max_requests,); what items there are
    int n_items, queries;            // APPEND: new tokens of each; SHARED: all rows of the list
    int n_kv_heads, n_pages, max_pages, max_requests;
    bool whole;

    /* APPEND: items are slots, (n_items,). SHARED: (n_items, 5): slot, first token, tokens, first row of the list,
       rows. What is out of range is nobody, or ends where the range does. */
    __device__ __forceinline__ Item item(int i, bool together) const {
        Item item;
        item.width = together ? TEAM : 1;
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

/* The line: first the steps of what is taken together, then of what is not. All lanes of a warp have the same. */
struct Line {
    int together = 0;               // items in front that are
    unsigned paired = 0, single = 0; // steps of those, and of all others
    unsigned cost = 0, shares = 0;  // of all; for teams, none of them empty

    __device__ __forceinline__ Line(const Problem &problem, int lane) {
        if (problem.whole) return;
#pragma unroll 4
        for (int from = 0; from < problem.n_items; from += 32) {
            Item mine;
            if (from + lane < problem.n_items) mine = problem.item(from + lane, false);
            const unsigned alone = __ballot_sync(~0u, TEAM == 1 || mine.tiles() <= 1);
            if (together == from) together += alone ? __ffs(alone) - 1 : 32;
            mine.width = from + lane < together ? TEAM : 1;
            (mine.width > 1 ? paired : single) += problem.n_kv_heads * mine.head_steps();
        }
        paired = warp_sum((int)paired), single = warp_sum((int)single);
        cost = COST_TOGETHER * paired + COST_APART * single;
        shares = min(gridDim.x / TEAM, max(cost / max(COST_TOGETHER, TEAM * COST_APART), 1));
    }
    /* Where the share of a team begins: among the steps that are taken together, or among the others. */
    __device__ __forceinline__ unsigned begin(unsigned share, bool of_paired) const {
        const unsigned at = (unsigned long long)cost * share / shares, first = COST_TOGETHER * paired;
        return of_paired ? min(at / COST_TOGETHER, paired) : at > first ? (at - first) / COST_APART : 0;
    }
    __device__ __forceinline__ unsigned begin_of_block(unsigned share, unsigned rank) const { // among the others
        const unsigned from = begin(share, false);
        return from + (begin(share + 1, false) - from) * rank / TEAM;
    }
    /* The block, or the first of the team, that has a step. */
    __device__ __forceinline__ int block_of(unsigned step, bool of_paired) const {
        const unsigned end = of_paired ? COST_TOGETHER * (step + 1)
                                       : COST_TOGETHER * paired + COST_APART * (step + 1);
        const unsigned share = ((unsigned long long)end * shares - 1) / cost;
        return share * TEAM + (!of_paired && TEAM > 1 && step >= begin_of_block(share, 1));
    }
};

/* All lanes of a warp walk together. */
struct Walk {
    const Problem &problem;
    const Line line;
    const unsigned rank, share;  // of the block, in its team; of the team
    bool paired = true;          // where on the line the walk is
    unsigned begin, here, end;   // of the share there
    int number = 0;              // of the item; if whole, turns so far
    int kv_head, unit, step;     // of the item; of the kv head; of the unit
    Item item;

    __device__ __forceinline__ Walk(const Problem &problem, unsigned rank, int lane)
        : problem(problem), line(problem, lane), rank(rank), share(blockIdx.x / TEAM) {
        here = end = 0;
        if (share < line.shares && line.cost)
            enter(line.begin(share, true), line.begin(share + 1, true), lane);
    }
    __device__ __forceinline__ void enter(unsigned from, unsigned to, int lane) {
        begin = here = from, end = to;
        if (from == to) return;
        unsigned at = from;
        const int first = paired ? 0 : line.together, count = (paired ? line.together : problem.n_items) - first;
        number = first + find_in_sum(at, count, lane, [&](int i) {
            return problem.n_kv_heads * problem.item(first + i, paired).head_steps();
        });
        item = problem.item(number, paired);
        const unsigned head_steps = item.head_steps();
        kv_head = at / head_steps, at -= kv_head * head_steps;
        unit = find_in_sum(at, item.units(), lane, [&](int i) { return item.steps(i); });
        step = at;
    }

    /* The next segment; one of 0 steps behind the last. */
    __device__ __forceinline__ Segment next(int lane) { return problem.whole ? next_whole() : next_in_line(lane); }

    __device__ __forceinline__ Segment segment(int first_step, int steps) const {
        const int tile = item.width > 1 ? unit * TEAM + rank : unit;
        return {steps, first_step, tile * ROWS, item.pairs, item.query, kv_head, item.tokens, item.seen, 1, -1, 0, 0};
    }
    __device__ __forceinline__ Segment next_whole() {
        const int turn = number++, teams = gridDim.x / TEAM, heads = problem.n_kv_heads;
        const int tiles = (problem.queries * GROUP + ROWS - 1) / ROWS, width = tiles > 1 ? TEAM : 1;
        const int units = (tiles + width - 1) / width, items = (teams + heads - 1) / heads; // side by side
        const int at = turn * teams + (turn % 2 ? teams - 1 - share : share), all = items * heads * units;
        const int first = at / all * items, rest = at % all, abreast = min(items, problem.n_items - first) * heads;
        if (rest >= abreast * units) return Segment{};
        item = problem.item(first + rest % abreast / heads, width > 1);
        kv_head = rest % heads;
        unit = units - 1 - rest / abreast;
        return segment(0, item.steps(unit));
    }
    __device__ __forceinline__ Segment next_in_line(int lane) {
        if (here == end && paired) {
            paired = false;
            if (share < line.shares && line.cost)
                enter(line.begin_of_block(share, rank), line.begin_of_block(share, rank + 1), lane);
        }
        if (here == end) return Segment{};
        if (here > begin && step == item.steps(unit)) next_unit();
        const int unit_steps = item.steps(unit), steps = min((int)(end - here), unit_steps - step);
        Segment found = segment(step, steps);
        if (steps < unit_steps) {
            const int block = blockIdx.x, first = paired ? 0 : 1; // where a share begins with the rest of a unit
            found.place = PLACES * block + (here == begin ? first : PLACES - 1);
            if (step == 0) {
                const int last = line.block_of(here + unit_steps - 1, paired);
                found.stride = PLACES * item.width, found.next_place = PLACES * block + found.stride + first;
                found.parts = (last - block + (paired ? rank : 0)) / item.width + 1;
            } else found.parts = 0;
        }
        here += steps, step += steps;
        return found;
    }
    __device__ __forceinline__ void next_unit() {
        step = 0;
        if (++unit < item.units()) return;
        unit = 0;
        if (++kv_head < problem.n_kv_heads) return;
        kv_head = 0;
        do item = problem.item(++number, paired);
        while (item.pairs == 0); // here < end: there is one that is not
    }
};
