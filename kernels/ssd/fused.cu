/* The best rung of the Mamba-2 SSD layer: one launch, for Hopper (sm_90a: TMA, mbarriers, wgmma).

   New since tuned:
   - A block has two rows of a group, and four warpgroups with roles of their own: two multiply, one row each; one makes
     the scores of both (C B^T is the same for all heads of a group); of the last, two warps turn dt into decays, one
     brings tiles by TMA, and one sends y off by TMA, from where x was. They hand over through mbarriers, STAGES chunks
     deep.
   - The state stays in registers, transposed: (headdim, dstate). So it is the left operand of y^T = state C^T and the
     accumulator of state += (x w)^T B, and never passes through shared memory.
   - Sums of A dt begin at each multiple of 16 tokens. Between blocks of 16 the decay is a number of the row times one
     of the column, so that only blocks on the diagonal take an exponential for each pair of tokens, and no difference
     of long sums loses digits.
   - All multiprocessors have work of equal length, which need not be whole segments: see share_out. Rows that decay
     alike are put together, as pass 1 of a pair is as long as its slower row makes it.

   Two passes, as in segments: a share whose last piece of a pair goes on in another share first walks it backwards for
   its end state (pass 1; it ends where what is left has decayed by 2^stop), publishes that, and then walks all its
   chunks (pass 2). B and C are read anew for each pair: they are the last that L2 drops, x, y and z the first.

   What stop leaves out. Beyond 2^-127 a decay is 0 in these registers, as results below 2^-126 are flushed to 0. So a
   stop of -127 or less leaves out products with 0 alone: the same numbers as without, with the same shares, for
   whatever is finite. Infinity and NaN times 0 would be NaN. A share that hands on a state with one of these marks the
   pair; its block waits until all tickets are done, which it may, having none left itself, and walks marked pairs anew
   as one piece.

   Numbering as in ref/ssd.py: 1 decays (the last warpgroup), 2 C B^T (the third), 3 and 4 the state, 5 y.

   What decides its speed is a chain: state to y to the next state, some 3,000 cycles a chunk, in which the tensor cores
   work half of the time. So warps do what they can before they wait; what does not need the state is made by others;
   and descriptors of tiles lie in uniform registers, for which the compiler must see that all lanes agree on the stage
   (`uniform`), and may meet no branch behind which they could not.

   Symbols: x, y, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, DSTATE); a chunk is 64 tokens. A row
   is 64 columns of x: a head, or half of one. A pair is two rows of one group.

   Order between blocks. Tickets come from an atomic counter, so a block waits for tickets that are taken, by blocks
   that run. Pass 1 waits for nobody; pass 2 of a ticket waits for pass 1 of tickets before it. The counter is never
   reset: a launch takes tickets + gridDim.x of it, and the quotient is the number of the launch, which is what a raised
   flag holds. So a launch needs no cleared memory and can stand in a graph; two that may run at once, or that take
   another number of tickets or blocks, need counters and flags of their own.

   Moves, besides pass 1, x, z and y once, B and C once for each pair (from L2 while they fit there), dt a sector for
   each token and row, and 4 * 64 * DSTATE bytes of state a few times for each share. For each chunk and row DSTATE *
   64 * (64 + 64 + 32) + 64 * 64 * 64 * 3 / 4 multiplications and additions.

   Compile with DSTATE (64, 128), HALVES (headdim / 64), BF16, DT_T, BIAS_T, D_T (types of these tensors), SOFTPLUS,
   D_ROWS (0 no D, 1 a number a head, 2 one a column), Z, STAGES, SHARED (bytes). Launch with 512 threads on as many
   blocks as there are multiprocessors, or as tickets if these are fewer. Maps of x, b, c and z: see load_tiles.
   counter: the tickets taken, those done, and the flags; zeros at the first launch, then left alone. stop: log2,
   negative; -infinity for never. */
#include "decays.cuh"

// ---- between blocks ----

