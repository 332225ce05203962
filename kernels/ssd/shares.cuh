/* Who does what in fused.cu. The chunks of all pairs of rows stand in one line, which is cut into shares that cost the
   same by a guess: as many as there are tickets.

   Bundles. In long sequences B and C have left L2 before the next block comes to where this one is. There two or four
   pairs of a group lie side by side, a bundle, and the line is one of bundles. All pairs of a bundle are cut at the
   same places, as the slowest of them needs it, and tickets that follow each other have one share of a bundle, a pair
   each: blocks that run at the same time read the same B and C at about the same time. fused_plan.py says when: a
   bundle's pairs must divide those of a group, and the tickets. Elsewhere a bundle is one pair, and a share a ticket's
   own. */
#pragma once
#include "shared.cuh"
#include "steps.cuh"

/* What a chunk of pass 1 costs, if one of pass 2 costs 1. Of long sequences B no longer stays in L2: that counts for
   more where less is done with it. */
__device__ __forceinline__ float cost_in_pass_1(int chunks) { return chunks > 768 ? 0.5f : 0.43f; }

/* Where the share of a ticket begins in a pair, if not before it or behind it: cuts[share] holds a bundle and, in
   1 / 65536, what of it lies before. */
__device__ __forceinline__ int cut(const Shared &s, const Sizes &sizes, int ticket, int pair) {
    const unsigned cut = s.cuts[sizes.share_of(ticket)];
    const int bundle = sizes.bundle_of(pair);
    if ((int)(cut >> 16) != bundle) return (int)(cut >> 16) < bundle ? 0 : sizes.chunks;
    return (unsigned long long)(cut & 0xFFFF) * sizes.chunks >> 16;
}

/* What share_out works with. A key is how slowly a row decays, in chunks until nothing is left; its last bits give way
   to the row's number, so that no two are equal. */
struct Line {
    unsigned keys[MOST_ROWS];
    float before[MOST_ROWS + 1]; // of the pairs of a batch: what all before them cost; first, one further, chunks left
    unsigned guess;              // of what they all cost, in 1 / 65536: whoever adds first, it is the same
};
static_assert(sizeof(Line) <= sizeof(Shared::scores) && (MOST_ROWS & MOST_ROWS - 1) == 0);

__device__ __forceinline__ unsigned key_of(float chunks, int row) {
    return (__float_as_uint(chunks) & -MOST_ROWS) | (MOST_ROWS - 1 - row); // of equals the first is the highest
}
__device__ __forceinline__ float chunks_of(unsigned key) { return __uint_as_float(key & -MOST_ROWS); }

/* Chunks until nothing is left of a row that decays with its dt_bias alone: at most 1e9, and that for NaN, too. */
__device__ __forceinline__ float chunks_left(const Sizes &sizes, int row, const float *a, const Bias *dt_bias) {
    const float slope = a[row / S::HEAD_PARTS]; // both loads before what needs one of them
    const float v = dt_bias ? as_float(dt_bias[row / S::HEAD_PARTS]) : S::Steps::SOFTPLUS ? 0 : 0.01f;
    const float rate = -slope * step_of(v, sizes) * LOG2_E * CHUNK;
    return rate > 0 ? fminf(__fdividef(-sizes.log2_negligible, rate), 1e9f) : 1e9f;
}

/* What a chunk of a pair costs, where a share costs so much: if the share has n chunks, that is n + pass_1 * min(n,
   left), as pass 1 ends where nothing is left. */
__device__ __forceinline__ float cost_of_chunk(float left, float share, float pass_1) {
    return __fdividef(share, fmaxf(__fdividef(share, 1 + pass_1), share - pass_1 * left));
}

/* Rows in the order of the batch, shares of equal length. */
__device__ __forceinline__ void share_out_evenly(Shared &s, const Sizes &sizes) {
    const int rows = sizes.groups * sizes.rows;
    for (int i = threadIdx.x; i < rows && i < MOST_ROWS; i += blockDim.x) s.order[i] = i;
    for (int i = threadIdx.x; i <= sizes.tickets; i += blockDim.x)
        s.cuts[i] = ((unsigned long long)i * sizes.pairs << 16) / (unsigned)sizes.tickets;
}

/* Rows of a group, slow ones first: before a row come those with higher keys, which a team of threads counts. The
   slowest row of a bundle says how long its pass 1 is. share: chunks of one. */
__device__ __forceinline__ void order_rows(Shared &s, const Sizes &sizes, Line &line, float share) {
    constexpr int TEAM = 4;
    const int rows = sizes.groups * sizes.rows, member = threadIdx.x % TEAM;
    for (int first = 0; first < rows; first += blockDim.x / TEAM) {
        const int row = first + threadIdx.x / TEAM, group = sizes.groups == 1 ? 0 : row / sizes.rows;
        const int begin = group * sizes.rows, end = min(begin + sizes.rows, rows);
        const unsigned key = line.keys[min(row, rows - 1)];
        int place = 0; // in the group
#pragma unroll 4
        for (int i = begin + member; i < end; i += TEAM) place += key - line.keys[i] >> 31; // 1 where that is higher
#pragma unroll
        for (int apart = 1; apart < TEAM; apart *= 2) place += __shfl_xor_sync(~0u, place, apart);
        if (row >= rows || member > 0) continue;
        s.order[begin + place] = row;
        if (place % (ROWS * sizes.together()) > 0) continue;
        const float left = chunks_of(key);
        line.before[sizes.bundle_of(group * sizes.pairs_of_group + place / ROWS) + 1] = left;
        atomicAdd(&line.guess, (unsigned)(cost_of_chunk(left, 1.2f * share, cost_in_pass_1(sizes.chunks)) * 65536));
    }
}

