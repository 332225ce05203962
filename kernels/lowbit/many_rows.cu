/* The best rung for 5 to 16 rows of x: 16-bit numbers on the tensor cores. x is never converted.

   New since few_rows:
   - mma.m16n8k16 takes x as it is: 16 bytes of a row are a lane's operands of two steps. Codes become 16-bit numbers as
     in magic (numbers.cuh), once for all rows of x.
   - All warps of a block ask for x before any asks for the rest of the ring.
   - 16 rows of x are 128 KB a block at 4096 columns, four times a tile of weights of 4 bits. Loads into registers pass
     through L1, of which a block with this much shared memory leaves 28 KB. So x goes through shared memory with
     cp.async, over the place of all but STAGES_BESIDE_X stages of the ring and of the sums, which are not needed yet.

   Moves what few_rows moves. rows * cols multiply-adds of 16-bit numbers for each row of x, of which one m16n8k16 does
   2048.

   Compile with MATRIX, INPUT, BLOCK and RING (unit.cuh), TILES_IN_PHASE (of a team), X_THROUGH_SHARED (else x is loaded
   into registers) and STAGES_BESIDE_X (else STAGES), and Y, the type of y: float where the columns are split.
   Launch as few_rows. */
#include "../device/mma.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include "numbers.cuh"
#include "team_sums.cuh"
#ifndef MATRIX
#define MATRIX Matrix<__half, 4, 128>
#define INPUT Input<__half, 16, true>
#define BLOCK Block<16, 1, 2, true>
#define RING Ring<2, 3, 0>
#define TILES_IN_PHASE 1
#define X_THROUGH_SHARED false
#define STAGES_BESIDE_X 3
#define Y __half
#endif
using W = MATRIX;
using I = INPUT;
using B = BLOCK;
using R = RING;
using T = I::X;
using Stream = WeightStream<W, B, R>;
using Sums = WideTeamSums<I, B, TILES_IN_PHASE>;
constexpr int EIGHTS = I::ROWS / 8;              // of rows of x, a column of B each
constexpr int GROUPS = W::GROUP ? W::GROUPS : 1; // sums of x that a warp keeps of a unit, for each row of x
static_assert(I::ROWS % 8 == 0, "fewer rows of x become digits");
constexpr bool SPLIT = sizeof(Y) == 4;
using Fragments = uint4[B::UNITS][4][EIGHTS];   // the lane's numbers of x: eight columns of a step

/* A warp's x in shared memory: [UNITS][EIGHTS * 8 rows][16 words]. Word q of an odd row is at q ^ 4, so that two rows'
   words are in different banks. */
__device__ __forceinline__ void copy_x(uint4 *to, const T *x, const Share<B> &share, int cols, int m, int lane) {
    const int half = lane / 16, col = lane % 16 * 8;
    const unsigned lane_place = shared_address(to + (lane ^ half * 4));
    const T *const from = x + share.first_unit * 128 + col;
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        // 256 bytes of two rows. Blocks begin at different ones: all read the same x, at the same time
        const int pair = (i + blockIdx.x) % (EIGHTS * 4) * 2, x_row = pair + half;
#pragma unroll
        for (int u = 0; u < B::UNITS; u++) {
            const bool in_row = B::WHOLE || (share.first_unit + u) * 128 + col < cols;
            const bool there = x_row < m && u < share.units && in_row;
            const T *const at = from + (long long)x_row * cols + u * 128; // none where nothing is there
            copy_async_or_zero(lane_place + pair * 256 + u * (EIGHTS * 2048), at, there);
        }
    }
    copy_async_commit();
}
/* Do (unit, part, eight) for all of the lane's fragments. */
template <class Do> __device__ __forceinline__ void each_fragment(Do act) {
#pragma unroll
    for (int u = 0; u < B::UNITS; u++)
#pragma unroll
        for (int part = 0; part < 4; part++)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++) act(u, part, eight);
}

/* The sums of x over a group and over a warp's slice: products of x, as operand A this time, with ones. A lane holds
   the same numbers of either operand, and 16 rows are one mma. */
