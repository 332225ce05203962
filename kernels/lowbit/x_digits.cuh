/* A warp's slice of x as digits: made once, kept in shared memory as the operands of integer tensor cores. */
#pragma once
#include "digits.cuh"
#include "unit.cuh"

/* Row j's digits are columns DIGITS * j .. of the operand B, eight columns to an mma. */
template <class W, class I, class B> struct XDigits {
    static constexpr int COLUMNS = I::ROWS * DIGITS, EIGHTS = (COLUMNS + 7) / 8, STORED = COLUMNS < 8 ? COLUMNS : 8;
    // Floats of a warp; two at least of a row's, so that what lies behind is at a multiple of 16 bytes
    static constexpr int SUMS = B::UNITS * W::GROUPS * EIGHTS * 4, ROOM = I::ROWS < 2 ? 2 : I::ROWS;
    static constexpr int WORDS = B::UNITS * 2 * EIGHTS * STORED * 4; // of 16 bytes
    static constexpr int FLOATS = B::WARPS * (SUMS + 2 * ROOM + 4 * WORDS); // of the block

    float *x_group_sums;           // [UNITS][GROUPS][x row][2]: sums of whole numbers over a group, and 0
    float *x_slice_sums, *x_units; // [x row]: the slice's sum, and its unit
    uint4 *words;                  // [UNITS][2][EIGHTS][STORED][4]: words of a lane for two steps
    const float *all_slice_sums;   // [warp][ROOM], of the block

    __device__ __forceinline__ XDigits(float *first, int warp) {
        float *const slices = first + B::WARPS * SUMS, *const units = slices + B::WARPS * ROOM;
        x_group_sums = first + warp * SUMS, x_slice_sums = slices + warp * ROOM, x_units = units + warp * ROOM;
        words = reinterpret_cast<uint4 *>(units + B::WARPS * ROOM) + warp * WORDS, all_slice_sums = slices;
    }
    /* Keep the digits of the lane's four neighbours, columns 4 * lane .. of a unit: each at a distance from the lane's
       place that the compiler knows. In one sum with the lane's own numbers each digit would take an address of its
       own, some 200 instructions for two rows of 14336 columns. */
    __device__ __forceinline__ void store(const unsigned (&whole)[4], int x_row, int unit, int lane) const {
        const int step = lane / 8, half = lane % 2;
        uint4 *const lane_words = words + step / 2 * (EIGHTS * STORED * 4) + lane / 2 % 4;
        unsigned *const place = reinterpret_cast<unsigned *>(lane_words) + step % 2 * 2 + half;
#pragma unroll
        for (int k = 0; k < DIGITS; k++) {
            const int n = x_row * DIGITS + k;
            place[((unit * 2 * EIGHTS + n / 8) * STORED + n % 8) * 16] = digit_of_four(whole, k);
        }
    }
    /* The sum of the lanes' sums over a group, or over a unit where a group is a row; kept, for a group. */
    __device__ __forceinline__ int keep_sum(int sum, int x_row, int unit, int lane) const {
        constexpr int LANES = W::GROUP ? W::GROUP / 4 : 32; // of a group
        if (LANES == 32) sum = __reduce_add_sync(~0u, sum);
#pragma unroll
        for (int lane_mask = LANES % 32 / 2; lane_mask > 0; lane_mask /= 2)
            sum += __shfl_xor_sync(~0u, sum, lane_mask);
        if (W::GROUP && lane % LANES == 0) {
            const int at = (unit * W::GROUPS + lane / LANES) * EIGHTS + x_row / 2;
            reinterpret_cast<float2 *>(x_group_sums)[at * 2 + x_row % 2] = {(float)sum, 0};
        }
        return sum;
    }
    /* Row x_row of the slice; word(unit) gives the lane's four numbers of a unit. */
    template <class Word> __device__ __forceinline__ void make(int x_row, int lane, Word word) const {
        unsigned top = 0; // the largest of both halves without their signs, as bits: NaN is above infinity
#pragma unroll
        for (int u = 0; u < B::UNITS; u++) {
            const uint2 v = word(u);
            top = __vmaxu2(top, __vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff));
        }
        const unsigned largest = __reduce_max_sync(~0u, max(top & 0xffff, top >> 16));
        make_of(x_row, lane, unpack(largest, typename I::X()).x,
                [&](int u, unsigned(&whole)[4], float up) { to_whole<typename I::X>(whole, word(u), up); });
    }
    /* The same of other numbers, the largest of which is known: to_whole(unit, whole, up) makes four whole ones. */
    template <class ToWhole>
    __device__ __forceinline__ void make_of(int x_row, int lane, float largest, ToWhole to_whole) const {
        const DigitScale scale(largest);
        if (lane == 0) x_units[x_row] = scale.unit;
        float total = 0;
#pragma unroll
        for (int u = 0; u < B::UNITS; u++) {
            unsigned whole[4];
            to_whole(u, whole, scale.up);
            const int sum = (int)(whole[0] + whole[1] + whole[2] + whole[3]) - 4 * CARRY;
            total += (float)keep_sum(sum, x_row, u, lane);
            store(whole, x_row, u, lane);
        }
        if (W::GROUP == 0 && lane == 0) x_slice_sums[x_row] = total * scale.unit;
    }
    /* The lane's words of B for steps 2 * pair and 2 * pair + 1 of a unit. */
    __device__ __forceinline__ uint4 operand(int unit, int pair, int eight, int lane) const {
        return words[((unit * 2 + pair) * EIGHTS + eight) * (STORED * 4) + lane % (STORED * 4)];
    }
};
