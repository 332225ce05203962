/* A head of a new token into a quantised cache: its code and scale are those that rounding.py gives it, bit for bit,
   and lie where layout.py has them. Nothing of other tokens changes.

   Compile with HEAD_DIM (a multiple of 16), BITS (8 or 4), GROUP (16, 32 or HEAD_DIM) and, for bytes of e4m3, FP8. */
#pragma once
#include <cuda_fp16.h>
#ifndef FP8
#define FP8 0
#endif
#if FP8 && __CUDA_ARCH__ < 890 // which has no instruction for it
#include <cuda_fp8.h>
#endif

constexpr int TILE = 16;                              // tokens of a tile
constexpr int MINE = (HEAD_DIM + 31) / 32;            // channels of a lane: lane + 32 n
constexpr int GROUPS = HEAD_DIM / GROUP, STEPS = HEAD_DIM / 16;
constexpr int STEP_BYTES = BITS;                      // of a lane: 8 codes
constexpr int TILE_BYTES = TILE * HEAD_DIM * BITS / 8;
constexpr float LARGEST = FP8 ? 448 : BITS == 8 ? 127 : 8; // the code that the largest number of a group is given
static_assert(HEAD_DIM % 16 == 0 && (GROUP == 16 || GROUP == 32 || GROUP == HEAD_DIM), "as default_group has it");

/* Where a code lies in its tile: layout.py. A tile is (rows, columns) of an mma's left operand, 16 columns a step:
   tokens and channels for keys, channels and tokens for values. */
struct Place {
    int byte;
    bool upper; // half of it, in 4 bits
};
__device__ Place place(int token, int channel, bool is_v) {
    const int step = channel / 16, row = is_v ? channel % 16 : token, column = is_v ? token : channel % 16;
    // Columns 4c … 4c + 3 belong to a lane for keys, and 2c, 2c + 1, 2c + 8, 2c + 9 for values.
    const int c = is_v ? column % 8 / 2 : column / 4, pair = is_v ? column / 8 : column % 4 / 2, odd = column % 2;
    const int lane = 4 * (row % 8) + c, high = row / 8;
    const int within = BITS == 8 ? 4 * pair + 2 * high + odd : 2 * odd + high;

    int first = 0, each = 16 / STEP_BYTES; // words of 16 bytes; what steps are left over in words of 8, and then of 4
    while (step >= first + (STEPS - first) / each * each) first += (STEPS - first) / each * each, each /= 2;
    const int word = (step - first) / each * 32 + lane;
    return {STEP_BYTES * (32 * first + word * each + (step - first) % each) + within, BITS == 4 && pair == 1};
}
/* Where the scale of a token's group lies in its tile. */
__device__ int scale_place(int token, int group, bool is_v) {
    if (is_v) return (token % 8 / 2 * GROUPS + group) * 4 + token / 8 * 2 + token % 2;
    return (token % 8 * GROUPS + group) * 2 + token / 8;
}

/* The smallest and the largest number of each channel's group; 0 may count among them, as it is never the one that a
   scale is made of. */
__device__ void find_range(float (&low)[MINE], float (&high)[MINE], const float (&x)[MINE]) {
    for (int n = 0; n < MINE; n++) low[n] = high[n] = x[n];
    if (GROUP > 32)
        for (int n = 0; n < MINE; n++) low[0] = fminf(low[0], x[n]), high[0] = fmaxf(high[0], x[n]);
    for (int n = 0; n < (GROUP > 32 ? 1 : MINE); n++)
        for (int other = min(GROUP, 32) / 2; other; other /= 2) {
            low[n] = fminf(low[n], __shfl_xor_sync(~0u, low[n], other));
            high[n] = fmaxf(high[n], __shfl_xor_sync(~0u, high[n], other));
        }
    if (GROUP > 32)
        for (int n = 1; n < MINE; n++) low[n] = low[0], high[n] = high[0];
}
/* The smallest float16 that is not below x, 0 or more. */
__device__ __half round_up(float x) {
    const __half nearest = __float2half_rn(x);
    return __ushort_as_half(__half_as_ushort(nearest) + (__half2float(nearest) < x));
}

#if FP8
/* The byte of e4m3 nearest to a number; beyond the largest, that. */
__device__ int e4m3(float x) {
#if __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return pair & 0xff;
#else
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#endif
}
#endif

/* Quantise a head and put it into its tile. x: this lane's channels, 0 beyond the last. */
__device__ void put_head(const float (&x)[MINE], unsigned char *codes, __half *scales, int token, bool is_v, int lane) {
    float low[MINE], high[MINE];
    find_range(low, high, x);
    for (int n = 0; n < MINE; n++) {
        const int channel = lane + 32 * n;
        const float m = -low[n] >= high[n] ? low[n] : high[n];
        __half scale = round_up(__fdiv_rn(fabsf(m), LARGEST));
        if (BITS == 4 && m > 0) scale = __hneg(scale);
#if FP8
        const float unit = __half2float(scale);
        const int code = e4m3(unit != 0 ? __fdiv_rn(x[n], unit) : 0);
#else
        const float unit = __half2float(scale), y = unit != 0 ? rintf(__fdiv_rn(x[n], unit)) : 0;
        const int least = BITS == 4 ? -8 : -127, most = BITS == 4 ? 7 : 127, offset = BITS == 4 ? 8 : 128;
        const int code = (int)fminf(fmaxf(y, least), most) + offset;
#endif
        const int beside = __shfl_xor_sync(~0u, code, 2); // in 4 bits, keys: of the channel in the other half
        if (channel >= HEAD_DIM) continue;
        if (channel % GROUP == 0) scales[scale_place(token, channel / GROUP, is_v)] = scale;
        const Place at = place(token, channel, is_v);
        if (BITS == 8) codes[at.byte] = code;
        else if (is_v) { // the other half is of another token
            const int was = codes[at.byte];
            codes[at.byte] = at.upper ? (was & 15) | code << 4 : (was & 0xf0) | code;
        } else if (!at.upper) codes[at.byte] = code | beside << 4;
    }
}
