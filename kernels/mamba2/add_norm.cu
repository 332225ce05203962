/* residual += x, and out = RMSNorm of it: what stands between two layers of a prompt.

   x, out (tokens, cols), residual (tokens, cols) in RESIDUAL, float or the type of x; x may be null. A block for each
   token: with a float residual it moves 12 bytes a number. Compile with DTYPE, RESIDUAL and WORDS, a thread's words. */
#include "row_norm.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;
using Residual = RESIDUAL;

extern "C" __global__ void __launch_bounds__(512)
add_norm(const T *x, Residual *residual, const T *weight, T *out, int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long at = (long long)blockIdx.x * cols;
    residual += at;
    auto read = [&](int c, float(&row)[VEC]) {
        load_words(residual + c, row);
        if (!x) return;
        float add[VEC];
        load_words(x + at + c, add);
#pragma unroll
        for (int i = 0; i < VEC; i++) row[i] += add[i];
        store_words(residual + c, row);
    };
    norm_row<WORDS>(read, weight, out + at, cols, eps);
}

extern "C" __global__ void add_norm_any(const T *x, Residual *residual, const T *weight, T *out, int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long at = (long long)blockIdx.x * cols;
    residual += at;
    if (x)
        for (int c = threadIdx.x; c < cols; c += blockDim.x) /* each thread
            its own columns, here and below */ residual[c] = (Residual)((float)residual[c] + (float)x[at + c]);
    norm_row_any([&](int c) { return (float)residual[c]; }, weight, out + at, cols, eps);
}
