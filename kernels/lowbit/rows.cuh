/* What the first two rungs share: all but how a code becomes a number.

   A warp has EACH neighbouring rows of W, and its lanes take 16 codes of each in turn: 16, 8 or 4 bytes, neighbours in
   memory, and the 16 numbers of x that go with them. No group ends within 16 codes, so a lane adds up 16 products
   before it multiplies by their scale. The codes of the next turn are under way while those of this one are used. For
   one row of x, EACH rows of W share what is made of it; for M rows of x it is the other way round: what has been made
   of the codes serves them all.

   W             (rows, words of a row) uint32, codes of BITS bits row after row: code i of a word is its bits from
                 BITS * i on. A row is padded to a multiple of 16 codes
   scale, zero   SCALE (rows, groups), a group being GROUP neighbouring columns; 0: one for a row.
                 weight = (code - zero) * scale
   x             T (M, cols);   y  T (M, rows); sums are float32

   Compile with DTYPE (__half or __nv_bfloat16), SCALE (the same, or float), BITS, GROUP, M (1 to 16), VEC, how many
   numbers of x one load brings (cols is a multiple of it, and x starts at a multiple of as many bytes), and TAIL, 1
   where cols is no multiple of 16. Launch ceil(rows / (WARPS * EACH)) blocks of 32 * WARPS threads. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "../device/reduce.cuh"
#ifndef DTYPE
#define DTYPE __half
#endif
#ifndef SCALE
#define SCALE __half
#endif
#ifndef BITS
#define BITS 4
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef M
#define M 1
#endif
#ifndef VEC
#define VEC 8
#endif
#ifndef TAIL
#define TAIL 0
#endif
using T = DTYPE;
constexpr int WARPS = 4, EACH = M == 1 ? 4 : 1;              // warps of a block, rows of a warp
constexpr int TAKE = 16, TURN = 32 * TAKE;                   // codes that a lane takes, and a warp
constexpr int PER_WORD = 32 / BITS, WORDS = TAKE / PER_WORD; // codes in a word, words that a lane takes
struct alignas(4 * WORDS) Codes { unsigned v[WORDS]; };
template <class> struct Format { static constexpr bool HALF = true; using Pair = __half2; };
template <> struct Format<__nv_bfloat16> { static constexpr bool HALF = false; using Pair = __nv_bfloat162; };
using Pair = Format<T>::Pair; // two numbers of T in the 32 bits of a register

/* Both as floats. A bfloat16 is the upper half of its float. */
__device__ __forceinline__ float2 floats(unsigned pair) {
    if (!Format<T>::HALF) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
    float2 two;
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(two.x), "=f"(two.y) : "r"(pair));
    return two;
}

/* TAKE numbers of x from here on, or as many as there are, and zeros: two in each word. One load brings N. */
struct alignas(16) Numbers { unsigned v[TAKE / 2]; };
template <int N>
__device__ __forceinline__ Numbers load(const T *x, unsigned left) {
    struct alignas(2 * N) Word { unsigned v[N / 2]; };
    Numbers u = {};
#pragma unroll
    for (int i = 0; i < TAKE; i += N)
        if (!TAIL || i < left) *(Word *)&u.v[i / 2] = *(const Word *)(x + i);
    return u;
}
template <>
__device__ __forceinline__ Numbers load<1>(const T *x, unsigned left) {
    Numbers u = {};
#pragma unroll
    for (int i = 0; i < TAKE; i++)
        if (i < left) u.v[i / 2] |= *(const unsigned short *)(x + i) << 16 * (i % 2);
    return u;
}

/* y = W x. Convert::weights(codes, zero, weight) turns TAKE codes into floats, code - zero. */
template <class Convert>
__device__ __forceinline__ void product(const Codes *W, const SCALE *scale, const SCALE *zero, const T *x, T *y,
                                        long long rows, unsigned cols) {
    unsigned lane = threadIdx.x % 32, takes = (cols + TAKE - 1) / TAKE, groups = GROUP ? cols / (GROUP + !GROUP) : 1;
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * EACH;
    if (first >= rows) return; // the whole warp leaves
    const Codes *codes[EACH];
    const SCALE *scales[EACH], *zeros[EACH];
    Codes next[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        long long row = first + e < rows ? first + e : rows - 1; // past the last row: that once more
        codes[e] = W + row * takes, scales[e] = scale + row * groups, zeros[e] = zero + row * groups;
        if (lane < takes) next[e] = codes[e][lane];
    }
    float sum[EACH][M] = {};
    for (unsigned c = TAKE * lane; c < cols; c += TURN) {
        Codes now[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            now[e] = next[e];
            if (c + TURN < cols) next[e] = codes[e][(c + TURN) / TAKE];
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            unsigned group = GROUP ? c / (GROUP + !GROUP) : 0;
            float weight[TAKE], s = (float)scales[e][group];
            Convert::weights(now[e], (float)zeros[e][group], weight);
#pragma unroll
            for (int r = 0; r < M; r++) {
                Numbers u = load<VEC>(x + (long long)r * cols + c, cols - c);
                float products = 0;
#pragma unroll
                for (int i = 0; i < TAKE; i += 2) {
                    float2 two = floats(u.v[i / 2]);
                    products += weight[i] * two.x;
                    products += weight[i + 1] * two.y;
                }
                sum[e][r] += s * products;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int r = 0; r < M; r++) {
            const float total = warp_sum(sum[e][r]);
            if (lane == 0 && first + e < rows) y[r * rows + first + e] = (T)total;
        }
}
