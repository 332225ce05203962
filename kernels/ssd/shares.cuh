/* Who does what in fused.cu. The chunks of all pairs of rows stand in one line, which is cut into shares that cost the
   same, one for each ticket.

   Bundles. In long sequences B and C have left L2 before the next block comes to where this one is. There the line is
   one of bundles: two or four pairs of a group side by side, which are cut at the same places, as the slowest of them
   needs it. Tickets that follow each other have the same share of the pairs of a bundle, so that blocks that run at the
   same time read the same B and C. What is said of pairs and shares below then holds for bundles and shares of these;
   elsewhere a bundle is one pair. */
#pragma once
#include "shared.cuh"
#include "steps.cuh"

/* What a chunk of pass 1 costs, if one of pass 2 costs 1. Of long sequences B no longer stays in L2: that counts for
   more where less is done with it. */
__device__ __forceinline__ float cost_in_pass_1(int chunks) { return chunks > 768 ? 0.5f : 0.43f; }

/* Where the share of a ticket begins in a pair, if not before it or behind it: cuts[share] holds a bundle and, in
   1 / 65536, what of it lies before. */
__device__ __forceinline__ int cut(const Shared &s, const Sizes &sizes, int ticket, int pair) {
    const unsigned cut = s.cuts[ticket >> sizes.side_by_side];
    const int bundle = pair >> sizes.side_by_side;
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
   slower row of a pair says how long its pass 1 is. share: chunks of one. */
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
        if (place % (ROWS << sizes.side_by_side) > 0) continue;
        const float left = chunks_of(key);
        line.before[(group * sizes.pairs_of_group + place / ROWS >> sizes.side_by_side) + 1] = left;
        atomicAdd(&line.guess, (unsigned)(cost_of_chunk(left, 1.2f * share, cost_in_pass_1(sizes.chunks)) * 65536));
    }
}

/* What all pairs up to each cost, by a warp: a lane has some that lie together. share: what one costs. */
__device__ __forceinline__ void sum_up(float *pairs, int count, float share, float pass_1, int lane) {
    const int each = (count + 31) / 32, begin = min(lane * each, count), end = min(begin + each, count);
    float own = 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) own += pairs[i] = cost_of_chunk(pairs[i], share, pass_1);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const float before = __shfl_up_sync(~0u, own, apart);
        if (lane >= apart) own += before;
    }
    const float before = __shfl_up_sync(~0u, own, 1);
    float sum = lane > 0 ? before : 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) pairs[i] = sum += pairs[i];
}

/* Where share i of the line begins; pairs lie in it batch by batch. */
__device__ __forceinline__ unsigned cut_at(const Sizes &sizes, int i, const float *before, int of_batch) {
    const int shares = sizes.tickets >> sizes.side_by_side, pairs = sizes.pairs >> sizes.side_by_side;
    if (i == shares) return (unsigned)pairs << 16;
    int batch = 0, rest = i; // of a batch, in 1 / shares
    if (of_batch < pairs) rest *= pairs / of_batch, batch = rest / shares, rest %= shares;
    const float at = __fdividef(before[of_batch] * rest, shares);
    int pair = 0; // the last that begins there or before
#pragma unroll 1
    for (int step = 1 << (31 - __clz(of_batch) & ~1); step > 0; step /= 4) {
        int steps = 0;
#pragma unroll
        for (int i = 1; i < 4; i++) steps += pair + i * step < of_batch && before[pair + i * step] <= at;
        pair += steps * step;
    }
    const float part = __fdividef(at - before[pair], before[pair + 1] - before[pair]);
    return (unsigned)(batch * of_batch + pair) << 16 | min((unsigned)(part * 65536), 65535u);
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
    const int thread = threadIdx.x, of_batch = sizes.groups * sizes.pairs_of_group >> sizes.side_by_side;
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
    if (thread <= sizes.tickets >> sizes.side_by_side) s.cuts[thread] = cut_at(sizes, thread, line.before, of_batch);
}

/* What a ticket stands for: pieces of pairs, the last of which may go on in the next share. */
struct Share {
    const Shared &s;
    const Sizes &sizes;
    int ticket;

    __device__ __forceinline__ int together() const { return 1 << sizes.side_by_side; } // pairs of a bundle
    /* The pair of a bundle that this ticket has. */
    __device__ __forceinline__ int pair_of(unsigned bundle) const {
        const int last = (sizes.pairs >> sizes.side_by_side) - 1;
        return min((int)bundle, last) * together() + ticket % together();
    }
    __device__ __forceinline__ int first_pair() const { return pair_of(s.cuts[ticket >> sizes.side_by_side] >> 16); }
    __device__ __forceinline__ int last_pair() const {
        return pair_of(s.cuts[(ticket >> sizes.side_by_side) + 1] >> 16);
    }
    /* Chunks of a pair. */
    __device__ __forceinline__ int begin(int pair) const { return cut(s, sizes, ticket, pair); }
    __device__ __forceinline__ int end(int pair) const { return cut(s, sizes, ticket + together(), pair); }
    /* Whether the next share goes on from the last piece. */
    __device__ __forceinline__ bool hands_on() const {
        const int pair = last_pair();
        return begin(pair) < end(pair) && end(pair) < sizes.chunks;
    }
};
