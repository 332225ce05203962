/* One vector of floats, whatever the processor offers: AVX-512, AVX2, NEON, or plain C that the compiler vectorises.

   The flags decide: -mavx512f gives 16 lanes, -mavx2 -mfma -mf16c gives 8. No flag gives 4 lanes in portable C (GCC's
   and clang's vector extension, which maps them onto SSE or whatever there is); on every Arm processor of 64 bits
   (Apple's, Graviton, Grace) NEON's own instructions multiply, add and convert them.

     vec v = load(p)             LANES floats from memory, no alignment needed
     vec v = load_half(p)        LANES halves (16-bit floats), converted to float
     vec v = fma_(a, b, c)       a * b + c, lane by lane (one rounding where the hardware has FMA)
     float s = sum(v)            the lanes added together
     float f = half_to_float(h)  one half, for the last few columns
*/
#pragma once
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16 };
typedef __m512 vec;
static inline vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline vec load_half(const half *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline vec fma_(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline float sum(vec v) { return _mm512_reduce_add_ps(v); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { LANES = 8 };
typedef __m256 vec;
static inline vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline vec load_half(const half *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline vec fma_(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline float sum(vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
enum { LANES = 4 };
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(8)));
static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline float sum(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#if defined(__aarch64__)
#include <arm_neon.h>
static inline vec fma_(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
static inline vec load_half(const half *p) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
static inline vec fma_(vec a, vec b, vec c) { return a * b + c; }

/* A half is 1 sign bit, 5 exponent bits (bias 15), 10 fraction bits; a float is 1, 8 (bias 127), 23. */
static inline vec load_half(const half *p) {
    halves packed;
    memcpy(&packed, p, sizeof packed);
    ivec bits = __builtin_convertvector(packed, ivec), magnitude = bits & 0x7fff;
    ivec normal = (magnitude << 13) + ((127 - 15) << 23);             /* move the fraction, re-bias the exponent */
    ivec top = (magnitude >= 0x7c00) & (0xff << 23);                  /* infinity and NaN: all exponent bits */
    vec tiny = __builtin_convertvector(magnitude, vec) * 0x1p-24f;    /* subnormal: the fraction times 2^-24 */
    ivec is_tiny = magnitude < 0x0400;
    return (vec)((is_tiny & (ivec)tiny) | (~is_tiny & (normal | top)) | (bits & 0x8000) << 16);
}
#endif
#endif

static inline float half_to_float(half h) {
    half padded[LANES] = {h};
    vec v = load_half(padded);
    float first;
    memcpy(&first, &v, sizeof first);
    return first;
}
