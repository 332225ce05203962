/* What stands between the products of an unfused layer, each a launch of its own. a, b, out (n,). */
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

extern "C" __global__ void add(const T *a, const T *b, T *out, int n) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (T)((float)a[i] + (float)b[i]);
}

extern "C" __global__ void silu_mul(const T *gate, const T *up, T *out, int n) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (T)(silu((float)gate[i]) * (float)up[i]);
}
