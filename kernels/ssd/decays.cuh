/* The role of a warp for each row of a pair: step 1, dt into decays. Lane l has tokens 2 l and 2 l + 1 of the chunk;
   eight lanes have a block of 16. */
#pragma once
#include "../device/copy.cuh"
#include "../device/half2.cuh"
#include "sequences.cuh"
#include "steps.cuh"

constexpr float TINY = 1.f / 1024; // of dt, where a rounded weight begins to lose digits
constexpr int DT_AHEAD = 6;        // chunks of dt that are asked for ahead of time

/* A chunk of a row, and where its pass goes from there: 1, or -1 in pass 1. 0: none. */
struct ChunkOfPass {
    int chunk = 0, direction = 0;

    __device__ __forceinline__ bool operator!=(ChunkOfPass other) const {
        return chunk != other.chunk || direction != other.direction;
    }
    __device__ __forceinline__ ChunkOfPass next() const { return {chunk + direction, direction}; }
};

/* The lane's two numbers of dt in each chunk, copied ahead into the warp's own ring. */
struct DtStream {
    unsigned (&ring)[DT_RING][CHUNK];
    const Sizes &sizes;
    const int lane;
    unsigned long long from[2]; // in chunk 0: the word that the number lies in
    bool upper[2];              // and whether in its upper half

    __device__ __forceinline__ DtStream(unsigned (&ring)[DT_RING][CHUNK], const Sizes &sizes, int lane)
        : ring(ring), sizes(sizes), lane(lane) {
        for (int i = 0; i < DT_RING; i++) *(uint2 *)&ring[i][2 * lane] = make_uint2(0, 0); // behind a sequence's end
    }
    __device__ __forceinline__ void begin(const Dt *row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto address = reinterpret_cast<unsigned long long>(row + (2 * lane + i) * sizes.dt_token);
            from[i] = address & ~3ull, upper[i] = address & 2;
        }
    }
    __device__ __forceinline__ void ask(int chunk) {
        const int token = chunk * CHUNK + 2 * lane;
        const unsigned to = shared_address(&ring[chunk & DT_RING - 1][2 * lane]);
        const unsigned long long apart = sizes.dt_token * CHUNK * sizeof(Dt); // from chunk to chunk, a multiple of 4
        // What follows a lower half may be no memory, and is left out.
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (chunk >= 0 && token + i < sizes.seqlen)
                copy_async_word(to + 4 * i, reinterpret_cast<const void *>(from[i] + chunk * apart),
                                sizeof(Dt) == 4 || upper[i] ? 4 : 2);
        copy_async_commit();
    }
    __device__ __forceinline__ float number_in(unsigned word, bool upper) const {
        if (sizeof(Dt) == 4) return __uint_as_float(word);
        const unsigned short bits = upper ? word >> 16 : word;
        return as_float(*reinterpret_cast<const Dt *>(&bits));
    }
    /* asked: those before this one have asked for it. */
    __device__ __forceinline__ float2 take(ChunkOfPass wanted, bool asked) {
        const int chunk = wanted.chunk, direction = wanted.direction;
        if (!asked) {
            copy_async_wait<0>();
            for (int i = 0; i < DT_AHEAD; i++) ask(chunk + i * direction);
        }
        copy_async_wait<DT_AHEAD - 1>();
        const uint2 word = *(const uint2 *)&ring[chunk & DT_RING - 1][2 * lane];
        const float2 found = make_float2(number_in(word.x, upper[0]), number_in(word.y, upper[1]));
        ask(chunk + DT_AHEAD * direction);
        return found;
    }
};

/* t[block], without an index that would put t in memory. */
__device__ __forceinline__ float choose(int block, float t0, float t1, float t2, float t3) {
    return block == 0 ? t0 : block == 1 ? t1 : block == 2 ? t2 : t3;
}

