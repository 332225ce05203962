/* root[row] = 1 / √(mean of x[row]² + eps): a norm's root alone, where a product's sums are scaled by it.
   x (rows, cols), cols a multiple of 8; a warp for each row. */
#include "../device/half2.cuh"
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"

using T = DTYPE;

extern "C" __global__ void __launch_bounds__(256)
row_root(const T *x, float *root, long long rows, int cols, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long row = (long long)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0;
    const uint4 *words = reinterpret_cast<const uint4 *>(x + row * cols);
#pragma unroll 4
    for (int w = threadIdx.x % 32; w < cols / 8; w += 32) {
        float v[8];
        widen(words[w], v, T());
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) root[row] = rsqrtf(sum / cols + eps);
}
