/* The whole layer in one launch: four phases over one stream of weights, with a barrier of the whole grid between them.

   1. qkv = [W_q; W_k; W_v] · norm(x)
   2. h = x + W_o · q
   3. a = silu(W_gate · norm(h)) · (W_up · norm(h))
   4. y = h + W_down · a

   x, attention_norm, ffn_norm, h, y (hidden,); a (ffn,); qkv (hidden + 2 · kv_rows,)
   W_q, W_o (hidden, hidden); W_k, W_v (kv_rows, hidden); W_gate, W_up (ffn, hidden); W_down (hidden, ffn)

   New since the four kernels: the ring does not end with a phase. While a block waits at a barrier, it already has the
   first weights of the next phase on their way. The groups of all phases are numbered in one go, so that no block has
   more than one group above the others. Fewest launches is not fastest: on an H200 this beats four launches, and loses
   to four launches with PDL. Its barriers are not what it loses by: without them it takes as long, and with PDL hardly
   less (trials.py).

   Rows of W_down are longer, so they have sizes of their own: FFN_WORDS and FFN_ROWS in Shape. The barrier needs every
   block of the grid to be running: launch at most one a multiprocessor, and no second such grid beside it. `barrier` is
   one word, 0 before the first launch, and left as the next one needs it. */
#include "../device/grid.cuh"
#include "products.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
layer(const T *x, const T *attention_norm, const T *W_q, const T *W_k, const T *W_v, const T *W_o, const T *ffn_norm,
      const T *W_gate, const T *W_up, const T *W_down, T *qkv_out, T *h, T *a, T *y, unsigned *barrier, int hidden,
      int kv_rows, int ffn, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_next_kernel_start();
    const int thread = threadIdx.x;
    const QkvProduct qkv = {W_q, W_k, W_v, hidden, kv_rows, hidden + 2 * kv_rows, hidden};
    const ResidualProduct<S::ROWS> o = {W_o, hidden, hidden};
    const GluProduct glu = {W_gate, W_up, ffn, hidden};
    const ResidualProduct<S::FFN_ROWS> down = {W_down, hidden, ffn};
    const int qkv_end = qkv.groups(), o_end = qkv_end + o.groups(), glu_end = o_end + glu.groups();

    const CachePolicy once = evict_first();
    Stream weights(shared, glu_end + down.groups(), thread, [=](int group, Slot slot) {
        auto row = [&](int r) {
            if (group >= o_end) return glu.row(group - o_end, r);
            if (group >= qkv_end) return o.row(group - qkv_end, r);
            return qkv.row(group, r);
        };
        auto down_row = [&](int r) { return down.row(group - glu_end, r); };
        if (group < glu_end) copy_rows<S::ROWS, S::WORDS>(slot, row, hidden, once, thread);
        else copy_rows<S::FFN_ROWS, S::FFN_WORDS>(slot, down_row, ffn, once, thread);
    });
    const Norm norm = {squares};
    ThreadVector<S::WORDS> part, weight; // a phase's vector
    weight.load(attention_norm, hidden, thread);
    weights.fill();
    wait_for_previous_kernel();

    // 1: queries, keys, values
    part.load(x, hidden, thread);
    norm.apply(part, weight, thread);
    const auto qkv_share = weights.share<S::ROWS>(qkv.rows);
    weights.multiply<S::ROWS>(qkv_share.groups, part, hidden);
    qkv.store(weights, qkv_share, qkv_out, norm.scale(hidden, eps));
    grid_barrier(barrier);

    // 2: output projection, residual
    part.load(qkv_out, hidden, thread);
    const auto o_share = weights.share<S::ROWS>(hidden);
    o.load(weights, o_share, x);
    weights.multiply<S::ROWS>(o_share.groups, part, hidden);
    o.store(weights, o_share, h);
    weight.load(ffn_norm, hidden, thread);
    grid_barrier(barrier);

    // 3: gate, up
    part.load(h, hidden, thread);
    norm.apply(part, weight, thread);
    const auto glu_share = weights.share<glu.HALF>(ffn);
    weights.multiply<S::ROWS>(glu_share.groups, part, hidden);
    glu.store(weights, glu_share, a, norm.scale(hidden, eps));
    grid_barrier(barrier);

    // 4: down projection, residual
    ThreadVector<S::FFN_WORDS> wide_part;
    wide_part.load(a, ffn, thread);
    const auto down_share = weights.share<S::FFN_ROWS>(hidden);
    down.load(weights, down_share, h);
    weights.multiply<S::FFN_ROWS>(down_share.groups, wide_part, ffn);
    down.store(weights, down_share, y);
}
