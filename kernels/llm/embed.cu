/* x = E[token]: the residual stream's beginning.

   E (vocab, hidden), token (1,) int64 on the card, x (hidden,). A token outside the table gives NaN: nothing is read
   there. */
#include "../device/pdl.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

extern "C" __global__ void embed(const T *E, const long long *token, T *x, long long vocab, int hidden) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long row = *token;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < hidden) x[i] = row >= 0 && row < vocab ? E[row * hidden + i] : (T)__int_as_float(0x7fffffff);
}
