/* Phases of a token that are products: what token.c and cpu_mamba2/token.c go through with a team of threads.

   At the end of a product each thread asks for its first rows of the next one, and waits then. */
#pragma once
#include <math.h>
#include "product.h"
#include "team.h"
enum { CHUNK = 1 << 17 }; /* bytes of weights that a task of a product has, about */

/* A product: rows of up to three matrices one above another; of a pair, the same row of two. */
typedef struct {
    const NUMBER *W[3];
    int64_t rows[3], all, cols, chunk; /* chunk: rows of a task */
    int pair;
} Product;

static Product product_of(const uint64_t *at, int64_t a, int64_t b, int64_t c, int64_t cols, int pair) {
    const int64_t unit = pair ? HALF : ROWS, units = CHUNK / (ROWS * cols * (int64_t)sizeof(NUMBER));
    Product p = {.rows = {a, b, c}, .all = pair ? a : a + b + c, .cols = cols, .pair = pair};
    for (int i = 0; i < 3; i++) p.W[i] = (const NUMBER *)at[i];
    p.chunk = unit * (units > 1 ? units : 1);
    return p;
}

static const NUMBER *row_of(const Product *p, int64_t r) {
    int i = 0;
    for (; i < 2 && r >= p->rows[i]; i++) r -= p->rows[i];
    return p->W[i] + r * p->cols;
}

/* The unit of rows from r on, if there is one: eight rows of a matrix, four and four, or four of each of a pair. It is
   none where four rows are not of one matrix. */
static int unit_at(const Product *p, int64_t r, Eight *found) {
    const int64_t unit = p->pair ? HALF : ROWS, fourth = (HALF - 1) * p->cols;
    if (r + unit > p->all) return 0;
    if (p->pair) {
        *found = (Eight){p->W[0] + r * p->cols, p->W[1] + r * p->cols};
        return 1;
    }
    *found = (Eight){row_of(p, r), row_of(p, r + HALF)};
    return row_of(p, r + HALF - 1) == found->low + fourth && row_of(p, r + ROWS - 1) == found->high + fourth;
}

static float silu(float v) { return v / (1 + expf(-v)); }

/* What becomes of the results y of n rows from r on. add: they are added to what is there. */
static void put(const Product *p, float *out, const float *bias, int add, int64_t r, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float v = p->pair ? silu(y[i]) * y[HALF + i] : y[i] + (bias ? bias[r + i] : 0);
        out[r + i] = add ? out[r + i] + v : v;
    }
}

/* A phase: tasks of a product until there is none left; then the thread asks for its first rows of the next one. */
static void multiply(Team *team, int phase, int me, const Product *p, const Product *next, const float *x, float *out,
                     const float *bias, int add) {
    const int64_t unit = p->pair ? HALF : ROWS;
    Eight here, there;
    for (int64_t task = me, following; task * p->chunk < p->all; task = following) {
        int64_t begin = task * p->chunk, end = begin + p->chunk < p->all ? begin + p->chunk : p->all;
        following = take(team, phase);
        for (int64_t r = begin; r < end; r += unit) {
            float y[ROWS];
            int64_t then = r + unit < end ? r + unit : following * p->chunk;
            if (unit_at(p, r, &here)) {
                if (!unit_at(p, then, &there)) there = here;
                eight_rows(here, there, x, y, p->cols);
                put(p, out, bias, add, r, y, unit);
            } else
                for (int64_t i = r; i < end && i < r + unit; i++) {
                    y[0] = one_row(p->pair ? p->W[0] + i * p->cols : row_of(p, i), x, p->cols);
                    y[HALF] = p->pair ? one_row(p->W[1] + i * p->cols, x, p->cols) : 0;
                    put(p, out, bias, add, i, y, 1);
                }
        }
    }
    if (next && unit_at(next, me * next->chunk, &there)) ask_for(there, next->cols);
    meet(team, phase);
}

static void norm(const float *x, const float *weight, float *out, int64_t n, float eps) {
    vec acc = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) acc = fma_(load(x + c), load(x + c), acc);
    float squares = sum(acc);
    for (; c < n; c++) squares += x[c] * x[c];
    const float by = 1 / sqrtf(squares / n + eps);
    for (c = 0; c < n; c++) out[c] = x[c] * by * weight[c];
}
