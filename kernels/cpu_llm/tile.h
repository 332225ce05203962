/* Online softmax over a tile of tokens, for one query head: attention.c and token.c split a cache into such tiles. */
#pragma once
#include <math.h>
#include "vec.h"
enum { TILE = 64 };

static void add_scaled(float *to, const half *from, float by, int64_t n) {
    int64_t c = 0;
    for (; c < n; c++) to[c] += by * half_to_float(from[c]);
}

/* s[t] = scale · q · k[t] for the tokens of a tile. */
static void scores(const float *q, const half *k, float *s, int64_t tokens, int64_t head_dim, float scale) {
    for (int64_t t = 0; t < tokens; t++) {
        vec acc = {0};
        int64_t c = 0;
        for (; c + LANES <= head_dim; c += LANES) acc = fma_(load_half(k + t * head_dim + c), load(q + c), acc);
        float total = sum(acc);
        for (; c < head_dim; c++) total += half_to_float(k[t * head_dim + c]) * q[c];
        s[t] = total * scale;
    }
}

/* mix[c] += sum over t of p[t] · v[t][c]: a vector of columns stays in a register for the whole tile. */
static void mix_values(float *mix, const float *p, const half *v, int64_t tokens, int64_t head_dim) {
    int64_t c = 0;
    for (; c + LANES <= head_dim; c += LANES) {
        vec acc = load(mix + c);
        for (int64_t t = 0; t < tokens; t++) {
            float same[LANES];
            for (int i = 0; i < LANES; i++) same[i] = p[t];
            acc = fma_(load_half(v + t * head_dim + c), load(same), acc);
        }
        memcpy(mix + c, &acc, sizeof acc);
    }
    if (c < head_dim)
        for (int64_t t = 0; t < tokens; t++) add_scaled(mix + c, v + t * head_dim + c, p[t], head_dim - c);
}

/* One head's share: tokens begin to end - 1. own: mix (head_dim), m, l. */
static void one_tile(const float *q, const half *k, const half *v, float *own, int64_t tokens, int64_t head_dim,
                     float scale) {
    float s[TILE], *m = own + head_dim, *l = m + 1, most = *m;
    scores(q, k, s, tokens, head_dim, scale);
    for (int64_t t = 0; t < tokens; t++) most = s[t] > most || s[t] != s[t] ? s[t] : most; /* NaN passes through */
    float correction = *m == most ? 1 : expf(*m - most);
    for (int64_t c = 0; c < head_dim; c++) own[c] *= correction;
    *l *= correction;
    for (int64_t t = 0; t < tokens; t++) *l += s[t] = expf(s[t] - most);
    *m = most;
    mix_values(own, s, v, tokens, head_dim);
}

/* out = (sum over parts of exp(m - M) · mix) / (sum over parts of exp(m - M) · l), M the largest m: each head's. */
static void merge(const float *partial, float *out, int64_t n_heads, int64_t head_dim, int64_t parts) {
    const int64_t row = head_dim + 2;
    for (int64_t h = 0; h < n_heads; h++) {
        float most = -INFINITY, total = 0;
        for (int64_t p = 0; p < parts; p++) {
            float m = partial[(p * n_heads + h) * row + head_dim];
            most = m > most || m != m ? m : most;
        }
        memset(out + h * head_dim, 0, head_dim * sizeof *out);
        for (int64_t p = 0; p < parts; p++) {
            const float *own = partial + (p * n_heads + h) * row;
            if (own[head_dim + 1] == 0) continue; /* a part without tokens */
            float by = own[head_dim] == most ? 1 : expf(own[head_dim] - most);
            total += by * own[head_dim + 1];
            for (int64_t c = 0; c < head_dim; c++) out[h * head_dim + c] += by * own[c];
        }
        for (int64_t c = 0; c < head_dim; c++) out[h * head_dim + c] /= total;
    }
}
