/* The whole layer in one launch: four phases over one stream of weights, with a barrier of the
   whole grid between them.

   1. qkv = [W_q; W_k; W_v] · norm(x)
   2. h = x + W_o · q
   3. a = silu(W_gate · norm(h)) · (W_up · norm(h))
   4. y = h + W_down · a

   x, attention_norm, ffn_norm, h, y (hidden,); a (ffn,); qkv (hidden + 2 · kv_rows,)
   W_q, W_o (hidden, hidden); W_k, W_v (kv_rows, hidden); W_gate, W_up (ffn, hidden); W_down (hidden, ffn)

   New since the four kernels: the ring does not end with a phase. While a block waits at a barrier,
   it already has the first weights of the next phase on their way. The groups of all phases are
   numbered in one go, so that no block has more than one group above the others. Fewest launches is
   not fastest: on an H200 this beats four launches, and loses to four launches with PDL. Its barriers
   are not what it loses by: without them it takes as long, and with PDL hardly less (trials.py).

   R, TILES for rows of `hidden` columns, R_F, TILES_F for those of `ffn`; DEPTH groups in the ring.
   The barrier needs every block of the grid to be running: launch at most one a multiprocessor, and
   no second such grid beside it. `barrier` is one word, 0 before the first launch, and left as the
   next one needs it. */
#include "stream.cuh"
constexpr int SLOT = R * TILES > R_F * TILES_F ? R * TILES : R_F * TILES_F; // words of a thread for a group
constexpr int HALF = R / 2;

struct Layer {
    const T *x, *attention_norm, *W_q, *W_k, *W_v, *W_o, *ffn_norm, *W_gate, *W_up, *W_down;
    T *qkv, *h, *a, *y;
    int hidden, kv_rows, ffn;
    float eps;
    int qkv_end, o_end, glu_end, down_end; // groups of the four phases, numbered in one go: the first of the next
    uint4 *ring;                           // the thread's place in it
    float *partial, *squares;              // in shared memory, as in stream.cuh
    int next;                              // the group to be asked for
    int group, slot;                       // the group to be multiplied, and where it is
    unsigned long long policy;

    /* Row r of a group of the first three phases; past the end of a matrix, its last row. */
    __device__ __forceinline__ const T *row(int group, int r) const {
        if (group >= o_end)
            return (r < HALF ? W_gate : W_up) + (long long)min((group - o_end) * HALF + r % HALF, ffn - 1) * hidden;
        if (group >= qkv_end) return W_o + (long long)min((group - qkv_end) * R + r, hidden - 1) * hidden;
        int row = min(group * R + r, hidden + 2 * kv_rows - 1);
        const T *W = W_q;
        if (row >= hidden + kv_rows) W = W_v, row -= hidden + kv_rows;
        else if (row >= hidden) W = W_k, row -= hidden;
        return W + (long long)row * hidden;
    }

    __device__ __forceinline__ const T *down_row(int group, int r) const {
        return W_down + (long long)min((group - glu_end) * R_F + r, hidden - 1) * ffn;
    }

    __device__ __forceinline__ void ask(int slot) {
        uint4 *to = ring + slot * SLOT * (int)blockDim.x;
        if (next < glu_end) ask_rows<R, TILES>(to, [&](int r) { return row(next, r); }, hidden / VEC, policy);
        else if (next < down_end)
            ask_rows<R_F, TILES_F>(to, [&](int r) { return down_row(next, r); }, ffn / VEC, policy);
        next += gridDim.x;
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    /* Multiply the block's groups up to the end of a phase: partial[l][w] as in stream.cuh. Returns their rows. */
    template <int M, int N> __device__ __forceinline__ int multiply(int end, const Piece<N> &x, int cols) {
        const int t = threadIdx.x;
        float *to = partial + t % 32 / (32 / M) * PITCH + t / 32;
        int rows = 0;
        for (; group < end; group += gridDim.x, to += M * PITCH, rows += M) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            float total = multiply_rows<M, N>(ring + slot * SLOT * (int)blockDim.x, x, cols / VEC);
            ask(slot);
            slot = slot + 1 < DEPTH ? slot + 1 : 0;
            if (t % (32 / M) == 0) *to = total;
        }
        __syncthreads();
        return rows;
    }

    __device__ __forceinline__ float sum(int l) const {
        float total = 0;
        for (int w = 0; w < blockDim.x / 32; w++) total += partial[l * PITCH + w];
        return total;
    }

