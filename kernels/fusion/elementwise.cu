/* What stands between the products of an unfused layer, each a launch of its own. a, b, out (n,). */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;

/* Programmatic dependent launch, where a card has it: the next kernel may start, this one waits for
   the one before. */
__device__ void take_turns() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void add(const T *a, const T *b, T *out, int n) {
    take_turns();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (T)((float)a[i] + (float)b[i]);
}

extern "C" __global__ void silu_mul(const T *gate, const T *up, T *out, int n) {
    take_turns();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (T)((float)gate[i] / (1 + __expf(-(float)gate[i])) * (float)up[i]);
}
