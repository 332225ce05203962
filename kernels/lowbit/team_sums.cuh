/* What the warps of a team have of a tile's sums, and how a block adds it up.

   A warp has its slice of the columns. Its sums of a tile, 16 rows of W by the rows of x, wait in shared memory until
   each team is through with TILES tiles, a phase: then there is one barrier, and the block's threads share the phase's
   sums out among them. The next phase writes to a second set, so that one barrier is enough. */
#pragma once
#include "unit.cuh"

/* Read one at a time: [set][tile][team][row of x][16 rows of W][warp]. */
template <class I, class B, int TILES> struct TeamSums {
    static constexpr int PITCH = B::WARPS_PER_TEAM | 1; // odd, so that 16 rows lie in 16 banks
    static constexpr int X_ROW = 16 * PITCH + 4, TILE = I::ROWS * X_ROW, SET = TILES * B::TEAMS * TILE;
    float *first;

    /* Where lane 4g + c of a warp keeps what it has of row g; row g + 8 is 8 * PITCH further. */
    static __device__ __forceinline__ int place(int g, int, int slice) { return g * PITCH + slice; }
    /* The sum over the warps of a team, each less what `minus` says. */
    template <class Minus> static __device__ __forceinline__ float total(const float *sums, int row, Minus minus) {
        float all = 0;
#pragma unroll
        for (int warp = 0; warp < B::WARPS_PER_TEAM; warp++) all += sums[row * PITCH + warp] - minus(warp);
        return all;
    }
};

/* Read 16 bytes at a time: 4, 8 or 16 places for a team's warps, of which those that no warp has are 0. They differ by
   row and column, so that banks do. */
template <class I, class B, int TILES> struct WideTeamSums {
    static constexpr int PITCH = B::WARPS_PER_TEAM > 8 ? 16 : B::WARPS_PER_TEAM > 4 ? 8 : 4;
    static constexpr int X_ROW = 16 * PITCH, TILE = I::ROWS * X_ROW, SET = TILES * B::TEAMS * TILE;
    float *first;

    static __device__ __forceinline__ int place(int g, int c, int slice) {
        return g * PITCH + (slice / 4 ^ g * PITCH / 32) * 4 + (slice % 4 ^ c);
    }
    /* The sum over the warps of a team, less minus(0), which is all that comes off. */
    template <class Minus> static __device__ __forceinline__ float total(const float *sums, int row, Minus minus) {
        float all = -minus(0);
#pragma unroll
        for (int k = 0; k < PITCH / 4; k++) {
            const float4 four = reinterpret_cast<const float4 *>(sums + row * PITCH)[k ^ row % 8 * PITCH / 32];
            all += four.x + four.y + (four.z + four.w);
        }
        return all;
    }
    /* Zeros where no warp has a place. */
    __device__ __forceinline__ void clear(int sets, int thread) const {
        if (PITCH == B::WARPS_PER_TEAM) return;
        for (int i = thread; i < sets * SET; i += B::THREADS) first[i] = 0;
        __syncthreads();
    }
};

/* A phase: of each team TILES tiles, its tiles number `begin` and on. */
template <class W, class I, class B, class Sums> struct Phase {
    static constexpr unsigned ITEMS = Sums::SET / Sums::X_ROW * 16; // sums that it gives, a thread's every THREADS-th
    const typename W::Scale *factors;
    long long rows;
    int begin, thread;
    float2 early = {}; // the thread's first scale and zero of a row, on their way while there are no sums yet

    __device__ __forceinline__ Phase(const typename W::Scale *factors, long long rows, int begin, int thread)
        : factors(factors), rows(rows), begin(begin), thread(thread) {
        if (W::GROUP == 0) early = row_factor(thread);
    }
    /* The row of W that sum number i is of. */
    __device__ __forceinline__ long long row(unsigned i) const {
        const unsigned team = i / (I::ROWS * 16) % B::TEAMS, turn = begin + i / (I::ROWS * 16 * B::TEAMS);
        return (long long)(blockIdx.x + gridDim.x * (team + B::TEAMS * turn)) * 16 + i % 16;
    }
    __device__ __forceinline__ float2 row_factor(unsigned i) const {
        return i < ITEMS && row(i) < rows ? scale_and_zero(factors, row(i)) : float2{};
    }
    /* Add up the warps' sums. The zero of a whole row, less `offset`, comes off each warp's, before these grow long:
       x_slice_sums[warp * ROOM + j] is what this warp's slice of x row j adds up to; ROOM 0: what all slices do. */
    template <int ROOM, class Store>
    __device__ __forceinline__ void add_up(const float *sums, const float *x_slice_sums, float offset, int m,
                                           Store store) const {
#pragma unroll 1
        for (unsigned i = thread; i < ITEMS; i += B::THREADS) {
            const unsigned x_row = i / 16 % I::ROWS, team = i / (I::ROWS * 16) % B::TEAMS;
            if (row(i) >= rows || x_row >= m) continue;
            const float2 factor = W::GROUP ? float2{} : i == thread ? early : row_factor(i);
            const float all = Sums::total(sums + i / 16 * Sums::X_ROW, i % 16, [&](int warp) {
                const int slice = team * B::WARPS_PER_TEAM + warp;
                return W::GROUP ? 0 : (factor.y - offset) * x_slice_sums[slice * ROOM + x_row];
            });
            store(x_row, row(i), W::GROUP ? all : all * factor.x);
        }
    }
};