/* What blocks leave for each other. */
struct Scratch {
    float *pieces;   // (tickets, 2, MINE): end states of pass 1
    float *logs;     // (tickets, 2): log2 of the decay over what pass 1 walked
    unsigned *flags; // (tickets, 2); they lie behind the two counters
    unsigned *marks; // (pairs,): of those to walk anew
    DEVICE Scratch(const Sizes &s, float *memory, u64 *counter)
        : pieces(memory), logs(pieces + 2ll * s.tickets * MINE), flags(reinterpret_cast<unsigned *>(counter + 2)),
          marks(flags + 2ll * s.tickets) {}
};

DEVICE unsigned look(const unsigned *flag) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
DEVICE u64 look(const u64 *count) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(count) : "memory");
    return value;
}
/* By a whole warp at once, and without a branch for one lane: see `uniform`. */
DEVICE void mark(unsigned *to, unsigned value) {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
DEVICE void raise_flag(unsigned *flag, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ---- the last warpgroup: tiles (and step 1, in decays.cuh) ----

DEVICE void bring_tiles(Shared &s, const Sizes &sizes, const Scratch &scratch, const CUtensorMap *x,
                        const CUtensorMap *b, const CUtensorMap *c, const CUtensorMap *z, u64 *counter, u64 taken) {
    const unsigned a_launch = sizes.tickets + gridDim.x;
    s.launch = (unsigned)(taken / a_launch) + 1;
    int ticket = taken % a_launch, stage = 0, turn = 0, done = 0;

    Step step{};
    auto bring = [&](int kind, int chunk) {
        wait(&s.empty[stage], turn ^ 1);
        if ((kind & LOCAL) && !(kind & FIRST) && atomicOr(&s.enough[0], 0) == ticket &&
            atomicOr(&s.enough[1], 0) == ticket)
            return false;
        step.kind = kind | (step.kind & SINGLE), step.chunk = chunk, step.ticket = ticket;
        s.steps[stage] = step;
        arrive(&s.planned[stage]);
        if (kind & (END | FLUSH)) {
            arrive(&s.full[stage]);
            if (++stage == STAGES) stage = 0, turn ^= 1;
            return true;
        }
        const bool local = kind & LOCAL;
        u64 *full = &s.full[stage];
        arrive_and_expect(full, TILE * (2 + SIDES + (local ? 0 : SIDES + 2 * Z)));
        const int token = chunk * CHUNK;
#pragma unroll
        for (int side = 0; side < 2; side++)
            load_tiles(at(s.x[stage][side]), x, token, step.half(side), step.head(side), step.batch, full);
        load_tiles(at(s.b[stage]), b, token, 0, step.group, step.batch, full, AGAIN);
        if (!local) {
            load_tiles(at(s.c[stage]), c, token, 0, step.group, step.batch, full, AGAIN);
            if (Z)
                for (int side = 0; side < 2; side++)
                    load_tiles(at(s.z[Z ? stage : 0][side]), z, token, step.half(side), step.head(side), step.batch,
                               full);
        }
        if (++stage == STAGES) stage = 0, turn ^= 1;
        return true;
    };
    auto choose = [&](int pair) {
        const int of_group = pair % sizes.pairs_of_group, groups = pair / sizes.pairs_of_group;
        step.pair = pair, step.batch = groups / sizes.groups, step.group = groups % sizes.groups;
        const int row = step.group * sizes.rows + 2 * of_group;
        step.kind = 2 * of_group + 1 == sizes.rows ? SINGLE : 0;
        const bool ordered = sizes.rows * sizes.groups <= MOST_ROWS;
        const int next = row + (step.real(1) ? 1 : 0);
        step.row0 = ordered ? s.order[row] : row, step.row1 = ordered ? s.order[next] : next;
    };

    while (ticket < sizes.tickets) {
        const u64 next = atomicAdd(counter, 1ull); // early: it takes a while
        const int from = s.cuts[ticket] >> 16, to = min(s.cuts[ticket + 1] >> 16, sizes.pairs - 1);
        int publish = 0;
        const int low = cut(s, sizes, ticket, to), high = cut(s, sizes, ticket + 1, to);
        if (low < high && high < sizes.chunks) { // pass 1, backwards
            choose(to);
            for (int i = high - 1; i >= low; i--)
                if (!bring(LOCAL | (i == high - 1 ? FIRST : 0), i)) break;
            publish = PUBLISH;
        }
        for (int pair = to; pair >= from; pair--) { // pass 2
            const int stop = cut(s, sizes, ticket + 1, pair);
            choose(pair);
            int i = cut(s, sizes, ticket, pair);
            for (int first = FIRST; i < stop; i++, first = 0) {
                bring(publish | first | (i + 1 == stop ? LAST : 0), i);
                publish = 0;
            }
        }
        ticket = next % a_launch, done++;
    }
    bring(FLUSH | LOCAL, 0);
    for (int i = 0; i < STAGES; i++) { // all that was brought has been used, and y written
        const int later = stage + i;
        wait(&s.empty[later % STAGES], turn ^ (later < STAGES));
    }
    const bool lost = s.lost;
    auto tell = [&] {
        __threadfence();
        atomicAdd(counter + 1, (u64)done);
    };
    if (lost) {
        tell();
        const u64 all = (taken / a_launch + 1) * sizes.tickets;
        while (look(counter + 1) < all) continue;
        asm volatile("fence.proxy.async.global;" ::: "memory"); // y is written by TMA again
        for (int pair = 0; pair < sizes.pairs; pair++) {
            unsigned *mark = scratch.marks + pair;
            if (look(mark) != s.launch || atomicCAS(mark, s.launch, 0) != s.launch) continue; // another block has it
            choose(pair);
#pragma unroll 1
            for (int i = 0; i < sizes.chunks; i++) bring((i == 0 ? FIRST : 0) | (i + 1 == sizes.chunks ? LAST : 0), i);
        }
    }
    bring(END, 0);
    if (!lost) tell(); // nobody waits for it
}

/* y, as the multiplying warpgroups leave it in the place of x. */
DEVICE void store_tiles(Shared &s, const CUtensorMap *y) {
    int stage = 0, turn = 0;
    unsigned y_turns = 0; // a bit for each stage
    for (;;) {
        wait(&s.full[stage], turn);
        const Step &step = s.steps[stage];
        if (step.kind & END) break;
        if (step.kind & FLUSH) {
            stores_written();
            __threadfence();
        }
        if (!(step.kind & LOCAL)) {
            wait(&s.y_full[stage], y_turns >> stage & 1);
            y_turns ^= 1 << stage;
            for (int side = 0; side < 2; side++)
                if (step.real(side))
                    store_tile(y, at(s.x[stage][side]), step.chunk * CHUNK, step.half(side), step.head(side),
                               step.batch);
            stores_commit();
            stores_read();
        }
        arrive(&s.empty[stage]);
        if (++stage == STAGES) stage = 0, turn ^= 1;
    }
    stores_written();
}

// ---- the third warpgroup: step 2, with the decays between two tokens of a chunk ----

/* What the warp of block BLOCK makes of its 16 tokens i and all tokens j up to them: of C B^T, scores of one side. */
template <int BLOCK> DEVICE void write_scores(const float (&g)[32], const Decays &by, unsigned tile, float own) {
    const int lane = threadIdx.x % 32, j = lane % 4 * 2; // the first of the thread, in a block of 16 x 16
    const float2 far0 = by.far[0], far1 = by.far[1];
    const float u[2] = {by.u[16 * BLOCK + lane / 4], by.u[16 * BLOCK + lane / 4 + 8]};
    const float from[2] = {exp2_(u[0]), exp2_(u[1])}; // from the block's start
    // As stmatrix wants it: lane l has row l % 8 of matrix l / 8, of 2 x 2.
    const int row = 16 * BLOCK + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k <= BLOCK; k++) { // blocks of 16 tokens j
        float m[8];
        if (k < BLOCK) {
            const float between = BLOCK - k == 1 ? 1 : BLOCK - k == 3 ? far1.x : k ? far0.y : far0.x;
            const float first = from[0] * between, second = from[1] * between; // from the end of block k
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 to = *(const float2 *)&by.rest[16 * k + 8 * h + j];
                m[4 * h + 0] = g[8 * k + 4 * h + 0] * (to.x * first);
                m[4 * h + 1] = g[8 * k + 4 * h + 1] * (to.y * first);
                m[4 * h + 2] = g[8 * k + 4 * h + 2] * (to.x * second);
                m[4 * h + 3] = g[8 * k + 4 * h + 3] * (to.y * second);
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 v = *(const float2 *)&by.u[16 * k + 8 * h + j];
                const float2 dt = *(const float2 *)&by.dt[16 * k + 8 * h + j];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (h == 1 && e < 2) { // i is before j
                        m[4 * h + e] = 0;
                        continue;
                    }
                    const int ii = lane / 4 + e / 2 * 8, jj = 8 * h + j + e % 2;
                    float value =
                        g[8 * k + 4 * h + e] * (exp2_(u[e / 2] - (e % 2 ? v.y : v.x)) * (e % 2 ? dt.y : dt.x));
                    if (h == 0 && e >= 2) { // j is before i
                        m[4 * h + e] = value;
                        continue;
                    }
                    if (D_ROWS == 1 && ii == jj) value += own;
                    m[4 * h + e] = ii < jj ? 0 : value;
                }
            }
        }
        write_matrices(tile + place(row, 2 * k + lane / 16), pack(m[0], m[1]), pack(m[2], m[3]), pack(m[4], m[5]),
                       pack(m[6], m[7]));
    }
}

