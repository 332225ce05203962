/* One token of a Mamba-2 in one call: a team of threads goes through three phases a layer (the steps of ref.mamba2), and
   through the head.

   1. in     normed x times W_in: z, x, B, C, dt
   2. state  convolution and silu, step sizes, states; a head is a task
   3. out    y · silu(z), normed, times W_out, added to x; the convolution's state moves on by a token

   What is short is computed by every thread for itself: norms, and B and C, which all heads of a group read.

   addresses  for each layer those of PER_LAYER arrays (0: none); then those of the last norm and of the head
   sizes      see Sizes
   limits     the least and the largest step size
   scratch    for each thread max(hidden, d_inner) + 2 · ngroups · dstate + headdim floats; then in_rows, then d_inner;
              each in whole cache lines, at the beginning of one */
#include "phases.h"
#include "state.h"
enum { NORM, W_IN, B_IN, CONV_WEIGHT, CONV_BIAS, DT_BIAS, A, D, GATED_NORM, W_OUT, B_OUT, CONV, SSM, PER_LAYER };

typedef struct {
    int64_t layers, hidden, nheads, headdim, dstate, ngroups, width, vocab;
} Sizes;

typedef struct {
    Team team;
    Sizes s;
    const uint64_t *addresses;
    const float *limits;
    int64_t d_inner, channels, in_rows;
    float *x, *scratch, *projected, *y, *logits, eps;
    int64_t own; /* floats of scratch that each thread has for itself */
} Token;

static int64_t wide_of(const Token *t) { return t->s.hidden > t->d_inner ? t->s.hidden : t->d_inner; }

static const float *floats(uint64_t address) { return (const float *)address; }

/* Channels from `from` on, `count` of them: what the convolution makes of their last inputs, and silu of it. */
static void convolve(const Token *t, const uint64_t *at, int64_t from, int64_t count, float *out) {
    const float *weight = floats(at[CONV_WEIGHT]), *bias = floats(at[CONV_BIAS]), *conv = floats(at[CONV]);
    const float *now = t->projected + t->d_inner;
    const int64_t width = t->s.width;
    for (int64_t i = 0, c = from; i < count; i++, c++) {
        float total = now[c] * weight[c * width + width - 1] + (bias ? bias[c] : 0);
        for (int64_t w = 0; w < width - 1; w++) total += conv[w * t->channels + c] * weight[c * width + w];
        out[i] = silu(total);
    }
}

/* The step size of a head, behind bias, softplus and limits. NaN stays NaN. */
static float step_size(const Token *t, const uint64_t *at, int64_t head) {
    float dt = t->projected[t->d_inner + t->channels + head] + floats(at[DT_BIAS])[head];
    dt = dt > 20 ? dt : log1pf(expf(dt));
    return dt < t->limits[0] ? t->limits[0] : dt > t->limits[1] ? t->limits[1] : dt;
}

/* A head's state and what it says; the head's inputs are convolved into x. B, C: of all groups */
static void step_head(const Token *t, const uint64_t *at, int64_t head, const float *B, const float *C, float *x) {
    const Sizes *s = &t->s;
    const int64_t first = head * s->headdim, at_group = head / (s->nheads / s->ngroups) * s->dstate;
    const float dt = step_size(t, at, head), decay = expf(floats(at[A])[head] * dt);
    float *state = (float *)at[SSM] + first * s->dstate;
    convolve(t, at, first, s->headdim, x);
    for (int64_t p = 0; p < s->headdim; p++)
        t->y[first + p] = row(state + p * s->dstate, B + at_group, C + at_group, s->dstate, decay, dt * x[p]) +
                          floats(at[D])[head] * x[p];
}

/* Phase 2. own: 2 · ngroups · dstate + headdim floats */
static void step_states(Token *t, int phase, int me, const uint64_t *at, const Product *next, float *own) {
    const int64_t states = t->s.ngroups * t->s.dstate, all = t->s.nheads;
    float *B = own, *C = own + states, *x = own + 2 * states;
    convolve(t, at, t->d_inner, 2 * states, B);
    for (Span heads = first_span(&t->team, me, all, 1); heads.begin < heads.end; heads = take(&t->team, phase, all, 1))
        for (int64_t head = heads.begin; head < heads.end; head++) step_head(t, at, head, B, C, x);
    ask_for_first(&t->team, me, next);
    meet(&t->team, phase);
}

/* A thread's share of the channels: the oldest input goes, the newest comes. */
static void move_on(const Token *t, int me, const uint64_t *at) {
    float *conv = (float *)at[CONV];
    const int64_t older = t->s.width - 2, each = (t->channels + t->team.threads - 1) / t->team.threads;
    const int64_t from = me * each, to = from + each < t->channels ? from + each : t->channels;
    if (from >= to) return;
    for (int64_t w = 0; w < older; w++)
        memcpy(conv + w * t->channels + from, conv + (w + 1) * t->channels + from, (to - from) * sizeof *conv);
    memcpy(conv + older * t->channels + from, t->projected + t->d_inner + from, (to - from) * sizeof *conv);
}

static void gated_norm(const Token *t, const uint64_t *at, float *out) {
    const int64_t each = t->d_inner / t->s.ngroups;
    for (int64_t i = 0; i < t->d_inner; i++) out[i] = t->y[i] * silu(t->projected[i]);
    for (int64_t first = 0; first < t->d_inner; first += each)
        norm(out + first, floats(at[GATED_NORM]) + first, out + first, each, t->eps);
}

/* A layer's three phases. mine: this thread's scratch */
static int layer(Token *t, int phase, int me, const uint64_t *at, const Product *next, float *mine) {
    const Sizes *s = &t->s;
    const Product in = product_of(at + W_IN, t->in_rows, 0, 0, s->hidden, 0);
    const Product out = product_of(at + W_OUT, s->hidden, 0, 0, t->d_inner, 0);
    norm(t->x, floats(at[NORM]), mine, s->hidden, t->eps);
    multiply(&t->team, phase++, me, &in, 0, mine, t->projected, floats(at[B_IN]), 0); /* 1 */
    step_states(t, phase++, me, at, &out, mine + wide_of(t));                         /* 2 */
    move_on(t, me, at);
    gated_norm(t, at, mine);
    multiply(&t->team, phase++, me, &out, next, mine, t->x, floats(at[B_OUT]), 1); /* 3 */
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
        const Product in = product_of(at + PER_LAYER + W_IN, t->in_rows, 0, 0, s->hidden, 0);
        phase = layer(t, phase, me, at, at + PER_LAYER < last ? &in : &head, mine);
    }
    norm(t->x, floats(last[0]), mine, s->hidden, t->eps);
    multiply(&t->team, phase, me, &head, 0, mine, t->logits, 0, 0);
}

void token(const uint64_t *addresses, const int64_t *sizes, const float *limits, float *x, float *scratch,
           float *logits, float eps, int threads) {
    Token t = {.addresses = addresses, .limits = limits, .x = x, .scratch = scratch, .logits = logits, .eps = eps};
    memcpy(&t.s, sizes, sizeof t.s);
    const Sizes *s = &t.s;
    t.d_inner = s->nheads * s->headdim;
    t.channels = t.d_inner + 2 * s->ngroups * s->dstate;
    t.in_rows = t.d_inner + t.channels + s->nheads;
    t.own = lines(wide_of(&t) + 2 * s->ngroups * s->dstate + s->headdim);
    t.projected = scratch + threads * t.own;
    t.y = t.projected + lines(t.in_rows);
    run(&t.team, threads, work, &t);
}
