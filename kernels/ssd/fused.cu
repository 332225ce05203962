/* The best rung of the Mamba-2 SSD layer: one launch, for Hopper (sm_90a: TMA, mbarriers, wgmma).

   New since tuned:
   - A block has two rows of a group, and four warpgroups with roles of their own: two multiply, one row each; one makes
     the scores of both (C B^T is the same for all heads of a group); of the last, one warp brings tiles by TMA, and two
     turn dt into decays. They hand over through mbarriers, STAGES chunks deep.
   - The state stays in registers, transposed: (headdim, dstate). So it is the left operand of y^T = state C^T and the
     accumulator of state += (x w)^T B, and never passes through shared memory.
   - Sums of A dt begin at each multiple of 16 tokens. Between blocks of 16 the decay is a number of the row times one
     of the column, so that only blocks on the diagonal take an exponential for each pair of tokens, and no difference
     of long sums loses digits.
   - All multiprocessors have work of equal length, which need not be whole segments: see Line. Rows that decay alike
     are put together, as pass 1 of a pair is as long as its slower row makes it.

   Two passes, as in segments: a share whose last piece of a pair goes on in another share first walks it backwards for
   its end state (pass 1; it ends where what is left has decayed by 2^stop), publishes that, and then walks all its
   chunks (pass 2). Long sequences are cut into epochs, so that blocks stay near each other and find B and C in L2.

   What stop leaves out. Beyond 2^-127 a decay is 0 in these registers, as results below 2^-126 are flushed to 0. So a
   stop of -127 or less leaves out products with 0 alone: the same numbers as without, for whatever is finite. Infinity
   and NaN times 0 would be NaN. A share that hands on a state with one of these marks the pair; its block waits until
   all tickets are done, which it may, having none left itself, and walks marked pairs anew as one piece.

   Numbering as in ref/ssd.py: 1 decays (the last warpgroup), 2 C B^T (the third), 3 and 4 the state, 5 y.
   Symbols: x, y, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, DSTATE); a chunk is 64 tokens. A row
   is 64 columns of x: a head, or half of one. A pair is two rows of one group.

   Order between blocks. Tickets come from an atomic counter, so a block waits for tickets that are taken, by blocks
   that run. Pass 1 waits for nobody; pass 2 of a ticket waits for pass 1 of tickets before it in its epoch, and for the
   end of the epoch before. The counter is never reset: a launch takes tickets + gridDim.x of it, and the quotient is
   the number of the launch, which is what a raised flag holds. So a launch needs no cleared memory and can stand in a
   graph; two that may run at once, or that take another number of tickets, need counters and flags of their own.

   Moves x, z and y once, B and C once for each pair (from L2), dt a sector for each token and row, and 4 * 64 * DSTATE
   bytes of state a few times for each share. For each chunk and row DSTATE * 64 * (64 + 64 + 32) + 64 * 64 * 64 * 3 / 4
   multiplications and additions.

   Compile with DSTATE (64, 128), HALVES (headdim / 64), BF16, DT_T, BIAS_T, D_T (types of these tensors), SOFTPLUS,
   D_ROWS (0 no D, 1 a number a head, 2 one a column), Z, STAGES, SHARED (bytes). Launch with 512 threads on as many
   blocks as there are multiprocessors, or as tickets if these are fewer. Maps of x, b, c and z: see load_tiles.
   counter: the tickets taken, those done, and the flags; zeros at the first launch, then left alone. stop: log2,
   negative; -infinity for never. */
#include "decays.cuh"

// ---- between blocks ----