DEVICE void make_scores(Shared &s, const Sizes &sizes, const D_T *d_skip) {
    const int lane = threadIdx.x % 32, block = uniform(threadIdx.x / 32 % 4); // its 16 tokens i
    int stage = 0, turn = 0, place_of = -1;
    unsigned count = 0;
    float d[2] = {0, 0};
    // Of the blocks above the diagonal those in the second column of each two are multiplied: they stay zero.
    if (block % 2 == 0)
        for (int k = 0; k < 4; k++)
            write_matrices(at(s.scores[k / 2][k % 2]) +
                               place(16 * block + lane / 8 % 2 * 8 + lane % 8, 2 * (block + 1) + lane / 16),
                           0, 0, 0, 0);
    for (;;) {
        wait(&s.full[stage], turn);
        const int here = uniform(stage), kind = uniform(s.steps[here].kind);
        if (kind & END) return;
        if (!(kind & LOCAL)) {
            float g[32];
            const unsigned b = at(s.b[here]), c = at(s.c[here]);
            products_begin();
#pragma unroll
            for (int k = 0; k < DSTATE / 16; k++)
                product(g, moved(rows_of(c), k / 4 * TILE + k % 4 * 32), moved(rows_of(b), k / 4 * TILE + k % 4 * 32),
                        k > 0);
            products_commit();
            const Step &step = s.steps[here];
            if (D_ROWS == 1 && step.pair != place_of) {
                place_of = step.pair;
#pragma unroll
                for (int side = 0; side < 2; side++) d[side] = as_float(d_skip[step.head(side)]);
            }
            const int other = uniform(count % 2);
            wait(&s.scores_empty[other], count / 2 % 2 ^ 1);
            products_wait<0>();
            hold(g);
            const Decays &by0 = s.decays[here][0], &by1 = s.decays[here][1];
            const unsigned tile0 = at(s.scores[other][0]), tile1 = at(s.scores[other][1]);
            // Without a branch within: so the compiler can read early.
            if (block == 0) {
                write_scores<0>(g, by0, tile0, d[0]);
                write_scores<0>(g, by1, tile1, d[1]);
            } else if (block == 1) {
                write_scores<1>(g, by0, tile0, d[0]);
                write_scores<1>(g, by1, tile1, d[1]);
            } else if (block == 2) {
                write_scores<2>(g, by0, tile0, d[0]);
                write_scores<2>(g, by1, tile1, d[1]);
            } else {
                write_scores<3>(g, by0, tile0, d[0]);
                write_scores<3>(g, by1, tile1, d[1]);
            }
            show_to_tma();
            __syncwarp();
            if (lane == 0) arrive(&s.scores_full[other]);
            count++;
        }
        __syncwarp();
        if (lane == 0) arrive(&s.empty[stage]);
        if (++stage == STAGES) stage = 0, turn ^= 1;
    }
}

