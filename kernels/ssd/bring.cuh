/* The role of one thread: says what is next, and brings its tiles by TMA. */
#pragma once
#include "chain.cuh"
#include "store.cuh"

struct Maps {
    const CUtensorMap &x, &b, &c, &z;
};

struct Bringer {
    Shared &s;
    const Sizes &sizes;
    const Maps &maps;
    Phase<STAGES> phase;
    Phase<2> turn, group_turn; // of z; of B and C, if they have a ring of their own
    Step step;     // the one that is brought next

    /* Which rows the pair has: those of a group in the order of shares.cuh, two by two. */
    __device__ __forceinline__ void choose(int pair) {
        const int of_group = pair % sizes.pairs_of_group, groups = pair / sizes.pairs_of_group;
        step.pair = pair, step.batch = groups / sizes.groups, step.group = groups % sizes.groups;
        const int row = step.group * sizes.rows + ROWS * of_group;
        step.kind = ROWS == 2 && 2 * of_group + 1 == sizes.rows ? SINGLE : 0;
        const bool ordered = sizes.rows * sizes.groups <= MOST_ROWS;
        const int next = row + (ROWS == 2 && step.has_row(1) ? 1 : 0);
        step.row0 = ordered ? s.order[row] : row, step.row1 = ordered ? s.order[next] : next;
    }

    /* All tiles of B or C. They are read anew for each pair: they are the last that L2 drops. */
    __device__ __forceinline__ void load_group(unsigned char (&to)[STATE_TILES][TILE], const CUtensorMap &map,
                                               int chunk, Barrier &full) {
        if constexpr (S::PADDED_STATE) {
#pragma unroll
            for (int tile = 0; tile < STATE_TILES; tile++)
                load_tile(to[tile], map, {{64 * tile, chunk * CHUNK, step.group, step.batch, 0}}, full, LEAVES_LAST);
        } else load_tile(to, map, {{0, chunk * CHUNK, 0, step.group, step.batch}}, full, LEAVES_LAST);
    }

    /* Pass 1 needs no C and no z. */
    __device__ __forceinline__ void load_tiles(int chunk, bool local) {
        const int stage = phase.stage;
        Barrier &full = s.ring.full[stage];
        full.expect(TILE * (ROWS + STATE_TILES + (local ? 0 : STATE_TILES)));
#pragma unroll
        for (int side = 0; side < ROWS; side++)
            load_tile(s.x[stage][side], maps.x, place_of_row(step, side, chunk), full, LEAVES_FIRST);
        const int place = place_of_group(phase);
        if (S::HALVES && !local) { // the place of C is free before that of B
            s.c_empty[place].wait(group_turn.parity ^ 1);
            load_group(s.c[place], maps.c, chunk, full);
        }
        if (S::HALVES) s.b_empty[place].wait(group_turn.parity ^ 1);
        load_group(s.b[place], maps.b, chunk, full);
        if (local) return;
        if (!S::HALVES) load_group(s.c[place], maps.c, chunk, full);
        if constexpr (S::GATED) load_z(chunk);
    }
    /* z is needed last: it has a ring of its own, as shared memory has no room for a third. */
    __device__ __forceinline__ void load_z(int chunk) {
        Barrier &full = s.z_ring.full[turn.stage];
        s.z_ring.wait_empty(turn);
        full.expect(ROWS * TILE);
#pragma unroll
        for (int side = 0; side < ROWS; side++)
            load_tile(s.z[turn.stage][side], maps.z, place_of_row(step, side, chunk), full, LEAVES_FIRST);
        turn.advance();
    }

    __device__ __forceinline__ bool pass_1_may_stop() const {
        return atomicOr(&s.pass_1_may_stop[0], 0) == step.ticket &&
               (ROWS == 1 || atomicOr(&s.pass_1_may_stop[1], 0) == step.ticket);
    }

    /* The next step. Or false: pass 1 needs no more. */
    __device__ __forceinline__ bool bring(int kind, int chunk) {
        s.ring.wait_empty(phase);
        if ((kind & LOCAL) && !(kind & FIRST) && pass_1_may_stop()) return false;
        step.kind = kind | (step.kind & SINGLE), step.chunk = chunk;
        s.steps[phase.stage] = step;
        s.planned[phase.stage].arrive();
        if (kind & (END | FLUSH)) s.ring.full[phase.stage].arrive();
        else load_tiles(chunk, kind & LOCAL);
        phase.advance();
        if (S::HALVES) group_turn.advance();
        return true;
    }

    /* Pass 1 of the last piece, backwards, where the next share needs it; then pass 2 of all pieces, the last first. */
    __device__ __forceinline__ void bring_share(const Share &share) {
        int publish = 0;
        const int last = share.last_pair();
        if (share.hands_on()) {
            choose(last);
            const int begin = share.begin(last), end = share.end(last);
            for (int i = end - 1; i >= begin; i--)
                if (!bring(LOCAL | (i == end - 1 ? FIRST : 0), i)) break;
            publish = PUBLISH;
        }
        for (int pair = last; pair >= share.first_pair(); pair -= sizes.together()) {
            const int end = share.end(pair);
            choose(pair);
            int i = share.begin(pair);
            for (int first = FIRST; i < end; i++, first = 0) {
                bring(publish | first | (i + 1 == end ? LAST : 0), i);
                publish = 0;
            }
        }
    }

    /* Until all that was brought has been used, and y written. */
    __device__ __forceinline__ void wait_until_written() {
        bring(FLUSH | LOCAL, 0);
        for (int i = 0; i < STAGES; i++) {
            const int later = phase.stage + i;
            s.ring.empty[later % STAGES].wait(phase.parity ^ (later < STAGES));
        }
    }

    /* A state that is infinite or NaN was handed on, and pass 1 may have stopped in front of it: such pairs are walked
       anew, as one piece. */
    __device__ __forceinline__ void bring_marked_pairs(const Chain &chain) {
        for (int pair = 0; pair < sizes.pairs; pair++) {
            if (!chain.take_mark(pair, s.launch)) continue; // another block has it
            choose(pair);
#pragma unroll 1
            for (int i = 0; i < sizes.chunks; i++) bring((i == 0 ? FIRST : 0) | (i + 1 == sizes.chunks ? LAST : 0), i);
        }
    }
};

/* taken: what the counter said for the block's first ticket. */
__device__ __forceinline__ void bring_tiles(Shared &s, const Sizes &sizes, const Chain &chain, const Maps &maps,
                                            Count taken) {
    const unsigned of_launch = sizes.tickets + gridDim.x; // that a launch takes
    const Count launch = taken / of_launch;
    s.launch = (unsigned)launch + 1;
    Bringer bringer{s, sizes, maps};
    int done = 0;
    int &ticket = bringer.step.ticket;
    for (ticket = taken % of_launch; ticket < sizes.tickets; done++) {
        const Count next = chain.take_ticket(); // early: it takes a while
        bringer.bring_share({s, sizes, ticket});
        ticket = next % of_launch;
    }
    bringer.wait_until_written();
    const bool marked = s.has_marked_pair;
    if (marked) {
        chain.tell_done(done);
        chain.wait_for_all((launch + 1) * sizes.tickets);
        fence_async_proxy_global(); // y is written by TMA again
        bringer.bring_marked_pairs(chain);
    }
    bringer.bring(END, 0);
    if (!marked) chain.tell_done(done); // nobody waits for it
}