/* What blocks leave for each other. */
struct Scratch {
    float *pieces;   // (tickets of the launch, 2, MINE): end states of pass 1
    float *ends;     // (epochs - 1, pairs, 2, MINE): states at the ends of epochs
    float *logs;     // (tickets of the launch, 2): log2 of the decay over what pass 1 walked
    unsigned *flags; // (tickets of the launch, 2), then (epochs - 1, pairs, 2); they lie behind the two counters
    unsigned *marks; // (pairs,): of those to walk anew
    DEVICE Scratch(const Sizes &s, float *memory, u64 *counter)
        : pieces(memory), ends(pieces + 2ll * s.tickets * s.epochs * MINE),
          logs(ends + 2ll * (s.epochs - 1) * s.pairs * MINE), flags(reinterpret_cast<unsigned *>(counter + 2)),
          marks(flags + 2ll * (s.tickets * s.epochs + (s.epochs - 1) * s.pairs)) {}
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
DEVICE void raise_flag(unsigned *flag, unsigned value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ---- the last warpgroup: tiles (and step 1, in decays.cuh) ----

DEVICE void bring_tiles(Shared &s, const Sizes &sizes, const Scratch &scratch, const CUtensorMap *x,
                        const CUtensorMap *b, const CUtensorMap *c, const CUtensorMap *z, u64 *counter, u64 taken) {
    const int tickets = sizes.tickets * sizes.epochs;
    const unsigned a_launch = tickets + gridDim.x;
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
        if (kind & END) {
            arrive(&s.full[stage]);
            return true;
        }
        const bool local = kind & LOCAL;
        u64 *full = &s.full[stage];
        arrive_and_expect(full, TILE * (2 + SIDES + (local ? 0 : SIDES + 2 * Z)));
        const int token = chunk * CHUNK;
#pragma unroll
        for (int side = 0; side < 2; side++)
            load_tiles(at(s.x[stage][side]), x, token, step.half(side), step.head(side), step.batch, full);
        load_tiles(at(s.b[stage]), b, token, 0, step.group, step.batch, full);
        if (!local) {
            load_tiles(at(s.c[stage]), c, token, 0, step.group, step.batch, full);
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

    while (ticket < tickets) {
        const u64 next = atomicAdd(counter, 1ull); // early: it takes a while
        const Line line(sizes, ticket / sizes.tickets);
        const int share = ticket % sizes.tickets;
        const bool whole = share < line.rests; // a piece
        const int from = whole ? share % sizes.pairs : s.cuts[share - line.rests] >> 16;
        const int to = whole ? from : min(s.cuts[share - line.rests + 1] >> 16, sizes.pairs - 1);
        auto begin = [&](int pair) {
            return whole ? line.begin(s, pair, share / sizes.pairs) : line.cut(s, share, pair);
        };
        auto end = [&](int pair) {
            return whole ? line.begin(s, pair, share / sizes.pairs + 1) : line.cut(s, share + 1, pair);
        };
        int publish = 0;
        const int low = begin(to), high = end(to);
        if (low < high && high < line.length) { // pass 1, backwards
            choose(to);
            for (int i = high - 1; i >= low; i--)
                if (!bring(LOCAL | (i == high - 1 ? FIRST : 0), line.first + i)) break;
            publish = PUBLISH;
        }
        for (int pair = from; pair <= to; pair++) { // pass 2
            const int stop = end(pair);
            choose(pair);
            int i = begin(pair);
            for (int first = FIRST; i < stop; i++, first = 0) {
                bring(publish | first | (i + 1 == stop ? LAST : 0), line.first + i);
                publish = 0;
            }
        }
        ticket = next % a_launch, done++;
    }
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
        const u64 all = (taken / a_launch + 1) * tickets;
        while (look(counter + 1) < all) continue;
        ticket = 0; // of the first epoch: enter looks at initial states alone
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

// ---- the third warpgroup: step 2, with the decays between two tokens of a chunk ----

DEVICE void make_scores(Shared &s, const Sizes &sizes, const D_T *d_skip) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4; // its 16 tokens i
    const int i = 16 * block + lane / 4, j = lane % 4 * 2;           // the first of the thread, in a block of 16 x 16
    // As stmatrix wants it: lane l has row l % 8 of matrix l / 8, of 2 x 2.
    const int row = 16 * block + lane / 8 % 2 * 8 + lane % 8;
    int stage = 0, turn = 0, place_of = -1;
    unsigned count = 0;
    float d[2] = {0, 0};
    // Of the blocks above the diagonal those in the second column of each two are multiplied: they stay zero.
    if (block % 2 == 0)
        for (int k = 0; k < 4; k++)
            write_matrices(at(s.scores[k / 2][k % 2]) + place(row, 2 * (block + 1) + lane / 16), 0, 0, 0, 0);
    for (;;) {
        wait(&s.full[stage], turn);
        const Step step = s.steps[stage];
        if (step.kind & END) return;
        if (!(step.kind & LOCAL)) {
            if (D_ROWS == 1 && step.pair != place_of) {
                place_of = step.pair;
#pragma unroll
                for (int side = 0; side < 2; side++) d[side] = as_float(d_skip[step.head(side)]);
            }
            float g[32];
            const unsigned b = at(s.b[stage]), c = at(s.c[stage]);
            products_begin();
#pragma unroll
            for (int k = 0; k < DSTATE / 16; k++)
                product<64>(g, moved(rows_of(c), k / 4 * TILE + k % 4 * 32),
                            moved(rows_of(b), k / 4 * TILE + k % 4 * 32), k > 0);
            products_commit();
            wait(&s.scores_empty[count % 2], count / 2 % 2 ^ 1);
            products_wait<0>();
            hold(g);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const Decays &by = s.decays[stage][side];
                const unsigned tile = at(s.scores[count % 2][side]);
                const float u0 = by.u[i], u1 = by.u[i + 8];
                const float from0 = exp2_(u0), from1 = exp2_(u1); // from the block's start
                const float own = side ? d[1] : d[0];
#pragma unroll
                for (int k = 0; k < 4; k++) { // blocks of 16 tokens j
                    if (k > block) break;
                    float m[8];
                    if (k < block) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const float2 to = *(const float2 *)&by.across[block - 1][16 * k + 8 * h + j];
                            m[4 * h + 0] = g[8 * k + 4 * h + 0] * (to.x * from0);
                            m[4 * h + 1] = g[8 * k + 4 * h + 1] * (to.y * from0);
                            m[4 * h + 2] = g[8 * k + 4 * h + 2] * (to.x * from1);
                            m[4 * h + 3] = g[8 * k + 4 * h + 3] * (to.y * from1);
                        }
                    } else {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const float2 u = *(const float2 *)&by.u[16 * k + 8 * h + j];
                            const float2 dt = *(const float2 *)&by.dt[16 * k + 8 * h + j];
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                const int ii = lane / 4 + e / 2 * 8, jj = 8 * h + j + e % 2;
                                float value = g[8 * k + 4 * h + e] *
                                              (exp2_((e / 2 ? u1 : u0) - (e % 2 ? u.y : u.x)) * (e % 2 ? dt.y : dt.x));
                                if (D_ROWS == 1 && ii == jj) value += own;
                                m[4 * h + e] = ii < jj ? 0 : value;
                            }
                        }
                    }
                    write_matrices(tile + place(row, 2 * k + lane / 16), pack(m[0], m[1]), pack(m[2], m[3]),
                                   pack(m[4], m[5]), pack(m[6], m[7]));
                }
            }
            show_to_products();
            __syncwarp();
            if (lane == 0) arrive(&s.scores_full[count % 2]);
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
DEVICE bool not_finite(const unsigned (&x)[16]) {
    unsigned none = 0; // 0 times all of them
#pragma unroll
    for (int i = 0; i < 16; i++) none = times_and_add(x[i], 0, none);
    return __any_sync(~0u, none & 0x7FFF7FFF);
}
/* Whether any of the thread's numbers is infinite or NaN. */
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
        for (int i = 0; i < 16; i++) f[i] = times(x[i], *(const unsigned *)&by.leave_half[8 * (i / 2) + lane % 4 * 2]);
    }
}