// ---- the first two warpgroups: steps 3, 4 and 5, a row of heads each ----

/* Fragments of x^T for four products: rows are columns of x, 16 of them a warp. */
DEVICE void fragments_of(unsigned (&f)[16], unsigned x) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int k = 0; k < 4; k++)
        read_transposed(f + 4 * k, x + place(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
}
/* Whether any of the warp's numbers is infinite or NaN. */
DEVICE bool not_finite(float a, float b, float c, float d) { return !(a * 0 + b * 0 + c * 0 + d * 0 == 0); }
DEVICE bool not_finite(const float (&state)[NUMBERS]) {
    float none = 0;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) none = fmaf(state[i], 0, none);
    return none != 0;
}
/* x^T scores^T again, of the tokens up to each token alone: in the product an infinite x met the zeros of scores. */
DEVICE void from_earlier(float (&early)[16], float (&late)[16], const unsigned char *x, const unsigned char *scores) {
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 % 4 * 16 + lane / 4;
    auto at = [](const unsigned char *tile, int row, int column) {
        return half_at(tile + place(row, column / 8) + column % 8 * 2);
    };
#pragma unroll
    for (int i = 0; i < 16; i++) early[i] = late[i] = 0;
    for (int j = 0; j < CHUNK; j++) {
        const float x0 = at(x, j, column), x1 = at(x, j, column + 8);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int i = n / 2 * 8 + lane % 4 * 2 + n % 2;
            if (j > i) continue;
            const float by = at(scores, i, j);
            float *to = n < 8 ? early + n / 2 * 4 + n % 2 : late + n / 2 * 4 - 16 + n % 2;
            to[0] += by * x0, to[2] += by * x1;
        }
    }
}
/* (x w)^T. Weights in halves are precise enough, unless all are tiny. */
DEVICE void weigh(unsigned (&f)[16], const unsigned (&x)[16], const Decays &by) {
    const int lane = threadIdx.x % 32;
    if (by.precise) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 w = *(const float2 *)&by.leave[8 * (i / 2) + lane % 4 * 2], v = unpack(x[i]);
            f[i] = pack(v.x * w.x, v.y * w.y);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 w = *(const uint4 *)&by.leave_half[place_of_half(32 * i + lane % 4 * 2)];
            f[8 * i + 0] = times(x[8 * i + 0], w.x), f[8 * i + 1] = times(x[8 * i + 1], w.x);
            f[8 * i + 2] = times(x[8 * i + 2], w.y), f[8 * i + 3] = times(x[8 * i + 3], w.y);
            f[8 * i + 4] = times(x[8 * i + 4], w.z), f[8 * i + 5] = times(x[8 * i + 5], w.z);
            f[8 * i + 6] = times(x[8 * i + 6], w.w), f[8 * i + 7] = times(x[8 * i + 7], w.w);
        }
    }
}

