/* Rung 1, naive: y = W x with one thread a row, the definition word for word.

   W (rows, cols) row-major, x (cols,), y (rows,), all of one type T; sums are fp32. Must move
   sizeof(T) * (rows*cols + cols + rows) bytes for 2*rows*cols flops: reading W is the limit.

   Thread t of a warp reads W[row + t][c]. Its neighbour reads one row further on, so the 32 words
   of one load lie in 32 sectors of 32 bytes, of which 4 (fp32) or 2 (16 bit) bytes are used at a
   time. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;

extern "C" __global__ void gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (long long c = 0; c < cols; c++) sum += (float)W[row * cols + c] * (float)x[c];
    y[row] = (T)sum;
}
