/* out = RMSNorm of y · silu(z), in groups of cols columns: what stands between the state space and out_proj.

   y, z (tokens, groups · cols) with a stride from token to token, weight (groups · cols,), out (tokens, groups · cols).
   A block for each token and group: reads y and z once and writes out, 6 bytes a number. Compile with DTYPE and WORDS,
   16-byte words of a thread; launch (groups, tokens) blocks. */
#include "row_norm.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

extern "C" __global__ void __launch_bounds__(512)
gated_norm(const T *y, const T *z, const T *weight, T *out, int cols, long long y_token, long long z_token, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long token = blockIdx.x, at = (long long)blockIdx.y * cols;
    y += token * y_token + at, z += token * z_token + at;
    auto read = [&](int c, float(&row)[VEC]) {
        float gate[VEC];
        load_words(y + c, row);
        load_words(z + c, gate);
#pragma unroll
        for (int i = 0; i < VEC; i++) row[i] *= gate[i] * reciprocal_approx(1 + exp2_approx(-LOG2_E * gate[i]));
    };
    norm_row<WORDS>(read, weight + at, out + token * gridDim.y * cols + at, cols, eps);
}

extern "C" __global__ void gated_norm_any(const T *y, const T *z, const T *weight, T *out, int cols, long long y_token,
                                          long long z_token, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long token = blockIdx.x, at = (long long)blockIdx.y * cols;
    y += token * y_token + at, z += token * z_token + at;
    auto read_one = [&](int c) { return (float)y[c] * silu((float)z[c]); };
    norm_row_any(read_one, weight + at, out + token * gridDim.y * cols + at, cols, eps);
}