DEVICE void add_to_state(float (&state)[NUMBERS], const unsigned (&f)[16], unsigned b) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        product_of_fragment_turned<DSTATE>(state, f + 4 * k, moved(columns_of(b), 16 * k * ROW), 1);
}

/* States in scratch memory lie as the threads hold them, 16 bytes of each thread side by side. */
DEVICE void write_state(float *to, const float (&state)[NUMBERS]) {
#pragma unroll
    for (int i = 0; i < NUMBERS / 4; i++)
        reinterpret_cast<float4 *>(to)[128 * i + threadIdx.x % 128] =
            make_float4(state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]);
}
DEVICE void add_state(float (&state)[NUMBERS], const float *from, float by) {
#pragma unroll
    for (int i = 0; i < NUMBERS / 4; i++) {
        const float4 v = __ldcg(reinterpret_cast<const float4 *>(from) + 128 * i + threadIdx.x % 128);
        state[4 * i] += by * v.x, state[4 * i + 1] += by * v.y;
        state[4 * i + 2] += by * v.z, state[4 * i + 3] += by * v.w;
    }
}

/* Where a thread's numbers 4 i and 4 i + 1 lie in a (headdim, dstate) matrix; 4 i + 2 and + 3 are eight rows below. */
DEVICE int spot_of(int i) {
    return (threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) * DSTATE + 8 * i + threadIdx.x % 4 * 2;
}

