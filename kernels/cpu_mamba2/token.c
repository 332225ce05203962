/* One token of a Mamba-2 in one call: a team of threads goes through three phases a layer (the steps of ref.mamba2), and
   through the head.

   1. in     normed x times W_in: z, x, B, C, dt
   2. state  convolution and silu, step sizes, states; a head is a task
   3. out    y · silu(z), normed, times W_out, added to x; the convolution's state moves on by a token

   What is short is computed by every thread for itself: norms, and B and C, which all heads of a group read.

   addresses  for each layer those of PER_LAYER arrays (0: none); then those of the last norm and of the head
   sizes      see Sizes
   limits     the least and the largest step size
   scratch    for each thread max(hidden, d_inner) + 2 · ngroups · dstate + headdim floats; then in_rows, then d_inner */
#ifdef _OPENMP
#include <omp.h>
#endif
#include "phases.h"
#include "state.h"
enum { NORM, W_IN, B_IN, CONV_WEIGHT, CONV_BIAS, DT_BIAS, A, D, GATED_NORM, W_OUT, B_OUT, CONV, SSM, PER_LAYER };

typedef struct {
    int64_t layers, hidden, nheads, headdim, dstate, ngroups, width, vocab;
} Sizes;

typedef struct {
    Team team;
    Sizes s;
    const float *limits;
    int64_t d_inner, channels;
    float *x, *projected, *y, eps;
} Token;

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

/* Phase 2. own: 2 · ngroups · dstate + headdim floats */
static void step_states(Token *t, int phase, int me, const uint64_t *at, const Product *next, float *own) {
    const Sizes *s = &t->s;
    const int64_t states = s->ngroups * s->dstate, group = s->nheads / s->ngroups;
    float *B = own, *C = own + states, *x = own + 2 * states;
    convolve(t, at, t->d_inner, 2 * states, B);
    for (int64_t head = me; head < s->nheads; head = take(&t->team, phase)) {
        const int64_t first = head * s->headdim, at_group = head / group * s->dstate;
        const float dt = step_size(t, at, head), decay = expf(floats(at[A])[head] * dt);
        float *state = (float *)at[SSM] + first * s->dstate;
        convolve(t, at, first, s->headdim, x);
        for (int64_t p = 0; p < s->headdim; p++)
            t->y[first + p] = row(state + p * s->dstate, B + at_group, C + at_group, s->dstate, decay, dt * x[p]) +
                              floats(at[D])[head] * x[p];
    }
    Eight there;
    if (unit_at(next, me * next->chunk, &there)) ask_for(there, next->cols);
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
    const int64_t wide = s->hidden > t->d_inner ? s->hidden : t->d_inner;
    const Product in = product_of(at + W_IN, t->d_inner + t->channels + s->nheads, 0, 0, s->hidden, 0);
    const Product out = product_of(at + W_OUT, s->hidden, 0, 0, t->d_inner, 0);
    norm(t->x, floats(at[NORM]), mine, s->hidden, t->eps);
    multiply(&t->team, phase++, me, &in, 0, mine, t->projected, floats(at[B_IN]), 0); /* 1 */
    step_states(t, phase++, me, at, &out, mine + wide);                               /* 2 */
    move_on(t, me, at);
    gated_norm(t, at, mine);
    multiply(&t->team, phase++, me, &out, next, mine, t->x, floats(at[B_OUT]), 1); /* 3 */
    return phase;
}

void token(const uint64_t *addresses, const int64_t *sizes, const float *limits, float *x, float *scratch,
           float *logits, float eps, int threads) {
    Token t = {.limits = limits, .x = x, .eps = eps};
    memcpy(&t.s, sizes, sizeof t.s);
    const Sizes *s = &t.s;
    t.d_inner = s->nheads * s->headdim;
    t.channels = t.d_inner + 2 * s->ngroups * s->dstate;
    const int64_t in_rows = t.d_inner + t.channels + s->nheads;
    const int64_t own = (s->hidden > t.d_inner ? s->hidden : t.d_inner) + 2 * s->ngroups * s->dstate + s->headdim;
    t.projected = scratch + threads * own;
    t.y = t.projected + in_rows;
    const uint64_t *last = addresses + s->layers * PER_LAYER, head_at[3] = {last[1], 0, 0};
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
            const Product following = product_of(at + more * PER_LAYER + W_IN, in_rows, 0, 0, s->hidden, 0);
            phase = layer(&t, phase, me, at, more ? &following : &head, mine);
        }
        norm(x, floats(last[0]), mine, s->hidden, eps);
        multiply(&t.team, phase, me, &head, 0, mine, logits, 0, 0);
    }
}
