/* From one layer's in_proj to the next one's, for one token, in one launch: the state's step, out_proj behind the gated
   norm, added to the residual stream, and in_proj of the next layer with its convolution's step.

   projected (2 INNER + 2 DSTATE + HEADS,): z, x, B, C, dt of this layer, x, B and C behind the convolution; written for
   the next. mixed (INNER,): y · silu(z). residual (HIDDEN,): the stream, in float, in place
   state (HEADS, HEADDIM, DSTATE), written in place; A, D, dt_bias (HEADS,); gated_weight (INNER,), W_out (HIDDEN,
   INNER)
   norm_weight (HIDDEN,), W_in (2 INNER + 2 DSTATE + HEADS, HIDDEN), conv_weight (CHANNELS, WIDTH), conv_bias
   (CHANNELS,) or null and window (WIDTH - 1, CHANNELS), written in place, of the layer behind it; W_in null: none
   W_ahead: W_out of that layer, or null: some of it is brought into L2. turn (1,): 0 before the first launch

   New since chapter 05's one launch a layer: what ends a launch and begins the next costs a block's end, a block's
   beginning and a first load, two microseconds with PDL in which memory rests. Here that is paid once a layer and not
   three times. Within the launch blocks hand vectors on through L2, twice, which takes as long; but the ring goes on.

   States are read before the wait, into registers, and so is the window: no launch between this token's first and this
   one writes them. What waits for y waits for no state to be stored: y is handed on first.

   Moves the weights once and the state twice. Compile with SIZES (layer_rows.cuh) and STATE. Launch with S::THREADS + 32
   threads on no more blocks than the card has multiprocessors: they wait for each other. Shared memory: S::STAGES * SLOT
   bytes, and behind them S::PITCH floats for each row of a block, in whole groups. */
#include "../device/grid.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "layer_rows.cuh"
#include "state_words.cuh"
#include "window.cuh"

using State = STATE; // float, __half or __nv_bfloat16

/* Blocks hand on a vector: device/grid.cuh's barrier in two halves, of the threads that multiply. */
struct Handover {
    unsigned *turn;
    const int thread;
    unsigned before = 0;

    /* What the block has written is to be seen. */
    __device__ __forceinline__ void give() {
        named_barrier<S::THREADS>(1);
        if (thread == 0) before = add_acquire_release(turn, blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1));
    }
    /* Until all blocks have given. */
    __device__ __forceinline__ void take() const {
        if (thread == 0)
            while (!((before ^ load_acquire(turn)) & 0x80000000u)) {
            }
        named_barrier<S::THREADS>(1);
    }
};

/* What a thread has of the states: LANES neighbouring lanes share a row, as in state_step.cu. */
struct States {
    static constexpr int VEC = 16 / sizeof(State), WORDS = (S::DSTATE + S::LANES * VEC - 1) / (S::LANES * VEC);
    static_assert(S::DSTATE % VEC == 0, "rows of states are whole words");
    const int lane, first, end; // the thread's first row; the end of the block's
    float h[S::STATE_ROWS][WORDS][VEC];

    __device__ __forceinline__ States(int thread, Share rows)
        : lane(thread % S::LANES), first(rows.first + thread / S::LANES), end(rows.first + rows.count) {}

    __device__ __forceinline__ int row(int r) const { return first + r * (S::THREADS / S::LANES); }
    /* Of rows that there are not, the block's last. */
    __device__ __forceinline__ int some_row(int r) const { return min(row(r), max(end - 1, 0)); }
    __device__ __forceinline__ int column(int w) const { return (w * S::LANES + lane) * VEC; }

    __device__ __forceinline__ void load(const State *state) {
#pragma unroll
        for (int r = 0; r < S::STATE_ROWS; r++)
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                const State *from = state + (long long)row(r) * S::DSTATE + column(w);
                const bool there = row(r) < end && column(w) < S::DSTATE;
                widen_word(there ? load_word_streaming<VEC>(from) : Word<State, VEC>{}, h[r][w]);
            }
    }
    __device__ __forceinline__ void store(State *state) const {
#pragma unroll
        for (int r = 0; r < S::STATE_ROWS; r++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                if (row(r) < end && column(w) < S::DSTATE)
                    store_word(state + (long long)row(r) * S::DSTATE + column(w), h[r][w], 1);
    }
    /* h = decay h + add b. Returns the lane's part of h c. */
    __device__ __forceinline__ float move(int r, float decay, float add, const float (&b)[WORDS][VEC],
                                          const float (&c)[WORDS][VEC]) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                h[r][w][i] = decay * h[r][w][i] + add * b[w][i];
                sum += h[r][w][i] * c[w][i];
            }
#pragma unroll
        for (int mask = S::LANES / 2; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        return sum;
    }
    /* A row of B or C; zeros past the end. */
    __device__ __forceinline__ void load_row(const T *from, float (&to)[WORDS][VEC]) const {
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int part = 0; part < VEC; part += 4) {
                const int n = column(w) + part;
                const uint2 v = n < S::DSTATE ? __ldcg(reinterpret_cast<const uint2 *>(from + n)) : uint2{};
                const float2 low = unpack(v.x, T()), high = unpack(v.y, T());
                to[w][part] = low.x, to[w][part + 1] = low.y, to[w][part + 2] = high.x, to[w][part + 3] = high.y;
            }
    }
};