DEVICE void wait_for(const unsigned *flag, unsigned value, int side) {
    if (threadIdx.x % 128 == 0)
        while (look(flag) != value) continue;
    meet<128>(1 + side);
}
/* All threads' stores come before the flag: they are in order before this thread by the barrier, and what it knows is
   published by the release. The fence in front of it would do as well, with a relaxed store; one of the two is enough. */
DEVICE void publish(unsigned *flag, unsigned value, int side) {
    meet<128>(1 + side);
    if (threadIdx.x % 128 == 0) {
        __threadfence();
        raise_flag(flag, value);
    }
}

/* Step 4: the state before the first chunk of a piece, from pass 1 of the pieces before it, the newest first. Always in
   this order: the same bits in every run. */
DEVICE void enter(float (&state)[NUMBERS], const Shared &s, const Step &step, const Sizes &sizes,
                  const Scratch &scratch, const float *initial, unsigned launch, int side) {
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) state[i] = 0;
    if (!step.real(side)) return;
    float log = 0;
    for (int ticket = step.ticket, spot = step.chunk; spot > 0;) {
        const int begin = cut(s, sizes, --ticket, step.pair);
        if (begin == spot) continue; // nothing of this pair
        wait_for(scratch.flags + 2 * ticket + side, launch, side);
        add_state(state, scratch.pieces + (2ll * ticket + side) * MINE, exp2_(log));
        log += __ldcg(scratch.logs + 2 * ticket + side);
        if (log < sizes.stop) return;
        spot = begin;
    }
    if (initial) {
        const float by = exp2_(log), *from = initial + step.column(side, sizes.heads) * DSTATE;
#pragma unroll
        for (int i = 0; i < NUMBERS / 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 v = *reinterpret_cast<const float2 *>(from + spot_of(i) + 8 * h * DSTATE);
                state[4 * i + 2 * h] += by * v.x, state[4 * i + 2 * h + 1] += by * v.y;
            }
    }
}

