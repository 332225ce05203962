/* One row of a state, read once and written once: state.c and token.c step their states by it. */
#pragma once
#include "vec.h"

static inline vec splat(float value) {
    float same[LANES];
    for (int i = 0; i < LANES; i++) same[i] = value;
    return load(same);
}

/* One row of a state: h = decay · h + add · B, and what it says of C. */
static float row(float *h, const float *B, const float *C, int64_t dstate, float decay, float add) {
    vec decays = splat(decay), adds = splat(add), acc = {0};
    int64_t n = 0;
    for (; n + LANES <= dstate; n += LANES) {
        vec kept = fma_(load(h + n), decays, (vec){0});
        vec now = fma_(load(B + n), adds, kept);
        memcpy(h + n, &now, sizeof now);
        acc = fma_(now, load(C + n), acc);
    }
    float total = sum(acc);
    for (; n < dstate; n++) {
        h[n] = decay * h[n] + add * B[n];
        total += h[n] * C[n];
    }
    return total;
}