/* What all bundles up to each cost, by a warp: a lane has some that lie together. share: what one costs. */
__device__ __forceinline__ void sum_up(float *bundles, int count, float share, float pass_1, int lane) {
    const int each = (count + 31) / 32, begin = min(lane * each, count), end = min(begin + each, count);
    float own = 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) own += bundles[i] = cost_of_chunk(bundles[i], share, pass_1);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const float before = __shfl_up_sync(~0u, own, apart);
        if (lane >= apart) own += before;
    }
    const float before = __shfl_up_sync(~0u, own, 1);
    float sum = lane > 0 ? before : 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) bundles[i] = sum += bundles[i];
}

/* Where share i of the line begins; bundles lie in it batch by batch. */
__device__ __forceinline__ unsigned cut_at(const Sizes &sizes, int i, const float *before, int of_batch) {
    const int shares = sizes.share_of(sizes.tickets), bundles = sizes.bundle_of(sizes.pairs);
    if (i == shares) return (unsigned)bundles << 16;
    int batch = 0, rest = i; // of a batch, in 1 / shares
    if (of_batch < bundles) rest *= bundles / of_batch, batch = rest / shares, rest %= shares;
    const float at = __fdividef(before[of_batch] * rest, shares);
    int bundle = 0; // the last that begins there or before
#pragma unroll 1
    for (int step = 1 << (31 - __clz(of_batch) & ~1); step > 0; step /= 4) {
        int steps = 0;
#pragma unroll
        for (int i = 1; i < 4; i++) steps += bundle + i * step < of_batch && before[bundle + i * step] <= at;
        bundle += steps * step;
    }
    const float part = __fdividef(at - before[bundle], before[bundle + 1] - before[bundle]);
    return (unsigned)(batch * of_batch + bundle) << 16 | min((unsigned)(part * 65536), 65535u);
}

/* Cut the line of all pairs, one behind the other, into shares that cost the same, by all threads; the same numbers
   come of it in all blocks. Rows that decay alike are made pairs, slow ones first: pass 1 of a pair is as long as its
   slower row makes it. What is guessed here moves work between blocks, and changes results by rounding alone.

   What a chunk costs hangs on what a share costs, and that on what all chunks cost: a first guess, and a better one.
   Nothing else can begin before all is shared out. So it is short of steps that wait for each other: a thread for each
   row, a team for each rank, a warp for the sums, a thread for each cut. */
__device__ __forceinline__ void share_out(Shared &s, const Sizes &sizes, const float *a, const Bias *dt_bias) {
    if (!sizes.sort) return share_out_evenly(s, sizes);
    Line &line = *reinterpret_cast<Line *>(s.scores);
    const int thread = threadIdx.x, of_batch = sizes.bundle_of(sizes.groups * sizes.pairs_of_group);
    const float share = __fdividef((float)sizes.chunks * sizes.pairs, sizes.tickets);
    if (thread < sizes.groups * sizes.rows) line.keys[thread] = key_of(chunks_left(sizes, thread, a, dt_bias), thread);
    if (thread == 0) line.before[0] = line.guess = 0;
    __syncthreads();
    order_rows(s, sizes, line, share);
    __syncthreads();
    if (thread < 32)
        sum_up(line.before + 1, of_batch, share * __fdividef(line.guess, 65536.f * of_batch),
               cost_in_pass_1(sizes.chunks), thread);
    __syncthreads();
    if (thread <= sizes.share_of(sizes.tickets)) s.cuts[thread] = cut_at(sizes, thread, line.before, of_batch);
}

/* What a ticket stands for: pieces of pairs, the last of which may go on in the next share. */
struct Share {
    const Shared &s;
    const Sizes &sizes;
    int ticket;

    /* The pair of the bundle in which share i of the line begins, that this ticket has; or of the last one. */
    __device__ __forceinline__ int pair_at(int i) const {
        const int bundle = min((int)(s.cuts[i] >> 16), sizes.bundle_of(sizes.pairs) - 1);
        return bundle * sizes.together() + ticket % sizes.together();
    }
    __device__ __forceinline__ int first_pair() const { return pair_at(sizes.share_of(ticket)); }
    __device__ __forceinline__ int last_pair() const { return pair_at(sizes.share_of(ticket) + 1); }
    /* Chunks of a pair. */
    __device__ __forceinline__ int begin(int pair) const { return cut(s, sizes, ticket, pair); }
    __device__ __forceinline__ int end(int pair) const { return cut(s, sizes, ticket + sizes.together(), pair); }
    /* Whether the next share goes on from the last piece. */
    __device__ __forceinline__ bool hands_on() const {
        const int pair = last_pair();
        return begin(pair) < end(pair) && end(pair) < sizes.chunks;
    }
};