DEVICE void multiply(Shared &s, const Sizes &sizes, const Scratch &scratch, int side, const D_T *d_skip,
                     const float *initial, float *final_) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int stage = 0, turn = 0;
    unsigned count = 0;
    float state[NUMBERS];
    for (;;) {
        wait(&s.full[stage], turn);
        const Step &step = s.steps[stage];
        const int here = uniform(stage), kind = uniform(step.kind);
        if (kind & END) break;
        const Decays &by = s.decays[here][side];
        const unsigned x = at(s.x[here][side]), b = at(s.b[here][0]), c = at(s.c[here][0]);
        unsigned f[16];
        if (kind & LOCAL) { // pass 1
            if (kind & FIRST) {
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) state[i] = 0;
            }
            if (!uniform(by.skip)) {
                unsigned own[16];
                fragments_of(own, x);
                weigh(f, own, by);
                products_begin();
                add_to_state(state, f, b);
                products_commit();
                products_wait<0>();
                hold(state);
            }
        } else {
            if (__builtin_expect(kind & PUBLISH, 0)) {
                const int number = 2 * step.ticket + side;
                write_state(scratch.pieces + (long long)number * MINE, state);
                if (threadIdx.x % 128 == 0) scratch.logs[number] = by.log_piece;
                publish(scratch.flags + number, s.launch, side);
            }
            if (__builtin_expect(kind & FIRST, 0)) enter(state, s, step, sizes, scratch, initial, s.launch, side);

            // 5, from the state before the chunk: (y from it)^T = state C^T
            unsigned before[NUMBERS / 2];
            float from_state[32], early[16], late[16]; // early: tokens i below 32
#pragma unroll
            for (int i = 0; i < NUMBERS / 2; i++) before[i] = pack(state[2 * i], state[2 * i + 1]);
            products_begin();
#pragma unroll
            for (int k = 0; k < DSTATE / 16; k++)
                product_of_fragment<64>(from_state, before + 4 * k, moved(rows_of(c), k / 4 * TILE + k % 4 * 32),
                                        k > 0);
            products_commit();
            // 3 and 4: the state after the chunk
            const float whole = by.far[1].y;
#pragma unroll
            for (int i = 0; i < NUMBERS; i++) state[i] *= whole;
            hold(state); // here, under the products
            unsigned own[16];
            fragments_of(own, x);
            products_wait<0>(); // the operands' registers are free
            weigh(f, own, by);

            // 5, from the chunk's own tokens: x^T scores^T; a token j is of no use to the tokens before its block
            const int other = uniform(count % 2);
            wait(&s.scores_full[other], count / 2 % 2);
            const unsigned scores = at(s.scores[other][side]);
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int half = k / 2; half < 2; half++)
                    product_of_fragment<32>(half ? late : early, own + 4 * k,
                                            moved(rows_of(scores), half * 32 * ROW + k * 32), k > 0);
            products_commit();
            add_to_state(state, f, b);
            products_commit();
            hold(from_state);
            float4 enter[4]; // of tokens 16 i + lane % 4 * 2 and the next, and those 8 behind them
#pragma unroll
            for (int i = 0; i < 4; i++) enter[i] = *(const float4 *)&by.enter[place_of_enter(16 * i + lane % 4 * 2)];

            products_wait<1>(); // all but the state
            hold(early);
            hold(late);
            // Infinity or NaN in x meets zeros of scores, those of the first token of each half at least.
            if (__builtin_expect(__any_sync(~0u, not_finite(early[0], early[2], late[0], late[2])), 0))
                from_earlier(early, late, s.x[stage][side], s.scores[count % 2][side]);
            __syncwarp();
            if (lane == 0) arrive(&s.scores_empty[count % 2]);

            // y, in the place of x: a warp writes the columns that it alone has read
