/* Rows of a slot times x, by all warps that multiply: each lays down its part, and one adds up. */
#pragma once
#include "../device/mma.cuh"
#include "token_vectors.cuh"

template <int N> struct alignas(4 * N) Vector {
    static constexpr int SIZE = N;
    float at[N];
};
template <class R> using Words = uint4[R::PER_TEAM][R::WORDS]; // what a thread needs of a slot
template <class R> using Sums = Vector<(R::ROWS + 31) / 32>;   // of a task's rows: that of row r in lane r % 32

/* valid(r): whether there is a row r. If not, whatever comes of it: without a branch all words are asked for at
   once. */
template <class R, class Valid>
__device__ __forceinline__ void take(Words<R> &w, const void *slot, int thread, Valid valid) {
    const uint4 *words = reinterpret_cast<const uint4 *>(slot);
#pragma unroll
    for (int i = 0; i < R::PER_TEAM; i++) {
        int row = thread / R::TEAM + i * R::TEAMS;
        if (!valid(row)) row = 0;
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) w[i][k] = words[row * R::ROW_WORDS + R::word(k, thread)];
    }
}

/* By mma, as in chapter 04's rung 8: row g of A is what lanes 4g … 4g + 3 hold of one row, row g + 8 what they hold of
   the next, and column g of B what they hold of x. So D[g][g] and D[g + 8][g] are sums of these four lanes; the rest is
   not wanted. One of the four lays them down, for all rows of its team: `to` has room for THREADS numbers. */
template <class R>
__device__ __forceinline__ const float *multiply(const Part<R> &x, const Words<R> &w, float *to, int thread) {
    constexpr bool TWO = R::PER_TEAM > 1;
    const int lane = thread % 32;
    const bool odd = lane / 4 % 2;
    Vector<R::PER_TEAM> sums;
#pragma unroll
    for (int i = 0; i < R::PER_TEAM; i += 2) {
        float d[4] = {};
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            const uint4 a = w[i][k], b = TWO ? w[i + TWO][k] : uint4{};
            mma_m16n8k16(d, {a.x, b.x, a.y, b.y}, x.at[k][0], x.at[k][1], T());
            mma_m16n8k16(d, {a.z, b.z, a.w, b.w}, x.at[k][2], x.at[k][3], T());
        }
        sums.at[i] = odd ? d[1] : d[0];
        if (TWO) sums.at[i + TWO] = odd ? d[3] : d[2];
    }
    if (lane % 4 == lane / 8) reinterpret_cast<Vector<R::PER_TEAM> *>(to)[thread / 4] = sums;
    return to;
}

/* The sums of a task's rows. By a warp. */
template <class R> __device__ __forceinline__ Sums<R> add_up(const float *laid_down, int lane) {
    constexpr int LANES = R::TEAM / 16; // for the rows of a team, four entries each
    auto from = reinterpret_cast<const Vector<R::PER_TEAM> *>(laid_down) + lane / LANES * (4 * LANES) + lane % LANES;
    Vector<R::PER_TEAM> sums = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Vector<R::PER_TEAM> entry = from[j * LANES];
#pragma unroll
        for (int i = 0; i < R::PER_TEAM; i++) sums.at[i] += entry.at[i];
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)
#pragma unroll
        for (int i = 0; i < R::PER_TEAM; i++) sums.at[i] += __shfl_xor_sync(~0u, sums.at[i], mask);
    Sums<R> found = {};
#pragma unroll
    for (int n = 0; n < Sums<R>::SIZE; n++) {
        const int row = 32 * n + lane; // the i-th of team row % TEAMS
#pragma unroll
        for (int i = 0; i < R::PER_TEAM; i++) {
            const float sum = __shfl_sync(~0u, sums.at[i], row % R::TEAMS * LANES);
            if (row / R::TEAMS == i) found.at[n] = sum;
        }
    }
    return found;
}

/* Of row FIRST + lane. FIRST is at most 32. */
template <int FIRST, int N> __device__ __forceinline__ float sum_of(const Vector<N> &sums, int lane) {
    static_assert(FIRST < 32 || FIRST / 32 < N, "there is such a row");
    return __shfl_sync(~0u, sums.at[FIRST / 32], (FIRST + lane) % 32);
}
