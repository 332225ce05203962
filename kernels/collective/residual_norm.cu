/* residual += the sum of x over devices, out = its RMSNorm, in one launch: what stands between two products of a layer.

   x (rows, cols): this device's part of the sum. residual (rows, cols), weight (cols,) and out (rows, cols) are the
   same on all devices, residual and out afterwards too. A block has a row, ROW_WORDS words of it for each thread;
   mail: as in mail.cuh, a box of ROW_WORDS * MAX_THREADS words.

   Numbered as in ref/collective.py:
   1. send x, 2. add what comes to the residual, round and keep it; 3. the mean of its squares; 4. scale and store.

   Against an exchange and then a norm, a launch is gone, and a way through memory: the weight is here before the
   message, and the residual while the message is on its way.

   Moves: (devices - 1) * rows * cols numbers over the link; 4 * rows * cols + cols in own memory. */
#include "../device/reduce.cuh"
#include "sentinel.cuh"

constexpr int MAX_THREADS = 512, MAX_WARPS = MAX_THREADS / 32;

__device__ __forceinline__ float block_sum(float v, float *of_warp) {
    const int lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? of_warp[lane] : 0);
}

/* Steps 3 and 4: the norm of a row that the block's threads hold. */
__device__ __forceinline__ void store_norm(const uint4 (&row)[ROW_WORDS], const uint4 (&weights)[ROW_WORDS],
                                           Message out, float eps) {
    __shared__ float of_warp[MAX_WARPS];
    float square = 0;
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) {
        float v[VEC];
        widen_word(row[w], v, T());
#pragma unroll
        for (int i = 0; i < VEC; i++) square += v[i] * v[i];
    }
    const float scale = rsqrtf(block_sum(square, of_warp) / out.n + eps);
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) {
        const int k = w * blockDim.x + threadIdx.x;
        float v[VEC], weight[VEC];
        widen_word(row[w], v, T());
        widen_word(weights[w], weight, T());
#pragma unroll
        for (int i = 0; i < VEC; i++) v[i] *= scale * weight[i];
        if (k < out.words()) out.store(k, round_word(v, T()));
    }
}

__device__ __forceinline__ Message row_of(const T *x, int cols, int wide) {
    return {const_cast<T *>(x) + (long long)blockIdx.x * cols, cols, wide};
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
residual_norm(const T *x, T *residual, const T *weight, T *out, uint4 *mail, Peers mails, uint2 *numbers,
              Told told, int rank, int limit, int cols, float eps, int wide) {
    let_next_kernel_start();
    const Message part = row_of(x, cols, wide), kept = row_of(residual, cols, wide);
    uint4 weights[ROW_WORDS], own[ROW_WORDS], row[ROW_WORDS];
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++)
        weights[w] = Message{const_cast<T *>(weight), cols, wide}.load(w * blockDim.x + threadIdx.x);
    wait_for_previous_kernel();
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) own[w] = sendable(part.load(w * blockDim.x + threadIdx.x));
    const Exchange now = next_exchange(numbers);
    bool failed = now.failed;
    constexpr int BOX = ROW_WORDS * MAX_THREADS;
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) { // 1
        const int k = w * blockDim.x + threadIdx.x;
#pragma unroll
        for (int r = 0; r < DEVICES; r++)
            if (r != rank && k < part.words() && !failed)
                send((uint4 *)mails.of[r] + box_of(now.number, rank, BOX) + k, own[w]);
    }
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) row[w] = kept.load(w * blockDim.x + threadIdx.x);
    count_exchange(numbers, now.number);
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) { // 2
        const int k = w * blockDim.x + threadIdx.x;
        uint4 words[DEVICES];
#pragma unroll
        for (int r = 0; r < DEVICES; r++) {
            words[r] = own[w];
            if (r != rank && k < part.words() && !failed)
                failed |= !take(mail + box_of(now.number, r, BOX) + k, words[r], r, limit, told);
        }
        float sum[VEC], before[VEC];
        add_words(words, sum);
        widen_word(row[w], before, T());
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += before[i];
        row[w] = round_word(sum, T());
        if (k < part.words() && !failed) kept.store(k, row[w]);
    }
    store_norm(row, weights, row_of(out, cols, wide), eps);
    note_failure(numbers, failed);
}

/* The same without an exchange, of an x that is summed already: for more rows than there are boxes. */
extern "C" __global__ void __launch_bounds__(MAX_THREADS)
residual_norm_alone(const T *x, T *residual, const T *weight, T *out, int cols, float eps, int wide) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Message part = row_of(x, cols, wide), kept = row_of(residual, cols, wide);
    uint4 weights[ROW_WORDS], row[ROW_WORDS];
#pragma unroll
    for (int w = 0; w < ROW_WORDS; w++) {
        const int k = w * blockDim.x + threadIdx.x;
        float sum[VEC], before[VEC];
        widen_word(part.load(k), sum, T());
        widen_word(kept.load(k), before, T());
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += before[i];
        row[w] = round_word(sum, T());
        weights[w] = Message{const_cast<T *>(weight), cols, wide}.load(k);
        if (k < part.words()) kept.store(k, row[w]);
    }
    store_norm(row, weights, row_of(out, cols, wide), eps);
}
