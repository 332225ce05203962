/* The roots of a norm whose sums of squares are there: root[row] = 1 / √(Σ squares[row][j] / cols + eps), and
   rest[row], what is still to be multiplied with where x came times before[row]: root / before. before may be null, for
   1; root and rest are not before. squares (rows, parts). A thread for each row. */
#include "../device/pdl.cuh"

extern "C" __global__ void __launch_bounds__(256)
norm_root(const float *squares, const float *before, float *root, float *rest, int rows, int parts, int cols,
          float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < parts; i++) sum += squares[(long long)row * parts + i];
    const float found = rsqrtf(sum / cols + eps);
    root[row] = found;
    rest[row] = before ? found / before[row] : found;
}
