/* One token of a language model in one call: a team of threads goes through five phases a layer (steps 2 to 8 of
   ref.llm), and through the head (9).

   1. QKV        normed x times Wq, Wk and Wv, and biases
   2. attention  norms of heads, positions, the newest keys and values into the cache; a kv head and a part of its tokens
                 is a task
   3. back       the parts put together, times Wo, added to x
   4. feed       normed x times gate and up, silu(gate) · up
   5. down       times W_down, added to x

   What is short is computed by every thread for itself (norms, the merge of attention's parts): another phase, with its
   wait, would take longer. At the end of a product each thread asks for its first rows of the next one, and waits then.

   addresses  for each layer those of PER_LAYER arrays (0: none); then those of the last norm and of the head
   sizes      see Sizes
   turn       cos, then sin, of the token's position: head_dim / 2 floats each
   scratch    threads · max(hidden, n_heads · head_dim), then the heads of Q, K and V, ffn, and for each part of
              attention n_heads · (head_dim + 2) floats */
#ifdef _OPENMP
#include <omp.h>
#endif
#include "product.h"
#include "team.h"
#include "tile.h"
enum { CHUNK = 1 << 17 }; /* bytes of weights that a task of a product has, about */
enum { ATTENTION_NORM, WQ, WK, WV, BIAS, Q_NORM, K_NORM, WO, FFN_NORM, GATE, UP, DOWN, KEYS, VALUES, PER_LAYER };

typedef struct {
    int64_t layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab, room, position, first, parts;
} Sizes;

/* A product: rows of up to three matrices one above another; of a pair, the same row of two. */
typedef struct {
    const NUMBER *W[3];
    int64_t rows[3], all, cols, chunk; /* chunk: rows of a task */
    int pair;
} Product;