__device__ __forceinline__ void sum_x(float *x_group_sums, float *x_slice_sums, const Fragments &x_fragments,
                                      int lane) {
    constexpr unsigned ONES = Numbers<W, T>::ONES;
    const int g = lane / 4;
    float total[EIGHTS] = {};
#pragma unroll
    for (int group = 0; group < B::UNITS * GROUPS; group++) {
        float d[4] = {}; // row g in d[0], row g + 8 in d[2], in all columns alike
#pragma unroll
        for (int i = 0; i < 4 / GROUPS; i++) {
            const uint4(&x)[EIGHTS] = x_fragments[group / GROUPS][group % GROUPS * (4 / GROUPS) + i];
            const uint4 low = x[0], high = EIGHTS == 2 ? x[EIGHTS - 1] : uint4{};
            mma_m16n8k16(d, {low.x, high.x, low.y, high.y}, ONES, ONES, T());
            mma_m16n8k16(d, {low.z, high.z, low.w, high.w}, ONES, ONES, T());
        }
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            total[eight] += d[2 * eight];
            if (lane % 4 == 0) x_group_sums[(group * EIGHTS + eight) * 8 + g] = d[2 * eight];
        }
    }
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
        if (W::GROUP == 0 && lane % 4 == 0) x_slice_sums[8 * eight + g] = total[eight];
    __syncwarp();
}

/* What all slices of a row of x, those of one team, add up to: x_sums[x row]. Known behind the next barrier. */
__device__ __forceinline__ void add_slices(float *x_sums, const float *x_slice_sums, int warp, int lane) {
    __syncthreads();
    for (int x_row = warp; x_row < I::ROWS; x_row += B::WARPS) {
        const float sum = warp_sum(lane < B::WARPS_PER_TEAM ? x_slice_sums[lane * I::ROWS + x_row] : 0);
        if (lane == 0) x_sums[x_row] = sum;
    }
}

/* t += the products of a unit, scaled group by group. */
__device__ __forceinline__ void multiply(float (&t)[EIGHTS][4], const Stream &weights, int s, int unit,
                                         const Fragments &x_fragments, const float *x_group_sums, unsigned magic,
                                         int lane) {
    uint4 words[W::LOADS];
    weights.load(words, s);
    Numbers<W, T> numbers;
    constexpr bool SCALED = W::GROUP != 0 || W::BITS < 8; // or x's sums come off; elsewhere all units are one sum
    float of_group[EIGHTS][4];
    float(&d)[EIGHTS][4] = SCALED ? of_group : t;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const int group = step / (4 / GROUPS);
        if (step % (4 / GROUPS) == 0) {
            numbers.begin_group(weights.scales(s), group, lane / 4);
#pragma unroll
            for (int eight = 0; SCALED && eight < EIGHTS; eight++) {
                const int at = ((unit * GROUPS + group) * EIGHTS + eight) * 4 + lane % 4;
                numbers.take_off(d[eight], reinterpret_cast<const float2 *>(x_group_sums)[at]);
            }
        }
        unsigned a[2][4];
        numbers.operands(a, reinterpret_cast<const unsigned *>(words), step, magic);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const uint4 b = x_fragments[unit][step][eight];
            mma_m16n8k16(d[eight], a[0], b.x, b.y, T());
            mma_m16n8k16(d[eight], a[1], b.z, b.w, T());
        }
        if (SCALED && (step + 1) % (4 / GROUPS) == 0)
#pragma unroll
            for (int i = 0; i < EIGHTS * 4; i++) t[i / 4][i % 4] += numbers.scale[i % 4 / 2] * d[i / 4][i % 4];
    }
}

/* Keep a warp's sums of a tile. */
__device__ __forceinline__ void keep(float *sums, const float (&t)[EIGHTS][4], int lane) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        const int x_row = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        sums[x_row * Sums::X_ROW + i % 4 / 2 * 8 * Sums::PITCH] = t[i / 4][i % 4];
    }
}