    /* The squares of a vector, for norm_scale, which multiply's barrier makes visible. */
    __device__ __forceinline__ void normalise(Piece<TILES> &x, const Piece<TILES> &weight) const {
        float square = sum_over_warp(x.times(weight));
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    }
};

/* Wait until all blocks have come here, and see what they wrote. Every arrival adds 1; the first
   block's adds so much that the sum of all is 2^31, so that the top bit flips when the last one
   arrives: nobody needs to reset anything. */
__device__ __forceinline__ void arrive_and_wait(unsigned *barrier) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1), before, now;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(barrier), "r"(add) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(barrier) : "memory");
        while (!((before ^ now) & 0x80000000u));
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
layer(const T *x, const T *attention_norm, const T *W_q, const T *W_k, const T *W_v, const T *W_o, const T *ffn_norm,
      const T *W_gate, const T *W_up, const T *W_down, T *qkv, T *h, T *a, T *y, unsigned *barrier, int hidden,
      int kv_rows, int ffn, float eps) {
    extern __shared__ uint4 shared[];
    __shared__ float squares[MAX_WARPS];
    let_the_next_kernel_start();
    Layer p = {x, attention_norm, W_q, W_k, W_v, W_o, ffn_norm, W_gate, W_up,
               W_down, qkv, h, a, y, hidden, kv_rows, ffn, eps};
    p.qkv_end = (hidden + 2 * kv_rows + R - 1) / R;
    p.o_end = p.qkv_end + (hidden + R - 1) / R;
    p.glu_end = p.o_end + (ffn + HALF - 1) / HALF;
    p.down_end = p.glu_end + (hidden + R_F - 1) / R_F;
    p.ring = shared + threadIdx.x;
    p.partial = reinterpret_cast<float *>(shared + DEPTH * SLOT * (int)blockDim.x);
    p.squares = squares;
    p.next = p.group = blockIdx.x;
    p.slot = 0;
    p.policy = read_once();

    Piece<TILES> piece, weight;
    weight.load(attention_norm, hidden);
    for (int slot = 0; slot < DEPTH; slot++) p.ask(slot);
    wait_for_the_kernel_before();

    // 1: queries, keys, values
    int begin = p.group, rows;
    piece.load(x, hidden);
    p.normalise(piece, weight);
    rows = p.multiply<R, TILES>(p.qkv_end, piece, hidden);
    float scale = norm_scale(squares, hidden, eps);
    for (int l = threadIdx.x; l < rows; l += blockDim.x) {
        int row = (begin + l / R * gridDim.x) * R + l % R;
        if (row < hidden + 2 * kv_rows) qkv[row] = (T)(p.sum(l) * scale);
    }
    arrive_and_wait(barrier);

    // 2: output projection, residual
    begin = p.group - p.qkv_end;
    piece.load(qkv, hidden);
    rows = p.multiply<R, TILES>(p.o_end, piece, hidden);
    for (int l = threadIdx.x; l < rows; l += blockDim.x) {
        int row = (begin + l / R * gridDim.x) * R + l % R;
        if (row < hidden) h[row] = (T)((float)x[row] + p.sum(l));
    }
    weight.load(ffn_norm, hidden);
    arrive_and_wait(barrier);

    // 3: gate, up
    begin = p.group - p.o_end;
    piece.load(h, hidden);
    p.normalise(piece, weight);
    rows = p.multiply<R, TILES>(p.glu_end, piece, hidden);
    scale = norm_scale(squares, hidden, eps);
    for (int i = threadIdx.x; i < rows / 2; i += blockDim.x) {
        int l = i / HALF * R + i % HALF, row = (begin + l / R * gridDim.x) * HALF + i % HALF;
        if (row < ffn) a[row] = (T)(silu(p.sum(l) * scale) * p.sum(l + HALF) * scale);
    }
    arrive_and_wait(barrier);

    // 4: down projection, residual
    begin = p.group - p.glu_end;
    Piece<TILES_F> wide;
    wide.load(a, ffn);
    rows = p.multiply<R_F, TILES_F>(p.down_end, wide, ffn);
    for (int l = threadIdx.x; l < rows; l += blockDim.x) {
        int row = (begin + l / R_F * gridDim.x) * R_F + l % R_F;
        if (row < hidden) y[row] = (T)((float)__ldcg(h + row) + p.sum(l));
    }
}