DEVICE void add_to_state(float (&state)[NUMBERS], const unsigned (&f)[16], unsigned b) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        product_of_fragment_turned<DSTATE>(state, f + 4 * k, moved(columns_of(b), 16 * k * ROW), 1);
}

/* Where 16 bytes of a token lie in a warp's part of y: in banks of their own for eight tokens in a row. */
DEVICE int place_in_y(int token, int word) { return token * 32 + (word ^ token / 4 % 2) * 16; }

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
/* All threads' stores come before the flag. */
DEVICE void publish(unsigned *flag, unsigned value, int side) {
    meet<128>(1 + side);
    if (threadIdx.x % 128 == 0) {
        __threadfence();
        raise_flag(flag, value);
    }
}

/* Step 4: the state before the first chunk of a piece, from pass 1 of the pieces before it in the epoch, the newest
   first, and the end of the epoch before. Always in this order: the same bits in every run. */
DEVICE void enter(float (&state)[NUMBERS], const Shared &s, const Step &step, const Sizes &sizes,
                  const Scratch &scratch, const float *initial, unsigned launch, int side) {
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) state[i] = 0;
    if (!step.real(side)) return;
    const int epoch = step.ticket / sizes.tickets;
    const Line line(sizes, epoch);
    const int rest = line.begin(s, step.pair, line.pieces);
    float log = 0;
    int share = step.ticket % sizes.tickets, spot = step.chunk - line.first;
    while (spot > 0) {
        int begin;
        if (share >= line.rests && spot > rest) {
            begin = line.cut(s, --share, step.pair);
        } else {
            share = share >= line.rests ? (line.pieces - 1) * sizes.pairs + step.pair : share - sizes.pairs;
            begin = line.begin(s, step.pair, share / sizes.pairs);
        }
        if (begin == spot) continue; // nothing of this pair
        const int ticket = epoch * sizes.tickets + share;
        wait_for(scratch.flags + 2 * ticket + side, launch, side);
        add_state(state, scratch.pieces + (2ll * ticket + side) * MINE, exp2_(log));
        log += __ldcg(scratch.logs + 2 * ticket + side);
        if (log < sizes.stop) return;
        spot = begin;
    }
    if (epoch > 0) {
        const int number = 2 * ((epoch - 1) * sizes.pairs + step.pair) + side;
        wait_for(scratch.flags + 2 * sizes.tickets * sizes.epochs + number, launch, side);
        add_state(state, scratch.ends + (long long)number * MINE, exp2_(log));
    } else if (initial) {
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

DEVICE void multiply(Shared &s, const Sizes &sizes, const Scratch &scratch, int side, unsigned short *y,
                     const D_T *d_skip, const float *initial, float *final_) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int stage = 0, turn = 0;
    unsigned count = 0;
    float state[NUMBERS];
    for (;;) {
        wait(&s.full[stage], turn);
        const Step step = s.steps[stage];
        if (step.kind & END) break;
        const Decays &by = s.decays[stage][side];
        const unsigned x = at(s.x[stage][side]), b = at(s.b[stage][0]), c = at(s.c[stage][0]);
        unsigned f[16];
        if (step.kind & LOCAL) { // pass 1
            if (step.kind & FIRST) {
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) state[i] = 0;
            }
            if (!by.skip) {
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
            if (__builtin_expect(step.kind & PUBLISH, 0)) {
                const int number = 2 * step.ticket + side;
                write_state(scratch.pieces + (long long)number * MINE, state);
                if (threadIdx.x % 128 == 0) scratch.logs[number] = by.log_piece;
                publish(scratch.flags + number, s.launch, side);
            }
            if (__builtin_expect(step.kind & FIRST, 0)) enter(state, s, step, sizes, scratch, initial, s.launch, side);

            // 5, from the state before the chunk: (y from it)^T = state C^T
            unsigned before[NUMBERS / 2];
            float from_state[32], early[16], late[16]; // early: tokens i below 32
#pragma unroll
            for (int i = 0; i < NUMBERS / 2; i++) before[i] = pack(state[2 * i], state[2 * i + 1]);
            products_begin();
#pragma unroll
            for (int k = 0; k < DSTATE / 16; k++) {
                product_of_fragment<64>(from_state, before + 4 * k, moved(rows_of(c), k / 4 * TILE + k % 4 * 32),
                                        k > 0);
                if (k == DSTATE / 32 - 1) products_commit(); // the first half
            }
            products_commit();
            // 3 and 4: the state after the chunk
            const float whole = by.whole;
#pragma unroll
            for (int i = 0; i < NUMBERS; i++) state[i] *= whole;
            products_wait<1>(); // the first half: its operands' registers are free
            unsigned own[16];
            fragments_of(own, x);

            // 5, from the chunk's own tokens: x^T scores^T; a token j is of no use to the tokens before its block
            wait(&s.scores_full[count % 2], count / 2 % 2);
            const unsigned scores = at(s.scores[count % 2][side]);
            products_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int half = k / 2; half < 2; half++)
                    product_of_fragment<32>(half ? late : early, own + 4 * k,
                                            moved(rows_of(scores), half * 32 * ROW + k * 32), k > 0);
            products_commit();
            products_wait<1>(); // all from the state
            float2 enter[8];    // of tokens 8 i + lane % 4 * 2 and the next
#pragma unroll
            for (int i = 0; i < 8; i++) enter[i] = *(const float2 *)&by.enter[8 * i + lane % 4 * 2];
            weigh(f, own, by);
            products_begin();
            add_to_state(state, f, b);
            products_commit();

            products_wait<1>();
            hold(from_state);
            hold(early);
            hold(late);
            if (__builtin_expect(not_finite(own), 0))
                from_earlier(early, late, s.x[stage][side], s.scores[count % 2][side]);
            __syncwarp();
            if (lane == 0) arrive(&s.scores_empty[count % 2]);

            __syncwarp(); // what the warp wrote last has been read
            const unsigned tile = at(s.y[side][warp]);
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
                    const float2 e = enter[2 * k + i / 2];
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
                write_transposed(tile + place_in_y(16 * k + lane / 16 * 8 + lane % 8, lane / 8 % 2), r[0], r[1], r[2],
                                 r[3]);
            }
            __syncwarp();
            const int left =
                step.real(side) ? sizes.seqlen - step.chunk * CHUNK : 0; // tokens from the chunk's first on
            unsigned short *to = y +
                                 (((long long)step.batch * sizes.seqlen + step.chunk * CHUNK + lane / 2) * sizes.heads +
                                  step.head(side)) *
                                     (HALVES * WIDTH) +
                                 step.half(side) * WIDTH + 16 * warp + lane % 2 * 8;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint4 word = *(const uint4 *)&s.y[side][warp][place_in_y(16 * k + lane / 2, lane % 2)];
                if (16 * k + lane / 2 < left) __stcs((uint4 *)(to + 16ll * k * sizes.heads * (HALVES * WIDTH)), word);
            }
            count++;

            products_wait<0>();
            hold(state);
            if (__builtin_expect(step.kind & LAST && step.real(side), 0)) {
                const int epoch = step.ticket / sizes.tickets;
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
                } else if (step.chunk + 1 == (epoch + 1) * sizes.epoch) {
                    const int number = 2 * (epoch * sizes.pairs + step.pair) + side;
                    write_state(scratch.ends + (long long)number * MINE, state);
                    publish(scratch.flags + 2 * sizes.tickets * sizes.epochs + number, s.launch, side);
                } else if (sizes.stop > NEVER && not_finite(state)) {
                    atomicExch(scratch.marks + step.pair, s.launch);
                    atomicExch(&s.lost, 1);
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
          const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap z, const DT_T *dt, const float *a,
          const BIAS_T *dt_bias, const D_T *d_skip, const float *initial, unsigned short *y, float *final_states,
          float *scratch_memory, u64 *counter, int seqlen, int heads, int groups, int pairs, int chunks, int epoch,
          int epochs, int tickets, int rows, int pairs_of_group, int pieces_of_pair, int sort, float stop, float dt_low,
          float dt_high, long long dt_batch, long long dt_token, long long dt_head) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const Sizes sizes{seqlen,         heads,          groups, pairs, chunks, epoch,   epochs,   tickets,  rows,
                      pairs_of_group, pieces_of_pair, sort,   stop,  dt_low, dt_high, dt_batch, dt_token, dt_head};
    const Scratch scratch(sizes, scratch_memory, counter);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) init(&s.planned[i], 1), init(&s.full[i], 3), init(&s.empty[i], 12);
        for (int i = 0; i < 2; i++) init(&s.scores_full[i], 4), init(&s.scores_empty[i], 8), s.enough[i] = -1;
        s.lost = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    u64 taken = 0;
    if (threadIdx.x == 384) taken = atomicAdd(counter, 1ull); // early: it takes a while
    share_out(s, sizes, a, dt_bias);
    __syncthreads();
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (warpgroup < 2) {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(s, sizes, scratch, warpgroup, y, d_skip, initial, final_states);
    } else if (warpgroup == 2) {
        give_registers<SCORE_REGISTERS>();
        make_scores(s, sizes, d_skip);
    } else {
        give_registers<BRING_REGISTERS>();
        if (warp == 12) {
            if (threadIdx.x % 32 == 0) bring_tiles(s, sizes, scratch, &x, &b, &c, &z, counter, taken);
        } else if (warp < 15) {
            make_decays(s, sizes, warp - 13, dt, a, dt_bias);
        }
    }
}