/* What becomes of the lane's two tokens: names as in Decays (shared.cuh). */
struct LaneDecays {
    float2 dt, log_decay_in_block, decay_from_start, weight_to_end, weight_to_block_end, block_decay;
    float both_blocks, log_chunk;

    /* Exponents first, all of them sums within a block, and within a sequence. For pass 1 weight_to_end stays an
       exponent: it takes what comes behind the chunk, too. */
    __device__ __forceinline__ void make(float2 steps, float slope, LaneBegins begins, bool local, int lane) {
        const int block = lane / 8;
        dt = steps;
        float2 u;
        u.x = dt.x * slope, u.y = u.x + dt.y * slope;
        if (begins.y_is_new(lane)) u.y = dt.y * slope;
        float sum = u.y; // of the lane, and then of the lanes up to it in its block
#pragma unroll
        for (int o = 1; o < 8; o *= 2) {
            const float before = __shfl_up_sync(~0u, sum, o, 8);
            if (begins.lanes_back(lane) >= o) sum += before;
        }
        const float before = __shfl_up_sync(~0u, sum, 1, 8), before_x = begins.x_is_new(lane) ? 0 : before;
        if (lane % 8 > 0) u.x += before_x, u.y += begins.y_is_new(lane) ? 0 : before_x;
        log_decay_in_block = u;
        float t[4]; // of each block
#pragma unroll
        for (int i = 0; i < 4; i++) t[i] = __shfl_sync(~0u, sum, 8 * i + 7);
        log_chunk = t[0] + t[1] + t[2] + t[3];
        if (begins.any()) log_chunk = __int_as_float(0xff800000); // -infinity
        const float own = choose(block, t[0], t[1], t[2], t[3]);
        const float2 to_block_end = make_float2(own - u.x, own - u.y);
        const float from_block_end = choose(block, t[1] + t[2] + t[3], t[2] + t[3], t[3], 0);
        if (local) {
            weight_to_end = make_float2(to_block_end.x + from_block_end, to_block_end.y + from_block_end);
            return;
        }
        const float to_block = choose(block, 0, t[0], t[0] + t[1], t[0] + t[1] + t[2]);
        decay_from_start = make_float2(exp2_approx(to_block + u.x), exp2_approx(to_block + u.y));
        weight_to_block_end.x = dt.x * exp2_approx(to_block_end.x);
        weight_to_block_end.y = dt.y * exp2_approx(to_block_end.y);
        block_decay = make_float2(exp2_approx(t[1]), exp2_approx(t[2])), both_blocks = exp2_approx(t[1] + t[2]);
        const float end = exp2_approx(from_block_end);
        weight_to_end = make_float2(weight_to_block_end.x * end, weight_to_block_end.y * end);
        if constexpr (S::SEQUENCES) {
            if (begins.x()) decay_from_start.x = 0;
            if (begins.y()) decay_from_start.y = 0;
            if (begins.x() != begins.last()) weight_to_end.x = 0;
            if (begins.y() != begins.last()) weight_to_end.y = 0;
        }
    }
    /* Pass 1: with what was walked before, which lies behind. */
    __device__ __forceinline__ void add_to_exponent(float log_piece) {
        weight_to_end.x = dt.x * exp2_approx(weight_to_end.x + log_piece);
        weight_to_end.y = dt.y * exp2_approx(weight_to_end.y + log_piece);
    }
    __device__ __forceinline__ void store_weights(Decays &to, LaneBegins begins, int lane) const {
        const bool precise = !__any_sync(~0u, fmaxf(dt.x, dt.y) > TINY);
        *(float2 *)&to.weight_to_end[2 * lane] = weight_to_end;
        *(unsigned *)&to.rounded_to_end[place_of_weight(2 * lane)] = pack(weight_to_end.x, weight_to_end.y, T());
        if (lane == 0) to.precise = precise;
        if (S::SEQUENCES && lane == 0) to.sequence_begins = begins.any();
    }
    __device__ __forceinline__ void store_decays(Decays &to, int lane) const {
        *(float2 *)&to.decay_from_start[place_of_decay(2 * lane)] = decay_from_start;
        *(float2 *)&to.log_decay_in_block[2 * lane] = log_decay_in_block;
        *(float2 *)&to.dt[2 * lane] = dt;
        if (lane < 24) *(float2 *)&to.weight_to_block_end[2 * lane] = weight_to_block_end;
        if (lane > 0) return;
        to.block_decay[0] = block_decay;
        to.block_decay[1] = make_float2(both_blocks, exp2_approx(log_chunk));
    }
};