/* What other blocks have written in this launch or the one before: past L1. */
__device__ __forceinline__ float load_number(const T *at) {
    const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short *>(at));
    return (float)reinterpret_cast<const T &>(bits);
}

/* Numbers of the state space, of each head. */
struct Heads {
    const float *A, *D, *dt_bias;
    float lowest, highest; // of dt

    /* y · silu(z) of the block's rows. */
    __device__ __forceinline__ void move(States &states, const T *projected, T *mixed) const {
        const T *x = projected + S::INNER, *B = x + S::INNER, *C = B + S::DSTATE, *dt = C + S::DSTATE;
        float b[States::WORDS][States::VEC], c[States::WORDS][States::VEC];
        states.load_row(B, b);
        states.load_row(C, c);
#pragma unroll
        for (int r = 0; r < S::STATE_ROWS; r++) {
            const int row = states.some_row(r), head = row / S::HEADDIM;
            const float at = load_number(x + row), gate = load_number(projected + row);
            const float raw = load_number(dt + head) + dt_bias[head], plus = raw > 20 ? raw : log1pf(expf(raw));
            const float step = fminf(fmaxf(plus, lowest), highest);
            const float y = states.move(r, expf(A[head] * step), step * at, b, c) + D[head] * at;
            if (states.lane == 0 && states.row(r) < states.end) mixed[row] = (T)(y * silu(gate));
        }
    }
};

/* W_in's rows behind their sums, and the convolution's step of those that are channels. */
struct Entrance {
    const Window<T, S::WIDTH> window;
    const Share rows;
    const int thread;
    float before = 0, tap = 0; // of the thread's first row; of others, later

    __device__ __forceinline__ void look(int row) { before = window.before(row), tap = window.newest_tap(row); }
    __device__ __forceinline__ void look_ahead() {
        if (thread < rows.count && window.has(rows.first + thread)) look(rows.first + thread);
    }
    __device__ __forceinline__ void store(const Multiplier &sums, float scale, T *projected) {
        for (int i = thread; i < rows.count; i += S::THREADS) {
            const int row = rows.first + i;
            const T now = (T)(sums.sum(i) * scale);
            if (!window.has(row)) {
                projected[row] = now;
                continue;
            }
            if (i != thread) look(row);
            projected[row] = window.after(row, before, tap, now);
        }
    }
};

extern "C" __global__ void __launch_bounds__(S::THREADS + 32, 1)
layer(T *projected, T *mixed, float *residual, State *state, const float *A, const float *D, const float *dt_bias,
      const T *gated_weight, const T *W_out, const T *norm_weight, const T *W_in, const float *conv_weight,
      const float *conv_bias, T *window, const T *W_ahead, unsigned *turn, float eps, float lowest, float highest) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Ring<S::STAGES> ring;
    __shared__ float squares[S::WARPS];
    let_next_kernel_start();
    constexpr int IN_ROWS = S::INNER + S::CHANNELS + S::HEADS;
    const int thread = threadIdx.x;
    if (thread == S::THREADS) ring.init(1, S::WARPS);
    __syncthreads();
    if (thread >= S::THREADS) {
        if (thread == S::THREADS) {
            Filler filler = {ring, shared_address(shared)};
            filler.ask_for<InnerRows>(W_out, S::HIDDEN);
            if (W_in) filler.ask_for<HiddenRows>(W_in, IN_ROWS);
            if (W_ahead) filler.bring_near<InnerRows>(W_ahead, S::HIDDEN);
        }
        wait_for_previous_kernel();
        return;
    }
    float *partial = reinterpret_cast<float *>(shared + S::STAGES * SLOT);
    Multiplier rows = {ring, shared, partial, squares, thread};
    Handover blocks = {turn, thread};

    // The state's step
    States states(thread, Share(S::INNER));
    states.load(state);
    Part<InnerRows> y;
    y.load_weight(gated_weight, thread);
    wait_for_previous_kernel();
    Heads{A, D, dt_bias, lowest, highest}.move(states, projected, mixed);
    blocks.give();
    states.store(state);

    // out_proj
    const Share out(S::HIDDEN);
    float before = thread < out.count ? __ldcg(residual + out.first + thread) : 0; // so that none waits for it behind
    blocks.take();
    y.load(mixed, thread);
    rows.multiply(y, out.count);
    float scale = rows.scale(S::INNER, eps);
    for (int i = thread; i < out.count; i += S::THREADS) {
        if (i != thread) before = __ldcg(residual + out.first + i);
        residual[out.first + i] = before + scale * rows.sum(i);
    }
    if (!W_in) return;
    blocks.give();

    // in_proj of the next layer
    Part<HiddenRows> x;
    x.load_weight(norm_weight, thread);
    Entrance entrance = {{conv_weight, conv_bias, window, S::INNER, S::CHANNELS}, Share(IN_ROWS), thread};
    entrance.look_ahead();
    blocks.take();
    x.load(residual, thread);
    rows.multiply(x, entrance.rows.count);
    scale = rows.scale(S::HIDDEN, eps);
    entrance.store(rows, scale, projected);
}
