/* Step 1 of fused.cu: dt into decays. */
#pragma once
#include "shares.cuh"

/* Step 1, one warp for a row of heads: lane l has tokens 2 l and 2 l + 1 of the chunk, eight lanes a block of 16. The
   decays of the next chunk are made before its turn comes: which it is can be told in nearly all cases. */
DEVICE void make_decays(Shared &s, const Sizes &sizes, int side, const DT_T *dt, const float *a,
                        const BIAS_T *dt_bias) {
    const int lane = threadIdx.x % 32, block = lane / 8;
    int stage = 0, turn = 0, pair = -1;
    int made = -1, due = -1, way = 1; // the chunk that is made, the next of which dt was asked for, and the direction
    bool made_local = false;          // for pass 1
    float bias = 0, slope = 0, piece = 0;
    const DT_T *from = dt;
    float2 d, u, enter, leave, rest;
    float across[3], whole = 0;
    for (int i = 0; i < RING; i++) *(uint2 *)&s.raw[side][i][2 * lane] = make_uint2(0, 0); // behind a sequence's end

    auto ask = [&](int chunk) { // for dt of a chunk; AHEAD of them are on their way
        const int token = chunk * CHUNK + 2 * lane;
        const unsigned to = at(&s.raw[side][chunk & RING - 1][2 * lane]);
        if (chunk >= 0 && token < sizes.seqlen) copy_word(to, from + token * sizes.dt_token);
        if (chunk >= 0 && token + 1 < sizes.seqlen) copy_word(to + 4, from + (token + 1) * sizes.dt_token);
        copies_commit();
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
        d.x = step_of(word_of(word.x, from + 2 * lane * sizes.dt_token), left > 0);
        d.y = step_of(word_of(word.y, from + (2 * lane + 1) * sizes.dt_token), left > 1);
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
        // From the block's end to the beginning of those two and three blocks on, and to the chunk's end.
        const float two = block == 0 ? t[1] : block == 1 ? t[2] : 0, three = two + (block == 0 ? t[2] : 0);
        const float after = block == 0 ? three + t[3] : block == 1 ? t[2] + t[3] : block == 2 ? t[3] : 0;
        if (local) {
            leave = make_float2(rest.x + after, rest.y + after);
            return;
        }
        const float begin = block == 0 ? 0 : block == 1 ? t[0] : block == 2 ? t[0] + t[1] : t[0] + t[1] + t[2];
        enter = make_float2(exp2_(begin + u.x), exp2_(begin + u.y));
        rest.x = d.x * exp2_(rest.x), rest.y = d.y * exp2_(rest.y);
        across[1] = exp2_(two), across[2] = exp2_(three);
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
                from = dt + step.batch * sizes.dt_batch + head * sizes.dt_head;
                slope = a[head] * LOG2_E;
                bias = dt_bias ? as_float(dt_bias[head]) : 0;
                made = due = -1;
            }
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
            *(float2 *)&to.enter[2 * lane] = enter;
            *(float2 *)&to.u[2 * lane] = u;
            *(float2 *)&to.dt[2 * lane] = d;
            if (block < 3) *(float2 *)&to.across[block][2 * lane] = rest;
            if (block < 2)
                *(float2 *)&to.across[block + 1][2 * lane] = make_float2(rest.x * across[1], rest.y * across[1]);
            if (block < 1) *(float2 *)&to.across[2][2 * lane] = make_float2(rest.x * across[2], rest.y * across[2]);
            if (lane == 0) to.whole = exp2_(whole), to.log_piece = piece;
        }
        *(float2 *)&to.leave[2 * lane] = leave;
        *(unsigned *)&to.leave_half[2 * lane] = pack(leave.x, leave.y);
        if (lane == 0) to.precise = precise;
        __syncwarp();
        if (lane == 0) arrive(&s.full[stage]);
        if (++stage == STAGES) stage = 0, turn ^= 1;
        next = step.chunk + (local ? -1 : 1), next_local = local;
    }
}
