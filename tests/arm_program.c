/* What tests/test_arm.py runs on an Arm processor, or under qemu: the vector of kernels/vec.h and the rungs on it. The
   program ends with 0, or says what is wrong. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static float number(void) { return rand() / (float)(1u << 31) - 0.5f; }

static double from_bits(int bits) { /* of a half, by its definition */
    const int sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static int halves_differ(void) {
    for (int bits = 0; bits < 65536; bits += LANES) {
        half packed[LANES];
        for (int i = 0; i < LANES; i++) packed[i] = bits + i;
        const vec found = load_half(packed);
        for (int i = 0; i < LANES; i++) {
            const double wanted = from_bits(bits + i);
            const int same = found[i] == wanted && !signbit(found[i]) == !signbit(wanted);
            if (isnan(wanted) ? !isnan(found[i]) : !same) return 1;
        }
    }
    return half_to_float(0x3c00) != 1;
}

static int fma_rounds_twice(void) {
    const float a = 1 + 0x1p-12f, c = -(1 + 0x1p-11f); /* a * a is 1 + 2^-11 + 2^-24: only one rounding keeps the end */
    const float as[4] = {a, a, a, a}, cs[4] = {c, c, c, c};
    const vec found = fma_(load(as), load(as), load(cs));
    return found[0] != 0x1p-24f || found[3] != 0x1p-24f;
}

static int product_differs(void) {
    enum { M = 61, N = 45, K = 400 };
    static float A[M * K], B[K * N], C[M * N];
    for (int i = 0; i < M * K; i++) A[i] = number();
    for (int i = 0; i < K * N; i++) B[i] = number();
    static float packed[1 << 20];
    memset(C, 0, sizeof C);
    float *a = packed, *b = packed + (1 << 19);
    for (int64_t p = 0; p < K; p += KC)
        for (int64_t j = 0; j < N; j += NR) {
            const int64_t kc = min(KC, K - p);
            pack_b(B + p * N + j, b, N, min(NR, N - j), kc);
            pack_a(A + p, a, K, M, kc);
            for (int64_t i = 0; i < M; i += MR)
                block(kc, a + i * kc, b, C + i * N + j, N, min(MR, M - i), min(NR, N - j));
        }
    double error = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double wanted = 0;
            for (int p = 0; p < K; p++) wanted += (double)A[i * K + p] * B[p * N + j];
            error = fmax(error, fabs(C[i * N + j] - wanted));
        }
    return !(error < 1e-4);
}

static int sums_differ(void) {
    const float x[4] = {1, 2, 4, 8};
    const uint16_t b[4] = {0x3f80, 0xc000, 0x7f80, 0x0001};
    const vec v = load_bfloat(b);
    return sum(load(x)) != 15 || v[0] != 1 || v[1] != -2 || v[2] != INFINITY || v[3] != 0x1p-133f;
}

int main(void) {
    const int wrong[] = {halves_differ(), fma_rounds_twice(), product_differs(), sums_differ()};
    const char *what[] = {"load_half", "fma_", "block", "sum or load_bfloat"};
    int found = 0;
    for (int i = 0; i < 4; i++)
        if (wrong[i]) found = 1, printf("wrong: %s\n", what[i]);
    return found;
}
