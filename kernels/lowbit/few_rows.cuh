/* Digits of x times units of codes: what the kernels for up to four rows of x share. They compile it with MATRIX,
   INPUT, BLOCK, RING, TILES_IN_PHASE, X_IN_REGISTERS and Y (few_rows.cu). */
#pragma once
#include "../device/mma.cuh"
#include "team_sums.cuh"
#include "x_digits.cuh"

using W = MATRIX;
using I = INPUT;
using B = BLOCK;
using R = RING;
using Digits = XDigits<W, I, B>;
using Stream = WeightStream<W, B, R>;
using Sums = TeamSums<I, B, TILES_IN_PHASE>;
constexpr int EIGHTS = Digits::EIGHTS;
constexpr bool SPLIT = sizeof(Y) == 4;
constexpr float HIGH = W::BITS == 8 ? 1 : 1 << W::BITS; // what rows 8 .. 15 of a tile come out too large by
using Fragments = uint4[B::UNITS][2][EIGHTS];           // the lane's digits of x, of two steps each

/* The operand of a step, 32 columns, from the lane's words of a unit. */
__device__ __forceinline__ void codes(unsigned (&a)[4], const unsigned *w, int step) {
    if (W::BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = w[4 * step + i];
    } else if (W::BITS == 4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[2 * step + i] & 0x0f0f0f0f;
            a[2 * i + 1] = w[2 * step + i] & 0xf0f0f0f0;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[2 * i] = w[step] >> 4 * i & 0x03030303;
            a[2 * i + 1] = w[step] >> 4 * i & 0x0c0c0c0c;
        }
    }
}

/* x becomes digits, as many rows at a time as registers have room for. The rest of the ring is asked for behind the
   first of them. */
template <class After>
__device__ __forceinline__ void make_digits(const Digits &digits, const I::X *x, const Share<B> &share, int cols, int m,
                                            int lane, After after_first_load) {
    constexpr int UNITS = B::UNITS, SOME = UNITS > 8 ? 1 : UNITS > 4 ? 2 : UNITS > 2 ? 4 : UNITS > 1 ? 8 : 16;
    constexpr int AT_ONCE = SOME < I::ROWS ? SOME : I::ROWS; // rows of x
    constexpr int KEPT = UNITS <= 8 ? UNITS : 1;             // units; of more each is loaded twice
#pragma unroll 1
    for (int j0 = 0; j0 < I::ROWS; j0 += AT_ONCE) {
        uint2 raw[AT_ONCE][KEPT];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
            for (int u = 0; u < KEPT; u++) raw[r][u] = load_x<uint2, I>(x, share, cols, m, j0 + r, u, 4 * lane);
        if (j0 == 0) after_first_load();
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
            digits.make(j0 + r, lane, [&](int u) {
                return KEPT == UNITS ? raw[r][KEPT == UNITS ? u : 0]
                                     : load_x<uint2, I>(x, share, cols, m, j0 + r, u, 4 * lane);
            });
    }
    __syncwarp();
}

/* Two digits, the columns that a lane has of a product, as one number. */
__device__ __forceinline__ float combine(int low, int high) { return (float)(low + 256 * high); }

/* t += the products of a unit, scaled group by group; of a unit as a whole where a group is a row. */
__device__ __forceinline__ void multiply(float (&t)[EIGHTS][2], const Stream &weights, int s, int unit,
                                         const Fragments &x_fragments, const Digits &digits, int lane) {
    const int g = lane / 4, c = lane % 4;
    uint4 words[W::LOADS];
    weights.load(words, s);
    const W::Scale *scales = weights.scales(s);
    int d[EIGHTS][4] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        unsigned a[4];
        codes(a, reinterpret_cast<const unsigned *>(words), step);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const uint4 b = X_IN_REGISTERS ? x_fragments[unit][step / 2][eight]
                                           : digits.operand(unit, step / 2, eight, lane);
            mma_m16n8k32(d[eight], a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
        }
        if (W::GROUP && (step + 1) % (W::GROUP / 32) == 0) {
            const int group = step / (W::GROUP ? W::GROUP / 32 : 1);
            const float2 low = scale_and_zero(scales, (group * 8 + g) * 2);
            const float2 high = scale_and_zero(scales, (group * 8 + g) * 2 + 1);
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++) {
                const float x_sum =
                    digits.x_group_sums[((unit * W::GROUPS + group) * EIGHTS + eight) * 4 + c % (I::ROWS * 2)];
                t[eight][0] += low.x * (combine(d[eight][0], d[eight][1]) - low.y * x_sum);
                t[eight][1] += high.x * (combine(d[eight][2], d[eight][3]) - high.y * (x_sum * HIGH));
                d[eight][0] = d[eight][1] = d[eight][2] = d[eight][3] = 0;
            }
        }
    }
    if (W::GROUP == 0)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            t[eight][0] += combine(d[eight][0], d[eight][1]);
            t[eight][1] += combine(d[eight][2], d[eight][3]);
        }
}

/* t += the products of a tile, the team's next: what the ring brings, stage after stage. */
__device__ __forceinline__ void multiply_tile(float (&t)[EIGHTS][2], Stream &weights, const Fragments &x_fragments,
                                              const Digits &digits, const Share<B> &share, int lane) {
#pragma unroll(X_IN_REGISTERS ? Stream::TILE_STAGES : 1)
    for (int stage = 0; stage < Stream::TILE_STAGES; stage++) {
        weights.wait_full();
#pragma unroll
        for (int s = 0; s < R::UNITS_PER_STAGE; s++) {
            const int unit = stage * R::UNITS_PER_STAGE + s;
            if (unit < B::UNITS && (B::WHOLE || unit < share.units))
                multiply(t, weights, s, unit, x_fragments, digits, lane);
        }
        weights.refill();
    }
}

/* Keep a warp's sums of a tile: a row's lower and upper digits, which two lanes have, added up in units of x. */
__device__ __forceinline__ void keep(float *sums, const float (&t)[EIGHTS][2], const float (&unit_of_column)[EIGHTS],
                                     int lane) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float all = t[eight][half] * (half ? unit_of_column[eight] / HIGH : unit_of_column[eight]);
            all += __shfl_xor_sync(~0u, all, 1);
            const int x_row = (4 * eight + lane % 4) / 2;
            if (lane % 2 == 0 && x_row < I::ROWS) sums[x_row * Sums::X_ROW + half * 8 * Sums::PITCH] = all;
        }
}