extern "C" __global__ void __launch_bounds__(B::THREADS, 1)
gemv(const uint4 *packed, const W::Scale *factors, const T *x, Y *y, long long rows, int cols, int m) {
    let_next_kernel_start();
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int slice = warp % B::WARPS_PER_TEAM, team = warp / B::WARPS_PER_TEAM;
    constexpr int GROUP_SUMS = B::UNITS * GROUPS * 8 * EIGHTS; // floats of a warp: [UNITS][GROUPS][EIGHTS][8]
    float *const behind_ring = reinterpret_cast<float *>(shared + R::STAGES * Stream::APART);
    float *const x_group_sums = behind_ring + warp * GROUP_SUMS;
    float *const x_slice_sums = behind_ring + B::WARPS * GROUP_SUMS; // [warp][x row]
    float *const x_sums = x_slice_sums + B::WARPS * I::ROWS;      // [x row]
    const Sums sums{x_sums + I::ROWS};
    const Share<B> share(rows, cols, warp);

    // 1. ask for weights
    Stream weights(packed, factors, share, cols, shared, warp, lane);
    weights.fill<0, R::STAGES_BEFORE_WAIT>();

    // 2. wait for the kernel ahead
    wait_for_previous_kernel();

    // 3. x, eight columns of a lane next to each other, and its sums
    Fragments x_fragments;
    uint4 *const warp_x = shared + STAGES_BESIDE_X * Stream::APART + warp * (B::UNITS * EIGHTS * 128);
    if (X_THROUGH_SHARED)
        copy_x(warp_x, x, share, cols, m, lane);
    else
        each_fragment([&](int u, int part, int eight) {
            x_fragments[u][part][eight] =
                load_x<uint4, I>(x, share, cols, m, 8 * eight + lane / 4, u, part * 32 + lane % 4 * 8);
        });
    if (R::STAGES_BEFORE_WAIT < R::STAGES) __syncthreads(); // no warp's weights are asked for before another one's x
    weights.fill<R::STAGES_BEFORE_WAIT, STAGES_BESIDE_X>();
    if (X_THROUGH_SHARED) {
        copy_async_wait<STAGES_BESIDE_X - R::STAGES_BEFORE_WAIT>();
        __syncwarp();
        each_fragment([&](int u, int part, int eight) {
            const int g = lane / 4, q = part * 4 + lane % 4;
            x_fragments[u][part][eight] = warp_x[((u * EIGHTS + eight) * 8 + g) * 16 + (q ^ g % 2 * 4)];
        });
        __syncthreads(); // from here on its place is the ring's and the sums'
        weights.fill<STAGES_BESIDE_X, R::STAGES>();
    }
    __syncwarp();
    sum_x(x_group_sums, x_slice_sums + warp * I::ROWS, x_fragments, lane);
    if (W::GROUP == 0) add_slices(x_sums, x_slice_sums, warp, lane);
    sums.clear(TILES_IN_PHASE * share.tile_stride < share.tiles ? 2 : 1, threadIdx.x);

    // Made from an argument it stays in a register; a constant would be loaded again and again
    const unsigned magic = m > 0 ? Numbers<W, T>::MAGIC : 0;
    const int place = Sums::place(lane / 4, lane % 4, slice);
    int set = 0;
#pragma unroll 1
    for (int begin = 0; (int)blockIdx.x + begin * share.tile_stride < share.tiles; begin += TILES_IN_PHASE, set ^= 1) {
        const Phase<W, I, B, Sums> phase(factors, rows, begin, threadIdx.x);
        float *tile_sums = sums.first + set * Sums::SET + team * Sums::TILE + place;
        int tile = share.first_tile + begin * share.tile_stride;
#pragma unroll 1
        for (int i = 0; i < TILES_IN_PHASE && tile < share.tiles; i++, tile += share.tile_stride) {
            // 4. multiply, and scale once a group
            float t[EIGHTS][4] = {};
#pragma unroll
            for (int stage = 0; stage < Stream::TILE_STAGES; stage++) {
                weights.wait_full();
#pragma unroll
                for (int s = 0; s < R::UNITS_PER_STAGE; s++) {
                    const int unit = stage * R::UNITS_PER_STAGE + s;
                    if (unit < B::UNITS && (B::WHOLE || unit < share.units))
                        multiply(t, weights, s, unit, x_fragments, x_group_sums, magic, lane);
                }
                weights.refill();
            }
            keep(tile_sums, t, lane);
            tile_sums += B::TEAMS * Sums::TILE;
        }

        // 5. add up the warps' sums; the next phase has sums of its own, so one barrier is enough
        __syncthreads();
        phase.add_up<0>(sums.first + set * Sums::SET, x_sums, Numbers<W, T>::MIDDLE, m,
                        [&](unsigned x_row, long long row, float sum) {
            y[(SPLIT ? (long long)blockIdx.y * m + x_row : x_row) * rows + row] = (Y)sum;
        });
    }
}
