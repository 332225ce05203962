/* The residual stream's beginning: residual = E[token], in float or E's own type. E (vocab, hidden); a token outside of
   the table gives NaN. */
#include "../device/pdl.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void embed(const DTYPE *E, const long long *token, RESIDUAL *residual, /* (hidden,)
                                 */ long long vocab, int hidden) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = *token;
    if (i < hidden) residual[i] = row >= 0 && row < vocab ? /* the
        row, or NaN */ (RESIDUAL)(float)E[row * hidden + i] : (RESIDUAL)__int_as_float(0x7fffffff);
}
