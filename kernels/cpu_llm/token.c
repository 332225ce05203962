/* One token of a language model in one call: a team of threads goes through five phases a layer (steps 2 to 8 of
   ref.llm), and through the head (9).

   1. QKV        normed x times Wq, Wk and Wv, and biases
   2. attention  norms of heads, positions, the newest keys and values into the cache; a kv head and a part of its tokens
                 is a task
   3. back       the parts put together, times Wo, added to x
   4. feed       normed x times gate and up, silu(gate) · up
   5. down       times W_down, added to x

   What is short is computed by every thread for itself (norms, the merge of attention's parts): another phase, with its
   wait, would take longer.

   addresses  for each layer those of PER_LAYER arrays (0: none); then those of the last norm and of the head
   sizes      see Sizes
   turn       cos, then sin, of the token's position: head_dim / 2 floats each
   scratch    threads times max(hidden, n_heads · head_dim), then the heads of Q, K and V, ffn, and for each part of
              attention n_heads · (head_dim + 2) floats; each in whole cache lines, at the beginning of one */
#include "phases.h"
#include "tile.h"
enum { ATTENTION_NORM, WQ, WK, WV, BIAS, Q_NORM, K_NORM, WO, FFN_NORM, GATE, UP, DOWN, KEYS, VALUES, PER_LAYER };

typedef struct {
    int64_t layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab, room, position, first, parts;
} Sizes;

typedef struct {
    Team team;
    Sizes s;
    const uint64_t *addresses;
    const float *turn;
    float *x, *scratch, *heads, *glu, *partial, *logits, eps;
    int64_t own; /* floats of scratch that each thread has for itself */
} Token;

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

/* A kv head and a part of its tokens: a task of attention.c's first step. The part with the newest token puts it
   into the cache. */
static void attend_part(const Token *t, int64_t kv_head, int64_t part, const uint64_t *at, float *q) {
    const Sizes *s = &t->s;
    const int64_t d = s->head_dim, group = s->n_heads / s->n_kv_heads, end = s->position + 1, row = d + 2;
    const int64_t each = (end - s->first + s->parts - 1) / s->parts;
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

/* Phase 2. */
static void attend(Token *t, int phase, int me, const uint64_t *at, float *q) {
    const int64_t parts = t->s.parts, all = t->s.n_kv_heads * parts;
    for (Span span = first_span(&t->team, me, all, 1); span.begin < span.end; span = take(&t->team, phase, all, 1))
        for (int64_t task = span.begin; task < span.end; task++) attend_part(t, task / parts, task % parts, at, q);
    meet(&t->team, phase);
}

static Product qkv_of(const Sizes *s, const uint64_t *at) {
    const int64_t kv_rows = s->n_kv_heads * s->head_dim;
    return product_of(at + WQ, s->n_heads * s->head_dim, kv_rows, kv_rows, s->hidden, 0);
}

/* A layer's five phases. mine: max(hidden, n_heads · head_dim) floats of this thread's own */
static int layer(Token *t, int phase, int me, const uint64_t *at, const Product *next, float *mine) {
    const Sizes *s = &t->s;
    const int64_t q_rows = s->n_heads * s->head_dim;
    const Product qkv = qkv_of(s, at);
    const Product back = product_of(at + WO, s->hidden, 0, 0, q_rows, 0);
    const Product feed = product_of(at + GATE, s->ffn, s->ffn, 0, s->hidden, 1);
    const Product down = product_of(at + DOWN, s->hidden, 0, 0, s->ffn, 0);
    norm(t->x, (const float *)at[ATTENTION_NORM], mine, s->hidden, t->eps);
    multiply(&t->team, phase++, me, &qkv, &back, mine, t->heads, (const float *)at[BIAS], 0); /* 1 */
    attend(t, phase++, me, at, mine);                                                  /* 2 */
    merge(t->partial, mine, s->n_heads, s->head_dim, s->parts);
    multiply(&t->team, phase++, me, &back, &feed, mine, t->x, 0, 1); /* 3 */
    norm(t->x, (const float *)at[FFN_NORM], mine, s->hidden, t->eps);
    multiply(&t->team, phase++, me, &feed, &down, mine, t->glu, 0, 0); /* 4 */
    multiply(&t->team, phase++, me, &down, next, t->glu, t->x, 0, 1);  /* 5 */
    return phase;
}

/* What a thread of the team does of a token. */
static void work(void *token, int me) {
    Token *t = token;
    const Sizes *s = &t->s;
    const uint64_t *last = t->addresses + s->layers * PER_LAYER, head_at[3] = {last[1], 0, 0};
    const Product head = product_of(head_at, s->vocab, 0, 0, s->hidden, 0);
    float *mine = t->scratch + me * t->own;
    int phase = 0;
    for (const uint64_t *at = t->addresses; at < last; at += PER_LAYER) {
        const Product next = at + PER_LAYER < last ? qkv_of(s, at + PER_LAYER) : head;
        phase = layer(t, phase, me, at, &next, mine);
    }
    norm(t->x, (const float *)last[0], mine, s->hidden, t->eps);
    multiply(&t->team, phase, me, &head, 0, mine, t->logits, 0, 0);
}

void token(const uint64_t *addresses, const int64_t *sizes, const float *turn, float *x, float *scratch, float *logits,
           float eps, int threads) {
    Token t = {.addresses = addresses, .turn = turn, .x = x, .scratch = scratch, .logits = logits, .eps = eps};
    memcpy(&t.s, sizes, sizeof t.s);
    const Sizes *s = &t.s;
    const int64_t q_rows = s->n_heads * s->head_dim, kv_rows = s->n_kv_heads * s->head_dim;
    t.own = lines(s->hidden > q_rows ? s->hidden : q_rows);
    t.heads = scratch + threads * t.own;
    t.glu = t.heads + lines(q_rows + 2 * kv_rows);
    t.partial = t.glu + lines(s->ffn);
    run(&t.team, threads, work, &t);
}
