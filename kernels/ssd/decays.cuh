/* Step 1 of fused.cu: dt into decays. */
#pragma once
#include "shares.cuh"

/* Step 1, one warp for a row of heads: lane l has tokens 2 l and 2 l + 1 of the chunk, eight lanes a block of 16. The
   decays of the next chunk are made before its turn comes: which it is can be told in nearly all cases. */
DEVICE void make_decays(Shared &s, const Sizes &sizes, int side, const DT_T *dt, const float *a,
                        const BIAS_T *dt_bias) {
    int lane; // told so, it is kept in a register
    asm volatile("mov.u32 %0, %1;" : "=r"(lane) : "r"(threadIdx.x % 32));
    const int block = lane / 8;
    int stage = 0, turn = 0, pair = -1;
    int made = -1, due = -1, way = 1; // the chunk that is made, the next of which dt was asked for, and the direction
    bool made_local = false;          // for pass 1
    float bias = 0, slope = 0, piece = 0;
    u64 from[2];                                             // dt of the lane's tokens in chunk 0: the word it lies in
    bool upper[2];                                           // and whether in its upper half
    const u64 apart = sizes.dt_token * CHUNK * sizeof(DT_T); // bytes from chunk to chunk, a multiple of 4
    float2 d, u, enter, leave, rest;
    float whole = 0;
    float2 far; // decays of blocks 1 and 2; of both
    float both = 0;
    for (int i = 0; i < RING; i++) *(uint2 *)&s.raw[side][i][2 * lane] = make_uint2(0, 0); // behind a sequence's end

    auto ask = [&](int chunk) { // for dt of a chunk; AHEAD of them are on their way
        const int token = chunk * CHUNK + 2 * lane;
        const unsigned to = at(&s.raw[side][chunk & RING - 1][2 * lane]);
        // What follows a lower half may be no memory, and is left out.
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (chunk >= 0 && token + i < sizes.seqlen)
                copy_word(to + 4 * i, from[i] + chunk * apart, sizeof(DT_T) == 4 || upper[i] ? 4 : 2);
        copies_commit();
    };
    auto number_in = [](unsigned word, bool upper) {
        if (sizeof(DT_T) == 4) return __uint_as_float(word);
        const unsigned short bits = upper ? word >> 16 : word;
        return as_float(*reinterpret_cast<const DT_T *>(&bits));
    };
    auto step_of = [&](float v, bool inside) {
        v += bias;
        if (SOFTPLUS) v = softplus(v);
        v = v < sizes.dt_low ? sizes.dt_low : v;
        v = v > sizes.dt_high ? sizes.dt_high : v;
        return inside ? v : 0;
    };
    auto make = [&](int chunk, bool local) {
        if (due != chunk || way != (local ? -1 : 1)) {
            way = local ? -1 : 1;
            copies_wait<0>();
            for (int i = 0; i < AHEAD; i++) ask(chunk + i * way);
        }
        copies_wait<AHEAD - 1>();
        made = chunk, made_local = local;
        due = chunk + way;
        const int left = chunk >= 0 ? sizes.seqlen - chunk * CHUNK - 2 * lane : 0; // tokens from the lane's first on
        const uint2 word = *(const uint2 *)&s.raw[side][chunk & RING - 1][2 * lane];
        d.x = step_of(number_in(word.x, upper[0]), left > 0);
        d.y = step_of(number_in(word.y, upper[1]), left > 1);
        ask(chunk + AHEAD * way);
        u.x = d.x * slope, u.y = u.x + d.y * slope;
        float sum = u.y; // of the lane, and then of the lanes up to it in its block
#pragma unroll
        for (int o = 1; o < 8; o *= 2) {
            const float before = __shfl_up_sync(~0u, sum, o, 8);
            if (lane % 8 >= o) sum += before;
        }
        const float before = __shfl_up_sync(~0u, sum, 1, 8);
        if (lane % 8 > 0) u.x += before, u.y += before;
        float t[4]; // of each block
#pragma unroll
        for (int i = 0; i < 4; i++) t[i] = __shfl_sync(~0u, sum, 8 * i + 7);
        whole = t[0] + t[1] + t[2] + t[3];
        const float mine = block == 0 ? t[0] : block == 1 ? t[1] : block == 2 ? t[2] : t[3];
        rest = make_float2(mine - u.x, mine - u.y); // to the block's end
        // From the block's end to the chunk's.
        const float after = block == 0 ? t[1] + t[2] + t[3] : block == 1 ? t[2] + t[3] : block == 2 ? t[3] : 0;
        if (local) {
            leave = make_float2(rest.x + after, rest.y + after);
            return;
        }
        const float begin = block == 0 ? 0 : block == 1 ? t[0] : block == 2 ? t[0] + t[1] : t[0] + t[1] + t[2];
        enter = make_float2(exp2_(begin + u.x), exp2_(begin + u.y));
        rest.x = d.x * exp2_(rest.x), rest.y = d.y * exp2_(rest.y);
        far = make_float2(exp2_(t[1]), exp2_(t[2])), both = exp2_(t[1] + t[2]);
        const float end = exp2_(after);
        leave = make_float2(rest.x * end, rest.y * end);
    };

    Step step{};
    int next = -1; // the chunk to make: the one that is most likely due, or that is
    bool next_local = false, known = false;
    for (;;) {
        if (pair >= 0 && (made != next || made_local != next_local)) make(next, next_local);
        if (!known) {
            wait(&s.planned[stage], turn);
            step = s.steps[stage];
            if (step.kind & END) {
                if (lane == 0) arrive(&s.full[stage]);
                copies_wait<0>();
                return;
            }
            if (step.pair != pair) {
                pair = step.pair;
                const int head = step.head(side);
                const DT_T *first = dt + step.batch * sizes.dt_batch + head * sizes.dt_head;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u64 address = reinterpret_cast<u64>(first + (2 * lane + i) * sizes.dt_token);
                    from[i] = address & ~3ull, upper[i] = address & 2;
                }
                slope = a[head] * LOG2_E;
                bias = dt_bias ? as_float(dt_bias[head]) : 0;
                made = due = -1;
            }
        }
        if (step.kind & FLUSH) {
            if (lane == 0) s.decays[stage][side].skip = 1;
            __syncwarp();
            if (lane == 0) arrive(&s.full[stage]);
            if (++stage == STAGES) stage = 0, turn ^= 1;
            continue;
        }
        const bool local = step.kind & LOCAL;
        known = made != step.chunk || made_local != local;
        if (known) {
            next = step.chunk, next_local = local;
            continue;
        }
        Decays &to = s.decays[stage][side];
        const bool precise = !__any_sync(~0u, fmaxf(d.x, d.y) > TINY);
        if (local) {
            if (step.kind & FIRST) piece = 0;
            const bool skip = !step.real(side) || piece < sizes.stop;
            leave.x = d.x * exp2_(leave.x + piece), leave.y = d.y * exp2_(leave.y + piece);
            if (!skip) piece += whole;
            if (lane == 0) {
                to.skip = skip;
                if (!step.real(side) || piece < sizes.stop) atomicExch(&s.enough[side], step.ticket);
            }
        } else {
            *(float2 *)&to.enter[place_of_enter(2 * lane)] = enter;
            *(float2 *)&to.u[2 * lane] = u;
            *(float2 *)&to.dt[2 * lane] = d;
            if (block < 3) *(float2 *)&to.rest[2 * lane] = rest;
            if (lane == 0) to.far[0] = far, to.far[1] = make_float2(both, exp2_(whole)), to.log_piece = piece;
        }
        *(float2 *)&to.leave[2 * lane] = leave;
        *(unsigned *)&to.leave_half[place_of_half(2 * lane)] = pack(leave.x, leave.y);
        if (lane == 0) to.precise = precise;
        __syncwarp();
        if (lane == 0) arrive(&s.full[stage]);
        if (++stage == STAGES) stage = 0, turn ^= 1;
        next = step.chunk + (local ? -1 : 1), next_local = local;
    }
}
