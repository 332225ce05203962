/* Phases of a token that are products: what token.c and cpu_mamba2/token.c go through with a team of threads.

   At the end of a product each thread asks for its first rows of the next one, and waits then. */
#pragma once
#include <math.h>
#include "product.h"
#include "team.h"
enum { LEAST = 1 << 16 }; /* bytes of weights in a task, about, at the least; LONGEST times that at the most */

/* So many floats, and what is left of the last one's cache line. */
static int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* A product: rows of up to three matrices one above another; of a pair, the same row of two. */
typedef struct {
    const NUMBER *W[3];
    int64_t rows[3], all, cols, unit, least; /* unit: rows that are worked on at once; least: rows of a task */
    int pair;
} Product;

static Product product_of(const uint64_t *at, int64_t a, int64_t b, int64_t c, int64_t cols, int pair) {
    const int64_t streams = streams_of(cols), units = LEAST / (streams * cols * (int64_t)sizeof(NUMBER));
    Product p = {.rows = {a, b, c}, .all = pair ? a : a + b + c, .cols = cols, .pair = pair};
    for (int i = 0; i < 3; i++) p.W[i] = (const NUMBER *)at[i];
    p.unit = pair ? streams / 2 : streams;
    p.least = p.unit * (units > 1 ? units : 1);
    return p;
}

static const NUMBER *row_of(const Product *p, int64_t r) {
    int i = 0;
    for (; i < 2 && r >= p->rows[i]; i++) r -= p->rows[i];
    return p->W[i] + r * p->cols;
}

/* Rows begin to end - 1 of a product, as streams of `each` rows. Of a pair half of the streams are the other matrix. */
typedef struct {
    int64_t begin, end, each;
} Task;

static Task task_of(const Product *p, Span rows) {
    return (Task){rows.begin, rows.end, (rows.end - rows.begin + p->unit - 1) / p->unit};
}

/* Row i of each stream. One that has no such row gets the task's last: that result is not used. */
static Rows rows_of(const Product *p, const Task *task, int64_t i) {
    Rows found;
    int64_t r = task->begin + i;
    for (int s = 0; s < p->unit; s++, r += task->each) {
        const int64_t row = r < task->end ? r : task->end - 1;
        found.at[s] = row_of(p, row);
        if (p->pair) found.at[p->unit + s] = p->W[1] + row * p->cols;
    }
    return found;
}

static float silu(float v) { return v / (1 + expf(-v)); }

/* What becomes of the results y of row i of each stream. add: they are added to what is there. */
static void put(const Product *p, const Task *task, int64_t i, const float *y, float *out, const float *bias, int add) {
    for (int64_t s = 0, r = task->begin + i; s < p->unit && r < task->end; s++, r += task->each) {
        float v = p->pair ? silu(y[s]) * y[p->unit + s] : y[s] + (bias ? bias[r] : 0);
        out[r] = add ? out[r] + v : v;
    }
}

/* The rows that thread `me` begins a product with. */
static Task first_task(const Team *team, int me, const Product *p) {
    return task_of(p, first_span(team, me, p->all, p->least));
}

static void ask_for_first(const Team *team, int me, const Product *p) {
    const Task task = first_task(team, me, p);
    if (task.each <= 0) return;
    const Rows rows = rows_of(p, &task, 0);
    ask_for(&rows, p->cols);
}

/* A phase: tasks of a product until there is none left; then the thread asks for its first rows of the next one. */
static void multiply(Team *team, int phase, int me, const Product *p, const Product *next, const float *x, float *out,
                     const float *bias, int add) {
    for (Task task = first_task(team, me, p), following; task.each > 0; task = following) {
        following = task_of(p, take(team, phase, p->all, p->least));
        Rows here = rows_of(p, &task, 0), there = here;
        for (int64_t i = 0; i < task.each; i++, here = there) {
            float y[STREAMS];
            if (i + 1 < task.each) there = rows_of(p, &task, i + 1);
            else if (following.each > 0) there = rows_of(p, &following, 0);
            multiply_rows(&here, &there, x, y, p->cols);
            put(p, &task, i, y, out, bias, add);
        }
    }
    if (next) ask_for_first(team, me, next);
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