#pragma unroll
            for (int k = 0; k < 4; k++) {
                unsigned r[4], more[4];
                float d[2];
                if (D_ROWS == 2) {
                    read_transposed(more, x + place(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
                    const D_T *skip =
                        d_skip + step.head(side) * HALVES * WIDTH + step.half(side) * WIDTH + 16 * warp + lane / 4;
                    d[0] = as_float(skip[0]), d[1] = as_float(skip[8]);
                }
                float2 v[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 e = i / 2 ? make_float2(enter[k].z, enter[k].w) : make_float2(enter[k].x, enter[k].y);
                    const int n = 8 * k + 2 * i;
                    const float *own = k < 2 ? early + n : late + n - 16;
                    v[i].x = from_state[n] * e.x + own[0], v[i].y = from_state[n + 1] * e.y + own[1];
                    if (D_ROWS == 2) {
                        const float2 given = unpack(more[i]);
                        v[i].x += d[i % 2] * given.x, v[i].y += d[i % 2] * given.y;
                    }
                }
                if (Z) {
                    read_transposed(more, at(s.z[Z ? stage : 0][side]) +
                                              place(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float2 gate = unpack(more[i]);
                        v[i].x *= gate.x / (1 + exp2_(-LOG2_E * gate.x)),
                            v[i].y *= gate.y / (1 + exp2_(-LOG2_E * gate.y));
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) r[i] = pack(v[i].x, v[i].y);
                write_transposed(x + place(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), r[0], r[1],
                                 r[2], r[3]);
            }
            show_to_tma(); // of y
            __syncwarp();
            if (lane == 0) arrive(&s.y_full[stage]);
            count++;

            products_wait<0>();
            hold(state);
            if (__builtin_expect(kind & LAST && (side == 0 || !(kind & SINGLE)), 0)) {
                if (step.chunk + 1 == sizes.chunks) {
                    if (final_) {
                        float *to = final_ + step.column(side, sizes.heads) * DSTATE;
#pragma unroll
                        for (int i = 0; i < NUMBERS / 4; i++)
#pragma unroll
                            for (int h = 0; h < 2; h++)
                                *reinterpret_cast<float2 *>(to + spot_of(i) + 8 * h * DSTATE) =
                                    make_float2(state[4 * i + 2 * h], state[4 * i + 2 * h + 1]);
                    }
                } else if (sizes.stop > NEVER && __any_sync(~0u, not_finite(state))) {
                    mark(scratch.marks + step.pair, s.launch);
                    mark(&s.lost, 1);
                }
            }
        }
        __syncwarp();
        if (lane == 0) arrive(&s.empty[stage]);
        if (++stage == STAGES) stage = 0, turn ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    fused(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
          const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap z,
          const __grid_constant__ CUtensorMap y, const DT_T *dt, const float *a, const BIAS_T *dt_bias,
          const D_T *d_skip, const float *initial, float *final_states, float *scratch_memory, u64 *counter, int seqlen,
          int heads, int groups, int pairs, int chunks, int tickets, int rows, int pairs_of_group, int sort, float stop,
          float dt_low, float dt_high, long long dt_batch, long long dt_token, long long dt_head) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{seqlen,         heads, groups, pairs,  chunks,  tickets,  rows,
                      pairs_of_group, sort,  stop,   dt_low, dt_high, dt_batch, dt_token, dt_head};
    const Scratch scratch(sizes, scratch_memory, counter);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init(&s.planned[i], 1), init(&s.full[i], 3), init(&s.empty[i], 13), init(&s.y_full[i], 8);
        }
        for (int i = 0; i < 2; i++) init(&s.scores_full[i], 4), init(&s.scores_empty[i], 8), s.enough[i] = -1;
        s.lost = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    u64 taken = 0;
    if (threadIdx.x == 32 * BRINGER) taken = atomicAdd(counter, 1ull); // early: it takes a while
    if (threadIdx.x == 32 * STORER) {
        prefetch(&x), prefetch(&b), prefetch(&c), prefetch(&y);
        if (Z) prefetch(&z);
    }
    share_out(s, sizes, a, dt_bias);
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
    if (warpgroup < 2) {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(s, sizes, scratch, warpgroup, d_skip, initial, final_states);
    } else if (warpgroup == 2) {
        give_registers<SCORE_REGISTERS>();
        make_scores(s, sizes, d_skip);
    } else {
        give_registers<BRING_REGISTERS>();
        if (warp < BRINGER) {
            make_decays(s, sizes, warp - 12, dt, a, dt_bias);
        } else if (threadIdx.x % 32 == 0) {
            if (warp == BRINGER)
                bring_tiles(s, sizes, scratch, &x, &b, &c, &z, counter, taken);
            else
                store_tiles(s, &y);
        }
    }
}
