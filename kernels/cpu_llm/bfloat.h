/* LANES bfloat16 numbers as floats. A bfloat16 is the upper half of a float, so a shift by 16 bits converts it.

     vec v = load_bfloat(p)          LANES of them from memory, no alignment needed
     float f = bfloat_to_float(b)    one
*/
#pragma once
#include "vec.h"

typedef uint16_t bfloat;

#if defined(__AVX512F__)
static inline vec load_bfloat(const bfloat *p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
static inline vec load_bfloat(const bfloat *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
#else
static inline vec load_bfloat(const bfloat *p) {
    halves packed;
    memcpy(&packed, p, sizeof packed);
    return (vec)(__builtin_convertvector(packed, ivec) << 16);
}
#endif

static inline float bfloat_to_float(bfloat b) {
    uint32_t bits = (uint32_t)b << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