/* The decays of the next chunk are made before its turn comes: which it is can be told in nearly all cases. */
__device__ __forceinline__ void make_decays(Shared &s, const Sizes &sizes, int side, const Dt *dt, const float *a,
                                            const Bias *dt_bias, const int *seq_idx, int lane) {
    DtStream stream(s.raw_dt[side], sizes, lane);
    LaneDecays decays;
    LaneBegins begins{};
    ChunkOfPass made, next;
    Step step{};
    step.pair = -1;
    float slope = 0, log_piece = 0; // of the pair's row; of the piece that pass 1 walks
    Bias bias = 0.f;                // of the pair's row, too
    for (Phase<STAGES> phase;; phase.advance()) {
        // 1. the decays that are most likely due; and if they are not, those that are
        bool known = false;
        do {
            if (step.pair >= 0 && made != next) {
                if constexpr (S::SEQUENCES) {
                    SequenceNumbers numbers;
                    numbers.load(seq_idx + (long long)step.batch * sizes.seqlen, sizes.seqlen, next.chunk, lane);
                    begins = numbers.begins(lane);
                }
                const int left = next.chunk >= 0 ? sizes.seqlen - next.chunk * CHUNK - 2 * lane : 0; // tokens from here
                const float2 found = stream.take(next, !(made.next() != next));
                const float first = step_of(found.x + as_float(bias), sizes);
                const float second = step_of(found.y + as_float(bias), sizes);
                decays.make({left > 0 ? first : 0, left > 1 ? second : 0}, slope * LOG2_E, begins, next.direction < 0,
                            lane);
                made = next;
            }
            if (known) continue;
            s.planned[phase.stage].wait(phase.parity);
            const int pair = step.pair;
            step = s.steps[phase.stage], known = true;
            if (step.kind & (END | FLUSH)) break;
            next = {step.chunk, step.kind & LOCAL ? -1 : 1};
            if (step.pair == pair) continue;
            const int head = step.head(side);
            stream.begin(dt + step.batch * sizes.dt_batch + head * sizes.dt_head);
            slope = a[head]; // as they are: whoever calculates with them waits for them, and dt is not asked for yet
            if (dt_bias) bias = dt_bias[head];
            made = {};
        } while (made != next);

        // 2. to those who use them
        Decays &to = s.decays[phase.stage][side];
        if (step.kind & (END | FLUSH)) {
            if (lane == 0) to.skip = 1;
        } else {
            if (next.direction < 0) {
                if (step.kind & FIRST) log_piece = 0;
                const bool skip = !step.has_row(side) || log_piece < sizes.log2_negligible;
                decays.add_to_exponent(log_piece);
                if (!skip) log_piece += decays.log_chunk;
                if (lane == 0) to.skip = skip;
                if (lane == 0 && (!step.has_row(side) || log_piece < sizes.log2_negligible))
                    atomicExch(&s.pass_1_may_stop[side], step.ticket);
            } else {
                decays.store_decays(to, lane);
                if (lane == 0) to.log_piece = log_piece;
            }
            decays.store_weights(to, begins, lane);
            if (S::SEQUENCES && side == 0) *(unsigned short *)&s.begins[phase.stage].of[2 * lane] = begins.bytes;
            next = next.next();
        }
        __syncwarp();
        if (lane == 0) s.ring.full[phase.stage].arrive();
        if (step.kind & END) break;
    }
    copy_async_wait<0>();
}