typedef struct {
    Team team;
    Sizes s;
    const float *turn;
    float *x, *heads, *glu, *partial, eps;
} Token;

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
static void multiply(Token *t, int phase, int me, const Product *p, const Product *next, const float *x, float *out,
                     const float *bias, int add) {
    const int64_t unit = p->pair ? HALF : ROWS;
    Eight here, there;
    for (int64_t task = me, following; task * p->chunk < p->all; task = following) {
        int64_t begin = task * p->chunk, end = begin + p->chunk < p->all ? begin + p->chunk : p->all;
        following = take(&t->team, phase);
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
    meet(&t->team, phase);
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

/* A head, normed if there is a weight, at its position. out may be `head`. */
static void turned(const Token *t, const float *head, const float *weight, float *out) {
    const int64_t d = t->s.head_dim, half_dim = d / 2;
    if (weight) norm(head, weight, out, d, t->eps), head = out;
    for (int64_t i = 0; i < half_dim; i++) {
        float a = head[i], b = head[half_dim + i], cosine = t->turn[i], sine = t->turn[half_dim + i];
        out[i] = a * cosine - b * sine;
        out[half_dim + i] = b * cosine + a * sine;
    }
}

/* To the nearest half, to the even one of two; as NumPy does it. */
static half to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return sign | 0x7e00;
    if (u >= 0x477ff000) return sign | 0x7c00; /* 65520 and above: infinity */
    if (u >= 0x38800000) return sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
    memcpy(&f, &u, 4);
    f += 0.5f; /* below 2^-14: the sum has a half's last digit as its own */
    memcpy(&u, &f, 4);
    return sign | (u - 0x3f000000);
}

/* Phase 2: the tasks of attention.c's first step; the part with the newest token puts it into the cache. */
static void attend(Token *t, int phase, int me, const uint64_t *at, float *q) {
    const Sizes *s = &t->s;
    const int64_t d = s->head_dim, group = s->n_heads / s->n_kv_heads, end = s->position + 1, row = d + 2;
    const int64_t each = (end - s->first + s->parts - 1) / s->parts;
    for (int64_t task = me; task < s->n_kv_heads * s->parts; task = take(&t->team, phase)) {
        const int64_t kv_head = task / s->parts, part = task % s->parts;
        const int64_t from = s->first + part * each, to = from + each < end ? from + each : end;
        half *k = (half *)at[KEYS] + kv_head * s->room * d, *v = (half *)at[VALUES] + kv_head * s->room * d;
        if (from < end && to == end) {
            float *key = t->heads + (s->n_heads + kv_head) * d, *value = key + s->n_kv_heads * d;
            turned(t, key, (const float *)at[K_NORM], key);
            for (int64_t c = 0; c < d; c++) {
                k[s->position * d + c] = to_half(key[c]);
                v[s->position * d + c] = to_half(value[c]);
            }
        }
        float *own = t->partial + (part * s->n_heads + kv_head * group) * row;
        for (int64_t h = 0; h < group; h++) {
            turned(t, t->heads + (kv_head * group + h) * d, (const float *)at[Q_NORM], q + h * d);
            memset(own + h * row, 0, row * sizeof *own);
            own[h * row + d] = -INFINITY;
        }
        for (int64_t i = from; i < to; i += TILE)
            for (int64_t h = 0, n = to - i < TILE ? to - i : TILE; h < group; h++)
                one_tile(q + h * d, k + i * d, v + i * d, own + h * row, n, d, 1 / sqrtf(d));
    }
    meet(&t->team, phase);
}

/* A layer's five phases. mine: max(hidden, n_heads · head_dim) floats of this thread's own */
static int layer(Token *t, int phase, int me, const uint64_t *at, const Product *next, float *mine) {
    const Sizes *s = &t->s;
    const int64_t q_rows = s->n_heads * s->head_dim, kv_rows = s->n_kv_heads * s->head_dim;
    const Product qkv = product_of(at + WQ, q_rows, kv_rows, kv_rows, s->hidden, 0);
    const Product back = product_of(at + WO, s->hidden, 0, 0, q_rows, 0);
    const Product feed = product_of(at + GATE, s->ffn, s->ffn, 0, s->hidden, 1);
    const Product down = product_of(at + DOWN, s->hidden, 0, 0, s->ffn, 0);
    norm(t->x, (const float *)at[ATTENTION_NORM], mine, s->hidden, t->eps);
    multiply(t, phase++, me, &qkv, &back, mine, t->heads, (const float *)at[BIAS], 0); /* 1 */
    attend(t, phase++, me, at, mine);                                                  /* 2 */
    merge(t->partial, mine, s->n_heads, s->head_dim, s->parts);
    multiply(t, phase++, me, &back, &feed, mine, t->x, 0, 1); /* 3 */
    norm(t->x, (const float *)at[FFN_NORM], mine, s->hidden, t->eps);
    multiply(t, phase++, me, &feed, &down, mine, t->glu, 0, 0); /* 4 */
    multiply(t, phase++, me, &down, next, t->glu, t->x, 0, 1);  /* 5 */
    return phase;
}

void token(const uint64_t *addresses, const int64_t *sizes, const float *turn, float *x, float *scratch, float *logits,
           float eps, int threads) {
    Token t = {.turn = turn, .x = x, .eps = eps};
    memcpy(&t.s, sizes, sizeof t.s);
    const Sizes *s = &t.s;
    const int64_t q_rows = s->n_heads * s->head_dim, kv_rows = s->n_kv_heads * s->head_dim;
    const int64_t own = s->hidden > q_rows ? s->hidden : q_rows;
    t.heads = scratch + threads * own;
    t.glu = t.heads + q_rows + 2 * kv_rows;
    t.partial = t.glu + s->ffn;
    const uint64_t *last = addresses + s->layers * PER_LAYER;
    const uint64_t head_at[3] = {last[1], 0, 0};
    const Product head = product_of(head_at, s->vocab, 0, 0, s->hidden, 0);
    begin(&t.team, 0);
#pragma omp parallel num_threads(threads)
    {
        int me = 0, phase = 0;
#ifdef _OPENMP
        me = omp_get_thread_num();
#pragma omp single
        begin(&t.team, omp_get_num_threads());
#else
        begin(&t.team, 1);
#endif
        float *mine = scratch + me * own;
        for (int64_t i = 0; i < s->layers; i++) {
            const uint64_t *at = addresses + i * PER_LAYER;
            const int more = i + 1 < s->layers;
            const Product following = product_of(at + more * PER_LAYER + WQ, q_rows, kv_rows, kv_rows, s->hidden, 0);
            phase = layer(&t, phase, me, at, more ? &following : &head, mine);
        }
        norm(x, (const float *)last[0], mine, s->hidden, eps);
        multiply(&t, phase, me, &head, 0, mine, logits, 0, 0);
    }
}
