/* One token of the state space: every state is read, decayed, added to and written, and meets C on the way.

   1. dt = softplus(dt + dt_bias), within its limits
   2. h  = exp(A dt) h + dt x Bᵀ
   3. y  = C h + D x
   4. y  = y · silu(z)

   state (batch, nheads, headdim, dstate), written in place; x, z, y (batch, nheads, headdim); dt (batch, nheads);
   A, D, dt_bias (nheads,); B, C (batch, ngroups, dstate), of which heads_of_group heads share one. D, z and dt_bias may
   be null. x, dt, B, C and z may lie apart by strides from one sequence of the batch to the next.

   LANES neighbouring lanes share a row of the state, (head, channel), so that a load of a warp is as wide as rows are
   long, and a row's part of y is a sum over LANES. A thread has ROWS rows, all of them on their way before anything
   is waited for: states were written a token ago, so under PDL they come while the product before still runs.

   State of 8 bits: codes of one byte, and a scale for each row, the largest of its numbers over 127. It is found anew
   in every step, as h is all there before it is written; NaN in a row is its scale, so that all of it is NaN.

   Bytes: the states twice; all else is 1/headdim or 1/dstate of that. Compile with DTYPE, STATE, VEC (numbers in a
   word of the state: dstate and its address are multiples), PART (in a word of B and C), WORDS (of a row, a lane),
   LANES, ROWS. Launch (ceil(headdim / rows of a block), nheads, batch) blocks.

   Of use: many small blocks of few registers, as many as a multiprocessor takes, so that some always load. Of none: a
   block that goes from head to head with the next one's rows on their way and B and C in registers (13 % slower on an
   H200, as it has twice the registers), and several rows for a thread. */
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "state_words.cuh"
#include "step_size.cuh"

using T = DTYPE;
using State = STATE; // float, __half, __nv_bfloat16, or signed char with scales

/* Words of a row of B or C, as floats; zeros past the end. */
__device__ __forceinline__ void load_row(const T *from, int dstate, int lane, float (&to)[WORDS][VEC]) {
#pragma unroll
    for (int w = 0; w < WORDS; w++)
#pragma unroll
        for (int part = 0; part < VEC; part += PART) {
            const int n = (w * LANES + lane) * VEC + part;
            const Word<T, PART> word = n < dstate ? load_word<PART>(from + n) : Word<T, PART>{};
#pragma unroll
            for (int i = 0; i < PART; i++) to[w][part + i] = element(word, i);
        }
}

__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}
/* The larger of two, or NaN where one is NaN, which fmaxf would drop. An instruction since compute capability 8.0. */
__device__ __forceinline__ float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
#else
    return a != a ? a : b != b ? b : fmaxf(a, b);
#endif
}
__device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) v = larger(v, __shfl_xor_sync(~0u, v, mask));
    return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, ROWS == 1 ? 1280 / THREADS : 1)
state_step(State *state, float *scales, const T *x, const T *dt, const float *A, const T *B, const T *C, const float *D,
           const T *z, const float *dt_bias, T *y, int nheads, int headdim, int dstate, int heads_of_group,
           long long x_stride, long long dt_stride, long long B_stride, long long C_stride, long long z_stride,
           int dt_softplus, float lowest, float highest) {
    let_next_kernel_start();
    const int lane = threadIdx.x % LANES, apart = blockDim.x / LANES; // rows from one of a thread to its next
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int first = blockIdx.x * apart * ROWS + threadIdx.x / LANES;
    const long long of_head = ((long long)sequence * nheads + head) * headdim; // the number of the head's first row

    Word<State, VEC> words[ROWS][WORDS];
    float scale[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int p = first + r * apart;
        const State *row = state + (of_head + p) * dstate;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const int n = (w * LANES + lane) * VEC;
            words[r][w] = p < headdim && n < dstate ? load_word_streaming<VEC>(row + n) : Word<State, VEC>{};
        }
        scale[r] = scales && p < headdim ? scales[of_head + p] : 1;
    }
    const float rate = A[head], bias = dt_bias ? dt_bias[head] : 0, skip = D ? D[head] : 0;
    wait_for_previous_kernel();

    const int group = head / heads_of_group;
    float b[WORDS][VEC], c[WORDS][VEC], at[ROWS], gate[ROWS];
    const float with_bias = (float)dt[sequence * dt_stride + head] + bias;
    load_row(B + sequence * B_stride + (long long)group * dstate, dstate, lane, b);
    load_row(C + sequence * C_stride + (long long)group * dstate, dstate, lane, c);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int p = min(first + r * apart, headdim - 1);
        at[r] = (float)x[sequence * x_stride + (long long)head * headdim + p];
        gate[r] = z ? (float)z[sequence * z_stride + (long long)head * headdim + p] : 0;
    }
    const float step = step_size(with_bias, dt_softplus, lowest, highest), decay = expf(rate * step); // 1

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int p = first + r * apart;
        const float add = step * at[r];
        float h[WORDS][VEC], sum = 0, largest = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            widen_word(words[r][w], h[w]);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                h[w][i] = decay * (CODED ? h[w][i] * scale[r] : h[w][i]) + add * b[w][i]; // 2
                sum += h[w][i] * c[w][i];                                                 // 3
                if (CODED) largest = larger(largest, fabsf(h[w][i]));
            }
        }
        float per_code = 1;
        if (CODED) {
            largest = lanes_max(largest);
            per_code = largest > 0 ? 127 / largest : 0;
            __syncwarp(); // all lanes of the row have read its scale
            if (lane == 0 && p < headdim) scales[of_head + p] = largest / 127;
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const int n = (w * LANES + lane) * VEC;
            if (p < headdim && n < dstate) store_word(state + (of_head + p) * dstate + n, h[w], per_code);
        }
        sum = lanes_sum(sum) + skip * at[r];
        if (z) sum *= silu(gate[r]); // 4
        if (lane == 0 && p < headdim) y[of_head + p] = (T)sum;
    }
}
